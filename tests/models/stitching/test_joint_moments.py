"""Moments of features that devices send: which are refused, and that honest ones never are."""

from dataclasses import replace

import numpy as np
import pytest
from feature_moments import CLASSES, data, merged, sent

from fedquilt.core import UpdateError
from fedquilt.models.stitching.algebra import class_moments


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"factor": lambda a: a * np.float32(np.nan)}, "not finite|NaN|nan"),
        ({"means": lambda a: a * np.float32(np.inf)}, "not finite|inf"),
        ({"means": lambda a: a * np.float32(1e12)}, "no pooled maps reach"),
        ({"factor": lambda a: a * np.float32(1e12)}, "no pooled maps reach"),
        ({"counts": lambda a: -a}, "counts"),
        ({"counts": lambda a: 0 * a}, "all 0"),
        ({"counts": lambda a: a.astype(np.float32)}, "counts"),
        ({"rows": lambda a: a - 1}, "factor"),
        ({"rows": lambda a: a + 1}, "13 rows"),
        ({"rows": lambda a: 0 * a}, "0 rows"),
        ({"factor": lambda a: a[:-1]}, "factor"),
        ({"means": lambda a: a[:-1]}, "means"),
        ({"mean": lambda a: a * 1e12}, "no pooled maps reach"),
        ({"mean": lambda a: a.astype(np.float32)}, "mean"),
        ({"means": lambda a: 100 * a}, "not\\s+positive semi-definite"),
        ({"factor": lambda a: a / 10}, "not\\s+positive semi-definite"),
    ],
)
def test_moments_that_no_examples_have_are_refused(changes, why):
    given = sent()
    spoilt = {**given, **{name: change(given[name]) for name, change in changes.items()}}
    with pytest.raises(UpdateError, match=why):
        class_moments.read_sent_moments(spoilt, CLASSES, 12)
    class_moments.read_sent_moments(given, CLASSES, 12)


def test_moments_without_a_part_are_refused():
    given = sent()
    for name in given:
        with pytest.raises(UpdateError, match=f"{name} missing"):
            class_moments.read_sent_moments({key: value for key, value in given.items() if key != name}, CLASSES, 12)


@pytest.mark.parametrize("n", [2, 3, 40, 300])
def test_honest_moments_are_never_refused(n):
    for seed in range(5):
        z, y = data(n, 12, seed)
        z = np.hstack([z, z[:, :3] + 1e-4, np.full((n, 1), 7.7)]).astype(np.float32)
        class_moments.read_sent_moments(
            class_moments.pack_moments(class_moments.device_moments(z, y, CLASSES)), CLASSES, 16
        )


def test_a_part_is_not_changed_by_being_merged():
    part = class_moments.device_moments(*data(20), CLASSES)
    before = replace(part, means=part.means.copy(), factor=part.factor.copy(), counts=part.counts.copy())
    sums = merged([part])
    merged([part], sums)
    assert np.array_equal(part.means, before.means)
    assert np.array_equal(part.factor, before.factor)
    assert np.array_equal(sums.scatter, merged([part]).scatter)
