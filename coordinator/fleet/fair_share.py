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
        self._job_by_device: dict[str, str] = {}
        self._started_s: dict[str, float] = {}  # device -> start of the lease
        self._devices_by_job: dict[str, set[str]] = {}
        self._start_sums_s: dict[str, float] = {}  # job -> sum of `_started_s` of its devices
        self._ended_lease_s: dict[str, float] = {}  # job -> device seconds of ended leases

    def acquire_device(self, device: str, job: str, now_s: float) -> bool:
        """Reserve a device for a job unless another job holds it. Return whether the job holds the device."""
        holding_job = self._job_by_device.get(device)
        if holding_job is None:
            self._job_by_device[device], self._started_s[device] = job, now_s
            self._devices_by_job.setdefault(job, set()).add(device)
            self._start_sums_s[job] = self._start_sums_s.get(job, 0.0) + now_s
        return holding_job in (None, job)

    def release_device(self, device: str, job: str, now_s: float) -> bool:
        """End a job's lease of a device, if the job holds it. Return whether the device is free."""
        holding_job = self._job_by_device.get(device)
        if holding_job != job:
            return holding_job is None
        del self._job_by_device[device]
        start_s = self._started_s.pop(device)
        self._devices_by_job[job].remove(device)
        self._start_sums_s[job] -= start_s
        self._ended_lease_s[job] = self._ended_lease_s.get(job, 0.0) + now_s - start_s
        return True

    def leased_devices(self, job: str) -> AbstractSet[str]:
        return self._devices_by_job.get(job, _NONE)

    def devices_of_other_jobs(self, job: str) -> AbstractSet[str]:
        device_sets = [devices for other, devices in self._devices_by_job.items() if devices and other != job]
        return device_sets[0] if len(device_sets) == 1 else _NONE.union(*device_sets)

    def device_seconds(self, job: str, now_s: float) -> float:
        """Return the seconds of a job's running and ended leases, summed over devices."""
        devices = self._devices_by_job.get(job)
        running_s = len(devices) * now_s - self._start_sums_s[job] if devices else 0.0
        return self._ended_lease_s.get(job, 0.0) + running_s

    def raise_usage(self, job: str, min_usage_s: float, now_s: float) -> None:
        missing_s = min_usage_s - self.device_seconds(job, now_s)
        if missing_s > 0:
            self._ended_lease_s[job] = self._ended_lease_s.get(job, 0.0) + missing_s

    def forget_job(self, job: str, now_s: float) -> None:
        for device in tuple(self.leased_devices(job)):
            self.release_device(device, job, now_s)
        for values in (self._devices_by_job, self._start_sums_s, self._ended_lease_s):
            values.pop(job, None)


IDLE_LIMIT_S: Final = 60.0  # time after which a job without devices gives its slot to a queued job
IDLE_LIMIT_BEFORE_START_S: Final = 1.0  # the same for a job whose round has not begun


class IdleTime(NamedTuple):
    idle_s: float  # seconds since a device worked on the job
    has_started: bool = True  # whether devices have been selected for the running round

    @property
    def is_over_limit(self) -> bool:
        return self.idle_s >= (IDLE_LIMIT_S if self.has_started else IDLE_LIMIT_BEFORE_START_S)


class JobUsage(NamedTuple):
    device_time_s: float  # leased device seconds, divided by the priority
    round_time_s: float  # device time of the latest or the running round, whichever is longer
    cohort: AbstractSet[str]  # devices of the running round
    is_working: bool  # whether a device works on the job


def is_schedulable(row: StoredJob, only: str | None) -> bool:
    """Return whether this coordinator may run a job: the job `only`, or any job of `fedquilt run`.

    The process that starts a simulated job passes `only`, because no other process has the simulated devices.
    """
    return row.id == only if only is not None else row.origin == "run"


def select_jobs(
    rows: Sequence[StoredJob],
    idle_times: Mapping[str, IdleTime],
    preempted_s: Mapping[str, float],
    limits: CoordinatorLimits = CoordinatorLimits(),
) -> list[str]:
    """Return the ids of the jobs that run now, in order of precedence.

    Active jobs that are not idle come first, then queued jobs, then idle ones. Among queued jobs, those that were never
    preempted come first, interrupted ones before new ones, and the most recently preempted one comes last.

    Args:
        rows: The jobs that this coordinator may run, in submission order.
        idle_times: The idle time of each active job, by job id.
        preempted_s: The time at which each preempted job gave its slot up, by job id.
        limits: The limits on the number of active jobs, in total and per submitter.
    """
    candidates = [row for row in rows if row.status in UNDER_WAY]
    busy_rows = [row for row in candidates if row.id in idle_times and not idle_times[row.id].is_over_limit]
    idle_rows = [row for row in candidates if row.id in idle_times and idle_times[row.id].is_over_limit]
    queued_rows = sorted(
        (row for row in candidates if row.id not in idle_times),
        key=lambda row: (preempted_s.get(row.id, -math.inf), row.status != "running"),
    )
    selected, running_by_submitter = list[str](), Counter[str]()
    for row in (*busy_rows, *queued_rows, *idle_rows):
        if len(selected) < limits.running and running_by_submitter[row.submitter] < limits.submitter.running:
            selected.append(row.id)
            running_by_submitter[row.submitter] += 1
    return selected


def devices_to_yield(job: str, usages: Mapping[str, JobUsage]) -> set[str]:
    """Return the devices that a job must leave to working jobs with less device time.

    If a job is behind by more than the duration of one round of `job`, its whole cohort is left to it. Otherwise a job
    with short tasks would take the devices back after each round of the other job.
    """
    own_usage = usages[job]
    other_cohorts = (
        other.cohort
        for id, other in usages.items()
        if id != job and other.is_working and own_usage.device_time_s - other.device_time_s > own_usage.round_time_s
    )
    return set[str]().union(*other_cohorts)


def minimum_device_time(usages: Mapping[str, JobUsage]) -> float:
    """Return the least device time of all working jobs, or 0 if there are none.

    A job that becomes active starts with this value, so that it has no claim to time before its activation.
    """
    return min((usage.device_time_s for usage in usages.values() if usage.is_working), default=0.0)
