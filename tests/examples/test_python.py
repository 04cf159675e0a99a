"""The examples in Python are run as a user runs them: as a script, cell by cell, and as a method from outside."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.tools.lab import demo

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 900.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    shutil.copy(demo.HERE / "digits.npz", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_quickstart_runs_as_it_is_written(place):
    for library in ("pandas", "onnx", "matplotlib"):
        pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "run.html").stat().st_size > 10_000
    assert (place / "net.onnx").stat().st_size > 4 * 64 * 32
    last = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[0] for row in last] == ["fedprox", "scaffold"]
    assert all(float(row[2]) > 0.5 for row in last)


def test_the_notebook_runs_cell_by_cell(place):
    pytest.importorskip("pandas")
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # none is kept in the repository
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    run = names["run"]
    assert isinstance(run, fq.Run)
    assert run.rounds()["accuracy"][-1] > 0.5
    assert "<table>" in run.rounds()._repr_html_()


def test_a_method_from_outside_trains_as_ours_does(place):
    shutil.copy(EXAMPLES / "own_method.py", place)
    job = fq.Job(
        method="fedprox",
        params={"mu": 0.1, "lr": 0.2},
        rounds=2,
        engine="numpy",
        model=fq.models.mlp(64, [8], 10),
        data=fq.Data("digits.npz", limit=240),
        fleet=fq.Fleet(3),
    )
    own, ours = fq.simulate(job.replace(method="own_method:METHOD")), fq.simulate(job)
    assert {name: array.tolist() for name, array in own.weights().items()} == {
        name: array.tolist() for name, array in ours.weights().items()
    }
