"""Batteries (kernel, ABI/testing/sysfs-class-power): charge, and power of a host running on them."""

from __future__ import annotations

from pathlib import Path

from fedquilt.core import Covers, Power
from fedquilt.host import sysfs


class Batteries:
    covers: Covers = "board"

    def __init__(self, supplies: Path) -> None:
        self._found = [
            supply
            for supply in sysfs.list_matches(supplies, "*")
            if sysfs.read_line(supply / "type") == "Battery" and sysfs.read_line(supply / "scope") != "Device"
        ]

    def read(self, now_s: float) -> Power:
        return Power(self.discharge_power_w(), "battery")

    def charge_fraction(self) -> float | None:
        """Return the charge from 0 to 1, or None without a battery or a value."""
        for now, full in (("energy_now", "energy_full"), ("charge_now", "charge_full")):
            known = [(sysfs.read_int(one / now), sysfs.read_int(one / full)) for one in self._found]
            held, most = sum(one[0] or 0 for one in known), sum(one[1] or 0 for one in known)
            if most > 0 and all(one[0] is not None and one[1] for one in known):
                return min(1.0, max(0.0, held / most))
        percents = [percent for one in self._found if (percent := sysfs.read_int(one / "capacity")) is not None]
        return min(1.0, max(0.0, sum(percents) / len(percents) / 100)) if percents else None

    def is_charging(self) -> bool | None:
        """Return whether mains power feeds this host, even with a full battery, or None if unknown."""
        states = {sysfs.read_line(one / "status") for one in self._found}
        if "Discharging" in states:
            return False
        return True if states & {"Charging", "Full", "Not charging"} else None

    def discharge_power_w(self) -> float | None:
        """Return the host's power on batteries, or None on mains power or without a reading."""
        drawn = [_battery_power_w(one) for one in self._found if sysfs.read_line(one / "status") == "Discharging"]
        known = [watts for watts in drawn if watts is not None]
        return sum(known) if known and len(known) == len(drawn) else None


def _battery_power_w(battery: Path) -> float | None:
    # Some drivers report a discharge as negative.
    power = sysfs.read_int(battery / "power_now")
    if power is not None:
        return abs(power) / 1e6
    volts, amperes = sysfs.read_int(battery / "voltage_now"), sysfs.read_int(battery / "current_now")
    return None if volts is None or amperes is None else abs(volts * amperes) / 1e12
