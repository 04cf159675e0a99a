"""Several devices trained in one numpy pass have the bits that each has alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import DataError, Examples, Fit, Hooks, UpdateError
from fedquilt.edge_agent.engines.batch_training import BatchedNumpyEngine

MLP = {"name": "mlp", "inputs": 70, "hidden": [9], "classes": 10}
SIZES = (40, 40, 17, 40, 3, 17)  # with batches of 16: full and short last ones
AMPLE, SCARCE = 1 << 40, 20_000  # bytes; the second holds about four examples at once


def examples(count: int, seed: int) -> Examples:
    rng = tensors.seeded_rng("examples", count, seed)
    return Examples(rng.integers(255, size=(count, 70), dtype=np.uint8), rng.integers(10, size=count))


def arguments(seed: int, count: int, fit: Fit, network: dict[str, Any] = MLP) -> tuple[Any, ...]:
    rng = tensors.seeded_rng("start", seed)
    shapes = {"1.weight": (9, 70), "1.bias": (9,), "3.weight": (10, 9), "3.bias": (10,)}
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return network, start, examples(count, seed), fit, tensors.seeded_rng("order", seed)


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for (model, told), (other, wanted) in zip(ours, theirs, strict=True):
        assert told == wanted
        assert {name: array.tobytes() for name, array in model.items()} == {
            name: array.tobytes() for name, array in other.items()
        }


@pytest.mark.parametrize("budget_bytes", [AMPLE, SCARCE])
@pytest.mark.parametrize(
    "fit",
    [
        Fit(epochs=2, batch=16, lr=0.1),
        Fit(epochs=2, batch=16, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        Fit(epochs=2, batch=16, lr=0.01, optimizer="adam"),
    ],
)
def test_each_device_has_the_bits_of_the_loop(fit: Fit, budget_bytes: int) -> None:
    engine = BatchedNumpyEngine(budget_bytes, base_bytes=0)
    calls = [engine.batchable_call(*arguments(seed, count, fit)) for seed, count in enumerate(SIZES)]
    loop = [engine.train(*arguments(seed, count, fit)) for seed, count in enumerate(SIZES)]
    assert None not in calls
    assert_same(engine.train_together([call for call in calls if call]), loop)


def test_those_of_one_size_go_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = BatchedNumpyEngine(AMPLE), []
    trained = engine._train_batch
    monkeypatch.setattr(engine, "_train_batch", lambda calls: seen.append(len(calls)) or trained(calls))
    fit = Fit(epochs=1, batch=16, lr=0.1)
    engine.train_together([engine.batchable_call(*arguments(seed, count, fit)) for seed, count in enumerate(SIZES)])  # type: ignore[misc]
    assert seen == [3, 2, 1]


def test_what_needs_a_look_at_each_device_is_left_to_the_loop() -> None:
    engine = BatchedNumpyEngine(AMPLE)
    pull = Hooks(correct_gradient=lambda gradient, value, at: gradient)
    assert engine.batchable_call(*arguments(0, 40, Fit(epochs=1, batch=16, lr=0.1)), hooks=pull) is None
    assert engine.batchable_call(*arguments(0, 40, Fit(epochs=1, batch=16, lr=0.1, clip=1.0))) is None
    assert engine.batchable_call(*arguments(0, 0, Fit(epochs=1, batch=16, lr=0.1))) is None


def test_one_that_diverges_fails_alone() -> None:
    engine, fit = BatchedNumpyEngine(AMPLE), Fit(epochs=1, batch=16, lr=0.1)
    given = [arguments(seed, 40, fit) for seed in range(3)]
    given[1][1]["3.bias"][0] = np.inf
    found = engine.train_together([engine.batchable_call(*each) for each in given])  # type: ignore[misc]
    assert isinstance(found[1], UpdateError)
    assert "the loss became NaN" in str(found[1])
    assert_same([found[0], found[2]], [engine.train(*arguments(seed, 40, fit)) for seed in (0, 2)])


def test_one_whose_labels_do_not_fit_says_so_alone() -> None:
    engine, fit = BatchedNumpyEngine(AMPLE), Fit(epochs=1, batch=16, lr=0.1)
    given = [arguments(seed, 40, fit) for seed in range(3)]
    given[1][2].y[0] = 10
    found = engine.train_together([engine.batchable_call(*each) for each in given])  # type: ignore[misc]
    assert isinstance(found[1], DataError)
    assert_same([found[0], found[2]], [engine.train(*arguments(seed, 40, fit)) for seed in (0, 2)])


def test_a_pass_that_fails_leaves_the_loop_the_generators_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fit = BatchedNumpyEngine(AMPLE), Fit(epochs=1, batch=16, lr=0.1)

    def fail(calls: Any) -> Any:
        for call in calls:
            call.rng.random()
        raise MemoryError

    monkeypatch.setattr(engine, "_train_batch", fail)
    found = engine.train_together([engine.batchable_call(*arguments(seed, 40, fit)) for seed in (0, 2)])  # type: ignore[misc]
    assert_same(found, [engine.train(*arguments(seed, 40, fit)) for seed in (0, 2)])
