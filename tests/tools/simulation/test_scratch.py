"""Folders for work in hand: removed when they are left, and after a kill by whoever makes one next."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedquilt.tools.simulation.pool import ScratchFolder

HOLDS = (
    "from fedquilt.tools.simulation.pool import ScratchFolder; s = ScratchFolder(); print(s.path, flush=True); input()"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_a_folder_goes_with_what_is_in_it_however_it_is_left(place: Path) -> None:
    def interrupted() -> None:
        with ScratchFolder() as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    made = ScratchFolder()
    made.cleanup()
    made.cleanup()
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_a_living_one_holds_stays(place: Path) -> None:
    (place / "fedquilt-older").mkdir()
    (place / "fedquilt-scratch-file").write_text("")
    held: list[Path] = []
    processes: list[subprocess.Popen[str]] = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        held.append(Path(process.stdout.readline().strip()))
        processes.append(process)
    killed, living = processes
    (held[0] / "file").write_text("left behind")
    killed.kill()
    killed.communicate()
    with ScratchFolder() as own:
        assert {path.name for path in place.iterdir()} == {
            "fedquilt-older",
            "fedquilt-scratch-file",
            held[1].name,
            own.name,
        }
    living.communicate("\n")


def test_a_folder_that_was_removed_before_it_could_be_locked_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    first: list[str] = []

    def seen(prefix: str) -> str:
        found = make(prefix=prefix)
        if not first:
            first.append(found)
            opened = os.open
            monkeypatch.setattr(os, "open", lambda path, flags: (opened(path, flags), os.rmdir(path))[0])
        else:
            monkeypatch.undo()
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", seen)
    with ScratchFolder() as folder:
        assert folder.exists()
        assert str(folder) != first[0]


def test_a_folder_that_was_removed_before_it_could_be_opened_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp
    first: list[str] = []

    def taken(prefix: str) -> str:
        found = make(prefix=prefix)
        if not first:
            first.append(found)
            os.rmdir(found)
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with ScratchFolder() as folder:
        assert folder.exists()
        assert str(folder) != first[0]
