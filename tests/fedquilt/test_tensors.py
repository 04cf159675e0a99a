import json
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from packed_states import STATE, same_bits

from fedquilt.arrays import disk_arrays, tensors
from fedquilt.core import StoreError, UpdateError
from fedquilt.host.disk import REAL
from fedquilt.models.local_training import NetworkState


def test_arithmetic_goes_name_by_name_and_gives_new_arrays():
    a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([10.0, 20.0])}
    total = tensors.map_arrays(np.add, a, b)
    assert total["w"].tolist() == [11.0, 22.0]
    total["w"][0] = 99.0
    assert (a["w"].tolist(), b["w"].tolist()) == ([1.0, 2.0], [10.0, 20.0])
    assert tensors.total_bytes([a, b]) == 32


def test_unlike_tensors_are_told_apart_by_name():
    wanted = {"w": np.zeros((2, 3)), "b": np.zeros(3)}
    tensors.require_matching(wanted, wanted)
    with pytest.raises(UpdateError, match="tensor names differ: b, c"):
        tensors.require_matching({"w": np.zeros((2, 3)), "c": np.zeros(3)}, wanted)
    with pytest.raises(UpdateError, match=r"tensor 'w' has shape \(3, 2\), expected \(2, 3\)"):
        tensors.require_matching({"w": np.zeros((3, 2)), "b": np.zeros(3)}, wanted)
    with pytest.raises(UpdateError, match="tensor 'b' holds 2 values that are not finite"):
        tensors.require_matching({"w": np.zeros((2, 3)), "b": np.array([np.nan, 0, -np.inf])}, wanted)


def test_what_a_device_sent_has_the_types_and_bounds_that_a_sum_can_take():
    """A float's square has to fit its type, a counter runs from 0 to 2^53; at the bounds it passes."""
    wanted = {"w": tensors.TensorSpec((2,), np.dtype(np.float32)), "n": np.zeros((), np.int64)}
    good = {"w": np.array([-1.8e19, 1.8e19], np.float32), "n": np.array(2**53)}
    tensors.require_addable(good, wanted)
    bad = [
        ("w", np.zeros(2), "tensor 'w' is float64, expected float32"),
        ("w", np.array([0, 1.9e19], np.float32), "tensor 'w' has numbers from 0 to 1.9e"),
        ("w", np.array([0, np.nan], np.float32), "tensor 'w' holds 1 values that are not finite"),
        ("w", np.zeros(3, np.float32), "tensor 'w' has shape"),
        ("n", np.array(2**53 + 1), "tensor 'n' has numbers from 9.0072e"),
        ("n", np.array(-1), "tensor 'n' has numbers from -1 to -1, beyond the 0 to 9.0072e"),
    ]
    for name, array, said in bad:
        with pytest.raises(UpdateError, match=re.escape(said)):
            tensors.require_addable({**good, name: array}, wanted)


def test_a_generator_is_named_by_its_keys():
    assert tensors.seeded_rng(1, "job", 2).random() == tensors.seeded_rng(1, "job", 2).random()
    assert tensors.seeded_rng(1, "job", 2).random() != tensors.seeded_rng(1, "job", 3).random()
    assert tensors.seeded_rng("12", 3).integers(1000) != tensors.seeded_rng("1", 23).integers(1000)


@pytest.mark.parametrize(
    "given_",
    [
        STATE.model,
        {"b": np.ones(3, np.float32), "a": np.zeros(3, np.int64)},
        {"empty": np.zeros(0, np.float32)},
        {"big": np.array([1, 258], ">i4")},
        {},
    ],
)
def test_bytes_are_the_librarys_own_the_first_time_and_after_it(given_):
    plain = {name: np.asarray(array, order="C") for name, array in given_.items()}
    for _ in range(3):
        plain = {name: np.asarray(array + array, array.dtype) for name, array in plain.items()}
        payload = tensors.encode_tensors(plain)
        assert payload == safetensors.numpy.save({name: plain[name] for name in sorted(plain)})
        back = tensors.decode_tensors(payload)
        assert same_bits(back, dict(sorted(safetensors.numpy.load(payload).items())))
        for array in back.values():
            array[...] = 0
        assert same_bits(tensors.decode_tensors(payload), dict(sorted(safetensors.numpy.load(payload).items())))


def test_a_blob_with_a_known_header_that_ends_too_early_or_too_late_is_refused():
    payload = tensors.encode_tensors({"w": np.ones(4, np.float32)})
    assert tensors.decode_tensors(payload)["w"].tolist() == [1, 1, 1, 1]
    for damaged in (payload[:-1], payload + b"x", payload[:-16]):
        with pytest.raises(UpdateError, match="not a safetensors blob"):
            tensors.decode_tensors(damaged)


def test_few_of_many_headers_are_kept():
    for size in range(3 * tensors.MAX_CACHED_LAYOUTS):
        assert tensors.decode_tensors(tensors.encode_tensors({"w": np.ones(size)}))["w"].shape == (size,)
    assert len(tensors._cached_headers) <= tensors.MAX_CACHED_LAYOUTS
    assert len(tensors._cached_layouts) <= tensors.MAX_CACHED_LAYOUTS


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(StoreError, match="gone"):
        tensors.read_tensors(tmp_path / "gone")
    (tmp_path / "odd").write_bytes(b"odd")
    with pytest.raises(UpdateError, match="not a safetensors blob"):
        tensors.read_tensors(tmp_path / "odd")


def test_floats_of_a_file_are_those_that_are_read_at_once(tmp_path):
    """In every bit, by name; what is no float32 is not among them, and what is given may be written over."""
    given = {
        "b": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
        "a": np.array(0.5, np.float32),
        "none": np.zeros((0, 2), np.float32),
        "count": np.array([7]),
        "double": np.ones(2),
    }
    disk_arrays.write_safetensors(tmp_path / "file", given)
    found = disk_arrays.Float32Reader(tmp_path / "file")
    assert list(found) == ["a", "b", "none"]
    assert all(
        found[name].tobytes() == given[name].tobytes() and found[name].shape == given[name].shape for name in found
    )
    found["b"][:] = 0
    assert found["b"].tobytes() == given["b"].tobytes()
    assert found.get("count") is None


@pytest.mark.parametrize("payload", [b"", b"PK\x03\x04" * 9, b"\x02" + bytes(7) + b"[]", b"\xff" * 40])
def test_a_file_that_is_no_safetensors_has_no_floats(tmp_path, payload):
    (tmp_path / "file").write_bytes(payload)
    with pytest.raises(UpdateError, match="not a safetensors"):
        disk_arrays.Float32Reader(tmp_path / "file")


def test_an_empty_tensor_beyond_the_end_of_its_file_is_missed_by_name(tmp_path):
    path, far = tmp_path / "file", 1 << 64
    header = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [far, far]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UpdateError, match="ends within tensor 'w'"):
        disk_arrays.Float32Reader(path)["w"]


def test_floats_that_a_file_has_lost_are_missed_by_name(tmp_path):
    path = tmp_path / "file"
    disk_arrays.write_safetensors(path, {"w": np.ones(9, np.float32)})
    path.write_bytes(path.read_bytes()[:-4])
    found = disk_arrays.Float32Reader(path)
    with pytest.raises(UpdateError, match="ends within tensor 'w'"):
        found["w"]
    path.unlink()
    with pytest.raises(StoreError, match="cannot read"):
        found["w"]
    with pytest.raises(StoreError, match="cannot read"):
        disk_arrays.Float32Reader(path)


KEPT = NetworkState({"lr": 0.1}, {"name": "mlp"}, {"w": np.ones((3, 2), np.float32), "n": np.array(7)}, 9.0, 4)


@pytest.mark.parametrize("metadata", [None, {"state": '{"a": "\u00e9"}'}])
def test_a_file_that_is_written_piece_by_piece_has_the_bytes_of_the_whole(tmp_path, metadata):
    types = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
    given = {f"t.{kind}": np.arange(1, 7).reshape(2, 3).astype(kind) for kind in types}
    given |= {"none": np.zeros((0, 2), np.float32), '\u00e9 "\\\x01': np.array(7)}
    disk_arrays.write_safetensors(tmp_path / "file", given, metadata)
    assert (tmp_path / "file").read_bytes() == tensors.encode_tensors(given, metadata)
    found = disk_arrays.SafetensorsReader(tmp_path / "file")
    assert list(found) == sorted(given)
    for name in [*given, *given]:
        assert (found[name].dtype, found[name].shape) == (given[name].dtype, given[name].shape)
        assert found[name].tobytes() == given[name].tobytes()


def test_a_state_in_a_file_has_the_bytes_of_a_packed_one(tmp_path):
    path = tmp_path / "state"
    disk_arrays.write_safetensors(path, *tensors.split_state(KEPT))
    assert path.read_bytes() == tensors.pack_state(KEPT)
    assert tensors.pack_state(disk_arrays.read_state(path, NetworkState)) == tensors.pack_state(KEPT)
    disk_arrays.write_safetensors(path, {"w": np.ones(2)})
    with pytest.raises(StoreError, match="not a stored NetworkState"):
        disk_arrays.read_state(path, NetworkState)
    path.write_bytes(b"x")
    with pytest.raises(StoreError, match="not a stored NetworkState"):
        disk_arrays.read_state(path, NetworkState)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="a file of Linux's that comes in pieces")
def test_a_part_of_a_file_is_read_in_as_many_calls_as_it_takes():
    """Linux reads 2 GiB at once at the most, and of this file a few kB: a tensor may be larger."""
    buffer = bytearray(16 * 1024)
    assert REAL.read_into("/proc/self/smaps", buffer, 0) == len(buffer)
    assert 0 not in buffer


def test_threads_decode_blobs_of_more_layouts_than_are_kept(monkeypatch):
    monkeypatch.setattr(tensors, "MAX_CACHED_LAYOUTS", 1)
    blobs = [tensors.encode_tensors({f"w{number}": np.ones(number + 1, np.float32)}) for number in range(40)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(tensors.decode_tensors, blobs * 50)
            assert {next(iter(each)) for each in found} == {f"w{number}" for number in range(40)}
    finally:
        sys.setswitchinterval(before)
