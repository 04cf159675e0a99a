"""Views of jobs for observers: active jobs, and jobs that ended while inactive."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from fedquilt.coordinator.facts import Ended, Rounds, apply_event
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Row, Store
from fedquilt.core import JobError


class Shown(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def job(self) -> Job: ...

    @property
    def rounds(self) -> Rounds: ...


class Over(NamedTuple):
    id: str
    job: Job
    rounds: Rounds


def end_and_view_job(store: Store, job: Row | Shown, fact: Ended) -> Over:
    """Store the end of an inactive job. Return the job, even if its log cannot be read.

    A job whose log ends as done stays done. See `Store.end_inactive_job`.
    """
    status = store.end_inactive_job(job.id, fact)
    state = Rounds(Plan.from_job(job.job))
    with contextlib.suppress(JobError):
        for _, _, each in store.read_events(job.id):
            state = apply_event(state, each, 0.0)
    return Over(job.id, job.job, state if state.phase == status else replace(state, phase=status, reason=fact.reason))
