"""Losses and metrics of each task: by hand, and the same in every engine that trains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedquilt.core import DataError, Examples, Fit, TaskKind, UpdateError, evaluation
from fedquilt.edge_agent.engines import evaluation_sums
from fedquilt.edge_agent.engines import numpy_engine as numpy_engine
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine

AMPLE = 1 << 40


def table(task: TaskKind, outputs: int) -> dict[str, Any]:
    return {"name": "mlp", "inputs": 4, "hidden": [5], "classes": outputs, "task": task}


def drawn(task: TaskKind, seed: int, count: int = 30) -> Examples:
    """Points and targets that follow from them, two for each example."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(count, 4)).astype(np.float32)
    y = np.stack([x[:, 0] - x[:, 1], 2 * x[:, 2]], axis=1)
    return Examples(x, y.astype(np.float32) if task == "regression" else (y > 0).astype(np.uint8))


# -- by hand --------------------------------------------------------------------------------------


def test_the_errors_of_a_regression_are_those_computed_by_hand() -> None:
    """Errors 1, -1, 0 and 2 of four numbers: mean square 6/4; R² is the mean of 1 - 1/2 and 1 - 5/2."""
    found = evaluation_sums.EvaluationAccumulator("regression")
    scores, y = np.array([[2.0, 1.0], [3.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 2.0]], np.float32)
    losses, gradient = evaluation_sums.losses_and_gradients("regression", scores, y)
    assert losses.tolist() == [1.0, 2.0]
    assert gradient.tolist() == [[1.0, -1.0], [0.0, 2.0]]
    found.add_batch(scores, y, float(losses.sum()))
    told = evaluation.compute_metrics(found.sums())
    assert told == {"rmse": math.sqrt(1.5), "mae": 1.0, "r2": pytest.approx(0.5), "loss": 1.5}


def test_what_never_varies_has_no_share_explained() -> None:
    for y, wanted in ([[5.0, 1.0], [5.0, 2.0]], 1.0), ([[5.0, 1.0], [5.0, 1.0]], None):
        found = evaluation_sums.EvaluationAccumulator("regression")
        found.add_batch(np.array([[0.0, 1.0], [0.0, 2.0]]), np.array(y, np.float32), 1.0)
        assert evaluation.compute_metrics(found.sums()).get("r2") == wanted


def test_the_metrics_of_several_labels_are_those_computed_by_hand() -> None:
    """Label 0 is right in all, label 1 in one of two; label 2 is nobody's and counts in no F1."""
    found = evaluation_sums.EvaluationAccumulator("labels")
    scores = np.array([[1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]])
    y = np.array([[1, 1, 0], [0, 0, 0]], np.uint8)
    losses, gradient = evaluation_sums.losses_and_gradients("labels", scores, y)
    small, large = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    assert losses.tolist() == pytest.approx([small, (2 * small + large) / 3])
    share = 1 / (1 + math.exp(-1))
    assert gradient[1].tolist() == pytest.approx([(1 - share) / 3, share / 3, (1 - share) / 3])
    found.add_batch(scores, y, float(losses.sum()))
    told = evaluation.compute_metrics(found.sums())
    assert told["label_accuracy"] == pytest.approx(5 / 6)
    assert told["exact_match"] == 0.5
    assert told["macro_f1"] == pytest.approx((1 + 2 / 3) / 2)


def test_large_scores_overflow_nothing() -> None:
    with np.errstate(over="raise", invalid="raise"):
        losses, gradient = evaluation_sums.losses_and_gradients(
            "labels", np.array([[1e4, -1e4]]), np.array([[0, 1]], np.uint8)
        )
    assert losses.tolist() == [1e4]
    assert gradient.tolist() == [[0.5, -0.5]]


def test_a_loss_that_is_not_finite_is_refused_and_no_examples_tell_nothing() -> None:
    found = evaluation_sums.EvaluationAccumulator("regression")
    assert evaluation.compute_metrics(found.sums()) == {}
    found.add_batch(np.array([[math.nan]]), np.zeros((1, 1), np.float32), math.nan)
    with pytest.raises(UpdateError, match="1 held-out examples is nan: lower the learning rate"):
        found.sums()


@pytest.mark.parametrize(
    ("task", "y", "said"),
    [
        (
            "classes",
            np.zeros((2, 1), np.float32),
            "predicts classes, and the labels of the examples are 1 numbers each",
        ),
        ("classes", np.array([0, 7]), r"labels run from 0 to 7, the network predicts 2 classes \(0 to 1\)"),
        (
            "regression",
            np.array([0, 1]),
            "task is 'regression', and the labels of the examples are one class each: set the same `task`",
        ),
        ("regression", np.zeros((2, 3), np.float32), "each example has 3 targets, the network has 2 outputs"),
        ("labels", np.zeros((2, 2), np.float32), "task is 'labels', and the labels of the examples are 2 numbers each"),
    ],
)
def test_targets_of_another_task_are_named(task: TaskKind, y: np.ndarray, said: str) -> None:
    engine, network = NumpyEngine(AMPLE, base_bytes=0), table(task, 2)
    start = numpy_engine.init_tensors(network, 0)
    examples = Examples(np.zeros((2, 4), np.float32), y)
    with pytest.raises(DataError, match=said):
        engine.train(network, start, examples, Fit(), np.random.default_rng(0))
    with pytest.raises(DataError, match=said):
        engine.evaluate(network, start, examples)


# -- in every engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("task", ["regression", "labels"])
def test_the_engines_train_and_evaluate_alike(task: TaskKind, optimizer: Any) -> None:
    batched = pytest.importorskip("fedquilt.edge_agent.engines.torch.batch_engine")
    network, fit = table(task, 2), Fit(epochs=3, batch=8, lr=0.05, optimizer=optimizer)
    start = numpy_engine.init_tensors(network, 0)
    plain, engine = NumpyEngine(AMPLE, base_bytes=0), batched.BatchedTorchEngine(AMPLE, base_bytes=0)
    shares = [drawn(task, seed, count) for seed, count in ((0, 30), (1, 27))]
    calls = [engine.batchable_call(network, start, share, fit, np.random.default_rng(2)) for share in shares]
    together = engine.train_together(calls)
    for share, (stacked, said) in zip(shares, together, strict=True):
        ours, told = plain.train(network, start, share, fit, np.random.default_rng(2))
        theirs, _ = engine.train(network, start, share, fit, np.random.default_rng(2))
        for name, array in ours.items():
            np.testing.assert_allclose(theirs[name], array, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(stacked[name], array, rtol=1e-4, atol=1e-5)
        assert said["loss"] == pytest.approx(told["loss"], rel=1e-4)
        before, after, other = (
            evaluation.compute_metrics(each.evaluate(network, model, share))
            for each, model in ((plain, start), (plain, ours), (engine, ours))
        )
        assert after["loss"] < before["loss"]
        assert other == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("task", ["regression", "labels"])
def test_fisher_information_is_of_the_tasks_loss(task: TaskKind) -> None:
    torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")
    network = table(task, 2)
    start, share = numpy_engine.init_tensors(network, 0), drawn(task, 0, 10)
    for each in (1, 4):
        ours = NumpyEngine(AMPLE, base_bytes=0).fisher(network, start, share, examples_per_gradient=each)
        theirs = torch_engine.TorchEngine(AMPLE, base_bytes=0).fisher(network, start, share, examples_per_gradient=each)
        for name, array in ours.items():
            np.testing.assert_allclose(theirs[name], array, rtol=1e-4, atol=1e-6)


def test_tokens_that_the_network_does_not_know_are_named() -> None:
    torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")
    engine = torch_engine.TorchEngine(AMPLE, base_bytes=0)
    network = {"name": "transformer", "vocabulary": 5, "length": 3, "classes": 2, "width": 4, "heads": 1, "depth": 1}
    from fedquilt.models.networks import registry

    start = {name: value.numpy() for name, value in registry.load_network(network).state_dict().items()}
    tokens = Examples(np.array([[1, 2, 5]], np.int32), np.array([1]))
    with pytest.raises(DataError, match=r"tokens are 0 to 5, and the network's vocabulary has 0 to 4"):
        engine.evaluate(network, start, tokens)
    whole = Examples(np.array([[1.0, 2.0, 3.0]], np.float32), np.array([1]))
    with pytest.raises(DataError, match="a transformer requires integer tokens"):
        engine.evaluate(network, start, whole)
