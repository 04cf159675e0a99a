"""Follows the jobs' logs: where each ends, and which blobs it needs.

A look at a log reads what was added since the last one, so that it costs as much as has come, not as much as there is.
The first look of a process begins where the job's snapshot ends, or at the first fact.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from fedquilt.coordinator.checksums import FIRST, link
from fedquilt.core import UNDECODABLE


class Log(msgspec.Struct):
    """A job's log up to one of its facts. What is damaged is noted, says nothing, and hides nothing behind it."""

    seq: int = 0  # number of that fact; 0: none
    head: bytes = FIRST  # its checksum
    facts: int = 0
    size: int = 0  # bytes of their bodies
    at: float | None = None  # wall-clock seconds of that fact
    state: str = ""  # sha256 of the latest state; "": there is none
    updates: dict[
        str, tuple[str, ...]
    ] = {}  # device -> sha256 of blobs of its update that no state or sum contains yet
    sum: str = ""  # sha256 of the sum that contains other updates of the round; "": there is none
    whole: bool = True  # every fact is what was written

    @property
    def blobs(self) -> set[str]:
        """Hashes (sha256) of what the job needs beside its bundle."""
        found = {sha256 for blobs in self.updates.values() for sha256 in blobs}
        return found.union(each for each in (self.state, self.sum) if each)

    def take(self, job: str, rows: Iterable[tuple[int, Any, Any, bytes, int]]) -> None:
        """Read on: (sequence, wall-clock seconds, JSON, checksum, bytes) of each fact behind this one."""
        for seq, at, body, sum, size in rows:
            self.whole = self.whole and sum == link(self.head, job, at, body)
            self.add(seq, at, body, sum, size)

    def add(self, seq: int, at: Any, body: Any, sum: bytes, size: int) -> None:
        """Go on to the next fact, whose checksum fits."""
        self.seq, self.head, self.at = seq, sum, at
        self.facts, self.size = self.facts + 1, self.size + size
        try:
            named = _named(body)
        except (*UNDECODABLE, TypeError):
            return
        if named.state is not None:
            self.state, self.updates, self.sum = named.state.sha256, {}, ""
        if named.update is not None:
            self.updates[named.update.device] = tuple(ref.sha256 for ref in named.update.bundles.values())
        if named.sum is not None:
            self.sum = named.sum.sha256
            self.updates = {name: blobs for name, blobs in self.updates.items() if name not in named.devices}


class Logs:
    """The logs of one database.

    Args:
        db: with the tables `jobs` and `facts`.
        kept: the log as a snapshot of a job has it, if there is one that fits.

    Raises, from every method:
        sqlite3.Error: the database cannot be read.
    """

    def __init__(self, db: sqlite3.Connection, kept: Callable[[str], Log | None]) -> None:
        self._db, self._kept = db, kept
        self._known: dict[str, Log] = {}  # by job, as of the last look

    def now(self) -> dict[str, Log]:
        """Every job's log. Not to be changed."""
        heads = dict(self._db.execute("select id, head from jobs order by rowid").fetchall())
        for gone in self._known.keys() - heads:
            del self._known[gone]
        return {job: self.of(job, head) for job, head in heads.items()}

    def written(self, job: str, before: bytes, seq: int, at: float, body: str, sum: bytes) -> None:
        """Note a fact that this process writes behind the one with the checksum `before`."""
        known = self._known.get(job)
        if known is not None and known.head == before:  # if it is taken back, the next look finds another fact there
            known.add(seq, at, body, sum, len(body.encode()))

    def of(self, job: str, head: bytes) -> Log:
        """The log of a job whose row has `head` as the checksum of the last fact."""
        known = self._known.get(job)
        try:
            if known is None or (known.head != head and not has(self._db, job, known.seq, known.head)):
                known = self._known[job] = self._kept(job) or Log()
            if known.head != head:
                known.take(job, self._db.execute(_BEHIND, (job, known.seq)))
        except UnicodeEncodeError:  # a damaged id, which no fact names
            return Log(whole=False)
        return known


def has(db: sqlite3.Connection, job: str, seq: int, sum: bytes) -> bool:
    """Whether a job's fact of this number has this checksum."""
    return bool(db.execute("select sum from facts where seq = ? and job = ?", (seq, job)).fetchone() == (sum,))


_BEHIND: Final = """
    select seq, at, body, sum, length(cast(body as blob)) from facts where job = ? and seq > ? order by seq
"""


class _Blob(msgspec.Struct):
    sha256: str


class _Update(msgspec.Struct):
    device: str
    bundles: dict[str, _Blob]


class _Named(msgspec.Struct):
    """Blobs that a fact names; its other fields are not read."""

    state: _Blob | None = None
    update: _Update | None = None
    sum: _Blob | None = None  # of the updates of these devices
    devices: tuple[str, ...] = ()


_named: Final = msgspec.json.Decoder(_Named).decode
