"""Sums of devices' moments: the bits of any order and grouping, and close to the definition."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import pytest
from feature_moments import CLASSES, data

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import DeviceUpdate
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.class_moments import PANEL, ClassMoments, ExactMomentSums

WIDE = PANEL + 45  # features, in two panels


def updates(devices: int, n: int = 9, width: int = WIDE, far: float = 1.0) -> list[DeviceUpdate]:
    """Updates of devices with n examples each."""
    found = []
    for number in range(devices):
        z, y = data(n, width, seed=number)
        z[:, 0] += 1e4 * far
        given = class_moments.pack_moments(class_moments.device_moments(z, y, CLASSES), exact=True)
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


def test_a_sum_is_not_changed_by_being_looked_at():
    for count in (3, 40):
        total = gathered(updates(count))
        assert bits(total) == bits(total)
