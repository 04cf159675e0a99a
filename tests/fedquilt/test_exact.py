"""Exact sums: whatever the order and the grouping, the bits are those of the real sum, rounded once."""

import itertools
import math

import numpy as np
import pytest

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import UpdateError

SIZES = pytest.mark.parametrize("size", [40, exact_sums.MIN_FLOAT32_ENTRIES + 7], ids=["small", "large"])


def addends(size: int, spread: int, count: int = 20, seed: int = 0) -> list[np.ndarray]:
    """Arrays (size,) float32 whose magnitudes differ by up to `spread` binary orders, of both signs."""
    draws = np.random.default_rng(seed)
    return [
        (draws.normal(size=size) * 2.0 ** draws.uniform(-spread / 2, spread / 2, size)).astype(np.float32)
        for _ in range(count)
    ]


def total(arrays: list[np.ndarray], weights: list[float]) -> exact_sums.ExactSum:
    found = None
    for array, weight in zip(arrays, weights, strict=True):
        found = exact_sums.add_to_sum(found, array, weight)
    assert found is not None
    return found


def real(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """The sum of the float64 products, rounded once, entry by entry."""
    products = np.array([array.astype(np.float64) * weight for array, weight in zip(arrays, weights, strict=True)])
    return np.array([math.fsum(column) for column in products.T]) + 0.0


@SIZES
@pytest.mark.parametrize("spread", [4, 120, 240])
@pytest.mark.parametrize("weight", [lambda k: float(k + 1), lambda k: 1.0 / (k + 3)], ids=["whole", "broken"])
def test_the_bits_are_those_of_the_real_sum_in_any_order(size, spread, weight):
    arrays = addends(size, spread)
    weights = [weight(k) for k in range(len(arrays))]
    wanted = real(arrays, weights).tobytes()
    assert total(arrays, weights).rounded_value().tobytes() == wanted
    assert total(arrays[::-1], weights[::-1]).rounded_value().tobytes() == wanted


@SIZES
@pytest.mark.parametrize("spread", [4, 240])
def test_groups_merge_into_the_same_bits(size, spread):
    arrays, weights = addends(size, spread), [float(k % 7 + 1) for k in range(20)]
    wanted = total(arrays, weights).rounded_value().tobytes()
    for cuts in ([1], [7], [3, 4, 15]):
        groups = [total(list(some), weights[at : at + len(some)]) for at, some in parted(arrays, cuts)]
        found = groups[-1]
        for group in groups[:-1]:
            found = exact_sums.merge_sums(found, group)
        assert found.rounded_value().tobytes() == wanted


def parted(arrays: list[np.ndarray], cuts: list[int]) -> list[tuple[int, list[np.ndarray]]]:
    bounds = [0, *cuts, len(arrays)]
    return [(start, arrays[start:end]) for start, end in itertools.pairwise(bounds)]


def test_a_sum_takes_12_bytes_an_entry_and_at_most_16_where_no_magnitudes_are_far_apart():
    boards = [each * np.float32(0.05) for each in addends(exact_sums.MIN_FLOAT32_ENTRIES, 8, count=100)]
    begun = exact_sums.add_to_sum(None, boards[0], 20.0)
    found = begun
    for k, board in enumerate(boards[1:]):
        found = exact_sums.add_to_sum(found, board, float(20 + 13 * k))
    assert sum(limb.nbytes for limb in found.limbs) == 12 * exact_sums.MIN_FLOAT32_ENTRIES
    assert found.limbs[0] is begun.limbs[0] or np.shares_memory(found.limbs[0], begun.limbs[0])
    broken = total(boards, [1 / (3 + k) for k in range(100)])
    assert sum(limb.nbytes for limb in broken.limbs) == 16 * exact_sums.MIN_FLOAT32_ENTRIES


def test_shapes_stay_and_of_counters_the_largest():
    for shape in ((), (0,), (2, 3)):
        found = total([np.full(shape, 0.1, np.float32)] * 3, [1.0, 2.0, 3.0])
        assert found.shape == found.rounded_value().shape == shape
        assert found.rounded_value().dtype == np.float64
    counted = exact_sums.add_to_sum(exact_sums.add_to_sum(None, np.array(5)), np.array(3))
    assert (counted.rounded_value(), counted.rounded_value().dtype, counted.is_counter) == (5, np.int64, True)
    assert exact_sums.merge_sums(counted, exact_sums.add_to_sum(None, np.array(9))).rounded_value() == 9


def test_what_was_added_and_what_was_asked_for_stay_as_they_are():
    one, count = np.ones(3), np.array(1)
    found, counter = exact_sums.add_to_sum(None, one), exact_sums.add_to_sum(None, count)
    value, most = found.rounded_value(), counter.rounded_value()
    exact_sums.add_to_sum(found, one)
    exact_sums.add_to_sum(counter, np.array(7))
    assert (one.tolist(), value.tolist(), int(count), int(most)) == ([1, 1, 1], [1, 1, 1], 1, 1)


def test_numbers_add_up_exactly_in_any_order():
    tenth = exact_sums.ExactScalar().add_numbers(*[0.1] * 10)
    assert float(tenth) == math.fsum([0.1] * 10) == 1.0
    assert float(exact_sums.ExactScalar().add_numbers(1e100, 1.0, -1e100)) == 1.0
    assert (
        float(exact_sums.ExactScalar().add_numbers(1e100, 1.0).merge_with(exact_sums.ExactScalar().add_numbers(-1e100)))
        == 1.0
    )
    assert float(exact_sums.ExactScalar()) == 0.0


def test_sums_of_the_same_names_merge_and_others_stay():
    one = exact_sums.add_arrays({}, {"a": np.ones(2), "b": np.ones(1)}, 2.0)
    other = exact_sums.add_arrays({}, {"b": np.ones(1), "c": np.ones(1)}, 3.0)
    found = exact_sums.rounded_values(exact_sums.merge_accumulators(one, other))
    assert {name: value.tolist() for name, value in found.items()} == {"a": [2, 2], "b": [5], "c": [3]}


def test_a_sum_is_stored_in_every_bit():
    found = total(addends(9, 240), [1.0] * 20)
    again = tensors.unpack_state(tensors.pack_state(found), exact_sums.ExactSum)
    assert tensors.pack_state(again) == tensors.pack_state(found)
    assert len(found.limbs) > 2
    assert again.rounded_value().tobytes() == found.rounded_value().tobytes()


@pytest.mark.parametrize(
    ("limbs", "said"),
    [
        ((np.array([1, 2]), np.array([np.nan, 1e300])), "instead of one, as it is a counter"),
        ((np.array([1, 2]), np.array([1, 2])), "instead of one, as it is a counter"),
        ((np.array([1.0, 2.0]),), "is float64, expected int64"),
        ((np.array([1, -2]),), "from -2 to 1"),
    ],
)
def test_a_sum_of_counters_that_came_from_elsewhere_has_one_part_of_their_type(limbs, said):
    with pytest.raises(UpdateError, match=said):
        exact_sums.require_valid_sums({"steps": exact_sums.ExactSum(limbs)}, {"steps": np.array([0, 0])}, 1.0)


@pytest.mark.parametrize(("kind", "most"), [("f2", 65504.0), ("f4", math.sqrt(np.finfo("f4").max))])
def test_a_sum_from_elsewhere_is_as_large_as_boards_updates_may_be(kind, most):
    like = {"w": np.array([most], kind)}
    tensors.require_addable(like, like)
    exact_sums.require_valid_sums({"w": total([like["w"]] * 3, [1.0] * 3)}, like, 3.0)
    with pytest.raises(UpdateError, match="beyond"):
        exact_sums.require_valid_sums({"w": exact_sums.add_to_sum(None, np.array([6.1 * most]))}, like, 3.0)


def test_a_sum_that_is_merged_stays_as_it_is():
    ones = np.ones(3)
    one, other = (
        {"a": exact_sums.add_to_sum(None, ones)},
        {"a": exact_sums.add_to_sum(None, ones), "b": exact_sums.add_to_sum(None, ones)},
    )
    total = exact_sums.merge_accumulators(exact_sums.merge_accumulators(exact_sums.copy_accumulator(one), other), other)
    assert {name: each.rounded_value().tolist() for name, each in total.items()} == {"a": [3.0] * 3, "b": [2.0] * 3}
    assert all(np.array_equal(each.rounded_value(), ones) for each in (*one.values(), *other.values()))
