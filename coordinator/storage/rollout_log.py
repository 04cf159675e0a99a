"""Rollouts in a coordinator's database: one row each, and a checksummed event log."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fedquilt.coordinator.rounds.rollout import (
    AnyRolloutEvent,
    Rollout,
    RolloutPlan,
    RolloutReverted,
    RolloutStarted,
    apply_rollout_event,
)
from fedquilt.coordinator.storage import rows
from fedquilt.coordinator.storage.rows import (
    NO_CHECKSUM,
    JobRow,
    RowStore,
    current_user,
    database_errors,
    encode_lossless,
    make_run_id,
)
from fedquilt.core import DECODE_ERRORS, JobError, StoreError

SCHEMA: Final = rows.SCHEMA.format(table="rollouts", facts="rollout_facts")
_SERIAL: Final = "release"  # counter with the latest serial number
_decoded: Final = msgspec.json.Decoder(AnyRolloutEvent).decode
_plan: Final = msgspec.json.Decoder(RolloutPlan).decode


class StoredRollout(NamedTuple):
    state: Rollout
    created: float  # wall-clock seconds
    submitter: str
    revert_requested: bool
    last_event_time: float  # wall-clock seconds of the latest event, or of the row


class RolloutLog:
    """Rollouts of one database.

    Every method raises StoreError if the database cannot be read or written or the rollout is unknown, and
    DamagedRunError if the rows of the rollout are damaged. A request to revert is stored as the status of the row.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        counters: RowStore,
        home: Path,
        open_transaction: Callable[[], AbstractContextManager[None]],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s, self._counters, self._home, self._open_transaction = wall_s, counters, home, open_transaction
        self._rows = RowStore(db, home, table="rollouts", events_table="rollout_facts")
        # id -> number of the latest event read, row, state and time
        self._cached: dict[str, tuple[int, JobRow, Rollout, float]] = {}

    def add_rollout(self, plan: RolloutPlan, *, id: str = "") -> str:
        """Queue a rollout and return its id. Raise JobError if another rollout of this kind is under way."""
        plan.require_valid()
        now = time.time()
        id = id or make_run_id(plan.kind, now)
        with self._open_transaction():
            for stored in self._load_rollouts_and_errors()[0]:
                if stored.state.plan.kind == plan.kind and stored.state.is_under_way:
                    raise JobError(
                        f"rollout {stored.state.id} of {stored.state.plan.name} is {stored.state.status}: wait for its "
                        f"end, or abort it with `fedquilt rollout back {stored.state.id} --home {self._home}`"
                    )
            body = encode_lossless(id, plan, _plan)
            self._rows.insert_job(JobRow(id, body, "", "", now, submitter=current_user()))
        return id

    def readable_rollouts(self) -> list[StoredRollout]:
        with self._read_transaction():
            return self._load_rollouts_and_errors()[0]

    def read_errors(self) -> dict[str, JobError]:
        with self._read_transaction():
            return self._load_rollouts_and_errors()[1]

    def find_rollout(self, rollout: str = "") -> StoredRollout:
        """Return the latest rollout with this id, version or run, or the latest of all for ""."""
        rollouts = self.readable_rollouts()
        if rollout and (error := self.read_errors().get(rollout)):
            raise StoreError(str(error))
        for stored in reversed(rollouts):
            if rollout in ("", stored.state.id, stored.state.plan.name, stored.state.plan.name.rsplit("-", 3)[0]):
                return stored
        ids = ", ".join(stored.state.id for stored in rollouts) or "none"
        raise StoreError(f"no rollout {rollout!r} in {self._home}: choose one of {ids}")

    def read_events(self, id: str) -> list[tuple[int, float, AnyRolloutEvent]]:
        """Return the events of a rollout, oldest first, as (sequence number, wall-clock seconds, event)."""
        with self._read_transaction():
            self._require_rollout(id)
            return list(self._load_events(id, 0))

    def append_events(self, events: Sequence[tuple[str, AnyRolloutEvent]]) -> None:
        """Write (rollout, event) pairs in one transaction, to the disk if the store is durable."""
        now = self._wall_s()
        bodies = [(id, now, encode_lossless(id, event, _decoded)) for id, event in events]
        with self._open_transaction():
            for id, _ in events:
                self._require_rollout(id)
            self._rows.append_events(bodies)
            if serials := [event.serial for _, event in events if isinstance(event, RolloutStarted | RolloutReverted)]:
                self._counters.set_counter(_SERIAL, max(serials))

    def request_revert(self, id: str, requested: bool = True) -> None:
        with self._open_transaction():
            self._require_rollout(id)
            self._rows.update_job(id, status="revert" if requested else "")

    def next_serial(self) -> int:
        """Return a release number above all earlier ones, even those that a restored backup lacks."""
        with database_errors(self._home):
            return max((self._counters.read_counter(_SERIAL) or 0) + 1, int(time.time()))

    def referenced_blobs(self) -> set[str]:
        """Return the blobs that devices may still fetch, of rollouts under way and of latest releases."""
        owners: dict[tuple[str, str], Rollout] = {}
        latest: dict[str, Rollout] = {}
        blobs = set()
        for stored in self.readable_rollouts():
            state = stored.state
            if state.is_reverted or state.plan.blob is None:
                continue
            if state.is_under_way:
                blobs.add(state.plan.blob.sha256)
            latest[state.plan.kind] = state
            owners.update({(device, state.plan.kind): state for device in state.offered})
        return blobs | {state.plan.blob.sha256 for state in (*owners.values(), *latest.values()) if state.plan.blob}

    @contextmanager
    def _read_transaction(self) -> Iterator[None]:
        with database_errors(self._home), self._rows.open_transaction("deferred"):
            yield

    def _require_rollout(self, id: str) -> None:
        if self._rows.find_job(id) is None:
            raise StoreError(f"no rollout {id!r} in {self._home}: `fedquilt rollout status` lists them")

    def _load_rollouts_and_errors(self) -> tuple[list[StoredRollout], dict[str, JobError]]:
        rollouts, errors = list[StoredRollout](), dict[str, JobError]()
        for row, is_intact in self._rows.read_jobs():
            try:
                if not is_intact:
                    raise self._rows.damage_error(
                        row.id, "its row in the table of rollouts does not match its checksum"
                    )
                rollouts.append(self._load_rollout(row))
            except JobError as error:
                errors[ascii(row.id)[1:-1]] = error
        return rollouts, errors

    def _load_rollout(self, row: JobRow) -> StoredRollout:
        # only new events are read, unless a backup has replaced the log
        id, cached = row.id, self._cached.get(row.id)
        if cached is not None and self._is_continued(cached[1], row, cached[0]):
            seq, head, state, time_s = cached[0], cached[1].head, *cached[2:]
        else:
            try:
                seq, head, state, time_s = 0, NO_CHECKSUM, Rollout(id, _plan(row.settings)), row.created
            except DECODE_ERRORS as error:
                raise self._version_error(id, str(error)) from None
        if head != row.head:
            for event_seq, event_time, event in self._load_events(id, seq):
                seq, time_s, state = event_seq, event_time, apply_rollout_event(state, event)
        self._cached[id] = (seq, row, state, time_s)
        return StoredRollout(state, row.created, row.submitter, row.status == "revert", time_s)

    def _is_continued(self, cached_row: JobRow, row: JobRow, seq: int) -> bool:
        is_same_log = cached_row.head == row.head or self._rows.checksum_at(row.id, seq) == cached_row.head
        return is_same_log and cached_row.settings == row.settings

    def _load_events(self, id: str, after: int) -> Iterator[tuple[int, float, AnyRolloutEvent]]:
        for seq, time_s, body in self._rows.read_events(id, after):
            try:
                yield seq, time_s, _decoded(body)
            except DECODE_ERRORS as error:
                raise self._version_error(id, f"event {seq}: {error}") from None

    def _version_error(self, id: str, detail: str) -> JobError:
        return JobError(f"{self._home}: {id} was written by another version of fedquilt ({detail}): use that version")
