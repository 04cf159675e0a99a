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
from fedquilt.coordinator.rounds.events import ENDED_PHASES, AnyEvent, UpdateAccepted
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState
from fedquilt.coordinator.storage.rows import DamagedRunError, IndexedLog, checksum, database_errors, has_event
from fedquilt.core import DECODE_ERRORS, StoreError, Update
from fedquilt.host.logs import log_ids

STATE_VERSION: Final = 15  # to be raised whenever the same events give another state or another type
VERSION: Final = f"{__version__} {STATE_VERSION}"
EVENTS_PER_SNAPSHOT: Final = 1000  # events between two snapshots, plus one for each device

SCHEMA: Final = """
create table if not exists snapshots (
    job text primary key, version text not null, log blob not null, body blob not null, sum blob not null);
"""

logger = logging.getLogger("fedquilt.coordinator")


class Snapshot(msgspec.Struct):
    job_state: JobState
    examples_by_device: dict[str, int] = {}  # device -> reported number of examples
    event_count: int = 0
    weights: DeviceWeights = msgspec.field(default_factory=DeviceWeights)  # for a site, the mean of its devices
    example_counts: DeviceWeights = msgspec.field(default_factory=DeviceWeights)  # for a site, the mean of its devices

    def apply_event(self, event: AnyEvent, new_state: JobState) -> None:
        if isinstance(event, UpdateAccepted):
            self._record_examples_and_weight(event.update, is_work_round="work" in new_state.task_actions)
        self.job_state, self.event_count = new_state, self.event_count + 1

    def _record_examples_and_weight(self, update: Update, *, is_work_round: bool) -> None:
        boards = max(len(update.site_devices), 1)
        if (examples := update.usage.examples) is not None:
            self.examples_by_device[update.device] = examples
            self.example_counts.set_number(update.device, examples / boards)
        if is_work_round and update.weight > 0:
            self.weights.set_number(update.device, update.weight / boards)


class SnapshotStore:
    def __init__(
        self,
        db: sqlite3.Connection,
        find_log: Callable[[str], IndexedLog | None],
        home: Path,
        open_transaction: Callable[[], AbstractContextManager[None]],
        min_events: int = EVENTS_PER_SNAPSHOT,
    ) -> None:
        self._db = db
        self._find_log = find_log
        self._home = home
        self._open_transaction = open_transaction
        self._min_events = min_events
        self._event_counts: dict[str, int] = {}  # job -> number of events in the latest snapshot
        self._warned_jobs: set[str] = set()  # jobs whose unusable snapshot was logged

    def read_log(self, job: str) -> IndexedLog | None:
        """Return the index of a job's log up to its snapshot, or None without a valid snapshot."""
        snapshot = self._read_snapshot(job)
        return None if snapshot is None else snapshot[0]

    def _read_snapshot(self, job: str) -> tuple[IndexedLog, bytes] | None:
        row = self._db.execute("select version, log, body, sum from snapshots where job = ?", (job,)).fetchone()
        if row is None:
            return None
        version, encoded_log, body, sum = row
        if sum != _row_checksum(job, version, encoded_log, body):
            self._warn_of_unusable_snapshot(job, "its checksum is wrong")
        elif version != VERSION:
            self._warn_of_unusable_snapshot(
                job, f"it is from another version of fedquilt ({version}, this is {VERSION})"
            )
        elif not has_event(self._db, job, (log := msgspec.msgpack.decode(encoded_log, type=IndexedLog)).seq, log.head):
            self._warn_of_unusable_snapshot(job, "its last event differs from the log")
        else:
            return log, body
        return None

    def _warn_of_unusable_snapshot(self, job: str, reason: str) -> None:
        if job not in self._warned_jobs:
            self._warned_jobs.add(job)
            text = "snapshot of %s in %s ignored, and the log read from the first event: %s"
            logger.warning(text, job, self._home, reason, extra=log_ids(run=job))

    def load_state(self, job: str, constants: JobConstants, now_s: float) -> tuple[Snapshot, int]:
        """Return a job's latest valid snapshot and the number of its last event.

        Without a snapshot, return that of a new job and 0.
        """
        with database_errors(self._home):
            log, body = self._read_snapshot(job) or (IndexedLog(), b"")
        if not body:  # no snapshot, or a job that is done
            return Snapshot(JobState(constants)), 0
        try:
            snapshot = decode(body)
        except DECODE_ERRORS as error:
            self._warn_of_unusable_snapshot(job, f"its state cannot be decoded ({error})")
            return Snapshot(JobState(constants)), 0
        if snapshot.job_state.constants != constants:
            self._warn_of_unusable_snapshot(job, "the job's settings have changed")
            return Snapshot(JobState(constants)), 0
        self._event_counts[job] = log.event_count
        job_state = snapshot.job_state
        selected_s = dict.fromkeys(job_state.selected_s, now_s)
        opened_s = now_s - job_state.passed_s
        snapshot.job_state = replace(job_state, opened_s=opened_s, round_started_s=now_s, selected_s=selected_s)
        return snapshot, log.seq

    def save_if_due(self, job: str, snapshot: Snapshot) -> None:
        """Store a snapshot of a job after enough events, or at the end of the job.

        Nothing is stored while the log does not match the state, because events are unwritten or damaged.
        """
        job_state = snapshot.job_state
        has_ended = job_state.phase in ENDED_PHASES
        is_early = snapshot.event_count - self._event_counts.get(job, 0) < self._min_events + len(
            job_state.last_selected_rounds
        )
        if job_state.state is None or (is_early and not has_ended):
            return
        body = b"" if job_state.phase == "done" else encode(snapshot)
        try:
            with database_errors(self._home):
                log = self._find_log(job)
            if log is None or not log.is_intact or log.event_count != snapshot.event_count:
                return
            encoded_log = msgspec.msgpack.encode(log)
            values = job, VERSION, encoded_log, body, _row_checksum(job, VERSION, encoded_log, body)
            with self._open_transaction():
                self._db.execute("insert or replace into snapshots values (?, ?, ?, ?, ?)", values)
        except (DamagedRunError, StoreError) as error:
            logger.warning("no snapshot of %s is stored: %s", job, error, extra=log_ids(run=job))
        else:
            self._event_counts[job] = snapshot.event_count


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
