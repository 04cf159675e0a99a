"""Leases of devices to jobs, and fair-share scheduling of jobs and devices. No I/O and no clock.

A device works on one task at a time, and `DeviceLeases` alone records which job uses a device. Jobs share device time:
the seconds for which devices were leased to a job, divided by the job's priority.

A job is active while it holds one of the coordinator's slots. An active job that waits for devices keeps its slot until
another job is queued. Then the job gives the slot up and is queued again. Nothing is lost, because the event log is the
whole state of a job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import UNDER_WAY, StoredJob

_NONE: Final[frozenset[str]] = frozenset()


class DeviceLeases:
    def __init__(self) -> None:
        self._holder: dict[str, str] = {}  # device -> job
        self._since_s: dict[str, float] = {}  # device -> when it was lent
        self._lent: dict[str, set[str]] = {}  # job -> devices
        self._begun_s: dict[str, float] = {}  # job -> sum of `_since_s` of its devices
        self._ended_s: dict[str, float] = {}  # job -> seconds of the loans that have ended

    def acquire_device(self, device: str, job: str, now_s: float) -> bool:
        holder = self._holder.get(device)
        if holder is None:
            self._holder[device], self._since_s[device] = job, now_s
            self._lent.setdefault(job, set()).add(device)
            self._begun_s[job] = self._begun_s.get(job, 0.0) + now_s
        return holder in (None, job)

    def release_device(self, device: str, job: str, now_s: float) -> bool:
        """End a job's lease of a device, if the job holds it. Return whether the device is free."""
        holder = self._holder.get(device)
        if holder != job:
            return holder is None
        del self._holder[device]
        since_s = self._since_s.pop(device)
        self._lent[job].remove(device)
        self._begun_s[job] -= since_s
        self._ended_s[job] = self._ended_s.get(job, 0.0) + now_s - since_s
        return True

    def leased_devices(self, job: str) -> AbstractSet[str]:
        return self._lent.get(job, _NONE)

    def devices_of_other_jobs(self, job: str) -> AbstractSet[str]:
        others = [devices for other, devices in self._lent.items() if devices and other != job]
        return others[0] if len(others) == 1 else _NONE.union(*others)

    def device_seconds(self, job: str, now_s: float) -> float:
        devices = self._lent.get(job)
        running_s = len(devices) * now_s - self._begun_s[job] if devices else 0.0
        return self._ended_s.get(job, 0.0) + running_s

    def raise_usage(self, job: str, least_s: float, now_s: float) -> None:
        lacking_s = least_s - self.device_seconds(job, now_s)
        if lacking_s > 0:
            self._ended_s[job] = self._ended_s.get(job, 0.0) + lacking_s

    def forget_job(self, job: str, now_s: float) -> None:
        for device in tuple(self.leased_devices(job)):
            self.release_device(device, job, now_s)
        for kept in (self._lent, self._begun_s, self._ended_s):
            kept.pop(job, None)


PATIENCE_S: Final = 60.0  # time after which a job without devices gives its slot to a queued job
START_S: Final = 1.0  # the same for a job whose round has not begun


class IdleTime(NamedTuple):
    idle_s: float  # since a device last worked on it
    begun: bool = True  # whether its running round has been asked of anybody

    @property
    def is_over_limit(self) -> bool:
        return self.idle_s >= (PATIENCE_S if self.begun else START_S)


class JobUsage(NamedTuple):
    had_s: float  # boards' seconds, divided by its priority
    round_s: float  # of these, the seconds of its latest round, or of the running one if they are more
    roll: AbstractSet[str]  # devices of its running round, which it will probably ask again
    working: bool  # whether a device works on it


def is_schedulable(row: StoredJob, only: str | None) -> bool:
    """Return whether this coordinator may run a job.

    With `only`, that is the job with this id. Otherwise that is every job submitted by `fedquilt run`: simulated jobs
    bring their own devices and are run by the process that started them.
    """
    return row.id == only if only is not None else row.origin == "run"


def select_jobs(
    rows: Sequence[StoredJob],
    waits: Mapping[str, IdleTime],
    gave_way_s: Mapping[str, float],
    limits: CoordinatorLimits = CoordinatorLimits(),
) -> list[str]:
    """Return the ids of the jobs that run now, in order of precedence.

    Active jobs that are not idle come first, then queued jobs, then idle ones. Among queued jobs, those that were never
    preempted come first, interrupted ones before new ones, and the most recently preempted one comes last.

    Args:
        rows: The jobs that this coordinator may run, in submission order.
        waits: The idle time of each active job, by job id.
        gave_way_s: The time at which each preempted job gave its slot up, by job id.
        limits: The limits on the number of active jobs, in total and per submitter.
    """
    wanting = [row for row in rows if row.status in UNDER_WAY]
    kept = [row for row in wanting if row.id in waits and not waits[row.id].is_over_limit]
    idle = [row for row in wanting if row.id in waits and waits[row.id].is_over_limit]
    behind = sorted(
        (row for row in wanting if row.id not in waits),
        key=lambda row: (gave_way_s.get(row.id, -math.inf), row.status != "running"),
    )
    found, running = list[str](), Counter[str]()
    for row in (*kept, *behind, *idle):
        if len(found) < limits.running and running[row.submitter] < limits.submitter.running:
            found.append(row.id)
            running[row.submitter] += 1
    return found


def devices_to_yield(job: str, claims: Mapping[str, JobUsage]) -> set[str]:
    """Return the devices that a job must leave to jobs behind it.

    A job yields to every working job whose device time is more than one round behind its own. Without this rule, a job
    with short tasks would take its competitor's devices back after each of the competitor's rounds.
    """
    own = claims[job]
    behind = (
        other.roll
        for id, other in claims.items()
        if id != job and other.working and own.had_s - other.had_s > own.round_s
    )
    return set[str]().union(*behind)


def minimum_device_time(claims: Mapping[str, JobUsage]) -> float:
    """Return the least device time of all working jobs, or 0 if there are none.

    A job that becomes active starts with this value, so that it cannot claim time from before.
    """
    return min((each.had_s for each in claims.values() if each.working), default=0.0)
