"""Batteries (kernel, ABI/testing/sysfs-class-power): their charge, and the power of a host that runs on them alone."""

from __future__ import annotations

from pathlib import Path

from fedquilt.core import Covers, Power
from fedquilt.edge_agent import sysfs


class Batteries:
    """All batteries that feed this host, combined; a mouse's own is left out. A `fedquilt.core.Meter`."""

    covers: Covers = "board"

    def __init__(self, supplies: Path) -> None:
        self._found = [
            supply
            for supply in sysfs.glob(supplies, "*")
            if sysfs.line(supply / "type") == "Battery" and sysfs.line(supply / "scope") != "Device"
        ]

    def read(self, now_s: float) -> Power:
        """Power drawn from them while they alone feed the host."""
        return Power(self.power_w(), "battery")

    def charge(self) -> float | None:
        """Charge, 0..1; None: no battery, or no value."""
        for now, full in (("energy_now", "energy_full"), ("charge_now", "charge_full")):
            known = [(sysfs.whole(one / now), sysfs.whole(one / full)) for one in self._found]
            held, most = sum(one[0] or 0 for one in known), sum(one[1] or 0 for one in known)
            if most > 0 and all(one[0] is not None and one[1] for one in known):
                return min(1.0, max(0.0, held / most))
        percents = [percent for one in self._found if (percent := sysfs.whole(one / "capacity")) is not None]
        return min(1.0, max(0.0, sum(percents) / len(percents) / 100)) if percents else None

    def charging(self) -> bool | None:
        """Whether mains power feeds this host, even if the battery is full or held back; None: unknown."""
        states = {sysfs.line(one / "status") for one in self._found}
        if "Discharging" in states:
            return False
        return True if states & {"Charging", "Full", "Not charging"} else None

    def power_w(self) -> float | None:
        """Watts of the host while it runs on batteries alone; None on mains power, where they do not show it."""
        drawn = [_drawn_w(one) for one in self._found if sysfs.line(one / "status") == "Discharging"]
        known = [watts for watts in drawn if watts is not None]
        return sum(known) if known and len(known) == len(drawn) else None


def _drawn_w(battery: Path) -> float | None:
    """Power in watts from microwatts, or microvolts times microamperes; some drivers give discharge a minus."""
    power = sysfs.whole(battery / "power_now")
    if power is not None:
        return abs(power) / 1e6
    volts, amperes = sysfs.whole(battery / "voltage_now"), sysfs.whole(battery / "current_now")
    return None if volts is None or amperes is None else abs(volts * amperes) / 1e12
