"""Loans of boards to jobs: a board works on one task at a time, so that one job has it at a time.

This is the one place that knows which job a board is asked by. It also counts for how long each job has had boards,
which is what a fair share is measured in.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

_NONE: Final[frozenset[str]] = frozenset()


class Loans:
    """Boards by the job that has them, and the seconds for which each job has had boards."""

    def __init__(self) -> None:
        self._holder: dict[str, str] = {}  # device -> job
        self._since_s: dict[str, float] = {}  # device -> when it was lent
        self._lent: dict[str, set[str]] = {}  # job -> devices
        self._begun_s: dict[str, float] = {}  # job -> sum of `_since_s` of its devices
        self._ended_s: dict[str, float] = {}  # job -> seconds of the loans that have ended

    def lend(self, device: str, job: str, now_s: float) -> bool:
        """Let a job have a board, if no other has it; whether the job has it now."""
        holder = self._holder.get(device)
        if holder is None:
            self._holder[device], self._since_s[device] = job, now_s
            self._lent.setdefault(job, set()).add(device)
            self._begun_s[job] = self._begun_s.get(job, 0.0) + now_s
        return holder in (None, job)

    def take_back(self, device: str, job: str, now_s: float) -> bool:
        """End a job's loan of a board, if it has it; whether nobody has the board now."""
        holder = self._holder.get(device)
        if holder != job:
            return holder is None
        del self._holder[device]
        since_s = self._since_s.pop(device)
        self._lent[job].remove(device)
        self._begun_s[job] -= since_s
        self._ended_s[job] = self._ended_s.get(job, 0.0) + now_s - since_s
        return True

    def lent(self, job: str) -> AbstractSet[str]:
        """Boards that a job has. Not to be changed."""
        return self._lent.get(job, _NONE)

    def elsewhere(self, job: str) -> AbstractSet[str]:
        """Boards that other jobs have. Not to be changed."""
        others = [devices for other, devices in self._lent.items() if devices and other != job]
        return others[0] if len(others) == 1 else _NONE.union(*others)

    def seconds(self, job: str, now_s: float) -> float:
        """Seconds for which a job has had boards, added up over boards, those it has now included."""
        devices = self._lent.get(job)
        running_s = len(devices) * now_s - self._begun_s[job] if devices else 0.0
        return self._ended_s.get(job, 0.0) + running_s

    def level(self, job: str, least_s: float, now_s: float) -> None:
        """Count at least so many seconds for a job: it was not there to use them."""
        lacking_s = least_s - self.seconds(job, now_s)
        if lacking_s > 0:
            self._ended_s[job] = self._ended_s.get(job, 0.0) + lacking_s

    def forget(self, job: str, now_s: float) -> None:
        """Drop all that is known of a job; its boards are nobody's."""
        for device in tuple(self.lent(job)):
            self.take_back(device, job, now_s)
        for kept in (self._lent, self._begun_s, self._ended_s):
            kept.pop(job, None)
