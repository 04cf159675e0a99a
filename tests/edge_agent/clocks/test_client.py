"""The agent's side of the clock helper, and the commands an operator has; the helper runs in a thread of the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fedquilt import cli, profiles
from fedquilt.core import ClockError, JobError, OperatingPoint
from fedquilt.edge_agent.clocks import client, controls, helper
from fedquilt.edge_agent.clocks.client import SOCKET, ClockClient
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.helper import ClockHelper
from fedquilt.edge_agent.devices import linux
from fedquilt.tools.boards import clocks as tool
from tests.fake_boards import write_fake_board

SLOW = OperatingPoint(name="slow", cpu_hz=345.6e6, busy_w=3.0)
MAX = "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"


class Served:
    """A fake TX2 and a running helper; `jump_s` moves its clock."""

    def __init__(self, folder: Path) -> None:
        self.root, self.jump_s = folder / "root", 0.0
        self.path = self.root / SOCKET
        if not self.root.exists():
            write_fake_board(self.root, "jetson-tx2", 4)
        self.helper = ClockHelper(ClockPin(self.root, folder / "state"), self.path, folder / "state")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._clients: list[ClockClient] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.helper.step(time.monotonic() + self.jump_s, 0.01)
        self.helper.close()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        for clocks in self._clients:
            clocks.close()

    def max_khz(self) -> int:
        return int((self.root / MAX).read_text())

    def connect(self) -> ClockClient:
        clocks = ClockClient.connect(self.path)
        assert clocks is not None
        self._clients.append(clocks)
        return clocks


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.stop()


class Interrupted:
    """A clock at which somebody presses Ctrl-C."""

    @staticmethod
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt


class Fake:
    """A helper that answers `said` to whatever it is asked, once, and hangs up if so told."""

    def __init__(self, path: Path, said: bytes, hang_up: bool = False) -> None:
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(str(path))
        self._door.listen(1)
        self._thread = threading.Thread(target=self._run, args=(said, hang_up))
        self._thread.start()

    def _run(self, said: bytes, hang_up: bool) -> None:
        line, _ = self._door.accept()
        with line, contextlib.suppress(ConnectionError):  # a client that has read enough may be gone before all is said
            line.recv(4096)
            line.sendall(said)
            if not hang_up:
                line.recv(4096)  # until the client goes

    def close(self) -> None:
        self._thread.join()
        self._door.close()


# -- the client -----------------------------------------------------------------------------------


def test_a_point_is_held_kept_and_given_back(served: Served):
    clocks = served.connect()
    assert clocks.pin(SLOW) == SLOW
    assert (served.max_khz(), clocks.point) == (345600, SLOW)
    clocks.send_keepalive(0.0)
    clocks.unpin()
    assert (served.max_khz(), clocks.point) == (2035200, None)
    clocks.send_keepalive(1000.0)
    clocks.close()


def test_a_refusal_is_the_helpers_own_sentence(served: Served):
    clocks = served.connect()
    with pytest.raises(ClockError, match="has no 1 MHz: choose one of"):
        clocks.pin(OperatingPoint(name="x", cpu_hz=1e6))
    assert clocks.point is None
    clocks.close()


def test_letting_go_on_the_helpers_part_is_told_at_the_next_keepalive(served: Served):
    clocks, other = served.connect(), served.connect()
    clocks.pin(SLOW)
    served.jump_s = 60.0
    wait_until(lambda: other.request_status().holder is None, "the helper lets go")
    with pytest.raises(ClockError, match="the client was silent for 10 s"):
        clocks.send_keepalive(0.0)
    assert clocks.point is None
    assert clocks.pin(SLOW) == SLOW
    clocks.close()


def test_keepalives_are_sent_no_more_often_than_needed(tmp_path: Path):
    """Every 2 s by the caller's clock; when that clock goes backwards, at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    clocks = ClockClient(ours, tmp_path)
    clocks.point = SLOW
    sent = []
    theirs.setblocking(False)
    for now_s in (10.0, 11.9, 12.0, 12.1, 5.0, 5.1):
        theirs.send(b"{}\n")
        clocks.send_keepalive(now_s)
        try:
            sent.append((now_s, theirs.recv(4096)))
        except BlockingIOError:
            ours.recv(4096)  # the answer to what was not asked
    assert [now_s for now_s, _ in sent] == [10.0, 12.0, 5.0]
    assert {text for _, text in sent} == {b'{"type":"keepalive"}\n'}
    clocks.close()
    theirs.close()


def test_without_a_helper_there_are_no_clocks(tmp_path: Path):
    assert ClockClient.connect(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    assert ClockClient.connect(tmp_path / "file") is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.bind(str(tmp_path / "dead"))
    assert ClockClient.connect(tmp_path / "dead") is None
    assert ClockClient.connect(tmp_path / ("x" * 200)) is None


@pytest.mark.parametrize("held", [True, False])
def test_a_helper_that_was_started_anew_is_found_again(tmp_path: Path, held: bool):
    before = Served(tmp_path)
    clocks = ClockClient.connect(before.path)
    assert clocks is not None
    clocks.pin(SLOW)
    if not held:
        clocks.unpin()
    before.stop()
    if held:  # else no keepalive finds out that the old helper is gone
        with pytest.raises(ClockError, match="does not respond"):
            clocks.send_keepalive(0.0)
    after = Served(tmp_path)
    try:
        assert clocks.pin(SLOW) == SLOW
        assert after.max_khz() == 345600
    finally:
        clocks.close()
        after.stop()


@pytest.mark.parametrize(
    ("said", "hang_up", "problem"),
    [
        (b"what?\n", False, "does not respond"),
        (b'{"point":7}\n', False, "does not respond"),
        (b'{"error":null,"more":1}\n', False, "does not respond"),
        (b"{}\n", False, "sent an unexpected response"),
        (b"x" * 300_000, False, "does not respond"),
        (b'{"point":', True, "does not respond: connection closed"),
        (b'{"po', False, "does not respond: timed out"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, hang_up: bool, problem: str
):
    monkeypatch.setattr(client, "RESPONSE_TIMEOUT_S", 0.2)
    fake = Fake(tmp_path / "s", said, hang_up)
    clocks = ClockClient.connect(tmp_path / "s")
    assert clocks is not None
    with pytest.raises(ClockError, match=problem):
        clocks.pin(SLOW)
    fake.close()
    with pytest.raises(ClockError, match="has ended"):
        clocks.pin(SLOW)


# -- the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("MAXQ", OperatingPoint(name="MAXQ")),
        ("cpu=1.2GHz", OperatingPoint(name="cpu=1.2GHz", cpu_hz=1.2e9)),
        ("cpu=345600k, GPU=850MHz ,emc=1600000000", None),
        ("MAXN,gpu=850m", OperatingPoint(name="MAXN", gpu_hz=850e6)),
    ],
)
def test_a_point_is_written_as_a_mode_or_clocks_or_both(text: str, point: OperatingPoint | None):
    expected = point or OperatingPoint(name=text, cpu_hz=345.6e6, gpu_hz=850e6, emc_hz=1.6e9)
    assert tool.parse_point(text) == expected


@pytest.mark.parametrize("text", ["", " ", "cpu=", "cpu=fast", "cpu=1,cpu=2", "npu=1GHz", "cpu=-1", "A,B", "x" * 201])
def test_what_is_no_point_is_told(text: str):
    with pytest.raises(JobError, match=r"cpu=1\.2GHz"):
        tool.parse_point(text)


def test_status_tells_the_clocks_and_who_holds(served: Served, capsys: pytest.CaptureFixture[str]):
    where = ["--root", str(served.root)]
    clocks = served.connect()
    clocks.pin(SLOW)
    assert cli.main(["board", "clocks", "status", *where]) == 0
    shown = capsys.readouterr().out
    assert "policy0: 345.6 now, limits 345.6 to 345.6 MHz, schedutil; lists 345.6 499.2" in shown
    assert f"helper  process {os.getpid()} of user {os.getuid()} pins slow: cpu 345.6 MHz" in shown
    clocks.close()
    assert cli.main(["board", "clocks", "status", "--format", "json", *where]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["helper"] is True
    assert told["max_temperature_c"] == 85.0
    served.stop()
    assert cli.main(["board", "clocks", "status", *where]) == 0
    shown = capsys.readouterr().out
    assert "helper  none at" in shown
    assert "mode    unknown of MAXN" in shown


def test_the_helper_keeps_the_bounds_in_the_boards_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(helper, "run_helper", lambda root, **bounds: given.append(bounds))

    def bounds(*words: str) -> dict[str, Any]:
        cli.main(["board", "clocks", "serve", *words])
        return given[-1]

    def settings(text: str) -> str:
        (tmp_path / "agent.toml").write_text(f'device = "d"\nhome = "/h"\n{text}')
        return str(tmp_path / "agent.toml")

    plain = {"max_w": None, "power_of_point": None}
    assert bounds() == bounds(settings("")) == plain
    monkeypatch.setattr(linux, "create_power_lookup", lambda profile, root: profile.board)
    named = settings('profile = "jetson-orin-nx"\n[governor]\nmax_w = 15')
    assert bounds(named) == {**plain, "max_w": 15.0, "power_of_point": "jetson-orin-nx"}
    shutil.copyfile(Path(profiles.__file__).with_name("jetson-tx2.toml"), tmp_path / "own.toml")
    assert bounds(settings('profile = "own.toml"\n[governor]\nmax_w = 7'))["power_of_point"] == "jetson-tx2"


def test_hold_holds_until_it_is_interrupted(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    where = ["--root", str(served.root)]
    monkeypatch.setattr(tool, "time", Interrupted)
    assert cli.main(["board", "clocks", "hold", "cpu=345.6MHz", *where]) == 0
    assert (
        capsys.readouterr().out
        == "pinned: cpu 345.6 MHz (Ctrl-C to unpin)\nunpinned: the board's own settings are restored\n"
    )
    assert served.max_khz() == 2035200
    assert cli.main(["board", "clocks", "hold", "cpu=345.6GHz", *where]) == 8
    assert "has no 345600 MHz" in capsys.readouterr().err


def test_a_dry_hold_says_what_it_would_write_and_needs_no_helper(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_fake_board(tmp_path, "jetson-tx2", 4)
    before = controls.discover_controls(tmp_path).read_state(None)
    where = ["--root", str(tmp_path)]
    assert cli.main(["board", "clocks", "hold", "MAXQ,gpu=1300.5MHz", "--dry-run", *where]) == 0
    mode = controls.discover_controls(tmp_path).find_mode("MAXQ")
    assert mode is not None
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"nvpmodel -m {mode.id} (MAXQ)"
    assert [line.split(" to ")[0] for line in rest] == ["write 140250000", "write 1300500000", "write 1300500000"]
    assert controls.discover_controls(tmp_path).read_state(None) == before
    assert cli.main(["board", "clocks", "hold", "MAXQ", *where]) == 8
    assert "start one with `sudo fedquilt board clocks serve`" in capsys.readouterr().err


def test_a_helper_that_says_nothing_is_waited_for_a_short_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "RESPONSE_TIMEOUT_S", 0.1)
    fake = Fake(tmp_path / "s", b'{"po')
    clocks = ClockClient.connect(tmp_path / "s")
    assert clocks is not None
    began_s = time.monotonic()
    with pytest.raises(ClockError, match="does not respond: timed out"):
        clocks.pin(SLOW)
    assert time.monotonic() < began_s + 5
    fake.close()
