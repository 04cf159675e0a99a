"""Many small blobs in one file, for a process that alone reads them and drops them soon: a round's updates.

Creating, renaming and removing a file takes a file system many times longer than writing 30 kB into an open one.
The file is a row of slots, each a head and a blob. The slot of a dropped blob is reused by the next of its
size, so the file is as large as its contents at their peak. A killed process leaves whole slots, and
perhaps one that is not: each is checked against its digest when the file is opened again.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Final

_HEAD: Final = struct.Struct("<32sQ")  # digest, size of the blob


class Pack:
    """One file of blobs. A place is the offset of a blob; one that is only put there is not yet found by its name.

    Args:
        path: created with the first blob.

    Raises, from every method:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file, self._end = path, -1, 0
        self._at: dict[str, tuple[int, int]] = {}  # sha256 -> place, size
        self._free: dict[int, list[int]] = {}  # size -> places
        if os.path.isfile(path):
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
        return os.pread(self._file, left if size is None else min(size, left), place + offset)

    def put(self, sha256: str, payload: bytes) -> int:
        """Write a blob; returns its place, for `name` or `release`."""
        places = self._free.get(len(payload))
        place = places.pop() if places else self._end + _HEAD.size
        view = memoryview(_HEAD.pack(bytes.fromhex(sha256), len(payload)) + payload)
        at = place - _HEAD.size
        self._open()
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written
        self._end = max(self._end, place + len(payload))
        return place

    def name(self, sha256: str, place: int, size: int) -> None:
        """Make a blob that was put there available by its name."""
        if sha256 in self._at:
            self.release(place, size)
        else:
            self._at[sha256] = (place, size)

    def release(self, place: int, size: int) -> None:
        """Free a place that has no name."""
        self._free.setdefault(size, []).append(place)

    def drop(self, sha256: str) -> None:
        """Remove a blob, if it is here."""
        found = self._at.pop(sha256, None)
        if found is not None:
            self.release(*found)

    def _open(self) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _scan(self) -> None:
        """Find the blobs of an earlier process."""
        self._open()
        whole = os.fstat(self._file).st_size
        while len(head := os.pread(self._file, _HEAD.size, self._end)) == _HEAD.size:
            digest, size = _HEAD.unpack(head)
            place = self._end + _HEAD.size
            if place + size > whole:
                return  # it was being written: the next one overwrites it
            if hashlib.sha256(os.pread(self._file, size, place)).digest() == digest and digest.hex() not in self._at:
                self._at[digest.hex()] = (place, size)
            else:
                self.release(place, size)
            self._end = place + size

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
