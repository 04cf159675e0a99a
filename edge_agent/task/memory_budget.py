"""Memory of a task: predicted in advance, watched during the task and measured afterwards.

Resident sizes come from /proc. The peak is the kernel's high-water mark of the task's process, reset before each task.
`ru_maxrss` would include the former size of the parent process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fedquilt.core import WorkEstimate
from fedquilt.costs import peak_memory
from fedquilt.costs.peak_memory import ASSUMED_BASE_BYTES as ASSUMED_BASE_BYTES
from fedquilt.host import sysfs
from fedquilt.host.process_resources import PROC
from fedquilt.host.process_resources import resident_bytes as resident_bytes
from fedquilt.wire import RefusalCode

NEW_RATIO_WEIGHT: Final = 0.3  # weight of the newest ratio in the average of measured over predicted peaks
MIN_RATIO, MAX_RATIO = 0.8, 2.0  # limits of that average: one odd task changes little
MAX_MATCHING_RATIO: Final = 1.05  # up to this ratio a peak counts as predicted, and the full budget is planned with
STEP_FACTOR: Final = 1.25  # factor by which each step reduces the planned budget
BASE_TOLERANCE_BYTES: Final = 25 * 10**6  # an engine up to this much above its assumed size is planned as assumed
BASE_STEP_BYTES: Final = 50 * 10**6  # rounding of larger engines, so that plans do not follow each measurement
SUFFICIENT_FACTOR: Final = 1.5  # suggested budget as a multiple of the memory in use when a process was killed
MAX_FAILURES: Final = 12  # limit of counted failures: 1.25 ** 12 = 15 times the prediction


@dataclass(frozen=True)
class MemoryMargin:
    """Correction of memory predictions for one method and engine, from earlier tasks.

    The planning budget changes in steps and is the whole budget while peaks match predictions. The size of
    micro-batches decides the last bits of a result and must not follow each measurement.
    """

    ratio: float = 1.0  # average of measured over predicted peaks
    failures: int = 0  # tasks that ran out of memory since the agent started, each one step down

    def with_peak(self, peak_bytes: int, planned_bytes: int) -> MemoryMargin:
        if planned_bytes <= 0:
            return self
        ratio = min(max(peak_bytes / planned_bytes, MIN_RATIO), MAX_RATIO)
        return replace(self, ratio=(1 - NEW_RATIO_WEIGHT) * self.ratio + NEW_RATIO_WEIGHT * ratio)

    def with_failure(self) -> MemoryMargin:
        return replace(self, failures=min(self.failures + 1, MAX_FAILURES))

    @property
    def reduction_steps(self) -> int:
        """Number of times that the planning budget is divided by `STEP_FACTOR`."""
        ratio_steps = math.log(self.ratio / MAX_MATCHING_RATIO, STEP_FACTOR)
        return self.failures + max(math.ceil(ratio_steps), 0)

    def plan_limit_bytes(self, budget_bytes: int, base_bytes: int) -> int:
        """Return the bytes that an engine may plan to use. `base_bytes` is the engine's size without work."""
        return base_bytes + int(max(budget_bytes - base_bytes, 0) / STEP_FACTOR**self.reduction_steps)


def engine_base_bytes(engine: str, measured: Mapping[str, int]) -> int:
    return measured.get(engine, ASSUMED_BASE_BYTES.get(engine, 0))


def extra_base_bytes(engine: str, measured_bytes: int) -> int:
    """Return by how much an engine exceeds its assumed size, rounded up. Return 0 if small or nothing is assumed."""
    extra_bytes = measured_bytes - ASSUMED_BASE_BYTES.get(engine, measured_bytes)
    return 0 if extra_bytes <= BASE_TOLERANCE_BYTES else math.ceil(extra_bytes / BASE_STEP_BYTES) * BASE_STEP_BYTES


def describe_overrun(engine: str, used_bytes: int, base_bytes: int | None, budget_bytes: int) -> str:
    """Return why a process was killed at its budget, with a budget to try. `base_bytes` is None before the work."""
    used, budget = format_megabytes(used_bytes), format_megabytes(budget_bytes)
    enough = format_megabytes(math.ceil(used_bytes * SUFFICIENT_FACTOR / 1e8) * 10**8)
    if base_bytes is None:
        return (
            f"the {engine} engine used {used} before the work, over its budget of {budget}, and was killed: "
            f"raise budget to {enough}"
        )
    work_bytes = max(used_bytes - base_bytes, 0)
    sizes = f"{format_megabytes(base_bytes)} for the {engine} engine, {format_megabytes(work_bytes)} for the work"
    smaller = ", or use a smaller model, batch or tier" if work_bytes > base_bytes else ""
    return (
        f"the task's process used {used} ({sizes}), over its budget of {budget}, and was killed: "
        f"raise budget to {enough}{smaller}"
    )


def minimum_task_bytes(engine: str, measured: Mapping[str, int]) -> int:
    return peak_memory.task_process_bytes(engine, 0, engine_base_bytes(engine, measured))


def describe_engine_shortage(budget_bytes: int, engines: Collection[str]) -> str | None:
    """Return a warning if each engine alone exceeds the budget, or None."""
    sizes = {name: minimum_task_bytes(name, {}) for name in engines}
    if any(size < budget_bytes for size in sizes.values()):
        return None
    size_text = ", ".join(f"{name} {format_megabytes(size)}" for name, size in sizes.items()) or "none is installed"
    budget = format_megabytes(budget_bytes)
    return f"memory budget of {budget} is smaller than each engine without work ({size_text}): raise budget"


def memory_shortage(
    engine: str,
    work: WorkEstimate,
    budget_bytes: int,
    available_bytes: int | None,
    measured: Mapping[str, int],
    margin: MemoryMargin = MemoryMargin(),
) -> tuple[RefusalCode, str] | None:
    """Return why the work does not fit in memory, as code and text, or None if it fits.

    The code is "budget" if the work never fits this device, and "memory" if it fits after memory is freed.
    """
    base_bytes = minimum_task_bytes(engine, measured)
    factor = max(STEP_FACTOR**margin.reduction_steps, margin.ratio)
    work_bytes = math.ceil(work.peak_bytes * factor)
    required_bytes = base_bytes + work_bytes
    if required_bytes <= budget_bytes and (available_bytes is None or required_bytes <= available_bytes):
        return None
    correction = "" if factor == 1.0 else f" ({factor:.2f} times the prediction, as in earlier tasks)"
    engine_size, work_size = format_megabytes(base_bytes), format_megabytes(work_bytes)
    breakdown = f"{engine_size} for the {engine} engine, {work_size} for the work{correction}"
    requirement = f"needs {format_megabytes(required_bytes)} ({breakdown})"
    if required_bytes > budget_bytes:
        return "budget", f"{requirement}, more than the device's budget of {format_megabytes(budget_bytes)}"
    assert available_bytes is not None
    return "memory", (
        f"{requirement}, more than the {format_megabytes(available_bytes)} available on the device: reduce model or "
        f"batch, or free memory (the budget is {format_megabytes(budget_bytes)})"
    )


def format_megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


# -- during a task --------------------------------------------------------------------------------


def count_oom_kills(proc: Path = PROC) -> int | None:
    """Return how often the kernel killed a process for lack of memory since boot, or None if not counted."""
    return _read_counter(proc / "vmstat", "oom_kill")


def _read_counter(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None


class MemoryLimit:
    """Control group (v2) that limits the memory of a task's process, where permitted.

    This requires that systemd delegates the agent's group (`Delegate=memory`) and that the group holds no other
    process. The kernel allows processes in leaves only, so this process moves into a leaf beside the task's group.
    Elsewhere `apply_limit` returns False, and the check of the resident size is the only limit.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        self._task_group: Path | None = None
        self._is_initialized = False

    def create_group(self) -> None:
        """Create the control group of tasks on the first call, before any child process starts.

        The kernel does not divide this process's own group (EBUSY) while a child process is in the group.
        """
        if not self._is_initialized:
            self._is_initialized = True
            self._task_group = self._create_agent_and_task_cgroups()

    def apply_limit(self, pid: int, budget_bytes: int) -> bool:
        """Limit the memory of a process. Return False if the kernel does not permit that."""
        self.create_group()
        if self._task_group is None:
            return False
        try:
            (self._task_group / "memory.max").write_text(str(budget_bytes))
            (self._task_group / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        with contextlib.suppress(OSError):  # the file is missing if the kernel does not account swap
            (self._task_group / "memory.swap.max").write_text("0")
        return True

    def count_oom_kills(self) -> int | None:
        if self._task_group is None:
            return None
        return _read_counter(self._task_group / "memory.events", "oom_kill")

    def _create_agent_and_task_cgroups(self) -> Path | None:
        """Move this process into a group of its own. Return a new group for tasks, or None if not permitted."""
        own_group = self._own_group()
        if own_group is None or not sysfs.is_visible(own_group / "cgroup.subtree_control"):
            return None
        agent_group, task_group, pid = own_group / "agent", own_group / "task", str(os.getpid())
        try:
            agent_group.mkdir(exist_ok=True)
            (agent_group / "cgroup.procs").write_text(pid)
        except OSError:
            return None
        try:
            (own_group / "cgroup.subtree_control").write_text("+memory")
            task_group.mkdir(exist_ok=True)
        except OSError:  # other processes live in this group, or the memory controller is not delegated
            with contextlib.suppress(OSError):
                (own_group / "cgroup.procs").write_text(pid)
                agent_group.rmdir()
            return None
        return task_group

    def _own_group(self) -> Path | None:
        # The root group is never returned, because it cannot be divided.
        with contextlib.suppress(OSError):
            for line in (self._proc / "self/cgroup").read_text().splitlines():
                if line.startswith("0::/") and line != "0::/":
                    return self._root / line[len("0::/") :]
        return None


# -- after a task ---------------------------------------------------------------------------------


def reset_peak(pid: int, proc: Path = PROC) -> bool:
    """Reset the peak resident size of a process. Return False if the kernel does not permit the reset."""
    try:
        (proc / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_peak_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Return the peak resident size since the last `reset_peak`, or None if the process has ended."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
