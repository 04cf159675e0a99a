"""Arrays on the disk: read when they are used, and refused by name when they are not what they were."""

import errno
import os
from dataclasses import dataclass

import numpy as np
import pytest

from fedquilt.arrays import disk_arrays, exact_sums, tensors
from fedquilt.arrays.disk_arrays import DiskArray, LazyTensors, ScratchFile, checksum
from fedquilt.core import DiskFullError, StoreError
from fedquilt.host.disk import REAL, write_output

ONES = np.ones((3, 5), np.float32)


@dataclass(frozen=True)
class State:
    model: dict[str, np.ndarray]
    known: int
    own: dict[str, np.ndarray]


@dataclass(frozen=True)
class Sums:
    total: dict[str, exact_sums.ExactSum]


def test_an_exact_sum_on_the_disk_has_the_bits_of_one_in_memory(tmp_path):
    shape = (exact_sums.MIN_FLOAT32_ENTRIES + 3,)
    roll = np.random.default_rng(0)
    given = [roll.standard_normal(shape) * 10.0**power for power in (0, 9, -12, 18, -25)]
    here = None
    there = None
    for array in given:
        here = exact_sums.add_to_sum(here, array, 3.0)
        with exact_sums.sums_on_disk(ScratchFile(tmp_path) if there is None else there.limbs[0].source):
            there = exact_sums.add_to_sum(there, array, 3.0)
    assert all(isinstance(limb, DiskArray) for limb in there.limbs)
    assert len(here.limbs) == len(there.limbs) > 2
    assert [limb.dtype for limb in here.limbs] == [limb.dtype for limb in there.limbs]
    assert all(np.array_equal(one, np.asarray(other)) for one, other in zip(here.limbs, there.limbs, strict=True))
    assert here.rounded_value().tobytes() == there.rounded_value().tobytes()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_sum_that_grows_takes_no_more_of_the_disk(tmp_path):
    room, total = ScratchFile(tmp_path), None
    for _ in range(5):
        with exact_sums.sums_on_disk(room):
            total = exact_sums.add_to_sum(total, np.ones(exact_sums.MIN_FLOAT32_ENTRIES, np.float32), 3.0)
    assert room.size() == 12 * exact_sums.MIN_FLOAT32_ENTRIES


def test_a_stored_sum_that_is_read_needs_its_file_no_more(tmp_path):
    path, total = (
        tmp_path / "sum",
        Sums({"a": exact_sums.add_to_sum(None, ONES, 2.0), "b": exact_sums.add_to_sum(None, 3 * ONES)}),
    )
    disk_arrays.write_safetensors(path, *tensors.split_state(total))
    found = exact_sums.read_accumulator(path, Sums, REAL, ScratchFile(tmp_path, min_entries=1))
    path.unlink()
    assert isinstance(found.total["a"].limbs[0], DiskArray)
    assert np.array_equal(found.total["a"].rounded_value(), 2 * ONES)
    assert np.array_equal(found.total["b"].rounded_value(), 3 * ONES)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_sum_of_integers_goes_on_from_the_disk(tmp_path, shape):
    total = None
    with exact_sums.sums_on_disk(ScratchFile(tmp_path, min_entries=1)):
        for value in (3, 7, 5):
            total = exact_sums.add_to_sum(total, np.full(shape, value, np.int64))
    assert isinstance(total.limbs[0], DiskArray)
    assert (total.rounded_value().dtype, total.rounded_value().tolist()) == (
        np.dtype(np.int64),
        np.full(shape, 7).tolist(),
    )


def test_an_array_takes_the_place_of_one_of_as_many_bytes(tmp_path):
    room = ScratchFile(tmp_path, min_entries=1)
    first = room.store_array(ONES)
    again = room.store_array(2 * ONES, first)
    assert isinstance(again, DiskArray)
    assert room.size() == ONES.nbytes
    assert np.array_equal(again.read(), 2 * ONES)
    assert room.store_array(ONES.astype(np.float64), again).offset == ONES.nbytes


@pytest.mark.parametrize("at", [0, 37, 59])
def test_a_bit_that_flips_in_a_state_is_found_when_its_tensor_is_read(tmp_path, at):
    path = tmp_path / "state"
    state = State({"a": ONES, "b": 7 * ONES}, 3, {"c": ONES[0]})
    disk_arrays.write_safetensors(path, *tensors.split_state(state))
    found = disk_arrays.read_state(path, State, lazy_bytes=2 * ONES.nbytes)
    assert isinstance(found.model, LazyTensors)
    assert isinstance(found.own, dict)  # too small to be left on the disk
    place = found.model.shapes["b"]
    payload = bytearray(path.read_bytes())
    payload[place.offset + at] ^= 4
    path.write_bytes(payload)
    assert np.array_equal(found.model["a"], ONES)
    with pytest.raises(StoreError, match="state was changed or truncated"):
        found.model["b"]
    path.unlink()
    with pytest.raises(StoreError, match="the file is missing"):
        found.model["a"]


def test_a_state_on_the_disk_is_stored_anew_in_the_same_bytes(tmp_path):
    path, other = tmp_path / "state", tmp_path / "other"
    disk_arrays.write_safetensors(path, *tensors.split_state(State({"b": ONES, "a": 2 * ONES}, 3, {})))
    found = disk_arrays.read_state(path, State, lazy_bytes=1)
    assert isinstance(found.model, LazyTensors)
    disk_arrays.write_safetensors(other, *tensors.split_state(found))
    assert other.read_bytes() == path.read_bytes()
    assert tensors.total_bytes([found.model]) == 2 * ONES.nbytes
    assert tensors.layout_from_tensors(found.model) == {"a": "f4:3,5", "b": "f4:3,5"}


def test_every_flipped_bit_changes_the_checksum():
    array = np.arange(11, dtype=np.uint8)
    wanted = checksum(array)
    for bit in range(88):
        flipped = array.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum(flipped) != wanted


@dataclass(frozen=True)
class Gathered:
    counts: np.ndarray
    half: np.ndarray


@dataclass(frozen=True)
class Searching:
    gathered: Gathered | None
    model: dict[str, np.ndarray] | None


def test_a_part_of_a_state_that_holds_arrays_alone_is_no_mapping_of_arrays(tmp_path):
    for model in ({"a": ONES}, None):
        disk_arrays.write_safetensors(tmp_path / "state", *tensors.split_state(Searching(Gathered(ONES, ONES), model)))
        found = disk_arrays.read_state(tmp_path / "state", Searching, lazy_bytes=1)
        assert np.array_equal(found.gathered.half, ONES)
        assert isinstance(found.model, LazyTensors) == (model is not None)


def test_an_output_that_does_not_fit_leaves_the_earlier_one(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def fill(path, text, **_):
        path.write_bytes(text.encode()[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(type(page), "write_text", fill)
        with pytest.raises(DiskFullError, match=r"page\.html"):
            write_output(page, "new")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"page.html": "old"}
    write_output(page, "new")
    assert page.read_text() == "new"
