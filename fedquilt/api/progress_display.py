"""Live progress of a simulation, on a terminal or in a notebook."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from fedquilt.console import progress


class Display:
    """Progress that is not shown, and the base of those that are: each line replaces the one before."""

    def show(self, line: str, done: float | None = None, total: float | None = None) -> None: ...

    def close(self) -> None: ...


class TerminalDisplay(Display):
    """Display on standard error: rewritten on a terminal, printed at intervals elsewhere."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, line: str, done: float | None = None, total: float | None = None) -> None:
        self._last = line
        progress.LINE.show_status(line, done, total)

    def close(self) -> None:
        progress.LINE.end_operation()
        if self._last:
            progress.LINE.print_lines(self._last)


class NotebookDisplay(Display):
    """Display in the output of a notebook cell, through IPython."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._handle: Any = None

    def show(self, line: str, done: float | None = None, total: float | None = None) -> None:
        if total:
            line = f"{line} {progress.format_bar((done or 0.0) / total)}"
        shown = self._ipython.HTML(f"<pre>{escape(line)}</pre>")
        if self._handle is None:
            self._handle = self._ipython.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def make_display(wanted: bool | None) -> Display:
    """Return the display for this environment.

    With True, lines are printed even if standard error is not a terminal. With False, nothing is shown.
    """
    if wanted is False:
        return Display()
    if _is_notebook():
        from IPython import display as ipython

        return NotebookDisplay(ipython)
    return TerminalDisplay() if wanted or sys.stderr.isatty() else Display()


def _is_notebook() -> bool:
    # IPython is looked up among the loaded modules, and never imported.
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
