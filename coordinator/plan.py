"""Constants of a job, which its rounds follow from beside its facts."""

from __future__ import annotations

import msgspec

from fedquilt.coordinator.settings import Cohort, Job, Stop


class Plan(msgspec.Struct, frozen=True):
    """Constants of a job."""

    seed: int
    rounds: int
    cohort: Cohort
    check_every: int  # 0: never
    stop: Stop = Stop()
    check_beside: bool = False  # evaluations are prepared for, but no device is asked for one

    @staticmethod
    def of(job: Job) -> Plan:
        """Constants from a job's settings."""
        return Plan(job.seed, job.rounds, job.cohort, job.check.every, job.stop, job.check.beside)
