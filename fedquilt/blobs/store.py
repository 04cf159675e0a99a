"""Folder of blobs by content: each file's name is the sha256 of its bytes.

    <sha256>          whole: verified, on disk, never changed
    <sha256>.part     incomplete: as long as the blob, with holes where chunks are missing
    <sha256>.damaged  was whole, and holds other bytes now: out of use, and removed after a day
    <random>.tmp      being written by `put` or `put_file`, removed after a day if its process was killed
    <random>.own      the same, by the process that has the folder `open_as_owner`, whose next start removes it
    small.pack        small blobs that one process stores and drops soon (`stow`), once it has the depot alone

A file gets its final name only when its bytes are verified and on the disk, so whatever moment the
process is killed or the power fails, a file with that name is whole. A part carries no record of
its chunks: a record could claim data that a power cut lost. `resume` asks the file
system where there is data and believes only what matches the manifest.

What a disk gives back need not be what it was given, and a bit that flips changes no time of its file. So a blob is
hashed whenever it is opened (`load`, `verified_path`), and what is damaged counts as absent: it is fetched or made
again, or refused. For `has`, in a depot that is not durable, and for a file whose reader hashes it, once an hour will
do. Who receives a part (`read`) checks it.

ONNX graphs rely on flat names: they name their external data by sha256, in the same folder.

A work item of another thread names blobs in its result, which the owner records later. Whatever it stores or finds is
pinned until then (`pin_during`), and pinned blobs are not removed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.explained import Explained
from fedquilt.blobs.freeing import Freeing
from fedquilt.blobs.pack import Pack, copy_of
from fedquilt.blobs.verified import Verified
from fedquilt.core import BlobRef, StoreError
from fedquilt.disk import REAL, Disk, Found, Place

T = TypeVar("T")

log = logging.getLogger("fedquilt.blobs.store")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STALE_S: Final = 24 * 3600.0
PACK: Final = "small.pack"
SMALL_BYTES: Final = 128 * 1024  # largest blob that is stowed without a file of its own


class Depot:
    """Folder of blobs; several processes may use it at once.

    Args:
        disk: where the folder is.
        make: create the folder if it does not exist.
        durable: wait for the disk, so that files with their final name also survive a power failure. On virtual time,
            where a killed run is simply repeated, it is enough to survive a killed process.

    Raises, from every method:
        StoreError: it cannot be read or written; says what, where and the mend.
    """

    def __init__(
        self,
        folder: Path,
        wall_clock: Callable[[], float] = time.time,
        *,
        durable: bool = True,
        make: bool = True,
        disk: Disk = REAL,
    ) -> None:
        self.folder, self.disk = folder, disk
        self._prefix = os.path.join(folder, "")
        self._durable = durable
        self._wall_clock = wall_clock
        self._doing = partial(Explained, folder=folder)
        self._verified = Verified(disk)
        self._freeing = Freeing(disk)
        self._kind = "tmp"  # ending of the files that it is writing
        self._pins: dict[int, set[str]] = {}  # by work item: what it has stored or found
        self._item = threading.local()  # `pins`: those of the work item of this thread
        self._pin_lock = threading.Lock()  # from the look at the pins until the blob is removed
        with self._doing("make the folder"):
            if make:
                (disk.settle if durable else disk.make)(folder)
            self._unsynced = durable and make  # an earlier process may have ended before it synced the last names
            self._pack = None if durable else Pack(self._prefix + PACK, self.disk, checks=self._durable)

    def open_as_owner(self) -> None:
        """Open the depot as the only process that stows blobs, so that small ones share a file.

        Files that the last such process was writing when it was killed are removed.
        """
        with self._doing("open the small blobs"):
            self._pack = self._pack or Pack(self._prefix + PACK, self.disk, checks=self._durable)
            if self._kind != "own":
                self._kind = "own"
                for found in self._depot_entries():
                    if found.name.endswith(".own"):
                        self._freeing.unlink(f"{self._prefix}{found.name}")

    def settle(self) -> None:
        """Wait until every stowed blob is on the disk, if the depot is durable."""
        if self._pack is not None and self._durable:
            with self._doing("store blobs"):
                self._pack.settle()

    # -- pins --

    def pin_during(
        self, item: Callable[[], T], then: Callable[[Callable[[], T], float], None]
    ) -> tuple[Callable[[], T], Callable[[Callable[[], T], float], None]]:
        """Return a work item and its callback, wrapped so that the item's blobs are pinned until both have run."""
        pins = set[str]()

        def pinned() -> T:
            with self._pin_lock:
                self._pins[id(pins)] = pins
            self._item.pins = pins
            try:
                return item()
            finally:
                del self._item.pins

        def decided(result: Callable[[], T], now_s: float) -> None:
            try:
                then(result, now_s)
            finally:
                with self._pin_lock:
                    self._pins.pop(id(pins), None)

        return pinned, decided

    def pinned_blobs(self) -> set[str]:
        """Return the sha256 of the blobs that are pinned."""
        with self._pin_lock:
            return set[str]().union(*self._pins.values())

    def _pin(self, sha256: str) -> None:
        """Pin a blob for the work item of this thread, if any, before the blob is looked for."""
        pins: set[str] | None = getattr(self._item, "pins", None)
        if pins is not None:
            with self._pin_lock:
                pins.add(sha256)

    def _is_pinned(self, sha256: str) -> bool:
        return any(sha256 in pins for pins in self._pins.values())

    # -- what is here --

    def path(self, sha256: str) -> Path | None:
        """Path of a whole blob, which gets a file if it has none; None: it is not here, or damaged."""
        found = self.verified_path(sha256)
        return None if found is None else Path(found)

    def verified_path(self, sha256: str, *, compared: bool = False) -> str | None:
        """Return the path of a whole blob, or None without one. With `compared` the caller hashes what it reads."""
        path = self._at(sha256)
        self._pin(sha256)
        with self._doing(f"read blob {sha256[:12]}"):
            with suppress(FileNotFoundError):  # another process has dropped it meanwhile
                if self._sound(sha256, opens=self._durable and not compared) is not None:
                    return path
            if (payload := self.packed(sha256)) is not None:
                self._store(payload, sha256)
        return None if payload is None else path

    def ref(self, sha256: str) -> BlobRef | None:
        """Return the reference of a whole blob, which is not read, or None if it is missing."""
        self._pin(sha256)
        if self._pack is not None and (size := self._pack.size(sha256)) is not None:
            return BlobRef(sha256=sha256, size=size)
        found = None
        with suppress(OSError):
            found = self.disk.stat(self._at(sha256))
        return None if found is None else BlobRef(sha256=sha256, size=found.size)

    def has(self, ref: BlobRef) -> bool:
        """Whether the whole blob is here, undamaged; not where the disk does not say."""
        with suppress(StoreError):
            return self.is_intact(ref)
        return False

    def is_intact(self, ref: BlobRef) -> bool:
        """Return whether the whole blob is here and undamaged. Raise StoreError if the disk fails."""
        self._pin(ref.sha256)
        if self._pack is not None and (size := self._pack.size(ref.sha256)) is not None:
            return size == ref.size
        with self._doing(f"look for blob {ref.sha256[:12]}"):
            if (found := self._sound(ref.sha256)) is not None:
                self._sync_names()
        return found is not None and found.size == ref.size

    def doubt(self) -> None:
        """Hash every blob again when it is opened next: something has failed that may be a disk's fault."""
        self._verified.forget()

    def discard_damaged(self, sha256: str) -> None:
        """Put a damaged blob out of use, so that it can be stored again."""
        with self._doing(f"put the damaged blob {sha256[:12]} aside"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.drop(sha256)
            if self.disk.is_file(self._at(sha256)):
                self._set_aside(sha256)

    def read(self, sha256: str, offset: int, size: int) -> bytes:
        """`size` bytes of a whole blob from `offset`; fewer at its end."""
        with self._doing(f"read blob {sha256[:12]}"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.read(sha256, offset, size)
            return self.disk.read(self._at(sha256), offset, size)

    def opened(self, sha256: str) -> int:
        """Descriptor of a whole blob's file, for reading; who receives its bytes checks them, as of `read`."""
        with self._doing(f"read blob {sha256[:12]}"):
            return self.disk.open_for_reading(self._at(sha256))

    def load(self, sha256: str) -> bytes | None:
        """Return the bytes of a whole blob, or None if it is missing or damaged."""
        self._pin(sha256)
        with self._doing(f"read blob {sha256[:12]}"):
            if self._pack is not None and sha256 in self._pack:
                return self._pack.load(sha256)
            try:
                hashed = not self._durable and self._sound(sha256) is not None
                if (payload := self._verified.load(self._at(sha256), sha256, hashed=hashed)) is None:
                    self._set_aside(sha256)
                return payload
            except (FileNotFoundError, IsADirectoryError):
                return self.packed(sha256)

    def packed(self, sha256: str) -> bytes | None:
        """Return a small blob that this process or the depot's owner has stowed, or None if missing or damaged."""
        with self._doing(f"read blob {sha256[:12]}"):
            return self._pack.load(sha256) if self._pack else copy_of(self._prefix + PACK, self.disk, sha256)

    # -- whole blobs --

    def put(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store bytes and return their reference. In a durable depot they are then on the disk.

        Raises:
            DamagedBlobError: they are not the blob `expected`, and have not been stored.
        """
        ref = chunks.reference(payload, expected)
        self._pin(ref.sha256)
        with suppress(OSError):  # then it is stored
            if self._sound(ref.sha256) is not None:  # a stowed blob may be dropped by its user
                self._sync_names()
                return ref
        with self._doing(f"store blob {ref.sha256[:12]}"):
            self._store(payload, ref.sha256)
        return ref

    def stow(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store like `put` a blob that only this process drops, and soon: small ones get no file of their own.

        In a durable depot they do unless this process is `open_as_owner`, and are on the disk after `settle` alone.
        """
        if self._pack is None or len(payload) > SMALL_BYTES:
            return self.put(payload, expected)
        ref = chunks.reference(payload, expected)
        if not self.has(ref):
            self.take_over(ref, self.write_unnamed(ref, payload))
        return ref

    def put_by(self, write: Callable[[Path], None]) -> BlobRef:
        """Store what `write` puts into a file: for what is too large to be held as bytes beside what it is made of."""
        with self._doing("store a blob"), self._temporary_path() as path:
            write(Path(path))
            if not self.has(ref := self._synced(path)):
                self._move_into_place(path, ref.sha256)
        return ref

    def write_unnamed(self, ref: BlobRef, payload: bytes) -> int:
        """Write a small blob of known digest without naming it yet, and return its place. For the owner only."""
        assert self._pack is not None
        with self._doing(f"store blob {ref.sha256[:12]}"):
            return self._pack.put(ref.sha256, payload)

    def take_over(self, ref: BlobRef, place: int) -> None:
        """Make a blob available that was laid by."""
        assert self._pack is not None
        self._pack.name(ref.sha256, place, ref.size)

    def give_up(self, ref: BlobRef, place: int) -> None:
        """Drop a blob that was laid by."""
        assert self._pack is not None
        self._pack.release(place, ref.size)

    def put_untrusted(self, path: Place, expected: BlobRef) -> None:
        """Store a copy of a file that another process may still change.

        Raises:
            DamagedBlobError: its content is not `expected`.
            StoreError: it is a link, a pipe or another special file.
        """
        if self.has(expected):
            return
        with self._doing(f"store {path}"), self._temporary_path() as temporary:
            digest = self.disk.copy_untrusted(path, temporary, expected.size)
            self._require_expected(path, self._synced(temporary, digest), expected)
            self._move_into_place(temporary, expected.sha256)

    def put_file(self, path: Place, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        """Store a file: linked if the file system can, else copied.

        A linked file must not be changed in place afterwards; replacing it is fine. With `move` it is moved
        instead; it has to be on this file system.

        Raises:
            DamagedBlobError: its content is not `expected`.
        """
        if expected is not None and self.has(expected):
            return expected
        with self._doing(f"store {path}"), self._temporary_path() as temporary:
            try:
                if move:
                    self.disk.replace(path, temporary)
                else:
                    self.disk.link(path, temporary)
            except OSError:  # another file system, or one without links
                self.disk.copy(path, temporary)
            ref = self._synced(temporary)
            self._require_expected(path, ref, expected)
            if not self.has(ref):
                self._move_into_place(temporary, ref.sha256)
        return ref

    def adopt(self, path: str, ref: BlobRef) -> None:
        """Take over a file that this process made, whose digest is `ref`'s; it is gone from `path`.

        For simulated fleets: nothing waits for the disk.
        """
        with self._doing(f"store {path}"):
            if self.has(ref):
                self.disk.unlink(path)
            else:
                self.disk.replace(path, self._at(ref.sha256))
                self._verified.note(self._at(ref.sha256), ref.sha256)

    def drop(self, sha256: str) -> None:
        """Remove a blob, whole or in part, unless it is pinned."""
        with self._doing(f"remove blob {sha256[:12]}"), self._pin_lock:
            if self._is_pinned(sha256):
                return
            if self._pack is not None and sha256 in self._pack:
                self._pack.drop(sha256)  # it may have a file as well
                if not self.disk.is_file(self._at(sha256)):
                    return
            self._verified.forget(sha256)
            for path in (self._at(sha256), self._part(sha256)):
                self._freeing.unlink(path)

    def remove_all_but(self, only: set[str]) -> None:
        """Remove every blob except these and those that are pinned.

        Parts, damaged and temporary files go a day after their last write.
        """
        with self._doing("collect garbage"):
            for sha256 in () if self._pack is None else set(self._pack.names()) - only:
                with self._pin_lock:
                    if not self._is_pinned(sha256):
                        self._pack.drop(sha256)  # type: ignore[union-attr]
            for found in self._depot_entries():
                sha256, _, kind = found.name.partition(".")
                stale = kind != "own" and self._wall_clock() - found.mtime_ns / 1e9 >= _STALE_S
                superfluous = kind == "part" and self.ref(sha256) is not None
                with self._pin_lock:
                    if (stale or superfluous) if kind else sha256 not in only and not self._is_pinned(sha256):
                        self._verified.forget(found.name)
                        self._freeing.unlink(f"{self._prefix}{found.name}")

    def unused(self) -> list[tuple[int, str, int]]:
        """(time of use in ns, sha256, size) of every file of a blob, parts and temporary ones too, oldest first."""
        with self._doing("list blobs"):
            return sorted((each.mtime_ns, each.name.partition(".")[0], each.size) for each in self._depot_entries())

    def touch(self, sha256: str) -> None:
        """Note a use of a blob."""
        with self._doing(f"touch blob {sha256[:12]}"):
            self._verified.touched(self._at(sha256), sha256)

    # -- parts --

    def resume(self, manifest: wire.Manifest) -> bytearray:
        """Open a part for a blob, new or existing; returns one byte per chunk, 1 if it is here and right."""
        had = bytearray(chunks.count(manifest))
        with self._doing(f"receive blob {manifest.sha256[:12]}"):
            part = self._part(manifest.sha256)
            self.disk.resize(part, manifest.size)
            for start, end in self.disk.data_ranges(part):
                # a written chunk begins inside data
                for index in range(-(-start // manifest.chunk), -(-end // manifest.chunk)):
                    offset, size = chunks.extent(manifest, index)
                    had[index] = chunks.is_chunk(manifest, index, self.disk.read(part, offset, size))
        return had

    def write(self, sha256: str, offset: int, payload: bytes | memoryview) -> None:
        """Write bytes into a part that `resume` opened: a verified chunk, or what is verified at the end."""
        with self._doing(f"receive blob {sha256[:12]}"):
            self.disk.write_at(self._part(sha256), payload, offset)

    def finish(self, ref: BlobRef, digest: str | None = None) -> None:
        """Turn a complete part into the whole blob; `digest` is that of its bytes, if they were hashed as they came.

        Raises:
            DamagedBlobError: its bytes are not the blob's; the part is gone.
        """
        part = self._part(ref.sha256)
        with self._doing(f"complete blob {ref.sha256[:12]}"):
            if self._synced(part, digest) != ref:
                self.disk.unlink(part)
                raise chunks.arrived_damaged(ref)
            self._move_into_place(part, ref.sha256)

    # -- within --

    def _at(self, sha256: str) -> str:
        if not _DIGEST.fullmatch(sha256):
            raise StoreError(f"{sha256[:80]!r} names no blob: expected a sha256 in hex")
        return f"{self._prefix}{sha256}"

    def _part(self, sha256: str) -> str:
        return f"{self._at(sha256)}.part"

    def _depot_entries(self) -> Iterator[Found]:
        """Yield the folder's files that are blobs, or parts, damaged or temporary files of the depot."""
        for entry in self.disk.entries(self.folder):
            sha256, _, kind = entry.name.partition(".")
            if kind in ("tmp", "own") or (kind in ("", "part", "damaged") and _DIGEST.fullmatch(sha256)):
                yield entry

    def _sound(self, sha256: str, *, opens: bool = False) -> Found | None:
        """A blob's file; None: there is none, or it was damaged and is put aside."""
        path = self._at(sha256)
        found = self.disk.stat(path)
        if found is None or found.is_dir:
            return None
        if not self._verified.holds(path, found, sha256, opens=opens):
            self._set_aside(sha256)
            return None
        return found

    def _set_aside(self, sha256: str) -> None:
        path = self._at(sha256)
        log.warning("blob %s in %s is damaged: its bytes are not those it was stored with", sha256[:12], self.folder)
        self._verified.forget(sha256)
        self.disk.touch(path)  # it is kept for a day from now on
        self.disk.replace(path, f"{path}.damaged")

    def _synced(self, path: str, digest: str | None = None) -> BlobRef:
        """Reference of what a file holds, which is on the disk first if the depot is durable."""
        if self._durable:
            self.disk.sync(path)
        found = self.disk.stat(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return BlobRef(sha256=digest or self.disk.digest(path), size=found.size)

    @staticmethod
    def _require_expected(path: Place, ref: BlobRef, expected: BlobRef | None) -> None:
        """Raise DamagedBlobError if a file's reference is not the expected one, if any."""
        if expected not in (None, ref):
            raise chunks.DamagedBlobError(f"{path} is not what it should be ({ref.sha256[:12]}): make it anew")

    def _store(self, payload: bytes, sha256: str) -> None:
        with self._temporary_path() as path:
            self.disk.write(path, payload, new=True)
            if self._durable:
                self.disk.sync(path)
            self._move_into_place(path, sha256)

    @contextmanager
    def _temporary_path(self) -> Iterator[str]:
        """Yield the path of a new temporary file, which is removed afterwards."""
        path = f"{self._prefix}{os.urandom(16).hex()}.{self._kind}"
        try:
            yield path
        finally:
            self.disk.unlink(path)

    def _move_into_place(self, path: str, sha256: str) -> None:
        """Rename a verified temporary file to its blob's name, and sync the folder."""
        self._unsynced = self._durable
        self.disk.replace(path, self._at(sha256))
        self._verified.note(self._at(sha256), sha256)
        self._sync_names()

    def _sync_names(self) -> None:
        """Sync the folder, unless all names of blobs in it are synced."""
        if self._unsynced:
            self.disk.sync(self.folder)
            self._unsynced = False
