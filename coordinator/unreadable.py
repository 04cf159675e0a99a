"""Jobs of which the disk failed to give something back: when they are tried again, and when given up.

A disk fails for a moment where a cable or a controller does, and for good where a sector is gone. The coordinator
does not know which it is. So it goes on with its other jobs, and takes the job up again a little later. What cannot be
read after `TRIES` is given up: a blob that is made or asked for again is put aside; for anything else its job fails.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TRIES: Final = 3
AGAIN_S: Final = 30.0  # from one to the next
NEW_S: Final = 3600.0  # after a failed try, from which on another one has nothing to do with it


class Tried(NamedTuple):
    """Tries of what a job needs; times are those of the coordinator's clock."""

    what: str
    number: int  # of tries so far
    since_s: float  # the first
    again_s: float  # the next


class Waiting:
    """Jobs that wait for the disk."""

    def __init__(self) -> None:
        self._tried: dict[str, Tried] = {}  # by job

    def waits(self, job: str, now_s: float) -> bool:
        """Whether a job is not to be taken up yet."""
        return job in self._tried and now_s < self._tried[job].again_s

    def record_failure(
        self, job: str, what: str, now_s: float, *, counts: bool = True, before: Tried | None = None
    ) -> Tried | None:
        """Count a failed read of a job's file. Return when to try again, or None to give the job up.

        Args:
            job: Id of the job.
            what: What could not be read.
            now_s: Seconds of the coordinator's clock.
            counts: Whether tries are limited. Without a limit the job waits as long as necessary.
            before: Tries of earlier coordinators. A try that comes before their next one is due does not count, so that
                restarts within seconds do not give a job up.
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
        """Note that a job does not wait any more."""
        self._tried.pop(job, None)
