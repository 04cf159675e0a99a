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

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Final

from fedquilt.coordinator.device_columns import (
    CostColumn,
    DeviceSet,
    RoundColumn,
    device_names,
    hash_name,
    name_hashes,
)
from fedquilt.core import Profile, derive_seed

_SHIFTS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # of SplitMix64, with its factors
_ROUNDING: Final = 1e-9  # relative difference of a vectorised key from the exact one, at most


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

    Arguments are as for `rank_devices`, whose first devices are selected. Vectorised operations exclude most others.
    """
    import numpy as np

    pool = DeviceSet.from_devices(eligible)
    if not 0 < count < len(pool):
        return tuple(sorted(pool)) if count > 0 else ()
    rows, late = np.flatnonzero(pool.mask), turns * len(pool) / count
    first, median = rows[:0], 1.0
    if costs:
        known = CostColumn.from_values(costs).to_array(len(pool.mask))
        median = float(np.median(paid)) if len(paid := known[rows][known[rows] >= 0]) else 1.0
    if late <= round:  # else nobody can have waited for so long
        waits = round - np.maximum(RoundColumn.from_values(since).to_array(len(pool.mask))[rows], 0)
        waits = np.where(waits >= late, waits, 0)
        least = np.partition(waits, -count)[-count]
        first, rows = rows[waits > least], rows[waits == least]
    numbers, left = name_hashes(rows), count - len(first)
    numbers ^= np.uint64(derive_seed("cohort", seed, round))
    for shift, factor in _SHIFTS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers >>= np.uint64(11)
    if costs:
        keys = -np.log1p(-numbers.astype(float) / 2**53) * np.where(known[rows] >= 0, known[rows], median)
    else:  # a limit that some more numbers are below than needed saves a partition of them all
        near = numbers < 2**53 * (2 * left + 20) // len(rows)
        if np.count_nonzero(near) >= left:
            rows, numbers = rows[near], numbers[near]
        keys = numbers.astype(float)
    best = rows[keys <= np.partition(keys, left - 1)[left - 1] * (1 + _ROUNDING)]
    drawn = sorted(device_names(best.tolist()), key=_create_key(seed, round, costs, median))
    return tuple(sorted([*device_names(first.tolist()), *drawn[:left]]))


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
        since: Round in which a device was last selected, or first eligible. Missing values count as 0.
        turns: Limit on a wait, in turns. Devices that were not selected for so long precede all others.
    """
    late = turns * len(eligible) / count if count > 0 else math.inf
    waited = {device: round - since.get(device, 0) for device in eligible}
    median = statistics.median([costs[device] for device in eligible if device in costs] or [1.0])
    key = _create_key(seed, round, costs, median)
    return sorted(eligible, key=lambda device: (-waited[device] if waited[device] >= late else 0, *key(device)))


def _create_key(seed: int, round: int, costs: Mapping[str, float], median: float) -> Callable[[str], tuple[float, str]]:
    salt = derive_seed("cohort", seed, round)

    def key(device: str) -> tuple[float, str]:
        number = hash_name(device) ^ salt
        for shift, factor in _SHIFTS:
            number = (number ^ (number >> shift)) * factor % 2**64
        if not costs:  # the numbers have the order of exponential keys of equal costs
            return number >> 11, device
        return -math.log1p(-(number >> 11) / 2**53) * costs.get(device, median), device

    return key


def joules_per_flop(profile: Profile | None) -> float | None:
    """Return the energy of one FLOP at the device's most efficient point, or None if unknown."""
    known = [p.busy_w / p.flops_per_s for p in (profile.points if profile else ()) if p.busy_w and p.flops_per_s]
    return min((cost for cost in known if 1e-100 < cost < 1e100), default=None)


def energy_costs(profiles: Mapping[str, Profile | None]) -> dict[str, float]:
    """Return `joules_per_flop` by device where known, rounded to three digits for the event log."""
    known = {device: joules_per_flop(profile) for device, profile in profiles.items()}
    return {device: float(f"{cost:.3g}") for device, cost in known.items() if cost is not None}
