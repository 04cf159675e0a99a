"""The agent as a kind of release: what a bundle has to be, what stays when it is refused or everything is killed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import upgrades
from boards import wheel
from msgspec.structs import replace
from upgrade_boards import FLASHED, Board
from waiting import is_running, wait_until

from fedquilt.core import BlobRef, ModelError, StoreError
from fedquilt.core.messages import UPGRADES
from fedquilt.edge_agent import messages
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.state_machine import Capabilities
from fedquilt.edge_agent.upgrade import environment_build, launcher
from fedquilt.edge_agent.upgrade.agent_release import NO_LAUNCHER, AgentKind
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.host import virtual_environment
from fedquilt.host.disk import Disk
from fedquilt.wire import DesiredRelease

HANGS = """
import time
from fedquilt.host import virtual_environment
from fedquilt.edge_agent.upgrade import environment_build
virtual_environment.compile_packages = lambda *given: time.sleep(600)
environment_build.main()
"""
HALF = (sys.executable, "-c", HANGS)  # builds an environment but for its last step: the tests end this process


def test_a_version_is_checked_by_itself_put_on_trial_and_kept(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle("import sys, fedquilt, msgspec; sys.exit(sys.argv[1:] != ['agent', 'a.toml', '--check'])")
    assert board.verdict(file) == CheckResult("", {})
    release = board.release(file)
    assert release.blob is not None
    new = release.blob.sha256
    assert board.kept == [new]
    assert board.kind.current_sha256() == ""
    board.kind.activate(release)
    board.kind.activate(release)  # again after a kill: nothing more is written
    assert launcher.read_choice(board.versions) == VersionChoice(FLASHED, new, "", trying=True)
    assert board.restarts == 2
    assert board.kind.unhealthy_reason() == ""
    assert not board.kind.is_settled()  # the old process does not speak for the new one

    board.connected = False
    board.start()
    board.kind.activate(release)
    assert (board.restarts, board.kind.current_sha256()) == (2, new)
    assert board.kind.unhealthy_reason() == ""
    assert not board.kind.is_settled()
    assert board.quiet == 0
    board.connected = True
    assert board.kind.unhealthy_reason() == ""
    assert board.kind.is_settled()
    assert board.quiet == 1
    board.kind.confirm()
    assert launcher.read_choice(board.versions) == VersionChoice(FLASHED, new, "", online=True)


def test_a_version_is_taken_back(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle()
    new = board.take(file)
    for _ in range(2):
        assert board.kind.roll_back()
    choice = launcher.read_choice(board.versions)
    assert choice is not None
    assert (choice.current, choice.previous, choice.failed, choice.trying) == ("", None, new, False)
    assert board.restarts == 3
    board.start()
    assert board.kind.roll_back()
    assert board.kind.is_settled()
    assert board.kind.unhealthy_reason() == ""
    assert board.restarts == 3
    board.kind.discard_unused()
    assert board.kept == [launcher.CHOICE]


def test_there_is_nothing_before_the_flashed_version(board: Board) -> None:
    assert not board.kind.roll_back()


def test_why_the_launcher_returned_is_told(board: Board, bundle: Callable[..., Path]) -> None:
    board.take(bundle())
    choice = launcher.read_choice(board.versions)
    assert choice is not None
    launcher.write_choice(board.versions, launcher.roll_back(choice, "it ended 3 times before it was confirmed"))
    board.start()
    assert (board.kind.current_sha256(), board.kind.unhealthy_reason()) == (
        "",
        "it ended 3 times before it was confirmed",
    )
    file = bundle("pass")
    board.kind.stage(board.release(file), file)
    assert board.kind.unhealthy_reason() == ""


def test_a_version_that_could_not_be_tried_is_given_up(board: Board, bundle: Callable[..., Path]) -> None:
    new = board.take(bundle())
    board.start(
        "", fallback_reason="choice.json cannot be written (No space left on device), so the trial is impossible"
    )
    assert board.kind.current_sha256() == ""
    assert "No space left" in board.kind.unhealthy_reason()
    board.kind.discard_unused()
    choice = launcher.read_choice(board.versions)
    assert choice is not None
    assert (choice.current, choice.failed) == ("", new)


def test_environments_of_no_use_are_deleted(board: Board, bundle: Callable[..., Path]) -> None:
    versions = []
    for number in range(3):
        versions.append(board.take(bundle(f"number = {number}")))
        assert board.kind.unhealthy_reason() == ""
        board.kind.confirm()
        board.kind.discard_unused()
    assert board.kept == sorted([*versions[1:], launcher.CHOICE])


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": "riscv64"}, "bundle is for riscv64, this board is "),
        ({"python": "3.99"}, "bundle is for Python 3.99, this board has 3."),
        ({"format": 7}, "bundle has format 7, this version of fedquilt reads 1"),
        ({"present": {"msgspec": "0.0.1"}}, "bundle needs msgspec 0.0.1, this board has "),
        ({"present": {"no-such-thing": "1"}}, "bundle needs no-such-thing 1, this board does not have it"),
        ({"unpacked_bytes": 3}, "exceeds the announced size of 3 bytes"),
        ({"wheels": {"fedquilt-9.9.9-py3-none-any.whl": "0" * 64}}, "differs from the manifest"),
        ({"wheels": {"other-1-py3-none-any.whl": "0" * 64}}, "other-1-py3-none-any.whl is missing"),
        ({"wheels": {"../../x.whl": "0" * 64}}, "is not an upgrade bundle"),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused_by_name(
    board: Board, bundle: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    assert said in board.verdict(bundle(**changes)).refusal_reason
    assert board.kept == []
    assert board.kind.current_sha256() == ""


def test_what_is_no_bundle_is_refused(board: Board, tmp_path: Path) -> None:
    file = tmp_path / "x"
    for content in (b"", b"x" * 5000, bytes(10240)):
        file.write_bytes(content)
        assert "is not an upgrade bundle" in board.verdict(file).refusal_reason


def test_a_wheel_that_would_write_elsewhere_is_refused(board: Board, tmp_path: Path) -> None:
    house = [wheel(tmp_path / "house", "fedquilt", files={"../../../escaped.py": ""})]
    verdict = board.verdict(upgrades.pack(tmp_path / "b.tar", house))
    assert (
        "fedquilt-1.0-py3-none-any.whl would write outside the environment, to ../../../escaped.py"
        in verdict.refusal_reason
    )
    assert board.kept == []


def test_a_version_whose_check_fails_is_refused_in_its_own_words(board: Board, bundle: Callable[..., Path]) -> None:
    says = "import sys; print('noise', file=sys.stderr); sys.exit('fedquilt: its sensors cannot be read')"
    assert board.verdict(bundle(says)) == CheckResult("its sensors cannot be read", {})
    assert "No module named 'nowhere'" in board.verdict(bundle("import nowhere")).refusal_reason
    assert "SIGSEGV" in board.verdict(bundle("import os; os.kill(os.getpid(), 11)")).refusal_reason


def test_a_check_that_hangs_is_ended(board: Board, bundle: Callable[..., Path]) -> None:
    now = [0.0]
    board.start(clock=lambda: now[0])
    file = bundle("import time; time.sleep(600)")
    release = board.release(file)
    board.kind.stage(release, file)
    board.kind.start_check(release)
    assert board.kind.poll_check() is None
    now[0] = 1e6
    verdict = board.kind.poll_check()
    assert verdict is not None
    assert verdict.refusal_reason.startswith("check was stopped after its time limit")


def test_without_a_launcher_nothing_is_taken(tmp_path: Path, bundle: Callable[..., Path]) -> None:
    settings = agents.parse_settings({"device": "d", "home": str(tmp_path / "home")})
    kind, file = AgentKind(None, settings, lambda: True, lambda: None), bundle()
    with pytest.raises(ModelError, match="was not started by its launcher"):
        kind.stage(DesiredRelease(rollout="r", kind="agent", serial=1, blob=BlobRef("0" * 64, 1)), file)
    assert (kind.current_sha256(), kind.unhealthy_reason(), kind.roll_back(), kind.is_settled()) == (
        "",
        NO_LAUNCHER,
        False,
        True,
    )
    kind.confirm()
    kind.discard_unused()
    board = SimulatedDevice.from_name("jetson-tx2")
    assert (
        messages.profile_message("d", board, Capabilities(1 << 20, (), ()), kind.unsupported_reason()).versions[
            UPGRADES
        ]
        == kind.unsupported_reason()
        != ""
    )


def test_with_a_launcher_the_profile_says_nothing_of_upgrades(tmp_path: Path) -> None:
    board = SimulatedDevice.from_name("jetson-tx2")
    kind = Board(tmp_path).kind
    assert (
        UPGRADES
        not in messages.profile_message("d", board, Capabilities(1 << 20, (), ()), kind.unsupported_reason()).versions
    )


# -- disks and kills ------------------------------------------------------------------------------


def order(board: Board, file: Path) -> environment_build.BuildRequest:
    packages = tuple(path for path in sys.path if path.endswith("site-packages"))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return environment_build.BuildRequest(
        str(file), sha256, str(board.versions), ("agent",), packages, None, unsigned=True, highest_number=0, parent=0
    )


def test_a_disk_without_room_is_told_before_anything_is_written(board: Board, bundle: Callable[..., Path]) -> None:
    class Full(Disk):
        def free_bytes(self, folder: object) -> int:
            return 1_000_000

    with pytest.raises(StoreError, match=r"has 1 MB free, this version needs 34 MB: free disk space"):
        environment_build.build_environment(order(board, bundle()), Full())
    assert board.kept == []


class Meddled(Disk):
    """A disk on which somebody overwrites a file in place, after the wheels in it have been checked."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def free_bytes(self, folder: object) -> int:
        self.file.write_bytes(bytes(self.file.stat().st_size))
        return 1 << 40


def test_what_is_unpacked_is_what_was_checked(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle(f"SIGNED = 1  # {os.urandom(1 << 18).hex()}")  # more than a reader holds in its buffer
    wanted = order(board, file)
    made = environment_build.build_environment(wanted, Meddled(file))
    assert file.read_bytes().strip(b"\0") == b""
    assert "SIGNED = 1" in "".join(path.read_text() for path in made.rglob("fedquilt/cli.py"))
    assert board.kept == [wanted.sha256]


def test_a_bundle_that_is_not_the_one_asked_for_is_refused(board: Board, bundle: Callable[..., Path]) -> None:
    wanted, file = order(board, bundle("one")), bundle("another")
    with pytest.raises(ModelError, match=r"bundle-2\.tar is damaged: its sha256 is .*: send the release again"):
        environment_build.build_environment(replace(wanted, bundle=str(file)))
    assert board.kept == []


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    board: Board, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(virtual_environment, "compile_packages", full)
    with pytest.raises(StoreError, match=r"No space left on device; free some space on the board"):
        environment_build.build_environment(order(board, bundle()))
    assert board.kept == []


def test_a_full_disk_at_the_swap_leaves_what_runs(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle()
    assert board.verdict(file) == CheckResult("", {})
    board.start(disk=Crowded())
    with pytest.raises(StoreError, match=r"choice.json: No space left on device"):
        board.kind.activate(board.release(file))
    assert launcher.read_choice(board.versions) is None
    assert board.restarts == 0


class Crowded(Disk):
    """A disk that takes no small file any more."""

    def write_atomically(self, path: object, payload: bytes, *, durable: bool = True) -> None:
        raise OSError(28, "No space left on device")


def test_a_kill_while_the_environment_is_made_leaves_what_runs(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle()
    release = board.release(file)
    assert release.blob is not None
    new = release.blob.sha256
    board.start(command=HALF)
    board.kind.stage(release, file)
    board.kind.start_check(release)
    wait_until(lambda: (board.versions / f"{new}.new/bin/fedquilt").exists(), "the environment is nearly there")
    board.kind._check.stop()
    assert board.kept == [f"{new}.new"]
    board.start()
    assert (board.kind.current_sha256(), board.verdict(file)) == ("", CheckResult("", {}))
    assert board.kept == [new]


def test_a_check_that_somebody_kills_can_be_made_again(board: Board, bundle: Callable[..., Path]) -> None:
    file = bundle()
    release = board.release(file)
    board.kind.stage(release, file)
    board.kind.start_check(release)
    process = board.kind._check.process
    assert process is not None
    process.kill()
    process.wait()
    refused = board.kind.poll_check()
    assert refused is not None
    assert ("SIGKILL" in refused.refusal_reason, refused.killed_externally) == (True, True)
    assert board.verdict(file) == CheckResult("", {})


def test_the_check_dies_with_the_agent(board: Board, bundle: Callable[..., Path]) -> None:
    """kill -9 of the agent leaves no process that goes on building."""
    file = bundle()
    told = msgspec.json.encode(order(board, file)).replace(b'"parent":0', b'"parent":PARENT')
    code = f"import os, subprocess, sys; p = subprocess.Popen({list(HALF)!r}, stdin=subprocess.PIPE); " + (
        f"p.stdin.write({told!r}.replace(b'PARENT', str(os.getpid()).encode())); p.stdin.close(); "
        "print(p.pid, flush=True); p.wait()"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    child = int(agent.stdout.readline())
    wait_until(lambda: list(board.versions.glob("*.new/bin/fedquilt")), "the environment is nearly there")
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until(lambda: not is_running(child), "the check ends")
