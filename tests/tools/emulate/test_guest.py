"""A root file system in a folder: how it is made, and how programs are started in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.tools.emulate import guest
from fedquilt.tools.emulate.guest import Guest


def test_a_command_in_it_runs_in_spaces_of_its_own(tmp_path: Path) -> None:
    """Mounts and processes go with it; the user is set last, by number."""
    words = Guest(tmp_path).command_inside(["/bin/true", "x"], 101, 102, "/srv")
    assert words[0] == "unshare"
    assert {"--mount", "--pid", "--fork", "--kill-child"} <= set(words[: words.index("sh")])
    told = dict(itertools.pairwise(words))
    assert (told["--root"], told["--wd"]) == (str(tmp_path), "/srv")
    assert (told["--setuid"], told["--setgid"]) == ("101", "102")
    assert words[-2:] == ["/bin/true", "x"]


def test_programs_see_a_boards_cores(tmp_path: Path) -> None:
    """By the emulator's own choice OpenBLAS takes SME for granted, and its products come out wrong."""
    assert guest.ENVIRONMENT["QEMU_CPU"] == "cortex-a76"

    class Here(Guest):
        def command_inside(self, command: Sequence[str], user: int = 0, group: int = 0, folder: str = "/") -> list[str]:
            return list(command)

    assert Here(tmp_path).run("/usr/bin/env").splitlines() == [f"{k}={v}" for k, v in guest.ENVIRONMENT.items()]
    with pytest.raises(JobError, match=r"^/bin/sh in .* ended with 3: the end$"):
        Here(tmp_path).run("/bin/sh", "-c", "echo the end >&2; exit 3")


def test_a_user_is_the_roots_own(tmp_path: Path) -> None:
    """By its passwd, not this machine's."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nfedquilt:!:997:996::/var/lib/fedquilt:/bin/false\n"
    )
    assert Guest(tmp_path).read_ids("fedquilt") == (997, 996)
    with pytest.raises(JobError, match=r"no user nobody: fedquilt-setup\.service makes it"):
        Guest(tmp_path).read_ids("nobody")


def test_debootstrap_gets_the_architecture_suite_and_mirror(tmp_path: Path) -> None:
    """And its mounts are its own."""
    words = guest.bootstrap_command(tmp_path / "new", "http://near.example/debian")
    assert words[:3] == ["unshare", "--mount", "debootstrap"]
    assert "--arch=arm64" in words
    assert any(word.startswith("--include=") and "python3" in word for word in words)
    assert words[-3:] == ["bookworm", str(tmp_path / "new"), "http://near.example/debian"]


DEBOOTSTRAP = """#!/bin/sh
shift 4
eval root=\\${$(($# - 1))}
mkdir -p "$root/bin" && echo $* && echo "E: $SAYS" && exit $CODE
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `unshare` that is a debootstrap of four lines."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/unshare").write_text(DEBOOTSTRAP)
    (tmp_path / "programs/unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/usr/bin:/bin")
    monkeypatch.setenv("SAYS", "no such suite")
    return tmp_path


def test_a_root_file_system_appears_when_it_is_whole(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that failed is told by its last words and is no root; the next attempt begins anew."""
    root, log = fake / "out/root", fake / "log"
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(JobError, match=r"with http://m\.example ended with 1: E: no such suite \(.*log\)"):
        guest.create_root(root, "http://m.example", log)
    assert not root.exists()
    (fake / "out/root.new/rest").touch()
    monkeypatch.setenv("CODE", "0")
    assert guest.create_root(root, "http://m.example", log) == Guest(root)
    assert (root / "bin").is_dir()
    assert not (root / "rest").exists()
    assert not (fake / "out/root.new").exists()
