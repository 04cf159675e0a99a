"""Pack file: many small blobs in one file, for one process that soon removes them.

To create, rename and remove a file takes a file system many times longer than to write 30 kB into an open file, and one
`sync` is enough for all blobs written before. The file is a sequence of entries, each a header and a blob. The space of
a removed blob is reused by the next blob of the same size, so that the file is as large as its contents at their peak.
A killed process leaves complete entries and perhaps one incomplete entry. Each entry is verified by its digest when the
file is opened again.

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

_HEADER_MARK: Final = b"fqslot1\n"
_HEADER: Final = struct.Struct("<8s32sQI")  # mark, digest, size of the blob, CRC-32 of these three
_SEARCH_BYTES: Final = 1 << 20  # bytes read at once in the search for a mark


class PackEntry(NamedTuple):
    sha256: str
    offset: int
    size: int

    @property
    def end_offset(self) -> int:
        return self.offset + self.size


class PackFile:
    def __init__(self, path: str, disk: Disk, verify_on_load: bool = False) -> None:
        self._path, self._disk, self._verify_on_load, self._end = path, disk, verify_on_load, 0
        self._file: OpenFile | None = None
        self._entries: dict[str, tuple[int, int]] = {}  # sha256 -> (offset, size)
        self._free_offsets: dict[int, list[int]] = {}  # size -> offsets of free space
        self._lock = threading.RLock()  # the coordinator reads and removes blobs in two threads
        self._is_unsynced = False  # whether blobs were written since the last sync
        self._is_name_synced = False  # whether the folder was synced after the file was created
        if disk.is_file(path):
            self._read_existing_blobs()
            self._is_unsynced = True  # an earlier process may have ended before it synced its last blobs

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._entries

    def blob_names(self) -> list[str]:
        return list(self._entries)

    def blob_size(self, sha256: str) -> int | None:
        entry = self._entries.get(sha256)
        return None if entry is None else entry[1]

    def read_range(self, sha256: str, offset: int = 0, size: int | None = None) -> bytes:
        """Return up to `size` bytes of a blob from an offset, without verification, or raise KeyError."""
        with self._lock:
            blob_offset, blob_size = self._entries[sha256]
            remaining = max(blob_size - offset, 0)
            return self._open_file.read(blob_offset + offset, remaining if size is None else min(size, remaining))

    def load(self, sha256: str) -> bytes | None:
        """Return a blob, or None if missing or damaged. A damaged blob is removed."""
        with self._lock:
            if sha256 not in self._entries:
                return None
            payload = self.read_range(sha256)
        if self._verify_on_load and hashlib.sha256(payload).hexdigest() != sha256:
            log.warning("blob %s in %s is damaged: its sha256 has changed", sha256[:12], self._path)
            self.remove_blob(sha256)
            return None
        return payload

    def write_blob(self, sha256: str, payload: bytes) -> int:
        """Write a blob and return its offset. The blob is not available until `register_blob`."""
        with self._lock:
            free_offsets = self._free_offsets.get(len(payload))
            offset = free_offsets.pop() if free_offsets else self._end + _HEADER.size
            self._is_unsynced = True
            self._open_file.write(_entry_header(sha256, len(payload)) + payload, offset - _HEADER.size)
            self._end = max(self._end, offset + len(payload))
            return offset

    def sync(self) -> None:
        with self._lock:
            if self._is_unsynced:
                self._open_file.sync()
                if not self._is_name_synced:
                    self._disk.sync(os.path.dirname(self._path))
                self._is_unsynced, self._is_name_synced = False, True

    def register_blob(self, sha256: str, offset: int, size: int) -> None:
        with self._lock:
            if sha256 in self._entries:
                self.free_space(offset, size)
            else:
                self._entries[sha256] = (offset, size)

    def free_space(self, offset: int, size: int) -> None:
        with self._lock:
            self._free_offsets.setdefault(size, []).append(offset)

    def remove_blob(self, sha256: str) -> None:
        with self._lock:
            entry = self._entries.pop(sha256, None)
            if entry is not None:
                self.free_space(*entry)
            if self._verify_on_load and not self._entries and self._end:
                self._open_file.truncate()
                self._free_offsets.clear()
                self._end = 0

    @property
    def _open_file(self) -> OpenFile:
        if self._file is None:
            self._file = self._disk.open(self._path)
        return self._file

    def _read_existing_blobs(self) -> None:
        for entry in iterate_entries(self._open_file):
            if entry.sha256 not in self._entries and _is_undamaged(self._open_file, entry):
                self._entries[entry.sha256] = (entry.offset, entry.size)
            else:
                self.free_space(entry.offset, entry.size)
            self._end = entry.end_offset


def iterate_entries(file: OpenFile) -> Iterator[PackEntry]:
    """Yield the entries with intact headers. The blob of an entry may be damaged."""
    position = 0
    file_size = file.size()
    while position < file_size:
        entry = _read_entry_at(file, position, file_size) or _find_next_entry(file, position + 1, file_size)
        if entry is None:
            return  # the next blob overwrites the rest of the file
        yield entry
        position = entry.end_offset


def _entry_header(sha256: str, size: int) -> bytes:
    header = _HEADER.pack(_HEADER_MARK, bytes.fromhex(sha256), size, 0)[:-4]
    return header + zlib.crc32(header).to_bytes(4, "little")


def _read_entry_at(file: OpenFile, position: int, file_size: int) -> PackEntry | None:
    header = file.read(position, _HEADER.size)
    if len(header) < _HEADER.size:
        return None
    mark, digest, size, checksum = _HEADER.unpack(header)
    entry = PackEntry(digest.hex(), position + _HEADER.size, size)
    is_intact = mark == _HEADER_MARK and checksum == zlib.crc32(header[:-4]) and entry.end_offset <= file_size
    return entry if is_intact else None


def _find_next_entry(file: OpenFile, position: int, file_size: int) -> PackEntry | None:
    # A blob may contain bytes that look like a header, so only an entry with an undamaged blob counts.
    while position < file_size:
        data = file.read(position, _SEARCH_BYTES)
        mark_index = data.find(_HEADER_MARK)
        if mark_index < 0:
            position += max(len(data) - len(_HEADER_MARK) + 1, 1)
            continue
        entry = _read_entry_at(file, position + mark_index, file_size)
        if entry is not None and _is_undamaged(file, entry):
            return entry
        position += mark_index + 1
    return None


def _is_undamaged(file: OpenFile, entry: PackEntry) -> bool:
    return hashlib.sha256(file.read(entry.offset, entry.size)).hexdigest() == entry.sha256


def read_foreign_blob(path: str, disk: Disk, sha256: str) -> bytes | None:
    """Return a blob from a pack file that another process writes, or None if missing or damaged."""
    if not disk.is_file(path):
        return None
    file = disk.open(path)
    try:
        payloads = (file.read(entry.offset, entry.size) for entry in iterate_entries(file) if entry.sha256 == sha256)
        return next((payload for payload in payloads if hashlib.sha256(payload).hexdigest() == sha256), None)
    finally:
        file.close()
