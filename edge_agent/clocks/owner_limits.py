"""Limits set by the owner of a board: power mode, clock limits, watts and degrees.

The agent leaves out operating points beyond the limits. The clock helper, which alone can set clocks, refuses such
points from any client. The owner's mode is never exceeded: no clock above its cap, no core that the mode turned off,
and no other mode that permits either.
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

# Name of a control -> highest value in the unit of the control. Unlimited controls are left out.
ControlLimits = Mapping[str, int]
AXIS_OF_KIND: tuple[tuple[Kind, str], ...] = (("cpu", "cpu_hz"), ("gpu", "gpu_hz"), ("emc", "emc_hz"))


def control_limits(
    clock_controls: ClockControls, mode: PowerMode | None, earlier_limits: Mapping[str, int | None] | None = None
) -> ControlLimits:
    """Return the highest permitted value of each limited control, by the mode and `earlier_limits`.

    A cap between two listed values permits the lower value, or the higher value if at most 1 % above the cap, because
    NVIDIA rounds its caps (850 MHz for 854.25). No clock can be below its lowest listed value.
    """
    control_limits_by_name = {}
    for control in clock_controls.controls:
        caps = [] if mode is None else mode.caps_for_clock(control.kind, control.high)
        caps += [limit for limit in [(earlier_limits or {}).get(control.name)] if limit]
        if control.listed_values and min(caps, default=UNCAPPED) < UNCAPPED:
            permitted = [value for value in control.listed_values if value <= min(caps) * (1 + TOLERANCE)]
            control_limits_by_name[control.name] = permitted[-1] if permitted else control.listed_values[0]
    return control_limits_by_name


def require_within_limits(
    clock_controls: ClockControls, point: OperatingPoint, limits: ControlLimits, mode: str | None
) -> None:
    for kind, axis in AXIS_OF_KIND:
        hz: float | None = getattr(point, axis)
        for control in clock_controls.controls_of_kind(kind) if hz is not None else ():
            value, limit = control.listed_value_at(hz or 0.0), limits.get(control.name)
            if limit is not None and value > limit:
                owner = f"power mode {mode}" if mode is not None else "the board's owner"
                raise ClockError(
                    f"{point.name!r} sets {control.name} to {value * control.unit_hz / 1e6:g} MHz, {owner} permits "
                    f"{limit * control.unit_hz / 1e6:g} MHz: choose a lower point, or another mode (`sudo nvpmodel -m`)"
                )


def find_tighter_limit(clock_controls: ClockControls, left: ControlLimits, right: ControlLimits) -> str | None:
    """Return the name of a control whose limit in `left` is below that in `right`, or None."""
    for control in clock_controls.controls:
        highest = control.listed_values[-1] if control.listed_values else 0
        if left.get(control.name, highest) < right.get(control.name, highest):
            return control.name
    return None


def is_mode_within(outer: PowerMode | None, inner: PowerMode) -> bool:
    """Return whether mode `inner` enables no more cores and no higher clocks than mode `outer`.

    The result is False if `outer` is unknown (None).
    """
    if outer is None or not outer.offline_cores <= inner.offline_cores:
        return False
    caps = {cap.clock: cap.value for cap in outer.caps}
    return all(cap.value <= caps.get(cap.clock, UNCAPPED) * (1 + TOLERANCE) for cap in inner.caps)


def require_same_gpu_masks(current: PowerMode | None, requested: PowerMode) -> None:
    """Raise ClockError if the new mode uses other parts of the GPU, because the board must restart then."""
    if current is not None and set(current.gpu_masks) != set(requested.gpu_masks):
        raise ClockError(
            f"mode {requested.name} uses other parts of the GPU than {current.name} and needs a restart of "
            f"the board: run `sudo nvpmodel -m {requested.id}` and restart"
        )


def require_mode_within(owner: PowerMode | None, requested: PowerMode, owner_mode_name: str | None) -> None:
    if not is_mode_within(owner, requested):
        raise ClockError(
            f"mode {requested.name} has more cores or higher clocks than the board's power mode "
            f"{owner_mode_name or '(unknown)'}: to permit it, run `sudo nvpmodel -m {requested.id}`"
        )


def permitted_points(
    points: tuple[OperatingPoint, ...],
    clock_controls: ClockControls,
    mode: PowerMode | None,
    limits_hz: Mapping[str, float],
) -> tuple[OperatingPoint, ...]:
    modes_by_name = {normalize_mode_name(known_mode.name): known_mode for known_mode in clock_controls.modes}
    return tuple(
        point
        for point in points
        if all((getattr(point, axis) or 0.0) <= hz * (1 + TOLERANCE) for axis, hz in limits_hz.items())
        and (
            (mode_of_point := modes_by_name.get(normalize_mode_name(point.name))) is None
            or mode_of_point == mode
            or is_mode_within(mode, mode_of_point)
        )
    )


def permitted_hz(clock_controls: ClockControls, limits: ControlLimits) -> dict[str, float]:
    """Return the highest permitted clock in hertz of each limited axis, such as {"cpu_hz": 1.2e9}."""
    return {
        axis: min(limits_hz)
        for kind, axis in AXIS_OF_KIND
        if (
            limits_hz := [
                limits[control.name] * float(control.unit_hz)
                for control in clock_controls.controls_of_kind(kind)
                if control.name in limits
            ]
        )
    }


def state_after_mode_change(
    saved: BoardControlState, clock_controls: ClockControls, mode: PowerMode
) -> BoardControlState:
    limits = control_limits(clock_controls, mode)
    controls_by_name = {control.name: control for control in clock_controls.controls}
    return BoardControlState(
        mode.name,
        tuple(
            _control_after_mode_change(state, controls_by_name.get(state.name), limits.get(state.name))
            for state in saved.controls
        ),
    )


def _control_after_mode_change(state: ControlState, control: ClockControl | None, limit: int | None) -> ControlState:
    if control is None or not control.listed_values or state.high is None:
        return state
    # In nvpmodel's cap of the memory clock, 0 means no cap.
    is_emc_cap = control.kind == "emc" and control.low is None
    high = limit if limit is not None else 0 if is_emc_cap else control.listed_values[-1]
    low, rate = (None if value is None else min(value, high or value) for value in (state.low, state.rate))
    return replace(state, high=high, low=low, rate=rate)
