"""What fits, and what a process holds; sizes here are checked against arithmetic or the kernel."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedquilt.core import MemoryBudgetError, WorkEstimate
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.task import main, memory_budget
from fedquilt.edge_agent.task.memory_budget import MemoryMargin

MB = 10**6


def test_work_fits_when_engine_and_work_together_do() -> None:
    """30 + 70 = 100."""
    assert memory_budget.memory_shortage("e", WorkEstimate(peak_bytes=70 * MB), 100 * MB, None, {"e": 30 * MB}) is None
    assert memory_budget.memory_shortage("e", WorkEstimate(peak_bytes=71 * MB), 100 * MB, None, {"e": 30 * MB}) == (
        "budget",
        "needs 101 MB (30 MB for the e engine, 71 MB for the work), more than the device's budget of 100 MB",
    )


def test_a_board_short_of_memory_is_named_as_such() -> None:
    short = memory_budget.memory_shortage("e", WorkEstimate(peak_bytes=10 * MB), 100 * MB, 39 * MB, {"e": 30 * MB})
    assert short is not None
    assert short[0] == "memory"
    assert "more than the 39 MB available on the device" in short[1]
    assert (
        memory_budget.memory_shortage("e", WorkEstimate(peak_bytes=10 * MB), 100 * MB, 40 * MB, {"e": 30 * MB}) is None
    )


def test_the_peak_is_the_most_since_the_reset_and_not_since_the_start() -> None:
    """64 MB held before the reset are forgotten, 32 MB held and freed after it are not."""
    me = os.getpid()
    _touch(64 << 20)
    assert memory_budget.reset_peak(me)
    base = memory_budget.resident_bytes(me)
    assert base is not None
    _touch(32 << 20)
    peak = memory_budget.read_peak_bytes(me)
    assert peak is not None
    assert 30 << 20 < peak - base < 50 << 20


def _touch(size: int) -> None:
    with mmap.mmap(-1, size) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def test_a_process_that_is_gone_holds_nothing_known(tmp_path: Path) -> None:
    """None, not 0; a kernel without these files likewise."""
    assert memory_budget.resident_bytes(1, proc=tmp_path) is None
    assert memory_budget.read_peak_bytes(1, proc=tmp_path) is None
    assert not memory_budget.reset_peak(1, proc=tmp_path)
    assert memory_budget.count_oom_kills(proc=tmp_path) is None


def test_out_of_memory_kills_are_counted_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 99\noom_kill 3\nnr_free 1\n")
    assert memory_budget.count_oom_kills(proc=tmp_path) == 3


# -- control groups, on a fake tree ---------------------------------------------------------------


@pytest.fixture
def delegated(tmp_path: Path) -> Path:
    """A group of version 2 that was handed to this process, as files."""
    own = tmp_path / "sys/system.slice/fedquilt.service"
    own.mkdir(parents=True)
    for name in ("cgroup.subtree_control", "cgroup.procs"):
        (own / name).write_text("")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/system.slice/fedquilt.service\n")
    return own


def cage(folder: Path) -> memory_budget.MemoryLimit:
    return memory_budget.MemoryLimit(folder / "sys", folder / "proc")


def test_a_delegated_group_holds_the_task_to_its_budget(tmp_path: Path, delegated: Path) -> None:
    for leaf in ("agent", "task"):  # the kernel makes these files with the folder; here the writes do
        (delegated / leaf).mkdir()
    assert cage(tmp_path).apply_limit(4711, 64 * MB)
    assert (delegated / "cgroup.subtree_control").read_text() == "+memory"
    assert (delegated / "agent/cgroup.procs").read_text() == str(os.getpid())
    assert (delegated / "task/memory.max").read_text() == str(64 * MB)
    assert (delegated / "task/memory.swap.max").read_text() == "0"
    assert (delegated / "task/cgroup.procs").read_text() == "4711"


def test_a_group_that_holds_others_too_is_left_as_it_was(tmp_path: Path, delegated: Path) -> None:
    (delegated / "cgroup.subtree_control").unlink()
    (delegated / "cgroup.subtree_control").symlink_to("/proc/version")
    assert not cage(tmp_path).apply_limit(4711, 64 * MB)
    assert (delegated / "cgroup.procs").read_text() == str(os.getpid())


def test_without_a_group_of_its_own_there_is_only_the_watchdog(tmp_path: Path) -> None:
    """The root group, and control groups of version 1, are not ours to divide."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/mine\n0::/\n")
    assert not cage(tmp_path).apply_limit(4711, 64 * MB)


# -- what was seen --------------------------------------------------------------------------------


def test_the_average_of_true_over_predicted_converges_and_stays_within_bounds() -> None:
    """1.2 each time: 0.7^20 of the first error is left; one task of a hundred times counts as 2."""
    caution = MemoryMargin()
    for _ in range(20):
        caution = caution.with_peak(120, 100)
    assert caution.ratio == pytest.approx(1.2, abs=0.2 * 0.7**20 + 1e-9)
    assert MemoryMargin().with_peak(10_000, 100).ratio == pytest.approx(0.7 + 0.3 * 2.0)
    assert MemoryMargin().with_peak(1, 100).ratio == pytest.approx(0.7 + 0.3 * 0.8)
    assert MemoryMargin().with_peak(100, 0) == MemoryMargin()


def test_what_is_planned_with_stays_the_whole_budget_while_peaks_are_as_foreseen() -> None:
    """Ratios up to 1.05 change nothing, bit for bit; above, the room beside the engine shrinks in steps of 1.25."""
    assert MemoryMargin(1.05).plan_limit_bytes(1000, 200) == 1000
    assert MemoryMargin(0.8).plan_limit_bytes(1000, 200) == 1000
    assert MemoryMargin(1.06).plan_limit_bytes(1000, 200) == 200 + 640
    assert MemoryMargin(1.31).plan_limit_bytes(1000, 200) == 200 + 640
    assert MemoryMargin(1.32).plan_limit_bytes(1000, 200) == 200 + 512
    assert MemoryMargin(1.0).plan_limit_bytes(100, 200) == 200


def test_each_task_that_ran_out_steps_down_and_no_further_than_the_bound() -> None:
    """800 / 1.25^2 = 512."""
    assert MemoryMargin().with_failure().with_failure().plan_limit_bytes(1000, 200) == 200 + 512
    worst = MemoryMargin()
    for _ in range(1000):
        worst = worst.with_failure()
    assert worst.reduction_steps == memory_budget.MAX_FAILURES


def test_a_board_that_saw_more_than_predicted_asks_for_more() -> None:
    """Predicted 40 beside 50; at 1.2 times and one step of 1.25 it is 50, with one byte less it does not fit."""
    work, learnt = WorkEstimate(peak_bytes=40 * MB), MemoryMargin(1.2)
    assert memory_budget.memory_shortage("e", work, 90 * MB, None, {"e": 50 * MB}) is None
    short = memory_budget.memory_shortage("e", work, 90 * MB, None, {"e": 50 * MB}, learnt)
    assert short is not None
    assert "needs 100 MB" in short[1]
    assert "1.25 times the prediction" in short[1]
    assert memory_budget.memory_shortage("e", work, 100 * MB, None, {"e": 50 * MB}, learnt) is None


# -- out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.44 GiB",
        "CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
        "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":838, '
        "please report a bug to PyTorch.",
        "NvMapMemAllocInternalTagged: 1075072515 error 12",
        "NvMapMemHandleAlloc: error 0",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bfc_arena.cc:376 void* onnxruntime::BFCArena::"
        "AllocateRawInternal Failed to allocate memory for requested buffer of size 4294967296",
        "bfc_arena.cc:342 Available memory of 100 is smaller than requested bytes of 200",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "[ONNXRuntimeError] : 1 : FAIL : bad allocation",
    ],
)
def test_what_libraries_say_when_memory_runs_out_is_recognised(text: str) -> None:
    assert failures.is_out_of_memory_text(text)
    assert failures.is_out_of_memory_error(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)",
        "CUDA error: device-side assert triggered",
        'handle_0 INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/driver_api.cpp":11, please report a bug to PyTorch.',
        "Trying to access memory-mapped tensor 'w' out of range",
        "NvRmGpuLibOpen failed, error=4",
        "[ONNXRuntimeError] : 1 : FAIL : Load model from x.onnx failed: Invalid tensor data type",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "index 12 is out of bounds for dimension 0 with size 3",
    ],
)
def test_other_errors_are_not_taken_for_want_of_memory(text: str) -> None:
    assert not failures.is_out_of_memory_text(text)
    assert not failures.is_out_of_memory_error(RuntimeError(text))


def test_errors_are_also_known_by_type_and_number() -> None:
    assert failures.is_out_of_memory_error(MemoryError())
    assert failures.is_out_of_memory_error(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not failures.is_out_of_memory_error(FileNotFoundError(errno.ENOENT, "No such file", "out of memory.npz"))


@pytest.mark.parametrize(
    ("engine", "measured_mb", "extra_mb"),
    [("torch", 233, 0), ("torch", 257, 0), ("torch", 640, 450), ("torch", 200, 0), ("plugin", 640, 0)],
)
def test_an_engine_above_its_assumed_size_leaves_less_for_the_plan(engine, measured_mb, extra_mb):
    assert memory_budget.extra_base_bytes(engine, measured_mb * 10**6) == extra_mb * 10**6


@pytest.mark.parametrize(
    ("base_mb", "text"),
    [
        (
            None,
            "the torch engine used 520 MB before the work, over its budget of 512 MB, and was killed: "
            "raise budget to 800 MB",
        ),
        (
            400,
            "the task's process used 520 MB (400 MB for the torch engine, 120 MB for the work), over its budget of "
            "512 MB, and was killed: raise budget to 800 MB",
        ),
        (
            233,
            "the task's process used 520 MB (233 MB for the torch engine, 287 MB for the work), over its budget of "
            "512 MB, and was killed: raise budget to 800 MB, or use a smaller model, batch or tier",
        ),
    ],
)
def test_a_killed_task_names_engine_and_work(base_mb, text):
    base_bytes = None if base_mb is None else base_mb * 10**6
    assert memory_budget.describe_overrun("torch", 520 * 10**6, base_bytes, 512 * 10**6) == text


def test_work_beside_a_larger_engine_than_assumed_is_refused_before_it_begins():
    work = WorkEstimate(peak_bytes=10 * 10**6)
    request = SimpleNamespace(task=SimpleNamespace(engine="numpy", work=work), budget_bytes=5 * 10**8, plan_bytes=None)
    executor = main.TaskExecutor()
    main._fit_installed_engine(request, executor, executor.record_base_bytes("numpy", 400 * 10**6))
    assert executor.plan_limit_bytes(request) == 10**8
    assert executor.record_base_bytes("numpy", 10**9) == 400 * 10**6
    with pytest.raises(MemoryBudgetError, match=r"needs 505 MB \(495 MB for the numpy engine, 10 MB for the work\)"):
        main._fit_installed_engine(request, main.TaskExecutor(), 495 * 10**6)
