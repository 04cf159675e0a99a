"""The callbacks of examples/trackers.py, read back by the trackers' own libraries."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedquilt as fq
from fedquilt.tools.lab import demo

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def job() -> fq.Job:
    pytest.importorskip("torch")
    return fq.Job(
        method="fedavg",
        rounds=2,
        engine="numpy",
        model=fq.models.mlp(64, [4], 10),
        data=fq.Data(str(demo.HERE / "digits.npz"), limit=120),
        fleet=fq.Fleet(2),
    )


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "trackers", raising=False)
    import trackers

    return trackers


def test_unknown_values_are_not_reported(trackers):
    assert trackers.known_values({"round": 3, "accuracy": 0.5, "joules": None}) == {"accuracy": 0.5}


def test_tensorboard_holds_the_rounds(job, trackers, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with trackers.tensorboard(str(tmp_path)) as report:
        run = fq.simulate(job, on_round=report)
    values = {event.step: event.value for event in EventAccumulator(str(tmp_path)).Reload().Scalars("accuracy")}
    assert values == pytest.approx(dict(zip((1, 2), run.rounds()["accuracy"], strict=True)))


def test_mlflow_holds_the_rounds(job, trackers, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := (tmp_path / "mlruns").as_uri())
    with trackers.mlflow_run("digits", job) as report:
        run = fq.simulate(job, on_round=report)
    client = mlflow.MlflowClient(uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert kept.data.params["rounds"] == "2"
    history = client.get_metric_history(kept.info.run_id, "accuracy")
    assert [each.value for each in history] == run.rounds()["accuracy"]


def test_weights_and_biases_work_offline(job, trackers, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with trackers.wandb_run("digits", job, mode="offline", dir=str(tmp_path)) as report:
        fq.simulate(job, on_round=report)
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = kept.read_bytes()
    assert b"fedavg" in records
    assert b"held_accuracy" in records
