"""What fits, and what a process holds; sizes here are checked against arithmetic or the kernel."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from fedquilt.core import Work
from fedquilt.edge_agent import budget

MB = 10**6


def test_work_fits_when_engine_and_work_together_do() -> None:
    """30 + 70 = 100."""
    assert budget.shortage("e", Work(peak_bytes=70 * MB), 100 * MB, None, {"e": 30 * MB}) is None
    short = budget.shortage("e", Work(peak_bytes=71 * MB), 100 * MB, None, {"e": 30 * MB})
    assert short is not None
    for part in ("needs 101 MB", "30 MB for the e engine", "71 MB for the work", "budget here is 100 MB", "smaller"):
        assert part in short


def test_a_board_short_of_memory_is_named_as_such() -> None:
    """The budget would do, the board would not."""
    short = budget.shortage("e", Work(peak_bytes=10 * MB), 100 * MB, 39 * MB, {"e": 30 * MB})
    assert short is not None
    assert "the board has 39 MB left" in short
    assert budget.shortage("e", Work(peak_bytes=10 * MB), 100 * MB, 40 * MB, {"e": 30 * MB}) is None


def test_the_peak_is_the_most_since_the_reset_and_not_since_the_start() -> None:
    """64 MB held before the reset are forgotten, 32 MB held and freed after it are not."""
    me = os.getpid()
    _touch(64 << 20)
    assert budget.reset_peak(me)
    base = budget.resident_bytes(me)
    assert base is not None
    _touch(32 << 20)
    peak = budget.peak_bytes(me)
    assert peak is not None
    assert 30 << 20 < peak - base < 50 << 20


def _touch(size: int) -> None:
    with mmap.mmap(-1, size) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def test_a_process_that_is_gone_holds_nothing_known(tmp_path: Path) -> None:
    """None, not 0; a kernel without these files likewise."""
    assert budget.resident_bytes(1, proc=tmp_path) is None
    assert budget.peak_bytes(1, proc=tmp_path) is None
    assert not budget.reset_peak(1, proc=tmp_path)
    assert budget.oom_kills(proc=tmp_path) is None


def test_out_of_memory_kills_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """One line of /proc/vmstat."""
    (tmp_path / "vmstat").write_text("pgfault 99\noom_kill 3\nnr_free 1\n")
    assert budget.oom_kills(proc=tmp_path) == 3


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


def cage(folder: Path) -> budget.Cage:
    return budget.Cage(folder / "sys", folder / "proc")


def test_a_delegated_group_holds_the_task_to_its_budget(tmp_path: Path, delegated: Path) -> None:
    """This process goes into one leaf, the task's into another that has the limit."""
    for leaf in ("agent", "task"):  # the kernel makes these files with the folder; here the writes do
        (delegated / leaf).mkdir()
    assert cage(tmp_path).limit(4711, 64 * MB)
    assert (delegated / "cgroup.subtree_control").read_text() == "+memory"
    assert (delegated / "agent/cgroup.procs").read_text() == str(os.getpid())
    assert (delegated / "task/memory.max").read_text() == str(64 * MB)
    assert (delegated / "task/memory.swap.max").read_text() == "0"
    assert (delegated / "task/cgroup.procs").read_text() == "4711"


def test_a_group_that_holds_others_too_is_left_as_it_was(tmp_path: Path, delegated: Path) -> None:
    """The kernel refuses to divide it, here as a file that not even root can write; this process moves back."""
    (delegated / "cgroup.subtree_control").unlink()
    (delegated / "cgroup.subtree_control").symlink_to("/proc/version")
    assert not cage(tmp_path).limit(4711, 64 * MB)
    assert (delegated / "cgroup.procs").read_text() == str(os.getpid())


def test_without_a_group_of_its_own_there_is_only_the_watchdog(tmp_path: Path) -> None:
    """The root group, and control groups of version 1, are not ours to divide."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/mine\n0::/\n")
    assert not cage(tmp_path).limit(4711, 64 * MB)
