"""Rollouts in a coordinator's database: a row for each, and the log of its facts, with checksums as jobs have them."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from fedquilt.coordinator.checksums import FIRST, checksum, link
from fedquilt.coordinator.rollouts import Aborted, AnyFact, Begun, Plan, RolledBack, Rollout, apply
from fedquilt.coordinator.store_rows import DamagedRunError, Rows, encoded, storing, user
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
_decoded: Final = msgspec.json.Decoder(AnyFact).decode
_plan: Final = msgspec.json.Decoder(Plan).decode


class Line(NamedTuple):
    """A row of `rollouts`."""

    id: str
    plan: str  # JSON
    created: float  # wall-clock seconds
    submitter: str
    wish: str = ""  # what somebody asks of the coordinator: a `Wish`
    head: bytes = FIRST  # checksum of its last fact


class Kept(NamedTuple):
    """A rollout as the database has it."""

    state: Rollout
    created: float  # wall-clock seconds
    submitter: str
    wish: str
    at: float  # wall-clock seconds of its last fact, or of its row


class RolloutLog:
    """Rollouts of one database.

    Args:
        db: which `Rows` has been made for.
        home: whose it is, for errors.
        writing: one transaction, as of `Store`.
        wall_s: gives wall-clock seconds.

    Raises, from every method:
        StoreError: the database cannot be read or written.
        DamagedRunError: the rows of a rollout that is read are not what was written; names it and the mend.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        rows: Rows,
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._db, self._rows, self._home, self._writing = db, rows, home, writing
        self._read: dict[str, tuple[int, bytes, Rollout, float]] = {}  # id -> last fact read, its sum, state and time

    def add(self, plan: Plan, *, id: str = "") -> str:
        """Queue a rollout; its id is `<kind>-<date>-<time>-<random>`.

        Raises:
            JobError: it cannot be carried out or read back unchanged, or one of its kind is under way.
        """
        plan.require()
        now = time.time()
        id = id or f"{plan.kind}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        with self._writing():
            for kept in self._all()[0]:
                if kept.state.plan.kind == plan.kind and kept.state.under_way:
                    raise JobError(
                        f"{kept.state.id} of {kept.state.plan.name} is {kept.state.status}: wait for its end, or "
                        f"`fedquilt deploy --abort {kept.state.id} --home {self._home}`"
                    )
            line = Line(id, encoded(id, plan, _plan), now, user())
            marks = ", ".join("?" * (len(line) + 1))
            self._db.execute(
                f"insert into rollouts ({_COLUMNS}, sum) values ({marks})",  # noqa: S608
                (*line, checksum(*line)),
            )
        return id

    def all(self) -> list[Kept]:
        """Every rollout whose rows can be read, in the order of queueing."""
        with self._reading():
            return self._all()[0]

    def unreadable(self) -> dict[str, str]:
        """Id -> why its rows cannot be read."""
        with self._reading():
            return self._all()[1]

    def find(self, rollout: str = "") -> Kept:
        """Return the latest rollout with this id, run or version, or the latest of all for "".

        Raises:
            StoreError: there is none.
        """
        known = self.all()
        if rollout and (why := self.unreadable().get(rollout)):
            raise StoreError(why)
        for kept in reversed(known):
            if rollout in ("", kept.state.id, kept.state.plan.name, kept.state.plan.name.rsplit("-", 3)[0]):
                return kept
        there = ", ".join(kept.state.id for kept in known) or "none"
        raise StoreError(f"no rollout {rollout!r} in {self._home}; there are: {there}")

    def facts(self, id: str) -> list[tuple[int, float, AnyFact]]:
        """(sequence, wall-clock seconds, fact) of a rollout, oldest first."""
        with self._reading():
            return list(self._facts(self._line(id), 0, FIRST))

    def append(self, facts: Sequence[tuple[str, AnyFact]]) -> None:
        """Write facts (rollout, fact), all of them or none; if the store is durable they are on disk when it returns.

        Raises:
            JobError: one of them could not be read back unchanged.
        """
        rows = [(id, fact, encoded(id, fact, _decoded)) for id, fact in facts]
        with self._writing():
            heads: dict[str, bytes] = {}
            now = self._wall_s()
            for id, _, body in rows:
                heads[id] = link(heads[id] if id in heads else self._line(id).head, id, now, body)
                self._db.execute(
                    "insert into rollout_facts (rollout, at, body, sum) values (?, ?, ?, ?)", (id, now, body, heads[id])
                )
            for id, head in heads.items():
                self._change(self._line(id)._replace(head=head))
            if serials := [fact.serial for _, fact, _ in rows if isinstance(fact, Begun | Aborted | RolledBack)]:
                self._rows.count(_SERIAL, max(serials))

    def wish(self, id: str, wish: Wish) -> None:
        """Ask the coordinator for something, or note that it was done: ""."""
        with self._writing():
            self._change(self._line(id)._replace(wish=wish))

    def serial(self) -> int:
        """Number for a release, greater than any before, also those of a home that was put back to an earlier state."""
        with storing(self._home):
            return max((self._rows.counter(_SERIAL) or 0) + 1, int(time.time()))

    def blobs(self) -> set[str]:
        """Blobs that some board may still ask for: of rollouts under way, and of those that boards have last."""
        owners: dict[tuple[str, str], Rollout] = {}
        latest: dict[str, Rollout] = {}
        wanted = set()
        for kept in self.all():
            state = kept.state
            if state.over or state.plan.blob is None:
                continue
            if state.under_way:
                wanted.add(state.plan.blob.sha256)
            latest[state.plan.kind] = state
            owners.update({(device, state.plan.kind): state for device in state.offered})
        return wanted | {each.plan.blob.sha256 for each in (*owners.values(), *latest.values()) if each.plan.blob}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Rows and facts of one moment: a coordinator may write between two looks."""
        with storing(self._home), nullcontext() if self._db.in_transaction else self._rows.together("deferred"):
            yield

    # -- within: nothing here turns SQLite's errors into a sentence --

    def _all(self) -> tuple[list[Kept], dict[str, str]]:
        found, odd = list[Kept](), dict[str, str]()
        for (id,) in self._db.execute("select id from rollouts order by rowid").fetchall():
            try:
                found.append(self._kept(self._line(id)))
            except JobError as error:
                odd[ascii(id)[1:-1]] = str(error)
        return found, odd

    def _line(self, id: str) -> Line:
        found = self._db.execute(f"select {_COLUMNS}, sum from rollouts where id = ?", (id,)).fetchone()  # noqa: S608
        if found is None:
            raise StoreError(f"no rollout {id!r} in {self._home}")
        line = Line(*found[:-1])
        if checksum(*line) != found[-1]:
            raise self._damaged(id, "its row in the list of rollouts is not what was written")
        return line

    def _change(self, line: Line) -> None:
        self._db.execute(
            "update rollouts set wish = ?, head = ?, sum = ? where id = ?",
            (line.wish, line.head, checksum(*line), line.id),
        )

    def _kept(self, line: Line) -> Kept:
        """A rollout with its facts, of which those that have been read before are not read again."""
        seq, before, state, at = self._read.get(line.id) or (0, FIRST, None, line.created)
        if state is None:
            try:
                state = Rollout(line.id, _plan(line.plan))
            except UNDECODABLE as error:
                raise self._other(line.id, str(error)) from None
        if before != line.head:
            for last, when, fact in self._facts(line, seq, before):
                seq, at, state = last, when, apply(state, fact)
        self._read[line.id] = (seq, line.head, state, at)
        return Kept(state, line.created, line.submitter, line.wish, at)

    def _facts(self, line: Line, after: int, before: bytes) -> Iterator[tuple[int, float, AnyFact]]:
        query = "select seq, at, body, sum from rollout_facts where rollout = ? and seq > ? order by seq"
        for seq, at, body, sum in self._db.execute(query, (line.id, after)).fetchall():
            before = link(before, line.id, at, body)
            if sum != before:
                raise self._damaged(line.id, f"fact {seq}, or the one before it, is not what was written")
            try:
                yield seq, at, _decoded(body)
            except UNDECODABLE as error:
                raise self._other(line.id, f"fact {seq}: {error}") from None
        if before != line.head:
            raise self._damaged(line.id, "its last facts are missing")

    def _damaged(self, id: str, what: str) -> DamagedRunError:
        return DamagedRunError(
            f"the log of {ascii(id)[1:-1]} in {self._home} is damaged: {what}; put back a copy of the whole home, or "
            "deploy anew from another home"
        )

    def _other(self, id: str, what: str) -> JobError:
        return JobError(f"{self._home}: {id} was written by another version of fedquilt ({what}): use that version")
