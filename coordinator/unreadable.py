"""Retries of jobs after failed disk reads.

A disk may fail for a moment (a cable, a controller) or for good (a sector). So the coordinator continues with its other
jobs and starts the job again later. After `TRIES` failures the file is given up: a blob that can be rebuilt or
requested again is discarded, and for any other file the job fails.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TRIES: Final = 3
AGAIN_S: Final = 30.0  # from one to the next
NEW_S: Final = 3600.0  # after a failed try, from which on another one has nothing to do with it


class Tried(NamedTuple):
    what: str
    number: int  # of tries so far
    since_s: float  # the first
    again_s: float  # the next


class Waiting:
    def __init__(self) -> None:
        self._tried: dict[str, Tried] = {}  # by job

    def is_waiting(self, job: str, now_s: float) -> bool:
        return job in self._tried and now_s < self._tried[job].again_s

    def record_failure(
        self, job: str, what: str, now_s: float, *, counts: bool = True, before: Tried | None = None
    ) -> Tried | None:
        """Count a failed read of a job's file. Return the time of the retry, or None to give the file up.

        Args:
            job: The id of the job.
            what: The file that could not be read.
            now_s: The time of the coordinator's clock, in seconds.
            counts: Whether the number of attempts is limited. Without a limit, the job waits as long as necessary.
            before: The attempts under earlier coordinators. An attempt before their next due time does not count, so
                that restarts within seconds do not give a job up.
        """
        known = self._tried.pop(job, before)
        if known is None or known.what != what or now_s >= known.again_s + NEW_S:
            known = Tried(what, 0, now_s, now_s)
        early = 0 < known.again_s - now_s <= AGAIN_S  # a wall clock that was set back shows a later time
        number = known.number + (counts and not early)
        if number >= TRIES:
            return None
        self._tried[job] = Tried(what, number, known.since_s, known.again_s if early else now_s + AGAIN_S)
        return self._tried[job]

    def forget(self, job: str) -> None:
        self._tried.pop(job, None)
