"""Rollouts in a coordinator's database: one row each, and a checksummed event log."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt.coordinator.rounds.rollout import (
    AnyRolloutEvent,
    Rollout,
    RolloutAborted,
    RolloutPlan,
    RolloutRolledBack,
    RolloutStarted,
    apply_rollout_event,
)
from fedquilt.coordinator.storage.checksums import FIRST, chain_checksum, checksum
from fedquilt.coordinator.storage.rows import DamagedRunError, RowStore, current_user, database_errors, encode_lossless
from fedquilt.core import UNDECODABLE, JobError, StoreError

Wish: TypeAlias = Literal["", "abort", "roll back"]

SCHEMA: Final = """
create table if not exists rollouts (
    id text primary key, plan text not null, created real not null, submitter text not null, wish text not null,
    head blob not null, sum blob not null);
create table if not exists rollout_facts (
    seq integer primary key, rollout text not null references rollouts(id), at real not null, body text not null,
    sum blob not null);
create index if not exists rollout_facts_by_rollout on rollout_facts(rollout, seq);
"""
_COLUMNS: Final = "id, plan, created, submitter, wish, head"
_SERIAL: Final = "release"  # counter of the releases: the latest one's
_decoded: Final = msgspec.json.Decoder(AnyRolloutEvent).decode
_plan: Final = msgspec.json.Decoder(RolloutPlan).decode


class RolloutRow(NamedTuple):
    id: str
    plan: str  # JSON
    created: float  # wall-clock seconds
    submitter: str
    wish: str = ""  # what somebody asks of the coordinator: a `Wish`
    head: bytes = FIRST  # checksum of its last fact


class StoredRollout(NamedTuple):
    state: Rollout
    created: float  # wall-clock seconds
    submitter: str
    wish: str
    at: float  # wall-clock seconds of its last fact, or of its row


class RolloutLog:
    """Rollouts of one database.

    Args:
        db: The database, whose tables exist.
        rows: The other tables of the database.
        home: The home of the database, for error messages.
        writing: The function that opens a write transaction.
        wall_s: The clock, in wall-clock seconds.

    Every method raises StoreError if the database cannot be read or written, and DamagedRunError if the rows of its
    rollout are damaged.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        rows: RowStore,
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._db, self._rows, self._home, self._writing = db, rows, home, writing
        self._read: dict[str, tuple[int, bytes, Rollout, float]] = {}  # id -> last fact read, its sum, state and time

    def add_rollout(self, plan: RolloutPlan, *, id: str = "") -> str:
        """Queue a rollout and return its id, `<kind>-<date>-<time>-<random>` unless given.

        Raises:
            JobError: If the plan is invalid or cannot be stored, or another rollout of its kind is under way.
        """
        plan.require_valid()
        now = time.time()
        id = id or f"{plan.kind}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        with self._writing():
            for kept in self._load_all()[0]:
                if kept.state.plan.kind == plan.kind and kept.state.is_under_way:
                    raise JobError(
                        f"{kept.state.id} of {kept.state.plan.name} is {kept.state.status}: wait for its end, or "
                        f"`fedquilt rollout back {kept.state.id} --home {self._home}`"
                    )
            line = RolloutRow(id, encode_lossless(id, plan, _plan), now, current_user())
            marks = ", ".join("?" * (len(line) + 1))
            self._db.execute(
                f"insert into rollouts ({_COLUMNS}, sum) values ({marks})",  # noqa: S608
                (*line, checksum(*line)),
            )
        return id

    def readable_rollouts(self) -> list[StoredRollout]:
        with self._read_transaction():
            return self._load_all()[0]

    def read_errors(self) -> dict[str, str]:
        with self._read_transaction():
            return self._load_all()[1]

    def find_rollout(self, rollout: str = "") -> StoredRollout:
        """Return the latest rollout with this id, run or version, or the latest of all for "".

        Raises:
            StoreError: If there is no such rollout, or its rows cannot be read.
        """
        known = self.readable_rollouts()
        if rollout and (why := self.read_errors().get(rollout)):
            raise StoreError(why)
        for kept in reversed(known):
            if rollout in ("", kept.state.id, kept.state.plan.name, kept.state.plan.name.rsplit("-", 3)[0]):
                return kept
        there = ", ".join(kept.state.id for kept in known) or "none"
        raise StoreError(f"no rollout {rollout!r} in {self._home}; there are: {there}")

    def read_events(self, id: str) -> list[tuple[int, float, AnyRolloutEvent]]:
        """Return the events of a rollout, oldest first, as (sequence number, wall-clock seconds, event)."""
        with self._read_transaction():
            return list(self._load_events(self._load_row(id), 0, FIRST))

    def append_events(self, facts: Sequence[tuple[str, AnyRolloutEvent]]) -> None:
        """Write (rollout, event) pairs in one transaction, to the disk if the store is durable.

        Raises:
            JobError: If an event cannot be encoded without loss.
        """
        rows = [(id, fact, encode_lossless(id, fact, _decoded)) for id, fact in facts]
        with self._writing():
            heads: dict[str, bytes] = {}
            now = self._wall_s()
            for id, _, body in rows:
                heads[id] = chain_checksum(heads[id] if id in heads else self._load_row(id).head, id, now, body)
                self._db.execute(
                    "insert into rollout_facts (rollout, at, body, sum) values (?, ?, ?, ?)", (id, now, body, heads[id])
                )
            for id, head in heads.items():
                self._update_row(self._load_row(id)._replace(head=head))
            if serials := [
                fact.serial
                for _, fact, _ in rows
                if isinstance(fact, RolloutStarted | RolloutAborted | RolloutRolledBack)
            ]:
                self._rows.set_counter(_SERIAL, max(serials))

    def set_request(self, id: str, wish: Wish) -> None:
        """Store a request to the coordinator, or "" once the request has been handled."""
        with self._writing():
            self._update_row(self._load_row(id)._replace(wish=wish))

    def next_serial(self) -> int:
        """Return a release number above all earlier ones, even after a restored backup."""
        with database_errors(self._home):
            return max((self._rows.read_counter(_SERIAL) or 0) + 1, int(time.time()))

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
        with (
            database_errors(self._home),
            nullcontext() if self._db.in_transaction else self._rows.open_transaction("deferred"),
        ):
            yield

    # -- within: nothing here turns SQLite's errors into a sentence --

    def _load_all(self) -> tuple[list[StoredRollout], dict[str, str]]:
        found, odd = list[StoredRollout](), dict[str, str]()
        for (id,) in self._db.execute("select id from rollouts order by rowid").fetchall():
            try:
                found.append(self._load_rollout(self._load_row(id)))
            except JobError as error:
                odd[ascii(id)[1:-1]] = str(error)
        return found, odd

    def _load_row(self, id: str) -> RolloutRow:
        found = self._db.execute(f"select {_COLUMNS}, sum from rollouts where id = ?", (id,)).fetchone()  # noqa: S608
        if found is None:
            raise StoreError(f"no rollout {id!r} in {self._home}")
        line = RolloutRow(*found[:-1])
        if checksum(*line) != found[-1]:
            raise self._damage_error(id, "its row in the list of rollouts is not what was written")
        return line

    def _update_row(self, line: RolloutRow) -> None:
        self._db.execute(
            "update rollouts set wish = ?, head = ?, sum = ? where id = ?",
            (line.wish, line.head, checksum(*line), line.id),
        )

    def _load_rollout(self, line: RolloutRow) -> StoredRollout:
        # events that were read before are not read again
        seq, before, state, at = self._read.get(line.id) or (0, FIRST, None, line.created)
        if state is None:
            try:
                state = Rollout(line.id, _plan(line.plan))
            except UNDECODABLE as error:
                raise self._version_error(line.id, str(error)) from None
        if before != line.head:
            for last, when, fact in self._load_events(line, seq, before):
                seq, at, state = last, when, apply_rollout_event(state, fact)
        self._read[line.id] = (seq, line.head, state, at)
        return StoredRollout(state, line.created, line.submitter, line.wish, at)

    def _load_events(self, line: RolloutRow, after: int, before: bytes) -> Iterator[tuple[int, float, AnyRolloutEvent]]:
        query = "select seq, at, body, sum from rollout_facts where rollout = ? and seq > ? order by seq"
        for seq, at, body, sum in self._db.execute(query, (line.id, after)).fetchall():
            before = chain_checksum(before, line.id, at, body)
            if sum != before:
                raise self._damage_error(line.id, f"fact {seq}, or the one before it, is not what was written")
            try:
                yield seq, at, _decoded(body)
            except UNDECODABLE as error:
                raise self._version_error(line.id, f"fact {seq}: {error}") from None
        if before != line.head:
            raise self._damage_error(line.id, "its last facts are missing")

    def _damage_error(self, id: str, what: str) -> DamagedRunError:
        return DamagedRunError(
            f"the log of {ascii(id)[1:-1]} in {self._home} is damaged: {what}; put back a copy of the whole home, or "
            "deploy anew from another home"
        )

    def _version_error(self, id: str, what: str) -> JobError:
        return JobError(f"{self._home}: {id} was written by another version of fedquilt ({what}): use that version")
