"""Trackers: what they hear, and that the real libraries keep it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt.api import experiment_tracking, trackers
from fedquilt.cli import main
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import terminal
from fedquilt.tools.lab import demo


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


class Fails(Heard):
    """A tracker whose server is gone."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls = calls

    def start(self, job: fq.Job, run: str) -> None:
        self._heard("start")

    def round(self, row: Mapping[str, Any]) -> None:
        self._heard("round")

    def end(self, run: fq.Run) -> None:
        self._heard("end")

    def _heard(self, call: str) -> None:
        self.said.append(call)
        if call in self.calls:
            raise ConnectionError("no answer")


@pytest.mark.parametrize(
    ("calls", "hears"),
    [
        (("start",), ["start"]),
        (("round",), ["start", "round", "round", "end"]),
        (("round", "end"), ["start", "round", "round", "end"]),
    ],
)
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    calls: tuple[str, ...], hears: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Another one hears everything; one whose start has failed is told nothing more."""
    fails, heard = Fails(*calls), Heard()
    run = fq.simulate(job(), trackers=[fails, heard])
    assert run.status == "done"
    assert fails.said == hears
    assert heard.said == [run.id, *run.rounds(), run]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"tracker Fails: {calls[0]} failed with ConnectionError: no answer (")
    assert "test_trackers.py, line " in warning


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([object()], r"is no tracker: it has no start\(job, run\) and no round\(row\) and no end\(run\)"),
        ([Heard], r"Heard is a class: give one of its objects, as in Heard\(\.\.\.\)"),
        (Heard(), "a list of trackers is wanted"),
        ("tensorboard", "a list of trackers is wanted"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_runs(given: Any, said: str, tmp_path: Path) -> None:
    """With what it lacks."""
    with pytest.raises(fq.JobError, match=said):
        fq.simulate(job(), trackers=given, home=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# -- from the command -----------------------------------------------------------------------------


def test_the_command_tells_a_tracker_of_a_run_while_it_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, as facts come into the log of a coordinator that serves the home; then the end."""
    whole = fq.simulate(job(), home=tmp_path / "whole")
    with Store(whole.home) as store:
        row, facts = store.find_job(whole.id), [fact for _, _, fact in store.read_events(whole.id)]
    heard = Heard()
    monkeypatch.setitem(experiment_tracking.NAMED, "heard", lambda where: heard)
    seen: list[int] = []  # how much the tracker had heard when the coordinator went on
    with Store(tmp_path / "runs") as served:
        assert served.acquire_lock()
        run = served.add_job(row.job, row.bundle)
        served.set_status(run, "running")

        def go_on(seconds: float) -> None:
            seen.append(len(heard.said))
            for fact in facts[:4]:
                served.append_event(run, fact)
            del facts[:4]
            if not facts:
                served.set_status(run, "done")

        monkeypatch.setattr(terminal.time, "sleep", go_on)
        assert main(["logs", run, "--follow", "--track", "heard", "--home", str(tmp_path / "runs")]) == 0
    assert seen[0] == 1, "the start is told before the first round"
    assert {1, 2} <= set(seen), "the first round is told before the second one's facts are there"
    assert heard.said[0] == run
    assert [each["round"] for each in heard.said[1:-1]] == [1, 2]
    assert heard.said[-1] == fq.Run(tmp_path / "runs", run)


@pytest.mark.filterwarnings("ignore")
def test_the_command_tells_a_tracker_of_a_run_that_is_over(tmp_path: Path) -> None:
    """A real one, by its name and folder."""
    pytest.importorskip("tensorboard")
    run = fq.simulate(job(), home=tmp_path / "runs")
    words = ["logs", "job", "--home", str(run.home), "--track", f"tensorboard:{tmp_path / 'board'}"]
    assert main(words) == 0
    assert list((tmp_path / "board" / run.id).glob("events*"))


def test_the_command_says_which_trackers_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the nearest."""
    run = fq.simulate(job(), home=tmp_path / "runs")
    capsys.readouterr()
    assert main(["logs", run.id, "--home", str(run.home), "--track", "tensorbord:x"]) == 2
    said = capsys.readouterr().err
    assert (
        "there is no tracker 'tensorbord'; there are: tensorboard, mlflow, wandb; did you mean 'tensorboard'?" in said
    )


def test_what_is_not_known_is_not_logged() -> None:
    """None is no number; a job's tables become one level."""
    assert trackers.known_values({"round": 3, "accuracy": 0.5, "joules": None}) == {"accuracy": 0.5}
    assert trackers.flatten_table({"a": 1, "cohort": {"size": 5}}) == {"a": 1, "cohort.size": 5}


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
