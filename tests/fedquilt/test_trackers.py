"""Trackers: what they hear, and that the real libraries keep it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt import trackers
from fedquilt.tools import demo


def job(**changes: Any) -> fq.Job:
    pytest.importorskip("torch")
    table: dict[str, Any] = {
        "method": "fedavg",
        "rounds": 2,
        "engine": "numpy",
        "model": fq.models.mlp(64, [4], 10),
        "data": {"path": str(demo.HERE / "digits.npz"), "limit": 120},
        "fleet": fq.Fleet(2),
    }
    return fq.Job(**{**table, **changes})


class Heard:
    """A tracker that notes what it hears."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, job: fq.Job, run: str) -> None:
        self.said.append(run)

    def round(self, row: Mapping[str, Any]) -> None:
        self.said.append(dict(row))

    def end(self, run: fq.Run) -> None:
        self.said.append(run)


@pytest.mark.parametrize("check", [{}, {"every": 1}])
def test_a_tracker_hears_every_round_once(check: dict[str, Any]) -> None:
    """The very rows of `Run.rounds`, also where a round's accuracy comes with the next one's checks."""
    heard = Heard()
    run = fq.simulate(job(check=check), trackers=[heard])
    assert heard.said == [run.id, *run.rounds(), run]
    assert None not in run.rounds()["accuracy"]


class Breaks(Heard):
    """A tracker by which a run ends early."""

    def round(self, row: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    def end(self, run: fq.Run) -> None:
        self.said.append(run.status)


def test_a_tracker_hears_of_a_run_that_breaks_off() -> None:
    """So that what it holds open is closed."""
    first, last = Breaks(), Heard()
    with pytest.raises(KeyboardInterrupt):
        fq.simulate(job(), trackers=[first, last])
    assert first.said[1:] == ["interrupted"]
    assert isinstance(last.said[-1], fq.Run)


def test_what_is_not_known_is_not_logged() -> None:
    """None is no number; a job's tables become one level."""
    assert trackers.numbers({"round": 3, "accuracy": 0.5, "joules": None}) == {"accuracy": 0.5}
    assert trackers.flat({"a": 1, "cohort": {"size": 5}}) == {"a": 1, "cohort.size": 5}


@pytest.mark.parametrize(("make", "module"), [("TensorBoard", "tensorboard"), ("MLflow", "mlflow"), ("WandB", "wandb")])
def test_a_tracker_without_its_package_says_what_to_install(
    make: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is made, before anything runs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(fq.JobError, match=rf"pip install 'fedquilt\[{module}\]'"):
        getattr(trackers, make)()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_holds_the_rounds(tmp_path: Path) -> None:
    """Read back by TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fq.simulate(job(), trackers=[trackers.TensorBoard(tmp_path)])
    found = EventAccumulator(str(tmp_path / run.id)).Reload()
    values = {event.step: event.value for event in found.Scalars("accuracy")}
    assert values == pytest.approx(dict(zip((1, 2), run.rounds()["accuracy"], strict=True)))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store of files, which is what mlflow-skinny has without a server."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    run = fq.simulate(job(), trackers=[trackers.MLflow("digits", uri)])
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_name == run.id
    assert kept.data.params["fleet.devices"] == "2"
    history = client.get_metric_history(kept.info.run_id, "accuracy")
    assert [each.value for each in history] == run.rounds()["accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_work_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for `wandb sync`; nothing is sent."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fq.simulate(job(), trackers=[trackers.WandB("digits", folder=tmp_path)])
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = kept.read_bytes()
    assert b"fedavg" in records
    assert b"held_accuracy" in records
