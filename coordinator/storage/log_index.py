"""Index of the jobs' event logs, with the end of each log and the blobs that its job needs.

An update of the index reads only the events that were added since the previous one. In a new process the index starts
at the job's snapshot, or at the first event.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from fedquilt.coordinator.storage.checksums import FIRST, chain_checksum
from fedquilt.core import UNDECODABLE


class IndexedLog(msgspec.Struct):
    """Index of a job's log up to one event.

    Damaged events are noted, and later events are still read.
    """

    seq: int = 0  # number of that fact; 0: none
    head: bytes = FIRST  # its checksum
    facts: int = 0
    size: int = 0  # bytes of their bodies
    at: float | None = None  # wall-clock seconds of that fact
    state: str = ""  # sha256 of the latest state; "": there is none
    best: str = ""  # likewise, of the state with the best evaluation
    updates: dict[
        str, tuple[str, ...]
    ] = {}  # device -> sha256 of blobs of its update that no state or sum contains yet
    sum: str = ""  # sha256 of the stored partial aggregate, or empty
    whole: bool = True  # every fact is what was written

    @property
    def needed_blobs(self) -> set[str]:
        """SHA-256 of the blobs that the job needs in addition to its bundle."""
        found = {sha256 for blobs in self.updates.values() for sha256 in blobs}
        return found.union(each for each in (self.state, self.best, self.sum) if each)

    def add_rows(self, job: str, rows: Iterable[tuple[int, Any, Any, bytes, int]]) -> None:
        """Add rows of later events: sequence, wall-clock seconds, JSON, checksum and bytes of each."""
        for seq, at, body, sum, size in rows:
            self.whole = self.whole and sum == chain_checksum(self.head, job, at, body)
            self.add_event(seq, at, body, sum, size)

    def add_event(self, seq: int, at: Any, body: Any, sum: bytes, size: int) -> None:
        """Add the next event, without verifying its checksum."""
        self.seq, self.head, self.at = seq, sum, at
        self.facts, self.size = self.facts + 1, self.size + size
        try:
            named = _named(body)
        except (*UNDECODABLE, TypeError):
            return
        if named.state is not None:
            self.best = self.state if named.best else self.best
            self.state, self.updates, self.sum = named.state.sha256, {}, ""
        if named.update is not None:
            self.updates[named.update.device] = tuple(ref.sha256 for ref in named.update.bundles.values())
        if named.sum is not None:
            self.sum = named.sum.sha256
            self.updates = {name: blobs for name, blobs in self.updates.items() if name not in named.devices}


class LogIndex:
    """Index of the event logs in one database.

    Args:
        kept: Returns the index in a job's snapshot, or None without a valid snapshot.

    Raises, from every method:
        sqlite3.Error: If the database cannot be read.
    """

    def __init__(self, db: sqlite3.Connection, kept: Callable[[str], IndexedLog | None]) -> None:
        self._db, self._kept = db, kept
        self._known: dict[str, IndexedLog] = {}  # by job, as read last

    def read_all_logs(self) -> dict[str, IndexedLog]:
        """Return the present index of every job's log. The result must not be changed."""
        heads = dict(self._db.execute("select id, head from jobs order by rowid").fetchall())
        for gone in self._known.keys() - heads:
            del self._known[gone]
        return {job: self.read_log(job, head) for job, head in heads.items()}

    def add_written_event(self, job: str, before: bytes, seq: int, at: float, body: str, sum: bytes) -> None:
        """Add an event that this process appends to a log, if the index ends at the checksum `before`."""
        known = self._known.get(job)
        if known is not None and known.head == before:  # if it is taken back, the next look finds another fact there
            known.add_event(seq, at, body, sum, len(body.encode()))

    def read_log(self, job: str, head: bytes) -> IndexedLog:
        """Return the present index of a job's log, whose last checksum is `head`."""
        known = self._known.get(job)
        try:
            if known is None or (known.head != head and not has_event(self._db, job, known.seq, known.head)):
                known = self._known[job] = self._kept(job) or IndexedLog()
            if known.head != head:
                known.add_rows(job, self._db.execute(_BEHIND, (job, known.seq)))
        except UnicodeEncodeError:  # a damaged id, which no fact names
            return IndexedLog(whole=False)
        return known


def has_event(db: sqlite3.Connection, job: str, seq: int, sum: bytes) -> bool:
    return bool(db.execute("select sum from facts where seq = ? and job = ?", (seq, job)).fetchone() == (sum,))


_BEHIND: Final = """
    select seq, at, body, sum, length(cast(body as blob)) from facts where job = ? and seq > ? order by seq
"""


class _BlobField(msgspec.Struct):
    sha256: str


class _UpdateField(msgspec.Struct):
    device: str
    bundles: dict[str, _BlobField]


class _ReferencedBlobs(msgspec.Struct):
    """Blobs named in an event. The other fields of the event are not decoded."""

    state: _BlobField | None = None
    best: bool = False  # whether the state before is the best so far
    update: _UpdateField | None = None
    sum: _BlobField | None = None  # of the updates of these devices
    devices: tuple[str, ...] = ()


_named: Final = msgspec.json.Decoder(_ReferencedBlobs).decode
