"""Class priors of devices: the correction by an independent formula, and through rounds, sites and releases."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from evaluations import of_classes, total
from linear_models import board_data, fitting_budget_bytes

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import RoundCommitted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import tasks, validation
from fedquilt.coordinator.views import event_messages, run_summary
from fedquilt.core import ClassPrior, EvaluationSums, JobError, Update, Usage, evaluation
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import evaluation_sums, numpy_engine
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.edge_agent.releases import check_process
from fedquilt.edge_agent.task.protocol import CheckRequest, SplitModelFiles
from fedquilt.formats import job_bundle, personal_models
from fedquilt.tools.artefacts import export
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import agents

DEMO = Path(demo.__file__).parent
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [16], "classes": 10}
TABLE: dict[str, Any] = {
    "name": "priors",
    "method": "fedavg",
    "rounds": 2,
    "engine": "numpy",
    "params": {"lr": 0.2, "batch": 16},
    "check": {"every": 1},
    "personal": {"prior": "auto"},
    "fleet": {"devices": 5},
    "data": {"path": str(DEMO / "digits.npz"), "partition": "dirichlet", "alpha": 0.1, "held": 0.4, "seed": 1},
}


def skewed(count: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy scores of three classes, and classes of which the last is rare."""
    draws = np.random.default_rng(seed)
    y = draws.choice(3, count, p=[0.7, 0.25, 0.05])
    return (np.eye(3)[y] + draws.normal(size=(count, 3))).astype(np.float32), y


def reference_right(scores: np.ndarray, y: np.ndarray, ratios: np.ndarray) -> int:
    """Correct predictions, each fold with the strength that the others choose, example by example."""
    right = 0
    for fold in range(5):
        others = [i for i in range(len(y)) if i % 5 != fold]
        best, most = 0.0, 0
        for strength in evaluation_sums.STRENGTHS:
            plain = [scores[i].argmax() == y[i] for i in others]
            moved = [(scores[i] + strength * ratios).argmax() == y[i] for i in others]
            gain = sum(moved) - sum(plain)
            changed = sum(a != b for a, b in zip(plain, moved, strict=True))
            if gain > most and gain > evaluation_sums.MIN_GAIN * changed**0.5:
                best, most = strength, gain
        right += sum((scores[i] + best * ratios).argmax() == y[i] for i in range(fold, len(y), 5))
    return right


def test_log_ratios_are_smoothed_counts_over_the_fleets_shares_by_hand():
    """Of 60, 20 and 0 labels and 3 in the fleet's shares 1/2, 1/4, 1/4: 61.5, 20.75 and 0.75 of 83, over these shares.

    G is 2 * 60 ln 1.5 = 48.7. That of a tenth of the labels does not exceed 2 + 3 * 2.
    """
    shares = (0.5, 0.25, 0.25)
    found = evaluation_sums.compute_log_ratios(ClassPrior(np.repeat([0, 1], [60, 20]), shares), 3)
    assert found == pytest.approx(np.log([61.5 / 41.5, 20.75 / 20.75, 0.75 / 20.75]), abs=1e-12)
    for labels in (np.repeat([0, 1], [6, 2]), np.repeat([0, 1, 2], [50, 25, 25]), np.array([], np.uint8)):
        assert evaluation_sums.compute_log_ratios(ClassPrior(labels, shares), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("batch", [1, 7, 200])
def test_each_fold_counts_with_the_strength_that_the_others_choose(batch):
    scores, y = skewed()
    prior = ClassPrior(y, ())
    batches = ((scores[i : i + batch], y[i : i + batch]) for i in range(0, len(y), batch))
    found = evaluation_sums.evaluate_scores("classes", batches, prior)
    wanted = reference_right(scores, y, evaluation_sums.compute_log_ratios(prior, 3))
    plain = int((scores.argmax(axis=1) == y).sum())
    assert found.sums().correct_with_priors == wanted > plain
    assert evaluation.main_metric_value(found.sums()) == plain / len(y)
    assert found.strengths is not None
    assert found.strengths.choose_strength() > 0


def test_no_prior_is_used_where_the_devices_classes_are_the_fleets_or_too_few_examples_tell():
    scores, y = skewed()
    for labels, shares, count in ((np.repeat([0, 1, 2], [70, 25, 5]), (0.7, 0.25, 0.05), 200), (y, (), 4)):
        found = evaluation_sums.evaluate_scores("classes", [(scores[:count], y[:count])], ClassPrior(labels, shares))
        assert found.strengths is not None
        assert found.strengths.choose_strength() == 0
        assert found.sums().correct_with_priors == (scores[:count].argmax(axis=1) == y[:count]).sum()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "mlp", "task": "regression"}}, "prior = \"auto\" needs classes, but task = 'regression'"),
        ({"model": {"name": "mlp", "task": "labels"}}, "prior = \"auto\" needs classes, but task = 'labels'"),
        ({"personal": {"prior": "on"}}, "prior"),
        ({"personal": {"priors": "auto"}}, "priors"),
    ],
)
def test_a_job_without_classes_has_no_class_priors(changes, said):
    with pytest.raises(JobError) as refused:
        settings.parse_job({**TABLE, **changes})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "sums",
    [of_classes(0.5, 4), EvaluationSums(examples=2, task="regression", squared_errors=((1.0,),), targets=((1.0,),))],
)
def test_more_right_predictions_than_examples_or_of_no_classes_contradict(sums):
    odd = msgspec.structs.replace(sums, correct_with_priors=5)
    assert "correct predictions with class priors for" in evaluation.find_inconsistency(odd)


def test_a_device_that_counts_none_adds_its_plain_ones_and_one_that_was_not_asked_adds_none():
    one = msgspec.structs.replace(of_classes(0.5, 4), correct_with_priors=3)
    assert total(one, of_classes(0.25, 4)).correct_with_priors == 4
    assert total(of_classes(0.25, 4)).correct_with_priors is None
    update = Update(
        job="j", round=0, attempt=0, device="d", weight=1, bundles={}, metrics={}, usage=Usage(), evaluation=one
    )
    for asked, wanted in ((False, None), (True, 3)):
        kept, odd = validation.limit_claims(update, validation.ClaimBounds(uses_class_priors=asked))
        assert kept.evaluation.correct_with_priors == wanted
        assert ("class priors" in odd) is not asked


def played(folder: Path, **changes: Any) -> tuple[str, Path]:
    """Run a job on virtual time; returns its id and home."""
    if changes.get("method") == "fedstitch":
        whole = msgspec.to_builtins(settings.load_job(DEMO / "job.toml"))
        job, stock = settings.parse_job({**whole, **changes}), DEMO / "bundle"
    else:
        stock = folder / "bundle"
        first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
        job_bundle.write_bundle(stock, {"network": NETWORK, "flops": 2176}, {"model": first})
        job = settings.parse_job({**TABLE, **changes})
    with contextlib.redirect_stdout(io.StringIO()):
        run, status = agents.run_fleet_virtually(agents.FleetPlan(job, stock, folder / "runs"))
    assert status == "done"
    return run, folder / "runs"


def evaluations_of(home: Path, run: str) -> list[RoundCommitted]:
    with Store(home) as store:
        facts = [fact for _, _, fact in store.read_events(run)]
    return [fact for fact in facts if isinstance(fact, RoundCommitted) and fact.evaluation is not None]


STITCHED = {
    "method": "fedstitch",
    "check": {"every": 1},
    "params": {"expansions": 0, "samples": 32},
    "data": {**TABLE["data"], "min_size": 30},
}


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(STITCHED, marks=pytest.mark.nightly)], ids=["fedavg", "fedstitch"]
)
def test_through_the_rounds_the_personal_score_is_beside_the_global_one_and_nothing_else_changes(tmp_path, changes):
    found = {}
    for prior in ("auto", "off"):
        run, home = played(tmp_path / prior, **{**changes, "personal": {"prior": prior}})
        found[prior] = evaluations_of(home, run)
        with Store(home) as store:
            summary = run_summary.summarise_events(store.find_job(run).job, store.read_events(run))
            assert any(point.personal for point in run_summary.progress_points(summary))
    for with_priors, plain in zip(found["auto"], found["off"], strict=True):
        assert msgspec.structs.replace(with_priors.evaluation, correct_with_priors=None) == plain.evaluation
        assert with_priors.state == plain.state
    last = found["auto"][-1].evaluation
    assert last.correct_with_priors > evaluation.main_metric_value(last) * last.examples  # of skewed devices
    told = ", ".join(event_messages.describe_evaluation(last))
    assert f"with the devices' class priors {100 * last.correct_with_priors / last.examples:.1f} %" in told


def test_a_task_tells_the_class_shares_of_the_evaluation_before_and_no_more(tmp_path, monkeypatch):
    told = {}
    make = tasks.make_task

    def recorded(*given: Any, **named: Any) -> Any:
        made = make(*given, **named)
        told[made.round] = made.class_shares
        return made

    monkeypatch.setattr(tasks, "make_task", recorded)
    run, home = played(tmp_path)
    sums = [fact.evaluation for fact in evaluations_of(home, run)]
    assert told == {0: (), **{i: evaluation.class_shares(evaluation.count_classes(sums[i - 1])) for i in (1, 2)}}
    assert sum(told[2]) == pytest.approx(1, abs=0.01)


def test_a_model_on_a_board_adds_the_boards_own_class_priors(tmp_path):
    """The scores are the global model's plus the strength times the log ratios; a board of IID data adds none."""
    pytest.importorskip("torch", reason="a network is written as ONNX by torch")
    run, home = played(tmp_path)
    with Store(home) as store:
        payload, what = export.encode_for_devices(store, run)
        export.export_result(store, run, tmp_path / "global.onnx")
    assert "to whose scores each device adds its class priors" in what
    shared, model = tmp_path / "shared.safetensors", tmp_path / "model.onnx"
    shared.write_bytes(payload)
    task = personal_models.read_task(shared)
    assert task is not None
    assert task.class_shares == evaluation.class_shares(
        evaluation.count_classes(evaluations_of(home, run)[-1].evaluation)
    )
    runner = OnnxEngine(fitting_budget_bytes())
    for alpha, helps in ((0.1, True), (None, False)):
        skew = {"partition": "dirichlet", "alpha": alpha} if alpha else {}
        data = board_data(share=1, shares=5, held=0.4, **skew)
        train, held = examples.load_share(DataSpec(**data))
        order = CheckRequest(
            model=str(model),
            current_model=None,
            budget_bytes=fitting_budget_bytes(),
            data=data,
            timing_s=0.01,
            split_model=SplitModelFiles(str(shared), "d"),
        )
        found = check_process.run_check(order)
        assert found.code == "ok", found.reason
        x = held.x.reshape(len(held), -1).astype(np.float32) / 255
        plain, own = runner.run(tmp_path / "global.onnx", x), runner.run(model, x)
        runner.close()
        prior = ClassPrior(train.y, task.class_shares)
        strengths = evaluation_sums.evaluate_scores("classes", [(plain, held.y)], prior).strengths
        assert strengths is not None
        strength = strengths.choose_strength()
        ratios = evaluation_sums.compute_log_ratios(prior, 10)
        assert own - plain == pytest.approx(np.tile(strength * ratios, (len(x), 1)), abs=1e-4)
        assert (strength > 0) is helps
        assert found.metrics["accuracy"] == (own.argmax(axis=1) == held.y).mean()
        assert ("class priors of this device are applied" in found.note) is helps
