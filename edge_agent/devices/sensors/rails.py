"""Roles of power rails by board: the total, rails that add up to it, and parts of other rails.

Sources are NVIDIA's developer guides, tables "Power monitor" of each board (Jetson Linux R32.7 for Nano, TX2 and
Xavier, R35 and R36 for Orin, R38 for Thor). On AGX Orin the power of VDDQ_VDD2_1V8AO is included in VIN_SYS_5V0. On
Thor an INA238 measures VIN, the input of module and carrier board, and the three INA3221 rails are parts of it
(jetson_stats, pull request 900. A public log of an idle board has 13 W of rails and 23 W at VIN).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

OFFSET_W: Final = 0.5  # a sensor without current may read so far below 0; further, and it is wired or set up wrongly
LEAST_W: Final = 0.1  # no board that runs Linux draws less
MOST_W: Final = 500.0  # no board of these has a supply for more
SLACK: Final = 1.15  # parts may exceed their whole so far, as rails are read one after the other
SLACK_W: Final = 0.5
MOVED_W: Final = 1.0  # if the parts moved so far and the total not at all, the total is stuck
WINDOW: Final = 50  # readings


@dataclass(frozen=True)
class RailRoles:
    fits: tuple[str, ...]  # beginnings of module or board names after "nvidia," in the device tree
    sums: tuple[str, ...]  # rails whose sum is the total: one, where a rail measures the board's or module's input
    inside: Mapping[str, str] = field(default_factory=dict)  # part -> rail that its power is included in

    def parts_of(self, whole: str) -> list[str]:
        """Return the rails directly inside another rail."""
        return [part for part, place in self.inside.items() if place == whole]


def _roles_with_parts(whole: str, *parts: str) -> RailRoles:
    return RailRoles((), (whole,), dict.fromkeys(parts, whole))


_NANO = _roles_with_parts("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU")
_TX2 = _roles_with_parts("VDD_IN", "VDD_SYS_CPU", "VDD_SYS_DDR", "VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_4V0_WIFI")
_SODIMM = _roles_with_parts("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")
_THOR = _roles_with_parts("VIN", "VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0")

TABLE: Final[Sequence[RailRoles]] = (
    RailRoles(("p3448", "p3450", "p3541", "jetson-nano"), _NANO.sums, _NANO.inside),
    RailRoles(("p2180", "p2371"), ("VDD_IN",), {"VDD_GPU": "VDD_IN", "VDD_CPU": "VDD_IN"}),  # TX1
    RailRoles(("p3310", "p3489", "p3636", "p2771", "quill"), _TX2.sums, _TX2.inside),
    RailRoles(("p3668",), _SODIMM.sums, _SODIMM.inside),  # Xavier NX
    RailRoles(("p2888", "p2972", "galen"), ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),  # AGX Xavier
    RailRoles(("p3767",), _SODIMM.sums, _SODIMM.inside),  # Orin NX and Orin Nano
    RailRoles(("p3701",), ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}),  # AGX Orin
    RailRoles(("p3834",), _THOR.sums, _THOR.inside),
)


def find_roles(compatible: Collection[str], labels: Collection[str]) -> RailRoles | None:
    """Return roles by the names in the device tree, else by the rail labels, or None if both are unknown."""
    names = [part for board in compatible for part in board.removeprefix("nvidia,").split("+")]
    named = [roles for name in names for roles in TABLE if name.startswith(roles.fits)]
    if named:
        return named[0]
    known = [roles for roles in TABLE if {*roles.sums, *roles.inside} >= set(labels) and set(roles.sums) <= set(labels)]
    return next(iter(known), None)


class RailSum(NamedTuple):
    watts: float | None
    fault: str | None = None


def total_power(roles: RailRoles | None, watts: Mapping[str, float | None]) -> RailSum:
    """Return the power of a board from its rails, or the reason why the total is implausible.

    Args:
        roles: Roles of the board's rails, or None if unknown.
        watts: Signed power of each rail by label, or None for a rail without a reading.
    """
    if not watts:
        return RailSum(None)
    if roles is None:
        return RailSum(None, f"it is not known which of the rails {', '.join(watts)} are parts of which on this board")
    for label in roles.sums:
        if label not in watts:
            return RailSum(None, f"the rail {label} is missing: {', '.join(watts)} alone are not the whole board")
        power = watts[label]
        if power is None:
            return RailSum(None, f"the rail {label} does not answer")
        if power < (0.0 if len(roles.sums) == 1 else -OFFSET_W):
            return RailSum(None, f"the rail {label} reads {power:.2f} W, below 0")
    found = sum(max(0.0, watts[label] or 0.0) for label in roles.sums)
    if not LEAST_W <= found <= MOST_W:
        return RailSum(None, f"the total of {found:.2f} W is implausible")
    for label in roles.sums:
        parts = sum(max(0.0, watts.get(part) or 0.0) for part in roles.parts_of(label))
        if parts > SLACK * max(0.0, watts[label] or 0.0) + SLACK_W:
            said = f"{watts[label]:.2f} W"
            return RailSum(None, f"the parts of the rail {label} add up to {parts:.2f} W, and it reads {said}")
    return RailSum(found)


class StuckRailCheck:
    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # (total, sum of its parts)

    def check_reading(self, whole: float, parts: float) -> str | None:
        """Add a reading. Return the reason if the total is stuck, or None."""
        if self._seen and whole != self._seen[-1][0]:
            self._seen.clear()
        self._seen = [*self._seen[1 - WINDOW :], (whole, parts)]
        moved = max(each for _, each in self._seen) - min(each for _, each in self._seen)
        if len(self._seen) < WINDOW or moved < MOVED_W:
            return None
        return f"the total reads {whole:.2f} W without change while its parts moved by {moved:.2f} W: it is stuck"
