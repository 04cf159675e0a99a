"""Memory available to this host and its control group, and memory pressure."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from fedquilt.core import JobError
from fedquilt.host import sysfs


class MemorySensor:
    """Memory from /proc/meminfo, within the limits of the process's control groups (cgroup v2).

    Limits are read once, at the start.

    Raises:
        JobError: If `proc/meminfo` cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self._meminfo, self._pressure = root / "proc/meminfo", root / "proc/pressure/memory"
        total = _meminfo_bytes(self._meminfo, "MemTotal")
        if total is None:
            raise JobError(
                f"{self._meminfo} does not tell the memory of this host: is it a Linux? Else name a profile to simulate"
            )
        groups = {group: sysfs.read_int(group / "memory.max") for group in _control_groups(root)}
        self._limits = {group: limit for group, limit in groups.items() if limit is not None}
        self.total_bytes = min([total, *self._limits.values()])

    def read_available_bytes(self) -> int | None:
        """Return the bytes available without swapping, the least of host and control groups."""
        rooms = [_group_available_bytes(group, limit) for group, limit in self._limits.items()]
        known = [room for room in (_meminfo_bytes(self._meminfo, "MemAvailable"), *rooms) if room is not None]
        return min(known, default=None)

    def read_pressure(self) -> float | None:
        """Return the share of the last 10 s with tasks waiting for memory, or None before Linux 4.20."""
        for line in (sysfs.read_text(self._pressure) or "").splitlines():
            if line.startswith("some avg10="):
                try:
                    return float(line.split()[1].removeprefix("avg10=")) / 100
                except ValueError:
                    return None
        return None


def _meminfo_bytes(meminfo: Path, name: str) -> int | None:
    for line in (sysfs.read_text(meminfo) or "").splitlines():
        if line.startswith(f"{name}:"):
            words = line.split()
            return int(words[1]) * 1024 if len(words) == 3 and words[1].isdigit() and words[2] == "kB" else None
    return None


def _control_groups(root: Path) -> list[Path]:
    """Return the process's control groups that may have a memory limit, the innermost first."""
    for line in (sysfs.read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, path = line.partition("::")
        own = PurePosixPath(path)
        if number == "0" and own.is_absolute() and ".." not in own.parts:
            places = [root / "sys/fs/cgroup" / group.relative_to("/") for group in (own, *own.parents)]
            return [place for place in places if sysfs.is_visible(place / "memory.max")]
    return []


def _group_available_bytes(group: Path, limit_bytes: int) -> int | None:
    # The kernel evicts unused file pages first, so they count as available.
    used = sysfs.read_int(group / "memory.current")
    if used is None:
        return None
    stat = (sysfs.read_text(group / "memory.stat") or "").splitlines()
    idle = next((words[1] for words in map(str.split, stat) if words[0] == "inactive_file" and len(words) == 2), "")
    return max(0, limit_bytes - used + (min(int(idle), used) if idle.isdigit() else 0))
