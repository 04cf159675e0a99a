"""Which jobs are served, and how they share boards: pure decisions, no I/O, no clock.

As many jobs are served at once as there are places. A served job that waits for boards costs nobody anything while
places are free; if others are in line, it gives its place to the next, and is taken up again at its next turn.
Nothing of it is lost, as its log is its whole state.

What jobs share fairly is boards' time: seconds for which boards had their tasks, divided by the jobs' priorities.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from fedquilt.coordinator.limits import Limits
from fedquilt.coordinator.store import UNDER_WAY, Row

PATIENCE_S: Final = 60.0  # time for which a job whose boards have gone keeps its place from those in line
START_S: Final = 1.0  # likewise a job whose round has not begun


class Wait(NamedTuple):
    """How long a served job has waited for boards."""

    idle_s: float  # since a device last worked on it
    begun: bool = True  # whether its running round has been asked of anybody

    @property
    def over(self) -> bool:
        """Whether it gives its place to a job in line."""
        return self.idle_s >= (PATIENCE_S if self.begun else START_S)


class Claim(NamedTuple):
    """What a served job has had of the boards' time, as it stands beside the others."""

    had_s: float  # boards' seconds, divided by its priority
    round_s: float  # of these, the seconds of its latest round, or of the running one if they are more
    roll: AbstractSet[str]  # devices of its running round, which it will probably ask again
    working: bool  # whether a device works on it


def mine(row: Row, only: str | None) -> bool:
    """Whether a coordinator takes a job up: the only one it serves, or any that `run` has submitted.

    Runs of simulated fleets have places of their own: whoever began one brings its boards.
    """
    return row.id == only if only is not None else row.origin == "run"


def served(
    rows: Sequence[Row], waits: Mapping[str, Wait], gave_way_s: Mapping[str, float], limits: Limits = Limits()
) -> list[str]:
    """Ids of the jobs to serve now, within the limits.

    Args:
        rows: the jobs this coordinator may serve, in the order in which they were queued.
        waits: served job -> how long it has waited.
        gave_way_s: job -> when it last gave way to another.
        limits: on how many jobs run at once, all and of one submitter.
    """
    wanting = [row for row in rows if row.status in UNDER_WAY]
    kept = [row for row in wanting if row.id in waits and not waits[row.id].over]
    idle = [row for row in wanting if row.id in waits and waits[row.id].over]
    behind = sorted(
        (row for row in wanting if row.id not in waits),
        key=lambda row: (gave_way_s.get(row.id, -math.inf), row.status != "running"),
    )
    found, running = list[str](), Counter[str]()
    for row in (*kept, *behind, *idle):
        if len(found) < limits.running and running[row.submitter] < limits.submitter.running:
            found.append(row.id)
            running[row.submitter] += 1
    return found


def left(job: str, claims: Mapping[str, Claim]) -> set[str]:
    """Devices that a job leaves to others now: those of jobs at work than which it is ahead by more than a round.

    A job with much shorter tasks would otherwise find its boards taken whenever a round of its ends.
    """
    own = claims[job]
    behind = (
        other.roll
        for id, other in claims.items()
        if id != job and other.working and own.had_s - other.had_s > own.round_s
    )
    return set[str]().union(*behind)


def absent(claims: Mapping[str, Claim]) -> float:
    """Boards' time of the job at work that has had least; 0 if none is. One that was not there starts level with it."""
    return min((each.had_s for each in claims.values() if each.working), default=0.0)
