"""Drift: none of chance, and what is seen of brightness, noise and other classes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("onnxruntime")  # the runner's package needs it

import documents
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.operations.inference_server.drift import (
    DriftCounts,
    ReferenceDistribution,
    chi_squared_quantile,
    compute_excess_distance,
    compute_features,
    find_bin,
)

SEEDS = range(6)
EVERY = 25  # examples between two looks


def scene(
    rng: np.random.Generator, count: int, *, brighter: float = 0.0, noise: float = 0.05, first: float = 0.5
) -> tuple[np.ndarray, np.ndarray]:
    dark = rng.random(count) < first
    level = np.where(dark, 0.35, 0.65) + rng.normal(0, 0.05, count) + brighter
    x = level[:, None, None, None] + rng.normal(0, noise, (count, 1, 8, 8))
    mean = x.mean(axis=(1, 2, 3))
    return x.astype(np.float32), np.stack([0.5 - mean, mean - 0.5], axis=1) * 8


def seen(drift: DriftCounts, x: np.ndarray, scores: np.ndarray) -> float | None:
    names, values = compute_features(x, scores)
    drift.add_examples(names, values, scores.argmax(axis=1).tolist())
    return drift.compute_score()


@pytest.mark.parametrize("name", ["MNIST", "cifar10-10k.npz"])
def test_real_images_raise_no_alarm_until_they_are_brighter(name: str) -> None:
    path = documents.data() / name
    if not path.exists():
        pytest.skip(f"no {path}: FEDQUILT_TEST_DATA names another folder")
    held = examples.load_split(DataSpec(path=str(path)))
    x = np.moveaxis(held.x.reshape(*held.x.shape[:3], -1), 3, 1)  # (n, channels, height, width)
    known, x = x[:2000].reshape(2000, -1) / 255, x[2000:]
    means = np.stack([known[held.y[:2000] == label].mean(axis=0) for label in range(10)])

    def answered(chosen: np.ndarray, brighter: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        made = (x[chosen] / 255 + brighter).astype(np.float32)
        return made, made.reshape(len(made), -1) @ (2 * means.T) - np.square(means).sum(axis=1)

    for seed in range(2):
        drift, order = DriftCounts(), np.random.default_rng(seed).permutation(len(x))
        scores = [seen(drift, *answered(each)) for each in np.split(order[: 122 * EVERY], 122)]
        assert [score for score in scores if score is not None] == [0.0] * 100
        assert (seen(drift, *answered(order[122 * EVERY :][:500], brighter=0.1)) or 0) > 0.25, seed


@pytest.mark.parametrize(
    ("shift", "least", "by"),
    [
        ({"brighter": 0.1}, 0.3, ("mean 0",)),
        ({"noise": 0.1}, 0.3, ("deviation 0", "grain")),
        ({"first": 0.05}, 0.3, ("class", "mean 0")),
    ],
    ids=["brightness", "noise", "class"],
)
def test_a_shift_is_seen_on_every_seed(shift: dict[str, float], least: float, by: tuple[str, ...]) -> None:
    for seed in SEEDS:
        rng, drift = np.random.default_rng(seed), DriftCounts()
        for _ in range(40):
            seen(drift, *scene(rng, EVERY))
        assert drift.compute_score() == 0.0
        for _ in range(20):
            score = seen(drift, *scene(rng, EVERY, **shift))
        assert score is not None
        assert score > least, seed
        moved = drift.compute_distances()
        assert all(moved[name] > 0 for name in by), moved


def test_it_comes_back_to_0_when_the_inputs_do() -> None:
    rng, drift = np.random.default_rng(0), DriftCounts()
    seen(drift, *scene(rng, 1000))
    assert (seen(drift, *scene(rng, 500, brighter=0.2)) or 0) > 0.5
    assert seen(drift, *scene(rng, 3000)) == 0.0


def test_pictures_that_resemble_the_one_before_raise_no_alarm() -> None:
    for seed in SEEDS:
        rng, drift, wander, alarms = np.random.default_rng(seed), DriftCounts(), 0.0, 0
        for _ in range(200):
            levels = []
            for _ in range(EVERY):
                wander = 0.9 * wander + rng.normal(0, 0.05)
                levels.append(0.5 + wander)
            x = np.array(levels)[:, None, None, None] + rng.normal(0, 0.05, (EVERY, 1, 4, 4))
            mean = x.mean(axis=(1, 2, 3))
            alarms += bool(seen(drift, x.astype(np.float32), np.stack([-mean, mean], axis=1)))
        assert alarms == 0, seed


def test_small_samples_need_larger_distances() -> None:
    before, now = [100.0] * 10, [1.3, 0.7] * 5
    assert compute_excess_distance(before, [each * 4 for each in now], 1.0, 40) == 0.0
    assert compute_excess_distance(
        [each * 100 for each in before], [each * 1000 for each in now], 1.0, 10_000
    ) == pytest.approx(0.127, abs=0.003)
    assert compute_excess_distance([0.0, 100.0], [100.0, 0.0], 1.0, 100) == 1.0


def test_values_that_are_all_equal_are_left_by_any_other() -> None:
    assert [find_bin((2.0,), value) for value in (1.0, 2.0, 3.0)] == [0, 1, 2]
    drift, scores = DriftCounts(size=100), np.tile([[0.0, 1.0]], (100, 1))
    assert seen(drift, np.ones((100, 1, 2, 2), np.float32), scores) is None
    assert seen(drift, np.ones((100, 1, 2, 2), np.float32), scores) == 0.0
    assert (seen(drift, np.full((100, 1, 2, 2), 2, np.float32), scores) or 0) > 0.7


def test_a_reference_is_kept_as_counts_and_goes_on() -> None:
    rng = np.random.default_rng(1)
    drift = DriftCounts()
    seen(drift, *scene(rng, 500))
    assert drift.reference is not None
    kept = msgspec.json.decode(msgspec.json.encode(drift.reference), type=ReferenceDistribution)
    assert kept == drift.reference
    assert kept.is_consistent
    assert sum(map(len, kept.counts)) == 19 * len(kept.names)
    again = DriftCounts(kept)
    assert seen(again, *scene(rng, 500)) == 0.0
    assert not msgspec.structs.replace(kept, counts=kept.counts[:1]).is_consistent


def test_rows_and_series_have_numbers_too() -> None:
    scores = np.zeros((3, 2))
    assert compute_features(np.zeros((3, 2)), scores)[0] == ("value 0", "value 1", "confidence", "entropy")
    assert compute_features(np.zeros((3, 64)), scores)[0] == ("mean", "deviation", "grain", "confidence", "entropy")
    assert compute_features(np.zeros((3, 9, 1)), scores)[0] == ("mean 0", "deviation 0", "confidence", "entropy")


def test_the_chi_squared_quantile_is_that_of_tables() -> None:
    assert chi_squared_quantile(9, 0.001) == pytest.approx(27.88, rel=0.01)
    assert chi_squared_quantile(1, 0.05) == pytest.approx(3.84, rel=0.03)
