"""Metrics of a fleet are those of all its examples, however these are grouped into devices and sites."""

import math
import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import evaluations
import msgspec
import numpy as np
import plain
import pytest

from fedquilt.core import EvaluationSums, TaskKind, UpdateError, evaluation
from fedquilt.edge_agent.engines import evaluation_sums
from fedquilt.metrics import MAIN_METRICS
from fedquilt.wire import MAX_CONTROL

Data = tuple[np.ndarray, np.ndarray]  # scores and targets


def evaluated(task: TaskKind, data: Data, rows: Any = slice(None), batch: int = 7) -> EvaluationSums:
    """Sums of one device."""
    found, (scores, y) = evaluation_sums.EvaluationAccumulator(task), (each[rows] for each in data)
    for start in range(0, len(y), batch):
        part = slice(start, start + batch)
        loss = evaluation_sums.losses_and_gradients(task, scores[part], y[part])[0].sum()
        found.add_batch(scores[part], y[part], float(loss))
    return found.sums()


def drawn(task: TaskKind, outputs: int, count: int = 300, seed: int = 0) -> Data:
    draws = np.random.default_rng(seed)
    scores = draws.normal(size=(count, outputs)).astype(np.float32) * 3
    if task == "regression":
        return scores, (scores + draws.normal(size=scores.shape) + 5).astype(np.float32)
    if task == "labels":
        return scores, (scores + 3 * draws.normal(size=scores.shape) > 1).astype(np.uint8)
    return scores, (scores + 3 * draws.normal(size=scores.shape)).argmax(axis=1)


def grouped(task: TaskKind, data: Data, seed: int) -> EvaluationSums:
    """Sum of devices, some of them behind sites, some of these behind others; in any order."""
    roll, count = random.Random(seed), len(data[1])
    order = roll.sample(range(count), count)
    cuts = sorted(roll.sample(range(1, count), roll.randint(1, 20)))
    parts = [evaluated(task, data, order[start:end], batch=count) for start, end in pairwise([0, *cuts, count])]
    while len(parts) > 1:
        roll.shuffle(parts)
        few = roll.randint(2, len(parts))
        total = evaluation.add_evaluations(parts[:few])
        assert total is not None
        parts = [total, *parts[few:]]
    return parts[0]


TASKS: list[tuple[TaskKind, int]] = [
    ("classes", 2),
    ("classes", 7),
    ("classes", 100),
    ("classes", 101),
    ("regression", 1),
    ("regression", 3),
    ("regression", 101),
    ("labels", 1),
    ("labels", 5),
    ("labels", 101),
]


# -- groupings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_every_grouping_into_devices_and_sites_has_the_metrics_of_all_examples(task, outputs):
    data = drawn(task, outputs)
    whole = {**evaluation.compute_metrics(evaluated(task, data, batch=300)), "loss": None}
    for seed in range(3):
        assert {**evaluation.compute_metrics(grouped(task, data, seed)), "loss": None} == whole


# -- each metric against its definition ----------------------------------------------------------------


def rates(found: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Precision, recall and F1 of one class or label, 0 where they are of nothing."""
    right = float((found & y).sum())
    precision = right / found.sum() if found.any() else 0.0
    recall = right / y.sum() if y.any() else 0.0
    return precision, recall, 2 * right / (found.sum() + y.sum())


def expected_rates(found: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Macro and micro rates of predictions (n, outputs) of outputs that occur."""
    columns = [(a, b) for a, b in zip(found.T, y.T, strict=True) if a.any() or b.any()]
    macro = np.mean([rates(a, b) for a, b in columns], axis=0)
    micro = rates(found.ravel(), y.ravel())
    names = "precision", "recall", "f1"
    return {
        **{f"macro_{name}": value for name, value in zip(names, macro, strict=True)},
        **{f"micro_{name}": value for name, value in zip(names, micro, strict=True)},
    }


def exact_auc(scores: np.ndarray, y: np.ndarray) -> float | None:
    """Share of pairs of a positive and a negative example that are in order; equal ones count half."""
    positive, negative = scores[y], scores[~y]
    if not len(positive) or not len(negative):
        return None
    gaps = positive[:, None] - negative[None]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


def macro_auc(scores: np.ndarray, y: np.ndarray) -> float:
    found = [exact_auc(a, b) for a, b in zip(scores.T, y.T, strict=True)]
    return float(np.mean([each for each in found if each is not None]))


@pytest.mark.parametrize("outputs", [2, 3, 10, 100])
def test_metrics_of_classes_are_those_of_their_definitions(outputs):
    scores, y = drawn("classes", outputs, 1000)
    found, told = scores.argmax(axis=1), evaluation.compute_metrics(evaluated("classes", (scores, y)))
    one, true = np.eye(outputs, dtype=bool)[found], np.eye(outputs, dtype=bool)[y]
    recalls = [rates(one[:, at], true[:, at])[1] for at in range(outputs) if true[:, at].any()]
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    chances = powers / powers.sum(axis=1, keepdims=True)
    wanted = {
        "accuracy": float((found == y).mean()),
        "balanced_accuracy": float(np.mean(recalls)),
        **expected_rates(one, true),
        "loss": float(-np.log(chances[np.arange(len(y)), y]).mean()),
    }
    auc, error = told.pop("auc"), told.pop("auc_error")
    assert told == pytest.approx(wanted, rel=1e-5)
    assert abs(auc - macro_auc(chances, true)) <= error < 0.06
    sums = evaluated("classes", (scores, y))
    matrix = np.zeros((outputs, outputs), int)
    np.add.at(matrix, (y, found), 1)
    assert evaluation.confusion_matrix(sums) == matrix.tolist()


def test_metrics_of_more_than_a_hundred_classes_lack_the_matrix_and_the_auc_alone():
    scores, y = drawn("classes", 120, 1000)
    sums = evaluated("classes", (scores, y))
    told = evaluation.compute_metrics(sums)
    one, true = np.eye(120, dtype=bool)[scores.argmax(axis=1)], np.eye(120, dtype=bool)[y]
    assert evaluation.confusion_matrix(sums) is None
    assert "auc" not in told
    assert {name: told[name] for name in expected_rates(one, true)} == pytest.approx(expected_rates(one, true))


def test_metrics_of_labels_are_those_of_their_definitions():
    scores, y = drawn("labels", 6, 1000)
    y[:, 5], scores[:, 5] = 0, -1.0  # a label that nobody has or predicts
    told = evaluation.compute_metrics(evaluated("labels", (scores, y)))
    found, true = scores > 0, y > 0
    wanted = {
        "label_accuracy": float((found == true).mean()),
        "exact_match": float((found == true).all(axis=1).mean()),
        **expected_rates(found, true),
        "loss": float(evaluation_sums.losses_and_gradients("labels", scores.astype(np.float64), y)[0].mean()),
    }
    auc, error = told.pop("auc"), told.pop("auc_error")
    assert told == pytest.approx(wanted, rel=1e-5)
    assert abs(auc - macro_auc(scores, true)) <= error < 0.02


@pytest.mark.parametrize("mean", [0.0, 1e6, -1e4])
def test_metrics_of_a_regression_are_those_of_their_definitions(mean):
    scores, y = drawn("regression", 3, 1000)
    scores, y = scores + np.float32(mean), y + np.float32(mean)
    told = evaluation.compute_metrics(grouped("regression", (scores, y), 1))
    error = scores.astype(np.float64) - y
    spread = y.astype(np.float64).var(axis=0)
    assert 5 < spread.max() < 15
    assert told == {
        "rmse": pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-12),
        "mae": pytest.approx(np.abs(error).mean(), rel=1e-12),
        "r2": pytest.approx(1 - (np.square(error).mean(axis=0) / spread).mean(), rel=1e-9),
        "loss": pytest.approx(np.square(error).mean(), rel=1e-4),
    }


def test_a_device_whose_target_never_varies_counts_in_the_r2_of_the_fleet():
    stuck = evaluated("regression", (np.full((5, 1), 0.5, np.float32), np.full((5, 1), 2.5, np.float32)))
    assert "r2" not in evaluation.compute_metrics(stuck)
    scores, y = drawn("regression", 1, 20)
    total = evaluation.add_evaluations([stuck, evaluated("regression", (scores, y))])
    assert total is not None
    found = np.concatenate([np.full(5, 0.5), scores[:, 0]]) - (all_y := np.concatenate([np.full(5, 2.5), y[:, 0]]))
    assert evaluation.compute_metrics(total)["r2"] == pytest.approx(1 - np.square(found).mean() / all_y.var())


# -- over devices ---------------------------------------------------------------------------------


def test_worst_tenth_and_spread_are_over_devices_whichever_site_they_are_behind():
    y = np.zeros(20, np.int64)
    parts = []
    for right in range(20):
        scores = np.zeros((20, 2), np.float32)
        scores[right:, 1] = 1
        parts.append(evaluated("classes", (scores, y)))
    flat, values = evaluation.add_evaluations(parts), [right / 20 for right in range(20)]
    sites = [evaluation.add_evaluations(parts[:3]), evaluation.add_evaluations(parts[3:])]
    assert flat == evaluation.add_evaluations(each for each in sites if each)
    assert flat is not None
    assert evaluation.summarise_over_devices(flat, higher=True) == pytest.approx(
        (20, 0.475, 0.025, 0.925, np.std(values))
    )
    assert evaluation.summarise_over_devices(flat, higher=False) == pytest.approx(
        (20, 0.475, 0.925, 0.025, np.std(values))
    )


# -- what is sent ---------------------------------------------------------------------------------


def test_each_device_counts_once_and_a_tenth_of_21_devices_is_three():
    over = evaluation.summarise_over_devices(
        EvaluationSums(examples=21, outputs=2, device_values=((0.2, 1), (0.8, 20))), higher=True
    )
    assert (over.worst_decile, over.mean) == (pytest.approx(0.6), pytest.approx(16.2 / 21))
    assert (over.best_decile, over.gap) == (pytest.approx(0.8), pytest.approx(0.2))


def test_classes_that_are_only_predicted_do_not_lower_the_balanced_accuracy():
    sums = msgspec.structs.replace(evaluations.of_classes(1 / 3, 3), counts=evaluation.pack_counts([1, 2, 0, 0]))
    assert evaluation.compute_metrics(sums)["balanced_accuracy"] == pytest.approx(1 / 3)


def test_an_auc_of_equal_scores_is_a_half_give_or_take_a_half():
    none = [0] * (evaluation.histogram_bins(2) - 1)
    sums = EvaluationSums(
        examples=5,
        outputs=2,
        counts=evaluation.pack_counts([2, 0, 3, 0]),
        scores=evaluation.pack_counts([2, *none, 3, *none, 3, *none, 2]),
    )
    found = evaluation.compute_metrics(sums)
    assert (found["auc"], found["auc_error"]) == (0.5, 0.5)


def test_errors_and_their_squares_contradict_each_other_beyond_rounding():
    sums = EvaluationSums(
        examples=2,
        task="regression",
        outputs=1,
        absolute_errors=(2.0,),
        squared_errors=((2.0,),),
        targets=((0.0,),),
        target_squares=((1.0,),),
    )
    assert evaluation.find_inconsistency(sums) == ""
    assert "contradict" in evaluation.find_inconsistency(msgspec.structs.replace(sums, absolute_errors=(2.01,)))


def test_packed_counts_are_as_they_were():
    roll = random.Random(0)
    for _ in range(100):
        counts = [roll.choice([0, 0, 0, 1, 127, 128, roll.randrange(2**40)]) for _ in range(roll.randrange(50))]
        assert evaluation.unpack_counts(evaluation.pack_counts(counts), len(counts)) == counts


@pytest.mark.parametrize(
    "packed", [b"\x80", b"\x00", b"\x01\x01\x01", b"\x00\x02\x01", b"\xff" * 20, b"\xff" * 9 + b"\x01"]
)
def test_packed_counts_that_do_not_fit_are_refused(packed):
    with pytest.raises(UpdateError, match="packed"):
        evaluation.unpack_counts(packed, 2)


def test_a_site_of_ten_million_examples_of_a_hundred_classes_fits_into_a_message():
    bins = evaluation.histogram_bins(100)
    sums = EvaluationSums(
        examples=10**7,
        outputs=100,
        loss=(1.5,),
        counts=evaluation.pack_counts([1000] * 10_000),
        scores=evaluation.pack_counts(([10**5 // bins] * bins + [99 * 10**5 // bins] * bins) * 100),
        device_values=tuple((at / 1000, 1) for at in range(1, 301)),
    )
    update = plain.update(device="d", evaluation=sums)
    assert len(msgspec.json.encode(update)) < 0.9 * MAX_CONTROL


# -- what cannot be -------------------------------------------------------------------------------


def changed(**values: Any) -> Callable[[EvaluationSums], EvaluationSums]:
    return lambda sums: msgspec.structs.replace(sums, **values)


LIES: Sequence[tuple[TaskKind, Callable[[EvaluationSums], EvaluationSums], str]] = [
    ("classes", changed(examples=299), "counts of 300 examples"),
    ("classes", changed(examples=0), "sums but no example"),
    ("classes", changed(loss=(1e300,)), "not a number or above 1e\\+90"),
    ("classes", changed(scores=b""), "histograms of another number"),
    ("classes", changed(exact_matches=1), "counts of 300 examples"),
    ("classes", changed(squared_errors=((1.0,),)), "sums of a regression"),
    ("labels", changed(exact_matches=300), "examples without a wrong label"),
    ("labels", changed(examples=10), "more outcomes of a label"),
    ("labels", changed(scores=b"\x01"), "histograms of another number"),
    ("regression", changed(squared_errors=((-1.0,), (1.0,), (1.0,))), "contradict"),
    ("regression", changed(squared_errors=((1.0,),)), "another number of outputs"),
    ("regression", changed(absolute_errors=(1e9,)), "errors whose sum"),
    ("regression", changed(targets=((1e9,),) * 3), "targets whose sum"),
    ("regression", changed(counts=b"\x01"), "counts of classes"),
]


@pytest.mark.parametrize(("task", "change", "said"), LIES)
def test_sums_that_no_evaluation_comes_to_are_found(task, change, said):
    honest = evaluated(task, drawn(task, 3))
    assert evaluation.find_inconsistency(honest) == ""
    assert msgspec.json.decode(msgspec.json.encode(honest), type=EvaluationSums) == honest
    assert re.search(said, evaluation.find_inconsistency(change(honest)))


@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_totals_of_honest_devices_are_consistent(task, outputs):
    for seed in range(2):
        total = grouped(task, drawn(task, outputs, 100, seed), seed)
        assert evaluation.find_inconsistency(total) == ""
        assert evaluation.find_device_inconsistency(total, 21, 1.0 if MAIN_METRICS[task].share else math.inf) == ""
