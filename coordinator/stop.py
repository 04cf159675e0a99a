"""Limits of a job: `[stop]` in the job, or `fedquilt run --max-joules --max-bytes --max-wall`.

Decided between rounds from the log's totals, so a job can exceed its limits by a round, and
its result is that of a whole round. The sum of joules lacks all unmetered tasks: a job with
`max_joules` on boards without meters runs on, and reports after each round how much was not counted.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from fedquilt.coordinator.settings import Stop
from fedquilt.core import Method, Update


class Spent(msgspec.Struct, frozen=True):
    """Totals of a job's answers so far."""

    joules: float = 0.0  # gross, of the metered tasks
    metered: int = 0  # number of metered tasks
    unmetered: int = 0  # number of tasks without a meter
    bytes: int = 0
    wall_s: float = 0.0  # of committed rounds

    def plus(self, update: Update) -> Spent:
        """Totals with one more answer."""
        usage = update.usage
        return replace(
            self,
            joules=self.joules + (usage.energy_j or 0.0),
            metered=self.metered + (usage.energy_j is not None),
            unmetered=self.unmetered + (usage.energy_j is None),
            bytes=self.bytes + update.down_bytes + update.up_bytes,
        )


def reached(limits: Stop, spent: Spent) -> str | None:
    """Sentence on the limit that is used up; None: none is."""
    if limits.max_joules is not None and spent.joules >= limits.max_joules:
        return f"max_joules: {spent.joules:.4g} J of {limits.max_joules:.4g} J are used up{_but(spent)}"
    if limits.max_bytes is not None and spent.bytes >= limits.max_bytes:
        return f"max_bytes: {spent.bytes} bytes of {limits.max_bytes} are used up"
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {spent.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used up"
    return None


def caveat(limits: Stop, spent: Spent) -> str | None:
    """Sentence after a round whose joules are incomplete; None: they are complete, or have no limit."""
    if limits.max_joules is None or not spent.unmetered:
        return None
    if not spent.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} ends nothing here: no board that has answered has a meter for its "
            "joules; the job runs to its rounds, or to another limit of [stop]"
        )
    return f"max_joules counts {spent.joules:.4g} J of {limits.max_joules:.4g} J{_but(spent)}"


def _but(spent: Spent) -> str:
    if not spent.unmetered:
        return ""
    return f", without {spent.unmetered} task{'s' * (spent.unmetered > 1)} on boards that have no meter"


def cut_short(method: Method, name: str, rounds: int, round: int) -> str | None:
    """Sentence for the last round of a method that ends by itself and has not ended; None elsewhere.

    Args:
        method: of the job.
        name: of the method.
        rounds: most rounds of the job.
        round: the one that is committed.
    """
    if method.done is Method.done or round + 1 < rounds:
        return None
    return f"the job's {rounds} rounds are over before {name} has ended: the result is what it has so far; raise rounds"
