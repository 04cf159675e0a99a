"""Immutable parameters of a job. Together with the event log, they determine the job state."""

from __future__ import annotations

import msgspec

from fedquilt.coordinator.settings import Cohort, Job, Stop


class Plan(msgspec.Struct, frozen=True):
    seed: int
    rounds: int
    cohort: Cohort
    check_every: int  # 0: never
    stop: Stop = Stop()
    check_beside: bool = False  # evaluations are prepared for, but no device is asked for one

    @staticmethod
    def from_job(job: Job) -> Plan:
        return Plan(job.seed, job.rounds, job.cohort, job.check.every, job.stop, job.check.beside)
