"""Views of jobs for observers: active jobs, and jobs that ended while inactive."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from fedquilt.coordinator.rounds.events import JobConstants, JobEnded, JobState, apply_event
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.core import JobError


class JobView(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def job(self) -> JobSettings: ...

    @property
    def rounds(self) -> JobState: ...


class EndedJob(NamedTuple):
    id: str
    job: JobSettings
    rounds: JobState


def end_and_view_job(store: Store, job: StoredJob | JobView, fact: JobEnded) -> EndedJob:
    """Store the end of an inactive job. Return the job, even if its log cannot be read.

    A job whose log ends as done stays done. See `Store.end_inactive_job`.
    """
    status = store.end_inactive_job(job.id, fact)
    state = JobState(JobConstants.from_job(job.job))
    with contextlib.suppress(JobError):
        for _, _, each in store.read_events(job.id):
            state = apply_event(state, each, 0.0)
    return EndedJob(
        job.id, job.job, state if state.phase == status else replace(state, phase=status, reason=fact.reason)
    )
