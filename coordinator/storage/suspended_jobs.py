"""Table of suspended jobs, whose data the disk fails to return.

The table is created when the first job is suspended. The next coordinator tries at once, and counts the tries of
earlier ones, so that a job fails after a limited number of tries even if coordinators are killed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.storage.rows import database_errors

_THERE: Final = "select 1 from sqlite_master where name = 'suspended'"
_MADE: Final = (
    """create table if not exists suspended (
        job text primary key, epoch integer not null, since real not null, again real not null, why text not null,
        what text not null, tries integer not null)""",
    """create trigger if not exists suspended_of_removed_jobs after delete on jobs begin
        delete from suspended where job = old.id; end""",
)


class Suspension(NamedTuple):
    """Reason for the suspension of a job. Times are wall-clock seconds."""

    since: float
    again: float  # when it is tried again
    why: str
    what: str = ""  # what cannot be read
    tries: int = 0

    def __str__(self) -> str:
        since, again = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (self.since, self.again))
        return f"the disk since {since}, and is tried again at {again}: {self.why}"


class SuspendedJobs:
    """Suspended jobs of a database.

    Args:
        db: Database.
        home: Folder of the home, for error messages.
        writing: Returns a write transaction, as in `Store`.
        epoch: Returns the number of the coordinator's last start.

    Raises, from every method:
        StoreError: If the database cannot be read or written.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        home: Path,
        writing: Callable[[], AbstractContextManager[None]],
        epoch: Callable[[], int],
    ) -> None:
        self._db, self._home, self._writing, self._epoch = db, home, writing, epoch

    def record_suspension(self, job: str, hold: Suspension) -> None:
        with self._writing():
            for statement in _MADE:
                self._db.execute(statement)
            self._db.execute(
                "insert or replace into suspended values (?, ?, ?, ?, ?, ?, ?)", (job, self._epoch(), *hold)
            )

    def delete_suspension(self, job: str) -> None:
        with self._writing():
            if self._db.execute(_THERE).fetchone() is not None:
                self._db.execute("delete from suspended where job = ?", (job,))

    def end_suspension(self, job: str) -> None:
        """Record that a job continues. The number of tries is kept for the next failure."""
        with self._writing():
            if self._db.execute(_THERE).fetchone() is not None:
                self._db.execute("update suspended set epoch = -1 where job = ?", (job,))

    def current_suspension(self, job: str) -> Suspension | None:
        """Return a job's suspension by the latest coordinator of the home, or None."""
        found = self._load_row(job)
        return None if found is None or found[0] != self._epoch() else found[1]

    def latest_suspension(self, job: str) -> Suspension | None:
        """Return a job's latest suspension by any coordinator, or None.

        The suspension may have ended.
        """
        found = self._load_row(job)
        return None if found is None else found[1]

    def _load_row(self, job: str) -> tuple[int, Suspension] | None:
        with database_errors(self._home):
            if self._db.execute(_THERE).fetchone() is None:
                return None
            query = "select epoch, since, again, why, what, tries from suspended where job = ?"
            found = self._db.execute(query, (job,)).fetchone()
        return None if found is None else (found[0], Suspension(*found[1:]))
