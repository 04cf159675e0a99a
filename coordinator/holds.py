"""Jobs that a coordinator holds because the disk does not give back what they need: noted for whoever looks at them.

The table is made when the first job is held. The next coordinator tries at once, and counts the tries of those before
it, so that jobs are given up however often coordinators are killed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.store_rows import storing

_THERE: Final = "select 1 from sqlite_master where name = 'suspended'"
_MADE: Final = (
    """create table if not exists suspended (
        job text primary key, epoch integer not null, since real not null, again real not null, why text not null,
        what text not null, tries integer not null)""",
    """create trigger if not exists suspended_of_removed_jobs after delete on jobs begin
        delete from suspended where job = old.id; end""",
)


class Hold(NamedTuple):
    """Why a job is held; times are wall-clock seconds."""

    since: float
    again: float  # when it is tried again
    why: str
    what: str = ""  # what cannot be read
    tries: int = 0

    def __str__(self) -> str:
        """What the job waits for, as a sentence's end."""
        since, again = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (self.since, self.again))
        return f"the disk since {since}, and is tried again at {again}: {self.why}"


class Holds:
    """Held jobs of a database.

    Args:
        db: the database.
        home: whose it is, for errors.
        writing: one transaction, as of `Store`.
        epoch: number of the coordinator's last start.

    Raises, from every method:
        StoreError: it cannot be read or written.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        epoch: Callable[[], int],
    ) -> None:
        self._db, self._home, self._writing, self._epoch = db, home, writing, epoch

    def note(self, job: str, hold: Hold) -> None:
        """Note that a job is held."""
        with self._writing():
            for statement in _MADE:
                self._db.execute(statement)
            self._db.execute(
                "insert or replace into suspended values (?, ?, ?, ?, ?, ?, ?)", (job, self._epoch(), *hold)
            )

    def forget(self, job: str) -> None:
        """Note that a job is not held any more."""
        with self._writing():
            if self._db.execute(_THERE).fetchone() is not None:
                self._db.execute("delete from suspended where job = ?", (job,))

    def end(self, job: str) -> None:
        """Note that a job goes on. Its tries stay, for a next failure."""
        with self._writing():
            if self._db.execute(_THERE).fetchone() is not None:
                self._db.execute("update suspended set epoch = -1 where job = ?", (job,))

    def of(self, job: str) -> Hold | None:
        """Return why the latest coordinator of this home holds a job, or None if it does not."""
        found = self._found(job)
        return None if found is None or found[0] != self._epoch() else found[1]

    def last(self, job: str) -> Hold | None:
        """Return why this coordinator or one before it held a job last, or None if none did."""
        found = self._found(job)
        return None if found is None else found[1]

    def _found(self, job: str) -> tuple[int, Hold] | None:
        with storing(self._home):
            if self._db.execute(_THERE).fetchone() is None:
                return None
            query = "select epoch, since, again, why, what, tries from suspended where job = ?"
            found = self._db.execute(query, (job,)).fetchone()
        return None if found is None else (found[0], Hold(*found[1:]))
