"""Many small blobs in one file, for a process that alone writes them and drops them soon: a round's updates.

Creating, renaming and removing a file takes a file system many times longer than writing 30 kB into an open one, and
one wait for the disk (`settle`) does for all that was written before.
The file is a row of slots, each a head and a blob. The slot of a dropped blob is reused by the next of its
size, so the file is as large as its contents at their peak. A killed process leaves whole slots, and
perhaps one that is not: each is checked against its digest when the file is opened again.

A head begins with a mark and ends with its checksum, so that reading resumes at the next slot where a head is damaged.
Slots of an earlier version had neither: their blobs are written again, behind all others, when the file is opened.
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

from fedquilt.disk import Disk
from fedquilt.open_file import OpenFile

log = logging.getLogger("fedquilt.blobs.store")

_MARK: Final = b"fqslot1\n"
_HEAD: Final = struct.Struct("<8s32sQI")  # mark, digest, size of the blob, CRC-32 of these three
_PLAIN: Final = struct.Struct("<32sQ")  # digest, size of the blob: head of an earlier version
_AT_ONCE: Final = 1 << 20  # bytes that are searched for a mark at once


class Slot(NamedTuple):
    """A slot as its head describes it."""

    sha256: str
    place: int
    size: int
    plain: bool = False  # whether its head is of an earlier version

    @property
    def end(self) -> int:
        """Offset of the next slot."""
        return self.place + self.size


class Pack:
    """One file of blobs. A place is the offset of a blob; one that is only put there is not yet found by its name.

    Args:
        path: created with the first blob.
        disk: holds the file.
        checks: hash a blob whenever it is read as a whole.

    Raises, from every method:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str, disk: Disk, checks: bool = False) -> None:
        self._path, self._disk, self._checks, self._end = path, disk, checks, 0
        self._opened: OpenFile | None = None
        self._at: dict[str, tuple[int, int]] = {}  # sha256 -> place, size
        self._free: dict[int, list[int]] = {}  # size -> places
        self._lock = threading.RLock()  # the coordinator's worker reads and drops beside the loop
        self._unsettled = self._named = False  # whether a blob, or the file's name, is not on the disk yet
        if disk.is_file(path):
            self._scan()
            self._unsettled = True  # an earlier process may have ended before it synced its last blobs

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._at

    def names(self) -> list[str]:
        """Names of the blobs."""
        return list(self._at)

    def size(self, sha256: str) -> int | None:
        """Bytes of a blob; None: it is not here."""
        found = self._at.get(sha256)
        return None if found is None else found[1]

    def read(self, sha256: str, offset: int = 0, size: int | None = None) -> bytes:
        """Read `size` bytes of a blob from `offset`; by default all that follow."""
        with self._lock:
            place, whole = self._at[sha256]
            left = max(whole - offset, 0)
            return self._file.read(place + offset, left if size is None else min(size, left))

    def load(self, sha256: str) -> bytes | None:
        """Read a whole blob; None: it is not here, or damaged."""
        with self._lock:
            if sha256 not in self._at:
                return None
            payload = self.read(sha256)
        if self._checks and hashlib.sha256(payload).hexdigest() != sha256:
            log.warning("blob %s in %s is damaged: its bytes are not those it was stored with", sha256[:12], self._path)
            self.drop(sha256)
            return None
        return payload

    def put(self, sha256: str, payload: bytes) -> int:
        """Write a blob; returns its place, for `name` or `release`."""
        with self._lock:
            places = self._free.get(len(payload))
            place = places.pop() if places else self._end + _HEAD.size
            self._unsettled = True
            self._file.write(_head(sha256, len(payload)) + payload, place - _HEAD.size)
            self._end = max(self._end, place + len(payload))
            return place

    def settle(self) -> None:
        """Wait until every blob is on the disk."""
        with self._lock:
            if self._unsettled:
                self._file.sync()
                if not self._named:
                    self._disk.sync(os.path.dirname(self._path))
                self._unsettled, self._named = False, True

    def name(self, sha256: str, place: int, size: int) -> None:
        """Make a blob that was put available by its name."""
        with self._lock:
            if sha256 in self._at:
                self.release(place, size)
            else:
                self._at[sha256] = (place, size)

    def release(self, place: int, size: int) -> None:
        """Free a place that has no name."""
        with self._lock:
            self._free.setdefault(size, []).append(place)

    def drop(self, sha256: str) -> None:
        """Remove a blob, if it is here; a pack of a durable depot is emptied with its last blob."""
        with self._lock:
            found = self._at.pop(sha256, None)
            if found is not None:
                self.release(*found)
            if self._checks and not self._at and self._end:
                self._file.empty()
                self._free.clear()
                self._end = 0

    @property
    def _file(self) -> OpenFile:
        if self._opened is None:
            self._opened = self._disk.open(self._path)
        return self._opened

    def _scan(self) -> None:
        """Find the blobs of an earlier process."""
        plain: list[Slot] = []
        for slot in slots(self._file):
            here = _holds(self._file, slot)
            if slot.plain:
                plain += [slot] * here
            elif here and slot.sha256 not in self._at:
                self._at[slot.sha256] = (slot.place, slot.size)
            else:
                self.release(slot.place, slot.size)
            self._end = slot.end
        for slot in plain:
            if slot.sha256 not in self._at:
                payload = self._file.read(slot.place, slot.size)
                self._at[slot.sha256] = (self.put(slot.sha256, payload), slot.size)


def slots(file: OpenFile) -> Iterator[Slot]:
    """Slots of a file in their order; one that was being written last is left out."""
    at, whole = 0, file.size()
    while at < whole:
        slot = _slot(file, at, whole) or _plain_slot(file, at, whole) or _next(file, at + 1, whole)
        if slot is None:
            return  # the next blob overwrites what is left
        yield slot
        at = slot.end


def _head(sha256: str, size: int) -> bytes:
    head = _HEAD.pack(_MARK, bytes.fromhex(sha256), size, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def _slot(file: OpenFile, at: int, whole: int) -> Slot | None:
    """Slot whose head is at an offset; None: there is no undamaged head, or the blob is cut off."""
    head = file.read(at, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    mark, digest, size, checksum = _HEAD.unpack(head)
    found = Slot(digest.hex(), at + _HEAD.size, size)
    return found if mark == _MARK and checksum == zlib.crc32(head[:-4]) and found.end <= whole else None


def _plain_slot(file: OpenFile, at: int, whole: int) -> Slot | None:
    """Slot of an earlier version at an offset; None: there is none that its blob or the next slot confirms."""
    head = file.read(at, _PLAIN.size)
    if len(head) < _PLAIN.size:
        return None
    digest, size = _PLAIN.unpack(head)
    found = Slot(digest.hex(), at + _PLAIN.size, size, plain=True)
    if found.end > whole:
        return None
    if _holds(file, found) or _slot(file, found.end, whole) is not None:
        return found
    head = file.read(found.end, _PLAIN.size)
    if len(head) < _PLAIN.size:
        return None
    digest, size = _PLAIN.unpack(head)
    after = Slot(digest.hex(), found.end + _PLAIN.size, size)
    return found if after.end <= whole and _holds(file, after) else None


def _next(file: OpenFile, at: int, whole: int) -> Slot | None:
    """First whole slot from an offset on, behind a damaged head.

    A blob can hold what looks like a head, whose place may not be freed: only a slot with its blob is taken.
    """
    while at < whole:
        piece = file.read(at, _AT_ONCE)
        begin = piece.find(_MARK)
        if begin < 0:
            at += max(len(piece) - len(_MARK) + 1, 1)
            continue
        slot = _slot(file, at + begin, whole)
        if slot is not None and _holds(file, slot):
            return slot
        at += begin + 1
    return None


def _holds(file: OpenFile, slot: Slot) -> bool:
    """Whether a slot's blob is what its head says."""
    return hashlib.sha256(file.read(slot.place, slot.size)).hexdigest() == slot.sha256


def copy_of(path: str, disk: Disk, sha256: str) -> bytes | None:
    """A blob of a pack that another process writes; None: it is not there now."""
    if not disk.is_file(path):
        return None
    file = disk.open(path)
    try:
        found = (file.read(slot.place, slot.size) for slot in slots(file) if slot.sha256 == sha256)
        return next((each for each in found if hashlib.sha256(each).hexdigest() == sha256), None)
    finally:
        file.close()
