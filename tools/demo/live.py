"""Progress of the demo: how far the search is, and nothing else."""

from __future__ import annotations

import os
import sys
import time

from fedquilt import progress
from fedquilt.coordinator.facts import Answered, AnyFact
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.views.terminal import Console
from fedquilt.transport.link import Link

EVERY_S = 4.0  # between two lines where none can be rewritten: who watches a demo takes a longer silence for its end


class Live(Console):
    """A console that shows only how far the search is."""

    def __init__(self) -> None:
        super().__init__()
        self._line = progress.Line(sys.stdout, rarely_s=EVERY_S)
        self._joules = 0.0

    def observe(self, job: Running, fact: AnyFact) -> None:
        """Count joules."""
        if isinstance(fact, Answered):
            self._joules += fact.update.usage.energy_j or 0.0

    def show(self, line: str) -> None:
        """Show a line with the seconds since the start; the next one replaces it."""
        self.status(lambda: line)

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        self._line.end()

    def contact(self, link: Link) -> None:
        """Nothing: the demo's broker runs in this process."""

    def wait(self, server: Server) -> None:
        """Show how many boards have started, until the first round, and then the round."""
        job = next(iter(server.jobs()), None)
        if job is None:
            return
        state = job.rounds
        there, cohort = len(state.answered), len(state.asked) + len(state.answered)
        if cohort:
            self.show(f"round {state.round}: {there} of {cohort} boards have answered, {self._joules:.0f} J so far")
        elif not state.round:
            there = len(server.registry.able(job.engines, time.monotonic()))
            self.show(f"starting the boards' processes: {there} of {job.job.cohort.start_devices} are online")


def bold(text: str) -> str:
    """Emphasis on a terminal; plain text in a file or a pipe, or where NO_COLOR is set."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
