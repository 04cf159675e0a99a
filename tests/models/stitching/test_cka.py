"""CKA against closed forms, and the invariances that make it a similarity."""

import numpy as np
import pytest

from fedquilt.models.stitching.algebra import cka

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 10))
Y = X @ RNG.normal(size=(10, 7)) + 0.5 * RNG.normal(size=(32, 7))
BOTH = pytest.mark.parametrize("estimator", ["unbiased", "biased"])


def score(x: np.ndarray, y: np.ndarray, estimator: cka.Estimator = "unbiased") -> float:
    return cka.cka(cka.gram_matrix(x), cka.gram_matrix(y), estimator).value


def test_a_hand_computed_case_comes_out():
    """x = (1, -1, 0, 0), y = (1, 1, -1, -1) are orthogonal: 0; x with (1, 0, 0, -1): (1/2)^2 = 1/4."""
    x, y = np.array([[1.0], [-1], [0], [0]]), np.array([[1.0], [1], [-1], [-1]])
    assert score(x, y, "biased") == 0.0
    assert score(x, np.array([[1.0], [0], [0], [-1]]), "biased") == pytest.approx(0.25, abs=1e-15)


def test_the_gram_form_is_the_feature_form():
    """||Yc'Xc||^2 / (||Xc'Xc|| ||Yc'Yc||) to 1e-10."""
    x, y = X - X.mean(axis=0), Y - Y.mean(axis=0)
    feature = np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert score(X, Y, "biased") == pytest.approx(feature, abs=1e-10)


def test_the_unbiased_hsic_is_songs_estimator():
    """(tr KL + 1'K1 1'L1 / ((n-1)(n-2)) - 2/(n-2) 1'KL1), diagonals zero: Song et al., Eq. 5."""
    k, l = X @ X.T, Y @ Y.T  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    n = len(k)
    song = np.trace(k @ l) + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum()
    assert cka.hsic(cka.gram_matrix(X), cka.gram_matrix(Y)) == pytest.approx(song, rel=1e-10)


@BOTH
def test_rotation_scale_and_shift_change_nothing(estimator):
    rotation, _ = np.linalg.qr(RNG.normal(size=(10, 10)))
    want = score(X, Y, estimator)
    assert score(7.0 * X @ rotation + RNG.normal(size=10), Y, estimator) == pytest.approx(want, abs=1e-10)


@BOTH
def test_a_large_offset_in_float32_costs_only_the_inputs_rounding(estimator):
    shifted = (X + 1000.0).astype(np.float32)
    assert score(shifted, Y, estimator) == pytest.approx(score(X, Y, estimator), abs=1e-4)
    late = shifted @ shifted.T  # the Gram matrix first, in float32, has lost them
    assert abs(cka.cka(late, cka.gram_matrix(Y), estimator).value - score(X, Y, estimator)) > 1e-3


@BOTH
@pytest.mark.parametrize("constant", [np.full((32, 5), 0.1), np.full((32, 5), np.float32(1e6)), np.zeros((32, 1))])
def test_features_that_do_not_vary_score_zero_and_are_flagged(constant, estimator):
    assert cka.cka(cka.gram_matrix(constant), cka.gram_matrix(X), estimator) == (0.0, False)
    assert cka.cka(cka.gram_matrix(X), cka.gram_matrix(constant), estimator) == (0.0, False)


def test_one_odd_image_is_no_variation_to_the_unbiased_estimator():
    odd = np.zeros((16, 3))
    odd[0] = 1.0
    assert cka.cka(cka.gram_matrix(odd), cka.gram_matrix(X[:16])) == (0.0, False)


@pytest.mark.parametrize(("features", "biased"), [(64, 0.50), (512, 0.89), (4096, 0.985)])
def test_noise_scores_nothing_unbiased_and_nearly_all_biased(features, biased):
    """Independent noise at 64 images: p/(p + n) or so biased, about 0 unbiased."""
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(64, features)), draws.normal(size=(64, features))
    assert score(x, y, "biased") == pytest.approx(biased, abs=0.03)
    assert abs(score(x, y, "unbiased")) < 0.06


def test_four_images_suffice_and_three_do_not():
    assert -1 <= score(X[:4], Y[:4]) <= 1
    with pytest.raises(ValueError, match="at least 4"):
        score(X[:3], Y[:3])
    with pytest.raises(ValueError, match="same images"):
        cka.cka(cka.gram_matrix(X), cka.gram_matrix(Y[:8]))


def test_chunks_of_features_add_up():
    wide = RNG.normal(size=(6, cka.CHUNK + 100))
    centred = wide - wide.mean(axis=0)
    assert np.allclose(cka.gram_matrix(wide), centred @ centred.T, rtol=1e-12)
