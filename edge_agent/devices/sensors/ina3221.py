"""Power monitors of Jetsons: TI's INA3221, three rails each, on one or more I2C addresses.

Two layouts: NVIDIA's own driver up to JetPack 4, `ina3221x/<address>/iio:device<n>/` with `rail_name_<k>` and
`in_power<k>_input` in milliwatts; Linux's from JetPack 5, `ina3221/<address>/hwmon/hwmon<n>/` with `in<k>_label`,
`in<k>_input` in millivolts and `curr<k>_input` in milliamperes (kernel, hwmon/ina3221; NVIDIA's developer
guide, "Power monitor"). Channels above 3 are not rails: shunts, and number 7, their sum.

On Jetson Thor these rails are parts of the board's input, which a TI INA238 measures: hwmon lists it with
`power1_input` in microwatts (kernel, hwmon/ina238; jetson_stats, pull request 900).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import Covers, Power
from fedquilt.edge_agent import sysfs

VIN: Final = "VIN"  # the board's input, where an INA238 measures it
TOTALS: Final = (VIN, "VDD_IN", "POM_5V_IN")  # the board's or module's input; every other rail is a part of it
UNCONNECTED: Final = "NC"


@dataclass(frozen=True)
class Rail:
    """One channel, whose power is the product of its files."""

    label: str
    files: tuple[Path, ...]
    scale: float  # to watts

    def watts(self) -> float | None:
        """Power in watts; None if a file does not answer. No rail feeds power back: a negative offset counts as 0."""
        product = self.scale
        for file in self.files:
            value = sysfs.whole(file)
            if value is None:
                return None
            product *= value
        return max(0.0, product)


class Ina3221:
    """All rails of the board. The total is the input rail's, or else the sum of all rails if each answers.

    A `fedquilt.core.Meter`.
    """

    covers: Covers = "board"

    def __init__(self, root: Path) -> None:
        listed = sysfs.glob(root / "sys/class/hwmon", "hwmon*")
        found = [*(_on_bus(root / "sys/bus/i2c/drivers") or _hwmon(listed)), *_input(listed)]
        self.rails = _named_apart(found)
        labels = [rail.label for rail in self.rails]
        self._total = next((label for label in TOTALS if label in labels), None)
        chip = "ina238" if self._total == VIN else "ina3221"
        self._source = f"{chip} {self._total}" if self._total else "ina3221 sum of " + ", ".join(labels)

    def read(self, now_s: float) -> Power:
        """Power of the board and of each rail that answers."""
        watts = {rail.label: rail.watts() for rail in self.rails}
        known = {label: value for label, value in watts.items() if value is not None}
        if self._total is not None:
            total = known.get(self._total)
        else:  # a part must not pass for the whole
            total = sum(known.values()) if known and len(known) == len(watts) else None
        return Power(total, None if total is None else self._source, known)


def _on_bus(drivers: Path) -> list[Rail]:
    chips = [*sysfs.glob(drivers, "ina3221x/*-*"), *sysfs.glob(drivers, "ina3221/*-*")]
    rails = []
    for chip in chips:
        old = sorted({device.resolve() for device in sysfs.glob(chip, "iio[:_]device*")})
        rails += [*_iio(old), *_hwmon(sysfs.glob(chip, "hwmon/hwmon*"))]
    return rails


def _iio(devices: list[Path]) -> list[Rail]:
    rails = []
    for device in devices:
        for channel in range(3):
            label, file = sysfs.line(device / f"rail_name_{channel}"), device / f"in_power{channel}_input"
            if label and label != UNCONNECTED and sysfs.there(file):
                rails.append(Rail(label, (file,), 1e-3))
    return rails


def _hwmon(devices: list[Path]) -> list[Rail]:
    rails = []
    for device in devices:
        if sysfs.line(device / "name") != "ina3221":
            continue
        for channel in range(1, 4):
            label = sysfs.line(device / f"in{channel}_label")
            files = (device / f"in{channel}_input", device / f"curr{channel}_input")
            off = sysfs.whole(device / f"in{channel}_enable") == 0
            if label and label != UNCONNECTED and not off and all(sysfs.there(file) for file in files):
                rails.append(Rail(label, files, 1e-6))
    return rails


def _input(devices: list[Path]) -> list[Rail]:
    """The board's input, of which the kernel tells the power itself; of several chips the first."""
    chips = [device for device in devices if sysfs.line(device / "name") == "ina238"]
    files = [device / "power1_input" for device in chips if sysfs.there(device / "power1_input")]
    return [Rail(VIN, (files[0],), 1e-6)] if files else []


def _named_apart(rails: list[Rail]) -> list[Rail]:
    """Rename labels used by several chips, where one would hide the other's reading."""
    seen: dict[str, int] = {}
    apart = []
    for rail in rails:
        seen[rail.label] = number = seen.get(rail.label, 0) + 1
        apart.append(rail if number == 1 else Rail(f"{rail.label} ({number})", rail.files, rail.scale))
    return apart
