"""What comes next of a job, given the fleet: who there is to choose from is noted before somebody is chosen."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fedquilt.coordinator import cohort, rounds
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import AnyFact, Asked
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.job import Running


def decide(job: Running, registry: Registry, at_work: Collection[str], now_s: float) -> AnyFact | None:
    """The fact that should come next; None: nothing now.

    Args:
        at_work: who is at a task of the running round, whatever else is said of it.
    """
    fleet = registry.seen(now_s)

    def ask(device: str) -> Ask:
        return job.ask(device, registry.profile_of(device))

    passed = registry.barred(job.wants, now_s)
    if short := rounds.left_alone(job.rounds, fleet.keys() - passed.keys(), ask):
        passed = {**passed, **short}
    free = fleet.keys() - passed.keys()
    fact = rounds.decide(job.rounds, now_s, free | set(at_work), ask)
    if not isinstance(fact, Asked) and (fact is not None or job.rounds.phase != "selecting"):
        return fact
    profiles = {device: fleet[device].profile for device in free}
    costs = cohort.costs(profiles) if job.job.cohort.prefer == "energy" else {}
    noted = rounds.survey(job.rounds, free, passed, costs)
    if noted is not None or not isinstance(fact, Asked):
        return noted or fact
    return msgspec.structs.replace(fact, coverage=job.covered(fact, fleet))
