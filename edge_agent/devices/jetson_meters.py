"""Power monitors of Jetsons: one or more INA3221 by TI with three rails each, or the jtop service.

There are two layouts. NVIDIA's driver up to JetPack 4 has `ina3221x/<address>/iio:device<n>/` with `rail_name_<k>` and
`in_power<k>_input` in milliwatts. Linux's driver from JetPack 5 has `ina3221/<address>/hwmon/hwmon<n>/` with
`in<k>_label`, `in<k>_input` in millivolts and `curr<k>_input` in milliamperes (kernel, hwmon/ina3221, and NVIDIA's
developer guide, "Power monitor"). Channels above 3 are not rails but shunts, and number 7 is their sum.

The roles of rails are those of NVIDIA's developer guides, tables "Power monitor" (Jetson Linux R32.7 for Nano, TX2 and
Xavier, R35 and R36 for Orin, R38 for Thor). On AGX Orin the power of VDDQ_VDD2_1V8AO is included in VIN_SYS_5V0. On
Thor an INA238 measures VIN, the input of module and carrier board (hwmon `power1_input` in microwatts), and the three
INA3221 rails are parts of it (jetson_stats, pull request 900. A public log of an idle board has 13 W of rails and 23 W
at VIN).

jetson-stats is AGPL-3.0 and a separate daemon, for a Jetson whose own files show no rails (containers, new boards). It
is not a dependency: only its public client is used, and imported only if installed and needed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedquilt.core import Coverage, Power
from fedquilt.host import sysfs

OFFSET_W: Final = 0.5  # offset below 0 of a sensor without current; lower readings mean wrong wiring or setup
MIN_W: Final = 0.1  # minimum of a board that runs Linux
MAX_W: Final = 500.0  # maximum supply of these boards
SLACK: Final = 1.15  # parts may exceed the total by this factor, because rails are read one after another
SLACK_W: Final = 0.5


@dataclass(frozen=True)
class RailRoles:
    name_prefixes: tuple[str, ...]  # prefixes of module or board names after "nvidia," in the device tree
    # Rails whose sum is the total power, a single one if a rail measures the input of the board or module.
    total_rails: tuple[str, ...]
    containing_rails: Mapping[str, str] = field(default_factory=dict)  # part -> rail that includes its power

    def parts_of(self, rail: str) -> list[str]:
        return [part for part, container in self.containing_rails.items() if container == rail]


def _roles_with_parts(rail: str, *parts: str) -> RailRoles:
    return RailRoles((), (rail,), dict.fromkeys(parts, rail))


_NANO = _roles_with_parts("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU")
_TX2 = _roles_with_parts("VDD_IN", "VDD_SYS_CPU", "VDD_SYS_DDR", "VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_4V0_WIFI")
_SODIMM = _roles_with_parts("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")
_THOR = _roles_with_parts("VIN", "VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0")

RAIL_ROLES: Final[Sequence[RailRoles]] = (
    RailRoles(("p3448", "p3450", "p3541", "jetson-nano"), _NANO.total_rails, _NANO.containing_rails),
    RailRoles(("p2180", "p2371"), ("VDD_IN",), {"VDD_GPU": "VDD_IN", "VDD_CPU": "VDD_IN"}),  # TX1
    RailRoles(("p3310", "p3489", "p3636", "p2771", "quill"), _TX2.total_rails, _TX2.containing_rails),
    RailRoles(("p3668",), _SODIMM.total_rails, _SODIMM.containing_rails),  # Xavier NX
    RailRoles(("p2888", "p2972", "galen"), ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")),  # AGX Xavier
    RailRoles(("p3767",), _SODIMM.total_rails, _SODIMM.containing_rails),  # Orin NX and Orin Nano
    RailRoles(("p3701",), ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}),  # AGX Orin
    RailRoles(("p3834",), _THOR.total_rails, _THOR.containing_rails),
)


def find_roles(compatible: Collection[str], labels: Collection[str]) -> RailRoles | None:
    """Return the roles of rails, found by device-tree names or else rail labels, or None if unknown."""
    names = [part for board in compatible for part in board.removeprefix("nvidia,").split("+")]
    matching_roles = [roles for name in names for roles in RAIL_ROLES if name.startswith(roles.name_prefixes)]
    if matching_roles:
        return matching_roles[0]
    roles_by_labels = [
        roles
        for roles in RAIL_ROLES
        if {*roles.total_rails, *roles.containing_rails} >= set(labels) and set(roles.total_rails) <= set(labels)
    ]
    return next(iter(roles_by_labels), None)


class RailSum(NamedTuple):
    watts: float | None
    fault: str | None = None


def total_power(roles: RailRoles | None, watts: Mapping[str, float | None]) -> RailSum:
    """Return the power of a board from the watts of its rails, or the reason why the power is unknown."""
    if not watts:
        return RailSum(None)
    if roles is None:
        return RailSum(None, f"this board is unknown, and its rails {', '.join(watts)} may be parts of each other")
    for label in roles.total_rails:
        if label not in watts:
            return RailSum(None, f"rail {label} is missing, and {', '.join(watts)} are only parts of the board")
        power = watts[label]
        if power is None:
            return RailSum(None, f"rail {label} cannot be read")
        if power < (0.0 if len(roles.total_rails) == 1 else -OFFSET_W):
            return RailSum(None, f"rail {label} reads {power:.2f} W, below 0")
    total_w = sum(max(0.0, watts[label] or 0.0) for label in roles.total_rails)
    if not MIN_W <= total_w <= MAX_W:
        return RailSum(None, f"the total of {total_w:.2f} W is implausible")
    for label in roles.total_rails:
        parts = sum(max(0.0, watts.get(part) or 0.0) for part in roles.parts_of(label))
        if parts > SLACK * max(0.0, watts[label] or 0.0) + SLACK_W:
            return RailSum(None, f"rail {label} reads {watts[label]:.2f} W, less than its parts with {parts:.2f} W")
    return RailSum(total_w)


log = logging.getLogger("fedquilt.devices")

VIN: Final = "VIN"  # the board's input, where an INA238 measures it
UNCONNECTED: Final = "NC"


@dataclass(frozen=True)
class Rail:
    label: str
    files: tuple[Path, ...]  # files whose product is the power
    scale: float  # factor from the product to watts

    def read_watts(self) -> float | None:
        product = self.scale
        for file in self.files:
            value = sysfs.read_int(file)
            if value is None:
                return None
            product *= value
        return product


class Ina3221:
    """All rails of the board and their total, as one `fedquilt.core.Meter`.

    `fault` is the reason why the latest reading had no total, or None.
    """

    coverage: Coverage = "board"

    def __init__(self, root: Path) -> None:
        folders = sysfs.list_matches(root / "sys/class/hwmon", "hwmon*")
        rails = [*(_rails_on_bus(root / "sys/bus/i2c/drivers") or _hwmon_rails(folders)), *_input_rails(folders)]
        self.rails = _with_unique_labels(rails)
        labels = [rail.label for rail in self.rails]
        self.roles = find_roles(sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible"), labels)
        self.fault: str | None = None
        total_rails = () if self.roles is None else self.roles.total_rails
        chip = "ina238" if total_rails == (VIN,) else "ina3221"
        self._source = f"{chip} {'sum of ' if len(total_rails) > 1 else ''}{', '.join(total_rails)}"

    def read(self, now_s: float) -> Power:
        powers_w = {rail.label: rail.read_watts() for rail in self.rails}
        rails_w = {
            label: max(0.0, power_w)
            for label, power_w in powers_w.items()
            if power_w is not None and power_w >= -OFFSET_W
        }
        total_w, fault = total_power(self.roles, powers_w)
        if fault is not None and fault != self.fault:
            log.warning("power of this board is unknown: %s", fault)
        self.fault = fault
        return Power(total_w, None if total_w is None else self._source, rails_w)


def _rails_on_bus(drivers: Path) -> list[Rail]:
    chips = [*sysfs.list_matches(drivers, "ina3221x/*-*"), *sysfs.list_matches(drivers, "ina3221/*-*")]
    rails = []
    for chip in chips:
        iio_devices = sorted({device.resolve() for device in sysfs.list_matches(chip, "iio[:_]device*")})
        rails += [*_iio_rails(iio_devices), *_hwmon_rails(sysfs.list_matches(chip, "hwmon/hwmon*"))]
    return rails


def _iio_rails(devices: list[Path]) -> list[Rail]:
    rails = []
    for device in devices:
        for channel in range(3):
            label, file = sysfs.read_line(device / f"rail_name_{channel}"), device / f"in_power{channel}_input"
            if label and label != UNCONNECTED and sysfs.is_visible(file):
                rails.append(Rail(label, (file,), 1e-3))
    return rails


def _hwmon_rails(devices: list[Path]) -> list[Rail]:
    rails = []
    for device in devices:
        if sysfs.read_line(device / "name") != "ina3221":
            continue
        for channel in range(1, 4):
            label = sysfs.read_line(device / f"in{channel}_label")
            files = (device / f"in{channel}_input", device / f"curr{channel}_input")
            is_disabled = sysfs.read_int(device / f"in{channel}_enable") == 0
            if label and label != UNCONNECTED and not is_disabled and all(sysfs.is_visible(file) for file in files):
                rails.append(Rail(label, files, 1e-6))
    return rails


def _input_rails(devices: list[Path]) -> list[Rail]:
    chips = [device for device in devices if sysfs.read_line(device / "name") == "ina238"]
    files = [device / "power1_input" for device in chips if sysfs.is_visible(device / "power1_input")]
    return [Rail(VIN, (files[0],), 1e-6)] if files else []


def _with_unique_labels(rails: list[Rail]) -> list[Rail]:
    counts: dict[str, int] = {}
    unique_rails = []
    for rail in rails:
        counts[rail.label] = number = counts.get(rail.label, 0) + 1
        unique_rails.append(rail if number == 1 else Rail(f"{rail.label} ({number})", rail.files, rail.scale))
    return unique_rails


def connect_jtop(load: Callable[[str], Any] = importlib.import_module) -> JtopMeter | None:
    """Return a meter of a running jtop service, or None if jtop is not installed or does not respond."""
    try:
        client = load("jtop").jtop()
        client.start()
    except ImportError:
        return None
    except Exception as error:  # jtop's exceptions have no base class that can be named without importing jtop
        log.warning("power is unknown: the jtop service does not respond (%s)", error)
        return None
    return JtopMeter(client)


class JtopMeter:
    """Latest readings of a running `jtop` client, as a `fedquilt.core.Meter`.

    Readings are instantaneous milliwatts. The values that jtop calls "averages" are not averages and are not used.
    """

    coverage: Coverage = "board"

    def __init__(self, client: Any) -> None:
        self._client = client

    def read(self, now_s: float) -> Power:
        try:
            if not self._client.ok(spin=True):
                return Power()
            reading = self._client.power
            rails_w = {str(label): float(rail["power"]) / 1000 for label, rail in reading["rail"].items()}
            total_w = float(reading["tot"]["power"]) / 1000
            name = reading["tot"].get("name")
        except Exception as error:  # jtop's exceptions, or values of another version's shape
            log.debug("jtop has no power reading: %s", error)
            return Power()
        if not rails_w and name is None:
            return Power()  # the total of no rails would be 0
        if name is not None:
            rails_w = {str(name): total_w, **rails_w}
        return Power(total_w, f"jtop {name or 'sum of ' + ', '.join(rails_w)}", rails_w)

    def close(self) -> None:
        self._client.close()
