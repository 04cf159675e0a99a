"""Durable state of the coordinator: jobs and their facts in SQLite, tensors in a depot, under one folder.

HOME/fedquilt.db    jobs, facts (write-ahead log, synchronous: a fact is on disk before it is acted on)
HOME/blobs/         states, updates and bundles by sha256
HOME/lock           held while a coordinator runs here

The database carries the version of its tables. One of an earlier version is updated when it is opened;
one of a later version is refused. A single run that cannot be read is reported as such and hides no other.
"""

from __future__ import annotations

import fcntl
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

import msgspec

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import store_tables
from fedquilt.coordinator.facts import AnyFact, Ended
from fedquilt.coordinator.settings import Job
from fedquilt.core import JobError, StoreError

UNENDED: Final = ("queued", "running", "stopping")  # its coordinator, if any, may be working on the run
Origin = Literal["run", "fleet", "simulation"]

LOCK_TRIES: Final = 10
LOCK_S: Final = 0.05  # seconds between two tries
_facts = msgspec.json.Decoder(AnyFact)


class Row(NamedTuple):
    """A job as stored. Status: queued, running, done, failed, stopped; or a request: stopping."""

    id: str
    job: Job
    bundle: Path
    status: str
    created: float  # wall-clock seconds, for people
    origin: Origin = "run"  # command that began it: "fleet" is `fedquilt fleet`, "simulation" is `fedquilt.simulate`
    epoch: int = 0  # start of the coordinator that took it up last


class Unreadable(NamedTuple):
    """A run that this version cannot read, with the reason."""

    id: str
    status: str
    created: float  # wall-clock seconds
    reason: str


class Store:
    """One coordinator's folder.

    Args:
        durable: wait for the disk, so that nothing accepted is lost even in a power failure. On virtual time it is
            enough to survive a killed process.

    Raises, from every method:
        StoreError: the folder or database cannot be read or written.
    """

    def __init__(self, home: Path, *, durable: bool = True) -> None:
        self.home = home
        with _storing(home):
            home.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(home / "fedquilt.db", timeout=10, isolation_level=None)
            try:
                self._db.execute("pragma journal_mode=wal")
                self._db.execute(f"pragma synchronous={'full' if durable else 'off'}")
                store_tables.bring_up_to_date(self._db, home)
            except BaseException:  # also that the tables are of a later version
                self._db.close()
                raise
        self.depot = Depot(home / "blobs", durable=durable)
        self._lock: IO[str] | None = None
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
        for _ in range(LOCK_TRIES):  # a process that tests whether the folder is served holds the lock for a moment
            self._lock = self._locked(fcntl.LOCK_EX)
            if self._lock is not None:
                return True
            time.sleep(LOCK_S)
        return False

    def _locked(self, kind: int) -> IO[str] | None:
        with _storing(self.home):
            handle = open(self.home / "lock", "a")  # noqa: SIM115 - held until close
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.close()
                return None
        return handle

    def served(self) -> bool:
        """Whether a coordinator holds this folder, this process included."""
        if self._lock is not None:
            return True
        probe = self._locked(fcntl.LOCK_SH)  # several may test at once
        if probe is not None:
            probe.close()
        return probe is None

    def next_epoch(self) -> int:
        """Number of this start of a coordinator here, from 1."""
        with _storing(self.home):
            found = self._db.execute(
                "insert into counters values ('epoch', 1) on conflict(name) do update set value = value + 1 "
                "returning value"
            ).fetchone()
        return int(found[0])

    def note_signed(self, signed: bool) -> None:
        """Note whether the coordinator that begins here checks who sends what."""
        with _storing(self.home):
            self._db.execute("insert or replace into counters values ('signed', ?)", (int(signed),))

    def signed(self) -> bool | None:
        """Whether the latest coordinator over a broker checked who sent what; None: there was none."""
        with _storing(self.home):
            found = self._db.execute("select value from counters where name = 'signed'").fetchone()
        return None if found is None else bool(found[0])

    # -- jobs --

    def unfinished(self, job: Job, bundle: Path, origin: Origin = "run") -> str | None:
        """Latest run of exactly this job that has not ended for good, begun by the same command."""
        rows = [row for row in self.jobs() if (row.job, row.bundle, row.origin) == (job, bundle, origin)]
        return next((row.id for row in reversed(rows) if row.status not in ("done", "failed")), None)

    def add(self, job: Job, bundle: Path, origin: Origin = "run") -> str:
        """Queue a job; its id is `<name>-<date>-<time>-<random>`, so that devices never confuse two runs.

        The random digits separate runs begun in the same second by coordinators with homes of their own.
        """
        now = time.time()
        id = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        with _storing(self.home):
            self._db.execute(
                "insert into jobs (id, settings, bundle, status, created, origin) values (?, ?, ?, 'queued', ?, ?)",
                (id, msgspec.json.encode(job).decode(), str(bundle), now, origin),
            )
        return id

    def jobs(self) -> list[Row]:
        """All jobs that this version can read, in the order of queueing."""
        return [row for row in self.all_jobs() if isinstance(row, Row)]

    def all_jobs(self) -> list[Row | Unreadable]:
        """All jobs in the order of queueing, also those whose settings this version cannot read."""
        with _storing(self.home):
            rows = self._db.execute(
                "select id, settings, bundle, status, created, origin, epoch from jobs order by rowid"
            ).fetchall()
        return [self._row(*row) for row in rows]

    def _row(
        self, id: str, settings: str, bundle: str, status: str, created: float, origin: Origin, epoch: int
    ) -> Row | Unreadable:
        try:
            job = msgspec.json.decode(settings, type=Job)
        except msgspec.MsgspecError as error:
            reason = f"{self.home}: {id} was made by another version of fedquilt: {error}"
            return Unreadable(id, status, created, reason)
        return Row(id, job, Path(bundle), status, created, origin, epoch)

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

    def remove(self, ids: Collection[str]) -> None:
        """Delete runs and their facts from the database: all of them or, if the process is killed, none.

        Their blobs stay: `coordinator.housekeeping` drops those that no run needs.

        Raises:
            JobError: a coordinator other than this process serves the home and may be working on one of them.
        """
        with _storing(self.home):
            self._db.execute("begin immediate")
            try:
                self.require_idle(ids)
                for id in ids:
                    self._db.execute("delete from facts where job = ?", (id,))
                    self._db.execute("delete from jobs where id = ?", (id,))
                self._db.execute("commit")
            except BaseException:
                self._db.execute("rollback")
                raise

    def require_idle(self, ids: Collection[str]) -> None:
        """Refuse runs that a coordinator other than this process may be working on.

        Raises:
            JobError: one of them waits or runs, and the home is served.
        """
        elsewhere = self._lock is None and self.served()
        for id in ids:
            if elsewhere and (status := self.status(id)) in UNENDED:
                mend = (
                    "wait until it has stopped"
                    if status == "stopping"
                    else f"`fedquilt stop {id} --home {self.home}` ends it first"
                )
                raise JobError(f"{id} is {status}: {mend}")

    def begin(self, id: str) -> None:
        """Note that the coordinator started last has taken a job up."""
        with _storing(self.home):
            self._db.execute(
                "update jobs set status = 'running', epoch = (select value from counters where name = 'epoch') "
                "where id = ?",
                (id,),
            )

    def standing(self, row: Row) -> str:
        """Status of a job at this moment: "running" only if a coordinator is working on it.

        "waiting": a coordinator is here, but works on another job. "interrupted": no coordinator is here.
        """
        if row.status not in ("running", "stopping"):
            return row.status
        if not self.served():
            return "interrupted"
        with _storing(self.home):
            found = self._db.execute("select value from counters where name = 'epoch'").fetchone()
        return row.status if found and row.epoch == found[0] else "waiting"

    def status(self, id: str) -> str:
        """Status of a job as stored; "": unknown."""
        with _storing(self.home):
            found = self._db.execute("select status from jobs where id = ?", (id,)).fetchone()
        return str(found[0]) if found else ""

    def set_status(self, id: str, status: str) -> None:
        """Store a job's status."""
        with _storing(self.home):
            self._db.execute("update jobs set status = ? where id = ?", (status, id))

    def states(self, but: str = "") -> set[str]:
        """Hashes (sha256) of every job's latest state, from which results are made. `but`: a job to leave out."""
        query = """
            select json_extract(body, '$.state.sha256') from sound where seq in (
                select max(seq) from sound where job in (select id from jobs where id <> ?)
                and json_extract(body, '$.state.sha256') is not null group by job)
        """
        with _storing(self.home):
            return {str(row[0]) for row in self._db.execute(query, (but,))}

    def held(self, but: str = "") -> set[str]:
        """Blobs that some job may still need: the latest states, and updates that no state contains yet.

        Args:
            but: a job to leave out, because its process knows its blobs without reading all its facts.
        """
        query = """
            with last(job, seq) as (
                select job, max(seq) from sound where job in (select id from jobs where id <> :but)
                and json_extract(body, '$.state.sha256') is not null group by job)
            select json_extract(bundle.value, '$.sha256')
            from sound left join last on last.job = sound.job, json_each(sound.body, '$.update.bundles') bundle
            where sound.job in (select id from jobs where id <> :but) and sound.seq > coalesce(last.seq, 0)
        """
        with _storing(self.home):
            return self.states(but) | {str(row[0]) for row in self._db.execute(query, {"but": but})}

    # -- facts --

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the facts that are appended within at once when it is left, or none of them if it is left by an error.

        Nothing may be acted on before that which rests on such a fact. One transaction for many facts costs about what
        one for each of them costs, and nobody else waits for the database meanwhile.
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
        row = (id, time.time(), _readable(id, fact))
        if self._waiting is None:
            self._write([row])
        else:
            self._waiting.append(row)

    def _write(self, rows: Sequence[tuple[str, float, str]]) -> None:
        if not rows:
            return
        with _storing(self.home):
            self._db.execute("begin immediate")
            try:
                self._db.executemany("insert into facts (job, at, body) values (?, ?, ?)", rows)
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise

    def end(self, id: str, fact: Ended) -> str:
        """Store the end of a job that no process runs; returns the new status.

        A job whose log already says "done", but whose coordinator was killed before it stored the status, stays done.
        """
        with _storing(self.home):
            found = self._db.execute("select body from facts where job = ? order by seq desc limit 1", (id,)).fetchone()
        last = _facts.decode(found[0]) if found else None
        if isinstance(last, Ended) and last.status == "done":
            fact = last
        else:
            self.append(id, fact)
        self.set_status(id, fact.status)
        return fact.status

    def facts(self, id: str, after: int = 0) -> Iterator[tuple[int, float, AnyFact]]:
        """(sequence, wall-clock seconds, fact) of a job, oldest first.

        Raises:
            JobError: a fact that this version does not know.
        """
        with _storing(self.home):
            rows = self._db.execute(
                "select seq, at, body from facts where job = ? and seq > ? order by seq", (id, after)
            ).fetchall()
        for seq, at, body in rows:
            try:
                yield seq, at, _facts.decode(body)
            except msgspec.MsgspecError as error:
                raise JobError(
                    f"fact {seq} of {id} in {self.home} cannot be read by this version ({error}): go on with the "
                    "version that wrote it, or run the job anew"
                ) from None


def _readable(id: str, fact: AnyFact) -> str:
    """Encode a fact as JSON that decodes to the same fact."""
    kind = type(fact).__name__
    try:
        body = msgspec.json.encode(fact).decode()
        same = _facts.decode(body) == fact
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise JobError(f"{kind} of {id} cannot be kept: {error}") from None
    if not same:
        raise JobError(f"{kind} of {id} cannot be kept: it holds a number that is not finite")
    return body


@contextmanager
def _storing(home: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot use the store {home}: {error}; is the disk full, or the folder not yours?") from None
