"""What features say of labels, against explicit forms."""

from collections.abc import Callable

import numpy as np
import pytest

from fedquilt.models.stitching.algebra import cka
from fedquilt.models.stitching.algebra.cka import CkaScore

Judge = Callable[[np.ndarray, np.ndarray], CkaScore]
JUDGES = (cka.label_alignment, cka.explained_variance)


def drawn(n: int = 64, d: int = 200, apart: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of four classes whose means lie so far apart, beside noise of deviation 1."""
    draws = np.random.default_rng(seed)
    y = np.arange(n) % 4
    return draws.normal(size=(n, d)) + apart * draws.normal(size=(4, d))[y], y


@pytest.mark.parametrize("judge", JUDGES)
def test_features_score_what_they_say_of_the_labels(judge):
    noise = [judge(*drawn(d=2000, seed=seed)).value for seed in range(20)]
    assert abs(np.mean(noise)) < 0.02
    scores = [judge(*drawn(apart=apart)).value for apart in (0.2, 0.5, 3.0)]
    assert scores == sorted(scores)
    assert 0.9 < scores[-1] <= 1


def test_the_alignment_is_the_unbiased_cka_with_one_hot_labels():
    x, y = drawn(apart=0.5)
    wanted = cka.cka(cka.gram_matrix(x), np.equal.outer(y, y).astype(float)).value
    assert cka.label_alignment(x, y).value == pytest.approx(wanted, abs=1e-12)
    assert cka.label_alignment(x, 40 - 7 * y).value == pytest.approx(wanted, abs=1e-12)


def test_the_share_explained_is_by_the_generalised_cross_validation_of_a_ridge():
    x, y = drawn(n=24, d=10, apart=0.5)
    labels = np.eye(4)[y] - np.eye(4)[y].mean(axis=0)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    errors = []
    for strength in cka.STRENGTHS:
        lam = strength * np.trace(z @ z.T) / 24
        hat = z @ np.linalg.solve(z.T @ z + lam * np.eye(10), z.T)
        rss = float(((labels - hat @ labels) ** 2).sum())
        errors.append(rss / (24 - np.trace(hat) - 1) ** 2)
    wanted = 1 - min(errors) / ((labels**2).sum() / 23**2)
    assert cka.explained_variance(x, y).value == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("judge", JUDGES)
def test_what_does_not_vary_says_nothing_and_is_flagged(judge):
    x, y = drawn(apart=0.5)
    assert judge(x, np.zeros(64, int)) == CkaScore(0.0, False)
    assert judge(np.ones((64, 5), np.float32), y) == CkaScore(0.0, False)
    dead = judge(np.concatenate([x, np.full((64, 1), 3.0)], axis=1), y)
    assert dead.value == pytest.approx(judge(x, y).value, abs=1e-6)
