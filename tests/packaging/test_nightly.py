"""The long checks: which stages there are, and that one which fails stops no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import nightly
from fedquilt.cli import bench
from nightly import Stage
from tests.rehearsal import host

ROOT = Path(__file__).parents[2]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_there_is_a_stage_for_each_bench_and_python() -> None:
    found = {stage.name: stage for stage in nightly.stages()}
    assert {name for name in found if name.startswith("bench-")} == {f"bench-{name}" for name in bench.OPTIONS}
    assert {"faults", "matrix", "rehearsal", "containers"} <= found.keys()
    assert {"python-3.10", "python-3.12", "python-3.13"} <= found.keys()
    assert {"onnxruntime-1.19.2", "onnxruntime-1.23.2", "s3", "ray", "first-results"} <= found.keys()
    assert "--data" in found["bench-sim"].hindrance
    assert not {stage.name: stage for stage in nightly.stages(ROOT)}["bench-sim"].hindrance


@pytest.mark.parametrize(
    ("user", "programs", "why"),
    [
        (1000, host.PROGRAMS, "root, as it makes a root file system and boots it: sudo make rehearsal"),
        (0, {"debootstrap", "mosquitto", "unshare"}, "programs: sudo apt install systemd-container"),
        (0, host.PROGRAMS, ""),
    ],
)
def test_a_rehearsal_that_cannot_run_here_is_skipped_and_says_why(
    user: int, programs: Iterable[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the rehearsal itself, before it is started."""
    here = host.HostMachine(user, dict.fromkeys(programs, "/usr/bin/true"), 10**12)
    monkeypatch.setattr(host.HostMachine, "detect", lambda folder: here)
    stages = {stage.name: stage for stage in nightly.stages()}
    assert stages["rehearsal"].commands == ((sys.executable, "-m", "tests.rehearsal"),)
    assert stages["rehearsal"].hindrance == (f"a rehearsal needs {why}" if why else "")


def test_bench_sim_finds_the_images_in_a_folder_of_several_sets(tmp_path: Path) -> None:
    """As tests take it, or the folder of the files itself."""
    for given, wanted in ((tmp_path, tmp_path), (tmp_path, tmp_path / "MNIST" / "raw")):
        stage = {stage.name: stage for stage in nightly.stages(given)}["bench-sim"]
        assert stage.commands[0][-1] == str(wanted)
        (tmp_path / "MNIST" / "raw").mkdir(parents=True, exist_ok=True)


def test_a_stage_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each printed is shown and kept; the table tells all, and the exit code that one failed."""
    made = [
        Stage("first", "of three", (python("print('3 seen'); raise SystemExit(5)"), python("print('never')"))),
        Stage("second", "of three", (("no-such-program",),)),
        Stage("third", "of three", (python("print('all seen')"), python("import sys; print('end', file=sys.stderr)"))),
        Stage("fourth", "of three", (python("print('never')"),), "there is no board here"),
    ]
    monkeypatch.setattr(nightly, "stages", lambda data: made)
    assert nightly.main(["--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    assert "never" not in shown
    table = shown.split("fourth: skipped")[1].split("\n")
    rows = {line.split()[0]: line for line in table if line}
    assert "FAILED" in rows["first"] and "3 seen (exit code 5" in rows["first"]  # noqa: PT018
    assert "FAILED" in rows["second"] and "no-such-program: No such file" in rows["second"]  # noqa: PT018
    assert "passed" in rows["third"] and rows["third"].endswith("end")  # noqa: PT018
    assert rows["fourth"].endswith("there is no board here")
    assert table[-2] == "1 passed, 2 FAILED, 1 skipped"
    assert "all seen\n" in (tmp_path / "out" / "third.log").read_text()
    assert nightly.main(["--out", str(tmp_path / "out"), "--only", "th", "fourth"]) == 0
    assert "1 passed, 0 FAILED, 1 skipped" in capsys.readouterr().out
    assert nightly.main(["--out", str(tmp_path / "out"), "--skip", "first", "second"]) == 0


@pytest.mark.parametrize(
    ("last", "result"),
    [
        ("1 skipped, 2 deselected in 935.16s (0:15:35)", "skipped"),
        ("4 skipped in 1.02s", "skipped"),
        ("7 passed, 1 skipped in 2.10s", "passed"),
        ("2 skipped stages, of a command that is not pytest", "passed"),
    ],
)
def test_a_stage_none_of_whose_tests_has_run_has_not_passed(tmp_path: Path, last: str, result: str) -> None:
    """The last line of pytest says so, its exit code does not."""
    assert nightly.play(Stage("some", "of tests", (python(f"print({last!r})"),)), tmp_path, print).result == result


def test_a_stage_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nightly.main(["--only", "simulate"])
    assert "no stage is called 'simulate'; there are: faults" in capsys.readouterr().err


def test_a_python_that_is_not_there_or_does_not_start_skips_its_stage(tmp_path: Path) -> None:
    """pyenv keeps commands for versions that are not chosen: they are found, and end with an error."""
    assert "no Python 3.10 here" in nightly.stage_apart("a", "b", (), find=lambda version: None).hindrance
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "python3.10").write_text("#!/bin/sh\nexit 127\n")
    (shims / "python3.10").chmod(0o755)
    env = {"PYENV_ROOT": str(tmp_path), "PATH": str(shims)}
    assert nightly.interpreter("3.10", env) is None
    for patch in ("9", "13"):
        place = tmp_path / "versions" / f"3.10.{patch}" / "bin"
        place.mkdir(parents=True)
        (place / "python").symlink_to(sys.executable)
    assert nightly.interpreter("3.10", env) == str(tmp_path / "versions" / "3.10.13" / "bin" / "python")


def test_the_check_of_graphs_is_run_beside_the_versions_that_need_it() -> None:
    """In an environment of its own, with the version pinned; without its Python the stage is skipped and says so."""
    _, pip, tests = nightly.stage_apart(
        "a", "b", (("-m", "pytest", *nightly.GRAPHS),), ("onnxruntime==1.19.2",), find=lambda version: sys.executable
    ).commands
    assert pip[-1] == "onnxruntime==1.19.2"
    assert pip[0] == tests[0]
    assert all((ROOT / name).is_file() for name in tests[3:])
    assert "tests/edge_agent/task/test_hostile_graph.py" in tests
    assert "no Python 3.10 here" in nightly.stage_apart("a", "b", (), find=lambda version: None).hindrance


def test_make_nightly_starts_where_the_checkout_is_not_on_the_path(tmp_path: Path) -> None:
    """As in an environment that pip has made, where a script in tests/ takes tests/fedquilt for the package."""
    away = f"import sys\nsys.path[:] = [place for place in sys.path if place != {str(ROOT)!r}]\n"
    (tmp_path / "sitecustomize.py").write_text(away)
    recipe = re.search(r"^nightly:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    words = [sys.executable, *recipe[1].replace("$(ARGS)", "--list").split()[1:]]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "faults" in ran.stdout, ran.stderr
