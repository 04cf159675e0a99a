"""What fits in memory: predicted before a task is taken, watched while it runs, measured afterwards.

Resident sizes come from /proc. The peak is the kernel's own high-water mark of the task's process,
reset before each task; `ru_maxrss` would carry over what the parent once held.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from fedquilt.core import Work

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

ASSUMED_BASE_BYTES: Mapping[str, int] = {"numpy": 38 * 10**6, "onnx": 57 * 10**6, "torch": 233 * 10**6}
"""What a task's process holds once its engine is imported: measured on x86-64, until this board's own is known."""


# -- before a task --------------------------------------------------------------------------------


def shortage(
    engine: str, work: Work, budget_bytes: int, available_bytes: int | None, measured: Mapping[str, int]
) -> str | None:
    """Why the work does not fit, in a sentence that says what would; None: it fits.

    Args:
        available_bytes: what the board can still give to this task's process; None: not known.
        measured: engine -> resident size of a process that holds just the engine, as seen on this board.
    """
    base = measured.get(engine, ASSUMED_BASE_BYTES.get(engine, 0))
    need = base + work.peak_bytes
    shares = f"{megabytes(base)} for the {engine} engine, {megabytes(work.peak_bytes)} for the work"
    parts = f"needs {megabytes(need)} ({shares})"
    if need > budget_bytes:
        return (
            f"{parts}, the budget here is {megabytes(budget_bytes)}: "
            "ask for less (a smaller model, batch or tier), or raise the device's budget"
        )
    if available_bytes is not None and need > available_bytes:
        return (
            f"{parts}, the board has {megabytes(available_bytes)} left: ask for less, or free memory there "
            f"(the budget of {megabytes(budget_bytes)} would allow it)"
        )
    return None


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


# -- while it runs --------------------------------------------------------------------------------


def resident_bytes(pid: int, proc: Path = PROC) -> int | None:
    """What a process holds in memory, shared and mapped pages too; None: it is gone."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def oom_kills(proc: Path = PROC) -> int | None:
    """How often this kernel has killed for want of memory; None: it does not count (before Linux 4.13)."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


class Cage:
    """A control group (v2) with a memory limit for a task's process, where this process may make one.

    It may when its own group was handed over to it (systemd: `Delegate=memory`) and holds nothing else.
    The kernel wants processes in leaves only, so this process moves into a leaf beside the task's.
    Elsewhere `limit` says False, and the watchdog on the resident size is all there is.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        self._task: Path | None = None
        self._tried = False

    def limit(self, pid: int, budget_bytes: int) -> bool:
        """Hold the process to its budget from now on; whether the kernel will."""
        if not self._tried:
            self._tried = True
            self._task = self._prepare()
        if self._task is None:
            return False
        try:
            (self._task / "memory.max").write_text(str(budget_bytes))
            (self._task / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        with contextlib.suppress(OSError):  # no such file where the kernel accounts no swap
            (self._task / "memory.swap.max").write_text("0")
        return True

    def _prepare(self) -> Path | None:
        own = self._own()
        if own is None or not (own / "cgroup.subtree_control").is_file():
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
        except OSError:  # others live in this group, or the memory controller is not ours to give
            with contextlib.suppress(OSError):
                (own / "cgroup.procs").write_text(pid)
                leaf.rmdir()
            return None
        return task

    def _own(self) -> Path | None:
        """This process's group in the unified hierarchy; never the root, which is not ours to divide."""
        with contextlib.suppress(OSError):
            for line in (self._proc / "self/cgroup").read_text().splitlines():
                if line.startswith("0::/") and line != "0::/":
                    return self._root / line[len("0::/") :]
        return None


# -- what it took ---------------------------------------------------------------------------------


def reset_peak(pid: int, proc: Path = PROC) -> bool:
    """Start the high-water mark of an own process anew; False where the kernel refuses."""
    try:
        (proc / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(pid: int, proc: Path = PROC) -> int | None:
    """The most a process has held resident since its start or `reset_peak`; None: it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
