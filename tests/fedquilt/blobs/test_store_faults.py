"""A depot on disks that are full, damaged or killed."""

import errno
import hashlib
import os
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
from depot_blobs import names
from forks import CONTEXT

from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobRef, StoreError
from fedquilt.host.disk import REAL, Disk
from tests.faults.disk import SimDisk, SimulatedFileSystem
from tests.faults.promises import DurableDisk, lost_blobs


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match=r"cannot make the folder in .*taken"):
        BlobStore(tmp_path / "taken")
    depot = BlobStore(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match=r"cannot store blob .* in .*gone"):
        depot.store_bytes(b"x")


def _store_for_ever(folder: Path, ready: SimpleQueue[int]) -> None:
    depot = BlobStore(folder)
    for number in range(1 << 30):
        depot.store_bytes(number.to_bytes(4, "big") * 50_000)
        if number == 3:
            ready.put(number)


def test_whatever_has_its_name_after_a_kill_is_whole(tmp_path):
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        ready = CONTEXT.SimpleQueue()
        child = CONTEXT.Process(target=_store_for_ever, args=(folder, ready))
        child.start()
        ready.get()
        child.kill()
        child.join()
        whole = [name for name in names(folder) if "." not in name]
        assert len(whole) >= 4
        assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == name for name in whole)


def test_a_damaged_blob_counts_as_absent_and_can_be_stored_again(tmp_path, caplog):
    payload = bytes(1000)
    for ask in (
        lambda depot, ref: depot.load(ref.sha256),
        lambda depot, ref: depot.blob_path(ref.sha256),
        lambda depot, ref: depot.has_blob(ref) or None,
    ):
        ref = BlobStore(tmp_path).store_bytes(payload)
        (tmp_path / ref.sha256).write_bytes(payload[:-1] + b"\1")
        depot = BlobStore(tmp_path)
        assert ask(depot, ref) is None
        assert (tmp_path / f"{ref.sha256}.damaged").is_file()
        assert depot.store_bytes(payload) == ref
        assert ask(depot, ref) is not None
    assert caplog.text.count("is damaged: its sha256 has changed") == 3
    BlobStore(tmp_path, lambda: time.time() + 2 * 86400).remove_all_but({ref.sha256})
    assert [path.name for path in tmp_path.iterdir()] == [ref.sha256]


def test_whether_a_blob_is_here_is_asked_without_reading_it_again(tmp_path, monkeypatch):
    hashed = []
    digest = Disk.hash_file
    monkeypatch.setattr(Disk, "hash_file", lambda disk, path: (hashed.append(str(path)), digest(disk, path))[1])
    ref = BlobStore(tmp_path).store_bytes(b"x" * 100)
    depot = BlobStore(tmp_path)
    for _ in range(3):
        assert depot.has_blob(ref)
        depot.record_use(ref.sha256)
    assert len(hashed) == 1
    depot.forget_verifications()
    assert depot.has_blob(ref)
    now_s = time.monotonic() + 3601.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert depot.has_blob(ref)
    os.utime(tmp_path / ref.sha256, (5, 5))
    assert depot.has_blob(ref)
    assert len(hashed) == 4


@pytest.mark.parametrize("opens", [BlobStore.load, BlobStore.verified_path, BlobStore.blob_path])
def test_a_bit_that_flips_after_a_blob_was_read_is_found_when_it_is_opened_again(tmp_path, opens):
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(b"x" * 100)
    assert opens(depot, ref.sha256) is not None
    before = (tmp_path / ref.sha256).stat()
    with (tmp_path / ref.sha256).open("r+b") as file:
        file.write(b"y")
    os.utime(tmp_path / ref.sha256, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opens(depot, ref.sha256) is None
    assert not depot.has_blob(ref)
    depot.store_bytes(b"x" * 100)
    assert opens(depot, ref.sha256) is not None


@pytest.mark.parametrize("opens", [BlobStore.load, BlobStore.verified_path, BlobStore.blob_path])
def test_a_blob_that_the_disk_does_not_read_is_named_and_one_that_is_gone_meanwhile_is_not_here(
    tmp_path, monkeypatch, opens
):
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(b"x" * 100)
    with monkeypatch.context() as patch:
        for name in ("read", "read_pieces"):
            patch.setattr(Disk, name, raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(StoreError, match=f"cannot read blob {ref.sha256[:12]} in .*: Input/output error"):
            opens(depot, ref.sha256)
        for name in ("read", "read_pieces"):
            patch.setattr(Disk, name, raising(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))
        assert opens(depot, ref.sha256) is None
    assert opens(depot, ref.sha256) is not None


def raising(error: Exception) -> Callable[..., None]:
    def called(*args: object) -> None:
        raise error

    return called


def test_a_blob_counts_as_stored_only_once_its_name_is_synced(tmp_path):
    failing = [False]

    def gate(what, where):
        return OSError(errno.EIO, "Input/output error") if failing[0] and where == Path("/home/blobs") else None

    platter = SimulatedFileSystem("/home", tmp_path)
    depot = BlobStore(Path("/home/blobs"), disk=SimDisk(platter, gate))
    failing[0] = True
    with pytest.raises(StoreError, match="Input/output error"):
        depot.store_bytes(b"tensors")
    failing[0] = False
    ref = BlobRef(sha256=hashlib.sha256(b"tensors").hexdigest(), size=7)
    assert lost_blobs(DurableDisk(platter), "/home/blobs", [ref.sha256]) == [ref.sha256]
    assert depot.has_blob(ref)
    assert lost_blobs(DurableDisk(platter), "/home/blobs", [ref.sha256]) == []


def test_a_copy_that_cannot_be_begun_leaves_no_file_open(tmp_path):
    given, taken = tmp_path / "given", tmp_path / "taken"
    given.write_bytes(b"x")
    taken.write_bytes(b"")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(FileExistsError):
            REAL.copy_untrusted(given, taken, 1)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_no_access_to_a_disk_leaves_a_file_open(tmp_path):
    path = tmp_path / "file"
    before = os.listdir("/proc/self/fd")
    REAL.write(path, b"abc")
    REAL.write_at(path, b"d", 1)
    REAL.resize(path, 5)
    REAL.sync(path)
    REAL.read_into(path, bytearray(3), 0)
    assert REAL.data_ranges(path)
    assert not REAL.is_locked(path)
    with pytest.raises(FileExistsError):
        REAL.write(path, b"x", new=True)
    assert (path.read_bytes(), len(os.listdir("/proc/self/fd"))) == (b"adc\0\0", len(before))


def test_a_blob_is_stored_over_a_damaged_one(tmp_path):
    payload = b"x" * 100
    ref = BlobStore(tmp_path).store_bytes(payload)
    (tmp_path / ref.sha256).write_bytes(b"y" * 100)
    assert BlobStore(tmp_path).store_bytes(payload) == ref
    assert BlobStore(tmp_path).load(ref.sha256) == payload
