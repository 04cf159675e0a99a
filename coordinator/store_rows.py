"""Rows of the coordinator's database, written with checksums and compared with them when they are read.

A row of `jobs` or `counters` has a checksum of its own. A fact's covers the fact before it of the same job too, and the
job's row has that of the last one: so that a fact which is lost, added, changed or out of its place is found.
"""

from __future__ import annotations

import getpass
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fedquilt.coordinator.checksums import FIRST, checksum, link
from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.job_logs import Log, Logs
from fedquilt.core import JobError, StoreError, Update
from fedquilt.disk import PRIVATE, Disk

T = TypeVar("T")

BUSY_S: Final = 5.0  # that a reader waits for a writer
KNOWN: Final = 100  # rows of jobs of which it is remembered that they were whole
_COLUMNS: Final = "id, settings, bundle, status, created, origin, epoch, head, submitter"


decoded: Final = msgspec.json.Decoder(AnyFact).decode


class DamagedRunError(JobError):
    """A run whose rows are not those that were written."""


class storing:
    """Turn errors of a home's database and folder, raised in the body, into a sentence about that home.

    Raises:
        StoreError: in place of SQLite's and the system's errors.
    """

    __slots__ = ("_home",)

    def __init__(self, home: Path) -> None:
        self._home = home

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if type(error) is sqlite3.DatabaseError:  # its subclasses are about the disk, the statement or a lock
            place = self._home / "fedquilt.db"
            raise StoreError(f"{place} is damaged ({error}): put back a copy of the whole home") from None
        if isinstance(error, sqlite3.Error | OSError):
            said = getattr(error, "strerror", None) or error
            raise StoreError(
                f"cannot use the store {self._home}: {said}; is the disk full, or the folder not yours?"
            ) from None


def served(home: Path, disk: Disk = PRIVATE) -> bool:
    """Whether a coordinator holds a home; nothing is written there.

    Raises:
        StoreError: the home cannot be read.
    """
    with storing(home):
        return disk.is_locked(home / "lock")


class transaction:
    """Make the statements of the body one transaction, which is taken back if the body raises.

    Args:
        db: whose statements are transactions of their own otherwise.
        kind: SQLite's word for when it locks the database.
    """

    __slots__ = ("_db", "_kind")

    def __init__(self, db: sqlite3.Connection, kind: str = "immediate") -> None:
        self._db, self._kind = db, kind

    def __enter__(self) -> None:
        self._db.execute(f"begin {self._kind}")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._db.execute("commit")
        finally:
            if self._db.in_transaction:
                self._db.execute("rollback")


def readable(path: Path, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a database so that nothing is written, nor needs to be: its reader may have no right to.

    Raises:
        sqlite3.Error: there is none, or it cannot be read.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if _still(path) else ''}"
    return sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, check_same_thread=check_same_thread, uri=True)


def _still(path: Path) -> bool:
    """Whether SQLite has to be told that nobody writes: there is no write-ahead log, and a reader can make none."""
    return not path.with_name(f"{path.name}-wal").exists() and not os.access(path.parent, os.W_OK)


class Identity(NamedTuple):
    """Identity of a database file. Readers reopen the file when the identity changes."""

    device: int
    inode: int
    still: bool

    @staticmethod
    def of(path: Path) -> Identity:
        """The identity of the database at a path.

        Raises:
            OSError: there is none, or it cannot be looked at.
        """
        found = path.stat()
        return Identity(found.st_dev, found.st_ino, _still(path))


class Unreadable(NamedTuple):
    """A run that this version cannot read, with the reason."""

    id: str
    status: str
    created: float  # wall-clock seconds
    reason: str


class Stored(NamedTuple):
    """A row of `jobs`."""

    id: str
    settings: str  # JSON
    bundle: str
    status: str
    created: float  # wall-clock seconds
    origin: str
    epoch: int = 0
    head: bytes = FIRST  # checksum of the job's last fact
    submitter: str = ""  # user of the system; "": not known, as in rows of version 2

    @property
    def sum(self) -> bytes:
        """Checksum of the row; one without a submitter has that of version 2."""
        return checksum(*(self if self.submitter else self[:-1]))


def user() -> str:
    """Name of this process's user, or its number if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def encoded(id: str, fact: msgspec.Struct, decode: Callable[[str], object] = decoded) -> str:
    """Encode a fact, or whatever else `decode` reads, as JSON that decodes to an equal value.

    Raises:
        JobError: there is none.
    """
    kind = type(fact).__name__
    try:
        body = msgspec.json.encode(fact).decode()
        same = decode(body) == fact
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise JobError(f"{kind} of {id} cannot be kept: {error}") from None
    if not same:
        raise JobError(f"{kind} of {id} cannot be kept: it holds a number that is not finite")
    return body


class Rows:
    """Tables of one database.

    Args:
        db: the database.
        home: whose it is, for errors.
        kept: the log as a snapshot of a job has it, if there is one that fits.

    Raises, from every method:
        sqlite3.Error: the database cannot be read or written.
        DamagedRunError: a job's rows are damaged; names the job and the mend.
    """

    def __init__(
        self, db: sqlite3.Connection, home: Path, kept: Callable[[str], Log | None] = lambda job: None
    ) -> None:
        db.text_factory = lambda text: text.decode("utf-8", "surrogateescape")  # damaged text is no error of its own
        self._db, self._home = db, home
        self._made: tuple[object, list[Any]] = None, []  # what `each` made last, and of which state
        self._whole: dict[str, tuple[Stored, bytes]] = {}  # job -> its row as it was found whole last, and its checksum
        self._logs = Logs(db, kept)

    def together(self, kind: str = "immediate") -> AbstractContextManager[None]:
        """One transaction: all of it or nothing."""
        return transaction(self._db, kind)

    # -- jobs --

    def each(self, make: Callable[[Stored, bool], T]) -> list[T]:
        """What `make` makes of `jobs`. It is made anew after a change only: a coordinator asks twice a second."""
        mark = self._db.execute("pragma data_version").fetchone()[0], self._db.total_changes
        if mark != self._made[0] or self._db.in_transaction:  # whose changes may yet be undone
            self._made = (None if self._db.in_transaction else mark), [make(*each) for each in self.jobs()]
        return list(self._made[1])

    def jobs(self) -> list[tuple[Stored, bool]]:
        """Every job in the order of queueing, and whether its row is as it was written."""
        found = self._db.execute(f"select {_COLUMNS}, sum from jobs order by rowid").fetchall()  # noqa: S608
        return [(row := Stored(*each[:-1]), row.sum == each[-1]) for each in found]

    def job(self, id: str) -> Stored | None:
        """Row of a job; None: no job has this id."""
        found = self._db.execute(f"select {_COLUMNS}, sum from jobs where id = ?", (id,)).fetchone()  # noqa: S608
        if found is None:
            return None
        row = Stored(*found[:-1])
        if (row, found[-1]) != self._whole.get(id):  # a row takes longer to hash than to compare
            if row.sum != found[-1]:
                raise self.damaged(id, "its row in the list of runs is not what was written")
            self._know(row, found[-1])
        return row

    def add(self, row: Stored) -> None:
        """Insert a job."""
        marks = ", ".join("?" * (len(row) + 1))
        self._db.execute(f"insert into jobs ({_COLUMNS}, sum) values ({marks})", (*row, row.sum))  # noqa: S608

    def change(self, id: str, **values: Any) -> None:
        """Change columns of a job, if there is such a job; call it within `together`."""
        row = self.job(id)
        if row is not None:
            self._put(row, **values)

    def _put(self, row: Stored, **values: Any) -> None:
        """Change columns of a row that was read in this transaction."""
        named = ", ".join(f"{name} = ?" for name in (*values, "sum"))
        changed = row._replace(**values)
        sum = changed.sum
        self._db.execute(f"update jobs set {named} where id = ?", (*values.values(), sum, row.id))  # noqa: S608
        self._know(changed, sum)

    def _know(self, row: Stored, sum: bytes) -> None:
        if len(self._whole) >= KNOWN:
            self._whole.clear()
        self._whole[row.id] = row, sum

    def remove(self, id: str) -> None:
        """Delete a job and its facts; call it within `together`."""
        self._db.execute("delete from facts where job = ?", (id,))
        self._db.execute("delete from jobs where id = ?", (id,))

    # -- counters --

    def counter(self, name: str) -> int | None:
        """A counter's value; 0: it has not begun; None: its row is damaged."""
        found = self._db.execute("select value, sum from counters where name = ?", (name,)).fetchone()
        if found is None:
            return 0
        return int(found[0]) if found[1] == checksum(name, found[0]) else None

    def count(self, name: str, value: int) -> None:
        """Set a counter."""
        self._db.execute("insert or replace into counters values (?, ?, ?)", (name, value, checksum(name, value)))

    # -- facts --

    def append(self, facts: Iterable[tuple[str, float, str]]) -> None:
        """Insert facts (job, wall-clock seconds, JSON); call it within `together`."""
        heads: dict[str, bytes] = {}
        found: dict[str, Stored | None] = {}
        for job, at, body in facts:
            if job not in heads:
                row = found[job] = self.job(job)
                heads[job] = FIRST if row is None else row.head
            before, heads[job] = heads[job], link(heads[job], job, at, body)
            values = job, at, body, heads[job]
            seq = self._db.execute("insert into facts (job, at, body, sum) values (?, ?, ?, ?)", values).lastrowid
            self._logs.written(job, before, int(seq or 0), at, body, heads[job])
        for row in found.values():
            if row is not None:
                self._put(row, head=heads[row.id])

    def facts(self, id: str, after: int = 0, most: int = -1) -> list[tuple[int, float, str]]:
        """(sequence, wall-clock seconds, JSON) of a job's facts, oldest first: `most` of them, or all if negative."""
        with self.together("deferred"):  # the row and the facts of one moment
            row, before = self.job(id), FIRST
            if after:
                found = self._db.execute(
                    "select sum from facts where job = ? and seq <= ? order by seq desc limit 1", (id, after)
                ).fetchone()
                before = found[0] if found else FIRST
            rows = self._db.execute(
                "select seq, at, body, sum from facts where job = ? and seq > ? order by seq limit ?",
                (id, after, most),
            ).fetchall()
        for seq, at, body, sum in rows:
            before = link(before, id, at, body)
            if sum != before:
                raise self.damaged(id, f"fact {seq}, or the one before it, is not what was written")
        if row is not None and row.head != before and len(rows) != most:
            raise self.damaged(id, "its last facts are missing")
        return [(seq, at, body) for seq, at, body, _ in rows]

    def log(self, id: str) -> Log | None:
        """Return a job's current log, or None if there is no such job or the log's end differs from the job's row."""
        row = self.job(id)
        found = None if row is None else self._logs.of(id, row.head)
        return found if row is not None and found is not None and found.head == row.head else None

    def logs(self) -> dict[str, Log]:
        """Every job's log as it is now, in the order of queueing. Not to be changed."""
        return self._logs.now()

    def unsound(self) -> list[str]:
        """Ids of the jobs whose rows are damaged. What a snapshot covers is not looked at."""
        found = []
        for row, whole in self.jobs():
            try:
                if whole:
                    log = self._logs.of(row.id, row.head)
                    whole = log.whole and log.head == row.head
            except sqlite3.DatabaseError:
                whole = False
            if not whole:
                found.append(row.id)
        return found

    def damaged(self, id: str, what: str) -> DamagedRunError:
        """The error of a damaged job."""
        return DamagedRunError(
            f"the log of {id} in {self._home} is damaged: {what}; put back a copy of the whole home, or run it anew"
        )

    def counted(self, update: Update) -> bool:
        """Whether the log of an update's job holds that it was counted."""
        query = """
            select 1 from sound where job = :job and instr(body, :device) and json_extract(body, '$.type') = 'Answered'
            and json_extract(body, '$.round') = :round and json_extract(body, '$.update.device') = :device
        """
        known = {"job": update.job, "round": update.round, "device": update.device}
        return self._db.execute(query, known).fetchone() is not None
