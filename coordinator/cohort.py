"""Who is asked: sampling from (seed, round), the same on every machine and after every restart."""

from __future__ import annotations

from collections.abc import Collection

from fedquilt.core import derive_seed


def sample(seed: int, round: int, eligible: Collection[str], count: int) -> tuple[str, ...]:
    """`count` of the eligible devices (fewer where there are not so many), sorted.

    Every device draws a number from (seed, round, its own id) and the smallest win, so who else is
    online does not change a device's draw.
    """
    drawn = sorted(eligible, key=lambda device: (derive_seed("cohort", seed, round, device), device))
    return tuple(sorted(drawn[:count]))
