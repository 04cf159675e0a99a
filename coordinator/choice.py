"""Decide what happens next in a job, given the fleet: candidates are recorded before devices are selected."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from functools import partial

import msgspec

from fedquilt.coordinator import cohort, rounds
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.eligibility import BUSY, SHARE
from fedquilt.coordinator.facts import AnyFact, Asked
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.job import Running


def decide_for_fleet(
    job: Running,
    registry: Registry,
    at_work: Collection[str],
    now_s: float,
    busy: AbstractSet[str] = frozenset(),
    most: float = math.inf,
    late: bool = False,
    lost_s: float = 0.0,
    gone: AbstractSet[str] = frozenset(),
) -> AnyFact | None:
    """Return the next event of a job, given the fleet, or None if nothing is due.

    Args:
        job: the running one.
        registry: of the fleet.
        at_work: devices that work on a task of the running round.
        now_s: seconds of the coordinator's clock.
        busy: devices that are left to other jobs now.
        most: number of devices that may be asked now.
        late: whether the job has waited for so long as it may until its first round.
        lost_s: seconds of the running attempt in which no device could be reached: it ends so much later.
        gone: as of `rounds.decide`.
    """
    fleet = registry.seen(now_s)

    def ask(device: str) -> Ask:
        return job.ask(device, registry.profile_of(device))

    passed = registry.barred(job.wants, now_s)
    free = fleet.keys() - passed.keys()
    if short := rounds.devices_to_skip(job.rounds, free, ask, registry.agent_start_key):
        passed, free = {**passed, **short}, free - short.keys()
    taken = (busy & free) - set(at_work)
    state = rounds.later(job.rounds, lost_s)
    following = partial(rounds.decide, state, now_s, free | set(at_work), ask, taken, gone=gone)
    fact = following(most)
    if fact is None and late and (ended := rounds.too_late(job.rounds, len(free))) is not None:
        return ended
    if not isinstance(fact, Asked) and (fact is not None or job.rounds.phase != "selecting"):
        return fact
    spared = _spared(job, fact, free - taken, most, following)
    if taken and not isinstance(fact, Asked):  # a job that waits does not log each coming and going of other jobs
        taken = {device for device in taken if job.rounds.passed.get(device) == BUSY}
    if taken:
        passed, free = {**passed, **dict.fromkeys(taken, BUSY)}, free - taken
    if spared:
        passed, free = {**passed, **dict.fromkeys(spared, SHARE)}, free - spared
    thrifty = job.job.cohort.prefer == "energy"
    costs = cohort.costs({device: fleet[device].profile for device in free}) if thrifty else {}
    noted = rounds.survey(job.rounds, free, passed, costs)
    if noted is not None or not isinstance(fact, Asked):
        return noted or fact
    return msgspec.structs.replace(fact, coverage=job.covered(fact, fleet))


def _spared(
    job: Running, fact: Asked | None, free: set[str], most: float, unlimited: Callable[[], AnyFact | None]
) -> set[str]:
    """Free devices that would be asked now if more than `most` might be; while the job waits, those noted as such."""
    if fact is None:
        noted = {device for device in free if job.rounds.passed.get(device) == SHARE}
        if noted or most >= 1:
            return noted
    elif len(fact.devices) < most:
        return set()
    wider, asked = unlimited(), fact.devices if fact is not None else ()
    return set(wider.devices).difference(asked) if isinstance(wider, Asked) else set()
