"""Power monitors of Jetsons: TI's INA3221, three rails each, on one or more I2C addresses.

There are two layouts. NVIDIA's driver up to JetPack 4 has `ina3221x/<address>/iio:device<n>/` with `rail_name_<k>` and
`in_power<k>_input` in milliwatts. Linux's driver from JetPack 5 has `ina3221/<address>/hwmon/hwmon<n>/` with
`in<k>_label`, `in<k>_input` in millivolts and `curr<k>_input` in milliamperes (kernel, hwmon/ina3221, and NVIDIA's
developer guide, "Power monitor"). Channels above 3 are not rails but shunts, and number 7 is their sum.

On Jetson Thor an INA238 measures the board's input, in hwmon with `power1_input` in microwatts (kernel, hwmon/ina238).
`sensors.rails` defines which rails form the total and which are parts of other rails.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import Covers, Power
from fedquilt.edge_agent.devices.sensors import rails
from fedquilt.host import sysfs

log = logging.getLogger("fedquilt.devices")

VIN: Final = "VIN"  # the board's input, where an INA238 measures it
UNCONNECTED: Final = "NC"


@dataclass(frozen=True)
class Rail:
    label: str
    files: tuple[Path, ...]
    scale: float  # to watts

    def read_watts(self) -> float | None:
        """Return the signed power, or None if a file cannot be read."""
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

    covers: Covers = "board"

    def __init__(self, root: Path) -> None:
        listed = sysfs.list_matches(root / "sys/class/hwmon", "hwmon*")
        found = [*(_rails_on_bus(root / "sys/bus/i2c/drivers") or _hwmon_rails(listed)), *_input_rails(listed)]
        self.rails = _with_unique_labels(found)
        labels = [rail.label for rail in self.rails]
        self.roles = rails.find_roles(sysfs.read_strings(sysfs.device_tree_folder(root) / "compatible"), labels)
        self.fault: str | None = None
        self._stuck = rails.StuckRailCheck()
        sums = () if self.roles is None else self.roles.sums
        chip = "ina238" if sums == (VIN,) else "ina3221"
        self._source = f"{chip} {'sum of ' if len(sums) > 1 else ''}{', '.join(sums)}"

    def read(self, now_s: float) -> Power:
        """Return the power of the board and of each rail. Small negative offsets read as 0."""
        watts = {rail.label: rail.read_watts() for rail in self.rails}
        known = {label: max(0.0, one) for label, one in watts.items() if one is not None and one >= -rails.OFFSET_W}
        whole, fault = rails.total_power(self.roles, watts)
        if whole is not None and self.roles is not None:
            inside = [label for label in self.roles.inside if label in known]
            fault = self._stuck.check_reading(whole, sum(known[label] for label in inside))
            whole = None if fault else whole
        if fault is not None and fault != self.fault:
            log.warning("the power of this board is not known: %s", fault)
        self.fault = fault
        return Power(whole, None if whole is None else self._source, known)


def _rails_on_bus(drivers: Path) -> list[Rail]:
    chips = [*sysfs.list_matches(drivers, "ina3221x/*-*"), *sysfs.list_matches(drivers, "ina3221/*-*")]
    found = []
    for chip in chips:
        old = sorted({device.resolve() for device in sysfs.list_matches(chip, "iio[:_]device*")})
        found += [*_iio_rails(old), *_hwmon_rails(sysfs.list_matches(chip, "hwmon/hwmon*"))]
    return found


def _iio_rails(devices: list[Path]) -> list[Rail]:
    found = []
    for device in devices:
        for channel in range(3):
            label, file = sysfs.read_line(device / f"rail_name_{channel}"), device / f"in_power{channel}_input"
            if label and label != UNCONNECTED and sysfs.is_visible(file):
                found.append(Rail(label, (file,), 1e-3))
    return found


def _hwmon_rails(devices: list[Path]) -> list[Rail]:
    found = []
    for device in devices:
        if sysfs.read_line(device / "name") != "ina3221":
            continue
        for channel in range(1, 4):
            label = sysfs.read_line(device / f"in{channel}_label")
            files = (device / f"in{channel}_input", device / f"curr{channel}_input")
            off = sysfs.read_int(device / f"in{channel}_enable") == 0
            if label and label != UNCONNECTED and not off and all(sysfs.is_visible(file) for file in files):
                found.append(Rail(label, files, 1e-6))
    return found


def _input_rails(devices: list[Path]) -> list[Rail]:
    chips = [device for device in devices if sysfs.read_line(device / "name") == "ina238"]
    files = [device / "power1_input" for device in chips if sysfs.is_visible(device / "power1_input")]
    return [Rail(VIN, (files[0],), 1e-6)] if files else []


def _with_unique_labels(every: list[Rail]) -> list[Rail]:
    seen: dict[str, int] = {}
    apart = []
    for rail in every:
        seen[rail.label] = number = seen.get(rail.label, 0) + 1
        apart.append(rail if number == 1 else Rail(f"{rail.label} ({number})", rail.files, rail.scale))
    return apart
