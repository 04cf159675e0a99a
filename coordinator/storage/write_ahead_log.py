"""Detection of damage in the database's write-ahead log.

SQLite reads the log up to the first wrong checksum, treats the rest as an unfinished write, and overwrites it. So one
damaged bit would silently discard all later events. SQLite also ignores the unfinished write of another process or of a
killed one, but there the checksums match.

The number of frames read is requested from SQLite and never taken from its index. All locks of a process on a file end
when the process closes any descriptor of the file, and these locks protect the index while it is used.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.host.disk import Disk

log = logging.getLogger("fedquilt.coordinator")

_HEAD: Final = struct.Struct(">4I8s8s")  # magic, version, page size, number of the log, salts, checksum
_FRAME: Final = struct.Struct(">II8s8s")  # page, size of the database after a commit or 0, salts, checksum


class WriteAheadLog(NamedTuple):
    path: Path
    head: bytes
    committed_frames: int  # frames up to the last commit, whether their checksums match or not

    def count_lost_frames(self, disk: Disk, read_frames: int) -> int:
        """Return the number of committed frames that SQLite lost to damage, or 0 for a restarted log."""
        if self.committed_frames <= read_frames or disk.read(self.path, 0, _HEAD.size) != self.head:
            return 0
        return self.committed_frames - read_frames if self._has_damaged_frame(disk, read_frames) else 0

    def _has_damaged_frame(self, disk: Disk, read_frames: int) -> bool:
        _, _, page, _, salts, sums = _HEAD.unpack(self.head)
        byte_order, size = _byte_order(self.head), _frame_size(page)
        if not read_frames and not _is_header_intact(self.head):
            return True
        seed = sums if not read_frames else disk.read(self.path, _HEAD.size + (read_frames - 1) * size + 16, 8)
        for number in range(read_frames, self.committed_frames):
            frame = disk.read(self.path, _HEAD.size + number * size, size)
            if len(frame) < size:
                return False  # the log was restarted meanwhile
            _, _, frame_salts, stated_checksum = _FRAME.unpack_from(frame)
            if frame_salts != salts or _checksum(frame[:8] + frame[_FRAME.size :], seed, byte_order) != stated_checksum:
                return True
            seed = stated_checksum
        return False

    def report_damage(self, disk: Disk, db: sqlite3.Connection) -> None:
        """Log a warning of a damaged log, and copy the log. Call after SQLite has opened the database."""
        if not self.committed_frames:
            return
        try:
            # -1 if another process has the lock
            _, read_frames, _ = db.execute("pragma wal_checkpoint(passive)").fetchone()
        except sqlite3.OperationalError as error:
            if "is full" not in str(error):
                raise
            return
        if read_frames >= 0 and (lost_frames := self.count_lost_frames(disk, read_frames)):
            copy_path = self.path.with_name(f"{self.path.name}.damaged")
            disk.write(copy_path, disk.read(self.path))
            log.warning(
                "%s is damaged: its last %d pages cannot be read, and the events in them are lost. A copy is in %s. "
                "Devices report rounds that the log now lacks",
                *(self.path, lost_frames, copy_path),
            )


def _byte_order(head: bytes) -> str:
    return ">" if head[3] & 1 else "<"


def _is_header_intact(head: bytes) -> bool:
    return _checksum(head[:24], bytes(8), _byte_order(head)) == head[24:]


def _checksum(payload: bytes, seed: bytes, byte_order: str) -> bytes:
    """Return SQLite's checksum of log bytes, as 8 big-endian bytes. `seed` is the previous checksum."""
    first, second = struct.unpack(">II", seed)
    words = iter(struct.unpack(f"{byte_order}{len(payload) // 4}I", payload))
    for first_word, second_word in zip(words, words, strict=True):
        first = first + first_word + second & 0xFFFFFFFF
        second = second + second_word + first & 0xFFFFFFFF
    return struct.pack(">II", first, second)


def _frame_size(page: int) -> int:
    # an invalid page size counts as the default of 4096 bytes
    return _FRAME.size + (page if 512 <= page <= 65536 and page & page - 1 == 0 else 4096)


def read_log(disk: Disk, database: Path) -> WriteAheadLog:
    """Return the log of a database before it is opened, or an empty log if there is none."""
    path = database.with_name(database.name + "-wal")
    try:
        return _parse_log(disk, path)
    except FileNotFoundError:  # a closed database has no log
        return WriteAheadLog(path, b"", 0)


def _parse_log(disk: Disk, path: Path) -> WriteAheadLog:
    status = disk.stat(path)
    head = b"" if status is None else disk.read(path, 0, _HEAD.size)
    if status is None or len(head) < _HEAD.size:
        return WriteAheadLog(path, head, 0)
    _, _, page, _, salts, _ = _HEAD.unpack(head)
    size = _frame_size(page)
    frames = [
        _FRAME.unpack(disk.read(path, offset, _FRAME.size))
        for offset in range(_HEAD.size, status.size - size + 1, size)
    ]
    valid_salts = {salts}
    for _, _, first_salts, _ in frames[:1]:
        # A restarted log has a new head before its first frame, and both words of its salt differ from those of the
        # old frames behind. A head with one equal word, or with a wrong checksum, is damaged.
        if first_salts[:4] == salts[:4] or first_salts[4:] == salts[4:] or not _is_header_intact(head):
            valid_salts.add(first_salts)
    commits = [number for number, frame in enumerate(frames, 1) if frame[1] and frame[2] in valid_salts]
    return WriteAheadLog(path, head, max(commits, default=0))
