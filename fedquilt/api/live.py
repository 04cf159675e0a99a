"""Live progress of a simulation: a line on a terminal, a cell's output in a notebook, else nothing."""

from __future__ import annotations

import sys
from html import escape
from typing import Any, Protocol


class Display(Protocol):
    """Progress line, overwritten by the next one."""

    def show(self, line: str) -> None:
        """Replace the line shown last."""
        ...

    def close(self) -> None:
        """Leave the last line where it stands, and show no further one."""
        ...


class Silent:
    """Display without output."""

    def show(self, line: str) -> None:
        """Ignore the line."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""


class Terminal:
    """Rewrites one line of standard error."""

    def show(self, line: str) -> None:
        """Rewrite the line by an ANSI erase and a carriage return."""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line with a newline."""
        print(file=sys.stderr, flush=True)


class Notebook:
    """Updates one output of a notebook's cell through IPython."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._handle: Any = None

    def show(self, line: str) -> None:
        """Replace the cell's output."""
        shown = self._ipython.HTML(f"<pre>{escape(line)}</pre>")
        if self._handle is None:
            self._handle = self._ipython.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """Do nothing: the output stays in the notebook."""


def display(progress: bool | None) -> Display:
    """Display for this environment; True: a line even if standard error is no terminal; False: none."""
    if progress is False:
        return Silent()
    if _in_notebook():
        from IPython import display as ipython

        return Notebook(ipython)
    return Terminal() if progress or sys.stderr.isatty() else Silent()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process: looked up among loaded modules, so that none is imported."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
