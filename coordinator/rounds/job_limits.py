"""Limits of a job: [stop].

Limits are compared with the totals of the log between rounds. So a job can exceed a limit by one round, and its result
is that of a whole round. Joules do not include tasks without a meter: a job with `max_joules` on devices without meters
continues, and reports after each round how many tasks were not counted.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from fedquilt.coordinator.settings import JobLimits
from fedquilt.core import Method, Update


class ResourceUsage(msgspec.Struct, frozen=True):
    joules: float = 0.0  # gross, of the metered tasks
    metered: int = 0  # number of metered tasks
    unmetered: int = 0  # number of tasks without a meter
    bytes: int = 0
    wall_s: float = 0.0  # of committed rounds

    def add_update(self, update: Update) -> ResourceUsage:
        usage = update.usage
        return replace(
            self,
            joules=self.joules + (usage.energy_j or 0.0),
            metered=self.metered + (usage.energy_j is not None),
            unmetered=self.unmetered + (usage.energy_j is None),
            bytes=self.bytes + update.down_bytes + update.up_bytes,
        )


def describe_reached_limit(limits: JobLimits, spent: ResourceUsage) -> str | None:
    if limits.max_joules is not None and spent.joules >= limits.max_joules:
        return f"max_joules: {spent.joules:.4g} J of {limits.max_joules:.4g} J are used up{_unmetered_suffix(spent)}"
    if limits.max_bytes is not None and spent.bytes >= limits.max_bytes:
        return f"max_bytes: {spent.bytes} bytes of {limits.max_bytes} are used up"
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"max_wall_s: {spent.wall_s:.4g} s of {limits.max_wall_s:.4g} s are used up"
    return None


def describe_unmetered_tasks(limits: JobLimits, spent: ResourceUsage) -> str | None:
    """Return a sentence on tasks missing from the joules, or None without tasks or a limit."""
    if limits.max_joules is None or not spent.unmetered:
        return None
    if not spent.metered:
        return (
            f"max_joules = {limits.max_joules:.4g} ends nothing here: no board that has answered has a meter for its "
            "joules; the job runs to its rounds, or to another limit of [stop]"
        )
    return f"max_joules counts {spent.joules:.4g} J of {limits.max_joules:.4g} J{_unmetered_suffix(spent)}"


def _unmetered_suffix(spent: ResourceUsage) -> str:
    if not spent.unmetered:
        return ""
    return f", without {spent.unmetered} task{'s' * (spent.unmetered > 1)} on boards that have no meter"


def describe_early_end(method: Method, name: str, rounds: int, round: int) -> str | None:
    """Return a sentence on a job that ends before its method has finished, or None.

    Args:
        method: The method of the job.
        name: The name of the method.
        rounds: The greatest number of rounds of the job.
        round: The number of the committed round.
    """
    if method.done is Method.done or round + 1 < rounds:
        return None
    return f"the job's {rounds} rounds are over before {name} has ended: the result is what it has so far; raise rounds"
