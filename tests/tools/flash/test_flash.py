"""`board flash` as typed: into a root, over SSH, as an archive, and out again. SSH is a script that stays here."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from boards import AARCH64, ELF, INTERPRETER, TARGET, X86_64, plant, snapshot

from fedquilt import cli
from fedquilt.tools.identity.authority import CertificateAuthority, clock_s

pytestmark = pytest.mark.skipif(not TARGET, reason=f"no target is a {platform.machine()}")


def flash(*arguments: str) -> int:
    board = ["--target", TARGET, "--python", INTERPRETER]
    return cli.main(["board", "flash", "agent.toml", *board, *arguments])


def test_a_mounted_root_twice(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash("--rootfs", "board") == 0
    assert "write /etc/fedquilt/agent.toml" in capsys.readouterr().out
    before = snapshot(place / "board")
    assert flash("--rootfs", "board") == 0
    assert capsys.readouterr().out.endswith("no changes: installed already\n")
    assert snapshot(place / "board") == before
    assert (place / "board/opt/fedquilt/current/bin/fedquilt").stat().st_mode & 0o777 == 0o755


def test_a_dry_run_into_a_root_leaves_it_empty(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place / "board")
    assert flash("--rootfs", "board", "--dry-run") == 0
    assert "would write /etc/fedquilt/agent.toml" in capsys.readouterr().out
    assert snapshot(place / "board") == before


def test_a_board_that_enrols_is_not_flashed_without_a_word_when_its_token_is_missing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CertificateAuthority.create(place / "authority", "site", clock_s())
    enrols = '[broker]\nurl = "mqtts://hub"\nca = "authority/ca.crt"\n[enrol]\nurl = "https://hub:8884"\n'
    (place / "agent.toml").write_text(f'device = "orin-07"\nhome = "home"\n{enrols}')
    (place / "token").write_text("one-time\n")
    said = "without --token, orin-07 can only enrol if it was enrolled before: create one with `fedquilt identity token"
    for given, there in ([], True), (["--token", "token"], False):
        assert flash("--rootfs", "board", "--dry-run", *given) == 0
        assert (said in capsys.readouterr().out) is there


def test_a_running_board(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert flash("--ssh", "me@orin") == 0
    assert (place / "board/etc/fedquilt/agent.toml").is_file()
    assert "write /etc/fedquilt/agent.toml" in capfd.readouterr().out
    assert set((place / "hosts").read_text().split()) == {"me@orin"}
    assert list((place / "tmp").iterdir()) == []
    assert flash("--ssh", "me@orin") == 0
    assert capfd.readouterr().out.endswith("no changes: installed already\n")


def test_a_dry_run_on_a_running_board_leaves_it_as_it_is(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place / "board")
    assert flash("--ssh", "orin", "--dry-run") == 0
    assert "would write /etc/fedquilt/agent.toml" in capfd.readouterr().out
    assert snapshot(place / "board") == before
    assert list((place / "tmp").iterdir()) == []


def test_a_running_board_of_another_kind_is_refused_before_anything_is_copied(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "there/uname").write_text("#!/bin/sh\necho riscv64\n")
    (place / "there/uname").chmod(0o755)
    assert flash("--ssh", "orin") == 2
    assert f"orin is riscv64, but the target is {platform.machine()}" in capsys.readouterr().err
    assert len((place / "hosts").read_text().split()) == 1


def test_a_running_board_without_that_python_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    code = cli.main(
        [
            "board",
            "flash",
            "agent.toml",
            "--target",
            TARGET,
            "--python",
            "/no/python3.10",
            "--ssh",
            "o",
        ]
    )
    assert code == 2
    assert "o has no /no/python3.10" in capsys.readouterr().err
    assert not (place / "cache").exists()


def test_a_board_that_does_not_answer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "down").touch()
    assert flash("--ssh", "orin") == 5
    error = capsys.readouterr().err
    assert "No route to host" in error
    assert "check that `ssh orin true` works" in error


def test_an_installation_that_fails_over_there_is_told_and_cleaned_up(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "board/bin/sh").unlink()
    (place / "board" / INTERPRETER.lstrip("/")).unlink()
    assert flash("--ssh", "orin") == 5
    error = capfd.readouterr().err
    assert "has no system" in error
    assert "orin: command failed with exit code 2" in error
    assert list((place / "tmp").iterdir()) == []


def test_a_host_that_is_an_option_is_none(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash("--ssh=-oProxyCommand=touch x") == 5
    assert "is not a host" in capsys.readouterr().err
    assert not (place / "hosts").exists()


def test_an_archive_and_its_one_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash() == 0
    said = capsys.readouterr().out
    assert "tar -xf fedquilt-orin-1.tar && sudo sh fedquilt-orin-1/install.sh" in said
    (place / "here").mkdir()
    subprocess.run(["tar", "-xf", place / "fedquilt-orin-1.tar", "-C", place / "here"], check=True)
    script = ["sh", "here/fedquilt-orin-1/install.sh", "--root", "board"]
    subprocess.run(script, check=True, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL)
    assert (place / "board/etc/fedquilt/agent.toml").is_file()


def test_a_dry_archive_is_none(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flash("--out", "out.tar", "--dry-run") == 0
    assert "would pack units/fedquilt-agent.service" in capsys.readouterr().out
    assert not (place / "out.tar").exists()


def test_taking_it_out_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(place / "board")
    flash("--rootfs", "board")
    assert cli.main(["board", "uninstall", "--purge", "--rootfs", "board", "--dry-run"]) == 0
    assert (place / "board/opt/fedquilt/current").is_symlink()
    assert cli.main(["board", "uninstall", "--purge", "--rootfs", "board"]) == 0
    assert snapshot(place / "board") == before
    flash("--ssh", "me@orin")
    assert cli.main(["board", "uninstall", "--purge", "--ssh", "me@orin"]) == 0
    assert snapshot(place / "board") == before
    assert cli.main(["board", "uninstall"]) == 2
    assert "sudo sh install.sh --uninstall" in capfd.readouterr().err


def test_this_machines_own_root_is_no_target(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "self").symlink_to("/")
    for name in ("/", "self", "/../"):
        assert flash("--rootfs", name) == 2
        assert "is this machine itself" in capsys.readouterr().err
    assert flash("--rootfs", "agent.toml") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_wrong_root_is_refused_before_wheels_are_fetched(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    plant(place / "other", AARCH64 if ELF == X86_64 else X86_64, INTERPRETER)
    assert flash("--rootfs", "other") == 2
    assert "build one with the board's --target" in capsys.readouterr().err
    assert not (place / "cache").exists()


def test_what_is_missing_on_the_command_line_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["board", "flash", "agent.toml"]) == 2
    assert "--target is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["board", "flash", "--target", TARGET])
