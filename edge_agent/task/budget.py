"""Memory of a task: predicted before it is accepted, watched while it runs, measured afterwards.

Resident sizes come from /proc. The peak is the kernel's own high-water mark of the task's process,
reset before each task; `ru_maxrss` would include the parent's former size.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fedquilt import footprint
from fedquilt.core import Work
from fedquilt.edge_agent import sysfs
from fedquilt.footprint import ASSUMED_BASE_BYTES as ASSUMED_BASE_BYTES
from fedquilt.heap import PROC
from fedquilt.heap import resident_bytes as resident_bytes
from fedquilt.wire import RefusalCode

LEARNT: Final = 0.3  # weight of the newest ratio in the average of true over predicted peaks
RATIO_LEAST, RATIO_MOST = 0.8, 2.0  # limits of that average: one odd task changes little
TOLERATED: Final = 1.05  # up to this ratio a peak counts as predicted, and the full budget is planned with
STEP: Final = 1.25  # factor of one level of caution: the budget is planned with as if it were so much smaller
LEVEL_MOST: Final = 12  # most levels after failures: 1.25 ** 12 = 15 times the prediction


@dataclass(frozen=True)
class Caution:
    """Experience of this board with the memory predictions for a method's tasks on one engine.

    The engine's planning budget changes in steps, and is the whole budget as long as peaks match predictions:
    the size of micro-batches decides the last bits of a result, so it must not follow each measurement.
    """

    ratio: float = 1.0  # true over predicted peak, averaged
    level: int = 0  # tasks that ran out of memory: one step down for each, until the agent restarts

    def seen(self, peak_bytes: int, planned_bytes: int) -> Caution:
        """Experience after a successful task: its peak, and the peak that its engine had planned."""
        if planned_bytes <= 0:
            return self
        found = min(max(peak_bytes / planned_bytes, RATIO_LEAST), RATIO_MOST)
        return replace(self, ratio=(1 - LEARNT) * self.ratio + LEARNT * found)

    def failed(self) -> Caution:
        """Experience after a task that ran out of memory."""
        return replace(self, level=min(self.level + 1, LEVEL_MOST))

    @property
    def steps(self) -> int:
        """Number of steps down for the planning budget."""
        over = math.log(self.ratio / TOLERATED, STEP)
        return self.level + max(math.ceil(over), 0)

    def plannable_bytes(self, budget_bytes: int, base_bytes: int) -> int:
        """Bytes that an engine may plan with, of its budget; `base_bytes` is its own size without work."""
        return base_bytes + int(max(budget_bytes - base_bytes, 0) / STEP**self.steps)


def base_bytes(engine: str, measured: Mapping[str, int]) -> int:
    """Resident size of a process with only the engine: as measured on this board, else as assumed."""
    return measured.get(engine, ASSUMED_BASE_BYTES.get(engine, 0))


def least_bytes(engine: str, measured: Mapping[str, int]) -> int:
    """Least memory of any task on the engine."""
    return footprint.need_bytes(engine, 0, base_bytes(engine, measured))


def no_engine(budget_bytes: int, engines: Collection[str]) -> str | None:
    """Explain why no installed engine fits the budget; None if one does."""
    need = {name: least_bytes(name, {}) for name in engines}
    if any(size < budget_bytes for size in need.values()):
        return None
    held = ", ".join(f"{name} {megabytes(size)}" for name, size in need.items()) or "none is installed"
    return (
        f"the budget of {megabytes(budget_bytes)} is less than any engine here holds by itself ({held}): "
        "every task will be declined until the budget is raised"
    )


def memory_shortage(
    engine: str,
    work: Work,
    budget_bytes: int,
    available_bytes: int | None,
    measured: Mapping[str, int],
    caution: Caution = Caution(),
) -> tuple[RefusalCode, str] | None:
    """Return why the work does not fit the memory even in its smallest steps, or None if it fits.

    The code is "budget" if the work never fits this device, "memory" if it fits once memory is free.

    Args:
        engine: name.
        work: predicted by the method.
        budget_bytes: most that the task's process may hold resident.
        available_bytes: memory that the board can still give to this task's process; None: unknown.
        measured: engine -> resident size of a process with only the engine, as measured on this board.
        caution: experience with such work; the need is the prediction times its ratio.
    """
    base = least_bytes(engine, measured)
    factor = max(STEP**caution.steps, caution.ratio)
    share = math.ceil(work.peak_bytes * factor)
    need = base + share
    if need <= budget_bytes and (available_bytes is None or need <= available_bytes):
        return None
    learnt = "" if factor == 1.0 else f" ({factor:.2f} times what was predicted, as such tasks have shown here)"
    shares = f"{megabytes(base)} for the {engine} engine, {megabytes(share)} for the work{learnt}"
    parts = f"needs {megabytes(need)} ({shares})"
    if need > budget_bytes:
        return "budget", f"{parts}, the budget here is {megabytes(budget_bytes)}"
    assert available_bytes is not None
    return "memory", (
        f"{parts}, the board has {megabytes(available_bytes)} left: ask for less, or free memory there "
        f"(the budget of {megabytes(budget_bytes)} would allow it)"
    )


def megabytes(size: int) -> str:
    """Size in whole megabytes, as text."""
    return f"{size / 1e6:.0f} MB"


# -- while it runs --------------------------------------------------------------------------------


def oom_kills(proc: Path = PROC) -> int | None:
    """Number of out-of-memory kills by this kernel; None: it does not count (before Linux 4.13)."""
    return _count(proc / "vmstat", "oom_kill")


def _count(path: Path, name: str) -> int | None:
    """Number in a file of the kernel with lines "name number"; None: it is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None


class Cage:
    """Control group (v2) with a memory limit for a task's process, if this process may make one.

    It may if its own group was delegated to it (systemd: `Delegate=memory`) and holds nothing else: call `divide`
    before the task's process is started. The kernel wants processes in leaves only, so this process moves into a leaf
    beside the task's.
    Elsewhere `limit` returns False, and the watchdog on the resident size is the only limit.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        self._task: Path | None = None
        self._tried = False

    def divide(self) -> None:
        """Make the task's group on first use. The kernel refuses while a child is in this process's own (EBUSY)."""
        if not self._tried:
            self._tried = True
            self._task = self._prepare()

    def limit(self, pid: int, budget_bytes: int) -> bool:
        """Hold the process to its budget from now on; returns whether the kernel will."""
        self.divide()
        if self._task is None:
            return False
        try:
            (self._task / "memory.max").write_text(str(budget_bytes))
            (self._task / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        with contextlib.suppress(OSError):  # no such file if the kernel accounts no swap
            (self._task / "memory.swap.max").write_text("0")
        return True

    def kills(self) -> int | None:
        """Number of out-of-memory kills within the limit; None: no limit, or no count."""
        if self._task is None:
            return None
        return _count(self._task / "memory.events", "oom_kill")

    def _prepare(self) -> Path | None:
        own = self._own()
        if own is None or not sysfs.there(own / "cgroup.subtree_control"):
            return None
        leaf, task, pid = own / "agent", own / "task", str(os.getpid())
        try:
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(pid)
        except OSError:
            return None
        try:
            (own / "cgroup.subtree_control").write_text("+memory")
            task.mkdir(exist_ok=True)
        except OSError:  # other processes live in this group, or the memory controller is not delegated
            with contextlib.suppress(OSError):
                (own / "cgroup.procs").write_text(pid)
                leaf.rmdir()
            return None
        return task

    def _own(self) -> Path | None:
        """Control group of this process in the unified hierarchy; never the root, which is not ours to divide."""
        with contextlib.suppress(OSError):
            for line in (self._proc / "self/cgroup").read_text().splitlines():
                if line.startswith("0::/") and line != "0::/":
                    return self._root / line[len("0::/") :]
        return None


# -- what it took ---------------------------------------------------------------------------------


def reset_peak(pid: int, proc: Path = PROC) -> bool:
    """Reset the high-water mark of an own process; False if the kernel refuses."""
    try:
        (proc / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Largest resident size of a process since its start or `reset_peak`; None: it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
