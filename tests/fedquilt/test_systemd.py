"""What systemd hears of a service, and when."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedquilt import systemd


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """An address as systemd gives it, and the next datagram there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "n"))
        line.settimeout(5)
        yield str(tmp_path / "n"), lambda: line.recv(1000)


def test_systemd_is_told(heard, tmp_path):
    address, read = heard
    systemd.send_notification("READY=1", address)
    assert read() == b"READY=1"
    systemd.send_notification("READY=1", str(tmp_path / "gone"))
    systemd.send_notification("READY=1", "")


def test_an_abstract_address_is_understood():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(b"\0fedquilt-test-of-notify")
        line.settimeout(5)
        systemd.send_notification("WATCHDOG=1", "@fedquilt-test-of-notify")
        assert line.recv(100) == b"WATCHDOG=1"


class Steps:
    """An endpoint that counts."""

    finished = False

    def __init__(self) -> None:
        self.count = 0

    def fds(self) -> tuple[int, ...]:
        return (7,)

    def step(self, now_s: float) -> float:
        self.count += 1
        return now_s + 3


class Case:
    """A watched endpoint; what was told since last asked."""

    def __init__(self) -> None:
        self.steps, self.status = Steps(), "asks for a broker"
        self._told: list[str] = []
        self.watched = systemd.WatchdogEndpoint(self.steps, lambda: self.status, self._told.append)

    def at(self, now_s: float) -> list[str]:
        self._told.clear()
        assert self.watched.step(now_s) == now_s + 3
        return list(self._told)


def test_it_is_ready_after_its_first_step_without_any_broker():
    """Otherwise a board without a network would be restarted for ever."""
    case = Case()
    assert case.at(100.0) == ["READY=1\nWATCHDOG=1\nSTATUS=asks for a broker"]
    assert case.steps.count == 1
    assert case.watched.fds() == (7,)


def test_the_watchdog_hears_of_it_once_a_second():
    case = Case()
    case.at(100.0)
    assert case.at(100.5) == []
    assert case.at(100.9) == []
    assert case.at(101.0) == ["WATCHDOG=1"]
    assert case.at(5.0) == ["WATCHDOG=1"]
    assert case.at(5.5) == []


def test_a_new_status_is_told_at_once_and_an_old_one_never_again():
    case = Case()
    case.at(100.0)
    case.status = "online as orin-1\nREADY=1"
    assert case.at(100.1) == ["STATUS=online as orin-1 READY=1"]
    assert case.at(100.2) == []


def test_what_leads_to_the_journal_is_known_by_the_file_that_systemd_names(tmp_path):
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        found = os.fstat(journal.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert systemd.is_journal_stream(environ, journal.fileno())
        assert not systemd.is_journal_stream(environ, other.fileno())
        assert not systemd.is_journal_stream({"JOURNAL_STREAM": ""}, journal.fileno())
        assert not systemd.is_journal_stream({}, journal.fileno())
