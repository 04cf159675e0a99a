"""Operating points of a profile, adjusted to the frequencies of this very board."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import profiles
from fedquilt.core import OperatingPoint
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import ClockState
from fedquilt.profiles.clock_model import AXES, format_point_name

SLACK: Final = 0.01  # 1421 is accepted for 1420.8 MHz
CAP_REACH: Final = 0.1  # a mode's cap of 1200 MHz means 1113.6 on a board that lists 1113.6 and 1267.2
SAME_TOP: Final = 0.02

Lists = Mapping[str, tuple[float, ...]]  # axis -> hertz, rising; axes without listed frequencies are left out


def common_frequencies(clocks: Iterable[controls.ClockControl | ClockState]) -> Lists:
    """Return the frequencies that all clocks of a kind list, by axis. Axes without any are left out."""
    found, clocks = {}, tuple(clocks)
    for axis in AXES:
        each = [set(clock.listed_hz) for clock in clocks if f"{clock.kind}_hz" == axis]
        if shared := set[float].intersection(*each) if each else set():
            found[axis] = tuple(sorted(shared))
    return found


def fit_points(profile: profiles.BoardProfile, own: Lists) -> tuple[OperatingPoint, ...]:
    """Return the operating points of a profile that this board has: modes first, then the grid.

    A mode is at the highest listed frequencies up to the mode's caps. The grid is computed by the profile's model for
    the board's own clocks, if the highest clocks of both are the same. A clock without a list is left out of the points
    and stays as the board sets it. Points without any clock are kept.
    """
    modes = {mode.name for mode in profile.points}
    chosen = [_point_at_caps(point, own) for point in profile.operating_points() if point.name in modes]
    found = [point for point in chosen if point is not None]
    taken = {_clock_values(point) for point in found}
    for point in _grid_points(profile, own):
        if point.name not in modes and _clock_values(point) not in taken:
            taken.add(_clock_values(point))
            found.append(point)
    return tuple(found[: profiles.MOST_POINTS])


def create_power_lookup(profile: profiles.BoardProfile, root: Path) -> Callable[[OperatingPoint], float | None]:
    """Return a function from an operating point to its watts in a profile, or None for unknown points.

    Args:
        profile: Profile of the board.
        root: Folder of `sys`, read at each call because a driver may list its clock late.
    """

    def find_power_w(point: OperatingPoint) -> float | None:
        own = fit_points(profile, common_frequencies(controls.discover_controls(root).found))
        return next(
            (each.busy_w for each in own if (each.name, _clock_values(each)) == (point.name, _clock_values(point))),
            None,
        )

    return find_power_w


def _point_at_caps(point: OperatingPoint, own: Lists) -> OperatingPoint | None:
    """Return the point with each clock at its highest listed frequency up to the cap of the point.

    The result is None if a clock lists no frequency near its cap. Clocks without a list are left out.
    """
    clocks: dict[str, float | None] = dict.fromkeys(AXES)
    for axis in AXES:
        cap = getattr(point, axis)
        if cap is None or axis not in own:
            continue
        below = [hz for hz in own[axis] if hz <= cap * (1 + SLACK)]
        if not below or below[-1] < cap * (1 - CAP_REACH):
            return None
        clocks[axis] = below[-1]
    return msgspec.structs.replace(point, **clocks)


def _grid_points(profile: profiles.BoardProfile, own: Lists) -> tuple[OperatingPoint, ...]:
    """Return the profile's grid on this board's clocks, or none if the highest clocks differ."""
    # Without equal highest clocks the model of the profile is not valid for the board, which then has no grid.
    top = profile.highest_clocks()
    for axis, hz in top.items():
        if axis in own and abs(own[axis][-1] - hz) > SAME_TOP * hz:
            return ()  # a board unlike the profile's: its model does not hold here
    if not any(axis in own for axis in top) or profile.clocks is None:
        return ()
    steps = {
        axis: profiles.ClockSteps(own.get(axis, (hz,)), getattr(profile.clocks, axis).source)
        for axis, hz in top.items()
    }
    board = msgspec.structs.replace(profile, clocks=profiles.BoardClocks(**steps))
    modes = {mode.name for mode in profile.points}
    unlisted = {axis: None for axis in AXES if axis not in own}
    grid = [point for point in board.operating_points() if point.name not in modes]
    return tuple(msgspec.structs.replace(point, name=_point_name(point, own), **unlisted) for point in grid)


def _point_name(point: OperatingPoint, own: Lists) -> str:
    return format_point_name({axis: getattr(point, axis) for axis in own if getattr(point, axis) is not None})


def _clock_values(point: OperatingPoint) -> tuple[float | None, ...]:
    return tuple(getattr(point, axis) for axis in AXES)
