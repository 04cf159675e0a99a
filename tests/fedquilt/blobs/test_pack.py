"""Many small blobs in one file: found again, dropped, their places taken anew, and whole after a kill."""

import hashlib
from pathlib import Path

import pytest

from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.pack_file import PackFile
from fedquilt.blobs.shared_store import SharedBlobStore, SharedBlobView
from fedquilt.blobs.store import MAX_SMALL_BYTES, BlobStore
from fedquilt.core import BlobRef
from fedquilt.host.disk import REAL, Disk, OpenFile


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def filled(path: Path, *payloads: bytes) -> PackFile:
    pack = PackFile(str(path), REAL)
    for payload in payloads:
        pack.register_blob(sha256(payload), pack.write_blob(sha256(payload), payload), len(payload))
    return pack


def test_what_a_killed_process_left_is_found_and_a_torn_slot_is_not(tmp_path):
    filled(tmp_path / "pack", b"one", b"torn", b"three")
    content = (tmp_path / "pack").read_bytes()
    (tmp_path / "pack").write_bytes(content.replace(b"torn", b"to\0\0")[:-2])  # the last was cut off
    pack = PackFile(str(tmp_path / "pack"), REAL)
    assert pack.blob_names() == [sha256(b"one")]
    place = pack.write_blob(sha256(b"four"), b"four")
    pack.register_blob(sha256(b"four"), place, 4)
    again = PackFile(str(tmp_path / "pack"), REAL)
    assert sorted(again.blob_names()) == sorted([sha256(b"one"), sha256(b"four")])
    assert again.read_range(sha256(b"four")) == b"four"


@pytest.mark.parametrize("byte", range(52))
def test_a_flipped_bit_in_the_head_of_a_slot_costs_this_slot_alone(tmp_path, byte):
    blobs = [b"first", b"second", b"third", b"fourth"]
    filled(tmp_path / "pack", *blobs)
    written = (tmp_path / "pack").read_bytes()
    head = written.index(b"second") - 52
    for bit in range(8):
        damaged = bytearray(written)
        damaged[head + byte] ^= 1 << bit
        (tmp_path / "pack").write_bytes(damaged)
        pack = PackFile(str(tmp_path / "pack"), REAL)
        assert pack.blob_names() == [sha256(each) for each in blobs if each != b"second"]
        pack.remove_blob(sha256(b"third"))
        for each in (b"newer", b"later", b"second"):
            pack.register_blob(sha256(each), pack.write_blob(sha256(each), each), len(each))
        again = PackFile(str(tmp_path / "pack"), REAL)
        kept = (b"first", b"fourth", b"newer", b"later", b"second")
        assert {name: again.read_range(name) for name in again.blob_names()} == {sha256(each): each for each in kept}


def test_what_looks_like_a_head_in_a_blob_frees_no_place(tmp_path):
    filled(tmp_path / "other", b"x" * 200)
    faked = (tmp_path / "other").read_bytes()[:52]  # of a slot that would reach far into the next one
    filled(tmp_path / "pack", faked + b"1", b"the next one", b"last" * 100)
    damaged = bytearray((tmp_path / "pack").read_bytes())
    damaged[0] ^= 1
    (tmp_path / "pack").write_bytes(damaged)
    pack = PackFile(str(tmp_path / "pack"), REAL)
    pack.register_blob(sha256(b"y" * 200), pack.write_blob(sha256(b"y" * 200), b"y" * 200), 200)
    kept = (b"the next one", b"last" * 100, b"y" * 200)
    assert {name: pack.read_range(name) for name in pack.blob_names()} == {sha256(each): each for each in kept}


def test_a_stowed_blob_is_a_blob_like_any_other_and_has_a_file_when_one_is_asked_for(tmp_path):
    depot = BlobStore(tmp_path, durable=False)
    ref = depot.store_small(b"small")
    assert depot.has_blob(ref)
    assert depot.load(ref.sha256) == b"small"
    assert depot.read_range(ref.sha256, 1, 3) == b"mal"
    assert not (tmp_path / ref.sha256).exists()
    path = BlobStore(tmp_path, durable=False).blob_path(ref.sha256)
    assert path.read_bytes() == b"small"
    depot.remove_blob(ref.sha256)
    assert not depot.has_blob(ref)
    assert depot.blob_path(ref.sha256) is None


def test_what_is_put_stays_when_the_same_content_was_stowed_and_is_collected_when_nobody_needs_it(tmp_path):
    depot = BlobStore(tmp_path, durable=False)
    ref = depot.store_small(b"same")
    depot.store_bytes(b"same")
    assert (tmp_path / ref.sha256).read_bytes() == b"same"
    other = depot.store_small(b"other")
    depot.remove_all_but({ref.sha256})
    assert depot.has_blob(ref)
    assert not depot.has_blob(other)


@pytest.mark.parametrize("size", [0, 1, 128 * 1024 + 1])
def test_blobs_of_any_size_can_be_stowed(tmp_path, size):
    depot = BlobStore(tmp_path, durable=False)
    payload = bytes(size)
    assert depot.store_small(payload) == BlobRef(sha256=sha256(payload), size=size)
    assert depot.load(sha256(payload)) == payload


def test_a_durable_depot_has_a_file_for_each(tmp_path):
    ref = BlobStore(tmp_path).store_small(b"small")
    assert [path.name for path in tmp_path.iterdir()] == [ref.sha256]


def test_devices_of_one_process_share_their_small_blobs_and_each_has_its_own(tmp_path):
    shared = SharedBlobStore(tmp_path / "shared")
    one, two = (SharedBlobView(tmp_path / name / "blobs", shared) for name in ("one", "two"))
    ref = one.store_bytes(b"model")
    assert one.has_blob(ref)
    assert not two.has_blob(ref)
    assert two.store_bytes(b"model", ref) == ref
    assert one.store_bytes(b"model") == ref
    one.remove_blob(ref.sha256)
    assert not one.has_blob(ref)
    path = two.blob_path(ref.sha256)
    assert path.read_bytes() == two.load(ref.sha256) == b"model"
    two.remove_blob(ref.sha256)
    assert not shared.blob_store.has_blob(ref)
    assert not (tmp_path / "one").exists()


def test_a_device_claims_the_blobs_of_a_killed_process_and_the_others_are_removed(tmp_path):
    killed = SharedBlobView(tmp_path / "one", SharedBlobStore(tmp_path / "shared"))
    update, model = killed.store_bytes(b"update"), killed.store_bytes(b"model")
    shared = SharedBlobStore(tmp_path / "shared")
    one, two = (SharedBlobView(tmp_path / name, shared) for name in ("one", "two"))
    assert one.claim_blob(update)
    assert not one.claim_blob(BlobRef(sha256=sha256(b"lost"), size=4))
    shared.remove_unclaimed()
    assert one.has_blob(update)
    assert not two.has_blob(update)
    assert not shared.blob_store.has_blob(model)


def test_a_blob_that_came_in_parts_is_shared_as_well(tmp_path):
    shared, payload = SharedBlobStore(tmp_path / "shared"), bytes(range(256)) * 16
    ref = BlobRef(sha256=sha256(payload), size=len(payload))
    cut = chunks.ManifestBuilder(ref, 1024, lambda offset, size: payload[offset : offset + size]).hash_chunks()
    for name in ("one", "two"):
        lodger = SharedBlobView(tmp_path / name, shared)
        assert lodger.open_part(cut) == bytes(4)
        for index in range(4):
            lodger.write_part(ref.sha256, *(index * 1024, payload[index * 1024 : (index + 1) * 1024]))
        lodger.finish_part(ref)
        assert lodger.verified_path(ref.sha256) == str(tmp_path / "shared" / ref.sha256)
        assert not list((tmp_path / name).iterdir())


def test_a_damaged_blob_is_not_taken_by_a_depot_that_shares(tmp_path):
    lodger = SharedBlobView(tmp_path / "one", SharedBlobStore(tmp_path / "shared"))
    wanted = BlobRef(sha256=sha256(b"right"), size=5)
    with pytest.raises(DamagedBlobError):
        lodger.store_small(b"wrong", wanted)
    assert lodger.files_by_last_use() == []


def test_what_is_put_lies_side_by_side_and_the_longest_unused_is_first(tmp_path):
    shared = SharedBlobStore(tmp_path / "shared")
    lodger = SharedBlobView(tmp_path / "one", shared)
    large = lodger.store_bytes(bytes(MAX_SMALL_BYTES + 1))
    small, other = lodger.store_bytes(b"small"), lodger.store_bytes(b"other")
    lodger.record_use(small.sha256)
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert names == {each.sha256 for each in (large, small, other)}
    assert [(sha256, size) for _, sha256, size in lodger.files_by_last_use()] == [
        (each.sha256, each.size) for each in (large, other, small)
    ]
    lodger.remove_all_but({small.sha256})
    assert [lodger.has_blob(each) for each in (large, other, small)] == [False, False, True]
    assert SharedBlobView(tmp_path / "one", SharedBlobStore(tmp_path / "shared")).files_by_last_use() == []


def test_a_durable_depot_that_is_alone_shares_a_file_and_another_process_reads_it(tmp_path):
    alone, other = BlobStore(tmp_path), BlobStore(tmp_path)
    alone.open_as_owner()
    ref = alone.store_small(b"update")
    alone.sync_small_blobs()
    assert [path.name for path in tmp_path.iterdir()] == ["small.pack"]
    assert alone.load(ref.sha256) == other.load(ref.sha256) == b"update"
    path = other.blob_path(ref.sha256)
    assert path.read_bytes() == b"update"
    alone.remove_blob(ref.sha256)
    assert not path.exists()
    assert (other.load(ref.sha256), (tmp_path / "small.pack").stat().st_size) == (None, 0)


def test_a_damaged_blob_of_a_shared_file_counts_as_absent(tmp_path):
    depot = BlobStore(tmp_path)
    depot.open_as_owner()
    ref = depot.store_small(b"update")
    pack = bytearray((tmp_path / "small.pack").read_bytes())
    pack[-1] ^= 1
    (tmp_path / "small.pack").write_bytes(pack)
    assert depot.load(ref.sha256) is None
    assert not depot.has_blob(ref)


def test_stowed_blobs_are_on_the_disk_after_one_wait_for_all(tmp_path):
    synced = []

    class File(OpenFile):
        def sync(self):
            synced.append("small.pack")

    class Counting(Disk):
        def open(self, path):
            return File(path, 0o600)

        def sync(self, path):
            synced.append(str(path))

    depot = BlobStore(tmp_path / "blobs", disk=Counting())
    depot.open_as_owner()
    synced.clear()
    for number in range(100):
        depot.store_small(b"%d" % number)
    assert synced == []
    depot.sync_small_blobs()
    depot.sync_small_blobs()
    assert synced == ["small.pack", str(tmp_path / "blobs")]
