"""Power monitors of Jetsons: TI's INA3221, three rails each, on one or more I2C addresses.

Two layouts: NVIDIA's own driver up to JetPack 4, `ina3221x/<address>/iio:device<n>/` with `rail_name_<k>` and
`in_power<k>_input` in milliwatts; Linux's from JetPack 5, `ina3221/<address>/hwmon/hwmon<n>/` with `in<k>_label`,
`in<k>_input` in millivolts and `curr<k>_input` in milliamperes (kernel, hwmon/ina3221; NVIDIA's developer
guide, "Power monitor"). Channels above 3 are not rails: shunts, and number 7, their sum.

On Jetson Thor an INA238 measures the board's input: hwmon lists it with `power1_input` in microwatts (kernel,
hwmon/ina238). Which rails make the total, and which are parts of others, is in `sensors.rails`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import Covers, Power
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.devices.sensors import rails

log = logging.getLogger("fedquilt.devices")

VIN: Final = "VIN"  # the board's input, where an INA238 measures it
UNCONNECTED: Final = "NC"


@dataclass(frozen=True)
class Rail:
    """One channel, whose power is the product of its files."""

    label: str
    files: tuple[Path, ...]
    scale: float  # to watts

    def watts(self) -> float | None:
        """Power in watts, with its sign; None if a file does not answer."""
        product = self.scale
        for file in self.files:
            value = sysfs.whole(file)
            if value is None:
                return None
            product *= value
        return product


class Ina3221:
    """All rails of the board, and the total by their roles there. A `fedquilt.core.Meter`.

    `fault` says in a sentence why the latest reading had no total; None: it had one, or there are no rails.
    """

    covers: Covers = "board"

    def __init__(self, root: Path) -> None:
        listed = sysfs.glob(root / "sys/class/hwmon", "hwmon*")
        found = [*(_on_bus(root / "sys/bus/i2c/drivers") or _hwmon(listed)), *_input(listed)]
        self.rails = _named_apart(found)
        labels = [rail.label for rail in self.rails]
        self.roles = rails.find(sysfs.lines(sysfs.device_tree(root) / "compatible"), labels)
        self.fault: str | None = None
        self._stuck = rails.Stuck()
        sums = () if self.roles is None else self.roles.sums
        chip = "ina238" if sums == (VIN,) else "ina3221"
        self._source = f"{chip} {'sum of ' if len(sums) > 1 else ''}{', '.join(sums)}"

    def read(self, now_s: float) -> Power:
        """Power of the board and of each rail that answers. A part a little below 0 has an offset, and reads 0."""
        watts = {rail.label: rail.watts() for rail in self.rails}
        known = {label: max(0.0, one) for label, one in watts.items() if one is not None and one >= -rails.OFFSET_W}
        whole, fault = rails.total(self.roles, watts)
        if whole is not None and self.roles is not None:
            inside = [label for label in self.roles.inside if label in known]
            fault = self._stuck.seen(whole, sum(known[label] for label in inside))
            whole = None if fault else whole
        if fault is not None and fault != self.fault:
            log.warning("the power of this board is not known: %s", fault)
        self.fault = fault
        return Power(whole, None if whole is None else self._source, known)


def _on_bus(drivers: Path) -> list[Rail]:
    chips = [*sysfs.glob(drivers, "ina3221x/*-*"), *sysfs.glob(drivers, "ina3221/*-*")]
    found = []
    for chip in chips:
        old = sorted({device.resolve() for device in sysfs.glob(chip, "iio[:_]device*")})
        found += [*_iio(old), *_hwmon(sysfs.glob(chip, "hwmon/hwmon*"))]
    return found


def _iio(devices: list[Path]) -> list[Rail]:
    found = []
    for device in devices:
        for channel in range(3):
            label, file = sysfs.line(device / f"rail_name_{channel}"), device / f"in_power{channel}_input"
            if label and label != UNCONNECTED and sysfs.there(file):
                found.append(Rail(label, (file,), 1e-3))
    return found


def _hwmon(devices: list[Path]) -> list[Rail]:
    found = []
    for device in devices:
        if sysfs.line(device / "name") != "ina3221":
            continue
        for channel in range(1, 4):
            label = sysfs.line(device / f"in{channel}_label")
            files = (device / f"in{channel}_input", device / f"curr{channel}_input")
            off = sysfs.whole(device / f"in{channel}_enable") == 0
            if label and label != UNCONNECTED and not off and all(sysfs.there(file) for file in files):
                found.append(Rail(label, files, 1e-6))
    return found


def _input(devices: list[Path]) -> list[Rail]:
    """The board's input, of which the kernel tells the power itself; of several chips the first."""
    chips = [device for device in devices if sysfs.line(device / "name") == "ina238"]
    files = [device / "power1_input" for device in chips if sysfs.there(device / "power1_input")]
    return [Rail(VIN, (files[0],), 1e-6)] if files else []


def _named_apart(every: list[Rail]) -> list[Rail]:
    """Rename labels used by several chips, where one would hide the other's reading."""
    seen: dict[str, int] = {}
    apart = []
    for rail in every:
        seen[rail.label] = number = seen.get(rail.label, 0) + 1
        apart.append(rail if number == 1 else Rail(f"{rail.label} ({number})", rail.files, rail.scale))
    return apart
