"""Jobs that are taken up: their logs are read, and then, by a worker where it is large, what they go on from.

A job that is being taken up keeps the boards that it has asked from others, and is not at work yet: a device's message
about it is passed over, as the device repeats it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from fedquilt import compression
from fedquilt.coordinator import facts, mending, shown, sites, unreadable
from fedquilt.coordinator.holds import Hold
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.mending import UnreadableError
from fedquilt.coordinator.serving import Desk
from fedquilt.coordinator.states import Opened
from fedquilt.coordinator.store import Row
from fedquilt.coordinator.worker import outcome
from fedquilt.core import FedquiltError, Method, StoreError
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

Serve = Callable[[Sequence[tuple[Row, Running]], float], None]
Result = Callable[[], Opened]


class Opening:
    """Jobs of one coordinator that are being taken up, or wait for the disk before they are.

    Args:
        desk: what the jobs at work share.
        load: finds a method by its name.
        around: makes of a job's method the one that is run.
        serve: `serve(jobs, now_s)` is called with those that can go on now.
        by_wall: as of `Server`; for a job that is taken up again here, no time has passed meanwhile.

    Raises, from every method that has `now_s`:
        StoreError: nothing can be written any more.
    """

    def __init__(
        self, desk: Desk, load: Callable[[str], Method], around: sites.Around, serve: Serve, by_wall: bool
    ) -> None:
        self._desk, self._load, self._around, self._serve, self._by_wall = desk, load, around, serve, by_wall
        self._served: set[str] = set()  # jobs that have been at work here
        self.jobs: dict[str, Running] = {}  # by id
        self._held = unreadable.Waiting()

    def held(self, id: str, now_s: float) -> bool:
        """Whether a job waits for the disk."""
        return self._held.waits(id, now_s)

    def open_jobs(self, rows: Sequence[Row], now_s: float) -> None:
        """Load jobs from their logs, small ones at once and large ones by the worker, and lease their devices."""
        found = []
        for row in rows:
            try:
                job = self._running(row, now_s)
            except Exception as error:
                self._handle_error(row, error, now_s)
                continue
            self.jobs[row.id] = job
            for device in sorted(job.rounds.asked):
                self._desk.loans.lend(device, row.id, now_s)
            if job.opens_large:
                self._desk.start_work(job.opening(), partial(self._opened_one, row))
            else:
                found.append(row)
        self._serve_opened([(row, outcome(self.jobs[row.id].opening())) for row in found], now_s)

    def _running(self, row: Row, now_s: float) -> Running:
        made = mending.bundle_of(row.id, row.bundle, self._desk.store.depot)
        wire = compression.sparing(row.job.wire, made.meta)
        row = row._replace(job=msgspec.structs.replace(row.job, wire=wire))
        method = self._around(self._load(row.job.method), row.job, made.files)
        by_wall = self._by_wall and row.id not in self._served
        return Running(row, self._desk.store, now_s, method, self._desk.worker.large_bytes, by_wall=by_wall)

    def _opened_one(self, row: Row, result: Result, now_s: float) -> None:
        self._serve_opened([(row, result)], now_s)

    def _serve_opened(self, found: Sequence[tuple[Row, Result]], now_s: float) -> None:
        """Hand loaded jobs to the server, and free the devices of jobs that could not be loaded."""
        ready, left = [], set[str]()
        for row, result in found:
            job, loans = self.jobs.pop(row.id), self._desk.loans
            boards = set(loans.lent(row.id))
            loans.forget(row.id, now_s)
            try:
                job.continue_from(result(), now_s)
                ready.append((row, job))
                self._served.add(row.id)
            except Exception as error:  # one job that cannot run does not keep the others from running
                self._handle_error(row, error, now_s)
                left |= boards
        if ready:
            self._serve(ready, now_s)
        for device in sorted(left):
            self._desk.available(device, now_s)

    # -- jobs that do not go on --

    def _handle_error(self, row: Row, error: Exception, now_s: float) -> None:
        """Put a job off if a file could not be read, or end it as failed. Raise StoreErrors again."""
        if (hold := mending.suspension_reason(error)) is not None:
            return self.put_off(row, hold, now_s)
        if isinstance(error, StoreError):
            raise error
        ended = facts.failed(error)
        log.error("%s cannot run: %s", row.id, ended.reason, exc_info=not isinstance(error, FedquiltError))
        return self._end(row, ended)

    def _end(self, job: Row | Running, fact: facts.Ended) -> None:
        over = self.end(job, fact)
        if over.rounds.phase == fact.status:
            self._desk.observe(over, fact)

    def end(self, job: Row | Running, fact: facts.Ended) -> shown.Over:
        """End a job that is not at work, and publish that; it is not held any more, and tried at once when resumed."""
        self._held.forget(job.id)
        self._desk.store.holds.forget(job.id)
        self._desk.news[job.id] = over = shown.ended(self._desk.store, job, fact)
        return over

    def put_off(self, job: Row | Running, error: UnreadableError, now_s: float) -> None:
        """Retry a job later after a failed read. If that does not help, drop the damaged blob or end the job."""
        ids, holds, before = about(run=job.id), self._desk.store.holds, None
        ahead_s = self._desk.store.depot.disk.wall_s() - now_s
        if (last := holds.last(job.id)) is not None:
            before = unreadable.Tried(last.what, last.tries, last.since - ahead_s, last.again - ahead_s)
        tried = self._held.record_failure(job.id, error.what, now_s, counts=not error.lasts, before=before)
        if tried is not None:
            log.error("%s; %s is taken up again in %.3g s", error, job.id, tried.again_s - now_s, extra=ids)
            since, again = tried.since_s + ahead_s, tried.again_s + ahead_s
            return holds.note(job.id, Hold(since, again, str(error), error.what, tried.number))
        holds.forget(job.id)
        if error.again:
            log.error("%s; it is put aside, and made or asked for again", error, extra=ids)
            self._desk.store.depot.discard_damaged(error.again)
        else:
            log.error("%s cannot go on: %s; %s", job.id, error, mend := error.mend(job.id), extra=ids)
            self._end(job, facts.Ended("failed", f"{error}; {mend}"))
