"""The tests' own process is not forked while it has threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from forks import CONTEXT


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was raised where nothing can catch it, beside another thread."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: found.append(str(seen.exc_value)))
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield found
    over.set()
    thread.join()


def forks() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def starts() -> None:
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)


@pytest.mark.parametrize("act", [forks, starts])
def test_a_fork_with_threads_raises(raised: list[str], act: Callable[[], None]) -> None:
    """Where pytest finds it, and fails the test."""
    act()
    (said,) = raised
    assert said.startswith("a process with threads is forked")


def test_a_library_that_forks_is_let_alone(raised: list[str]) -> None:
    """Ray's nodes are started from the tests' process."""
    exec("starts()", {"__name__": "ray.services", "starts": starts})
    assert raised == []


def tells_its_parents_threads() -> None:
    os._exit(len(os.listdir(f"/proc/{os.getppid()}/task")))


def test_a_child_of_the_server_and_a_program_are_no_such_forks(raised: list[str]) -> None:
    """The server, which is forked in place of this process, has one thread."""
    child = CONTEXT.Process(target=tells_its_parents_threads)
    child.start()
    child.join()
    subprocess.run(["true"], check=True)
    assert (child.exitcode, raised) == (1, [])
