"""Meters of Linux hosts: batteries, hwmon, RAPL, Raspberry Pi 5, and a combination of meters.

A meter is an object with `coverage` and `read`, see `fedquilt.core.Meter`. Sources of the formats:

- Batteries: kernel, ABI/testing/sysfs-class-power.
- RAPL: Linux's powercap class `intel-rapl`, which includes AMD. Zones named `package-N` or `package-N-die-D`, some
  with a `dram` zone inside, count microjoules and wrap at a range of their own. `psys`, `core` and `uncore` overlap
  with these zones and are left out. On most hosts only root can read the counters. Energy is unknown otherwise.
- Raspberry Pi 5: the output of `vcgencmd pmic_read_adc`, read through the firmware's mailbox /dev/vcio without a
  process for each reading (github.com/raspberrypi/utils, vcgencmd). Raspberry Pi OS gives that file to the group
  `video`. A line is "VDD_CORE_A current(7)=1.29000000A" or "VDD_CORE_V volt(15)=0.75000000V". The 5 V input has a
  voltage but no current. USB devices and the controller's losses are therefore not in the sum, whose coverage is
  "processor".
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from fedquilt.core import Coverage, Meter, Power
from fedquilt.host import sysfs

log = logging.getLogger("fedquilt.devices")

COVERAGE_ORDER: Final = {"board": 0, "processor": 1, "rail": 2}  # from widest to narrowest
MAX_PLAUSIBLE_W: Final = 2000.0  # no board draws more
MAX_READ_S: Final = 1.0  # longest `read` without a warning, because `read` blocks the agent
SILENCE_TIMEOUT_S: Final = 10.0  # time without a value after which a meter of narrower coverage is used instead


class WidestRangeMeter:
    """Meter that combines several meters and reports the power of the one with the widest coverage.

    A meter of the board precedes one of the processor. A meter of a single rail only adds to the rails. All meters are
    read each time, because counters wrap.
    """

    def __init__(self, meters: Iterable[Meter], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters = sorted(meters, key=lambda meter: COVERAGE_ORDER[meter.coverage])
        self._last_value_s: dict[int, float] = {}  # index of a meter -> time of its last value
        self._failed: set[int] = set()  # indices of meters with a reported failure
        self._slow: set[int] = set()  # indices of meters with a reported slow read

    def read(self, now_s: float) -> Power:
        """Return the power of the widest-coverage meter with a value, and the rails of all meters.

        After a failure of the widest meter the total is None for a while, because the next meter covers a smaller part
        of the board.
        """
        widest: Power | None = None
        rails_w: dict[str, float] = {}
        for index, meter in enumerate(self._meters):
            power = self._read_meter(index, meter, now_s)
            rails_w |= power.rails_w
            if meter.coverage == "rail":
                if power.total_w is not None and power.source is not None:
                    rails_w[power.source] = power.total_w
            elif widest is None and (power.total_w is not None or power.energy_j is not None):
                widest, self._last_value_s[index] = power, now_s
            elif widest is None and 0 <= now_s - self._last_value_s.get(index, math.inf) <= SILENCE_TIMEOUT_S:
                widest = Power()
        reading = widest or Power()
        return Power(reading.total_w, reading.source, rails_w, reading.energy_j)

    def _read_meter(self, index: int, meter: Meter, now_s: float) -> Power:
        """Return the plausible values of a meter, or none after an error. Each meter's error is logged once."""
        try:
            started_s = self._clock()
            power = meter.read(now_s)
            self._report_slow_meter(index, meter, self._clock() - started_s)
            rails_w = {
                label: watts
                for label, watts in power.rails_w.items()
                if plausible_or_none(watts, MAX_PLAUSIBLE_W) is not None
            }
            return Power(
                plausible_or_none(power.total_w, MAX_PLAUSIBLE_W),
                power.source,
                rails_w,
                plausible_or_none(power.energy_j),
            )
        except Exception as error:  # plug-ins may raise any exception, and the board's task continues
            if index not in self._failed:
                self._failed.add(index)
                name = type(meter).__name__
                log.warning("meter %s failed, readings without it: %s: %s", name, type(error).__name__, error)
            return Power()

    def _report_slow_meter(self, index: int, meter: Meter, read_s: float) -> None:
        if read_s > MAX_READ_S and index not in self._slow:
            self._slow.add(index)
            log.warning(
                "meter %s took %.1f s and blocked the agent: read the sensor in a thread (docs/add-a-sensor.md)",
                *(type(meter).__name__, read_s),
            )


def plausible_or_none(value: float | None, limit: float = math.inf) -> float | None:
    return value if value is not None and math.isfinite(value) and 0 <= value <= limit else None


class PowerFromEnergy:
    def __init__(self) -> None:
        self._last_sample: tuple[float, float] | None = None  # (now_s, energy_j)

    def mean_power_w(self, now_s: float, energy_j: float) -> float | None:
        """Return the mean power since the last call, or None on the first call or if the counter fell."""
        previous, self._last_sample = self._last_sample, (now_s, energy_j)
        if previous is None or now_s <= previous[0] or energy_j < previous[1]:
            return None
        return (energy_j - previous[1]) / (now_s - previous[0])


class Batteries:
    coverage: Coverage = "board"

    def __init__(self, supplies: Path) -> None:
        self._batteries = [
            supply
            for supply in sysfs.list_matches(supplies, "*")
            if sysfs.read_line(supply / "type") == "Battery" and sysfs.read_line(supply / "scope") != "Device"
        ]

    def read(self, now_s: float) -> Power:
        return Power(self.discharge_power_w(), "battery")

    def charge_fraction(self) -> float | None:
        """Return the charge of all batteries together, from 0 to 1, or None if unknown."""
        for now_name, full_name in (("energy_now", "energy_full"), ("charge_now", "charge_full")):
            levels = [
                (sysfs.read_int(battery / now_name), sysfs.read_int(battery / full_name)) for battery in self._batteries
            ]
            charge, full_charge = sum(battery[0] or 0 for battery in levels), sum(battery[1] or 0 for battery in levels)
            if full_charge > 0 and all(battery[0] is not None and battery[1] for battery in levels):
                return min(1.0, max(0.0, charge / full_charge))
        percents = [
            percent for battery in self._batteries if (percent := sysfs.read_int(battery / "capacity")) is not None
        ]
        return min(1.0, max(0.0, sum(percents) / len(percents) / 100)) if percents else None

    def is_charging(self) -> bool | None:
        """Return whether mains power feeds this host, even with a full battery, or None if unknown."""
        states = {sysfs.read_line(battery / "status") for battery in self._batteries}
        if "Discharging" in states:
            return False
        return True if states & {"Charging", "Full", "Not charging"} else None

    def discharge_power_w(self) -> float | None:
        """Return the power that batteries supply to the host, or None on mains power or without a reading."""
        powers_w = [
            _battery_power_w(battery)
            for battery in self._batteries
            if sysfs.read_line(battery / "status") == "Discharging"
        ]
        known_powers_w = [watts for watts in powers_w if watts is not None]
        return sum(known_powers_w) if known_powers_w and len(known_powers_w) == len(powers_w) else None


def _battery_power_w(battery: Path) -> float | None:
    power = sysfs.read_int(battery / "power_now")  # some drivers report a discharge as negative
    if power is not None:
        return abs(power) / 1e6
    volts, amperes = sysfs.read_int(battery / "voltage_now"), sysfs.read_int(battery / "current_now")
    return None if volts is None or amperes is None else abs(volts * amperes) / 1e12


# Sensors of the whole machine: of ACPI and of Apple.
WHOLE_MACHINE_METERS = ("power_meter", "macsmc_hwmon Total System Power")
SENSOR_PATTERNS = ("power*_average", "power*_input", "energy*_input")


class Hwmon:
    """All power and energy sensors in hwmon, by chip name and label, as one `fedquilt.core.Meter`.

    The meter covers the board if a sensor measures the whole machine, otherwise only rails.
    """

    def __init__(self, hwmon: Path) -> None:
        self._powers: dict[str, Path] = {}
        self._energies: dict[str, tuple[Path, PowerFromEnergy]] = {}
        for chip in sysfs.list_matches(hwmon, "hwmon*"):
            name = sysfs.read_line(chip / "name") or chip.name
            for file in sorted(path for kind in SENSOR_PATTERNS for path in sysfs.list_matches(chip, kind)):
                channel, _, kind = file.name.partition("_")
                label = sysfs.read_line(chip / f"{channel}_label") or channel
                rail = f"{name} {label}"
                if rail in self._powers and kind == "input" and sysfs.is_visible(chip / f"{channel}_average"):
                    continue  # the same channel, averaged
                if rail in self._powers or rail in self._energies:
                    rail = f"{name} {label} ({chip.name})"  # a second chip of this name
                if channel.startswith("energy"):
                    self._energies[rail] = (file, PowerFromEnergy())
                else:
                    self._powers[rail] = file
        measures_whole_machine = any(rail.startswith(WHOLE_MACHINE_METERS) for rail in (*self._powers, *self._energies))
        self.coverage: Coverage = "board" if measures_whole_machine else "rail"

    def read(self, now_s: float) -> Power:
        microwatts = {rail: sysfs.read_int(file) for rail, file in self._powers.items()}
        rails = {rail: value / 1e6 for rail, value in microwatts.items() if value is not None}
        for rail, (file, power_from_energy) in self._energies.items():
            count_uj = sysfs.read_int(file)
            watts = None if count_uj is None else power_from_energy.mean_power_w(now_s, count_uj / 1e6)
            if watts is not None:
                rails[rail] = watts
        whole_rail = next((rail for rail in rails if rail.startswith(WHOLE_MACHINE_METERS)), None)
        return Power(
            None if whole_rail is None else rails[whole_rail],
            None if whole_rail is None else f"hwmon {whole_rail}",
            rails,
        )


class Rapl:
    """Energy of processor and memory since the object was created, as a `fedquilt.core.Meter`.

    Counters must be read before they wrap, within some minutes of full load.
    """

    coverage: Coverage = "processor"

    def __init__(self, powercap: Path) -> None:
        self._counters = [EnergyCounter(zone) for zone in rapl_zones(powercap)]
        self._rate = PowerFromEnergy()

    def read(self, now_s: float) -> Power:
        energy_j = self.read_energy_j()
        watts = None if energy_j is None else self._rate.mean_power_w(now_s, energy_j)
        return Power(watts, "rapl", {} if watts is None else {"rapl": watts}, energy_j)

    def read_energy_j(self) -> float | None:
        totals = [counter.read_total_j() for counter in self._counters]
        known_totals = [total for total in totals if total is not None]
        return sum(known_totals) if known_totals and len(known_totals) == len(totals) else None


class EnergyCounter:
    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._last_uj = sysfs.read_int(self._file)
        self._range_uj = sysfs.read_int(zone / "max_energy_range_uj")
        self._total_uj = 0

    def read_total_j(self) -> float | None:
        """Return the energy since the first reading, or None if unreadable or wrapped at an unknown maximum."""
        value_uj = sysfs.read_int(self._file)
        if value_uj is None or self._last_uj is None:
            return None
        if value_uj < self._last_uj:
            if self._range_uj is None:
                return None
            self._total_uj += self._range_uj
        self._total_uj += value_uj - self._last_uj
        self._last_uj = value_uj
        return self._total_uj / 1e6


def rapl_zones(powercap: Path) -> list[Path]:
    """Return the zones of packages and their memory, which do not overlap."""

    def is_counted(name: str) -> bool:
        return name.startswith("package-") or name == "dram"

    return [
        zone
        for zone in sysfs.list_matches(powercap, "intel-rapl:*")
        if is_counted(sysfs.read_line(zone / "name") or "")
    ]


PMIC_COMMAND: Final = "pmic_read_adc"
MAILBOX: Final = "dev/vcio"
PROPERTY_IOCTL: Final = 0xC0006400 | struct.calcsize("P") << 16  # _IOWR(100, 0, char *)
GENCMD_TAG: Final = 0x00030080  # tag of the firmware's commands
TEXT_BYTES: Final = 4096  # buffer size of newer versions of vcgencmd, because all channels take nearly 1024
HEADER_WORDS: Final = 6  # words before the text: size, request, tag, room, length, error
LINE: Final = re.compile(r"(\w+)_([AV]) (?:current|volt)\(\d+\)=([0-9.]+)[AV]")


class Pmic:
    coverage: Coverage = "processor"

    def __init__(self, read_output: Callable[[], str | None]) -> None:
        self._read_output = read_output

    def read(self, now_s: float) -> Power:
        values = {(rail, unit): float(value) for rail, unit, value in LINE.findall(self._read_output() or "")}
        rails_w = {
            rail: amperes * values[rail, "V"]
            for (rail, unit), amperes in values.items()
            if unit == "A" and (rail, "V") in values
        }
        return Power(sum(rails_w.values()), "pmic", rails_w) if rails_w else Power()


def detect_pmic(root: Path) -> Pmic | None:
    """Return the meter of a Raspberry Pi 5, or None on another board or without permission."""
    meter = Pmic(lambda: run_firmware_command(root / MAILBOX, PMIC_COMMAND))
    return meter if meter.read(0.0).rails_w else None


def run_firmware_command(mailbox: Path, command: str) -> str | None:
    """Return the output of a Raspberry Pi firmware command, or None after an error or without permission."""
    buffer = array.array("I", bytes(4 * HEADER_WORDS + TEXT_BYTES + 4))
    text = command.encode() + b"\0"
    buffer[0], buffer[2], buffer[3] = 4 * len(buffer), GENCMD_TAG, TEXT_BYTES
    memoryview(buffer).cast("B")[4 * HEADER_WORDS : 4 * HEADER_WORDS + len(text)] = text
    with contextlib.suppress(OSError):
        fd = os.open(mailbox, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, PROPERTY_IOCTL, buffer)
        finally:
            os.close(fd)
        if buffer[5] == 0:
            return buffer.tobytes()[4 * HEADER_WORDS :].split(b"\0")[0].decode(errors="replace")
    return None
