"""Decide what happens next in a job, given the fleet: candidates are recorded before devices are selected."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fedquilt.coordinator import cohort, rounds
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import AnyFact, Asked
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.job import Running


def decide(job: Running, registry: Registry, at_work: Collection[str], now_s: float) -> AnyFact | None:
    """Decide the next fact of a job; None: nothing to do now.

    Args:
        job: the running one.
        registry: of the fleet.
        at_work: devices that work on a task of the running round.
        now_s: seconds of the coordinator's clock.
    """
    fleet = registry.seen(now_s)

    def ask(device: str) -> Ask:
        return job.ask(device, registry.profile_of(device))

    passed = registry.barred(job.wants, now_s)
    free = fleet.keys() - passed.keys()
    if short := rounds.left_alone(job.rounds, free, ask):
        passed, free = {**passed, **short}, free - short.keys()
    fact = rounds.decide(job.rounds, now_s, free | set(at_work), ask)
    if not isinstance(fact, Asked) and (fact is not None or job.rounds.phase != "selecting"):
        return fact
    thrifty = job.job.cohort.prefer == "energy"
    costs = cohort.costs({device: fleet[device].profile for device in free}) if thrifty else {}
    noted = rounds.survey(job.rounds, free, passed, costs)
    if noted is not None or not isinstance(fact, Asked):
        return noted or fact
    return msgspec.structs.replace(fact, coverage=job.covered(fact, fleet))
