"""Energy counters of the processor: Linux's powercap class `intel-rapl`, which includes AMD.

Zones named `package-N` or `package-N-die-D`, some with a `dram` zone inside, count microjoules and wrap at a range of
their own. `psys`, `core` and `uncore` overlap with these zones and are left out. On most hosts only root can read the
counters. Energy is unknown otherwise.
"""

from __future__ import annotations

from pathlib import Path

from fedquilt.core import Covers, Power
from fedquilt.edge_agent.devices.sensors.meters import PowerFromEnergy
from fedquilt.host import sysfs


class Rapl:
    """Energy of processor and memory since the object was created, as a `fedquilt.core.Meter`.

    Counters must be read before they wrap, within some minutes of full load.
    """

    covers: Covers = "processor"

    def __init__(self, powercap: Path) -> None:
        self._counters = [EnergyCounter(zone) for zone in rapl_zones(powercap)]
        self._rate = PowerFromEnergy()

    def read(self, now_s: float) -> Power:
        energy_j = self.read_energy_j()
        watts = None if energy_j is None else self._rate.mean_power_w(now_s, energy_j)
        return Power(watts, "rapl", {} if watts is None else {"rapl": watts}, energy_j)

    def read_energy_j(self) -> float | None:
        """Return the energy of all zones, or None unless every zone can be read."""
        totals = [counter.read_total_j() for counter in self._counters]
        known = [total for total in totals if total is not None]
        return sum(known) if known and len(known) == len(totals) else None


class EnergyCounter:
    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._last = sysfs.read_int(self._file)
        self._range = sysfs.read_int(zone / "max_energy_range_uj")
        self._total_uj = 0

    def read_total_j(self) -> float | None:
        """Return the energy since creation, or None if the counter is unreadable."""
        now = sysfs.read_int(self._file)
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
    """Return the zones of packages and their memory, which do not overlap."""

    def is_counted(name: str) -> bool:
        return name.startswith("package-") or name == "dram"

    return [
        zone
        for zone in sysfs.list_matches(powercap, "intel-rapl:*")
        if is_counted(sysfs.read_line(zone / "name") or "")
    ]
