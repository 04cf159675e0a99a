"""Operating points of a profile on this very board: its own clocks, with the profile's speed and power."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fedquilt import profiles
from fedquilt.core import OperatingPoint
from fedquilt.edge_agent.clocks import controls
from fedquilt.profiles.model import AXES, name

SLACK: Final = 0.01  # 1421 is accepted for 1420.8 MHz
CAP_REACH: Final = 0.1  # a mode's cap of 1200 MHz means 1113.6 on a board that lists 1113.6 and 1267.2
SAME_TOP: Final = 0.02

Lists = Mapping[str, tuple[float, ...]]  # axis -> hertz, rising; axes without listed frequencies are left out


class Listing(Protocol):
    """A clock and its frequencies: a `controls.Lever` of this process, or a `client.Clock` of the clock helper."""

    @property
    def kind(self) -> str:
        """Kind of the clock: cpu, gpu or emc."""
        ...

    @property
    def listed_hz(self) -> tuple[float, ...]:
        """Listed frequencies in hertz, ascending; (): none."""
        ...


def lists(clocks: Iterable[Listing]) -> Lists:
    """Frequencies that the board lists; for several clocks of one kind, those common to all of them."""
    found, clocks = {}, tuple(clocks)
    for axis in AXES:
        each = [set(clock.listed_hz) for clock in clocks if f"{clock.kind}_hz" == axis]
        if shared := set[float].intersection(*each) if each else set():
            found[axis] = tuple(sorted(shared))
    return found


def fit(profile: profiles.Board, own: Lists) -> tuple[OperatingPoint, ...]:
    """Points of the profile that this board has: its modes, then its grid.

    A mode stands at the highest frequencies that the board lists up to the mode's caps. The grid is that of the
    profile's model over the board's own clocks, if both have the same highest clocks.

    A clock that the board does not list is left out of its points and stays as the board sets it. Points
    without any clock are kept.
    """
    modes = {mode.name for mode in profile.points}
    chosen = [_capped(point, own) for point in profile.operating_points() if point.name in modes]
    found = [point for point in chosen if point is not None]
    taken = {_clocks(point) for point in found}
    for point in _regridded(profile, own):
        if point.name not in modes and _clocks(point) not in taken:
            taken.add(_clocks(point))
            found.append(point)
    return tuple(found[: profiles.MOST_POINTS])


def watts(profile: profiles.Board, root: Path) -> Callable[[OperatingPoint], float | None]:
    """Power by this profile of points that a client asks for, whatever power the client says.

    Args:
        profile: of the board.
        root: folder that has `sys`. It is read at each call, as a driver may list its clock late.

    Returns:
        A function of a point: watts of the profile's point of the same name and clocks; None: it has none.
    """

    def look(point: OperatingPoint) -> float | None:
        own = fit(profile, lists(controls.discover(root).found))
        return next((each.busy_w for each in own if (each.name, _clocks(each)) == (point.name, _clocks(point))), None)

    return look


def _capped(point: OperatingPoint, own: Lists) -> OperatingPoint | None:
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


def _regridded(profile: profiles.Board, own: Lists) -> tuple[OperatingPoint, ...]:
    """The profile's grid over the board's own lists; an unlisted clock counts at the profile's highest."""
    top = profile.top()
    for axis, hz in top.items():
        if axis in own and abs(own[axis][-1] - hz) > SAME_TOP * hz:
            return ()  # a board unlike the profile's: its model does not hold here
    if not any(axis in own for axis in top) or profile.clocks is None:
        return ()
    steps = {
        axis: profiles.Steps(own.get(axis, (hz,)), getattr(profile.clocks, axis).source) for axis, hz in top.items()
    }
    board = msgspec.structs.replace(profile, clocks=profiles.Clocks(**steps))
    modes = {mode.name for mode in profile.points}
    unlisted = {axis: None for axis in AXES if axis not in own}
    grid = [point for point in board.operating_points() if point.name not in modes]
    return tuple(msgspec.structs.replace(point, name=_called(point, own), **unlisted) for point in grid)


def _called(point: OperatingPoint, own: Lists) -> str:
    return name({axis: getattr(point, axis) for axis in own if getattr(point, axis) is not None})


def _clocks(point: OperatingPoint) -> tuple[float | None, ...]:
    return tuple(getattr(point, axis) for axis in AXES)
