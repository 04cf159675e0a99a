"""How a task's process died, in a sentence and a code the coordinator can act on; each test has a real process die."""

from __future__ import annotations

import select
import sys

import pytest
from waiting import LIMIT_S

from fedquilt.edge_agent.task.process import ChildProcess
from fedquilt.edge_agent.task.protocol import WorkResult


def obituary(program: str, kills: tuple[int | None, int | None], own: tuple[int | None, int | None]) -> WorkResult:
    """Of a process that runs `program`; the kernel's counts of out-of-memory kills before and after."""
    counts, own_counts = iter(kills), iter(own)
    child = ChildProcess([sys.executable, "-c", program], "numpy", lambda: next(counts), lambda: next(own_counts))
    try:
        while not child.has_ended:
            select.select(child.fds(), [], [], LIMIT_S)
            child.receive_events()
        child.receive_events()
        return child.explain_end(10**8)
    finally:
        child.kill()


def dies(words: str, signal: str) -> str:
    """A program that says something and then ends itself by a signal."""
    return (
        f"import os, signal, sys; print({words!r}, file=sys.stderr, flush=True); os.kill(os.getpid(), signal.{signal})"
    )


@pytest.mark.parametrize(
    ("program", "kills", "own", "ending", "said"),
    [
        # C++ ends a process whose allocation fails by SIGABRT, and what it said last tells why
        (dies("'std::bad_alloc'", "SIGABRT"), (3, 3), (0, 0), ("memory", True, False), "bad_alloc"),
        (
            dies("NvMapMemAllocInternalTagged", "SIGABRT"),
            (3, 3),
            (0, 0),
            ("memory", True, False),
            "reduce model or batch",
        ),
        (dies("corrupted memory map", "SIGABRT"), (3, 3), (0, 0), ("failed", False, False), "SIGABRT"),
        # a library that calls exit() instead
        ("import sys; sys.exit('CUDA error: out of memory')", (0, 0), (0, 0), ("memory", True, False), "CUDA"),
        (dies("busy", "SIGKILL"), (3, 3), (0, 0), ("failed", False, True), "from outside"),
        # by the kernel, which others have brought there
        (dies("busy", "SIGKILL"), (3, 4), (0, 0), ("memory", True, True), "kernel"),
        (dies("busy", "SIGKILL"), (3, 4), (None, None), ("memory", True, True), "kernel"),
        # JetPack 4's Linux 4.9 has no count of such kills
        (dies("busy", "SIGKILL"), (None, None), (None, None), ("memory", True, True), "kernel"),
        # by the kernel at the task's own budget
        (
            dies("busy", "SIGKILL"),
            (3, 4),
            (0, 1),
            ("memory", True, False),
            "the numpy engine used 100 MB before the work, over its budget",
        ),
        (dies("busy", "SIGTERM"), (3, 3), (0, 0), ("failed", False, True), "SIGTERM"),
        (dies("busy", "SIGSEGV"), (3, 3), (0, 0), ("failed", False, False), "SIGSEGV"),
    ],
)
def test_the_end_of_a_process_is_explained(
    program: str,
    kills: tuple[int | None, int | None],
    own: tuple[int | None, int | None],
    ending: tuple[str, bool, bool],
    said: str,
) -> None:
    outcome = obituary(program, kills, own)
    assert (outcome.code, outcome.ran_out_of_memory, outcome.killed_externally) == ending
    assert said in outcome.reason
