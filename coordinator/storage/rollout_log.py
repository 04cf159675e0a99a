"""Rollouts in a coordinator's database: one row each, and a checksummed event log."""

from __future__ import annotations

import secrets
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
from fedquilt.coordinator.storage.rows import FIRST, JobRow, RowStore, current_user, database_errors, encode_lossless
from fedquilt.core import DECODE_ERRORS, JobError, StoreError

SCHEMA: Final = rows.SCHEMA.format(table="rollouts", facts="rollout_facts")
_SERIAL: Final = "release"  # counter of the releases: the latest one's
_decoded: Final = msgspec.json.Decoder(AnyRolloutEvent).decode
_plan: Final = msgspec.json.Decoder(RolloutPlan).decode


class StoredRollout(NamedTuple):
    state: Rollout
    created: float  # wall-clock seconds
    submitter: str
    revert_requested: bool
    at: float  # wall-clock seconds of its last fact, or of its row


class RolloutLog:
    """Rollouts of one database.

    Every method raises StoreError if the database cannot be read or written, or its rollout is unknown, and
    DamagedRunError if the rows of its rollout are damaged. A request is the status of the rollout's row.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        counters: RowStore,
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s, self._counters, self._home, self._writing = wall_s, counters, home, writing
        self._rows = RowStore(db, home, table="rollouts", facts="rollout_facts")
        self._read: dict[str, tuple[int, JobRow, Rollout, float]] = {}  # id -> last fact read, row, state and time

    def add_rollout(self, plan: RolloutPlan, *, id: str = "") -> str:
        """Queue a rollout and return its id, `<kind>-<date>-<time>-<random>` unless given."""
        plan.require_valid()
        now = time.time()
        id = id or f"{plan.kind}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        with self._writing():
            for kept in self._load_rollouts_and_errors()[0]:
                if kept.state.plan.kind == plan.kind and kept.state.is_under_way:
                    raise JobError(
                        f"{kept.state.id} of {kept.state.plan.name} is {kept.state.status}: wait for its end, or "
                        f"`fedquilt rollout back {kept.state.id} --home {self._home}`"
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
        """Return the latest rollout with this id, run or version, or the latest of all for ""."""
        known = self.readable_rollouts()
        if rollout and (why := self.read_errors().get(rollout)):
            raise StoreError(str(why))
        for kept in reversed(known):
            if rollout in ("", kept.state.id, kept.state.plan.name, kept.state.plan.name.rsplit("-", 3)[0]):
                return kept
        there = ", ".join(kept.state.id for kept in known) or "none"
        raise StoreError(f"no rollout {rollout!r} in {self._home}; there are: {there}")

    def read_events(self, id: str) -> list[tuple[int, float, AnyRolloutEvent]]:
        """Return the events of a rollout, oldest first, as (sequence number, wall-clock seconds, event)."""
        with self._read_transaction():
            self._require_rollout(id)
            return list(self._load_events(id, 0))

    def append_events(self, facts: Sequence[tuple[str, AnyRolloutEvent]]) -> None:
        """Write (rollout, event) pairs in one transaction, to the disk if the store is durable."""
        now = self._wall_s()
        bodies = [(id, now, encode_lossless(id, fact, _decoded)) for id, fact in facts]
        with self._writing():
            for id, _ in facts:
                self._require_rollout(id)
            self._rows.append_events(bodies)
            if serials := [fact.serial for _, fact in facts if isinstance(fact, RolloutStarted | RolloutReverted)]:
                self._counters.set_counter(_SERIAL, max(serials))

    def request_revert(self, id: str, requested: bool = True) -> None:
        with self._writing():
            self._require_rollout(id)
            self._rows.update_job(id, status="revert" if requested else "")

    def next_serial(self) -> int:
        """Return a release number above all earlier ones, even after a restored backup."""
        with database_errors(self._home):
            return max((self._counters.read_counter(_SERIAL) or 0) + 1, int(time.time()))

    def referenced_blobs(self) -> set[str]:
        """Return the blobs that devices may still fetch: of rollouts under way and of latest releases."""
        owners: dict[tuple[str, str], Rollout] = {}
        latest: dict[str, Rollout] = {}
        wanted = set()
        for kept in self.readable_rollouts():
            state = kept.state
            if state.is_reverted or state.plan.blob is None:
                continue
            if state.is_under_way:
                wanted.add(state.plan.blob.sha256)
            latest[state.plan.kind] = state
            owners.update({(device, state.plan.kind): state for device in state.offered})
        return wanted | {each.plan.blob.sha256 for each in (*owners.values(), *latest.values()) if each.plan.blob}

    @contextmanager
    def _read_transaction(self) -> Iterator[None]:
        with database_errors(self._home), self._rows.open_transaction("deferred"):
            yield

    def _require_rollout(self, id: str) -> None:
        if self._rows.find_job(id) is None:
            raise StoreError(f"no rollout {id!r} in {self._home}: `fedquilt rollout status` lists them")

    def _load_rollouts_and_errors(self) -> tuple[list[StoredRollout], dict[str, JobError]]:
        found, odd = list[StoredRollout](), dict[str, JobError]()
        for row, intact in self._rows.read_jobs():
            try:
                if not intact:
                    raise self._rows.damage_error(row.id, "its row in the list of rollouts is not what was written")
                found.append(self._load_rollout(row))
            except JobError as error:
                odd[ascii(row.id)[1:-1]] = error
        return found, odd

    def _load_rollout(self, row: JobRow) -> StoredRollout:
        # events that were read before are not read again, unless a backup has replaced them
        id, known = row.id, self._read.get(row.id)
        if known is not None and self._is_continued(known[1], row, known[0]):
            seq, before, state, at = known[0], known[1].head, *known[2:]
        else:
            try:
                seq, before, state, at = 0, FIRST, Rollout(id, _plan(row.settings)), row.created
            except DECODE_ERRORS as error:
                raise self._version_error(id, str(error)) from None
        if before != row.head:
            for last, when, fact in self._load_events(id, seq):
                seq, at, state = last, when, apply_rollout_event(state, fact)
        self._read[id] = (seq, row, state, at)
        return StoredRollout(state, row.created, row.submitter, row.status == "revert", at)

    def _is_continued(self, before: JobRow, now: JobRow, seq: int) -> bool:
        same = before.head == now.head or self._rows.checksum_at(now.id, seq) == before.head
        return same and before.settings == now.settings

    def _load_events(self, id: str, after: int) -> Iterator[tuple[int, float, AnyRolloutEvent]]:
        for seq, at, body in self._rows.read_events(id, after):
            try:
                yield seq, at, _decoded(body)
            except DECODE_ERRORS as error:
                raise self._version_error(id, f"fact {seq}: {error}") from None

    def _version_error(self, id: str, what: str) -> JobError:
        return JobError(f"{self._home}: {id} was written by another version of fedquilt ({what}): use that version")
