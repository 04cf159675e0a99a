"""FedPeWS' synthetic sets: the clusters, classes and features the specification says, the same everywhere."""

import hashlib

import msgspec
import numpy as np
import pytest

from fedquilt.core import DataError
from fedquilt.data import examples, synthetic
from fedquilt.data.spec import DataSpec

LARGE = DataSpec(dataset="fedpews-32k")


@pytest.mark.parametrize(("name", "count"), [("fedpews-32k", 32000), ("fedpews-3.2k", 3200)])
def test_the_sets_are_as_large_as_they_are_called(name, count):
    spec = DataSpec(dataset=name)
    train, test = examples.load_split(spec), examples.load_split(msgspec.structs.replace(spec, split="test"))
    assert (train.x.shape, train.x.dtype) == ((count, 5), np.float32)
    assert np.bincount(train.y).tolist() == [count // 4] * 4
    assert np.bincount(test.y).tolist() == [1600] * 4


def test_clusters_lie_where_they_should_and_are_as_wide():
    """Means within five standard errors of centre + offset; covariances within a tenth of A'A."""
    plane = synthetic.draw_points("fedpews-32k", "train", 0).reshape(4, 4, 2000, 2)  # centre, offset, point
    round_ = [[0.085, 0.075], [0.075, 0.085]]  # .25^2 + .15^2; 2 x .25 x .15
    wanted = [[[0.0025, 0], [0, 0.2025]], round_, round_, [[0.0625, 0], [0, 0.0025]]]
    for centre, (right, up) in enumerate([(-4, 4), (4, 4), (-4, -4), (4, -4)]):
        for offset in range(4):
            found, covariance = plane[centre, offset], np.array(wanted[centre])
            errors = np.abs(found.mean(axis=0) - [right + offset, up - offset])
            assert np.all(errors < 5 * np.sqrt(np.diag(covariance) / 2000))
            scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
            assert np.all(np.abs(np.cov(found.T) - covariance) < 0.1 * scale)


def test_classes_interleave_within_a_side():
    y = examples.open_split(LARGE).y.reshape(4, 4, 2000)
    assert np.array_equal(y[:, :, 0], [[0, 1, 0, 1]] * 2 + [[2, 3, 2, 3]] * 2)
    assert np.array_equal(y.min(axis=2), y.max(axis=2))


def test_features_are_standardised_by_the_training_set():
    train = examples.load_split(LARGE).x.astype(np.float64)
    assert np.allclose(train.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(train.std(axis=0), 1, atol=1e-5)
    test = examples.load_split(msgspec.structs.replace(LARGE, split="test")).x.astype(np.float64)
    assert np.allclose(test.mean(axis=0), 0, atol=0.05)
    assert not np.allclose(test.mean(axis=0), 0, atol=1e-6)
    x, y = synthetic.draw_points("fedpews-32k", "train", 0).T
    for column, raw in enumerate([x, y, x * x, y * y, x * y]):
        assert np.allclose(train[:, column], (raw - raw.mean()) / raw.std(), atol=1e-5)


def test_every_machine_draws_the_same():
    drawn = synthetic.draw_points("fedpews-3.2k", "train", 0)
    digits = np.rint(drawn * 1e5).astype("<i8").tobytes()
    assert hashlib.sha256(digits).hexdigest()[:16] == "0e0bf965124502ff"
    assert not np.array_equal(drawn, synthetic.draw_points("fedpews-3.2k", "train", 1))
    assert not np.array_equal(drawn[:200], synthetic.draw_points("fedpews-3.2k", "test", 0)[:200])
    assert not np.array_equal(drawn[:200], synthetic.draw_points("fedpews-32k", "train", 0)[:200])


def test_each_device_makes_its_own_share():
    """Two devices with a pair of classes each, as in the paper: what each makes is its part of the whole."""
    spec = msgspec.structs.replace(LARGE, groups=((0, 1), (2, 3)), shares=2, held=0.0)
    every = examples.load_split(LARGE)
    for share in (0, 1):
        train, held = examples.load_share(msgspec.structs.replace(spec, share=share))
        assert len(held) == 0
        assert np.array_equal(train.x, every.x[every.y // 2 == share])
        assert np.array_equal(train.y, every.y[every.y // 2 == share])


def test_there_are_two_splits():
    with pytest.raises(DataError, match="fedpews-32k has the splits train and test, not 'validation'"):
        examples.load_split(msgspec.structs.replace(LARGE, split="validation"))
