"""Pack file: many small blobs in one file, for one process that soon removes them.

Creating, renaming and removing a file takes a file system many times longer than writing 30 kB into an open file, and
one sync (`sync`) is enough for all blobs written before. The file is a row of entries, each a header and a blob. The
space of a removed blob is reused by the next blob of its size, so the file is as large as its contents at their peak.
A killed process leaves complete entries and perhaps one incomplete entry: each is checked against its digest when
the file is opened again.

A header begins with a mark and ends with a checksum, so that reading resumes at the next entry after a damaged header.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from fedquilt.host.disk import Disk, OpenFile

log = logging.getLogger("fedquilt.blobs.store")

_MARK: Final = b"fqslot1\n"
_HEAD: Final = struct.Struct("<8s32sQI")  # mark, digest, size of the blob, CRC-32 of these three
_AT_ONCE: Final = 1 << 20  # bytes that are searched for a mark at once


class PackEntry(NamedTuple):
    sha256: str
    place: int
    size: int

    @property
    def end_offset(self) -> int:
        return self.place + self.size


class PackFile:
    """File of many blobs, each at its offset. With `checks` a blob is hashed at loading."""

    def __init__(self, path: str, disk: Disk, checks: bool = False) -> None:
        self._path, self._disk, self._checks, self._end = path, disk, checks, 0
        self._opened: OpenFile | None = None
        self._at: dict[str, tuple[int, int]] = {}  # sha256 -> place, size
        self._free: dict[int, list[int]] = {}  # size -> places
        self._lock = threading.RLock()  # the coordinator's worker reads and drops beside the loop
        self._unsettled = self._named = False  # whether a blob, or the file's name, is not on the disk yet
        if disk.is_file(path):
            self._read_existing_blobs()
            self._unsettled = True  # an earlier process may have ended before it synced its last blobs

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._at

    def blob_names(self) -> list[str]:
        return list(self._at)

    def blob_size(self, sha256: str) -> int | None:
        found = self._at.get(sha256)
        return None if found is None else found[1]

    def read_range(self, sha256: str, offset: int = 0, size: int | None = None) -> bytes:
        with self._lock:
            place, whole = self._at[sha256]
            left = max(whole - offset, 0)
            return self._open_file.read(place + offset, left if size is None else min(size, left))

    def load(self, sha256: str) -> bytes | None:
        """Return a whole blob, or None if missing or damaged. A damaged blob is removed."""
        with self._lock:
            if sha256 not in self._at:
                return None
            payload = self.read_range(sha256)
        if self._checks and hashlib.sha256(payload).hexdigest() != sha256:
            log.warning("blob %s in %s is damaged: its bytes are not those it was stored with", sha256[:12], self._path)
            self.remove_blob(sha256)
            return None
        return payload

    def write_blob(self, sha256: str, payload: bytes) -> int:
        """Write a blob and return its place. The blob is not available until `register_blob`."""
        with self._lock:
            places = self._free.get(len(payload))
            place = places.pop() if places else self._end + _HEAD.size
            self._unsettled = True
            self._open_file.write(_entry_header(sha256, len(payload)) + payload, place - _HEAD.size)
            self._end = max(self._end, place + len(payload))
            return place

    def sync(self) -> None:
        with self._lock:
            if self._unsettled:
                self._open_file.sync()
                if not self._named:
                    self._disk.sync(os.path.dirname(self._path))
                self._unsettled, self._named = False, True

    def register_blob(self, sha256: str, place: int, size: int) -> None:
        with self._lock:
            if sha256 in self._at:
                self.free_place(place, size)
            else:
                self._at[sha256] = (place, size)

    def free_place(self, place: int, size: int) -> None:
        with self._lock:
            self._free.setdefault(size, []).append(place)

    def remove_blob(self, sha256: str) -> None:
        with self._lock:
            found = self._at.pop(sha256, None)
            if found is not None:
                self.free_place(*found)
            if self._checks and not self._at and self._end:
                self._open_file.truncate()
                self._free.clear()
                self._end = 0

    @property
    def _open_file(self) -> OpenFile:
        if self._opened is None:
            self._opened = self._disk.open(self._path)
        return self._opened

    def _read_existing_blobs(self) -> None:
        for slot in iterate_entries(self._open_file):
            if slot.sha256 not in self._at and _is_undamaged(self._open_file, slot):
                self._at[slot.sha256] = (slot.place, slot.size)
            else:
                self.free_place(slot.place, slot.size)
            self._end = slot.end_offset


def iterate_entries(file: OpenFile) -> Iterator[PackEntry]:
    at, whole = 0, file.size()
    while at < whole:
        slot = _read_entry_at(file, at, whole) or _find_next_entry(file, at + 1, whole)
        if slot is None:
            return  # the next blob overwrites what is left
        yield slot
        at = slot.end_offset


def _entry_header(sha256: str, size: int) -> bytes:
    head = _HEAD.pack(_MARK, bytes.fromhex(sha256), size, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def _read_entry_at(file: OpenFile, at: int, whole: int) -> PackEntry | None:
    head = file.read(at, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    mark, digest, size, checksum = _HEAD.unpack(head)
    found = PackEntry(digest.hex(), at + _HEAD.size, size)
    return found if mark == _MARK and checksum == zlib.crc32(head[:-4]) and found.end_offset <= whole else None


def _find_next_entry(file: OpenFile, at: int, whole: int) -> PackEntry | None:
    # A blob may contain bytes that look like a header, so only an entry with an undamaged blob counts.
    while at < whole:
        piece = file.read(at, _AT_ONCE)
        begin = piece.find(_MARK)
        if begin < 0:
            at += max(len(piece) - len(_MARK) + 1, 1)
            continue
        slot = _read_entry_at(file, at + begin, whole)
        if slot is not None and _is_undamaged(file, slot):
            return slot
        at += begin + 1
    return None


def _is_undamaged(file: OpenFile, slot: PackEntry) -> bool:
    return hashlib.sha256(file.read(slot.place, slot.size)).hexdigest() == slot.sha256


def read_foreign_blob(path: str, disk: Disk, sha256: str) -> bytes | None:
    """Return a blob from a pack file that another process writes, or None if missing."""
    if not disk.is_file(path):
        return None
    file = disk.open(path)
    try:
        found = (file.read(slot.place, slot.size) for slot in iterate_entries(file) if slot.sha256 == sha256)
        return next((each for each in found if hashlib.sha256(each).hexdigest() == sha256), None)
    finally:
        file.close()
