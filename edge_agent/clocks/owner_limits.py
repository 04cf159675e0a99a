"""Limits set by the owner of a board: power mode, limits written by hand, watts and degrees.

The agent leaves out operating points beyond the limits, and the clock helper, which alone can write, refuses such
points from any client. A mode is never exceeded: no clock above its cap, no core that it turned off, and no mode with
more of either.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from fedquilt.core import ClockError, OperatingPoint
from fedquilt.edge_agent.clocks.controls import (
    TOLERANCE,
    UNCAPPED,
    BoardControlState,
    ClockControl,
    ClockControls,
    ControlState,
    Kind,
    PowerMode,
    normalize_mode_name,
)

Bounds = Mapping[str, int]  # name of a lever -> highest value, in its own unit; a lever without bound is left out
KINDS: tuple[tuple[Kind, str], ...] = (("cpu", "cpu_hz"), ("gpu", "gpu_hz"), ("emc", "emc_hz"))


def control_limits(
    levers: ClockControls, mode: PowerMode | None, limits: Mapping[str, int | None] | None = None
) -> Bounds:
    """Return the highest permitted value of each limited control, from the mode and earlier limits.

    A cap between two listed values means the lower one, or a value up to 1 % above it, because NVIDIA rounds its caps
    (850 MHz for 854.25). No clock can be below its lowest listed value.
    """
    found = {}
    for lever in levers.found:
        caps = [] if mode is None else mode.caps_for_clock(lever.kind, lever.high)
        caps += [most for most in [(limits or {}).get(lever.name)] if most]
        if lever.listed and min(caps, default=UNCAPPED) < UNCAPPED:
            below = [value for value in lever.listed if value <= min(caps) * (1 + TOLERANCE)]
            found[lever.name] = below[-1] if below else lever.listed[0]
    return found


def require_within_limits(levers: ClockControls, point: OperatingPoint, most: Bounds, mode: str | None) -> None:
    for kind, axis in KINDS:
        hz: float | None = getattr(point, axis)
        for lever in levers.controls_of_kind(kind) if hz is not None else ():
            value, bound = lever.nearest_value(hz or 0.0), most.get(lever.name)
            if bound is not None and value > bound:
                owner = f"the power mode {mode}" if mode is not None else "the board's own limit"
                raise ClockError(
                    f"{point.name!r} wants {lever.name} at {value * lever.unit_hz / 1e6:g} MHz, and {owner} permits "
                    f"{bound * lever.unit_hz / 1e6:g} MHz: choose a lower point, or another mode by `sudo nvpmodel -m`"
                )


def find_tighter_limit(levers: ClockControls, some: Bounds, other: Bounds) -> str | None:
    for lever in levers.found:
        top = lever.listed[-1] if lever.listed else 0
        if some.get(lever.name, top) < other.get(lever.name, top):
            return lever.name
    return None


def is_mode_within(outer: PowerMode | None, inner: PowerMode) -> bool:
    """Return whether a mode turns on no core that `outer` has off, and has no cap above the caps of `outer`.

    The result is False if `outer` is None, which means that the mode is unknown.
    """
    if outer is None or not outer.off <= inner.off:
        return False
    caps = {cap.clock: cap.value for cap in outer.caps}
    return all(cap.value <= caps.get(cap.clock, UNCAPPED) * (1 + TOLERANCE) for cap in inner.caps)


def require_same_gpu_masks(before: PowerMode | None, after: PowerMode) -> None:
    """Raise ClockError if a mode needs a restart of the board."""
    if before is not None and set(before.masks) != set(after.masks):
        raise ClockError(
            f"mode {after.name} switches other parts of the GPU on than {before.name}, which needs a restart of the "
            f"board: `sudo nvpmodel -m {after.id}` and restart"
        )


def require_mode_within(owner: PowerMode | None, wanted: PowerMode, known: str | None) -> None:
    if not is_mode_within(owner, wanted):
        raise ClockError(
            f"mode {wanted.name} has cores or clocks beyond the power mode, {known or 'which is not known'}: "
            f"`sudo nvpmodel -m {wanted.id}` lets it, if the board's owner wants that"
        )


def permitted_points(
    points: tuple[OperatingPoint, ...], levers: ClockControls, mode: PowerMode | None, most_hz: Mapping[str, float]
) -> tuple[OperatingPoint, ...]:
    """Return the points that may be pinned in the owner's mode."""
    named = {normalize_mode_name(each.name): each for each in levers.modes}
    return tuple(
        point
        for point in points
        if all((getattr(point, axis) or 0.0) <= hz * (1 + TOLERANCE) for axis, hz in most_hz.items())
        and ((own := named.get(normalize_mode_name(point.name))) is None or own == mode or is_mode_within(mode, own))
    )


def permitted_hz(levers: ClockControls, most: Bounds) -> dict[str, float]:
    """Return the highest permitted clock in hertz by axis, such as "cpu_hz". Axes without a limit are left out."""
    return {
        axis: min(each)
        for kind, axis in KINDS
        if (
            each := [
                most[lever.name] * float(lever.unit_hz) for lever in levers.controls_of_kind(kind) if lever.name in most
            ]
        )
    }


def state_after_mode_change(saved: BoardControlState, levers: ClockControls, mode: PowerMode) -> BoardControlState:
    most = control_limits(levers, mode)
    known = {lever.name: lever for lever in levers.found}
    return BoardControlState(
        mode.name,
        tuple(_control_after_mode_change(old, known.get(old.name), most.get(old.name)) for old in saved.levers),
    )


def _control_after_mode_change(old: ControlState, lever: ClockControl | None, most: int | None) -> ControlState:
    if lever is None or not lever.listed or old.high is None:
        return old
    capped = lever.kind == "emc" and lever.low is None  # nvpmodel's own cap of the memory clock, where 0 means none
    high = most if most is not None else 0 if capped else lever.listed[-1]
    low, rate = (None if value is None else min(value, high or value) for value in (old.low, old.rate))
    return replace(old, high=high, low=low, rate=rate)
