"""Sums of devices' moments: the bits of any order and grouping, and close to the definition."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import pytest
from feature_moments import CLASSES, data, sent

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import DeviceUpdate, UpdateError
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.class_moments import PANEL_ROWS, ClassMoments, ExactMomentSums

WIDE = PANEL_ROWS + 45  # features, in two panels


def updates(devices: int, n: int = 9, width: int = WIDE, far: float = 1.0) -> list[DeviceUpdate]:
    """Updates of devices with n examples each."""
    found = []
    for number in range(devices):
        z, y = data(n, width, seed=number)
        z[:, 0] += 1e4 * far
        given = class_moments.pack_moments(class_moments.compute_moments(z, y, CLASSES), exact=True)
        found.append(DeviceUpdate(f"d{number}", 0, float(n), {"short": float(number % 2)}, {"moments": given}))
    return found


def gathered(some: Sequence[DeviceUpdate]) -> ExactMomentSums:
    """Moments of these in turn."""
    return reduce(ExactMomentSums.add_update, some, ExactMomentSums())


def bits(total: ExactMomentSums) -> bytes:
    """Bits of the sums."""
    found = total.total_sums()
    return b"".join(array.tobytes() for array in (found.counts, found.totals, found.scatter))


def stored(total: ExactMomentSums) -> ExactMomentSums:
    """What is read of a sum that travelled."""
    found: ExactMomentSums = tensors.unpack_state(tensors.pack_state(total), ExactMomentSums)
    return found


@pytest.mark.parametrize("n", [9, 200])
def test_any_order_and_any_grouping_has_the_same_bits(n):
    all_of_them = updates(40 if n == 9 else 6, n)
    wanted = bits(gathered(all_of_them))
    assert bits(gathered(all_of_them[::-1])) == wanted
    for groups in ([all_of_them[:35], all_of_them[35:]], [all_of_them[::2], all_of_them[1::2]]):
        one, other = (stored(gathered(group)) for group in groups)
        assert bits(exact_sums.merge_accumulators(one, other)) == wanted
    assert bits(reduce(exact_sums.merge_accumulators, (stored(gathered([each])) for each in all_of_them))) == wanted


def test_parts_are_kept_until_they_are_larger_than_their_sum():
    all_of_them, before = updates(60), 0
    for count in range(1, 61):
        total = gathered(all_of_them[:count])
        size = len(tensors.pack_state(total))
        held = sum(tensors.total_bytes(update.bundles.values()) for update in all_of_them[:count])
        assert bool(total.sums) == (held > class_moments.sum_bytes(WIDE))
        assert set(total.parts) == (set() if total.sums else {update.device for update in all_of_them[:count]})
        assert total.short == count // 2
        assert total.devices == {update.device: 1 for update in all_of_them[:count]}
        before = size if total.sums and not before else before
    assert before
    assert size <= before + 60 * 40  # names of devices


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_sums_are_those_of_all_examples(far):
    all_of_them = updates(30, far=far)
    z, y = (np.concatenate(each) for each in zip(*(data(9, WIDE, seed) for seed in range(30)), strict=True))
    z[:, 0] += 1e4 * far
    wanted = ClassMoments(
        np.eye(CLASSES)[y].sum(axis=0), np.eye(CLASSES)[y].T @ z, (z - z.mean(axis=0)).T @ (z - z.mean(axis=0))
    )
    before = gathered(all_of_them[:12]).total_sums()
    for found in (gathered(all_of_them).total_sums(), gathered(all_of_them[12:]).total_sums(before)):
        assert np.array_equal(found.counts, wanted.counts)
        assert np.allclose(found.totals, wanted.totals, rtol=1e-12)
        assert np.abs(found.scatter - wanted.scatter).max() <= 1e-7 * np.abs(wanted.scatter).max()
        assert np.array_equal(found.scatter, found.scatter.T)


# -- moments that devices send -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"factor": lambda a: a * np.float32(np.nan)}, "not finite|NaN|nan"),
        ({"means": lambda a: a * np.float32(np.inf)}, "not finite|inf"),
        ({"means": lambda a: a * np.float32(1e12)}, "pooled maps never reach"),
        ({"factor": lambda a: a * np.float32(1e12)}, "pooled maps never reach"),
        ({"counts": lambda a: -a}, "counts"),
        ({"counts": lambda a: 0 * a}, "0 in every class"),
        ({"counts": lambda a: a.astype(np.float32)}, "counts"),
        ({"rows": lambda a: a - 1}, "factor"),
        ({"rows": lambda a: a + 1}, "13 rows"),
        ({"rows": lambda a: 0 * a}, "0 rows"),
        ({"factor": lambda a: a[:-1]}, "factor"),
        ({"means": lambda a: a[:-1]}, "means"),
        ({"mean": lambda a: a * 1e12}, "pooled maps never reach"),
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
            class_moments.pack_moments(class_moments.compute_moments(z, y, CLASSES)), CLASSES, 16
        )
