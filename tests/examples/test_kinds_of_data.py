"""The examples of each kind of data: made, prepared and trained on three simulated boards, better than a constant."""

import runpy
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedquilt import metrics
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import Examples
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import evaluation, single_run

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {  # and whether it needs torch to train
    "timeseries": True,
    "tabular": False,
    "audio": True,
    "text": True,
    "regression": False,
    "multilabel": False,
}
BY_DAY = ("timeseries", "regression", "multilabel")  # with torch and without; classes, a number, several labels


def constant(train: Examples, test: Examples, task: str) -> float:
    if task == "classes":
        return float((test.y == np.bincount(train.y).argmax()).mean())
    if task == "regression":
        return float(np.sqrt(np.square(test.y - train.y.mean(axis=0)).mean()))
    return float((test.y == (train.y.mean(axis=0) > 0.5)).mean())


def made(kind: str, folder: Path) -> tuple[JobSettings, Path]:
    shutil.copytree(EXAMPLES / kind, folder / kind, ignore=shutil.ignore_patterns("data", "vocabulary.txt"))
    runpy.run_path(str(folder / kind / "make.py"), run_name="__main__")
    job = settings.load_job(folder / kind / "job.toml")
    prepare.prepare_bundle(msgspec.to_builtins(job), folder / "bundle")
    return job, folder / "bundle"


@pytest.mark.parametrize(
    "kind", [kind if kind in BY_DAY else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_an_example_learns_more_than_a_constant(kind, tmp_path):
    pytest.importorskip("torch", reason="first weights are torch's")
    job, bundle = made(kind, tmp_path)
    run = single_run.run_seed(job, bundle, lambda done: None)
    last = run.marks[-1]
    test = evaluation.load_test_set(job)
    train = examples.load_split(DataSpec.parse(job.data))
    task = metrics.task_from_network(job.model)
    metric = metrics.MAIN_METRICS[task]
    base = constant(train, test, task)
    assert last.metric == metric.name
    assert run.tested == len(test) > 0
    assert run.devices == 3
    perfect = 1.0 if metric.higher else 0.0
    half = (base + perfect) / 2
    for value in (last.test, last.held):
        assert value is not None
        assert metrics.reaches_target(metric, value, half), (kind, value, base)
    print(kind, metrics.format_value(metric, last.test or 0.0), "constant", metrics.format_value(metric, base))
