"""Junctions and heads: what devices' sums give is what their pooled rows give."""

import numpy as np
import pytest

from fedquilt.core import UpdateError
from fedquilt.models.stitching.algebra import least_squares as p

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 6)) + 5.0
Y = X @ RNG.normal(size=(6, 4)) + RNG.normal(size=(90, 4))
DEFICIENT = np.hstack([X, X[:, :2], np.zeros((90, 3))])  # duplicate and dead channels
SHARES = (slice(0, 3), slice(3, 40), slice(40, 90))  # one device with fewer rows than channels


@pytest.mark.parametrize("ridge", [1e-4, 0.0])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("x", [X, DEFICIENT], ids=["full rank", "rank deficient"])
def test_federated_equals_pooled(x, centred, ridge):
    parts = [p.add_rows(None, x[share], Y[share], centred) for share in SHARES]
    for one, other in zip(
        p.solve_ridge(p.merge_moments(parts), ridge), p.solve_ridge(p.add_rows(None, x, Y, centred), ridge), strict=True
    ):
        assert np.abs(one - other).max() < 1e-10


def test_a_line_is_found_with_its_bias():
    """y = 2x + 1 on x = 0, 1, 2 without a ridge: weight 2, bias 1."""
    x = np.array([[0.0], [1], [2]])
    weights, bias = p.solve_ridge(p.add_rows(None, x, 2 * x + 1), 0.0)
    assert np.allclose(weights, [[2.0]])
    assert np.allclose(bias, [1.0])


def test_the_ridge_is_relative_to_the_mean_variance():
    """One channel with sum of squares 2 and ridge 1: lam = 2, so half the slope."""
    x = np.array([[-1.0], [1.0]])
    weights, bias = p.solve_ridge(p.add_rows(None, x, 3 * x), 1.0)
    assert np.allclose(weights, [[1.5]])
    assert np.allclose(bias, [0.0])


@pytest.mark.parametrize("ridge", [1e-4, 0.0])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("rows", [8, 50])
def test_fits_at_hand_equal_those_from_sums(rows, centred, ridge):
    x, ys = RNG.normal(size=(rows, 20)), [RNG.normal(size=(rows, 3)), RNG.normal(size=(rows, 5)) + 4.0]
    fit = p.RidgeFit(x, ridge, centred)
    for y in ys:
        for one, other in zip(fit.solve_weights(y), p.solve_ridge(p.add_rows(None, x, y, centred), ridge), strict=True):
            assert np.abs(one - other).max() < 1e-9


def test_dead_and_duplicate_channels_do_not_explode():
    weights, _ = p.solve_ridge(p.add_rows(None, DEFICIENT, Y), 0.0)
    plain, _ = p.solve_ridge(p.add_rows(None, X, Y), 0.0)
    assert np.allclose(weights[:, 8:], 0.0)
    assert np.allclose(weights[:, 0], plain[:, 0] / 2)
    assert np.allclose(weights[:, 6], plain[:, 0] / 2)


@pytest.mark.parametrize("ridge", [1e-4, 0.0])
def test_features_that_do_not_vary_predict_the_mean(ridge):
    for weights, bias in (
        p.solve_ridge(p.add_rows(None, np.full((5, 2), 7.0), Y[:5]), ridge),
        p.RidgeFit(np.full((1, 9), 7.0), ridge).solve_weights(Y[:1]),
    ):
        assert np.allclose(weights, 0.0)
        assert np.allclose(bias, Y[: 5 if len(weights[0]) == 2 else 1].mean(axis=0))


def test_maps_are_rows_of_positions_in_chunks():
    x, y = RNG.normal(size=(7, 3, 2, 2)), RNG.normal(size=(7, 2, 2, 2))
    rows = [maps.transpose(0, 2, 3, 1).reshape(28, -1) for maps in (x, y)]
    whole = p.add_rows(None, *rows)
    split = p.merge_moments([p.add_maps(None, x[:3], y[:3]), p.add_maps(None, x[3:], y[3:])])
    assert split.n == whole.n == 28
    assert np.allclose(split.xx, whole.xx)
    assert np.allclose(p.add_maps(None, x, y).xy, whole.xy)


@pytest.mark.parametrize("centred", [True, False])
def test_rows_are_added_in_place_as_if_merged(centred, monkeypatch):
    monkeypatch.setattr(p, "BLOCK", 3)
    x, y = RNG.normal(size=(30, 8)) + 5, RNG.normal(size=(30, 4)) - 2
    sums = None
    for start in (0, 1, 17):
        sums = p.add_rows(
            sums, x[start : {0: 1, 1: 17, 17: 30}[start]], y[start : {0: 1, 1: 17, 17: 30}[start]], centred
        )
    whole = p.add_rows(None, x, y, centred)
    assert sums.n == 30
    for one, other in ((sums.xx, whole.xx), (sums.xy, whole.xy), (sums.mean_x, whole.mean_x), (sums.yy, whole.yy)):
        assert np.allclose(one, other, rtol=1e-12)


def test_a_merge_is_symmetric_and_changes_none_of_its_parts():
    draws = np.random.default_rng(2)
    parts = [p.add_rows(None, draws.normal(size=(50, 150)) + i, draws.normal(size=(50, 3))) for i in range(3)]
    before = [part.xx.copy() for part in parts]
    merged = p.merge_moments(parts)
    assert np.array_equal(merged.xx, merged.xx.T)
    assert all(np.array_equal(part.xx, xx) for part, xx in zip(parts, before, strict=True))
    assert merged.yy == pytest.approx(
        sum(part.yy + 50 * (part.mean_y - merged.mean_y) @ (part.mean_y - merged.mean_y) for part in parts)
    )


def test_moments_travel_exactly_or_in_half_the_bytes():
    sums = p.add_rows(None, X, Y)
    exact = p.read_sent_moments(p.pack_moments(sums, exact=True), 6, 4)
    assert np.array_equal(exact.xx, (sums.xx + sums.xx.T) / 2)
    assert np.array_equal(exact.xy, sums.xy)
    assert exact.yy == sums.yy
    small = p.pack_moments(sums, exact=False)
    assert small["xx"].nbytes == 4 * 21
    assert np.allclose(p.read_sent_moments(small, 6, 4).xx, sums.xx, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", np.array([0.0])),
        ("xx", np.zeros(20)),
        ("xx", np.full(21, np.nan)),
        ("xx", np.full(21, -1.0)),
        ("xy", np.zeros((6, 4), int)),
        ("yy", np.array([-1.0])),
        ("yy", np.array([np.inf])),
        ("mean_x", None),
    ],
)
def test_what_is_no_moments_is_refused(name, value):
    sent = p.pack_moments(p.add_rows(None, X, Y), exact=True)
    if value is None:
        del sent[name]
    else:
        sent[name] = value
    with pytest.raises(UpdateError, match="moments"):
        p.read_sent_moments(sent, 6, 4)
