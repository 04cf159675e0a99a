"""Memory available to this host and to the control group it runs in, and the pressure on it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fedquilt.core import JobError
from fedquilt.edge_agent import sysfs


class Memory:
    """Memory by /proc/meminfo, limited by what cgroup v2 allows this process and its parents.

    Limits are read once: one that is set later applies from the next start.

    Raises:
        JobError: `proc/meminfo` cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self._meminfo, self._pressure = root / "proc/meminfo", root / "proc/pressure/memory"
        total = _bytes(self._meminfo, "MemTotal")
        if total is None:
            raise JobError(f"{self._meminfo} does not tell the memory of this host: is it a Linux?")
        groups = {group: sysfs.whole(group / "memory.max") for group in _groups(root)}
        self._limits = {group: limit for group, limit in groups.items() if limit is not None}
        self.total_bytes = min([total, *self._limits.values()])

    def available_bytes(self) -> int | None:
        """Bytes that can be allocated without evicting anything: the least of the host's and each limited group's."""
        rooms = [_room(group, limit) for group, limit in self._limits.items()]
        known = [room for room in (_bytes(self._meminfo, "MemAvailable"), *rooms) if room is not None]
        return min(known, default=None)

    def pressure(self) -> float | None:
        """Share of the last 10 s in which a task waited for memory, 0..1. Linux 4.20 on; None on TX2 and Nano."""
        for line in (sysfs.text(self._pressure) or "").splitlines():
            if line.startswith("some avg10="):
                try:
                    return float(line.split()[1].removeprefix("avg10=")) / 100
                except ValueError:
                    return None
        return None


def _bytes(meminfo: Path, name: str) -> int | None:
    """Value of one line of /proc/meminfo in bytes (its kB are 1024)."""
    for line in (sysfs.text(meminfo) or "").splitlines():
        if line.startswith(f"{name}:"):
            words = line.split()
            return int(words[1]) * 1024 if len(words) == 3 and words[1].isdigit() and words[2] == "kB" else None
    return None


def _groups(root: Path) -> list[Path]:
    """Control group of this process and its parents, as far as they have the memory controller."""
    for line in (sysfs.text(root / "proc/self/cgroup") or "").splitlines():
        number, _, path = line.partition("::")
        own = PurePosixPath(path)
        if number == "0" and own.is_absolute() and ".." not in own.parts:
            places = [root / "sys/fs/cgroup" / group.relative_to("/") for group in (own, *own.parents)]
            return [place for place in places if sysfs.there(place / "memory.max")]
    return []


def _room(group: Path, limit_bytes: int) -> int | None:
    """Bytes that the group may still allocate; file pages that nobody used lately are evicted first and not counted."""
    used = sysfs.whole(group / "memory.current")
    if used is None:
        return None
    stat = (sysfs.text(group / "memory.stat") or "").splitlines()
    idle = next((words[1] for words in map(str.split, stat) if words[0] == "inactive_file" and len(words) == 2), "")
    return max(0, limit_bytes - used + (min(int(idle), used) if idle.isdigit() else 0))
