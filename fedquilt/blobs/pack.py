"""Many small blobs in one file, for a process that alone writes them and drops them soon: a round's updates.

Creating, renaming and removing a file takes a file system many times longer than writing 30 kB into an open one, and
one wait for the disk (`settle`) does for all that was written before.
The file is a row of slots, each a head and a blob. The slot of a dropped blob is reused by the next of its
size, so the file is as large as its contents at their peak. A killed process leaves whole slots, and
perhaps one that is not: each is checked against its digest when the file is opened again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from typing import Final

from fedquilt.disk import Disk
from fedquilt.open_file import OpenFile

log = logging.getLogger("fedquilt.blobs.store")

_HEAD: Final = struct.Struct("<32sQ")  # digest, size of the blob


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
        self._unsettled = self._named = False  # whether a blob, or the file's name, is not on the disk yet
        if disk.is_file(path):
            self._scan()

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
        place, whole = self._at[sha256]
        left = max(whole - offset, 0)
        return self._file.read(place + offset, left if size is None else min(size, left))

    def load(self, sha256: str) -> bytes | None:
        """Read a whole blob; None: it is not here, or damaged."""
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
        places = self._free.get(len(payload))
        place = places.pop() if places else self._end + _HEAD.size
        self._unsettled = True
        self._file.write(_HEAD.pack(bytes.fromhex(sha256), len(payload)) + payload, place - _HEAD.size)
        self._end = max(self._end, place + len(payload))
        return place

    def settle(self) -> None:
        """Wait until every blob is on the disk."""
        if self._unsettled:
            self._file.sync()
            if not self._named:
                self._disk.sync(os.path.dirname(self._path))
            self._unsettled, self._named = False, True

    def name(self, sha256: str, place: int, size: int) -> None:
        """Make a blob that was put available by its name."""
        if sha256 in self._at:
            self.release(place, size)
        else:
            self._at[sha256] = (place, size)

    def release(self, place: int, size: int) -> None:
        """Free a place that has no name."""
        self._free.setdefault(size, []).append(place)

    def drop(self, sha256: str) -> None:
        """Remove a blob, if it is here; a pack of a durable depot is emptied with its last blob."""
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
        for digest, place, size in slots(self._file):
            if digest not in self._at and _is(digest, self._file.read(place, size)):
                self._at[digest] = (place, size)
            else:
                self.release(place, size)
            self._end = place + size


def slots(file: OpenFile) -> Iterator[tuple[str, int, int]]:
    """Digest, place and size of each slot as it is in the file; one that was being written last is left out."""
    at, whole = 0, file.size()
    while len(head := file.read(at, _HEAD.size)) == _HEAD.size:
        digest, size = _HEAD.unpack(head)
        place = at + _HEAD.size
        if place + size > whole:
            return  # the next one overwrites it
        yield digest.hex(), place, size
        at = place + size


def _is(sha256: str, payload: bytes) -> bool:
    return hashlib.sha256(payload).hexdigest() == sha256


def copy_of(path: str, disk: Disk, sha256: str) -> bytes | None:
    """A blob of a pack that another process writes; None: it is not there now."""
    if not disk.is_file(path):
        return None
    file = disk.open(path)
    try:
        found = (file.read(place, size) for digest, place, size in slots(file) if digest == sha256)
        return next((each for each in found if _is(sha256, each)), None)
    finally:
        file.close()
