"""Progress of what takes longer than a few seconds: one live line on a terminal, elsewhere a line now and then.

A terminal's line is rewritten in place. A file or a pipe gets a first line after QUIET_S, then one after EVERY_S or a
quarter of the time that has passed, whichever is longer, but not later than RARELY_S: of an hour's work some thirty
lines.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TextIO

from fedquilt import threads, units

QUIET_S: Final = 5.0
EVERY_S: Final = 10.0
RARELY_S: Final = 300.0
SHARE: Final = 0.25  # of the time passed so far, between two lines
LIVE_S: Final = 0.1  # between two changes of a terminal's line
TICK_S: Final = 1.0


class Line:
    """One line about what is going on. Several threads may use it.

    Args:
        out: where it is shown; None: standard error as it is at that moment.
        live: whether the line is rewritten; None: if `out` is a terminal.
        clock: seconds.
        rarely_s: most seconds before the first line, and between two, where none is rewritten.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        rarely_s: float = RARELY_S,
    ) -> None:
        self._rarely_s = rarely_s
        self._given, self._live, self._clock, self._lock = out, live, clock, threading.Lock()
        self._begun_s: float | None = None  # of what goes on now
        self._due_s = 0.0
        self._drawn = ""
        self._first: tuple[float, float, float] | None = None  # total, what was done first, and when
        self._part: tuple[str, float, float] | None = None  # as of `part`

    @property
    def live(self) -> bool:
        """Whether the line is rewritten in place."""
        return self._out.isatty() if self._live is None else self._live

    def at(self, what: str | Callable[[], str], done: float | None = None, total: float | None = None) -> None:
        """Show what is being done, if it is time to.

        Args:
            what: in a few words; a function is called only if it is shown.
            done: how many of `total` are done; with both, how long the others may take is shown too.
            total: of what `done` counts.
        """
        with self._lock:
            now_s, live = self._clock(), self.live
            if self._begun_s is None:
                self._begun_s, self._due_s = now_s, now_s + (0.0 if live else min(QUIET_S, self._rarely_s))
            left = self._left(done, total, now_s)
            if now_s < self._due_s:
                return
            told = (what if isinstance(what, str) else what()) + left
            if live:
                self._due_s = now_s + LIVE_S
                self._draw(told)
            else:
                self._due_s = now_s + min(max(EVERY_S, SHARE * (now_s - self._begun_s)), self._rarely_s)
                print(told, file=self._out, flush=True)

    def part(self, now: str, done: float, total: float) -> None:
        """Note which part of the work goes on, for the line that `during` shows; nothing is shown outside of it.

        Args:
            now: in a few words.
            done: how many of `total` parts are done.
            total: number of parts.
        """
        self._part = (now, done, total)

    def elapsed(self, what: str, began_s: float) -> None:
        """Show what goes on, the part of it that `part` noted last, and for how long it has."""
        part, so_far = self._part, units.duration(self._clock() - began_s)
        if part is None:
            return self.at(f"{what}: {so_far} so far")
        now, done, total = part
        return self.at(f"{what}: {now}, {so_far} so far", done, total)

    def say(self, *lines: str) -> None:
        """Print lines that stay; on a terminal the live line goes, and is shown again below them with the next `at`."""
        with self._lock:
            self._wipe()
            for line in lines:
                print(line, file=self._out)
            self._out.flush()

    def aside(self, *lines: str) -> None:
        """Print lines that stay to standard output, which may be the same terminal."""
        with self._lock:
            self._wipe()
            self._out.flush()
            for line in lines:
                print(line, flush=True)

    def end(self) -> None:
        """Take the live line away: what went on is over."""
        with self._lock:
            self._wipe()
            self._out.flush()
            self._begun_s = self._first = self._part = None

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._given is None else self._given

    def _draw(self, told: str) -> None:
        wide = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be rewritten
        told = told if len(told) <= wide else f"{told[: wide - 1]}…"
        if told != self._drawn:
            print(f"\r\x1b[K{told}", end="", file=self._out, flush=True)
            self._drawn = told

    def _wipe(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=self._out)
            self._drawn, self._due_s = "", 0.0

    def _left(self, done: float | None, total: float | None, now_s: float) -> str:
        """How far it is, and how long the rest may take, by what has been done since the first call."""
        if done is None or total is None:
            return ""
        if self._first is None or self._first[0] != total or done < self._first[1]:
            self._first = (total, done, now_s)
        _, first, first_s = self._first
        told = f" ({done:g} of {total:g} done"
        if done > first:
            left_s = (now_s - first_s) / (done - first) * (total - done)
            told += f", about {units.duration(left_s)} left"
        return f"{told})"


LINE: Final = Line()
"""The line of this process on standard error: all that a command does shows itself here."""


def ticking(tell: Callable[[], None], every_s: float = TICK_S) -> AbstractContextManager[None]:
    """Call `tell` in a thread of its own again and again, while the body computes or waits without a word."""
    return threads.repeating(tell, every_s, "progress")


@contextmanager
def during(what: str, line: Line = LINE) -> Iterator[None]:
    """Show what goes on and for how long it has, while the body runs, and how far it is, if the body says `part`."""
    began_s = line._clock()
    try:
        with ticking(lambda: line.elapsed(what, began_s)):
            yield
    finally:
        line.end()
