"""What a board claims, held against what its profile and the time make plausible. Pure.

A claim of joules or bytes ends a job that has such a limit (`[stop]`), and a weight says how much an update counts. The
bounds are wide: they stop what no board can have done, not a board that lies by a factor of two.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from fedquilt.coordinator.deadline import Ask
from fedquilt.core import Profile, Update, UpdateError

MOST_W: Final = 3000.0  # of any board
UNKNOWN_W: Final = 1000.0  # of one whose profile has no watts
LEAST_W: Final = 100.0  # that a profile's watts are taken for: a meter may cover more than they do
WIDE: Final = 3.0  # times a profile's watts
LEAST_FLOPS: Final = 1e6  # a second, that a board is taken for
FASTER: Final = 10.0  # times as fast as its profile a board may be
SPARE_S: Final = 60.0
SPARE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 30  # that a board of a site can have fetched or sent for a task


def time_s(waited_s: float, deadline_s: float, attempts: int) -> float:
    """Longest time in seconds that a board can have worked on a task.

    Args:
        waited_s: since it was asked, as far as this process knows.
        deadline_s: of an attempt.
        attempts: number of attempts so far.
    """
    return 2 * max(waited_s, deadline_s * attempts) + SPARE_S


def most_w(profile: Profile | None) -> float:
    """Watts that a board can take at the most."""
    said = [profile.idle_w, *(point.busy_w for point in profile.points)] if profile else []
    known = [watts for watts in said if watts is not None]
    most = min(max(WIDE * max(known), LEAST_W), MOST_W) if known else UNKNOWN_W
    return most * (max(profile.boards, 1) if profile else 1)  # a site has as many boards as it says


def bounded(update: Update, ask: Ask, limit_s: float) -> tuple[Update, str]:
    """The update without claims that cannot be, and a sentence about them; "": all of them can be.

    Args:
        update: as the board sent it.
        ask: what the board was asked.
        limit_s: longest time in seconds that its board can have worked on it.
    """
    usage, odd = update.usage, []
    if usage.wall_s > limit_s:
        odd.append(f"{usage.wall_s:.4g} s of work, and it was asked {limit_s:.4g} s ago at the most")
        usage = replace(usage, wall_s=limit_s)
    most_j = most_w(ask.profile) * limit_s
    joules = max(usage.energy_j or 0.0, usage.idle_j or 0.0, usage.energy_error_j or 0.0)
    if not joules <= most_j:
        watts = most_w(ask.profile)
        odd.append(f"{joules:.4g} J, and {watts:.4g} W for {limit_s:.4g} s are {most_j:.4g} J: not counted")
        usage = replace(usage, energy_j=None, idle_j=None, energy_error_j=None)
    sent = sum({ref.sha256: ref.size for ref in update.bundles.values()}.values())
    for name, most in (("down_bytes", 2 * ask.bytes + SPARE_BYTES), ("up_bytes", sent)):
        if (said := getattr(usage, name)) > most:
            odd.append(f"{name} of {said}, and it was {most} at the most")
            usage = replace(usage, **{name: most})
    below = update.below
    most = MOST_BYTES * (ask.profile.boards if ask.profile else 0)
    if below is not None and max(below.down_bytes, below.up_bytes) > most:
        odd.append(f"{below.down_bytes} bytes down and {below.up_bytes} up of its boards, and {most} are the most")
        below = None
    return (replace(update, usage=usage, below=below), "; ".join(odd)) if odd else (update, "")


def require_weight(update: Update, ask: Ask, limit_s: float) -> None:
    """Check that the board can have worked through so many examples.

    Raises:
        UpdateError: it cannot, at ten times the speed that its profile says.
    """
    each = ask.work.flops_per_example
    speed = max((point.flops_per_s or 0.0 for point in ask.profile.points), default=0.0) if ask.profile else 0.0
    if not each or not speed:
        return
    speed = max(speed, LEAST_FLOPS)
    most = FASTER * speed * limit_s / each
    if update.weight > most:
        raise UpdateError(
            f"{update.device} wants to count as {update.weight:g} examples, and at {speed:.3g} FLOP/s it can "
            f"have worked through {most / FASTER:.3g} in {limit_s:.4g} s"
        )
