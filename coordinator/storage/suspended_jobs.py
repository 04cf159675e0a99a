"""Suspended jobs, whose data the disk fails to return, and the times of their retries.

A job is tried TRIES times, AGAIN_S apart. A new coordinator tries at once and counts the tries of earlier ones, so that
a job fails after a limited number of tries even if coordinators are killed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from fedquilt.coordinator.storage.rows import database_errors

TRIES: Final = 3
AGAIN_S: Final = 30.0  # between two tries
NEW_S: Final = 3600.0  # after the time of the next try, a failure counts as the first one again

SCHEMA: Final = """
create table if not exists suspended (
    job text primary key, epoch integer not null, since real not null, again real not null, why text not null,
    what text not null, tries integer not null);
"""


class Suspension(NamedTuple):
    since: float
    again: float  # when it is tried again
    why: str
    what: str  # what cannot be read
    tries: int

    def __str__(self) -> str:
        since, again = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (self.since, self.again))
        return f"the disk since {since}, and is tried again at {again}: {self.why}"


def count_failure(
    known: Suspension | None, what: str, why: str, now: float, *, counts: bool = True
) -> Suspension | None:
    """Return a job's suspension after a failed read, or None after the last try.

    Args:
        known: The job's latest suspension by any coordinator.
        what: The file that could not be read.
        why: The error.
        now: The wall-clock seconds.
        counts: Whether the number of tries is limited. Without a limit, the job waits as long as necessary.
    """
    if known is None or known.what != what or now >= known.again + NEW_S:
        known = Suspension(now, now, why, what, 0)
    # A try of a restarted coordinator before its time does not count. A clock that was set back shows a later time.
    early = 0 < known.again - now <= AGAIN_S
    tries = known.tries + (counts and not early)
    if tries >= TRIES:
        return None
    return Suspension(known.since, known.again if early else now + AGAIN_S, why, what, tries)


class SuspendedJobs:
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
            self._db.execute(
                "insert or replace into suspended values (?, ?, ?, ?, ?, ?, ?)", (job, self._epoch(), *hold)
            )

    def delete_suspension(self, job: str) -> None:
        with self._writing():
            self._db.execute("delete from suspended where job = ?", (job,))

    def end_suspension(self, job: str) -> None:
        """Record that a job continues. The number of tries is kept for the next failure."""
        with self._writing():
            self._db.execute("update suspended set epoch = -1 where job = ?", (job,))

    def current_suspension(self, job: str) -> Suspension | None:
        return self.current_suspensions().get(job)

    def current_suspensions(self) -> dict[str, Suspension]:
        """Return the suspended jobs of the home's latest coordinator."""
        query = "select job, epoch, since, again, why, what, tries from suspended"
        with database_errors(self._home):
            rows = self._db.execute(query).fetchall()
            last = self._epoch() if rows else 0
        return {job: Suspension(*found) for job, epoch, *found in rows if epoch == last}

    def latest_suspension(self, job: str) -> Suspension | None:
        """Return a job's latest suspension by any coordinator, or None. The suspension may have ended."""
        query = "select since, again, why, what, tries from suspended where job = ?"
        with database_errors(self._home):
            found = self._db.execute(query, (job,)).fetchone()
        return None if found is None else Suspension(*found)
