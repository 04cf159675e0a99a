"""Live progress of a simulation: a line on a terminal, a cell's output in a notebook, else nothing."""

from __future__ import annotations

import sys
from html import escape
from typing import Any, Protocol

from fedquilt import progress


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
    """Shows the line on standard error: rewritten on a terminal, elsewhere now and then."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, line: str) -> None:
        """Show the line if it is time to."""
        self._last = line
        progress.LINE.at(line)

    def close(self) -> None:
        """Leave the last line, whether it was shown or not."""
        progress.LINE.end()
        if self._last:
            progress.LINE.say(self._last)


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


def display(wanted: bool | None) -> Display:
    """Display for this environment; True: lines even if standard error is no terminal; False: none."""
    if wanted is False:
        return Silent()
    if _in_notebook():
        from IPython import display as ipython

        return Notebook(ipython)
    return Terminal() if wanted or sys.stderr.isatty() else Silent()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process: looked up among loaded modules, so that none is imported."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
