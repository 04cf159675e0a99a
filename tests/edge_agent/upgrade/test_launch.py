"""Which version is started, and when the launcher returns from a new one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.edge_agent.upgrade import launcher
from fedquilt.edge_agent.upgrade.launcher import VersionChoice, choose_version, format_choice, parse_choice

A, B = "a" * 64, "b" * 64
FLASHED = launcher.installation_id(Path(launcher.__file__).resolve().parent)
SHOWS = """#!/bin/sh
echo "$0 $* $FEDQUILT_LAUNCHED" >> {log}
{then}
"""
IMPATIENT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launch", sys.argv[1])
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
launch.ONLINE_S = 1.0
launch.main(sys.argv[2:])
"""


def plant(folder: Path, version: str, then: str = "exit 1") -> None:
    """A version that notes its start in FOLDER/log and then does something."""
    program = launcher.python_path(folder, version)
    program.parent.mkdir(parents=True)
    program.write_text(SHOWS.format(log=folder / "log", then=then))
    program.chmod(0o755)


def tried(**changes: object) -> VersionChoice:
    return VersionChoice("f", B, A, trying=True, starts=1, boot="boot", began_s=100.0)._replace(**changes)


def test_nothing_over_the_air_starts_the_flashed_version(tmp_path: Path) -> None:
    assert choose_version(None, "f", "boot", 0.0, tmp_path) == (VersionChoice("f"), "")


def test_a_trial_gets_three_starts(tmp_path: Path) -> None:
    plant(tmp_path, A)
    plant(tmp_path, B)
    choice = VersionChoice("f", B, A, trying=True)
    for start in (1, 2, 3):
        choice, said = choose_version(choice, "f", "boot", float(start), tmp_path)
        assert (choice.current, choice.starts, said) == (B, start, "")
    choice, said = choose_version(choice, "f", "boot", 4.0, tmp_path)
    assert (choice.current, choice.previous, choice.trying, choice.failed) == (A, None, False, B)
    assert choice.returned == "it ended 3 times before it was confirmed"
    assert said.startswith("version bbbbbbbbbbbb rolled back to aaaaaaaaaaaa: it ended 3 times")
    assert choose_version(choice, "f", "boot", 5.0, tmp_path) == (choice, "")  # it stays there


def test_a_trial_that_was_not_online_in_time_is_over(tmp_path: Path) -> None:
    plant(tmp_path, B)
    choice, _ = choose_version(tried(), "f", "boot", 400.0, tmp_path)
    assert choice.returned == "it was not online within 300 s"
    for alive in (tried(online=True), tried(boot="another"), tried(began_s=101.0)):
        choice, _ = choose_version(alive, "f", "boot", 400.0, tmp_path)
        assert (choice.current, choice.starts, choice.online) == (B, 2, False)


def test_a_board_flashed_anew_forgets_what_came_over_the_air(tmp_path: Path) -> None:
    choice, said = choose_version(tried(), "another", "boot", 0.0, tmp_path)
    assert choice == VersionChoice("another")
    assert "was flashed again" in said


def test_an_environment_that_is_gone_is_not_started(tmp_path: Path) -> None:
    choice, said = choose_version(VersionChoice("f", B, A), "f", "boot", 0.0, tmp_path)
    assert (choice.current, choice.failed) == ("", B)
    assert "is missing" in said
    assert "the flashed version" in said


@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "{",
        "[]",
        '{"flashed": 3}',
        '{"flashed": "f", "current": "../../etc"}',
        '{"flashed": "f", "trying": 1}',
        '{"flashed": "f", "starts": -1e300}',  # a trial would have no end
        '{"flashed": "f", "began_s": 1' + "0" * 400 + "}",  # no float takes it
        '{"flashed": ' + "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_choice_counts_as_none(spoilt: str, tmp_path: Path) -> None:
    assert parse_choice(spoilt) is None
    (tmp_path / launcher.CHOICE).write_text(spoilt)
    assert launcher.read_choice(tmp_path) is None


def test_a_damaged_name_of_the_installation_counts_as_none(tmp_path: Path) -> None:
    for spoilt in ("", "{", "[]", "[" * 100_000):
        (tmp_path / "bundle.json").write_text(spoilt)
        assert launcher.installation_id(tmp_path) == str(tmp_path)


def test_a_choice_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert parse_choice(format_choice(tried())) == tried()
    launcher.write_choice(tmp_path, tried())
    assert launcher.read_choice(tmp_path) == tried()


# -- real processes -------------------------------------------------------------------------------


def start(folder: Path, home: Path, *python: str) -> subprocess.CompletedProcess[str]:
    """Start the launcher once, as a unit does; the flashed version is a fedquilt that says its words."""
    (home / "fedquilt").mkdir(parents=True, exist_ok=True)
    (home / "fedquilt/__init__.py").touch()
    said = "import os, sys; print('flashed', *sys.argv[1:], os.environ['FEDQUILT_LAUNCHED']); main = int"
    (home / "fedquilt/cli.py").write_text(said)
    command = [sys.executable, *python, launcher.__file__, str(folder), "agent", "a.toml"]
    environment = {**os.environ, "PYTHONPATH": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, check=False)


def test_a_loop_of_starts_ends_at_the_flashed_version(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    plant(folder, B)

    launcher.write_choice(folder, VersionChoice(FLASHED, B, "", trying=True))
    codes = [start(folder, tmp_path).returncode for _ in range(5)]
    assert codes == [1, 1, 1, 0, 0]
    lines = (folder / "log").read_text().splitlines()
    assert len(lines) == 3
    assert "sys.exit(main()) agent a.toml" in lines[0]
    last = start(folder, tmp_path)
    assert last.stdout.startswith("flashed agent a.toml ")
    told = json.loads(last.stdout.split(maxsplit=3)[3])
    assert (told["running"], told["flashed"], told["arguments"]) == ("", FLASHED, ["agent", "a.toml"])
    assert any(path.endswith("site-packages") for path in told["packages"])


def test_what_is_no_program_is_not_started_twice(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    plant(folder, B)
    launcher.python_path(folder, B).write_bytes(b"\x7fELF of another machine")
    launcher.write_choice(folder, VersionChoice(FLASHED, B, "", trying=True))
    done = start(folder, tmp_path)
    assert done.returncode == 0
    assert "it cannot be started" in done.stderr
    found = launcher.read_choice(folder)
    assert found is not None
    assert (found.current, found.failed, found.returned) == (
        "",
        B,
        f"it cannot be started ({os.strerror(errno.ENOEXEC)})",
    )


def test_a_version_that_is_not_online_in_time_is_ended_by_the_alarm(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    plant(folder, B, "exec sleep 600")

    launcher.write_choice(folder, VersionChoice(FLASHED, B, "", trying=True))
    assert start(folder, tmp_path, "-c", IMPATIENT).returncode == -14
    assert start(folder, tmp_path, "-c", IMPATIENT).stdout.startswith("flashed")
    found = launcher.read_choice(folder)
    assert found is not None
    assert found.returned == "it was not online within 1 s"


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["-x"], 1), ([], 1)])
def test_the_launcher_describes_its_folder(arguments: list[str], code: int) -> None:
    ended = subprocess.run([sys.executable, launcher.__file__, *arguments], capture_output=True, text=True)
    assert (ended.returncode, "Restart=always" in ended.stdout + ended.stderr) == (code, True)
