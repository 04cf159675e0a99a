"""Decision about a job's next event, from the state of the job and of the fleet."""

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


def decide_next_event(
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
    """Return the next event of a job, or None if nothing is due.

    The event records changes in the eligible devices before it selects devices.

    Args:
        job: Active job.
        registry: Devices of the fleet.
        at_work: Devices that are working on a task of the running round.
        now_s: Time of the coordinator's clock in seconds.
        busy: Devices that the job must leave to other jobs now.
        most: Number of devices that may be selected now.
        late: Whether the time for starting the first round has passed.
        lost_s: Seconds of the running attempt in which no device was reachable, by which its deadline moves.
        gone: Selected devices that are known to be offline or silent.
    """
    fleet = registry.device_views(now_s)

    def workload_of(device: str) -> Ask:
        return job.device_workload(device, registry.latest_profile(device))

    passed = registry.ineligible_devices(job.wants, now_s)
    free = fleet.keys() - passed.keys()
    if short := rounds.devices_to_skip(job.rounds, free, workload_of, registry.agent_start_key):
        passed, free = {**passed, **short}, free - short.keys()
    taken = (busy & free) - set(at_work)
    state = rounds.delay_attempt(job.rounds, lost_s)
    following = partial(rounds.decide_event, state, now_s, free | set(at_work), workload_of, taken, gone=gone)
    fact = following(most)
    if fact is None and late and (ended := rounds.start_timeout_event(job.rounds, len(free))) is not None:
        return ended
    if not isinstance(fact, Asked) and (fact is not None or job.rounds.phase != "selecting"):
        return fact
    spared = _devices_over_share(job, fact, free - taken, most, following)
    if taken and not isinstance(fact, Asked):  # a job that waits does not log each coming and going of other jobs
        taken = {device for device in taken if job.rounds.passed.get(device) == BUSY}
    if taken:
        passed, free = {**passed, **dict.fromkeys(taken, BUSY)}, free - taken
    if spared:
        passed, free = {**passed, **dict.fromkeys(spared, SHARE)}, free - spared
    thrifty = job.job.cohort.prefer == "energy"
    costs = cohort.energy_costs({device: fleet[device].profile for device in free}) if thrifty else {}
    noted = rounds.eligibility_event(job.rounds, free, passed, costs)
    if noted is not None or not isinstance(fact, Asked):
        return noted or fact
    return msgspec.structs.replace(fact, coverage=job.describe_coverage(fact, fleet))


def _devices_over_share(
    job: Running, fact: Asked | None, free: set[str], most: float, unlimited: Callable[[], AnyFact | None]
) -> set[str]:
    if fact is None:
        noted = {device for device in free if job.rounds.passed.get(device) == SHARE}
        if noted or most >= 1:
            return noted
    elif len(fact.devices) < most:
        return set()
    wider, asked = unlimited(), fact.devices if fact is not None else ()
    return set(wider.devices).difference(asked) if isinstance(wider, Asked) else set()
