"""Startup of jobs: event logs are read first, then states, large ones by the worker.

A job that is starting up holds the leases of its devices, but is not active yet. Messages about such a job are ignored,
because devices repeat them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from fedquilt import compression
from fedquilt.coordinator import job_view, sites
from fedquilt.coordinator.background_worker import run_and_capture
from fedquilt.coordinator.jobs.controller import CoordinatorContext
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds import events
from fedquilt.coordinator.storage.store import StoredJob
from fedquilt.coordinator.storage.suspended_jobs import count_failure
from fedquilt.coordinator.updates import blob_recovery
from fedquilt.coordinator.updates.blob_recovery import UnreadableError
from fedquilt.coordinator.updates.model_states import LoadedState
from fedquilt.core import FedquiltError, Method, StoreError
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")
Serve = Callable[[Sequence[tuple[StoredJob, RunningJob]], float], None]
Result = Callable[[], LoadedState]


class JobLoader:
    """Jobs of a coordinator that are starting up, or waiting for a retry after a failed disk read.

    Args:
        around: The function that adapts a job's method to the coordinator's place in a hierarchy of sites.
        serve: The callback for loaded jobs, `serve(jobs, now_s)`.
        by_wall: Whether time goes by the wall clock. For a job that was active here before, no time has passed
            meanwhile.

    Every method with an argument `now_s` raises StoreError if the store cannot be written.
    """

    def __init__(
        self, desk: CoordinatorContext, load: Callable[[str], Method], around: sites.Around, serve: Serve, by_wall: bool
    ) -> None:
        self._desk, self._load, self._around, self._serve, self._by_wall = desk, load, around, serve, by_wall
        self._served: set[str] = set()  # jobs that have been at work here
        self.jobs: dict[str, RunningJob] = {}  # by id
        self._ahead_s: float | None = None  # wall clock minus the coordinator's clock

    def find_suspended_jobs(self, now_s: float) -> set[str]:
        """Return the jobs that wait for the next try of the disk."""
        holds = self._desk.store.holds.current_suspensions()
        return {job for job, hold in holds.items() if self._to_wall_clock(now_s) < hold.again}

    def _to_wall_clock(self, now_s: float) -> float:
        # Steps of the wall clock change no retry.
        if self._ahead_s is None:
            self._ahead_s = self._desk.store.depot.disk.wall_clock_s() - now_s
        return now_s + self._ahead_s

    def open_jobs(self, rows: Sequence[StoredJob], now_s: float) -> None:
        """Rebuild jobs from event logs, lease their devices and load their states. Suspend or end broken jobs."""
        found = []
        for row in rows:
            try:
                job = self._rebuild_job(row, now_s)
            except Exception as error:
                self._suspend_or_end_job(row, error, now_s)
                continue
            self.jobs[row.id] = job
            for device in sorted(job.rounds.asked):
                self._desk.loans.acquire_device(device, row.id, now_s)
            if job.is_large_to_load:
                self._desk.start_work(job.build_state_loader(), partial(self._serve_loaded_job, row))
            else:
                found.append(row)
        self._serve_loaded_jobs(
            [(row, run_and_capture(self.jobs[row.id].build_state_loader())) for row in found], now_s
        )

    def _rebuild_job(self, row: StoredJob, now_s: float) -> RunningJob:
        made = blob_recovery.open_bundle(row.id, row.bundle, row.content, self._desk.store.depot)
        wire = compression.exclude_buffers(row.job.wire, made.meta)
        row = row._replace(job=msgspec.structs.replace(row.job, wire=wire))
        method = self._around(self._load(row.job.method), row.job, made.files)
        by_wall = self._by_wall and row.id not in self._served
        return RunningJob(row, self._desk.store, now_s, method, self._desk.worker.large_bytes, by_wall=by_wall)

    def _serve_loaded_job(self, row: StoredJob, result: Result, now_s: float) -> None:
        self._serve_loaded_jobs([(row, result)], now_s)

    def _serve_loaded_jobs(self, found: Sequence[tuple[StoredJob, Result]], now_s: float) -> None:
        """Release the devices of loaded jobs, serve the jobs, and suspend or end those that failed to load."""
        ready, left = [], set[str]()
        for row, result in found:
            job, loans = self.jobs.pop(row.id), self._desk.loans
            boards = set(loans.leased_devices(row.id))
            loans.forget_job(row.id, now_s)
            try:
                job.use_loaded_state(result(), now_s)
                ready.append((row, job))
                self._served.add(row.id)
            except Exception as error:  # one job that cannot run does not keep the others from running
                self._suspend_or_end_job(row, error, now_s)
                left |= boards
        if ready:
            self._serve(ready, now_s)
        for device in sorted(left):
            self._desk.send_unsent_task(device, now_s)

    # -- jobs that do not go on --

    def _suspend_or_end_job(self, row: StoredJob, error: Exception, now_s: float) -> None:
        """Suspend a job after a failed read, else end the job as failed. Raise a StoreError of another cause."""
        if (hold := blob_recovery.suspension_reason(error)) is not None:
            return self.suspend_job(row, hold, now_s)
        if isinstance(error, StoreError):
            raise error
        ended = events.failure_event(error)
        log.error("%s cannot run: %s", row.id, ended.reason, exc_info=not isinstance(error, FedquiltError))
        return self._end_and_observe(row, ended)

    def _end_and_observe(self, job: StoredJob | RunningJob, fact: events.JobEnded) -> None:
        over = self.end_inactive_job(job, fact)
        if over.rounds.phase == fact.status:
            self._desk.observe(over, fact)

    def end_inactive_job(self, job: StoredJob | RunningJob, fact: events.JobEnded) -> job_view.EndedJob:
        """Store and publish the end of an inactive job, and forget its failed reads."""
        self._desk.store.holds.delete_suspension(job.id)
        self._desk.news[job.id] = over = job_view.end_and_view_job(self._desk.store, job, fact)
        return over

    def suspend_job(self, job: StoredJob | RunningJob, error: UnreadableError, now_s: float) -> None:
        """Suspend a job after a failed read, and schedule a retry.

        After the last retry, discard the damaged blob if it can be rebuilt or requested again. Otherwise end the job as
        failed.
        """
        ids, holds, now = log_ids(run=job.id), self._desk.store.holds, self._to_wall_clock(now_s)
        hold = count_failure(holds.latest_suspension(job.id), error.what, str(error), now, counts=not error.lasts)
        if hold is not None:
            log.error("%s; %s is taken up again in %.3g s", error, job.id, hold.again - now, extra=ids)
            return holds.record_suspension(job.id, hold)
        holds.delete_suspension(job.id)
        if error.again:
            log.error("%s; it is put aside, and made or asked for again", error, extra=ids)
            self._desk.store.depot.discard_damaged(error.again)
        else:
            log.error("%s cannot go on: %s; %s", job.id, error, mend := error.format_fix(job.id), extra=ids)
            self._end_and_observe(job, events.JobEnded("failed", f"{error}; {mend}"))
