"""How far a simulation is, while it runs: a line on a terminal, a cell's output in a notebook, else nothing."""

from __future__ import annotations

import sys
from html import escape
from typing import Any, Protocol


class Display(Protocol):
    """Shows one line that the next one replaces."""

    def show(self, line: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def show(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


class Terminal:
    """Rewrites one line of standard error."""

    def show(self, line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr, flush=True)


class Notebook:
    """Updates one output of a notebook's cell, in IPython's way."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._handle: Any = None

    def show(self, line: str) -> None:
        shown = self._ipython.HTML(f"<pre>{escape(line)}</pre>")
        if self._handle is None:
            self._handle = self._ipython.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        pass


def display(progress: bool | None) -> Display:
    """What fits where this runs; True: a line even if standard error is no terminal; False: silence."""
    if progress is False:
        return Silent()
    if _in_notebook():
        from IPython import display as ipython

        return Notebook(ipython)
    return Terminal() if progress or sys.stderr.isatty() else Silent()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: looked up among what is imported already, so that nothing is needed."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
