"""Console output of the demo: the progress of its search."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable

from fedquilt.console import progress
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.job_view import JobView
from fedquilt.coordinator.rounds.events import AnyEvent, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.views.terminal import Console
from fedquilt.transport.link import Link

EVERY_S = 4.0  # between two lines where none can be rewritten: who watches a demo takes a longer silence for its end


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
