"""Bounds that the owner of a board has set: the power mode, limits written by hand, watts, degrees.

The agent leaves out operating points beyond them, and the clock helper, which alone can write, refuses such points
whoever asks. A mode is never exceeded: no clock above its cap, no core that it turned off, no mode with more of
either.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from fedquilt.core import ClockError, OperatingPoint
from fedquilt.edge_agent.clocks.controls import TOLERANCE, Kind, Lever, Levers, Setting, Settings
from fedquilt.edge_agent.clocks.modes import UNCAPPED, Mode, plain

Bounds = Mapping[str, int]  # name of a lever -> highest value, in its own unit; a lever without bound is left out
KINDS: tuple[tuple[Kind, str], ...] = (("cpu", "cpu_hz"), ("gpu", "gpu_hz"), ("emc", "emc_hz"))


def bounds(levers: Levers, mode: Mode | None, limits: Mapping[str, int | None] | None = None) -> Bounds:
    """Highest listed value of each lever within a mode and within the limits that the board had.

    A cap between two listed values means the lower one; it means a value up to 1 % above it, as NVIDIA rounds its
    caps (850 MHz for 854.25). Below the lowest listed value no clock can go.

    Args:
        levers: of the board.
        mode: the owner's; None: not known, or the board has none.
        limits: upper limit of each lever before anything was held, in its unit; 0 or None: none.
    """
    found = {}
    for lever in levers.found:
        caps = [] if mode is None else mode.caps_of(lever.kind, lever.high)
        caps += [most for most in [(limits or {}).get(lever.name)] if most]
        if lever.listed and min(caps, default=UNCAPPED) < UNCAPPED:
            below = [value for value in lever.listed if value <= min(caps) * (1 + TOLERANCE)]
            found[lever.name] = below[-1] if below else lever.listed[0]
    return found


def check(levers: Levers, point: OperatingPoint, most: Bounds, mode: str | None) -> None:
    """Refuse a point with a clock beyond its bound.

    Raises:
        ClockError: names the clock, the bound and the mend.
    """
    for kind, axis in KINDS:
        hz: float | None = getattr(point, axis)
        for lever in levers.of(kind) if hz is not None else ():
            value, bound = lever.choose(hz or 0.0), most.get(lever.name)
            if bound is not None and value > bound:
                owner = f"the power mode {mode}" if mode is not None else "the board's own limit"
                raise ClockError(
                    f"{point.name!r} wants {lever.name} at {value * lever.unit_hz / 1e6:g} MHz, and {owner} permits "
                    f"{bound * lever.unit_hz / 1e6:g} MHz: choose a lower point, or another mode by `sudo nvpmodel -m`"
                )


def below(levers: Levers, some: Bounds, other: Bounds) -> str | None:
    """Name of a lever whose bound in `some` is lower than in `other`; None: there is none."""
    for lever in levers.found:
        top = lever.listed[-1] if lever.listed else 0
        if some.get(lever.name, top) < other.get(lever.name, top):
            return lever.name
    return None


def permits(outer: Mode | None, inner: Mode) -> bool:
    """Whether a mode turns on no core and raises no cap of the owner's mode; nothing is within an unknown one."""
    if outer is None or not outer.off <= inner.off:
        return False
    caps = {cap.clock: cap.value for cap in outer.caps}
    return all(cap.value <= caps.get(cap.clock, UNCAPPED) * (1 + TOLERANCE) for cap in inner.caps)


def check_masks(before: Mode | None, after: Mode) -> None:
    """Refuse a mode that needs a restart of the board.

    Raises:
        ClockError: other parts of the GPU are on in it.
    """
    if before is not None and set(before.masks) != set(after.masks):
        raise ClockError(
            f"mode {after.name} switches other parts of the GPU on than {before.name}, which needs a restart of the "
            f"board: `sudo nvpmodel -m {after.id}` and restart"
        )


def check_mode(owner: Mode | None, wanted: Mode, known: str | None) -> None:
    """Refuse a mode beyond the owner's.

    Raises:
        ClockError: it turns on cores or raises caps.
    """
    if not permits(owner, wanted):
        raise ClockError(
            f"mode {wanted.name} has cores or clocks beyond the power mode, {known or 'which is not known'}: "
            f"`sudo nvpmodel -m {wanted.id}` lets it, if the board's owner wants that"
        )


def offered(
    points: tuple[OperatingPoint, ...], levers: Levers, mode: Mode | None, most_hz: Mapping[str, float]
) -> tuple[OperatingPoint, ...]:
    """Points that may be held in the owner's mode.

    Args:
        points: of the board in its widest mode.
        levers: of the board, for the names of its modes.
        mode: the owner's; None: not known.
        most_hz: highest permitted clock by axis ("cpu_hz"); an axis without bound is left out.
    """
    named = {plain(each.name): each for each in levers.modes}
    return tuple(
        point
        for point in points
        if all((getattr(point, axis) or 0.0) <= hz * (1 + TOLERANCE) for axis, hz in most_hz.items())
        and ((own := named.get(plain(point.name))) is None or own == mode or permits(mode, own))
    )


def most_hz(levers: Levers, most: Bounds) -> dict[str, float]:
    """Highest permitted clock by axis: the lowest of the bounds of each kind."""
    return {
        axis: min(each)
        for kind, axis in KINDS
        if (each := [most[lever.name] * float(lever.unit_hz) for lever in levers.of(kind) if lever.name in most])
    }


def moved(saved: Settings, levers: Levers, mode: Mode) -> Settings:
    """Settings to restore after the owner has changed the mode: those of the new mode, not those of the old one."""
    most = bounds(levers, mode)
    known = {lever.name: lever for lever in levers.found}
    return Settings(mode.name, tuple(_moved(old, known.get(old.name), most.get(old.name)) for old in saved.levers))


def _moved(old: Setting, lever: Lever | None, most: int | None) -> Setting:
    if lever is None or not lever.listed or old.high is None:
        return old
    capped = lever.kind == "emc" and lever.low is None  # nvpmodel's own cap of the memory clock, where 0 means none
    high = most if most is not None else 0 if capped else lever.listed[-1]
    low, rate = (None if value is None else min(value, high or value) for value in (old.low, old.rate))
    return replace(old, high=high, low=low, rate=rate)
