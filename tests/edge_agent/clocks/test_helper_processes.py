"""The clock helper as a process of its own, killed and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clock_trees import Place
from waiting import LIMIT_S, wait_until

from fedquilt.edge_agent.clocks.client import ClockClient


class Processes:
    """A helper and clients of it, as commands."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        where = ("--root", str(self.place.root))
        made = subprocess.Popen([sys.executable, "-m", "fedquilt.cli", "board", "clocks", *words, *where])
        self.started.append(made)
        return made

    def helper(self) -> subprocess.Popen[bytes]:
        made = self.start("serve")
        wait_until(self.answers, "the helper answers")
        return made

    def answers(self) -> bool:
        clocks = ClockClient.connect(self.place.socket)
        if clocks is None:
            return False
        clocks.close()
        return True

    def client(self) -> subprocess.Popen[bytes]:
        made = self.start("hold", "cpu=345.6MHz")
        wait_until(self.place.held, "the client holds")
        return made


@pytest.fixture
def processes(place: Place) -> Iterator[Processes]:
    made = Processes(place)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def test_a_client_that_is_killed_gives_the_clocks_back(processes: Processes):
    """kill -9: it can do nothing about it itself."""
    processes.helper()
    processes.client().kill()
    wait_until(processes.place.restored, "the helper restores")


def test_a_helper_that_is_killed_restores_at_its_next_start(processes: Processes):
    """kill -9 of the helper: its client is told at once; the next helper finds the journal."""
    helper = processes.helper()
    client = processes.client()
    helper.kill()
    helper.wait()
    assert client.wait(timeout=LIMIT_S) == 8
    assert processes.place.held()
    processes.helper()
    wait_until(processes.place.restored, "the next helper restores")
    assert not (processes.place.state / "clocks.json").exists()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_helper_that_is_stopped_restores_and_ends_well(processes: Processes, kind: int):
    helper = processes.helper()
    processes.client()
    helper.send_signal(kind)
    assert helper.wait(timeout=LIMIT_S) == 0
    assert processes.place.restored()


def test_the_helper_stays_small(processes: Processes):
    """As anonymous memory: what is its own. A bare Python has some 5 MB."""
    helper = processes.helper()
    status = Path(f"/proc/{helper.pid}/status").read_text()
    anonymous_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    assert 0 < anonymous_kib < 20_000
