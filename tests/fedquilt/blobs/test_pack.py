"""Many small blobs in one file: found again, dropped, their places taken anew, and whole after a kill."""

import hashlib
from pathlib import Path

import pytest

from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.pack import Pack
from fedquilt.blobs.shared_store import Lodger, Shared
from fedquilt.blobs.store import SMALL_BYTES, Depot
from fedquilt.core import BlobRef
from fedquilt.disk import REAL


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def filled(path: Path, *payloads: bytes) -> Pack:
    pack = Pack(str(path), REAL)
    for payload in payloads:
        pack.name(sha256(payload), pack.put(sha256(payload), payload), len(payload))
    return pack


def test_the_place_of_a_dropped_blob_is_taken_by_the_next_of_its_size(tmp_path: Path) -> None:
    pack = filled(tmp_path / "pack", b"one", b"two", b"three")
    size = (tmp_path / "pack").stat().st_size
    pack.drop(sha256(b"one"))
    assert sha256(b"one") not in pack
    place = pack.put(sha256(b"six"), b"six")
    assert sha256(b"six") not in pack  # it has no name yet
    pack.name(sha256(b"six"), place, 3)
    assert [pack.read(sha256(each)) for each in (b"six", b"two", b"three")] == [b"six", b"two", b"three"]
    assert pack.read(sha256(b"three"), 1, 2) == b"hr"
    assert (tmp_path / "pack").stat().st_size == size


def test_what_a_killed_process_left_is_found_and_a_torn_slot_is_not(tmp_path: Path) -> None:
    filled(tmp_path / "pack", b"one", b"torn", b"three")
    content = (tmp_path / "pack").read_bytes()
    (tmp_path / "pack").write_bytes(content.replace(b"torn", b"to\0\0")[:-2])  # the last was cut off
    pack = Pack(str(tmp_path / "pack"), REAL)
    assert pack.names() == [sha256(b"one")]
    place = pack.put(sha256(b"four"), b"four")
    pack.name(sha256(b"four"), place, 4)
    again = Pack(str(tmp_path / "pack"), REAL)
    assert sorted(again.names()) == sorted([sha256(b"one"), sha256(b"four")])
    assert again.read(sha256(b"four")) == b"four"


def test_a_stowed_blob_is_a_blob_like_any_other_and_has_a_file_when_one_is_asked_for(tmp_path: Path) -> None:
    depot = Depot(tmp_path, durable=False)
    ref = depot.stow(b"small")
    assert depot.has(ref)
    assert depot.load(ref.sha256) == b"small"
    assert depot.read(ref.sha256, 1, 3) == b"mal"
    assert not (tmp_path / ref.sha256).exists()
    path = Depot(tmp_path, durable=False).path(ref.sha256)
    assert path is not None
    assert path.read_bytes() == b"small"
    depot.drop(ref.sha256)
    assert not depot.has(ref)
    assert depot.path(ref.sha256) is None


def test_what_is_put_stays_when_the_same_content_was_stowed_and_is_collected_when_nobody_needs_it(
    tmp_path: Path,
) -> None:
    depot = Depot(tmp_path, durable=False)
    ref = depot.stow(b"same")
    depot.put(b"same")
    assert (tmp_path / ref.sha256).read_bytes() == b"same"
    other = depot.stow(b"other")
    depot.keep({ref.sha256})
    assert depot.has(ref)
    assert not depot.has(other)


@pytest.mark.parametrize("size", [0, 1, 128 * 1024 + 1])
def test_blobs_of_any_size_can_be_stowed(tmp_path: Path, size: int) -> None:
    depot = Depot(tmp_path, durable=False)
    payload = bytes(size)
    assert depot.stow(payload) == BlobRef(sha256=sha256(payload), size=size)
    assert depot.load(sha256(payload)) == payload


def test_a_durable_depot_has_a_file_for_each(tmp_path: Path) -> None:
    ref = Depot(tmp_path).stow(b"small")
    assert [path.name for path in tmp_path.iterdir()] == [ref.sha256]


# -- a depot that shares --------------------------------------------------------------------------


def test_devices_of_one_process_share_their_small_blobs_and_each_has_its_own(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "shared")
    one, two = (Lodger(tmp_path / name / "blobs", shared) for name in ("one", "two"))
    ref = one.put(b"model")
    assert one.has(ref)
    assert not two.has(ref)
    assert two.put(b"model", ref) == ref
    assert one.put(b"model") == ref
    one.drop(ref.sha256)
    assert not one.has(ref)
    path = two.path(ref.sha256)
    assert path is not None
    assert path.read_bytes() == two.load(ref.sha256) == b"model"
    two.drop(ref.sha256)
    assert not shared.depot.has(ref)
    assert not (tmp_path / "one").exists()


def test_a_blob_that_came_in_parts_is_shared_as_well(tmp_path: Path) -> None:
    shared, payload = Shared(tmp_path / "shared"), bytes(range(256)) * 16
    ref = BlobRef(sha256=sha256(payload), size=len(payload))
    cut = chunks.cut(ref, 1024, lambda offset, size: payload[offset : offset + size])
    for name in ("one", "two"):
        lodger = Lodger(tmp_path / name, shared)
        assert lodger.resume(cut) == bytes(4)
        for index in range(4):
            lodger.write(ref.sha256, *(index * 1024, payload[index * 1024 : (index + 1) * 1024]))
        lodger.finish(ref)
        assert lodger.file(ref.sha256) == str(tmp_path / "shared" / ref.sha256)
        assert not list((tmp_path / name).iterdir())


def test_a_damaged_blob_is_not_taken_by_a_depot_that_shares(tmp_path: Path) -> None:
    lodger = Lodger(tmp_path / "one", Shared(tmp_path / "shared"))
    wanted = BlobRef(sha256=sha256(b"right"), size=5)
    with pytest.raises(DamagedBlobError):
        lodger.stow(b"wrong", wanted)
    assert lodger.unused() == []


def test_what_is_put_lies_side_by_side_and_the_longest_unused_is_first(tmp_path: Path) -> None:
    """An ONNX graph names the blobs of its weights, which are looked for beside it."""
    shared = Shared(tmp_path / "shared")
    lodger = Lodger(tmp_path / "one", shared)
    large = lodger.put(bytes(SMALL_BYTES + 1))
    small, other = lodger.put(b"small"), lodger.put(b"other")
    lodger.touch(small.sha256)
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert names == {each.sha256 for each in (large, small, other)}
    assert lodger.unused() == [(each.sha256, each.size) for each in (large, other, small)]
    lodger.keep({small.sha256})
    assert [lodger.has(each) for each in (large, other, small)] == [False, False, True]
    assert Lodger(tmp_path / "one", Shared(tmp_path / "shared")).unused() == []
