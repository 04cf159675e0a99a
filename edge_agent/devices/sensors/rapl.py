"""Energy counters of the processor: Linux's powercap class `intel-rapl`, which includes AMD's processors.

Zones named `package-N` or `package-N-die-D`, some with a `dram` zone inside, count microjoules and wrap at a range of
their own. `psys`, `core` and `uncore` overlap with these and are left out. Most hosts let only root read the counters;
then energy is unknown.
"""

from __future__ import annotations

from pathlib import Path

from fedquilt.core import Covers, Power
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.devices.sensors.meters import Rate


class Rapl:
    """Energy of the processor and its memory since this object was made. A `fedquilt.core.Meter`.

    Read it more often than the counters wrap, some minutes under full load.
    """

    covers: Covers = "processor"

    def __init__(self, powercap: Path) -> None:
        self._counters = [Counter(zone) for zone in rapl_zones(powercap)]
        self._rate = Rate()

    def read(self, now_s: float) -> Power:
        """Energy since the meter was made, and mean power since the last reading."""
        energy_j = self.energy_j()
        watts = None if energy_j is None else self._rate.watts(now_s, energy_j)
        return Power(watts, "rapl", {} if watts is None else {"rapl": watts}, energy_j)

    def energy_j(self) -> float | None:
        """Joules of all zones; None unless every one can be read, as a part must not pass for the whole."""
        totals = [counter.total_j() for counter in self._counters]
        known = [total for total in totals if total is not None]
        return sum(known) if known and len(known) == len(totals) else None


class Counter:
    """One RAPL zone: joules since it was made, over any number of wraps if each is seen."""

    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        self._last = sysfs.whole(self._file)
        self._range = sysfs.whole(zone / "max_energy_range_uj")
        self._total_uj = 0

    def total_j(self) -> float | None:
        """Joules so far; None: unreadable."""
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
    """Zones of packages, and of the memory beside them: none is part of another."""

    def counted(name: str) -> bool:
        return name.startswith("package-") or name == "dram"

    return [zone for zone in sysfs.glob(powercap, "intel-rapl:*") if counted(sysfs.line(zone / "name") or "")]
