"""Meters of any Linux host: RAPL's counters, hwmon's power and energy sensors, batteries.

RAPL is Linux's powercap class `intel-rapl` (AMD's processors are in it too): zones named `package-N`
or `package-N-die-D`, some with a `dram` zone inside, count microjoules and wrap at a range of their
own. `psys`, `core` and `uncore` overlap with these and are left out. Most hosts let only root read
the counters; then energy is unknown. hwmon counts microwatts and microjoules (kernel, hwmon/sysfs-interface).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedquilt.edge_agent import sysfs

WHOLE_METERS = ("power_meter", "macsmc_hwmon Total System Power")  # ACPI's meter, and Apple's: of the whole machine
SENSORS = ("power*_average", "power*_input", "energy*_input")


@dataclass(frozen=True)
class Power:
    """What a meter says now, in watts. The total is None unless it is that of the whole board."""

    total_w: float | None = None
    source: str | None = None  # of the total
    rails_w: dict[str, float] = field(default_factory=dict)


class Meter(Protocol):
    """Something that tells power at once."""

    def read(self, now_s: float) -> Power: ...


class Rate:
    """Watts from a count of joules, between one reading and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # (now_s, energy_j)

    def watts(self, now_s: float, energy_j: float) -> float | None:
        """None for the first reading, and where the clock or the count went back."""
        last, self._last = self._last, (now_s, energy_j)
        if last is None or now_s <= last[0] or energy_j < last[1]:
            return None
        return (energy_j - last[1]) / (now_s - last[0])


class Rapl:
    """The processor's and its memory's energy since this was made."""

    def __init__(self, powercap: Path) -> None:
        self._counters = [Counter(zone) for zone in rapl_zones(powercap)]

    def energy_j(self) -> float | None:
        """Of all zones; None unless every one can be read, as a part would pass for the whole."""
        totals = [counter.total_j() for counter in self._counters]
        known = [total for total in totals if total is not None]
        return sum(known) if known and len(known) == len(totals) else None


class Counter:
    """One RAPL zone: joules since it was made, over any number of wraps that are each seen."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._last = sysfs.whole(self._file)
        self._range = sysfs.whole(zone / "max_energy_range_uj")
        self._total_uj = 0

    def total_j(self) -> float | None:
        now = sysfs.whole(self._file)
        if now is None or self._last is None:
            return None
        if now < self._last:
            if self._range is None:
                return None
            self._total_uj += self._range
        self._total_uj += now - self._last
        self._last = now
        return self._total_uj / 1e6


def rapl_zones(powercap: Path) -> list[Path]:
    """Packages, and the memory beside them: none of these is part of another."""

    def counted(name: str) -> bool:
        return name.startswith("package-") or name == "dram"

    return [zone for zone in sysfs.glob(powercap, "intel-rapl:*") if counted(sysfs.line(zone / "name") or "")]


class Hwmon:
    """Every power and energy sensor that hwmon lists, by its chip's name and its label."""

    def __init__(self, hwmon: Path) -> None:
        self._powers: dict[str, Path] = {}
        self._energies: dict[str, tuple[Path, Rate]] = {}
        for chip in sysfs.glob(hwmon, "hwmon*"):
            name = sysfs.line(chip / "name") or chip.name
            for file in sorted(each for kind in SENSORS for each in sysfs.glob(chip, kind)):
                channel, _, kind = file.name.partition("_")
                label = sysfs.line(chip / f"{channel}_label") or channel
                rail = f"{name} {label}"
                if rail in self._powers and kind == "input" and sysfs.there(chip / f"{channel}_average"):
                    continue  # the same channel, averaged
                if rail in self._powers or rail in self._energies:
                    rail = f"{name} {label} ({chip.name})"  # a second chip of this name
                if channel.startswith("energy"):
                    self._energies[rail] = (file, Rate())
                else:
                    self._powers[rail] = file

    def read(self, now_s: float) -> Power:
        """All that answer; the total where one of them is a meter of the whole machine."""
        micro = {rail: sysfs.whole(file) for rail, file in self._powers.items()}
        rails = {rail: value / 1e6 for rail, value in micro.items() if value is not None}
        for rail, (file, rate) in self._energies.items():
            count_uj = sysfs.whole(file)
            watts = None if count_uj is None else rate.watts(now_s, count_uj / 1e6)
            if watts is not None:
                rails[rail] = watts
        whole = next((rail for rail in rails if rail.startswith(WHOLE_METERS)), None)
        return Power(None if whole is None else rails[whole], None if whole is None else f"hwmon {whole}", rails)


class Batteries:
    """The batteries that feed this host, taken together; a mouse's own is none of them."""

    def __init__(self, supplies: Path) -> None:
        self._found = [
            supply
            for supply in sysfs.glob(supplies, "*")
            if sysfs.line(supply / "type") == "Battery" and sysfs.line(supply / "scope") != "Device"
        ]

    def charge(self) -> float | None:
        """0..1; None: no battery, or one that does not say."""
        for now, full in (("energy_now", "energy_full"), ("charge_now", "charge_full")):
            known = [(sysfs.whole(one / now), sysfs.whole(one / full)) for one in self._found]
            held, most = sum(one[0] or 0 for one in known), sum(one[1] or 0 for one in known)
            if most > 0 and all(one[0] is not None and one[1] for one in known):
                return min(1.0, max(0.0, held / most))
        percents = [percent for one in self._found if (percent := sysfs.whole(one / "capacity")) is not None]
        return min(1.0, max(0.0, sum(percents) / len(percents) / 100)) if percents else None

    def charging(self) -> bool | None:
        """Whether the mains feed this host, be the battery full or held back; None: it does not say."""
        states = {sysfs.line(one / "status") for one in self._found}
        if "Discharging" in states:
            return False
        return True if states & {"Charging", "Full", "Not charging"} else None

    def power_w(self) -> float | None:
        """What the host takes while it lives on its batteries alone; None on the mains, where they do not tell."""
        drawn = [_drawn_w(one) for one in self._found if sysfs.line(one / "status") == "Discharging"]
        known = [watts for watts in drawn if watts is not None]
        return sum(known) if known and len(known) == len(drawn) else None


def _drawn_w(battery: Path) -> float | None:
    """Microwatts, or microvolts times microamperes; some drivers give what flows out a minus."""
    power = sysfs.whole(battery / "power_now")
    if power is not None:
        return abs(power) / 1e6
    volts, amperes = sysfs.whole(battery / "voltage_now"), sysfs.whole(battery / "current_now")
    return None if volts is None or amperes is None else abs(volts * amperes) / 1e12
