"""What observers see of a job: of one at work, and of one that has ended before it was taken up."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from fedquilt.coordinator.facts import Ended, Rounds, apply
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row, Store
from fedquilt.core import JobError


class Shown(Protocol):
    """A job as observers see it: `Running`, or `Over`."""

    @property
    def id(self) -> str:
        """Id of the run."""
        ...

    @property
    def job(self) -> Job:
        """Settings."""
        ...

    @property
    def rounds(self) -> Rounds:
        """State of its rounds."""
        ...


class Over(NamedTuple):
    """A job that has ended while no process worked on it."""

    id: str
    job: Job
    rounds: Rounds


def ended(store: Store, job: Row | Shown, fact: Ended) -> Over:
    """Store the end of a job that is not at work; returns the job as it is then, also if its log cannot be read.

    One whose log says already that it is done stays done: see `Store.end`.
    """
    status = store.end(job.id, fact)
    state = Rounds(Plan.of(job.job))
    with contextlib.suppress(JobError):
        for _, _, each in store.facts(job.id):
            state = apply(state, each, 0.0)
    return Over(job.id, job.job, state if state.phase == status else replace(state, phase=status, reason=fact.reason))
