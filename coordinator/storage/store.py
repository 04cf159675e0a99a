"""Durable state of a coordinator: jobs and events in SQLite, tensors in a blob store.

HOME/fedquilt.db    jobs, rollouts, events (write-ahead log, synchronous: an event is on disk before any action follows)
HOME/blobs/         states, updates and bundles by sha256
HOME/lock           locked while a coordinator runs here

A database with tables of another version is refused. A single unreadable run is reported and hides no other. A
database that SQLite finds damaged is read-only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

import msgspec

from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.rounds.events import AnyEvent, JobEnded, NoteRecorded
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage import rollout_log, rows, snapshots, suspended_jobs, write_ahead_log
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import (
    DamagedRunError,
    DatabaseIdentity,
    IndexedLog,
    JobRow,
    RowStore,
    UnreadableRow,
    current_user,
    database_errors,
    decoded,
    encode_lossless,
    is_served,
    make_run_id,
    open_read_only,
)
from fedquilt.coordinator.storage.snapshots import EVENTS_PER_SNAPSHOT, SnapshotStore
from fedquilt.coordinator.storage.suspended_jobs import SuspendedJobs
from fedquilt.core import DECODE_ERRORS, JobError, StoreError, Update
from fedquilt.formats import toml
from fedquilt.host.disk import PRIVATE, REAL, Disk, Lock

VERSION: Final = 8  # version of the tables and of the events in them
INTEGRITY_CHECK_S: Final = 0.5  # time limit of the integrity check when a database is opened
JOBS: Final = rows.SCHEMA.format(table="jobs", facts="facts")
_SCHEMA: Final = """
create table if not exists secrets (job text primary key, secret blob not null);
create table if not exists counters (name text primary key, value integer not null, sum blob not null);
-- events whose JSON can be queried: a damaged event is empty
create view if not exists sound as
    select seq, job, case when json_valid(body) then body else '{}' end as body from facts;
"""
_INDEX_ERRORS: Final = ("missing from index", "wrong # of entries in index", "non-unique entry in index")


def require_tables(db: sqlite3.Connection, home: Path) -> None:
    version = int(db.execute("pragma user_version").fetchone()[0])
    if version != VERSION:
        raise StoreError(
            f"{home} has tables of version {version}, but this fedquilt uses {VERSION}: use the fedquilt version that "
            "wrote them, or set another --home"
        )


def _make_tables(db: sqlite3.Connection) -> None:
    if db.execute("select 1 from sqlite_master").fetchone() is None:
        schema = "".join((JOBS, rollout_log.SCHEMA, _SCHEMA, snapshots.SCHEMA, suspended_jobs.SCHEMA))
        db.executescript(f"begin immediate; {schema} pragma user_version = {VERSION}; commit;")


def repair_and_find_damage(db: sqlite3.Connection, limit_s: float = INTEGRITY_CHECK_S) -> str:
    """Return the damage that SQLite finds within `limit_s`, or "". A damaged index is rebuilt."""
    errors = _find_integrity_errors(db, limit_s)
    if errors and all(any(kind in line for kind in _INDEX_ERRORS) for line in errors):
        with contextlib.suppress(sqlite3.DatabaseError):  # the second check finds what is not repaired
            db.execute("reindex")
        errors = _find_integrity_errors(db, limit_s)
    return "; ".join(errors[:3])


def _find_integrity_errors(db: sqlite3.Connection, limit_s: float) -> list[str]:
    until_s = time.monotonic() + limit_s
    db.set_progress_handler(lambda: int(time.monotonic() > until_s), 10_000)
    try:
        rows = [str(row[0]) for row in db.execute("pragma integrity_check(10)")]
        errors = [line for row in rows for line in row.splitlines() if not line.startswith("***")]  # "*** in database"
    except sqlite3.OperationalError as error:
        return [] if "interrupted" in str(error) else [str(error)]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    finally:
        db.set_progress_handler(None, 0)
        db.execute("pragma shrink_memory")
    return [] if errors == ["ok"] else errors


LOCK_TRIES: Final = 10
SECRET_BYTES: Final = 32
ARMED: Final = "armed"  # starts further runs when its [trigger] fires
UNAPPROVED: Final = "waiting for approval"
UNDER_WAY: Final = ("queued", "running")
UNENDED: Final = (ARMED, UNAPPROVED, *UNDER_WAY, "stopping")
# longest time without a coordinator while a run is followed; systemd starts ours again after 10
MAX_COORDINATOR_GAP_S: Final = 20.0
Origin = Literal["run", "fleet", "virtual", "simulation"]
log = logging.getLogger("fedquilt.coordinator")


class InactiveRunError(JobError):
    exit_code = 130


class StoredJob(NamedTuple):
    """Job as stored. `status` is queued, running, stopping, done, failed, stopped, ARMED or UNAPPROVED."""

    id: str
    job: JobSettings
    bundle: Path
    status: str
    created: float  # wall-clock seconds
    # "fleet" and "virtual" are `fedquilt simulate` with and without a broker, "simulation" without agents
    origin: Origin = "run"
    epoch: int = 0  # epoch of the latest coordinator that activated the job
    submitter: str = ""  # user name, or "" if unknown
    content: str = ""  # `job_bundle.hash_content` of the bundle when the job was queued

    @property
    def has_virtual_time(self) -> bool:
        return self.origin in ("virtual", "simulation")


class StartCause(NamedTuple):
    row: StoredJob
    reason: str
    needs_approval: bool


class Store:
    """Home folder of a coordinator.

    Args:
        durable: Whether to wait for the disk, so that accepted updates survive a power failure. Otherwise they survive
            a killed process.
        every: The smallest number of events between two snapshots of a job.

    Every method raises StoreError if the folder or the database cannot be read or written.
    """

    def __init__(
        self, home: Path, *, durable: bool = True, disk: Disk = PRIVATE, every: int = EVENTS_PER_SNAPSHOT
    ) -> None:
        self.home, self._disk = home, disk
        with database_errors(home):
            (disk.make_durable_folder if durable else disk.make_folder)(home)
            wal = write_ahead_log.read_log(disk, home / "fedquilt.db")
            self._db = disk.connect(home / "fedquilt.db")
            try:
                self._db.execute("select 1 from sqlite_master").fetchone()  # SQLite reads the write-ahead log
                wal.report_damage(disk, self._db)
                self._db.execute("pragma journal_mode=wal")
                self._db.execute(f"pragma synchronous={'full' if durable else 'off'}")
                _make_tables(self._db)
                require_tables(self._db, home)
                self._rows = RowStore(self._db, home, lambda job: self.snapshots.read_log(job))
                self.damage = repair_and_find_damage(self._db)
            except BaseException:
                self._db.close()
                raise
        self.snapshots = SnapshotStore(self._db, self._rows.read_log, home, self.open_transaction, every)
        self.rollouts = RolloutLog(self._db, self._rows, home, self.open_transaction, disk.wall_clock_s)
        self.suspensions = SuspendedJobs(self._db, home, self.open_transaction, self._read_epoch)
        self.blob_store = BlobStore(home / "blobs", durable=durable, disk=disk)
        self._lock: Lock | None = None
        self._unwritten_events: list[tuple[str, float, str]] | None = None  # (job, time, body) in `batch_events`

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def acquire_lock(self) -> bool:
        """Lock the home and its blob store until `close`. Return False if another process holds the lock."""
        if self._lock is None:
            self._require_undamaged()
            # `is_served` of another process holds the lock for a moment
            with database_errors(self.home):
                self._lock = self._disk.lock(self.home / "lock", tries=LOCK_TRIES)
            if self._lock is not None:
                self.blob_store.open_as_owner()
        return self._lock is not None

    def is_served(self) -> bool:
        return self._lock is not None or is_served(self.home, self._disk)

    def begin_epoch(self, min_epoch: int = 0) -> int:
        """Store a new epoch above `min_epoch` and all earlier ones, and return it."""
        with self.open_transaction():
            epoch = 1 + max(self._read_epoch(), min_epoch)
            self._rows.set_counter("epoch", epoch)
        return epoch

    @property
    def epoch(self) -> int:
        with database_errors(self.home):
            return self._read_epoch()

    def _read_epoch(self) -> int:
        epoch = self._rows.read_counter("epoch")
        if epoch is None:
            log.warning(
                "the epoch in %s is damaged: the latest epoch of a job is used, until a device reports a higher one",
                self.home,
            )
            return max((row.epoch for row, is_intact in self._rows.read_jobs() if is_intact), default=0)
        return epoch

    def record_authentication(self, signed: bool) -> None:
        with self.open_transaction():
            self._rows.set_counter("signed", 1 + signed)  # 0 is a missing counter

    def was_authenticated(self) -> bool | None:
        """Return whether the latest coordinator authenticated senders, or None if no coordinator has run."""
        with database_errors(self.home):
            counter = self._rows.read_counter("signed")
        return counter > 1 if counter else None

    def find_unfinished(self, job: JobSettings, bundle: Path, origin: Origin = "run") -> str | None:
        """Return the id of the job's latest run that is not done or failed, or None.

        The bundle must have the same content, unless the run is armed.
        """
        content = _hash_bundle(bundle)
        rows = [row for row in self.readable_jobs() if (row.job, row.bundle, row.origin) == (job, bundle, origin)]
        rows = [row for row in rows if row.content == content or row.status == ARMED]
        return next((row.id for row in reversed(rows) if row.status not in ("done", "failed")), None)

    def add_job(
        self, job: JobSettings, bundle: Path, origin: Origin = "run", *, id: str = "", cause: StartCause | None = None
    ) -> str:
        """Queue a job, or arm a job with a trigger, and return its id.

        The id is `<name>-<date>-<time>-<random>`, unless the caller gives a fixed `id` for an exact repetition. The
        logs of both runs record the `cause` of a triggered start.
        """
        now = time.time()
        id = id or make_run_id(job.name, now)
        status = UNAPPROVED if cause and cause.needs_approval else "queued"
        status = ARMED if origin == "run" and job.trigger is not None else status
        settings, submitter = msgspec.json.encode(job).decode(), cause.row.submitter if cause else current_user()
        notes_by_run = {id: cause.reason, cause.row.id: f"started {id}: {cause.reason}"} if cause else {}
        row = JobRow(id, settings, str(bundle), status, now, origin, submitter=submitter)
        with self.open_transaction():
            self._rows.insert_job(row._replace(content=_hash_bundle(bundle)))
            self._rows.append_events(
                [(run, now, encode_lossless(run, NoteRecorded(note))) for run, note in notes_by_run.items()]
            )
        return id

    def find_or_add_job(self, job: JobSettings, bundle: Path) -> tuple[str, bool]:
        """Return the id of the job's unfinished run and True, or queue a new run and return its id and False."""
        with self.open_transaction():
            id = self.find_unfinished(job, bundle)
            return (id, True) if id is not None else (self.add_job(job, bundle), False)

    def readable_jobs(self) -> list[StoredJob]:
        return [row for row in self.all_jobs() if isinstance(row, StoredJob)]

    def all_jobs(self) -> list[StoredJob | UnreadableRow]:
        with database_errors(self.home):
            return self._rows.map_jobs(self._decode_row)

    def _decode_row(self, row: JobRow, is_intact: bool) -> StoredJob | UnreadableRow:
        if not is_intact:
            damaged = self._rows.damage_error(row.id, "its row in the table of jobs does not match its checksum")
            created = row.created if isinstance(row.created, float) else 0.0
            id, status, reason = (ascii(value)[1:-1] for value in (row.id, row.status, str(damaged)))  # may not be text
            return UnreadableRow(id, status, created, reason, damaged=True)
        try:
            job = msgspec.json.decode(row.settings, type=JobSettings)
        except DECODE_ERRORS as error:
            reason = f"{self.home}: {row.id} was written by another version of fedquilt: {error}"
            return UnreadableRow(row.id, row.status, row.created, reason, damaged=False)
        stored = Path(row.bundle), row.status, row.created
        return StoredJob(row.id, job, *stored, cast("Origin", row.origin), row.epoch, row.submitter, row.content)

    def find_job(self, id_or_name: str) -> StoredJob:
        """Return the latest job with this id or name. Raise StoreError if it is unknown or damaged."""
        rows = self.all_jobs()
        for row in reversed(rows):
            if isinstance(row, UnreadableRow) and id_or_name == row.id:
                raise StoreError(row.reason)
            if isinstance(row, StoredJob) and id_or_name in (row.id, row.job.name):
                return row
        names = dict.fromkeys(row.job.name for row in rows if isinstance(row, StoredJob))
        names_and_ids = [*names, *(row.id for row in reversed(rows))]
        raise StoreError(f"no run {id_or_name!r} in {self.home}{toml.describe_choices(id_or_name, names_and_ids)}")

    def delete_runs(self, ids: Collection[str], only_ended: bool = False) -> list[str]:
        """Delete runs and their events, but no blobs, in one transaction. Return the ids of the deleted runs.

        With `only_ended`, runs that have not ended are kept. Raise JobError for active runs of another process.
        """
        with self.open_transaction():
            self.require_inactive(ids)
            deleted = [id for id in ids if not only_ended or self.stored_status(id) not in UNENDED]
            for id in deleted:
                for table in ("facts", "snapshots", "suspended", "secrets"):
                    self._db.execute(f"delete from {table} where job = ?", (id,))  # noqa: S608
                self._db.execute("delete from jobs where id = ?", (id,))
        return deleted

    def require_inactive(self, ids: Collection[str]) -> None:
        """Raise JobError if another process's coordinator may be working on one of these runs."""
        is_served_elsewhere = self._lock is None and self.is_served()
        for id in ids:
            if is_served_elsewhere and (status := self.stored_status(id)) in UNENDED:
                hint = f"stop it first: `fedquilt stop {id} --home {self.home}`"
                raise JobError(f"{id} is {status}: {'wait until it has stopped' if status == 'stopping' else hint}")

    def load_or_create_secret(self, id: str) -> bytes:
        """Return the random bytes of a job, which no log, export or message contains."""
        with self.open_transaction():
            self._db.execute("insert or ignore into secrets values (?, ?)", (id, os.urandom(SECRET_BYTES)))
            return bytes(self._db.execute("select secret from secrets where job = ?", (id,)).fetchone()[0])

    def mark_running(self, id: str) -> None:
        """Record this coordinator's epoch, end a suspension and, unless a stop is requested, set "running"."""
        with self.open_transaction():
            self._rows.update_job(id, epoch=self._read_epoch())
            self.suspensions.end_suspension(id)
            self.set_status(id, "running", unless="stopping")

    def current_status(self, row: StoredJob) -> str:
        """Return the status of a job at this moment.

        An unfinished job is "held" while suspended for the disk, "waiting" while queued behind other jobs, and
        "interrupted" without a coordinator.
        """
        if row.status in UNDER_WAY and self.is_served() and self.suspensions.current_suspension(row.id):
            return "held"
        if row.status not in ("running", "stopping"):
            return row.status
        if not self.is_served():
            return "interrupted"
        with database_errors(self.home):
            return row.status if row.epoch == self._read_epoch() else "waiting"

    def describe_resume(self, row: StoredJob) -> str:
        """Return the command that continues an unfinished run, as a sentence."""
        home = f"--home {self.home}"
        commands = {
            "run": f"`fedquilt serve {home}`",
            "fleet": f"`fedquilt simulate JOB --link embedded {home}` (or --link broker), with the same --devices,",
            "virtual": f"`fedquilt simulate JOB {home}`, with the same --devices,",
            "simulation": "`fedquilt.simulate`, or `fedquilt simulate JOB --engine ENGINE`, with this job and home",
        }
        return f"{commands[row.origin]} continues {row.id}"

    def stored_status(self, id: str) -> str:
        """Return the stored status of a job, "" for an unknown job, or "damaged" for a damaged row."""
        with database_errors(self.home):
            try:
                row = self._rows.find_job(id)
            except DamagedRunError:
                return "damaged"
        return row.status if row else ""

    def set_status(self, id: str, status: str, *, unless: str = "") -> None:
        with self.open_transaction():
            if not unless or self.stored_status(id) != unless:
                self._rows.update_job(id, status=status)

    def find_damaged_ids(self) -> list[str]:
        """Return the runs and rollouts with damaged rows. They may need blobs that seem to be unused."""
        with database_errors(self.home):
            return [*self._rows.find_damaged_jobs(), *self.rollouts.read_errors()]

    def read_logs(self) -> dict[str, IndexedLog]:
        with database_errors(self.home):
            return self._rows.read_logs()

    def latest_state_hashes(self) -> set[str]:
        return {log.state for log in self.read_logs().values() if log.state}

    def referenced_blobs(self) -> set[str]:
        with database_errors(self.home):
            return self.rollouts.referenced_blobs().union(*(log.needed_blobs for log in self.read_logs().values()))

    def is_update_counted(self, update: Update) -> bool:
        with database_errors(self.home):
            return self._rows.is_update_counted(update)

    @contextmanager
    def batch_events(self) -> Iterator[None]:
        """Write all events appended in the body at once, or none of them after an error.

        Actions that depend on these events must wait for the end of the body. Other processes can use the database
        meanwhile.
        """
        assert self._unwritten_events is None
        self._unwritten_events = []
        try:
            yield
            self._write_events(self._unwritten_events)
        finally:
            self._unwritten_events = None

    def append_event(self, id: str, event: AnyEvent) -> None:
        """Write an event, to the disk if the store is durable. In `batch_events` the write is deferred."""
        row = (id, self._disk.wall_clock_s(), encode_lossless(id, event))
        self._write_events([row]) if self._unwritten_events is None else self._unwritten_events.append(row)

    def _write_events(self, rows: Sequence[tuple[str, float, str]]) -> None:
        if rows:
            self.blob_store.sync_small_blobs()  # blobs must be on the disk before events that refer to them
            with self.open_transaction():
                self._rows.append_events(rows)

    @contextmanager
    def open_transaction(self) -> Iterator[None]:
        """Open a write transaction, during which other processes add no runs and collect no garbage."""
        self._require_undamaged()
        try:
            with database_errors(self.home), self._rows.open_transaction():
                yield
        except DamagedRunError as error:
            raise StoreError(str(error)) from None

    def _require_undamaged(self) -> None:
        if self.damage:
            raise StoreError(
                f"{self.home / 'fedquilt.db'} is damaged ({self.damage}) and therefore read-only: restore a backup of "
                "the whole home, or export the readable runs and use another home"
            )

    def end_inactive_job(self, id: str, event: JobEnded) -> str:
        """Store the end of a job that no process runs. Return the new status.

        A job whose log ends as done stays done, even if its coordinator was killed before the status was stored.
        """
        try:
            last_events = [logged_event for _, _, logged_event in self.read_events(id)][-1:]
        except JobError as error:  # no event is added to a damaged log
            log.error("%s", error)
        else:
            event = next(
                (
                    logged_event
                    for logged_event in last_events
                    if isinstance(logged_event, JobEnded) and logged_event.status == "done"
                ),
                event,
            )
            if event not in last_events:
                self.append_event(id, event)
        self.set_status(id, event.status)
        return event.status

    def read_events(self, id: str, after: int = 0, max_events: int = -1) -> Iterator[tuple[int, float, AnyEvent]]:
        """Yield (sequence number, wall-clock seconds, event), oldest first, or raise JobError if unreadable."""
        with database_errors(self.home):
            rows = self._rows.read_events(id, after, max_events)
        for seq, time_s, body in rows:
            try:
                yield seq, time_s, decoded(body)
            except DECODE_ERRORS as error:
                raise JobError(
                    f"event {seq} of {id} in {self.home} cannot be read by this version ({error}): use the version "
                    "that wrote it, or submit the job again"
                ) from None


def _hash_bundle(bundle: Path) -> str:
    from fedquilt.formats import job_bundle  # imports numpy, which takes time

    return job_bundle.hash_content(bundle)


NAME: Final = "fedquilt.db"


class ChangeDetector:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: DatabaseIdentity | None = None

    def read_version(self) -> object:
        """Return a value that changes with every write, or None if the database cannot be read."""
        try:
            identity = DatabaseIdentity.from_path(self._path)
            if self._db is None or self._file != identity:
                self.close()
                self._db, self._file = open_read_only(self._path), identity
            return (*identity, self._db.execute("pragma data_version").fetchone()[0])
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None


class StoreReader(Store):
    """Read-only `Store`. Methods that would write raise StoreError."""

    def __init__(self, home: Path) -> None:
        self.home, self._disk, self.damage = home, REAL, ""
        with database_errors(home):
            self._db = open_read_only(home / NAME)
            try:
                require_tables(self._db, home)
                self._rows = RowStore(self._db, home)
            except BaseException:
                self._db.close()
                raise
        self.rollouts = RolloutLog(self._db, self._rows, home, self.open_transaction)
        self.suspensions = SuspendedJobs(self._db, home, self.open_transaction, self._read_epoch)
        self.blob_store = BlobStore(home / "blobs", create=False)
        self._lock, self._unwritten_events = None, None


def open_store(home: Path, *, durable: bool = True) -> Store:
    """Open a home, or a `StoreReader` of it if this user cannot write there."""
    writable = os.access(home, os.W_OK) and os.access(home / NAME, os.W_OK)
    return Store(home, durable=durable) if writable else StoreReader(home)
