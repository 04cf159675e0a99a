"""Suspended jobs, whose data the disk fails to read, and the times of their retries.

A read is tried TRIES times, RETRY_S apart. A new coordinator tries at once and counts the tries of earlier ones, so
that a job fails after a limited number of tries even if coordinators are killed.
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
RETRY_S: Final = 30.0  # between two tries
FORGET_AFTER_S: Final = 3600.0  # time after the retry, after which tries are counted anew

SCHEMA: Final = """
create table if not exists suspended (
    job text primary key, epoch integer not null, since real not null, again real not null, why text not null,
    what text not null, tries integer not null);
"""


class Suspension(NamedTuple):
    start_time: float
    retry_time: float  # wall-clock seconds
    reason: str
    subject: str  # data that cannot be read
    tries: int

    def __str__(self) -> str:
        start, retry = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) for time_s in (self.start_time, self.retry_time)
        )
        return f"the disk since {start}, with the next try at {retry}: {self.reason}"


def count_failure(
    suspension: Suspension | None, subject: str, reason: str, now: float, *, is_limited: bool = True
) -> Suspension | None:
    """Return a job's suspension after a failed read, or None after the last try.

    Args:
        suspension: The job's latest suspension by any coordinator.
        subject: The file that could not be read.
        reason: The error.
        now: The wall-clock seconds.
        is_limited: Whether the number of tries is limited. Without a limit, the job waits as long as necessary.
    """
    if suspension is None or suspension.subject != subject or now >= suspension.retry_time + FORGET_AFTER_S:
        suspension = Suspension(now, now, reason, subject, 0)
    # a restarted coordinator tries before the retry time, which does not count
    is_early = 0 < suspension.retry_time - now <= RETRY_S
    tries = suspension.tries + (is_limited and not is_early)
    if tries >= TRIES:
        return None
    return Suspension(
        suspension.start_time, suspension.retry_time if is_early else now + RETRY_S, reason, subject, tries
    )


class SuspendedJobs:
    def __init__(
        self,
        db: sqlite3.Connection,
        home: Path,
        open_transaction: Callable[[], AbstractContextManager[None]],
        epoch: Callable[[], int],
    ) -> None:
        self._db, self._home, self._open_transaction, self._epoch = db, home, open_transaction, epoch

    def record_suspension(self, job: str, suspension: Suspension) -> None:
        with self._open_transaction():
            self._db.execute(
                "insert or replace into suspended values (?, ?, ?, ?, ?, ?, ?)", (job, self._epoch(), *suspension)
            )

    def delete_suspension(self, job: str) -> None:
        with self._open_transaction():
            self._db.execute("delete from suspended where job = ?", (job,))

    def end_suspension(self, job: str) -> None:
        """Record that a job continues. The number of tries is kept for the next failure."""
        with self._open_transaction():
            self._db.execute("update suspended set epoch = -1 where job = ?", (job,))

    def current_suspension(self, job: str) -> Suspension | None:
        return self.current_suspensions().get(job)

    def current_suspensions(self) -> dict[str, Suspension]:
        """Return the suspended jobs of the home's latest coordinator."""
        query = "select job, epoch, since, again, why, what, tries from suspended"
        with database_errors(self._home):
            rows = self._db.execute(query).fetchall()
            last_epoch = self._epoch() if rows else 0
        return {job: Suspension(*values) for job, epoch, *values in rows if epoch == last_epoch}

    def latest_suspension(self, job: str) -> Suspension | None:
        """Return a job's latest suspension by any coordinator, or None. The suspension may have ended."""
        query = "select since, again, why, what, tries from suspended where job = ?"
        with database_errors(self._home):
            row = self._db.execute(query, (job,)).fetchone()
        return None if row is None else Suspension(*row)
