"""Versions that the fleet's authority has signed: which are believed, and in what order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import upgrades
from certified import of_another_version
from upgrade_boards import Board

from fedquilt.core import JobError
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.upgrade import archive, environment_build, launcher
from fedquilt.edge_agent.upgrade.agent_release import AgentKind, read_launch_info
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.tools.identity.authority import CertificateAuthority


def test_only_the_fleets_authority_is_believed(tmp_path: Path, bundle: Callable[..., Path]) -> None:
    ours, theirs = (CertificateAuthority.create(tmp_path / name, name, time.time()) for name in ("ours", "theirs"))
    board = Board(tmp_path, unsigned=False)
    board.table["broker"] = {"ca": str(tmp_path / "ours/ca.crt")}
    board.start()
    assert board.verdict(bundle(sign=ours.sign_upgrade)) == CheckResult("", {})
    assert "is not signed by the authority in" in board.verdict(bundle("1", sign=theirs.sign_upgrade)).refusal_reason
    assert "bundle is not signed" in board.verdict(bundle("2")).refusal_reason
    assert (
        "is not signed by the authority in" in board.verdict(bundle("3", sign=lambda text: b"nonsense")).refusal_reason
    )
    signature = ours.sign_upgrade(b"another manifest")
    assert "is not signed by the authority in" in board.verdict(bundle("4", sign=lambda text: signature)).refusal_reason


class Signed(Board):
    """A board of a fleet with an authority, which keeps the versions that it is sent."""

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority.create(folder / "ours", "ours", time.time())
        super().__init__(folder, unsigned=False)
        self.table["broker"] = {"ca": str(folder / "ours/ca.crt")}
        self.start()

    def keep(self, file: Path) -> str:
        """Take a version, which then holds."""
        new = self.take(file)
        assert self.kind.unhealthy_reason() == ""
        self.kind.confirm()
        assert (choice := launcher.read_choice(self.versions)) is not None
        assert (choice.current, choice.trying) == (new, False)
        return new


def test_a_version_that_was_signed_before_the_one_kept_is_refused(tmp_path: Path, bundle: Callable[..., Path]) -> None:
    board = Signed(tmp_path)
    sign = board.authority.sign_upgrade
    first, second, third = (bundle(f"{number}", sign=sign, number=number) for number in (1, 2, 3))
    unnumbered = bundle("0", sign=sign)
    board.keep(first)
    board.keep(second)
    said = board.verdict(first).refusal_reason
    assert "has signature number 1, older than number 2" in said
    assert "build and sign that version again" in said
    assert "number 0" in board.verdict(unnumbered).refusal_reason
    assert board.kind.roll_back()
    board.start()
    board.kind.discard_unused()
    assert (choice := launcher.read_choice(board.versions)) is not None
    assert choice.current == hashlib.sha256(first.read_bytes()).hexdigest()
    assert "older than number 2" in board.verdict(bundle("1 again", sign=sign, number=1)).refusal_reason
    board.keep(second)
    board.keep(third)
    (board.versions / "newest").write_bytes(b"\xff damaged")
    assert "older than number 3" in board.verdict(second).refusal_reason


def test_a_version_that_did_not_hold_makes_none_old(tmp_path: Path, bundle: Callable[..., Path]) -> None:
    board = Signed(tmp_path)
    sign = board.authority.sign_upgrade
    board.keep(bundle("1", sign=sign, number=1))
    board.take(bundle("3", sign=sign, number=3))
    assert board.kind.roll_back()
    board.start()
    board.kind.discard_unused()
    board.keep(bundle("2", sign=sign, number=2))


def test_killed_as_a_version_is_kept_its_number_is_known(
    tmp_path: Path, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Signed(tmp_path)
    sign = board.authority.sign_upgrade
    old = bundle("1", sign=sign, number=1)
    board.take(bundle("2", sign=sign, number=2))
    assert board.kind.unhealthy_reason() == ""

    def killed(kind: AgentKind, choice: VersionChoice) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AgentKind, "_write_choice", killed)
    with pytest.raises(KeyboardInterrupt):
        board.kind.confirm()
    monkeypatch.undo()
    board.start()
    assert "older than number 2" in board.verdict(old).refusal_reason


def test_the_authority_numbers_what_it_signs(tmp_path: Path) -> None:
    made = CertificateAuthority.create(tmp_path / "ours", "ours", time.time())
    assert [made.next_upgrade_number(now_s) for now_s in (1000.0, 1000.0, 7.0, 2000.0)] == [1000, 1001, 1002, 2000]
    (tmp_path / "ours" / "upgrades").unlink()
    assert CertificateAuthority(tmp_path / "ours").next_upgrade_number(3000.0) == 3000


def test_a_certificate_of_another_version_is_named(tmp_path: Path) -> None:
    ours = CertificateAuthority.create(tmp_path / "ours", "ours", time.time())
    (tmp_path / "odd.crt").write_text(of_another_version((tmp_path / "ours/ca.crt").read_text()))
    file = upgrades.pack(tmp_path / "b.tar", [upgrades.toy(tmp_path / "house")], ours.sign_upgrade)
    with archive.open_bundle(file) as opened, pytest.raises(JobError, match=r"odd\.crt contains no certificate in PEM"):
        environment_build.require_valid_signature(opened, str(tmp_path / "odd.crt"), unsigned=False)


def test_what_the_launcher_says_may_be_damaged() -> None:
    for said in ("", "{}", "\udcff", "[" * 100_000):
        assert read_launch_info({launcher.LAUNCH_INFO_VARIABLE: said}) is None


def test_a_fleet_without_an_authority_has_to_ask_for_it(tmp_path: Path, bundle: Callable[..., Path]) -> None:
    board = Board(tmp_path, unsigned=False)
    assert "write unsigned = true under [upgrade]" in board.verdict(bundle()).refusal_reason
