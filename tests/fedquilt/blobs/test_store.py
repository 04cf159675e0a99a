from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, StoreError
from fedquilt.disk import Disk

KIB = 1024
DAY_S = 24 * 3600.0


def ref_of(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


# 5 chunks of 8 KiB, no two alike, the last one short
BLOB = b"".join(hashlib.sha256(bytes([number])).digest() * 256 for number in range(5))[:-100]
REF = ref_of(BLOB)


def cut(chunk: int = 8 * KIB) -> wire.Manifest:
    return chunks.cut(REF, chunk, lambda offset, size: BLOB[offset : offset + size])


def write_chunk(depot: Depot, manifest: wire.Manifest, index: int) -> None:
    offset, size = chunks.extent(manifest, index)
    depot.write(manifest.sha256, offset, BLOB[offset : offset + size])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- whole blobs --


def test_a_blob_is_found_by_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    """One flat file of that name, and nothing else."""
    depot = Depot(tmp_path / "blobs")
    assert depot.put(BLOB) == REF
    assert depot.has(REF)
    assert depot.ref(REF.sha256) == REF
    assert depot.path(REF.sha256) == tmp_path / "blobs" / REF.sha256
    assert (tmp_path / "blobs" / REF.sha256).read_bytes() == BLOB
    assert names(tmp_path / "blobs") == {REF.sha256}


def test_storing_the_same_bytes_again_writes_nothing(tmp_path: Path) -> None:
    """The file stays the same one."""
    depot = Depot(tmp_path)
    depot.put(BLOB)
    before = (tmp_path / REF.sha256).stat().st_ino
    depot.put(BLOB)
    assert (tmp_path / REF.sha256).stat().st_ino == before


def test_a_file_cut_short_is_not_taken_for_the_blob(tmp_path: Path) -> None:
    """Its size tells; storing again mends it."""
    depot = Depot(tmp_path)
    (tmp_path / REF.sha256).write_bytes(BLOB[:-1])
    assert not depot.has(REF)
    depot.put(BLOB)
    assert (tmp_path / REF.sha256).read_bytes() == BLOB


def test_a_blob_is_read_piece_by_piece(tmp_path: Path) -> None:
    """Fewer bytes at the end."""
    depot = Depot(tmp_path)
    depot.put(b"hello")
    assert depot.read(ref_of(b"hello").sha256, 1, 3) == b"ell"
    assert depot.read(ref_of(b"hello").sha256, 3, 10) == b"lo"


def test_what_is_not_here_is_said_so(tmp_path: Path) -> None:
    """None or an error, never an empty blob."""
    depot = Depot(tmp_path)
    assert depot.path(REF.sha256) is None
    assert depot.ref(REF.sha256) is None
    assert not depot.has(REF)
    with pytest.raises(StoreError, match="cannot read blob"):
        depot.read(REF.sha256, 0, 1)


@pytest.mark.parametrize("name", ["../secret", "", "a" * 63, "A" * 64, "a" * 64 + "\n", "/etc/passwd"])
def test_only_a_sha256_names_a_blob(tmp_path: Path, name: str) -> None:
    """Nothing outside the folder can be named."""
    with pytest.raises(StoreError, match="names no blob"):
        Depot(tmp_path).path(name)


def test_a_file_is_linked_where_the_file_system_can(tmp_path: Path) -> None:
    """A donor of 100 MB takes its place once."""
    source = tmp_path / "donor"
    source.write_bytes(BLOB)
    depot = Depot(tmp_path / "blobs")
    assert depot.put_file(source) == REF
    assert (tmp_path / "blobs" / REF.sha256).samefile(source)
    assert depot.put_file(source, REF) == REF
    assert names(tmp_path / "blobs") == {REF.sha256}


def test_a_link_is_followed_to_its_file(tmp_path: Path) -> None:
    """The depot holds bytes, not a path that may go away."""
    (tmp_path / "donor").write_bytes(BLOB)
    (tmp_path / "alias").symlink_to(tmp_path / "donor")
    depot = Depot(tmp_path / "blobs")
    depot.put_file(tmp_path / "alias")
    assert not (tmp_path / "blobs" / REF.sha256).is_symlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_file_on_another_file_system_is_copied(tmp_path: Path) -> None:
    """Links do not cross file systems."""
    source = Path("/dev/shm") / f"fedquilt-test-{os.getpid()}"
    try:
        source.write_bytes(BLOB)
        assert Depot(tmp_path / "blobs").put_file(source) == REF
    finally:
        source.unlink()
    assert (tmp_path / "blobs" / REF.sha256).read_bytes() == BLOB


def test_a_file_that_is_not_what_was_expected_is_refused(tmp_path: Path) -> None:
    """And leaves nothing behind."""
    source = tmp_path / "donor"
    source.write_bytes(BLOB[:-1])
    depot = Depot(tmp_path / "blobs")
    with pytest.raises(StoreError, match=r"donor is not what it should be .* make it anew"):
        depot.put_file(source, REF)
    assert names(tmp_path / "blobs") == set()
    with pytest.raises(StoreError, match=r"cannot store .*absent"):
        depot.put_file(tmp_path / "absent")


def test_dropping_forgets_a_blob_whole_or_in_part(tmp_path: Path) -> None:
    """Dropping what is not there is fine."""
    depot = Depot(tmp_path)
    depot.put(b"whole")
    depot.resume(cut())
    depot.drop(ref_of(b"whole").sha256)
    depot.drop(REF.sha256)
    depot.drop(REF.sha256)
    assert names(tmp_path) == set()


def test_garbage_is_what_nobody_names(tmp_path: Path) -> None:
    """Other files in the folder are not ours to remove."""
    depot = Depot(tmp_path)
    kept, lost = depot.put(b"kept"), depot.put(b"lost")
    (tmp_path / "README").write_text("mine")
    depot.keep({kept.sha256})
    assert depot.has(kept)
    assert not depot.has(lost)
    assert (tmp_path / "README").exists()


def test_parts_are_kept_for_a_day_and_no_longer(tmp_path: Path) -> None:
    """A transfer that a restart interrupted goes on; one that nobody continues is garbage."""
    depot = Depot(tmp_path)
    depot.resume(cut())
    (tmp_path / "0123.tmp").write_bytes(b"left by a crash")
    written_s = (tmp_path / f"{REF.sha256}.part").stat().st_mtime
    Depot(tmp_path, wall_clock=lambda: written_s + DAY_S - 60).keep(set())
    assert names(tmp_path) == {f"{REF.sha256}.part", "0123.tmp"}
    Depot(tmp_path, wall_clock=lambda: written_s + DAY_S + 60).keep(set())
    assert names(tmp_path) == set()


def test_a_part_of_what_is_here_whole_is_garbage(tmp_path: Path) -> None:
    """It came another way meanwhile."""
    depot = Depot(tmp_path)
    depot.resume(cut())
    depot.put(BLOB)
    depot.keep({REF.sha256})
    assert names(tmp_path) == {REF.sha256}


# -- parts --


def test_a_complete_part_becomes_the_blob(tmp_path: Path) -> None:
    """Chunks in any order; the part is gone."""
    depot = Depot(tmp_path)
    manifest = cut()
    assert bytes(depot.resume(manifest)) == bytes(5)
    for index in (4, 0, 2, 1, 3):
        write_chunk(depot, manifest, index)
    depot.finish(REF)
    assert (tmp_path / REF.sha256).read_bytes() == BLOB
    assert names(tmp_path) == {REF.sha256}


def test_a_part_is_not_the_blob_before_it_is_finished(tmp_path: Path) -> None:
    """Even with all its chunks."""
    depot = Depot(tmp_path)
    depot.resume(cut())
    for index in range(5):
        write_chunk(depot, cut(), index)
    assert depot.path(REF.sha256) is None
    assert not depot.has(REF)


def test_a_part_goes_on_from_the_chunks_that_are_right(tmp_path: Path) -> None:
    """After a restart; a chunk that a power cut left half written counts as absent."""
    Depot(tmp_path).resume(cut())
    for index in (0, 3, 4):
        write_chunk(Depot(tmp_path), cut(), index)
    with open(tmp_path / f"{REF.sha256}.part", "r+b") as file:
        file.seek(3 * 8 * KIB + 4 * KIB)
        file.write(bytes(4 * KIB))
    assert list(Depot(tmp_path).resume(cut())) == [1, 0, 0, 0, 1]


def test_a_part_goes_on_though_it_is_cut_otherwise_now(tmp_path: Path) -> None:
    """Through a broker with smaller packets: chunks 0 and 3 of 8 KiB are chunks 0, 1, 6 and 7 of 4 KiB."""
    Depot(tmp_path).resume(cut())
    for index in (0, 3):
        write_chunk(Depot(tmp_path), cut(), index)
    assert list(Depot(tmp_path).resume(cut(4 * KIB))) == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0]


def test_a_part_whose_size_was_lost_starts_again(tmp_path: Path) -> None:
    """The power failed just after the file was made."""
    (tmp_path / f"{REF.sha256}.part").write_bytes(b"")
    assert list(Depot(tmp_path).resume(cut())) == [0] * 5


def test_a_part_with_other_content_than_its_name_is_thrown_away(tmp_path: Path) -> None:
    """A manifest may lie about the chunks; the whole's sha256 decides."""
    depot = Depot(tmp_path)
    depot.resume(cut())
    with pytest.raises(DamagedBlobError, match="arrived with other content"):
        depot.finish(REF)
    assert names(tmp_path) == set()


def test_an_empty_blob_is_a_blob(tmp_path: Path) -> None:
    """Of size 0."""
    depot = Depot(tmp_path)
    ref = ref_of(b"")
    assert list(depot.resume(wire.Manifest(sha256=ref.sha256, size=0, chunk=KIB, digests=""))) == []
    depot.finish(ref)
    assert depot.has(ref)


# -- what goes wrong --


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file stands where the folder should be; a folder has gone."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match=r"cannot make the folder in .*taken"):
        Depot(tmp_path / "taken")
    depot = Depot(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match=r"cannot store blob .* in .*gone"):
        depot.put(b"x")


def _store_on_a_disk_of(limit_bytes: int, folder: Path, results: multiprocessing.SimpleQueue[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    depot = Depot(folder)
    for attempt in (lambda: depot.put(BLOB), lambda: depot.resume(cut())):
        try:
            attempt()
            results.put("stored")
        except StoreError as error:
            results.put(str(error))


def test_a_write_that_fails_half_way_leaves_no_half_blob(tmp_path: Path) -> None:
    """The kernel refuses to write beyond 10,000 bytes, as a full disk would."""
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_store_on_a_disk_of, args=(10_000, tmp_path, results))
    child.start()
    child.join(30)
    assert "cannot store blob" in results.get()
    assert "cannot receive blob" in results.get()
    assert not Depot(tmp_path).has(REF)
    assert not any(name.endswith(".tmp") for name in names(tmp_path))


def _store_for_ever(folder: Path, ready: multiprocessing.SimpleQueue[int]) -> None:
    depot = Depot(folder)
    for number in range(1 << 30):
        depot.put(number.to_bytes(4, "big") * 50_000)
        if number == 3:
            ready.put(number)


def test_whatever_has_its_name_after_a_kill_is_whole(tmp_path: Path) -> None:
    """A process that stores without end is killed at some moment, several times."""
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        ready: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
        child = context.Process(target=_store_for_ever, args=(folder, ready))
        child.start()
        ready.get()
        child.kill()
        child.join(30)
        whole = [name for name in names(folder) if "." not in name]
        assert len(whole) >= 4
        assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == name for name in whole)


def test_a_damaged_blob_counts_as_absent_and_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever it is asked for; the damaged file is kept aside for a day."""
    payload = bytes(1000)
    for ask in (
        lambda depot, ref: depot.load(ref.sha256),
        lambda depot, ref: depot.path(ref.sha256),
        lambda depot, ref: depot.has(ref) or None,
    ):
        ref = Depot(tmp_path).put(payload)
        (tmp_path / ref.sha256).write_bytes(payload[:-1] + b"\1")
        depot = Depot(tmp_path)
        assert ask(depot, ref) is None
        assert (tmp_path / f"{ref.sha256}.damaged").is_file()
        assert depot.put(payload) == ref
        assert ask(depot, ref) is not None
    assert caplog.text.count("is damaged: its bytes are not those it was stored with") == 3
    Depot(tmp_path, lambda: time.time() + 2 * 86400).keep({ref.sha256})
    assert [path.name for path in tmp_path.iterdir()] == [ref.sha256]


def test_a_blob_is_stored_over_a_damaged_one(tmp_path: Path) -> None:
    """Whoever has its bytes mends it."""
    payload = b"x" * 100
    ref = Depot(tmp_path).put(payload)
    (tmp_path / ref.sha256).write_bytes(b"y" * 100)
    assert Depot(tmp_path).put(payload) == ref
    assert Depot(tmp_path).load(ref.sha256) == payload


def test_whether_a_blob_is_here_is_asked_without_reading_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use of it changes nothing; after an hour, a change or a doubt it is hashed again."""
    hashed: list[str] = []
    digest = Disk.digest
    monkeypatch.setattr(Disk, "digest", lambda disk, path: (hashed.append(str(path)), digest(disk, path))[1])
    ref = Depot(tmp_path).put(b"x" * 100)
    depot = Depot(tmp_path)
    for _ in range(3):
        assert depot.has(ref)
        depot.touch(ref.sha256)
    assert len(hashed) == 1
    depot.doubt()
    assert depot.has(ref)
    now_s = time.monotonic() + 3601.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert depot.has(ref)
    os.utime(tmp_path / ref.sha256, (5, 5))
    assert depot.has(ref)
    assert len(hashed) == 4


@pytest.mark.parametrize("opens", [Depot.load, Depot.file, Depot.path])
def test_a_bit_that_flips_after_a_blob_was_read_is_found_when_it_is_opened_again(
    tmp_path: Path, opens: Callable[[Depot, str], object]
) -> None:
    """By the same process, though the file has kept its time, its size and its inode."""
    depot = Depot(tmp_path)
    ref = depot.put(b"x" * 100)
    assert opens(depot, ref.sha256) is not None
    before = (tmp_path / ref.sha256).stat()
    with (tmp_path / ref.sha256).open("r+b") as file:
        file.write(b"y")
    os.utime(tmp_path / ref.sha256, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opens(depot, ref.sha256) is None
    assert not depot.has(ref)
    depot.put(b"x" * 100)
    assert opens(depot, ref.sha256) is not None


@pytest.mark.parametrize("opens", [Depot.load, Depot.file, Depot.path])
def test_a_blob_that_the_disk_does_not_read_is_named_and_one_that_is_gone_meanwhile_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: Callable[[Depot, str], object]
) -> None:
    """The file is there when it is looked at, and cannot be read a moment later."""
    depot = Depot(tmp_path)
    ref = depot.put(b"x" * 100)
    with monkeypatch.context() as patch:
        for name in ("read", "pieces"):
            patch.setattr(Disk, name, raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(StoreError, match=f"cannot read blob {ref.sha256[:12]} in .*: Input/output error"):
            opens(depot, ref.sha256)
        for name in ("read", "pieces"):
            patch.setattr(Disk, name, raising(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))
        assert opens(depot, ref.sha256) is None
    assert opens(depot, ref.sha256) is not None


def raising(error: Exception) -> Callable[..., None]:
    def called(*args: object) -> None:
        raise error

    return called
