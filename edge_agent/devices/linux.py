"""Any Linux host: memory from /proc/meminfo, energy from RAPL, temperature from the thermal zones.

RAPL is Linux's powercap class `intel-rapl` (AMD's processors are in it too): zones named `package-N`
or `package-N-die-D`, some with a `dram` zone inside, count microjoules and wrap at a range of their
own. `psys`, `core` and `uncore` overlap with these and are left out. Most hosts let only root read
the counters; then energy is unknown.
"""

from __future__ import annotations

import platform
from pathlib import Path

from fedquilt.core import ClockError, Cost, JobError, OperatingPoint, Reading, Work

PLAUSIBLE_C = (-40.0, 150.0)  # a sensor that is off says -256


def detect(root: Path) -> LinuxDevice | None:
    """This host, if it is a Linux."""
    return LinuxDevice(root) if (root / "proc/meminfo").is_file() else None


class LinuxDevice:
    """A host that is only read, never set. Made to be read by one thread.

    Args:
        root: where `proc` and `sys` are; "/" but for tests and containers.

    Raises:
        JobError: `proc/meminfo` cannot be read.
    """

    points: tuple[OperatingPoint, ...] = ()
    idle_w: float | None = None
    provenance = "sysfs"
    adjustable = False

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        total = _meminfo(root).get("MemTotal")
        if total is None:
            raise JobError(f"{root / 'proc/meminfo'} does not tell the memory of this host: is it a Linux?")
        self.memory_bytes = total
        self.board = _board(root)
        self._counters = [_Counter(zone) for zone in _zones(root / "sys/class/powercap")]
        self._last: tuple[float, float] | None = None  # (now_s, energy_j) of the reading before

    def read(self, now_s: float) -> Reading:
        """What the sensors say. Counters wrap after some minutes under full load: read more often than that."""
        energy_j = self._energy_j()
        power_w = None
        if energy_j is not None:
            if self._last is not None and now_s > self._last[0]:
                power_w = (energy_j - self._last[1]) / (now_s - self._last[0])
            self._last = (now_s, energy_j)
        return Reading(
            energy_j=energy_j,
            energy_source=None if energy_j is None else "rapl",
            power_w=power_w,
            temperature_c=_hottest_c(self._root / "sys/class/thermal"),
            available_bytes=_meminfo(self._root).get("MemAvailable"),
        )

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        raise ClockError(f"the clocks of {self.board} cannot be set by fedquilt")

    def release(self) -> None:
        pass

    def cost(self, work: Work, measured: Cost) -> Cost:
        """As it was measured."""
        return measured

    def _energy_j(self) -> float | None:
        """Of all zones since the start; None unless every one can be read, as a part would pass for the whole."""
        totals = [counter.total_j() for counter in self._counters]
        known = [total for total in totals if total is not None]
        return sum(known) if known and len(known) == len(totals) else None


class _Counter:
    """One RAPL zone: joules since it was made, over any number of wraps that are each seen."""

    def __init__(self, zone: Path) -> None:
        self._zone = zone
        self._last = _whole(zone / "energy_uj")
        self._range = _whole(zone / "max_energy_range_uj")
        self._total_uj = 0

    def total_j(self) -> float | None:
        now = _whole(self._zone / "energy_uj")
        if now is None or self._last is None:
            return None
        if now < self._last:
            if self._range is None:
                return None
            self._total_uj += self._range
        self._total_uj += now - self._last
        self._last = now
        return self._total_uj / 1e6


def _zones(powercap: Path) -> list[Path]:
    """Packages, and the memory beside them: none of these is part of another."""

    def counted(name: str) -> bool:
        return name.startswith("package-") or name == "dram"

    return [zone for zone in sorted(powercap.glob("intel-rapl:*")) if counted(_line(zone / "name") or "")]


def _board(root: Path) -> str:
    """What the firmware calls this machine."""
    for place in ("proc/device-tree/model", "sys/class/dmi/id/product_name"):
        if name := _line(root / place):
            return name[:200]
    return f"linux-{platform.machine()}"


def _hottest_c(thermal: Path) -> float | None:
    low, high = PLAUSIBLE_C
    zones = (_whole(zone / "temp") for zone in thermal.glob("thermal_zone*"))
    known = [milli / 1000 for milli in zones if milli is not None and low <= milli / 1000 <= high]
    return max(known, default=None)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes (its kB are 1024)."""
    found = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        value, _, unit = rest.strip().partition(" ")
        if value.isdigit() and unit == "kB":
            found[name] = int(value) * 1024
    return found


def _whole(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return text.strip("\0\n ") or None if text is not None else None


def _text(path: Path) -> str | None:
    """The file's text; None where the kernel has no such file, or no right, or the sensor does not answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
