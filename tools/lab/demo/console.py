"""Console output of the demo: progress of the search, and the events of its story."""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from fedquilt.console import progress, table
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.job_view import JobView
from fedquilt.coordinator.rounds.events import AnyEvent, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.views.terminal import Console
from fedquilt.transport.link import Link

EVERY_S = 4.0  # between two lines where none can be rewritten: who watches a demo takes a longer silence for its end
TOGETHER = "\N{NO-BREAK SPACE}"


class SearchConsole(Console):
    """Console that shows only the progress of the search."""

    def __init__(self) -> None:
        super().__init__()
        self._line = progress.ProgressLine(rarely_s=EVERY_S)
        self._joules = 0.0
        self._part = ("", 0, 0)

    def observe(self, job: JobView, fact: AnyEvent) -> None:
        if isinstance(fact, UpdateAccepted):
            self._joules += fact.update.usage.energy_j or 0.0

    def show_line(self, line: str) -> None:
        """Show a status line with the seconds since the start. The next line replaces it."""
        self.show_status(lambda: line)

    def start_parts(self, what: str, total: int) -> Callable[[str], None]:
        """Return a function to call at the beginning of each of `total` parts, with its description."""
        begun = itertools.count()

        def begin_part(now: str) -> None:
            self._part = (f"{what}: {now}", next(begun), total)

        return begin_part

    def show_progress(self) -> None:
        now, done, total = self._part
        self._line.show_status(lambda: f"{self._format_elapsed()} {now}", done, total)

    def clear_line(self) -> None:
        self._line.end_operation()

    def report_connection(self, link: Link) -> None:
        # nothing to report: the demo's broker runs in this process
        ...

    def report_waits(self, server: Server, board: Callable[[str], DeviceStatus | None] = lambda device: None) -> None:
        """Show how many devices have started, until the first round, and then the round's progress."""
        job = next(iter(server.active_jobs()), None)
        if job is None:
            return
        state = job.rounds
        there, cohort = len(state.answered), len(state.asked) + len(state.answered)
        if cohort:
            self.show_line(
                f"round {state.round}: {there} of {cohort} boards have answered, {self._joules:.0f} J so far"
            )
        elif not state.round:
            there = len(server.registry.usable_engines(job.engines, time.monotonic()))
            self.show_line(f"starting the boards' processes: {there} of {job.job.cohort.start_devices} are online")


def format_bold(text: str) -> str:
    """Return the text in bold on a terminal, and unchanged elsewhere or with NO_COLOR."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


class StoryPrinter:
    """Printer of a story's events, with the seconds since its start.

    Args:
        text: Whether to print at all.
        clock: Function that returns seconds.
    """

    def __init__(self, text: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._text, self._clock, self._began_s = text, clock, clock()
        self._line = progress.ProgressLine(sys.stdout, clock=clock, rarely_s=EVERY_S)
        self.now = "starting"  # what goes on

    def _stamp(self) -> str:
        return f"[{self._clock() - self._began_s:5.1f} s]"

    def show_status(self) -> None:
        if self._text:
            self._line.show_status(lambda: f"{self._stamp()} {self.now}"[: table.line_width() - 1])

    def print_lines(self, *lines: str) -> None:
        if self._text:
            self._line.print_lines(*lines)

    def print_event(self, said: str) -> None:
        self.print_lines(*textwrap.wrap(f"{self._stamp()} {said}", table.line_width(), subsequent_indent=" " * 10))

    def print_command(self, words: Sequence[str], note: str = "") -> None:
        """Print a command line as typed in a shell, with line breaks between options."""
        text = re.sub(r"(--\S+) (?!-)", f"\\1{TOGETHER}", " ".join(words))  # an option stays with its value
        lines = textwrap.wrap(text, table.line_width() - 4, subsequent_indent="    ", break_on_hyphens=False)
        typed = " \\\n".join(lines).replace(TOGETHER, " ")
        self.print_lines("", *(format_bold(line) for line in typed.split("\n")), *([note] if note else []))
