"""Blob store: a folder of files that are named by the sha256 of their bytes.

    <sha256>          complete: verified, on disk, never changed
    <sha256>.part     incomplete: as long as the blob, with holes where chunks are missing
    <sha256>.damaged  formerly complete, now with other bytes: unused, and removed after a day
    <random>.tmp      being written, removed after a day if the writing process was killed
    <random>.own      being written by the process that called `open_as_owner`, removed at its next start
    small.pack        small blobs that the owner stores for a short time (`store_small`)

A file gets its final name only when its bytes are verified and on the disk, so that a file with that name is complete
whenever the process is killed or the power fails. There is no record of a part's chunks, which could name data that a
power failure lost. `open_part` gets the written ranges from the file system and verifies them with the manifest.

A disk may return other bytes than were written, and a flipped bit does not change the times of a file. A blob is
therefore hashed whenever it is opened (`load`, `verified_path`), and a damaged blob counts as missing. An unchanged
file is hashed only once an hour for `has_blob`, in a store that is not durable, and if the reader hashes the file.

ONNX graphs rely on flat names: they name their external data by sha256, in the same folder.

A work item of another thread names blobs in its result, which the owner records later. Blobs that the work item stores
or finds are pinned until then (`pin_during`), and pinned blobs are not removed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.pack_file import PackFile, read_foreign_blob
from fedquilt.core import BlobRef, StoreError
from fedquilt.host.disk import REAL, Disk, PathInfo, StrPath, disk_errors

T = TypeVar("T")

log = logging.getLogger("fedquilt.blobs.store")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STALE_AFTER_S: Final = 24 * 3600.0
PACK_FILE_NAME: Final = "small.pack"
MAX_SMALL_BYTES: Final = 128 * 1024  # size of the largest blob in the pack file
MIN_LARGE_BYTES: Final = 4 << 20  # size from which the blocks of a file are freed in a thread
MAX_OPEN_FILES: Final = 64  # queued files, above which files are freed in the caller's thread


class BlobStore:
    """Folder of blobs, which several processes may use. A durable store syncs files before they are named."""

    def __init__(
        self,
        folder: Path,
        wall_clock: Callable[[], float] = time.time,
        *,
        durable: bool = True,
        create: bool = True,
        disk: Disk = REAL,
    ) -> None:
        self.folder, self.disk = folder, disk
        self._prefix = os.path.join(folder, "")
        self._durable = durable
        self._wall_clock = wall_clock
        self._verification_cache = VerificationCache(disk)
        self._deleter = BackgroundDeleter(disk)
        self._temporary_suffix = "tmp"
        self._pins: dict[int, set[str]] = {}  # id of a work item -> sha256 of the blobs that it stored or found
        self._thread_state = threading.local()  # attribute `pins`: the pins of this thread's work item
        self._pin_lock = threading.Lock()  # held from the check of the pins until a blob is removed
        with self._report_disk_errors("make the folder"):
            if create:
                (disk.make_durable_folder if durable else disk.make_folder)(folder)
            self._is_folder_unsynced = durable and create  # an earlier process may have ended before a sync
            self._pack = None if durable else PackFile(self._prefix + PACK_FILE_NAME, disk)

    def open_as_owner(self) -> None:
        """Open the store as its owner, the only process that stores small blobs in the pack file."""
        with self._report_disk_errors("open the small blobs"):
            self._pack = self._pack or PackFile(self._prefix + PACK_FILE_NAME, self.disk, verify_on_load=self._durable)
            if self._temporary_suffix != "own":
                self._temporary_suffix = "own"
                for file in self._iterate_stored_files():
                    if file.name.endswith(".own"):
                        self._deleter.unlink(f"{self._prefix}{file.name}")

    def sync_small_blobs(self) -> None:
        """Sync the pack file of a durable store. `store_small` does not sync."""
        if self._pack is not None and self._durable:
            with self._report_disk_errors("store blobs"):
                self._pack.sync()

    def pin_during(
        self, work_item: Callable[[], T], callback: Callable[[Callable[[], T], float], None]
    ) -> tuple[Callable[[], T], Callable[[Callable[[], T], float], None]]:
        """Return both functions, wrapped to keep the work item's blobs pinned until the callback has run."""
        pins = set[str]()

        def run_pinned() -> T:
            with self._pin_lock:
                self._pins[id(pins)] = pins
            self._thread_state.pins = pins
            try:
                return work_item()
            finally:
                del self._thread_state.pins

        def call_and_unpin(result: Callable[[], T], now_s: float) -> None:
            try:
                callback(result, now_s)
            finally:
                with self._pin_lock:
                    self._pins.pop(id(pins), None)

        return run_pinned, call_and_unpin

    def pinned_blobs(self) -> set[str]:
        with self._pin_lock:
            return set[str]().union(*self._pins.values())

    def _pin(self, sha256: str) -> None:
        # Callers pin a blob before they look for it, so that no other thread removes the blob in between.
        pins: set[str] | None = getattr(self._thread_state, "pins", None)
        if pins is not None:
            with self._pin_lock:
                pins.add(sha256)

    def _is_pinned(self, sha256: str) -> bool:
        return any(sha256 in pins for pins in self._pins.values())

    def blob_path(self, sha256: str) -> Path | None:
        """Return the path of an intact blob, or None if missing or damaged. Raise StoreError on disk errors."""
        path = self.verified_path(sha256)
        return None if path is None else Path(path)

    def verified_path(self, sha256: str, *, caller_hashes: bool = False) -> str | None:
        """Return the path of an intact blob, or None if missing or damaged.

        A blob of the pack file is stored as a file first. With `caller_hashes`, the caller must verify the file, and
        the store hashes the file at most once an hour. Raise StoreError if the disk fails.
        """
        path = self._file_path(sha256)
        self._pin(sha256)
        with self._report_disk_errors(f"read blob {sha256[:12]}"):
            with suppress(FileNotFoundError):  # another process may remove the blob at this moment
                if self._verified_file(sha256, force_hash=self._durable and not caller_hashes) is not None:
                    return path
            if (payload := self.load_packed(sha256)) is not None:
                self._store_payload(payload, sha256)
        return None if payload is None else path

    def find_ref(self, sha256: str) -> BlobRef | None:
        """Return the reference of a stored blob without verification, or None if missing."""
        self._pin(sha256)
        if self._pack is not None and (size := self._pack.blob_size(sha256)) is not None:
            return BlobRef(sha256=sha256, size=size)
        info = None
        with suppress(OSError):
            info = self.disk.stat(self._file_path(sha256))
        return None if info is None else BlobRef(sha256=sha256, size=info.size)

    def has_blob(self, ref: BlobRef) -> bool:
        """Return whether a blob is stored and undamaged. Disk errors count as missing."""
        with suppress(StoreError):
            return self.is_intact(ref)
        return False

    def claim_blob(self, ref: BlobRef) -> bool:
        """Return whether a blob that an earlier process of this device has stored is undamaged."""
        return self.has_blob(ref)

    def is_intact(self, ref: BlobRef) -> bool:
        """Return whether a blob is stored and undamaged, or raise StoreError if the disk fails."""
        self._pin(ref.sha256)
        if self._pack is not None and (size := self._pack.blob_size(ref.sha256)) is not None:
            return size == ref.size
        with self._report_disk_errors(f"look for blob {ref.sha256[:12]}"):
            if (info := self._verified_file(ref.sha256)) is not None:
                self._sync_folder()
        return info is not None and info.size == ref.size

    def forget_verifications(self) -> None:
        """Hash every blob again at its next use. Call after an error that the disk may have caused."""
        self._verification_cache.forget()

    def discard_damaged(self, sha256: str) -> None:
        """Mark a damaged blob as missing. Its file is kept for a day as `.damaged`."""
        with self._report_disk_errors(f"rename the damaged blob {sha256[:12]}"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.remove_blob(sha256)
            if self.disk.is_file(self._file_path(sha256)):
                self._move_damaged_aside(sha256)

    def read_range(self, sha256: str, offset: int, size: int) -> bytes:
        """Return up to `size` unverified bytes of a blob from `offset`. Raise StoreError if missing."""
        with self._report_disk_errors(f"read blob {sha256[:12]}"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.read_range(sha256, offset, size)
            return self.disk.read(self._file_path(sha256), offset, size)

    def open_blob_file(self, sha256: str) -> int:
        """Return a file descriptor of a blob's file for reading, which the caller closes, or raise StoreError."""
        with self._report_disk_errors(f"read blob {sha256[:12]}"):
            return self.disk.open_for_reading(self._file_path(sha256))

    def load(self, sha256: str) -> bytes | None:
        """Return a blob's verified bytes, or None if missing or damaged. Raise StoreError on disk errors."""
        self._pin(sha256)
        with self._report_disk_errors(f"read blob {sha256[:12]}"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.load(sha256)
            try:
                is_verified = not self._durable and self._verified_file(sha256) is not None
                payload = self._verification_cache.load(self._file_path(sha256), sha256, is_verified=is_verified)
                if payload is None:
                    self._move_damaged_aside(sha256)
                return payload
            except (FileNotFoundError, IsADirectoryError):
                return self.load_packed(sha256)

    def load_packed(self, sha256: str) -> bytes | None:
        """Return a verified blob from the pack file of the store's owner, or None if missing or damaged."""
        with self._report_disk_errors(f"read blob {sha256[:12]}"):
            if self._pack is not None:
                return self._pack.load(sha256)
            return read_foreign_blob(self._prefix + PACK_FILE_NAME, self.disk, sha256)

    def store_bytes(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store bytes and return their reference, or raise DamagedBlobError if they are not `expected`."""
        ref = chunks.ref_from_bytes(payload, expected)
        self._pin(ref.sha256)
        with suppress(OSError):
            # A copy in the pack file does not count, because its owner soon removes it.
            if self._verified_file(ref.sha256) is not None:
                self._sync_folder()
                return ref
        with self._report_disk_errors(f"store blob {ref.sha256[:12]}"):
            self._store_payload(payload, ref.sha256)
        return ref

    def store_small(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store a blob for a short time, in the pack file if this process owns the store, else as a file."""
        if self._pack is None or len(payload) > MAX_SMALL_BYTES:
            return self.store_bytes(payload, expected)
        ref = chunks.ref_from_bytes(payload, expected)
        if not self.has_blob(ref):
            self.name_blob(ref, self.write_unnamed(ref, payload))
        return ref

    def store_written(self, write_file: Callable[[Path], None]) -> BlobRef:
        """Store the file that `write_file` creates at the path it receives, and return the blob's reference."""
        with self._report_disk_errors("store a blob"), self._temporary_path() as path:
            write_file(Path(path))
            if not self.has_blob(ref := self._sync_and_hash(path)):
                self._move_into_place(path, ref.sha256)
        return ref

    def write_unnamed(self, ref: BlobRef, payload: bytes) -> int:
        """Write a blob to the pack file and return its offset. Call `name_blob` or `discard_unnamed` next."""
        assert self._pack is not None
        with self._report_disk_errors(f"store blob {ref.sha256[:12]}"):
            return self._pack.write_blob(ref.sha256, payload)

    def name_blob(self, ref: BlobRef, offset: int) -> None:
        assert self._pack is not None
        self._pack.register_blob(ref.sha256, offset, ref.size)

    def discard_unnamed(self, ref: BlobRef, offset: int) -> None:
        assert self._pack is not None
        self._pack.free_space(offset, ref.size)

    def store_untrusted_file(self, path: StrPath, expected: BlobRef) -> None:
        """Store a copy of a file that others may change, or raise DamagedBlobError if not `expected`."""
        if self.has_blob(expected):
            return
        with self._report_disk_errors(f"store {path}"), self._temporary_path() as temporary:
            digest = self.disk.copy_untrusted(path, temporary, expected.size)
            self._require_expected(path, self._sync_and_hash(temporary, digest), expected)
            self._move_into_place(temporary, expected.sha256)

    def store_file(self, path: StrPath, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        """Store a file by a hard link if the file system supports links, else by a copy.

        A linked file must not be changed in place afterwards, but may be replaced. With `move` the file is moved
        instead, or copied to another file system. Raise DamagedBlobError if the file is not `expected`.
        """
        if expected is not None and self.has_blob(expected):
            return expected
        with self._report_disk_errors(f"store {path}"), self._temporary_path() as temporary:
            try:
                if move:
                    self.disk.replace(path, temporary)
                else:
                    self.disk.hard_link(path, temporary)
            except OSError:  # another file system, or one without links
                self.disk.copy(path, temporary)
            ref = self._sync_and_hash(temporary)
            self._require_expected(path, ref, expected)
            if not self.has_blob(ref):
                self._move_into_place(temporary, ref.sha256)
        return ref

    def adopt_file(self, path: str, ref: BlobRef) -> None:
        """Move a file into the store without hash and sync. The caller guarantees that the file is the blob."""
        with self._report_disk_errors(f"store {path}"):
            if self.has_blob(ref):
                self.disk.unlink(path)
            else:
                self.disk.replace(path, self._file_path(ref.sha256))
                self._verification_cache.record_verified(self._file_path(ref.sha256), ref.sha256)

    def remove_blob(self, sha256: str) -> None:
        with self._report_disk_errors(f"remove blob {sha256[:12]}"), self._pin_lock:
            if self._is_pinned(sha256):
                return
            if self._pack is not None and sha256 in self._pack:
                self._pack.remove_blob(sha256)  # the blob may have a file as well
                if not self.disk.is_file(self._file_path(sha256)):
                    return
            self._verification_cache.forget(sha256)
            for path in (self._file_path(sha256), self._part_path(sha256)):
                self._deleter.unlink(path)

    def remove_all_but(self, kept_blobs: set[str]) -> None:
        """Remove all blobs but `kept_blobs` (sha256) and pinned blobs.

        Parts of stored blobs are removed too. Other parts, damaged and temporary files are removed a day after their
        last write.
        """
        with self._report_disk_errors("collect garbage"):
            for sha256 in () if self._pack is None else set(self._pack.blob_names()) - kept_blobs:
                with self._pin_lock:
                    if not self._is_pinned(sha256):
                        self._pack.remove_blob(sha256)  # type: ignore[union-attr]
            for file in self._iterate_stored_files():
                sha256, _, kind = file.name.partition(".")
                is_stale = kind != "own" and self._wall_clock() - file.mtime_ns / 1e9 >= _STALE_AFTER_S
                is_superfluous = kind == "part" and self.find_ref(sha256) is not None
                with self._pin_lock:
                    is_kept = sha256 in kept_blobs or self._is_pinned(sha256)
                    if (is_stale or is_superfluous) if kind else not is_kept:
                        self._verification_cache.forget(file.name)
                        self._deleter.unlink(f"{self._prefix}{file.name}")

    def files_by_last_use(self) -> list[tuple[int, str, int]]:
        """Return time of last use in ns, sha256 and size of every file and part, least recently used first."""
        with self._report_disk_errors("list blobs"):
            return sorted(
                (file.mtime_ns, file.name.partition(".")[0], file.size) for file in self._iterate_stored_files()
            )

    def record_use(self, sha256: str) -> None:
        with self._report_disk_errors(f"touch blob {sha256[:12]}"):
            self._verification_cache.touch(self._file_path(sha256), sha256)

    def open_part(self, manifest: wire.BlobManifest) -> bytearray:
        """Open or create a blob's part and hash its chunks. Return one byte per chunk, 1 if verified."""
        stored_chunks = bytearray(chunks.chunk_count(manifest))
        with self._report_disk_errors(f"receive blob {manifest.sha256[:12]}"):
            part = self._part_path(manifest.sha256)
            self.disk.resize(part, manifest.size)
            for start, end in self.disk.data_ranges(part):
                # Only chunks that begin within a written range can be complete.
                for index in range(-(-start // manifest.chunk), -(-end // manifest.chunk)):
                    offset, size = chunks.chunk_extent(manifest, index)
                    stored_chunks[index] = chunks.is_valid_chunk(manifest, index, self.disk.read(part, offset, size))
        return stored_chunks

    def write_part(self, sha256: str, offset: int, payload: bytes | memoryview) -> None:
        with self._report_disk_errors(f"receive blob {sha256[:12]}"):
            self.disk.write_at(self._part_path(sha256), payload, offset)

    def finish_part(self, ref: BlobRef, digest: str | None = None) -> None:
        """Verify a complete part and rename it to the blob. `digest` is the part's sha256, if computed before.

        A part with other content is deleted and raises DamagedBlobError.
        """
        part = self._part_path(ref.sha256)
        with self._report_disk_errors(f"complete blob {ref.sha256[:12]}"):
            if self._sync_and_hash(part, digest) != ref:
                self.disk.unlink(part)
                raise chunks.damaged_arrival_error(ref)
            self._move_into_place(part, ref.sha256)

    def _report_disk_errors(self, action: str) -> disk_errors:
        return disk_errors(f"{action} in {self.folder}", "free some space or use another folder")

    def _file_path(self, sha256: str) -> str:
        if not _DIGEST.fullmatch(sha256):
            raise StoreError(f"blob name {sha256[:80]!r} is not a sha256 in hex")
        return f"{self._prefix}{sha256}"

    def _part_path(self, sha256: str) -> str:
        return f"{self._file_path(sha256)}.part"

    def _iterate_stored_files(self) -> Iterator[PathInfo]:
        for entry in self.disk.entries(self.folder):
            sha256, _, kind = entry.name.partition(".")
            if kind in ("tmp", "own") or (kind in ("", "part", "damaged") and _DIGEST.fullmatch(sha256)):
                yield entry

    def _verified_file(self, sha256: str, *, force_hash: bool = False) -> PathInfo | None:
        """Return information on a blob's file, or None if missing or damaged. A damaged file is renamed."""
        path = self._file_path(sha256)
        info = self.disk.stat(path)
        if info is None or info.is_dir:
            return None
        if not self._verification_cache.is_verified(path, info, sha256, force_hash=force_hash):
            self._move_damaged_aside(sha256)
            return None
        return info

    def _move_damaged_aside(self, sha256: str) -> None:
        path = self._file_path(sha256)
        log.warning("blob %s in %s is damaged: its sha256 has changed", sha256[:12], self.folder)
        self._verification_cache.forget(sha256)
        self.disk.touch(path)  # the file is removed a day after this time
        self.disk.replace(path, f"{path}.damaged")

    def _sync_and_hash(self, path: str, digest: str | None = None) -> BlobRef:
        if self._durable:
            self.disk.sync(path)
        info = self.disk.stat(path)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return BlobRef(sha256=digest or self.disk.hash_file(path), size=info.size)

    @staticmethod
    def _require_expected(path: StrPath, ref: BlobRef, expected: BlobRef | None) -> None:
        if expected not in (None, ref):
            raise chunks.DamagedBlobError(f"{path} is damaged: its sha256 is {ref.sha256[:12]}, create the file again")

    def _store_payload(self, payload: bytes, sha256: str) -> None:
        with self._temporary_path() as path:
            self.disk.write(path, payload, new=True)
            if self._durable:
                self.disk.sync(path)
            self._move_into_place(path, sha256)

    @contextmanager
    def _temporary_path(self) -> Iterator[str]:
        path = f"{self._prefix}{os.urandom(16).hex()}.{self._temporary_suffix}"
        try:
            yield path
        finally:
            self.disk.unlink(path)

    def _move_into_place(self, path: str, sha256: str) -> None:
        self._is_folder_unsynced = self._durable
        self.disk.replace(path, self._file_path(sha256))
        self._verification_cache.record_verified(self._file_path(sha256), sha256)
        self._sync_folder()

    def _sync_folder(self) -> None:
        if self._is_folder_unsynced:
            self.disk.sync(self.folder)
            self._is_folder_unsynced = False


class BackgroundDeleter:
    """Deleter of files in one folder.

    A thread frees the blocks of large files. To free the blocks of 96 MB takes 28 to 49 ms on ext4 with `discard`, so
    that a round with many updates would stop for a second or more. An open file loses its name at once. Its blocks are
    freed when the thread, or the end of the process, closes the file.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open_slots = threading.Semaphore(MAX_OPEN_FILES)

    def unlink(self, path: str) -> None:
        file = self._open_if_large(path)
        try:
            self._disk.unlink(path)
        finally:
            if file is not None:
                self._close_in_background(file)

    def _open_if_large(self, path: str) -> int | None:
        with suppress(OSError):
            info = self._disk.stat(path)
            if info is None or info.size < MIN_LARGE_BYTES or not self._open_slots.acquire(blocking=False):
                return None
            try:
                return self._disk.open_for_reading(path)
            except OSError:  # the file is missing, or too many files are open
                self._open_slots.release()
        return None

    def _close_in_background(self, file: int) -> None:
        try:
            threading.Thread(target=self._close, args=(file,), name="freeing", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._close(file)

    def _close(self, file: int) -> None:
        os.close(file)
        self._open_slots.release()


VERIFIED_S: Final = 3600.0  # time for which an unchanged file counts as verified


class VerificationCache:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._hashed_files: dict[str, tuple[PathInfo, float]] = {}  # sha256 -> (file, time of hashing)

    def forget(self, sha256: str | None = None) -> None:
        if sha256 is None:
            self._hashed_files.clear()
        else:
            self._hashed_files.pop(sha256, None)

    def record_verified(self, path: str, sha256: str) -> None:
        info = self._disk.stat(path)
        if info is not None:
            self._hashed_files[sha256] = (info, time.monotonic())

    def touch(self, path: str, sha256: str) -> None:
        """Set the times of a file to now. An unchanged verified file remains verified."""
        cached_info, hashed_s = self._hashed_files.get(sha256, (None, 0.0))
        is_unchanged = cached_info is not None and self._disk.stat(path) == cached_info
        self._disk.touch(path)
        if is_unchanged and (info := self._disk.stat(path)) is not None:
            self._hashed_files[sha256] = (info, hashed_s)

    def load(self, path: str, sha256: str, *, is_verified: bool) -> bytes | None:
        """Return the bytes of a file, or None if two reads do not match the sha256."""
        for _ in range(2):
            payload = self._disk.read(path)
            if is_verified or hashlib.sha256(payload).hexdigest() == sha256:
                return payload
        return None

    def is_verified(self, path: str, info: PathInfo, sha256: str, *, force_hash: bool = False) -> bool:
        """Return whether a file matches its sha256.

        The file is hashed unless it is unchanged and was hashed within the last hour, and always with `force_hash`. A
        mismatch is hashed twice, because one read may have been wrong.
        """
        cached_info, hashed_s = self._hashed_files.get(sha256, (None, 0.0))
        if cached_info == info and not force_hash and time.monotonic() < hashed_s + VERIFIED_S:
            return True
        if self._disk.hash_file(path) != sha256 and self._disk.hash_file(path) != sha256:
            return False
        self._hashed_files[sha256] = (info, time.monotonic())
        return True
