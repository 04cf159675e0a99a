"""A job of a store that is taken up, outside a coordinator."""

from __future__ import annotations

from fedquilt import methods
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Method


def opened(store: Store, run: str, method: Method | None = None) -> RunningJob:
    """The job, with its state; `method`: None: the one that it names."""
    row = store.find_job(run)
    job = RunningJob(row, store, 0.0, method or methods.load(row.job.method))
    job.use_loaded_state(job.build_state_loader()(), 0.0)
    return job
