"""The write-ahead log of the database: whether SQLite has taken up all that was committed to it.

SQLite reads the log as far as its checksums match, takes what follows for an unfinished write, and overwrites it. So
one damaged bit would take back every fact behind it without a word. What another process is just writing, or was
killed over before SQLite told it that it was written, is not taken up either; there the checksums match.

How far SQLite has read is asked of SQLite, never read from its index: the locks of a process on a file, which keep
others from making that index anew while it is used, all end when the process closes any descriptor of the file.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.disk import Disk

log = logging.getLogger("fedquilt.coordinator")

_HEAD: Final = struct.Struct(">4I8s8s")  # magic, version, page size, number of the log, salts, checksum
_FRAME: Final = struct.Struct(">II8s8s")  # page, size of the database after a commit or 0, salts, checksum


class Log(NamedTuple):
    """A log before it is opened."""

    path: Path
    head: bytes
    committed: int  # frames up to the last commit, whether their checksums match or not

    def lost(self, disk: Disk, taken: int) -> int:
        """Number of committed frames behind the `taken` that SQLite has read; 0 if the log has begun anew."""
        if self.committed <= taken or disk.read(self.path, 0, _HEAD.size) != self.head:
            return 0
        return self.committed - taken if self._damaged(disk, taken) else 0

    def _damaged(self, disk: Disk, taken: int) -> bool:
        """Whether a frame that SQLite has not taken up has another checksum than its content, or so has the head."""
        _, _, page, _, salts, sums = _HEAD.unpack(self.head)
        order, size = _order(self.head), _size(page)
        if not taken and not _whole(self.head):
            return True
        seed = sums if not taken else disk.read(self.path, _HEAD.size + (taken - 1) * size + 16, 8)
        for number in range(taken, self.committed):
            frame = disk.read(self.path, _HEAD.size + number * size, size)
            if len(frame) < size:
                return False  # it has begun anew meanwhile
            _, _, own, stated = _FRAME.unpack_from(frame)
            if own != salts or _checksum(frame[:8] + frame[_FRAME.size :], seed, order) != stated:
                return True
            seed = stated
        return False

    def report(self, disk: Disk, db: sqlite3.Connection) -> None:
        """Keep a copy of what SQLite, which has opened the log, has not taken up, and say so.

        On a full disk the next opening does so: a checkpoint has no room there, and who reads needs none.
        """
        if not self.committed:
            return
        try:
            _, taken, _ = db.execute("pragma wal_checkpoint(passive)").fetchone()  # -1: another process is at it
        except sqlite3.OperationalError as error:
            if "is full" not in str(error):
                raise
            return
        if taken >= 0 and (lost := self.lost(disk, taken)):
            aside = self.path.with_name(f"{self.path.name}.damaged")
            disk.write(aside, disk.read(self.path))
            log.warning(
                "%s is damaged: its last %d pages cannot be read, and facts in them are lost; a copy is %s, and "
                "devices say what they know beyond what is left",
                *(self.path, lost, aside),
            )


def _order(head: bytes) -> str:
    return ">" if head[3] & 1 else "<"


def _whole(head: bytes) -> bool:
    return _checksum(head[:24], bytes(8), _order(head)) == head[24:]


def _checksum(payload: bytes, seed: bytes, order: str) -> bytes:
    """SQLite's checksum of words in the log's byte order, going on from `seed`; stored with the high byte first."""
    first, second = struct.unpack(">II", seed)
    words = iter(struct.unpack(f"{order}{len(payload) // 4}I", payload))
    for one, other in zip(words, words, strict=True):
        first = first + one + second & 0xFFFFFFFF
        second = second + other + first & 0xFFFFFFFF
    return struct.pack(">II", first, second)


def _size(page: int) -> int:
    """Bytes of a frame with a page of so many bytes; of one with the usual page where that is no size of one."""
    return _FRAME.size + (page if 512 <= page <= 65536 and page & page - 1 == 0 else 4096)


def look(disk: Disk, database: Path) -> Log:
    """The log beside a database; an empty one where there is none, or no longer one."""
    path = database.with_name(database.name + "-wal")
    try:
        return _found(disk, path)
    except FileNotFoundError:  # the last process that had the database open has closed it: all is in there
        return Log(path, b"", 0)


def _found(disk: Disk, path: Path) -> Log:
    found = disk.stat(path)
    head = b"" if found is None else disk.read(path, 0, _HEAD.size)
    if found is None or len(head) < _HEAD.size:
        return Log(path, head, 0)
    _, _, page, _, salts, _ = _HEAD.unpack(head)
    size = _size(page)
    frames = [_FRAME.unpack(disk.read(path, at, _FRAME.size)) for at in range(_HEAD.size, found.size - size + 1, size)]
    ours = {salts}
    for _, _, first, _ in frames[:1]:
        # A log that begins anew has its new head before its first frame: both words of salt are others than those of
        # the frames that it still has of the log before it. Where one word is the same, or the head is not whole, it
        # is damaged.
        if first[:4] == salts[:4] or first[4:] == salts[4:] or not _whole(head):
            ours.add(first)
    commits = [number for number, frame in enumerate(frames, 1) if frame[1] and frame[2] in ours]
    return Log(path, head, max(commits, default=0))
