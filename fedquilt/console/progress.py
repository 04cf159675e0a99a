"""Progress of long operations: a live block on a terminal, otherwise lines at growing intervals.

A file or a pipe gets a first line after QUIET_S, and further ones after EVERY_S or a quarter of the elapsed time,
whichever is longer, but at most RARELY_S.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TextIO

from fedquilt.console import units
from fedquilt.host import process_resources

QUIET_S: Final = 5.0
EVERY_S: Final = 10.0
RARELY_S: Final = 300.0
SHARE: Final = 0.25  # of the time passed so far, between two lines
LIVE_S: Final = 0.1  # between two changes of a terminal's line
TICK_S: Final = 1.0
BAR: Final = 20  # columns
BAR_LEAST: Final = 5  # columns: a shorter bar is left out
EVIDENCE: Final = 2.0  # units of work, or this share of all, before a remaining time is shown
EVIDENCE_SHARE: Final = 0.2
MISJUDGED: Final = 1.5  # an estimate so many times the least one hides the remaining time, which must not climb


class LogHandler(logging.StreamHandler[TextIO]):
    """Log handler on standard error that removes live lines before each record."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def handle(self, record: logging.LogRecord) -> bool:
        with _LOCK:  # before the handler's own lock, as a function that makes the text of a line may log
            _wipe_lines()
            return super().handle(record)


class ProgressLine:
    """Progress of the current operation: lines that are rewritten in place. Thread-safe.

    Args:
        out: Output stream, or None for the current standard error.
        live: Whether lines are rewritten in place, or None to do so on a terminal that can.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given, self._live, self._clock = out, live, clock
        self._begun_s: float | None = None  # of what goes on now
        self._due_s = 0.0
        self._drawn: list[str] = []
        self._first: tuple[float, float, float] | None = None  # total, what was done first, and when
        self._left_s = math.inf  # the least estimate
        self._part: tuple[str, float, float] | None = None  # as of `set_part`

    @property
    def is_live(self) -> bool:
        return self._out.isatty() and os.environ.get("TERM") != "dumb" if self._live is None else self._live

    def show_status(self, what: str | Callable[[], str], done: float | None = None, total: float | None = None) -> None:
        """Show the current operation, unless the last line is too recent.

        Args:
            what: Short text, or a function that returns the text and is called only when shown. Further lines of it
                are for a terminal.
            done: Completed part of `total`. With both, the first line has a bar and the remaining time too.
            total: Amount of all work.
        """
        with _LOCK:
            now_s, live = self._clock(), self.is_live
            if self._begun_s is None:
                self._begun_s, self._due_s = now_s, now_s + (0.0 if live else QUIET_S)
            remaining = self._format_remaining(done, total, now_s)
            if now_s < self._due_s:
                return
            headline, *detail_lines = (what if isinstance(what, str) else what()).splitlines()
            if live:
                self._due_s = now_s + LIVE_S
                room = _measure_width() - len(headline) - len(remaining) - 1
                bar = f" {format_bar((done or 0.0) / total, room)}" if remaining and total and room >= BAR_LEAST else ""
                self._draw([headline + bar + remaining, *detail_lines])
            else:
                self._due_s = now_s + min(max(EVERY_S, SHARE * (now_s - self._begun_s)), RARELY_S)
                print(f"{headline}:{remaining}" if remaining else headline, file=self._out, flush=True)

    def set_part(self, now: str, done: float, total: float) -> None:
        """Set the current part of the work, which `show_progress` displays.

        Args:
            now: Short text.
            done: Number of completed parts.
            total: Number of parts.
        """
        self._part = (now, done, total)

    def show_elapsed(self, what: str, began_s: float) -> None:
        part, elapsed = self._part, units.format_duration(self._clock() - began_s)
        if part is None:
            return self.show_status(f"{what}: {elapsed} so far")
        now, done, total = part
        return self.show_status(f"{what}: {now}, {elapsed} so far", done, total)

    def clear(self) -> None:
        with _LOCK:
            self._wipe()

    def print_lines(self, *lines: str) -> None:
        """Print permanent lines. Live lines disappear until the next `show_status`."""
        with _LOCK:
            _wipe_lines()
            for line in lines:
                print(line, file=self._out)
            self._out.flush()

    def print_to_stdout(self, *lines: str) -> None:
        """Print permanent lines to standard output. Live lines, maybe on the same terminal, are removed first."""
        with _LOCK:
            _wipe_lines()
            for line in lines:
                print(line, flush=True)

    def end_operation(self) -> None:
        """Remove the live line and reset the elapsed time."""
        with _LOCK:
            self._wipe()
            self._begun_s = self._first = self._part = None
            self._left_s = math.inf

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._given is None else self._given

    def _draw(self, lines: Sequence[str]) -> None:
        width = _measure_width()
        clipped = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
        if clipped != self._drawn:
            print(self._to_start() + "\n".join(clipped), end="", file=self._out, flush=True)
            self._drawn = clipped
            _LIVE.add(self)

    def _wipe(self) -> None:
        if self._drawn:
            print(self._to_start(), end="", file=self._out, flush=True)
            self._drawn, self._due_s = [], 0.0
            _LIVE.discard(self)

    def _to_start(self) -> str:
        return f"\r\x1b[{len(self._drawn) - 1}A\x1b[J" if len(self._drawn) > 1 else "\r\x1b[K"

    def _format_remaining(self, done: float | None, total: float | None, now_s: float) -> str:
        if done is None or not total:
            return ""
        if self._first is None or self._first[0] != total or done < self._first[1]:
            self._first, self._left_s = (total, done, now_s), math.inf
        _, first_done, first_s = self._first
        text = f" {100 * done / total:.0f} %"
        if done - first_done >= min(EVIDENCE, EVIDENCE_SHARE * total):
            left_s = (now_s - first_s) / (done - first_done) * (total - done)
            self._left_s = min(self._left_s, left_s)
            if left_s <= MISJUDGED * self._left_s:
                text += f", about {units.format_duration(self._left_s)} left"
        return text


def format_bar(share: float, room: int = BAR) -> str:
    width = min(BAR, room)
    return ("█" * round(width * share)).ljust(width, "░")


def _measure_width() -> int:
    return shutil.get_terminal_size().columns - 1  # a line that wraps cannot be rewritten


def _wipe_lines() -> None:
    for line in list(_LIVE):
        line._wipe()


_LOCK: Final = threading.RLock()  # of all lines, which may be on one terminal
_LIVE: Final = set[ProgressLine]()  # lines on a terminal
LINE: Final = ProgressLine()
"""The line of this process on standard error."""


def count_parts(total: int) -> Callable[[str], None]:
    """Return a function to call with the name of each of `total` parts of the work when it begins."""
    counter = itertools.count()
    return lambda now: LINE.set_part(now, next(counter), total)


def call_periodically(tell: Callable[[], None], every_s: float = TICK_S) -> AbstractContextManager[None]:
    return process_resources.call_in_background(tell, every_s, "progress")


@contextmanager
def show_progress(what: str, line: ProgressLine = LINE) -> Iterator[None]:
    """Show an operation with its elapsed time and its current part while the body runs."""
    began_s = line._clock()
    try:
        with call_periodically(lambda: line.show_elapsed(what, began_s)):
            yield
    finally:
        line.end_operation()
