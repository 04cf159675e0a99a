"""A run's global model on a common test set, found out beside the coordinator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.scores import EvaluationScore
from fedquilt.core import BlobRef, DataError, JobError, StoreError
from fedquilt.core import evaluation as core_evaluation
from fedquilt.edge_agent.engines import evaluation_sums
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import evaluation

NETWORK = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
RIGHT = {"1.weight": np.eye(2, dtype=np.float32), "1.bias": np.zeros(2, np.float32)}
WRONG = {**RIGHT, "1.weight": -RIGHT["1.weight"]}
TABLE: dict[str, Any] = {"name": "points", "method": "fedavg", "rounds": 3, "engine": "numpy"}


def write_test_set(file: Path) -> None:
    x = np.array([[1, 0], [0, 1], [2, 1], [3, 1]], np.float32)
    np.savez(file, x_test=x, y_test=np.array([0, 1, 0, 1]))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    write_test_set(tmp_path / "points.npz")
    job_bundle.write_bundle(
        tmp_path / "bundle", {"network": NETWORK, "flops": 8}, {"model": tensors.encode_tensors(RIGHT)}
    )
    with Store(tmp_path / "runs") as opened:
        yield opened


def begun(store: Store, **changes: object) -> str:
    folder = store.home.parent
    table = {**TABLE, "test": {"path": str(folder / "points.npz")}, **changes}
    run = store.add_job(settings.parse_job(table), folder / "bundle")
    store.set_status(run, "running")
    return run


def put(store: Store, run: str, model: dict[str, np.ndarray]) -> BlobRef:
    row = store.find_job(run)
    method = methods.load("fedavg")
    state = method.init(job_bundle.load_bundle(row.bundle), settings.parse_params(row.job), 0)
    return store.blob_store.store_bytes(tensors.pack_state(type(state)(**{**vars(state), "model": model})))


def log(store: Store, run: str, fact: AnyEvent) -> None:
    if isinstance(fact, RoundCommitted):
        store.append_event(run, CohortSelected(fact.round, 0, ("a",)))
        store.append_event(run, RoundClosed(fact.round))
    store.append_event(run, fact)


def test_the_last_state_is_scored_and_kept(store: Store) -> None:
    run = begun(store)
    store.append_event(run, JobStarted(put(store, run, WRONG)))
    log(store, run, RoundCommitted(0, put(store, run, RIGHT), False, {}))
    store.set_status(run, "done")
    said: list[EvaluationScore] = []
    found = evaluation.evaluate_run(store, "points", report_score=said.append)
    (score,) = found.scores
    assert (score.rounds, score.value, score.examples) == (1, 0.75, 4)
    assert said == [score]
    job = settings.parse_job({**TABLE, "labels": ["left", "right"]})
    assert evaluation.format_score(score)[0].startswith("after 1 rounds: test accuracy 75.00 % of 4 examples, ")
    head, *rows = [line.split() for line in evaluation.format_score(score, job)[1:]]
    assert head == ["true,", "predicted", "left", "right"]
    assert [row[0] for row in rows] == ["left", "right"]
    assert sum(int(count) for row in rows for count in row[1:]) == 4
    assert int(rows[0][1]) + int(rows[1][2]) == 3
    (row,) = evaluation.scores_to_dict(found)["scores"]
    assert (row["metrics"]["accuracy"], row["confusion"]) == (0.75, [[int(each) for each in row[1:]] for row in rows])
    assert evaluation.evaluate_run(store, run, report_score=said.append) == found
    assert len(said) == 1


def test_a_score_that_cannot_be_stored_is_printed_all_the_same(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begun(store)
    store.append_event(run, JobStarted(put(store, run, RIGHT)))
    store.set_status(run, "done")

    def refuse(path: Path, found: scores.RunScores) -> None:
        raise StoreError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr(scores, "write_scores", refuse)
    assert main(["model", "evaluate", run, "--home", str(store.home)]) == 0
    assert "test accuracy 75.00 % of 4 examples" in capsys.readouterr().out
    assert "the score is not stored" in caplog.text


def test_following_scores_every_state_that_is_there_when_it_is_looked_for(store: Store) -> None:
    run = begun(store)
    store.append_event(run, JobStarted(put(store, run, WRONG)))
    gone = put(store, run, {**RIGHT, "1.bias": np.ones(2, np.float32)})
    news = [
        [RoundCommitted(0, put(store, run, RIGHT), False, {})],
        [RoundCommitted(1, gone, False, {}), RoundCommitted(2, put(store, run, WRONG), True, {}), JobEnded("done")],
    ]

    def sleep(seconds: float) -> None:
        facts = news.pop(0)
        for fact in facts:
            log(store, run, fact)
        if len(facts) > 1:
            store.blob_store.remove_blob(gone.sha256)
            store.set_status(run, "done")

    found = evaluation.evaluate_run(store, run, follow=True, sleep=sleep)
    assert [(score.rounds, score.value) for score in found.scores] == [(0, 0.25), (1, 0.75)]
    assert not news


def test_a_lost_state_of_an_ended_run_is_an_error(store: Store) -> None:
    run = begun(store)
    store.append_event(run, JobStarted(BlobRef(sha256="a" * 64, size=1)))
    store.set_status(run, "done")
    with pytest.raises(StoreError, match="is missing or damaged"):
        evaluation.evaluate_run(store, run)


def test_scores_on_another_test_set_are_not_mixed_with_these(store: Store) -> None:
    run = begun(store)
    store.append_event(run, JobStarted(put(store, run, RIGHT)))
    store.set_status(run, "done")
    evaluation.evaluate_run(store, run)
    row = store.find_job(run)
    assert len(scores.read_scores(store.home, row).scores) == 1
    other = settings.parse_job({**TABLE, "test": {"path": "/elsewhere.npz"}})
    assert scores.read_scores(store.home, row._replace(job=other)).scores == ()
    scores.scores_path(store.home, run).write_text("{ half")
    assert scores.read_scores(store.home, row).scores == ()


def test_a_run_without_a_test_set_has_no_scores(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"path": "own.npz", "x": "inputs", "y": "kinds"}
    run = store.add_job(settings.parse_job({**TABLE, "data": data}), store.home)
    assert scores.read_scores(store.home, store.find_job(run)) == scores.RunScores({})
    other = begun(store)
    assert main(["ls", "--home", str(store.home)]) == 0
    told = capsys.readouterr().out
    assert run in told
    assert other in told


def test_the_test_set_is_the_jobs_own_or_the_data_s_test_split() -> None:
    data = {"path": "a.npz", "partition": "iid", "held": 0.5, "share": 1, "shares": 2}
    job = settings.parse_job({**TABLE, "data": data})
    assert scores.make_test_table(job) == {"path": "a.npz", "partition": "iid", "split": "test"}
    job = settings.parse_job({**TABLE, "data": data, "test": {"limit": 5}})
    assert scores.make_test_table(job)["limit"] == 5
    job = settings.parse_job({**TABLE, "data": data, "test": {"path": "b.npz", "split": "val"}})
    assert scores.make_test_table(job) == {"path": "b.npz", "split": "val"}


def test_a_test_set_that_cannot_be_read_names_its_table(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    job = settings.parse_job({**TABLE, "test": {"path": str(tmp_path / "own.npz")}})
    with pytest.raises(DataError, match=r"own.npz has no array x_test: set \[test\] x"):
        evaluation.load_test_set(job)


def test_arrays_that_are_named_for_training_are_no_test_set() -> None:
    job = settings.parse_job({**TABLE, "data": {"path": "a.npz", "x": "pictures", "y": "names"}})
    with pytest.raises(JobError, match=r"set the array of \[test\] too"):
        scores.make_test_table(job)
    with pytest.raises(JobError, match=r"add .test. to evaluate"):
        scores.make_test_table(settings.parse_job(TABLE))


def test_the_verb_tells_people_and_programs(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run = begun(store)
    home = ["--home", str(store.home)]
    assert main(["model", "evaluate", run, *home]) == 0
    assert capsys.readouterr().out == f"{run} has no model to evaluate yet\n"
    store.append_event(run, JobStarted(put(store, run, RIGHT)))
    store.set_status(run, "done")
    for _ in ("computed", "stored"):
        assert main(["model", "evaluate", run, *home]) == 0
        assert "after 0 rounds: test accuracy 75.00 % of 4 examples" in capsys.readouterr().out
    assert main(["model", "evaluate", run, *home, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["value"] == 0.75
    assert main(["model", "evaluate", "nothing", *home]) == 6


def test_a_method_of_sub_models_is_judged_by_the_whole_network(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import masks

    network = {"name": "mlp", "inputs": 2, "hidden": [2], "classes": 2}
    model = {key: value.numpy() for key, value in registry.load_network(network).state_dict().items()}
    for name, array in {
        "1.weight": np.eye(2),
        "1.bias": np.zeros(2),
        "3.weight": np.eye(2),
        "3.bias": np.zeros(2),
    }.items():
        model[name] = array.astype(np.float32)
    follows = {
        "1.weight": masks.TensorGroups((2, 2), ("1",)),
        "1.bias": masks.TensorGroups((2,), ("1",)),
        "3.weight": masks.TensorGroups((2, 2), (), ("1",)),
    }
    plan = tensors.encode_tensors({"json": masks.plan_to_array(masks.MaskPlan({"1": 2}, {}, follows))})
    job_bundle.write_bundle(
        tmp_path / "bundle", {"network": network}, {"model": tensors.encode_tensors(model), "masks": plan}
    )
    write_test_set(tmp_path / "points.npz")
    job = settings.parse_job({"name": "points", "method": "heterofl", "test": {"path": str(tmp_path / "points.npz")}})
    state = methods.load("heterofl").init(job_bundle.load_bundle(tmp_path / "bundle"), settings.parse_params(job), 0)
    with evaluation.Evaluator(job, tmp_path / "bundle") as judge:
        score = judge.score(state, 0)
    assert score is not None
    assert score.value == 0.75


def test_fedsq_is_judged_with_the_gates_of_the_pre_trained_copy(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    network = {"name": "mlp", "inputs": 2, "hidden": [2], "classes": 2}
    sides = {"1.weight": np.eye(2), "1.bias": np.zeros(2), "3.weight": np.eye(2), "3.bias": np.zeros(2)}
    model = {name: array.astype(np.float32) for name, array in sides.items()}
    job_bundle.write_bundle(tmp_path / "bundle", {"network": network}, {"model": tensors.encode_tensors(model)})
    write_test_set(tmp_path / "points.npz")
    job = settings.parse_job({"name": "points", "method": "fedsq", "test": {"path": str(tmp_path / "points.npz")}})
    begun = methods.load("fedsq").init(job_bundle.load_bundle(tmp_path / "bundle"), settings.parse_params(job), 0)
    moved = replace(begun, model={name: -array for name, array in begun.model.items()})
    alone = methods.load("fedavg").init(job_bundle.load_bundle(tmp_path / "bundle"), settings.parse_params(job), 0)
    with evaluation.Evaluator(job, tmp_path / "bundle") as judge:
        first, found = judge.score(begun, 0), judge.score(moved, 1)
    plain = settings.parse_job({"name": "points", "method": "fedavg", "test": {"path": str(tmp_path / "points.npz")}})
    with evaluation.Evaluator(plain, tmp_path / "bundle") as judge:
        bare = judge.score(replace(alone, model=moved.model), 1)
    assert first is not None
    assert found is not None
    assert bare is not None
    assert found.value == first.value == 0.75
    assert bare.value != 0.75


@pytest.mark.parametrize(("best", "rounds", "right"), [(False, 2, 0.25), (True, 1, 0.75)])
def test_a_file_is_evaluated_with_the_last_or_the_best_state(
    store: Store, best: bool, rounds: int, right: float
) -> None:
    run = begun(store, test={})
    store.append_event(run, JobStarted(put(store, run, WRONG)))
    log(store, run, RoundCommitted(0, put(store, run, RIGHT), False, {}))
    log(store, run, RoundCommitted(1, put(store, run, WRONG), False, {}, best=True))
    store.set_status(run, "done")
    (score,) = evaluation.evaluate_state(store, run, best=best, data=store.home.parent / "points.npz").scores
    assert (score.rounds, score.value, score.examples) == (rounds, right, 4)
    assert not scores.scores_path(store.home, run).exists()


def test_a_run_without_a_test_set_names_the_option(store: Store) -> None:
    run = begun(store, test={}, data={"path": str(store.home.parent / "none.npz")})
    store.append_event(run, JobStarted(put(store, run, RIGHT)))
    with pytest.raises(JobError, match=r"job 'points' has no test set, .*`fedquilt model evaluate points --data"):
        evaluation.evaluate_run(store, run)


def test_a_method_that_leaves_trained_tensors_on_devices_is_refused_by_name(store: Store) -> None:
    run = begun(store, method="local")
    row = store.find_job(run)
    state = methods.load("local").init(job_bundle.load_bundle(row.bundle), settings.parse_params(row.job), 0)
    store.append_event(run, JobStarted(store.blob_store.store_bytes(tensors.pack_state(state))))
    for evaluate in (evaluation.evaluate_run, evaluation.evaluate_state):
        with pytest.raises(JobError, match=r"local leaves 2 trained tensors .* on devices"):
            evaluate(store, run)


def test_errors_of_a_regression_are_in_the_unit_of_its_targets() -> None:
    """Errors of 1 and 3 standard deviations of 10: RMSE and MAE are ten times as large, R² is the same."""
    outputs, y = np.array([[1.0], [0.0]], np.float32), np.array([[0.0], [3.0]], np.float32)
    sums = evaluation_sums.evaluate_scores("regression", [(outputs, y)]).sums()
    score = evaluation.score_from_sums(sums, 3, "")
    assert score is not None
    job = settings.parse_job(
        {**TABLE, "data": {"path": "x", "task": "regression", "target": {"mean": [5], "std": [10]}}}
    )
    (converted,) = evaluation.convert_to_units(scores.RunScores({}, (score,)), job).scores
    assert converted.evaluation is not None
    before, after = core_evaluation.compute_metrics(sums), core_evaluation.compute_metrics(converted.evaluation)
    assert after["rmse"] == converted.value == pytest.approx(10 * before["rmse"])
    assert (after["mae"], after["r2"]) == (pytest.approx(20.0), pytest.approx(before["r2"]))
