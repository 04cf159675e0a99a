"""Random selection of a round's cohort, which depends on the seed and the round alone.

The selection is the same on every machine and after every restart. Every device draws a number from (seed, round, its
id), and the devices with the smallest numbers are selected. So the presence of other devices changes no device's draw.
With `prefer = "energy"` the draw is weighted: a device that needs twice the joules for the same work is selected half
as often in the long run (exponential keys: Efraimidis and Spirakis, Weighted random sampling with a reservoir, IPL 97,
2006).

A turn is the number of rounds needed to select every device once. Devices that have not been selected for `turns`
turns precede all other devices, the longest waiting first. So no device that is always present waits for more than
`turns` + 1 turns, for any draws.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import islice

from fedquilt.core import Profile, derive_seeds


def select_cohort(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> tuple[str, ...]:
    """Select up to `count` of the eligible devices, sorted by id.

    Arguments are as for `rank_devices`.
    """
    count = max(count, 0)
    if not costs and _rounds_until_overdue(turns, eligible, count) > round:  # the draws alone decide
        able = eligible if isinstance(eligible, AbstractSet) else frozenset(eligible)
        drawn = draw_numbers(seed, round, eligible)
        return tuple(sorted(islice((device for device in drawn if device in able), count)))
    keys = _selection_keys(seed, round, eligible, count, costs, since, turns)
    return tuple(sorted(device for _, _, device in heapq.nsmallest(count, keys)))


def rank_devices(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> list[str]:
    """Return the eligible devices in the order of selection.

    Args:
        seed: Seed of the job.
        round: Number of the round.
        eligible: Devices to rank.
        count: Size of the cohort.
        costs: Joules per operation of each device, or empty to ignore energy. Missing values count as the median.
        since: Round in which a device was last selected, or first eligible.
        turns: Limit on a wait, in turns. Devices that were not selected for so long precede all others.
    """
    return [device for _, _, device in sorted(_selection_keys(seed, round, eligible, count, costs, since, turns))]


def draw_numbers(seed: int, round: int, devices: Collection[str]) -> Mapping[str, int]:
    """Return the random number of each device in a round, the smallest first.

    The result is the cache of the round, so that more devices may be included. A call ahead of the selection saves
    time.
    """
    known = _number_cache(seed, round)
    if new := [device for device in devices if device not in known]:
        numbers = [*known.items(), *zip(new, derive_seeds(("cohort", seed, round), new), strict=True)]
        known.clear()
        known.update(sorted(numbers, key=lambda each: (each[1], each[0])))
    return known


@lru_cache(maxsize=8)  # of each job the running round, and the next one
def _number_cache(seed: int, round: int) -> dict[str, int]:
    return {}


def _selection_keys(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    costs: Mapping[str, float],
    since: Mapping[str, int],
    turns: float,
) -> list[tuple[int, float, str]]:
    """Return the sort keys of the eligible devices: overdue ones first, then by draw, weighted by cost."""
    late = _rounds_until_overdue(turns, eligible, count)
    middling = statistics.median(costs.values()) if costs else 1.0
    drawn = draw_numbers(seed, round, eligible)
    keys: list[tuple[int, float, str]] = [(0, drawn[device], device) for device in eligible]
    if costs:  # else the draws themselves have the order of the exponential keys
        keys = [
            (rank, -math.log1p(-key / 2**53) * costs.get(device, middling) / middling, device)
            for rank, key, device in keys
        ]
    if late <= round:  # else nobody can have waited for so long
        waited = {device: round - since.get(device, round) for device in eligible}
        keys = [(-waited[device] if waited[device] >= late else 0, key, device) for _, key, device in keys]
    return keys


def _rounds_until_overdue(turns: float, eligible: Collection[str], count: int) -> float:
    return turns * len(eligible) / count if count > 0 else math.inf


def joules_per_flop(profile: Profile | None) -> float | None:
    """Return the energy of one FLOP at the device's most efficient point, or None if unknown."""
    known = [p.busy_w / p.flops_per_s for p in (profile.points if profile else ()) if p.busy_w and p.flops_per_s]
    return min((cost for cost in known if 1e-100 < cost < 1e100), default=None)


def energy_costs(profiles: Mapping[str, Profile | None]) -> dict[str, float]:
    """Return `joules_per_flop` by device where known, rounded to three digits for the event log."""
    known = {device: joules_per_flop(profile) for device, profile in profiles.items()}
    return {device: float(f"{cost:.3g}") for device, cost in known.items() if cost is not None}
