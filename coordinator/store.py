"""Durable state of the coordinator: jobs and their facts in SQLite, tensors in a depot, under one folder.

HOME/fedquilt.db    jobs, rollouts, facts (write-ahead log, synchronous: a fact is on disk before it is acted on)
HOME/blobs/         states, updates and bundles by sha256
HOME/lock           held while a coordinator runs here

The database carries the version of its tables. One of an earlier version is updated when it is opened, one of a later
version is refused. A single run that cannot be read, or whose rows are damaged, is reported and hides no other. Where
SQLite finds the database damaged as a whole, it can be read as far as its runs are sound; nothing is written into it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

import msgspec

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import store_tables, write_ahead
from fedquilt.coordinator.facts import AnyFact, Ended, Noted
from fedquilt.coordinator.holds import Holds
from fedquilt.coordinator.job_logs import Log
from fedquilt.coordinator.rollout_log import RolloutLog
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.snapshots import EVERY, Snapshots, Table
from fedquilt.coordinator.store_rows import (
    DamagedRunError,
    Rows,
    Stored,
    Unreadable,
    decoded,
    encoded,
    served,
    storing,
    user,
)
from fedquilt.core import UNDECODABLE, JobError, StoreError, Update
from fedquilt.disk import PRIVATE, Disk, Lock

LOCK_TRIES: Final = 10
ARMED: Final = "armed"  # it starts another run of its job when its [trigger] fires
UNAPPROVED: Final = "waiting for approval"
UNDER_WAY: Final = ("queued", "running")
UNENDED: Final = (ARMED, UNAPPROVED, *UNDER_WAY, "stopping")  # a coordinator may be working on the run
Origin = Literal["run", "fleet", "simulation"]

log = logging.getLogger("fedquilt.coordinator")


class Row(NamedTuple):
    """A job as stored. Status: ARMED, UNAPPROVED, queued, running, done, failed, stopped; or a request: stopping."""

    id: str
    job: Job
    bundle: Path
    status: str
    created: float  # wall-clock seconds, for people
    origin: Origin = "run"  # command that began it: "fleet" is `fedquilt fleet`, "simulation" is `fedquilt.simulate`
    epoch: int = 0  # start of the coordinator that took it up last
    submitter: str = ""  # user of the system who queued it; "": not known


class Cause(NamedTuple):
    """Armed run that starts another one, why, and whether that waits for approval."""

    row: Row
    why: str
    asks: bool


class Store:
    """One coordinator's folder.

    Args:
        durable: wait for the disk, so that nothing accepted is lost even in a power failure. On virtual time it is
            enough to survive a killed process.
        disk: where the folder is.
        every: least number of facts from one snapshot of a job to the next.

    Raises, from every method:
        StoreError: the folder or database cannot be read or written.
    """

    def __init__(self, home: Path, *, durable: bool = True, disk: Disk = PRIVATE, every: int = EVERY) -> None:
        self.home, self._disk = home, disk
        with storing(home):
            (disk.settle if durable else disk.make)(home)
            before = write_ahead.look(disk, home / "fedquilt.db")
            self._db = disk.connect(home / "fedquilt.db")
            try:
                self._db.execute("select 1 from sqlite_master").fetchone()  # SQLite takes up the log, writes nothing
                before.report(disk, self._db)
                self._db.execute("pragma journal_mode=wal")
                self._db.execute(f"pragma synchronous={'full' if durable else 'off'}")
                store_tables.bring_up_to_date(self._db, home)
                table = Table(self._db, home)
                self._rows, self.damage = Rows(self._db, home, table.log), store_tables.damage(self._db)
            except BaseException:  # also that the tables are of a later version
                self._db.close()
                raise
        self.snapshots = Snapshots(table, self._rows.log, home, self._write_transaction, every)
        self.rollouts = RolloutLog(self._db, self._rows, home, self._write_transaction, disk.wall_s)
        self.holds = Holds(self._db, home, self._write_transaction, self._epoch)
        self.depot = Depot(home / "blobs", durable=durable, disk=disk)
        self._lock: Lock | None = None
        self._waiting: list[tuple[str, float, str]] | None = None  # facts of a `together`: job, time, body

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and release the lock."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def lock(self) -> bool:
        """Become the only coordinator of this folder; False: another runs here. Ends with the process."""
        if self._lock is None:
            self._require_whole()
            with storing(self.home):  # a process that tests whether the folder is served holds the lock for a moment
                self._lock = self._disk.lock(self.home / "lock", tries=LOCK_TRIES)
            if self._lock is not None:
                self.depot.open_as_owner()
        return self._lock is not None

    def served(self) -> bool:
        """Whether a coordinator holds this folder, this process included."""
        return self._lock is not None or served(self.home, self._disk)

    def next_epoch(self, above: int = 0) -> int:
        """Number of this start of a coordinator here, from 1, and greater than `above`, which a device knows."""
        with self._write_transaction():
            epoch = 1 + max(self._epoch(), above)
            self._rows.count("epoch", epoch)
        return epoch

    @property
    def epoch(self) -> int:
        """Number of the last start of a coordinator here."""
        with storing(self.home):
            return self._epoch()

    def _epoch(self) -> int:
        """Number of the last start; if that cannot be read, of the last one that took up a job."""
        found = self._rows.counter("epoch")
        if found is None:
            log.warning("the number of starts in %s is damaged: devices say if it has become too small", self.home)
            return max((row.epoch for row, whole in self._rows.jobs() if whole), default=0)
        return found

    def note_signed(self, signed: bool) -> None:
        """Note whether the coordinator that begins here checks who sends what."""
        with self._write_transaction():
            self._rows.count("signed", 1 + signed)  # 0: a counter that has not begun

    def signed(self) -> bool | None:
        """Whether the latest coordinator over a broker checked who sent what; None: there was none."""
        with storing(self.home):
            found = self._rows.counter("signed")
        return found > 1 if found else None

    # -- jobs --

    def unfinished(self, job: Job, bundle: Path, origin: Origin = "run") -> str | None:
        """Latest run of exactly this job that has not ended for good, begun by the same command."""
        rows = [row for row in self.jobs() if (row.job, row.bundle, row.origin) == (job, bundle, origin)]
        return next((row.id for row in reversed(rows) if row.status not in ("done", "failed")), None)

    def add(self, job: Job, bundle: Path, origin: Origin = "run", *, id: str = "", by: Cause | None = None) -> str:
        """Queue a job, or arm it if it has a trigger; `by` says what starts it, which both logs note.

        Its id is `<name>-<date>-<time>-<random>`, so that devices never confuse two runs. A caller may give an `id`
        that no other run has, where everything has to be repeated exactly.
        """
        now = time.time()
        id = id or f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        status = ARMED if origin == "run" and job.trigger is not None else UNAPPROVED if by and by.asks else "queued"
        settings, submitter = msgspec.json.encode(job).decode(), by.row.submitter if by else user()
        notes = {id: by.why, by.row.id: f"{id} is started: {by.why}"} if by else {}
        with self._write_transaction():
            self._rows.add(Stored(id, settings, str(bundle), status, now, origin, submitter=submitter))
            self._rows.append([(run, now, encoded(run, Noted(said))) for run, said in notes.items()])
        return id

    def continue_or_add(self, job: Job, bundle: Path) -> tuple[str, bool]:
        """Return the unfinished run of exactly this job and True, or queue a new run and return False.

        Processes that submit the same job at once get the same run.
        """
        with self._write_transaction():
            id = self.unfinished(job, bundle)
            return (id, True) if id is not None else (self.add(job, bundle), False)

    def jobs(self) -> list[Row]:
        """All jobs that this version can read, in the order of queueing."""
        return [row for row in self.all_jobs() if isinstance(row, Row)]

    def all_jobs(self) -> list[Row | Unreadable]:
        """All jobs in the order of queueing, also those whose settings this version cannot read."""
        with storing(self.home):
            return self._rows.each(self._row)

    def _row(self, row: Stored, whole: bool) -> Row | Unreadable:
        if not whole:
            damaged = self._rows.damaged(row.id, "its row in the list of runs is not what was written")
            created = row.created if isinstance(row.created, float) else 0.0
            id, status, reason = (ascii(each)[1:-1] for each in (row.id, row.status, str(damaged)))  # may be no text
            return Unreadable(id, status, created, reason)
        try:
            job = msgspec.json.decode(row.settings, type=Job)
        except UNDECODABLE as error:
            reason = f"{self.home}: {row.id} was made by another version of fedquilt: {error}"
            return Unreadable(row.id, row.status, row.created, reason)
        at = Path(row.bundle), row.status, row.created
        return Row(row.id, job, *at, cast("Origin", row.origin), row.epoch, row.submitter)

    def job(self, run: str) -> Row:
        """Find a job by its id; a job's name stands for its latest run.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        rows = self.all_jobs()
        for row in reversed(rows):
            if isinstance(row, Unreadable) and run == row.id:
                raise StoreError(row.reason)
            if isinstance(row, Row) and run in (row.id, row.job.name):
                return row
        raise StoreError(f"no run {run!r} in {self.home}; there are: {', '.join(row.id for row in rows) or 'none'}")

    def delete_runs(self, ids: Collection[str], only_ended: bool = False) -> list[str]:
        """Delete runs and their events from the database in one transaction, and return the ids deleted.

        Their blobs stay: `coordinator.garbage` deletes those that no run needs. `only_ended` spares those resumed.

        Raises:
            JobError: a coordinator other than this process serves the home and may be working on one of them.
        """
        with self._write_transaction():
            self.require_idle(ids)
            gone = [id for id in ids if not only_ended or self.status(id) not in UNENDED]
            for id in gone:
                self._rows.remove(id)
        return gone

    def require_idle(self, ids: Collection[str]) -> None:
        """Refuse runs that a coordinator other than this process may be working on.

        Raises:
            JobError: one of them waits or runs, and the home is served.
        """
        elsewhere = self._lock is None and self.served()
        for id in ids:
            if elsewhere and (status := self.status(id)) in UNENDED:
                first = f"`fedquilt stop {id} --home {self.home}` ends it first"
                raise JobError(f"{id} is {status}: {'wait until it has stopped' if status == 'stopping' else first}")

    def begin(self, id: str) -> None:
        """Note that the coordinator started last has taken a job up, unless it is asked to stop it."""
        with self._write_transaction():
            self._rows.change(id, epoch=self._epoch())
        self.holds.end(id)
        self.set_status(id, "running", unless="stopping")

    def standing(self, row: Row) -> str:
        """Status of a job at this moment: "running" only if a coordinator is working on it.

        "held": the disk fails it. "waiting": the coordinator works on another job. "interrupted": none is here.
        """
        if row.status in UNDER_WAY and self.served() and self.holds.of(row.id):
            return "held"
        if row.status not in ("running", "stopping"):
            return row.status
        if not self.served():
            return "interrupted"
        with storing(self.home):
            return row.status if row.epoch == self._epoch() else "waiting"

    def status(self, id: str) -> str:
        """Status of a job as stored; "": unknown; "damaged": its row is not what was written."""
        with storing(self.home):
            try:
                found = self._rows.job(id)
            except DamagedRunError:
                return "damaged"
        return found.status if found else ""

    def set_status(self, id: str, status: str, *, unless: str = "") -> None:
        """Store a job's status; one that has the status `unless` keeps it."""
        with self._write_transaction():
            if not unless or self.status(id) != unless:
                self._rows.change(id, status=status)

    def unsound(self) -> list[str]:
        """Ids of runs and rollouts whose rows are damaged: blobs that seem to be of no use may be theirs."""
        with storing(self.home):
            return [*self._rows.unsound(), *self.rollouts.unreadable()]

    def logs(self) -> dict[str, Log]:
        """How far every job's log goes, and the blobs that it needs. Not to be changed."""
        with storing(self.home):
            return self._rows.logs()

    def states(self) -> set[str]:
        """Hashes (sha256) of every job's latest state, from which results are made."""
        return {log.state for log in self.logs().values() if log.state}

    def referenced_blobs(self) -> set[str]:
        """Return the blobs that runs and rollouts may need: latest states, and updates not contained in one."""
        with storing(self.home):
            return self.rollouts.blobs().union(*(log.blobs for log in self.logs().values()))

    # -- facts --

    def counted(self, update: Update) -> bool:
        """Whether the log of an update's job, under way or not, holds that it was counted."""
        with storing(self.home):
            return self._rows.counted(update)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the facts that are appended within at once when it is left, or none of them if it is left by an error.

        Nothing may be acted on before that which rests on such a fact. Nobody else waits for the database meanwhile.
        """
        assert self._waiting is None
        self._waiting = []
        try:
            yield
            self._write(self._waiting)
        finally:
            self._waiting = None

    def append(self, id: str, fact: AnyFact) -> None:
        """Write one fact; if the store is durable, it is on disk when this returns, or when `together` is left.

        Raises:
            JobError: it could not be read back unchanged (a number not finite, text that is not Unicode). Nothing
                has been written.
        """
        row = (id, self._disk.wall_s(), encoded(id, fact))
        self._write([row]) if self._waiting is None else self._waiting.append(row)

    def _write(self, rows: Sequence[tuple[str, float, str]]) -> None:
        if rows:
            self.depot.settle()  # what a fact names is on the disk before it
            with self._write_transaction():
                self._rows.append(rows)

    def transaction(self) -> AbstractContextManager[None]:
        """Return a write transaction, within which no other process adds runs or rollouts, or collects garbage."""
        return self._write_transaction()

    @contextmanager
    def _write_transaction(self) -> Iterator[None]:
        """Open a write transaction. Raise StoreError if the database, or a run that is written to, is damaged."""
        self._require_whole()
        try:
            with storing(self.home), nullcontext() if self._db.in_transaction else self._rows.together():
                yield
        except DamagedRunError as error:
            raise StoreError(str(error)) from None

    def _require_whole(self) -> None:
        if self.damage:
            raise StoreError(
                f"{self.home / 'fedquilt.db'} is damaged ({self.damage}): nothing is written there; put back a copy of "
                "the whole home, or export what can still be read and use another home"
            )

    def end(self, id: str, fact: Ended) -> str:
        """Store the end of a job that no process runs; returns the new status.

        A job whose log already says "done", but whose coordinator was killed before it stored the status, stays done.
        """
        try:
            last = [found for _, _, found in self.facts(id)][-1:]
        except JobError as error:  # nothing is added to a log that cannot be read
            log.error("%s", error)
        else:
            fact = next((found for found in last if isinstance(found, Ended) and found.status == "done"), fact)
            if fact not in last:
                self.append(id, fact)
        self.set_status(id, fact.status)
        return fact.status

    def facts(self, id: str, after: int = 0, most: int = -1) -> Iterator[tuple[int, float, AnyFact]]:
        """(sequence, wall-clock seconds, fact) of a job, oldest first: `most` of them, all if it is negative.

        Raises:
            JobError: a fact that this version does not know.
            DamagedRunError: what is stored is not what was written.
        """
        with storing(self.home):
            rows = self._rows.facts(id, after, most)
        for seq, at, body in rows:
            try:
                yield seq, at, decoded(body)
            except UNDECODABLE as error:
                raise JobError(
                    f"fact {seq} of {id} in {self.home} cannot be read by this version ({error}): go on with the "
                    "version that wrote it, or run the job anew"
                ) from None
