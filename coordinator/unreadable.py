"""Jobs whose stored state, sum or update the disk failed to give back: when they are tried again, and when given up.

A disk fails for a moment where a cable or a controller does, and for good where a sector is gone. The coordinator
does not know which it is. So it goes on with its other jobs, and takes the job up again a little later. What cannot be
read after `TRIES` is given up: a blob that is made or asked for again is put aside; for any other its job fails.
"""

from __future__ import annotations

from typing import Final

TRIES: Final = 3
AGAIN_S: Final = 30.0  # from one to the next
NEW_S: Final = 3600.0  # after a failed try, from which on another one has nothing to do with it


class Waiting:
    """Jobs that wait for the disk."""

    def __init__(self) -> None:
        self._tried: dict[str, tuple[str, int, float]] = {}  # job -> blob (sha256), tries of it, time of the next one

    def waits(self, job: str, now_s: float) -> bool:
        """Whether a job is not to be taken up yet."""
        return job in self._tried and now_s < self._tried[job][2]

    def failed(self, job: str, sha256: str, now_s: float) -> bool:
        """Note that a job's blob could not be read; True: it is given up, and all is forgotten of the job."""
        before, tries, again_s = self._tried.get(job, ("", 0, now_s))
        tries = tries + 1 if before == sha256 and now_s < again_s + NEW_S else 1
        if tries >= TRIES:
            self._tried.pop(job, None)
            return True
        self._tried[job] = (sha256, tries, now_s + AGAIN_S)
        return False
