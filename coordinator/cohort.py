"""Selection of a round's devices: drawn from (seed, round), the same on every machine and after every restart.

Every device draws a number from (seed, round, its own id), and the smallest win; so the presence of other devices
changes no device's draw. With `prefer = "energy"` the draw is weighted: a device that needs twice the
joules for the same work is drawn half as often, in the long run (exponential keys: Efraimidis and
Spirakis, Weighted random sampling with a reservoir, IPL 97, 2006).

Fairness holds whatever the draws: a turn is the number of rounds needed to ask every device once, and
devices that have not been asked for `turns` of them go first, the longest waiting before the others. So
no device that is always present waits for more than `turns` + 1 turns.
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


def sample(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> tuple[str, ...]:
    """Sample up to `count` of the eligible devices, sorted; arguments as of `places`."""
    count = max(count, 0)
    if not costs and _late(turns, eligible, count) > round:  # the draws alone decide
        able = eligible if isinstance(eligible, AbstractSet) else frozenset(eligible)
        drawn = draws(seed, round, eligible)
        return tuple(sorted(islice((device for device in drawn if device in able), count)))
    keys = _keys(seed, round, eligible, count, costs, since, turns)
    return tuple(sorted(device for _, _, device in heapq.nsmallest(count, keys)))


def places(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    *,
    costs: Mapping[str, float] = {},
    since: Mapping[str, int] = {},
    turns: float = math.inf,
) -> list[str]:
    """Order of selection of the eligible devices.

    `costs` is `joules_per_flop` where it is known and applies (unknown ones count as the median), `since`
    the round in which a device was last asked, or first could have been.
    """
    return [device for _, _, device in sorted(_keys(seed, round, eligible, count, costs, since, turns))]


def draws(seed: int, round: int, devices: Collection[str]) -> Mapping[str, int]:
    """Numbers that at least these devices draw in a round, the smallest first.

    Each is computed once, and they are sorted once, also before they are needed.
    """
    known = _drawn(seed, round)
    if new := [device for device in devices if device not in known]:
        numbers = [*known.items(), *zip(new, derive_seeds(("cohort", seed, round), new), strict=True)]
        known.clear()
        known.update(sorted(numbers, key=lambda each: (each[1], each[0])))
    return known


@lru_cache(maxsize=8)  # of each job the running round, and the next one
def _drawn(seed: int, round: int) -> dict[str, int]:
    return {}


def _keys(
    seed: int,
    round: int,
    eligible: Collection[str],
    count: int,
    costs: Mapping[str, float],
    since: Mapping[str, int],
    turns: float,
) -> list[tuple[int, float, str]]:
    """Sort keys of the devices: the smallest is selected first; arguments as of `places`."""
    late = _late(turns, eligible, count)
    middling = statistics.median(costs.values()) if costs else 1.0
    drawn = draws(seed, round, eligible)
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


def _late(turns: float, eligible: Collection[str], count: int) -> float:
    """Rounds after which a device that was not asked goes first."""
    return turns * len(eligible) / count if count > 0 else math.inf


def joules_per_flop(profile: Profile | None) -> float | None:
    """Energy of one FLOP at the board's most efficient point; None: its profile has no usable numbers."""
    known = [p.busy_w / p.flops_per_s for p in (profile.points if profile else ()) if p.busy_w and p.flops_per_s]
    return min((cost for cost in known if 1e-100 < cost < 1e100), default=None)


def costs(profiles: Mapping[str, Profile | None]) -> dict[str, float]:
    """`joules_per_flop` of each device where known, to three digits: as a job's log stores it."""
    known = {device: joules_per_flop(profile) for device, profile in profiles.items()}
    return {device: float(f"{cost:.3g}") for device, cost in known.items() if cost is not None}
