"""The long checks: which stages there are, and that one which fails stops no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import nightly
from nightly import Stage

ROOT = Path(__file__).parents[2]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_there_is_a_stage_for_each_bench_and_python() -> None:
    found = {stage.name: stage for stage in nightly.stages()}
    assert {name for name in found if name.startswith("bench-")} == {
        "bench-idle",
        "bench-blobs",
        "bench-energy",
        "bench-stitch",
        "bench-memory",
        "bench-coordinator",
        "bench-sim",
    }
    assert {"faults", "matrix", "rehearsal", "containers"} <= found.keys()
    assert {"python-3.10", "python-3.12", "python-3.13"} <= found.keys()
    assert {"onnxruntime-1.19.2", "onnxruntime-1.23.2", "s3", "ray", "small-tables"} <= found.keys()
    assert "--data" in found["bench-sim"].hindrance
    assert not {stage.name: stage for stage in nightly.stages(ROOT)}["bench-sim"].hindrance


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
