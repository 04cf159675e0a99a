"""How a task's process died, in a sentence and a code the coordinator can act on; each test has a real process die."""

from __future__ import annotations

import select
import sys

import pytest
from waiting import LIMIT_S

from fedquilt.edge_agent.task.process import ChildProcess
from fedquilt.edge_agent.task.protocol import WorkResult


def obituary(
    program: str, kills: tuple[int | None, int | None], own: tuple[int | None, int | None] = (None, None)
) -> WorkResult:
    """Of a process that runs `program`; the kernel's counts of out-of-memory kills before and after."""
    counts, own_counts = iter(kills), iter(own)
    child = ChildProcess([sys.executable, "-c", program], "numpy", lambda: next(counts), lambda: next(own_counts))
    try:
        while not child.has_ended:
            select.select(child.fds(), [], [], LIMIT_S)
            child.receive_events()
        child.receive_events()
        return child.explain_end()
    finally:
        child.kill()


DIES = "import os, signal, sys; print({words!r}, file=sys.stderr, flush=True); os.kill(os.getpid(), signal.{signal})"


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "NvMapMemAllocInternalTagged: 1075072515 error 12",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_a_process_that_aborts_for_want_of_memory_is_told_as_such(words: str) -> None:
    """C++ ends a process whose allocation fails by SIGABRT; what it said last tells why."""
    outcome = obituary(DIES.format(words=words, signal="SIGABRT"), (3, 3))
    assert (outcome.code, outcome.overrun) == ("memory", True)
    assert words[:20] in outcome.reason
    assert "ask for less" in outcome.reason


def test_a_process_that_aborts_for_another_reason_has_failed() -> None:
    """A near miss: memory is spoken of, but not the want of it."""
    outcome = obituary(DIES.format(words="corrupted memory map", signal="SIGABRT"), (3, 3))
    assert (outcome.code, outcome.overrun) == ("failed", False)
    assert "SIGABRT" in outcome.reason


def test_an_ending_by_its_own_code_with_words_of_memory_is_told_as_such() -> None:
    """A library that calls exit() instead."""
    program = "import sys; sys.exit('CUDA error: out of memory')"
    outcome = obituary(program, (0, 0))
    assert (outcome.code, outcome.overrun) == ("memory", True)


@pytest.mark.parametrize(
    ("kills", "code"),
    [((3, 4), "memory"), ((3, 3), "failed"), ((None, None), "memory")],
    ids=["counted", "not counted", "a kernel that does not count"],
)
def test_a_kill_is_the_kernels_if_it_says_so_or_cannot_say(kills: tuple[int | None, int | None], code: str) -> None:
    """JetPack 4's Linux 4.9 has no count of such kills, and the task's process is the first that it takes."""
    outcome = obituary(DIES.format(words="busy", signal="SIGKILL"), kills)
    assert outcome.code == code
    assert outcome.overrun == (code == "memory")
    assert ("kernel" in outcome.reason) == (code == "memory")


@pytest.mark.parametrize(
    ("signal", "kills", "own", "killed"),
    [
        ("SIGKILL", (3, 3), (0, 0), True),  # by an operator
        ("SIGKILL", (3, 4), (0, 0), True),  # by the kernel, which others have brought there
        ("SIGKILL", (3, 4), (None, None), True),
        ("SIGKILL", (None, None), (None, None), True),
        ("SIGKILL", (3, 4), (0, 1), False),  # by the kernel at the task's own budget
        ("SIGTERM", (3, 3), (0, 0), True),
        ("SIGSEGV", (3, 3), (0, 0), False),
        ("SIGABRT", (3, 3), (0, 0), False),
    ],
)
def test_a_kill_from_outside_is_told_apart_from_what_the_task_brought_upon_itself(
    signal: str, kills: tuple[int | None, int | None], own: tuple[int | None, int | None], killed: bool
) -> None:
    """Only the latter would happen again for certain."""
    outcome = obituary(DIES.format(words="busy", signal=signal), kills, own)
    assert outcome.killed == killed
    if own == (0, 1):
        assert (outcome.code, outcome.overrun) == ("memory", True)
