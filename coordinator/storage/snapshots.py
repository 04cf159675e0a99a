"""Snapshots of job states. A start applies only the events after a snapshot.

The log is authoritative and the snapshot is derived data. A snapshot that is damaged, of another version, or in
contradiction to its log is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from fedquilt import __version__
from fedquilt.coordinator.device_columns import DeviceColumn, DeviceWeights, RoundBitmap
from fedquilt.coordinator.rounds.events import ENDED_PHASES, AnyEvent, JobConstants, JobState, UpdateAccepted
from fedquilt.coordinator.storage.rows import DamagedRunError, IndexedLog, checksum, database_errors, has_event
from fedquilt.core import UNDECODABLE, StoreError, Update
from fedquilt.host.logs import log_ids

RULES: Final = 11  # raise it whenever the same facts come to another state, or a state is another type
VERSION: Final = f"{__version__} {RULES}"
EVERY: Final = 1000  # facts, and one for each device, from one snapshot of a job to the next

SCHEMA: Final = """
create table if not exists snapshots (
    job text primary key, version text not null, log blob not null, body blob not null, sum blob not null);
"""

logger = logging.getLogger("fedquilt.coordinator")


class Snapshot(msgspec.Struct):
    job_state: JobState
    examples_by_device: dict[str, int] = {}  # device -> number of its examples, as reported
    event_count: int = 0
    weights: DeviceWeights = msgspec.field(default_factory=DeviceWeights)  # of a site: the mean of its boards
    example_counts: DeviceWeights = msgspec.field(default_factory=DeviceWeights)  # examples, likewise

    def apply_event(self, fact: AnyEvent, after: JobState) -> None:
        if isinstance(fact, UpdateAccepted):
            self._record_update_numbers(fact.update, work="work" in after.task_actions)
        self.job_state, self.event_count = after, self.event_count + 1

    def _record_update_numbers(self, update: Update, *, work: bool) -> None:
        boards = max(len(update.boards), 1)
        if (examples := update.usage.examples) is not None:
            self.examples_by_device[update.device] = examples
            self.example_counts.set_number(update.device, examples / boards)
        if work and update.weight > 0:
            self.weights.set_number(update.device, update.weight / boards)


class SnapshotStore:
    def __init__(
        self,
        db: sqlite3.Connection,
        look: Callable[[str], IndexedLog | None],
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        every: int = EVERY,
    ) -> None:
        self._db, self._look, self._home, self._writing, self._every = db, look, home, writing, every
        self._facts: dict[str, int] = {}  # job -> number of facts in its latest snapshot
        self._logged: set[str] = set()  # jobs whose unusable snapshot was logged

    def read_log(self, job: str) -> IndexedLog | None:
        """Return a job's log up to its valid snapshot, or None."""
        found = self._read_snapshot(job)
        return None if found is None else found[0]

    def _read_snapshot(self, job: str) -> tuple[IndexedLog, bytes] | None:
        """Return a valid snapshot's log index and encoded state, or None after a warning."""
        row = self._db.execute("select version, log, body, sum from snapshots where job = ?", (job,)).fetchone()
        if row is None:
            return None
        version, packed, body, sum = row
        if sum != _row_checksum(job, version, packed, body):
            self._warn_of_unusable_snapshot(job, "it is not what was written")
        elif version != VERSION:
            self._warn_of_unusable_snapshot(job, f"it is of another version of fedquilt ({version}; this is {VERSION})")
        elif not has_event(self._db, job, (log := msgspec.msgpack.decode(packed, type=IndexedLog)).seq, log.head):
            self._warn_of_unusable_snapshot(job, "the log has another fact, or none, where it ends")
        else:
            return log, body
        return None

    def _warn_of_unusable_snapshot(self, job: str, why: str) -> None:
        if job not in self._logged:
            self._logged.add(job)
            said = "the snapshot of %s in %s is not used, and its log is read from the first event: %s"
            logger.warning(said, job, self._home, why, extra=log_ids(run=job))

    def load_state(self, job: str, plan: JobConstants, now_s: float) -> tuple[Snapshot, int]:
        """Return the state of a job's latest snapshot, or the initial state, and its last event's number or 0."""
        with database_errors(self._home):
            log, body = self._read_snapshot(job) or (IndexedLog(), b"")
        if not body:  # none, or of a job that is done, whose log is all that is needed
            return Snapshot(JobState(plan)), 0
        try:
            standing = decode(body)
        except UNDECODABLE as error:
            self._warn_of_unusable_snapshot(job, f"its state cannot be read ({error})")
            return Snapshot(JobState(plan)), 0
        if standing.job_state.constants != plan:
            self._warn_of_unusable_snapshot(job, "the job's settings have changed since")
            return Snapshot(JobState(plan)), 0
        self._facts[job] = log.facts
        rounds = standing.job_state
        asked_s = dict.fromkeys(rounds.selected_s, now_s)
        opened_s = now_s - rounds.passed_s
        standing.job_state = replace(rounds, opened_s=opened_s, round_started_s=now_s, selected_s=asked_s)
        return standing, log.seq

    def save_if_due(self, job: str, standing: Snapshot) -> None:
        """Store a snapshot of a job after enough events, or at the end of the job.

        Nothing is stored while the log does not match the state, because events are unwritten or damaged.
        """
        rounds = standing.job_state
        ended = rounds.phase in ENDED_PHASES
        few = standing.event_count - self._facts.get(job, 0) < self._every + len(rounds.last_selected_rounds)
        if rounds.state is None or (few and not ended):
            return
        body = b"" if rounds.phase == "done" else encode(standing)
        try:
            with database_errors(self._home):
                known = self._look(job)
            if known is None or not known.whole or known.facts != standing.event_count:
                return
            packed = msgspec.msgpack.encode(known)
            values = job, VERSION, packed, body, _row_checksum(job, VERSION, packed, body)
            with self._writing():
                self._db.execute("insert or replace into snapshots values (?, ?, ?, ?, ?)", values)
        except (DamagedRunError, StoreError) as error:
            logger.warning("no snapshot of %s is kept: %s", job, error, extra=log_ids(run=job))
        else:
            self._facts[job] = standing.event_count


def _row_checksum(job: str, version: str, log: bytes, body: bytes) -> bytes:
    return checksum(job, version, log, hashlib.sha256(body).digest())


def _encode_custom_type(value: Any) -> Any:
    if isinstance(value, RoundBitmap):
        return value.to_bytes()
    if isinstance(value, DeviceColumn):
        return dict(value)
    raise NotImplementedError(type(value))


def _decode_custom_type(kind: type, value: Any) -> Any:
    if kind is RoundBitmap:
        return RoundBitmap.from_bytes(value)
    if issubclass(kind, DeviceColumn):
        return kind(value)
    raise NotImplementedError(kind)


encode: Final = msgspec.msgpack.Encoder(enc_hook=_encode_custom_type).encode
decode: Final = msgspec.msgpack.Decoder(Snapshot, dec_hook=_decode_custom_type).decode
