"""Progress of long operations: a live block on a terminal, otherwise lines at growing intervals.

A file or a pipe gets a first line after FIRST_LINE_S, and further lines after a quarter of the elapsed time, but after
at least MIN_INTERVAL_S and at most MAX_INTERVAL_S. A line is not repeated before its completed part changes.
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

FIRST_LINE_S: Final = 5.0
MIN_INTERVAL_S: Final = 10.0
MAX_INTERVAL_S: Final = 300.0
INTERVAL_SHARE: Final = 0.25  # interval of two lines, as a share of the elapsed time
LIVE_INTERVAL_S: Final = 0.1  # minimum interval of two changes of a terminal's line
TICK_S: Final = 1.0
BAR_COLUMNS: Final = 20
MIN_BAR_COLUMNS: Final = 5  # a shorter bar is omitted
MIN_DONE: Final = 2.0  # units of work, or this share of all units, before a remaining time is shown
MIN_DONE_SHARE: Final = 0.2
MAX_RISE: Final = 1.5  # an estimate above this multiple of the smallest hides the remaining time, which must not rise


class LogHandler(logging.StreamHandler[TextIO]):
    """Log handler on standard error that removes live lines before each record."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def handle(self, record: logging.LogRecord) -> bool:
        with _LOCK:  # before the handler's lock, because a function that returns the text of a line may log
            _wipe_lines()
            return super().handle(record)


class ProgressLine:
    """Progress of the current operation: lines that are rewritten in place. Thread-safe.

    Args:
        stream: Output stream, or None for the current standard error.
        live: Whether lines are rewritten in place, or None to do so on a terminal that supports it.
        clock: Function that returns seconds.
        max_interval_s: Longest interval of two lines without a terminal.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_interval_s: float = MAX_INTERVAL_S,
    ) -> None:
        self._stream, self._live, self._clock, self._max_interval_s = stream, live, clock, max_interval_s
        self._started_s: float | None = None  # start of the current operation
        self._due_s = 0.0
        self._printed_done: float | None = None  # completed part in the last line without a terminal
        self._drawn_lines: list[str] = []
        # (total, completed part, time) of the first call
        self._first_progress: tuple[float, float, float] | None = None
        self._min_remaining_s = math.inf  # smallest estimate
        self._part: tuple[str, float, float] | None = None  # set by `set_part`

    @property
    def is_live(self) -> bool:
        return self._out.isatty() and os.environ.get("TERM") != "dumb" if self._live is None else self._live

    def show_status(self, text: str | Callable[[], str], done: float | None = None, total: float | None = None) -> None:
        """Show the current operation, unless the last line is too recent.

        Args:
            text: Short text, or a function that is called when the text is shown. Further lines are for terminals.
            done: Completed part of `total`. With both, the first line has a bar and the remaining time too.
            total: Amount of all work.
        """
        with _LOCK:
            now_s, live = self._clock(), self.is_live
            if self._started_s is None:
                self._started_s, self._due_s = now_s, now_s + (0.0 if live else FIRST_LINE_S)
            remaining = self._format_remaining(done, total, now_s)
            if now_s < self._due_s or (not live and done is not None and done == self._printed_done):
                return
            headline, *detail_lines = (text if isinstance(text, str) else text()).splitlines()
            if live:
                self._due_s = now_s + LIVE_INTERVAL_S
                room = _measure_width() - len(headline) - len(remaining) - 1
                bar = (
                    f" {format_bar((done or 0.0) / total, room)}"
                    if remaining and total and room >= MIN_BAR_COLUMNS
                    else ""
                )
                self._draw([headline + bar + remaining, *detail_lines])
            else:
                interval_s = max(MIN_INTERVAL_S, INTERVAL_SHARE * (now_s - self._started_s))
                self._due_s, self._printed_done = now_s + min(interval_s, self._max_interval_s), done
                print(f"{headline}:{remaining}" if remaining else headline, file=self._out, flush=True)

    def set_part(self, name: str, done: float, total: float) -> None:
        """Set the part that `show_progress` names, and how many of all parts are completed."""
        self._part = (name, done, total)

    def show_elapsed(self, operation: str, started_s: float) -> None:
        part, elapsed = self._part, units.format_duration(self._clock() - started_s)
        if part is None:
            return self.show_status(f"{operation}: {elapsed} so far")
        name, done, total = part
        return self.show_status(f"{operation}: {name}, {elapsed} so far", done, total)

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
        """Print permanent lines to standard output, after removing live lines of the same terminal."""
        with _LOCK:
            _wipe_lines()
            for line in lines:
                print(line, flush=True)

    def end_operation(self) -> None:
        """Remove the live line and reset the elapsed time."""
        with _LOCK:
            self._wipe()
            self._started_s = self._first_progress = self._part = self._printed_done = None
            self._min_remaining_s = math.inf

    @property
    def _out(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _draw(self, lines: Sequence[str]) -> None:
        width = _measure_width()
        clipped = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
        if clipped != self._drawn_lines:
            print(self._to_start() + "\n".join(clipped), end="", file=self._out, flush=True)
            self._drawn_lines = clipped
            _LIVE.add(self)

    def _wipe(self) -> None:
        if self._drawn_lines:
            print(self._to_start(), end="", file=self._out, flush=True)
            self._drawn_lines, self._due_s = [], 0.0
            _LIVE.discard(self)

    def _to_start(self) -> str:
        return f"\r\x1b[{len(self._drawn_lines) - 1}A\x1b[J" if len(self._drawn_lines) > 1 else "\r\x1b[K"

    def _format_remaining(self, done: float | None, total: float | None, now_s: float) -> str:
        if done is None or not total:
            return ""
        if self._first_progress is None or self._first_progress[0] != total or done < self._first_progress[1]:
            self._first_progress, self._min_remaining_s = (total, done, now_s), math.inf
        _, first_done, first_s = self._first_progress
        text = f" {100 * done / total:.0f} %"
        if done - first_done >= min(MIN_DONE, MIN_DONE_SHARE * total):
            remaining_s = (now_s - first_s) / (done - first_done) * (total - done)
            self._min_remaining_s = min(self._min_remaining_s, remaining_s)
            if remaining_s <= MAX_RISE * self._min_remaining_s:
                text += f", about {units.format_duration(self._min_remaining_s)} left"
        return text


def format_bar(share: float, room: int = BAR_COLUMNS) -> str:
    width = min(BAR_COLUMNS, room)
    return ("█" * round(width * share)).ljust(width, "░")


def _measure_width() -> int:
    return shutil.get_terminal_size().columns - 1  # a line that wraps cannot be rewritten


def _wipe_lines() -> None:
    for line in list(_LIVE):
        line._wipe()


_LOCK: Final = threading.RLock()  # for all lines, which may be on one terminal
_LIVE: Final = set[ProgressLine]()  # lines on a terminal
LINE: Final = ProgressLine()
"""Line of this process on standard error."""


def count_parts(total: int) -> Callable[[str], None]:
    """Return a function that shows progress through `total` parts. Call it with each part's name."""
    counter = itertools.count()
    return lambda name: LINE.set_part(name, next(counter), total)


def call_periodically(report: Callable[[], None], interval_s: float = TICK_S) -> AbstractContextManager[None]:
    return process_resources.call_in_background(report, interval_s, "progress")


@contextmanager
def show_progress(operation: str, line: ProgressLine = LINE) -> Iterator[None]:
    """Show an operation with its elapsed time and its current part while the body runs."""
    started_s = line._clock()
    try:
        with call_periodically(lambda: line.show_elapsed(operation, started_s)):
            yield
    finally:
        line.end_operation()
