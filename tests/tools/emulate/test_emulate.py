"""What surrounds an emulation; the emulation itself needs root and minutes: `make emulate`, docs/boards.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from command_lines import parsed
from fedquilt.core import JobError, LinkError
from fedquilt.tools import emulate
from fedquilt.tools.emulate import host, native_comparison
from fedquilt.tools.emulate.host import HostMachine
from fedquilt.tools.emulate.listener import ReceivedMessages
from fedquilt.wire import Presence

RESULT: dict[str, Any] = {
    "run": "digits-1",
    "rounds": 3,
    "tasks_s": [1.25, 4.0, 2.0],
    "paths": 12,
    "only": 1,
    "score": 2.5e-7,
    "junction": None,
    "chosen": "head on (a.0 > b.1) + b.0",
    "same": True,
    "versions": {"qemu": "7.2", "onnxruntime": "1.19.2"},
    "folder": "/x",
}


def test_what_is_missing_is_told_before_anything_is_made(tmp_path: Path) -> None:
    """Not even the folder."""
    with pytest.raises(JobError, match=r"emulate needs .*sudo apt install debootstrap"):
        emulate.main(tmp_path / "out", None, None, "text", HostMachine("x86_64", 0, {}, 10**10))
    assert not (tmp_path / "out").exists()


def test_the_pin_says_why() -> None:
    """One line names the version, and a comment above it the reason."""
    text = (emulate.HERE / "constraints.txt").read_text()
    comment, pin = re.findall(r"((?:^#.*\n)+)^(onnxruntime==\S+)$", text, re.M)[0]
    assert pin.removeprefix("onnxruntime==") in comment
    assert "SIGSEGV" in comment


@pytest.mark.parametrize("rounds", [None, 2])
def test_the_job_is_the_demos_for_one_board_that_has_every_image(tmp_path: Path, rounds: int | None) -> None:
    """With time enough for an emulated board."""
    plan = emulate._write_job(tmp_path, rounds)
    (agent,), ((member,), _) = plan.make_agent_tables(), plan.load_devices()
    assert plan.job.rounds == (rounds or 60)
    assert plan.job.cohort.deadline_s == emulate.DEADLINE_S
    assert agent["device"] == member.device == emulate.DEVICE
    assert (agent["data"]["share"], agent["data"]["shares"]) == (0, 1)
    assert len(member.train.y) > 1000
    assert (plan.bundle / "bundle.json").is_file()


def test_only_one_runs_at_a_time(tmp_path: Path) -> None:
    """They would remove each other's entry in the kernel's table."""
    (tmp_path / "qemu").touch()
    with (
        host.hold_lock(tmp_path / "qemu"),
        pytest.raises(JobError, match="another `fedquilt emulate` runs"),
        host.hold_lock(tmp_path / "qemu"),
    ):
        pass
    with host.hold_lock(tmp_path / "qemu"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_ctrl_c_does(number: signal.Signals) -> None:
    """And what it did before, it does afterwards."""
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), host.interrupt_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_steps_are_told_with_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """And what is worth saying; one that fails ends its line."""
    steps = emulate.EmulationSteps()
    with steps("flash") as notes:
        notes.append("53 MB")
    with pytest.raises(ValueError, match="x"), steps("boot"):
        raise ValueError("x")
    said = capsys.readouterr().out
    assert re.fullmatch(r"flash \.\.\. \d+\.\d s; 53 MB\nboot \.\.\.\n", said)
    assert list(steps.taken) == ["flash"]
    with emulate.EmulationSteps(quiet=True)("flash"):
        pass
    assert capsys.readouterr().out == ""


def test_an_agent_is_online_before_a_coordinator_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is at the broker counts: the agent's status then says that no coordinator answers."""
    said = {"READY": "1", "STATUS": "no coordinator answers: none is online"}
    notices = mock.Mock(said=said, wait=lambda until, limit_s, alive: until(said))
    monkeypatch.setattr(emulate.units, "StatusNotices", lambda board: notices)
    monkeypatch.setattr(emulate.units, "read", lambda board, name: None)
    monkeypatch.setattr(emulate.units, "start", lambda *given: subprocess.Popen(["true"], start_new_session=True))
    heard = ReceivedMessages(Presence(online=False, boot="b1"))
    site = mock.Mock(create_listener=lambda device: mock.Mock(receive=lambda limit_s: heard))
    with contextlib.ExitStack() as stack, pytest.raises(LinkError, match="not online after 300 s: no coordinator"):
        emulate._start_agent(site, mock.Mock(), tmp_path / "log", stack)
    heard = ReceivedMessages(Presence(online=True, boot="b1"))
    with contextlib.ExitStack() as stack:
        assert emulate._start_agent(site, mock.Mock(), tmp_path / "log", stack)[1] == said["STATUS"]


def test_the_result_is_told_in_sentences() -> None:
    """What is not known is left out."""
    told = "\n".join(native_comparison.lines(RESULT))
    assert "in it: qemu 7.2, onnxruntime 1.19.2" in told
    assert "3 rounds, 3 tasks done in it: 1.2 to 4.0 s each" in told
    assert "12 networks known to both, 1 to one alone" in told
    assert "scores differ by 2.5e-07 at most" in told
    assert "junctions" not in told
    assert "chosen: head on (a.0 > b.1) + b.0; by the other too" in told
    few = "\n".join(native_comparison.lines({**RESULT, "tasks_s": [], "score": None, "chosen": ""}))
    assert "0 tasks done in it\n" in few
    assert "scores differ" not in few
    assert "chosen" not in few


@pytest.mark.parametrize(
    ("score", "well"), [(0.0, True), (1e-5, True), (0.1, False), (float("nan"), False), (None, False)]
)
def test_scores_that_are_not_this_machines_are_told(score: float | None, well: bool) -> None:
    """Wrong arithmetic must not pass for a proof."""
    result = {**RESULT, "score": score}
    assert native_comparison.agrees(result) is well
    assert ("they do not agree" in "\n".join(native_comparison.lines(result))) is not well


def test_its_command_takes_what_it_is_told() -> None:
    """A folder, a mirror, rounds."""
    options = parsed(["emulate", "--out", "x", "--mirror", "http://m/debian", "--rounds", "2"])
    assert (options["out"], options["mirror"], options["rounds"]) == (Path("x"), "http://m/debian", 2)
