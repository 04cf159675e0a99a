"""Rows of the coordinator's database, protected by checksums, and the index of the event logs.

Jobs and rollouts have the same tables: a row for each, and a row for each of its events. The checksum of an event also
covers the previous event, and the row of the job or rollout contains the checksum of the latest event. So lost, added,
changed or reordered events are detected.

The index has the end of each job's log and the blobs that the job needs. An update of the index reads only the events
that were added since the previous one. In a new process the index starts at the job's snapshot, or at the first event.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.core import DECODE_ERRORS, JobError, StoreError, Update
from fedquilt.host.disk import FIXES_BY_ERRNO, PERMISSION_FIX, PRIVATE, Disk

NO_CHECKSUM: Final = b""  # checksum before the first event
SUM_BYTES: Final = 16


def checksum(*values: str | float | bytes) -> bytes:
    return hashlib.sha256(ascii(values).encode()).digest()[:SUM_BYTES]


class IndexedLog(msgspec.Struct):
    """Index of a job's log up to the event `seq`. A damaged event does not hide later events."""

    seq: int = 0  # sequence number of the last event, or 0 without events
    head: bytes = NO_CHECKSUM  # checksum of the last event
    event_count: int = 0
    size: int = 0  # bytes of all event bodies
    last_event_time: float | None = None  # wall-clock seconds
    state: str = ""  # sha256 of the latest state, or ""
    best: str = ""  # sha256 of the state with the best evaluation, or ""
    # device -> sha256 of the blobs of an update that is not aggregated yet
    updates: dict[str, tuple[str, ...]] = {}
    sum: str = ""  # sha256 of the stored partial aggregate, or ""
    earlier_states: tuple[str, ...] = ()  # sha256 of earlier states on which devices still work
    is_intact: bool = True  # whether all checksums match

    @property
    def needed_blobs(self) -> set[str]:
        update_blobs = {sha256 for blobs in self.updates.values() for sha256 in blobs}
        return update_blobs | {self.state, self.best, self.sum, *self.earlier_states} - {""}

    def add_rows(self, job: str, rows: Iterable[tuple[int, Any, Any, bytes, int]]) -> None:
        """Add later events as rows (sequence number, wall-clock seconds, JSON, checksum, bytes)."""
        for seq, time_s, body, sum, size in rows:
            self.is_intact = self.is_intact and sum == checksum(self.head, job, time_s, body)
            self.add_event(seq, time_s, body, sum, size)

    def add_event(self, seq: int, time_s: Any, body: Any, sum: bytes, size: int) -> None:
        """Add the next event, without verifying its checksum."""
        self.seq, self.head, self.last_event_time = seq, sum, time_s
        self.event_count, self.size = self.event_count + 1, self.size + size
        try:
            references = _named(body)
        except (*DECODE_ERRORS, TypeError):
            return
        if references.state is not None:
            self.best = self.state if references.best else self.best
            self.state, self.updates, self.sum = references.state.sha256, {}, ""
            self.earlier_states = tuple(ref.sha256 for ref in references.earlier_states)
        if references.update is not None:
            self.updates[references.update.device] = tuple(ref.sha256 for ref in references.update.bundles.values())
        if references.sum is not None:
            self.sum = references.sum.sha256
            self.updates = {name: blobs for name, blobs in self.updates.items() if name not in references.devices}


class LogIndex:
    def __init__(self, db: sqlite3.Connection, load_snapshot_log: Callable[[str], IndexedLog | None]) -> None:
        self._db, self._load_snapshot_log = db, load_snapshot_log
        self._logs: dict[str, IndexedLog] = {}

    def read_all_logs(self) -> dict[str, IndexedLog]:
        """Return the present index of every job's log. The result must not be changed."""
        heads = dict(self._db.execute("select id, head from jobs order by rowid").fetchall())
        for deleted_job in self._logs.keys() - heads:
            del self._logs[deleted_job]
        return {job: self.read_log(job, head) for job, head in heads.items()}

    def add_written_event(
        self, job: str, previous_checksum: bytes, seq: int, time_s: float, body: str, sum: bytes
    ) -> None:
        """Add an event that this process has written, if the index ends at the checksum `previous_checksum`."""
        log = self._logs.get(job)
        # after a rollback, `read_log` finds another checksum and reads the log again
        if log is not None and log.head == previous_checksum:
            log.add_event(seq, time_s, body, sum, len(body.encode()))

    def read_log(self, job: str, head: bytes) -> IndexedLog:
        """Return the present index of a job's log. `head` is the checksum of the log's last event."""
        log = self._logs.get(job)
        try:
            if log is None or (log.head != head and not has_event(self._db, job, log.seq, log.head)):
                log = self._logs[job] = self._load_snapshot_log(job) or IndexedLog()
            if log.head != head:
                log.add_rows(job, self._db.execute(_BEHIND, (job, log.seq)))
        except UnicodeEncodeError:  # a damaged id
            return IndexedLog(is_intact=False)
        return log


def has_event(db: sqlite3.Connection, job: str, seq: int, sum: bytes) -> bool:
    return bool(db.execute("select sum from facts where seq = ? and job = ?", (seq, job)).fetchone() == (sum,))


_BEHIND: Final = """
    select seq, at, body, sum, length(cast(body as blob)) from facts where job = ? and seq > ? order by seq
"""


class _BlobField(msgspec.Struct):
    sha256: str


class _UpdateField(msgspec.Struct):
    device: str
    bundles: dict[str, _BlobField]


class _ReferencedBlobs(msgspec.Struct):
    state: _BlobField | None = None
    best: bool = False  # whether the previous state is the best so far
    update: _UpdateField | None = None
    sum: _BlobField | None = None  # partial aggregate
    earlier_states: tuple[_BlobField, ...] = ()  # states on which devices still work
    devices: tuple[str, ...] = ()  # devices in the partial aggregate


_named: Final = msgspec.json.Decoder(_ReferencedBlobs).decode


T = TypeVar("T")

BUSY_S: Final = 5.0  # wait of a reader for a writer
_COLUMNS: Final = "id, settings, bundle, status, created, origin, epoch, head, submitter, content"
SCHEMA: Final = """
create table if not exists {table} (
    id text primary key, settings text not null, bundle text not null, status text not null, created real not null,
    origin text not null, epoch integer not null, head blob not null, submitter text not null,
    content text not null, sum blob not null);
create table if not exists {facts} (
    seq integer primary key, job text not null references {table}(id), at real not null, body text not null,
    sum blob not null);
create index if not exists {facts}_by_job on {facts}(job, seq);
"""

decoded: Final = msgspec.json.Decoder(AnyEvent).decode


class DamagedRunError(JobError): ...


@contextmanager
def database_errors(home: Path) -> Iterator[None]:
    """Convert SQLite and OS errors of the body to StoreErrors naming the home."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if type(error) is sqlite3.DatabaseError:  # subclasses report errors of the disk, the statement or a lock
            path = home / "fedquilt.db"
            raise StoreError(f"{path} is damaged ({error}): restore a backup of the whole home") from None
        raise StoreError(f"{home} cannot be used: {describe_database_error(home, error)}") from None


def describe_database_error(home: Path, error: Exception) -> str:
    """Return the text of an SQLite or OS error in a home, with the probable cause and a fix."""
    text = getattr(error, "strerror", None) or str(error)
    is_denied = isinstance(error, sqlite3.Error) and any(phrase in text for phrase in ("readonly", "unable to open"))
    if not is_denied or not home.exists() or os.access(home, os.W_OK):
        return f"{text}; {FIXES_BY_ERRNO.get(getattr(error, 'errno', 0), 'check free space and permissions')}"
    if os.statvfs(home).f_flag & os.ST_RDONLY:
        return f"{text} (read-only file system); use a copy of the folder where you can write"
    return f"{text} (no permission to write); {PERMISSION_FIX}"


def is_served(home: Path, disk: Disk = PRIVATE) -> bool:
    """Return whether a coordinator runs for a home. Nothing is written."""
    with database_errors(home):
        return disk.is_locked(home / "lock")


@contextmanager
def transaction(db: sqlite3.Connection, kind: str = "immediate") -> Iterator[None]:
    """Run the body in a transaction with SQLite's lock mode `kind`. After an error, roll back."""
    db.execute(f"begin {kind}")
    try:
        yield
        db.execute("commit")
    finally:
        if db.in_transaction:
            db.execute("rollback")


def open_read_only(path: Path, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a database for reading, which also works without write permission to its folder."""
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if _must_open_immutable(path) else ''}"
    return sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, check_same_thread=check_same_thread, uri=True)


def _must_open_immutable(path: Path) -> bool:
    # In a folder without write permission, SQLite reads a write-ahead log only if its index (-shm) exists. A database
    # without a log, or with an empty log that no process has open, is complete and must be opened as immutable.
    if os.access(path.parent, os.W_OK):
        return False
    log, index = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    return not log.exists() or not (log.stat().st_size or index.exists())


class DatabaseIdentity(NamedTuple):
    """Identity of a database file. Readers reopen the file when the identity changes."""

    device: int
    inode: int
    is_immutable: bool

    @staticmethod
    def from_path(path: Path) -> DatabaseIdentity:
        status = path.stat()
        return DatabaseIdentity(status.st_dev, status.st_ino, _must_open_immutable(path))


def find_database_inode(database: Path) -> tuple[int, int] | None:
    """Return device and inode of a database file, or None if the file is missing."""
    try:
        status = database.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class UnreadableRow(NamedTuple):
    id: str
    status: str
    created: float  # wall-clock seconds
    reason: str
    damaged: bool  # False if another version has written the row


class JobRow(NamedTuple):
    """Row of a job or a rollout. For a rollout, `settings` is the plan and `status` the user's request."""

    id: str
    settings: str  # JSON
    bundle: str
    status: str
    created: float  # wall-clock seconds
    origin: str = ""
    epoch: int = 0
    head: bytes = NO_CHECKSUM  # checksum of the job's last event
    submitter: str = ""  # user name
    content: str = ""  # `StoredJob.content`

    @property
    def row_checksum(self) -> bytes:
        return checksum(*self)


def make_run_id(name: str, now: float) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"


def current_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def encode_lossless(id: str, event: msgspec.Struct, decode: Callable[[str], object] = decoded) -> str:
    """Return a struct as JSON. Raise JobError unless `decode` converts the JSON back to an equal value."""
    kind = type(event).__name__
    try:
        body = msgspec.json.encode(event).decode()
        is_equal = decode(body) == event
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise JobError(f"{kind} of {id} cannot be encoded: {error}") from None
    if not is_equal:
        raise JobError(f"{kind} of {id} cannot be encoded: it contains a number that is not finite")
    return body


class RowStore:
    """Rows and events of all jobs in a database or, in another `table`, of all rollouts.

    Every method raises sqlite3.Error if the database cannot be read or written, and DamagedRunError if the rows of the
    job are damaged.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        home: Path,
        load_snapshot_log: Callable[[str], IndexedLog | None] = lambda job: None,
        table: str = "jobs",
        events_table: str = "facts",
    ) -> None:
        self._table, self._events_table = table, events_table
        db.text_factory = lambda text: text.decode("utf-8", "surrogateescape")  # checksums report damaged text
        self._db, self._home = db, home
        self._mapped_jobs: tuple[object, list[Any]] = None, []  # database version and latest result of `map_jobs`
        self._logs = LogIndex(db, load_snapshot_log)

    def open_transaction(self, kind: str = "immediate") -> AbstractContextManager[None]:
        """Open a transaction, or join the one that is open."""
        return nullcontext() if self._db.in_transaction else transaction(self._db, kind)

    def map_jobs(self, convert: Callable[[JobRow, bool], T]) -> list[T]:
        """Return `convert(row, is_intact)` of every job. The result is cached until the database changes."""
        version = self._db.execute("pragma data_version").fetchone()[0], self._db.total_changes
        if version != self._mapped_jobs[0] or self._db.in_transaction:  # the transaction may be rolled back
            self._mapped_jobs = (
                (None if self._db.in_transaction else version),
                [convert(row, is_intact) for row, is_intact in self.read_jobs()],
            )
        return list(self._mapped_jobs[1])

    def read_jobs(self) -> list[tuple[JobRow, bool]]:
        """Return the row of every job in submission order, and whether the row is intact."""
        rows = self._db.execute(f"select {_COLUMNS}, sum from {self._table} order by rowid").fetchall()  # noqa: S608
        return [(row := JobRow(*values[:-1]), row.row_checksum == values[-1]) for values in rows]

    def find_job(self, id: str) -> JobRow | None:
        """Return a job's row, or None if unknown. Raise DamagedRunError if the row is damaged."""
        query = f"select {_COLUMNS}, sum from {self._table} where id = ?"  # noqa: S608
        values = self._db.execute(query, (id,)).fetchone()
        if values is None:
            return None
        row = JobRow(*values[:-1])
        if row.row_checksum != values[-1]:
            raise self.damage_error(id, f"its row in the table of {self._table} does not match its checksum")
        return row

    def insert_job(self, row: JobRow) -> None:
        placeholders = ", ".join("?" * (len(row) + 1))
        query = f"insert into {self._table} ({_COLUMNS}, sum) values ({placeholders})"  # noqa: S608
        self._db.execute(query, (*row, row.row_checksum))

    def update_job(self, id: str, **values: Any) -> None:
        """Change columns of a job, if the job exists. Requires an open transaction."""
        row = self.find_job(id)
        if row is not None:
            self._update_row(row, **values)

    def _update_row(self, row: JobRow, **values: Any) -> None:
        assignments = ", ".join(f"{name} = ?" for name in (*values, "sum"))
        sum = row._replace(**values).row_checksum
        query = f"update {self._table} set {assignments} where id = ?"  # noqa: S608
        self._db.execute(query, (*values.values(), sum, row.id))

    def read_counter(self, name: str) -> int | None:
        """Return a counter, 0 before its first value, or None if its row is damaged."""
        row = self._db.execute("select value, sum from counters where name = ?", (name,)).fetchone()
        if row is None:
            return 0
        return int(row[0]) if row[1] == checksum(name, row[0]) else None

    def set_counter(self, name: str, value: int) -> None:
        self._db.execute("insert or replace into counters values (?, ?, ?)", (name, value, checksum(name, value)))

    def append_events(self, events: Iterable[tuple[str, float, str]]) -> None:
        """Insert events as (job, wall-clock seconds, JSON). Requires an open transaction."""
        heads: dict[str, bytes] = {}
        rows: dict[str, JobRow | None] = {}
        for job, time_s, body in events:
            if job not in heads:
                row = rows[job] = self.find_job(job)
                heads[job] = NO_CHECKSUM if row is None else row.head
            previous_checksum, heads[job] = heads[job], checksum(heads[job], job, time_s, body)
            values = job, time_s, body, heads[job]
            query = f"insert into {self._events_table} (job, at, body, sum) values (?, ?, ?, ?)"  # noqa: S608
            seq = self._db.execute(query, values).lastrowid
            self._logs.add_written_event(job, previous_checksum, int(seq or 0), time_s, body, heads[job])
        for row in rows.values():
            if row is not None:
                self._update_row(row, head=heads[row.id])

    def read_events(self, id: str, after: int = 0, max_events: int = -1) -> list[tuple[int, float, str]]:
        """Return the events of a job as (sequence number, wall-clock seconds, JSON), oldest first.

        `after` is the sequence number of the last event to skip, and `max_events` is the greatest number of events, or
        -1 for all.
        """
        with self.open_transaction("deferred"):  # a consistent read of row and events
            row, previous_checksum = self.find_job(id), self.checksum_at(id, after) if after else NO_CHECKSUM
            query = (
                f"select seq, at, body, sum from {self._events_table} where job = ? and seq > ? order by seq limit ?"  # noqa: S608
            )
            rows = self._db.execute(query, (id, after, max_events)).fetchall()
        for seq, time_s, body, sum in rows:
            previous_checksum = checksum(previous_checksum, id, time_s, body)
            if sum != previous_checksum:
                raise self.damage_error(id, f"event {seq} or the event before it does not match its checksum")
        if row is not None and row.head != previous_checksum and len(rows) != max_events:
            raise self.damage_error(id, "its last events are missing")
        return [(seq, time_s, body) for seq, time_s, body, _ in rows]

    def checksum_at(self, id: str, seq: int) -> Any:
        """Return the stored checksum of the last event up to `seq`, even if the event is damaged."""
        query = f"select sum from {self._events_table} where job = ? and seq <= ? order by seq desc limit 1"  # noqa: S608
        row = self._db.execute(query, (id, seq)).fetchone()
        return row[0] if row else NO_CHECKSUM

    def read_log(self, id: str) -> IndexedLog | None:
        """Return the index of a job's log, or None if the job is unknown or its last events are missing."""
        row = self.find_job(id)
        log = None if row is None else self._logs.read_log(id, row.head)
        return log if row is not None and log is not None and log.head == row.head else None

    def read_logs(self) -> dict[str, IndexedLog]:
        """Return the index of every job's log, in submission order. The result must not be changed."""
        return self._logs.read_all_logs()

    def find_damaged_jobs(self) -> list[str]:
        damaged_ids = []
        for row, is_intact in self.read_jobs():
            try:
                if is_intact:
                    log = self._logs.read_log(row.id, row.head)
                    is_intact = log.is_intact and log.head == row.head
            except sqlite3.DatabaseError:
                is_intact = False
            if not is_intact:
                damaged_ids.append(row.id)
        return damaged_ids

    def damage_error(self, id: str, detail: str) -> DamagedRunError:
        run = f"{ascii(id)[1:-1]} in {self._home}"
        return DamagedRunError(
            f"the event log of {run} is damaged: {detail}. Restore a backup of the whole home, or submit the job again"
        )

    def is_update_counted(self, update: Update) -> bool:
        query = """
            select 1 from sound where job = :job and instr(body, :device)
            and json_extract(body, '$.type') = 'UpdateAccepted'
            and json_extract(body, '$.update.round') = :round and json_extract(body, '$.update.device') = :device
        """
        parameters = {"job": update.job, "round": update.round, "device": update.device}
        return self._db.execute(query, parameters).fetchone() is not None
