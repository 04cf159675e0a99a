"""Progress of the demo: how far the search is, and nothing else; and what happens in its story."""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from fedquilt import columns, progress
from fedquilt.coordinator.boards import Board
from fedquilt.coordinator.facts import Answered, AnyFact
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.views.terminal import Console
from fedquilt.transport.link import Link

EVERY_S = 4.0  # between two lines where none can be rewritten: who watches a demo takes a longer silence for its end
TOGETHER = "\N{NO-BREAK SPACE}"


class Live(Console):
    """A console that shows only how far the search is."""

    def __init__(self) -> None:
        super().__init__()
        self._line = progress.Line(sys.stdout, rarely_s=EVERY_S)
        self._joules = 0.0
        self._part = ("", 0, 0)

    def observe(self, job: Shown, fact: AnyFact) -> None:
        """Count joules."""
        if isinstance(fact, Answered):
            self._joules += fact.update.usage.energy_j or 0.0

    def show(self, line: str) -> None:
        """Show a line with the seconds since the start; the next one replaces it."""
        self.status(lambda: line)

    def parts(self, what: str, total: int) -> Callable[[str], None]:
        """Gives what is to be called when each of `total` parts of some work begins; `again` shows it."""
        begun = itertools.count()

        def far(now: str) -> None:
            self._part = (f"{what}: {now}", next(begun), total)

        return far

    def again(self) -> None:
        """Show the part of the work that goes on, how many are done, and how long the others may take."""
        now, done, total = self._part
        self._line.at(lambda: f"{self._stamp()} {now}", done, total)

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        self._line.end()

    def contact(self, link: Link) -> None:
        """Nothing: the demo's broker runs in this process."""

    def report_waits(self, server: Server, board: Callable[[str], Board | None] = lambda device: None) -> None:
        """Show how many devices have started, until the first round, and then the round's progress."""
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


class Teller:
    """Says what happens in a story, with the seconds since its start, and is never silent for long.

    Args:
        text: whether anything is said at all.
        clock: seconds.
    """

    def __init__(self, text: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._text, self._clock, self._began_s = text, clock, clock()
        self._line = progress.Line(sys.stdout, clock=clock, rarely_s=EVERY_S)
        self.now = "starting"  # what goes on

    def _stamp(self) -> str:
        return f"[{self._clock() - self._began_s:5.1f} s]"

    def tick(self) -> None:
        """Show what goes on, if it is time to."""
        if self._text:
            self._line.at(lambda: f"{self._stamp()} {self.now}"[: columns.width() - 1])

    def say(self, *lines: str) -> None:
        """Print lines that stay."""
        if self._text:
            self._line.say(*lines)

    def happened(self, said: str) -> None:
        """Print a sentence that stays, with the time."""
        self.say(*textwrap.wrap(f"{self._stamp()} {said}", columns.width(), subsequent_indent=" " * 10))

    def command(self, words: Sequence[str], note: str = "") -> None:
        """Print a command as one would type it."""
        text = re.sub(r"(--\S+) (?!-)", f"\\1{TOGETHER}", " ".join(words))  # an option stays with its value
        lines = textwrap.wrap(text, columns.width() - 4, subsequent_indent="    ", break_on_hyphens=False)
        typed = " \\\n".join(lines).replace(TOGETHER, " ")
        self.say("", *(bold(line) for line in typed.split("\n")), *([note] if note else []))
