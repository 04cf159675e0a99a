"""Main loop of a coordinator, between the executor, the jobs and the store, and startup of its jobs.

The loop passes each message to its job, writes the job's new events to the log, and then carries out the resulting
actions. Pure functions in other modules make all decisions.

A job that is starting up holds the leases of its devices, but is not active yet. Messages about such a job are ignored,
because devices repeat them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import msgspec
from msgspec.structs import replace

from fedquilt import compression, methods, wire
from fedquilt.coordinator import run_control
from fedquilt.coordinator.background_worker import BackgroundWorker, run_and_capture
from fedquilt.coordinator.delivery.executor import Executor
from fedquilt.coordinator.delivery.rate_limiter import ASIDE_S
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.jobs.controller import CoordinatorContext, JobController, Observe
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rollout_runner import RolloutRunner, Tell
from fedquilt.coordinator.rounds import decisions, events
from fedquilt.coordinator.rounds.events import JobState
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import UNDER_WAY, Store, StoredJob
from fedquilt.coordinator.storage.suspended_jobs import count_failure
from fedquilt.coordinator.updates import job_blobs, sites, validation
from fedquilt.coordinator.updates.job_blobs import LoadedState, UnreadableError
from fedquilt.core import FedquiltError, JobError, Method, Profile, StoreError, Update, WireMessage
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
        made = job_blobs.open_bundle(row.id, row.bundle, row.content, self._desk.store.depot)
        wire = compression.exclude_buffers(row.job.wire, made.meta)
        row = row._replace(job=msgspec.structs.replace(row.job, wire=wire))
        method = self._around(self._load(row.job.method), row.job, made.files)
        by_wall = self._by_wall and row.id not in self._served
        return RunningJob(row, self._desk.store, now_s, method, self._desk.worker.large_bytes, by_wall=by_wall)

    def _serve_loaded_job(self, row: StoredJob, result: Result, now_s: float) -> None:
        self._serve_loaded_jobs([(row, result)], now_s)

    def _serve_loaded_jobs(self, found: Sequence[tuple[StoredJob, Result]], now_s: float) -> None:
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

    def _suspend_or_end_job(self, row: StoredJob, error: Exception, now_s: float) -> None:
        """Suspend a job after a failed read, else end the job as failed. Raise a StoreError of another cause."""
        if (hold := job_blobs.suspension_reason(error)) is not None:
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

    def end_inactive_job(self, job: StoredJob | RunningJob, fact: events.JobEnded) -> events.EndedJob:
        """Store and publish the end of an inactive job, and forget its failed reads. A job that is done stays done."""
        store = self._desk.store
        store.holds.delete_suspension(job.id)
        status = store.end_inactive_job(job.id, fact)
        state = events.JobState(events.JobConstants.from_job(job.job))
        with contextlib.suppress(JobError):  # of a log that cannot be read
            for _, _, each in store.read_events(job.id):
                state = events.apply_event(state, each, 0.0)
        if state.phase != status:
            state = msgspec.structs.replace(state, phase=status, reason=fact.reason)
        self._desk.news[job.id] = over = events.EndedJob(job.id, job.job, state)
        return over

    def suspend_job(self, job: StoredJob | RunningJob, error: UnreadableError, now_s: float) -> None:
        """Suspend a job after a failed read.

        After the last retry, a blob that can be made anew is discarded. Otherwise the job ends.
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


POLL_S = 0.5
TELL_S = 0.5  # between two messages on a round that goes on as before
TIDY_S = 600.0  # from one look for runs that need not be kept to the next


class Server:
    """Coordinator of a store's jobs, an `Endpoint` of `fedquilt.transport.link`.

    Args:
        executor: The link to the devices.
        store: The home of the coordinator.
        observe: The callback for each new event, `observe(job, event)`.
        only: The id of the single job to run, after which the server has finished, or None for all jobs.
        load: The function that returns a method by its name.
        poll_s: The interval at which new, stopped and resumed jobs are read from the store.
        limits: The limits on active jobs, and the retention of ended ones.
        tell: The callback for each new event of a rollout, `tell(rollout, event)`. With `only`, rollouts are not run.
        worker: The worker for updates and states that are too large for the loop, or None for no worker.
        around: The function that adapts a job's method to the coordinator's place in a hierarchy of sites.
        by_wall: Whether time goes by the wall clock, so that rounds of an earlier process keep their remaining time.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        observe: Observe = lambda job, fact: None,
        only: str | None = None,
        load: Callable[[str], Method] = methods.load,
        poll_s: float = POLL_S,
        limits: CoordinatorLimits = CoordinatorLimits(),
        tell: Tell = lambda rollout, fact: None,
        worker: BackgroundWorker | None = None,
        around: sites.Around = sites.adapt_for_sites,
        by_wall: bool = False,
    ) -> None:
        self.finished = False
        self._desk = CoordinatorContext(executor, store, observe, worker or BackgroundWorker())
        self._worker = self._desk.worker
        self.registry = self._desk.registry
        self._executor, self._store, self._only = executor, store, only
        self._opening = JobLoader(self._desk, load, around, self._activate_jobs, by_wall)
        self._limits = limits
        self._jobs = self._desk.jobs
        self._every_s, self._poll_s, self._tidy_s = poll_s, -math.inf, -math.inf
        self._gave_way_s: dict[str, float] = {}  # job -> when it last gave way to another
        self._rollouts = RolloutRunner(executor, store, self.registry, poll_s, tell) if only is None else None
        self._published: dict[str, tuple[object, float]] = {}  # job -> phase, round and attempt, and time
        self._left: set[str] = set()  # runs already reported as not taken up here
        self._unentitled: set[str] = set()  # devices already reported as sites without a right

    def fds(self) -> Sequence[int]:
        return [*self._executor.fds(), *self._worker.fds()]

    def active_jobs(self) -> list[RunningJob]:
        return [serving.job for serving in self._jobs.values()]

    def find_job(self, id: str) -> RunningJob | None:
        serving = self._jobs.get(id)
        return serving.job if serving else self._opening.jobs.get(id)

    def request_poll(self) -> None:
        self._poll_s = -math.inf

    def devices_of_other_jobs(self, id: str) -> AbstractSet[str]:
        return self._desk.loans.devices_of_other_jobs(id)

    def wall_clock_state(self, id: str, now_s: float, now: float) -> tuple[JobState, float]:
        """Return the state of an active job and its round's deadline, with times in wall-clock seconds."""
        serving = self._jobs[id]
        to_wall = now - now_s
        state = serving.job.rounds
        asked_s = {device: at_s + to_wall for device, at_s in state.asked_s.items() if device in state.asked}
        state = replace(state, opened_s=state.opened_s + to_wall, asked_s=asked_s)
        return state, serving.summed.wait_limit_s(now_s) + to_wall

    def jobs_by_leased_device(self, id: str) -> dict[str, str]:
        others = (each for each in (*self._jobs, *self._opening.jobs) if each != id)
        return {device: other for other in others for device in self._desk.loans.leased_devices(other)}

    def step(self, now_s: float) -> float:
        """Handle all messages and do all work that is due. Return the time of the next call."""
        desk = self._desk
        self._schedule_jobs(now_s)  # first: messages arriving now belong to the jobs that were running
        later = desk.later = []
        with self._store.batch_events():
            for heard in self._executor.receive_inputs(now_s):
                if heard is None:
                    self._resend_after_new_session(now_s)
                elif isinstance(heard, tuple):
                    self._handle_message(*heard, now_s)
                else:
                    self._handle_input(heard, now_s)
        desk.later = None
        for serving, action in later:
            serving.carry_out_action(action, now_s)
        self._worker.run_callbacks(now_s)
        rollouts_s = self._rollouts.step(now_s) if self._rollouts is not None else math.inf
        committed = self._advance_jobs(now_s)
        self._report_backlog()
        tell_s = self._publish_states(now_s)
        if not committed:  # else after the next round's tasks have been sent
            self._desk.collect_garbage()
        if committed or self._worker.has_results:
            return now_s  # that may have taken long: what follows is decided by the time that it is then
        deadline_s = min((serving.summed.wait_limit_s(now_s) for serving in self._jobs.values()), default=math.inf)
        return min(self._executor.send_pending(now_s), self._poll_s + self._every_s, deadline_s, rollouts_s, tell_s)

    def shut_down(self) -> None:
        self._worker.close()
        self._executor.close()

    def _report_backlog(self) -> None:
        waiting = [serving.summed.pending_updates for serving in self._jobs.values()]
        updates, waiting_bytes = sum(count for count, _ in waiting), sum(size for _, size in waiting)
        self._executor.set_backlog(updates, waiting_bytes, self._limits.waiting_mb * 1e6)

    def _publish_states(self, now_s: float) -> float:
        """Publish changed jobs, unchanged rounds at most every TELL_S. Return the time of the next publication."""
        news, again_s = self._desk.news, math.inf
        for id, job in list(news.items()):
            mark = job.rounds.phase, job.rounds.round, job.rounds.attempt
            before, published_s = self._published.get(id, (None, -math.inf))
            if mark == before and now_s < published_s + TELL_S:
                again_s = min(again_s, published_s + TELL_S)
                continue
            self._published[id] = mark, now_s
            self._executor.publish_state(job)
            del news[id]
        return again_s

    def _resend_after_new_session(self, now_s: float) -> None:
        # after a new session, the broker may have lost retained messages
        for serving in self._jobs.values():
            serving.send_all_tasks(now_s)
            serving.schedule_publication()
        if self._rollouts is not None:
            self._rollouts.resend_unsettled_releases(now_s)

    def _handle_message(self, device: str, message: WireMessage, now_s: float) -> None:
        self.registry.set_site_right(device, self._executor.site_right(device) or self._limits.sites.get(device))
        match message:  # the most frequent first
            case wire.Claim():
                if (serving := self._jobs.get(message.job)) is not None:
                    serving.handle_claim(device, message, now_s)
                else:
                    self._answer_inactive_job(decisions.ClaimReceived(device, message), now_s)
            case Update():
                own = message.layouts or message.site_devices  # not stored, and not from a device
                told = msgspec.structs.replace(message, layouts={}, site_devices=()) if own else message
                if (serving := self._jobs.get(message.job)) is not None:
                    serving.handle_update_offer(device, message, told, now_s)
                else:
                    status, counted = self._store.stored_status(message.job), self._store.is_update_counted(message)
                    self._answer_inactive_job(decisions.UpdateAnnounced(device, told, status, counted), now_s)
            case wire.Telemetry():
                self.registry.update_telemetry(device, message, now_s)
            case wire.Presence():
                if self.registry.update_presence(device, message, now_s):
                    self._handle_connection(device, now_s)
            case Profile():
                right = self.registry.site_right(device)
                if message.site_device_count and right is None and device not in self._unentitled:
                    self._unentitled.add(device)
                    log.warning(validation.UNENTITLED, device, extra=log_ids(device=device))
                self.registry.update_profile(device, validation.limit_profile(message, right))
                self._desk.send_unsent_task(device, now_s)
            case wire.ReleaseStatus() if self._rollouts is not None:
                self._rollouts.receive_report(device, message)

    def _handle_connection(self, device: str, now_s: float) -> None:
        self._handle_input(decisions.DeviceChange(device, "online"), now_s)
        if self._rollouts is not None:
            self._rollouts.resend_releases(device, now_s)

    def _handle_input(self, event: decisions.DeviceChange | decisions.UpdateReceived, now_s: float) -> None:
        device = event.device
        if isinstance(event, decisions.UpdateReceived):
            if (fetched := self._desk.fetching.pop(device, None)) is not None:
                fetched.handle_input(event, now_s)
            return None
        match event.kind:
            case "silent":
                return self.registry.mark_silent(device, now_s)
            case "returned":
                self.registry.mark_returned(device)
                return self._handle_connection(device, now_s)
            case "flooding":
                log.warning("%s %s", device, decisions.FLOODED, extra=log_ids(device=device))
                self.registry.block_device(device, now_s + ASIDE_S)
            case "removed":
                log.info("%s is removed by request", device, extra=log_ids(device=device))
                self.registry.forget_device(device, now_s)
        for serving in self._jobs.values():
            if device in serving.pending_devices:
                serving.handle_input(event, now_s)
        return None

    def _answer_inactive_job(self, event: decisions.ClaimReceived | decisions.UpdateAnnounced, now_s: float) -> None:
        """Acknowledge an update of an inactive job, or cancel its task on the device."""
        for action in decisions.decide_response("", None, None, event, now_s).actions:
            match action:
                case decisions.AckUpdate(device, update, accepted, reason):
                    self._desk.acknowledge_update(device, update, accepted, reason)
                case decisions.CancelTask(device):
                    self._desk.cancel_task(device, "", now_s)
                case _:
                    raise AssertionError(action)

    def _schedule_jobs(self, now_s: float) -> None:
        if now_s < self._poll_s + self._every_s:
            return
        self._poll_s = now_s
        for serving in list(self._jobs.values()):
            if self._store.stored_status(serving.id) == "stopping":
                serving.record_event(events.JobEnded("stopped", "by request"), now_s)
                self._remove_ended_job(serving, now_s)
        opening = self._opening.jobs
        if (self._jobs or opening) and self._only is not None:
            return
        wanted = [row for row in self._store.readable_jobs() if self._only in (None, row.id)]
        for row in wanted:
            if row.status == "stopping" and row.id not in self._jobs and row.id not in opening:
                self._opening.end_inactive_job(row, events.JobEnded("stopped", "by request"))
        self._warn_of_simulated_runs(wanted)
        if now_s >= self._tidy_s:
            self._tidy_s = now_s + TIDY_S
            self._remove_expired_runs()
        if self._only is None and (
            started := run_control.start_triggered_runs(
                self._store, wanted, self.registry.device_views(now_s), time.time()
            )
        ):
            wanted = [*wanted, *started]
        rows = [row for row in wanted if fair_share.is_schedulable(row, self._only)]
        waits = {serving.id: serving.measure_idle_time(now_s) for serving in self._jobs.values()}
        inactive = [row for row in rows if row.id not in self._jobs and row.id not in opening]
        suspended = self._opening.find_suspended_jobs(now_s) if inactive else set()
        able = [row for row in rows if row.id not in suspended]
        here = {**waits, **dict.fromkeys(opening, fair_share.IdleTime(0.0))}
        served = fair_share.select_jobs(able, here, self._gave_way_s, self._limits)
        for serving in [serving for serving in self._jobs.values() if serving.id not in served]:
            self._preempt_job(serving, waits[serving.id], now_s)
        if begun := [row for row in inactive if row.id in served]:
            self._opening.open_jobs(begun, now_s)
        elif not self._jobs and not opening and len(able) == len(rows):
            self.finished = self._only is not None

    def _remove_expired_runs(self) -> None:
        for id in retention.remove_expired_runs(self._store, self._limits.retention, time.time()):
            log.info("%s is deleted, as [retention] of limits.toml says", id, extra=log_ids(run=id))
        self._desk.garbage.add_all_blobs()

    def _preempt_job(self, serving: JobController, wait: fair_share.IdleTime, now_s: float) -> None:
        said = "%s has waited for devices for %.0f s: its place goes to the next in line"
        log.log(
            logging.WARNING if wait.begun else logging.INFO,
            said,
            serving.id,
            wait.idle_s,
            extra=log_ids(run=serving.id),
        )
        serving.cancel_all_tasks(now_s)
        self._deactivate_job(serving, "queued", now_s)
        self._gave_way_s[serving.id] = now_s

    def _warn_of_simulated_runs(self, rows: Sequence[StoredJob]) -> None:
        for row in rows:
            if row.status in UNDER_WAY and not fair_share.is_schedulable(row, self._only) and row.id not in self._left:
                self._left.add(row.id)
                log.warning(
                    "%s is a simulated fleet's, whose boards are not here: it is left to `fedquilt simulate`", row.id
                )

    def _activate_jobs(self, found: Sequence[tuple[StoredJob, RunningJob]], now_s: float) -> None:
        opened, least_s = [], fair_share.minimum_device_time(self._usage_by_job(now_s))
        for row, job in found:
            self._desk.loans.raise_usage(row.id, least_s * row.job.priority, now_s)
            opened.append(JobController(self._desk, job, row.submitter, now_s))
            self._jobs[row.id] = opened[-1]
        self._desk.garbage.add_all_blobs()  # a killed process may have left some
        for serving in opened:
            serving.activate(now_s)

    def _advance_jobs(self, now_s: float) -> bool:
        """Make all due decisions, each time from the first job again. Return True after a commit."""
        claims = self._usage_by_job(now_s)
        least_s = fair_share.minimum_device_time(claims)
        for serving in self._jobs.values():
            serving.raise_usage_while_idle(least_s, now_s)
        order = sorted(claims, key=lambda id: claims[id].had_s)  # who has had least goes first
        again = True
        while again:
            again = False
            for serving in [self._jobs[id] for id in order if id in self._jobs]:
                if serving.has_ended:
                    self._remove_ended_job(serving, now_s)
                    continue
                if serving.unreadable is not None:
                    serving.cancel_all_tasks(now_s)
                    self._deactivate_job(serving, "queued", now_s)
                    self._opening.suspend_job(serving.job, serving.unreadable, now_s)
                    continue
                closing = serving.job.rounds.phase == "closing"
                if serving.make_next_decision(
                    now_s, fair_share.devices_to_yield(serving.id, claims), self._remaining_device_quota(serving, now_s)
                ):
                    if closing:
                        return True
                    again = True
                    break
        return False

    def _usage_by_job(self, now_s: float) -> dict[str, fair_share.JobUsage]:
        return {serving.id: serving.compute_usage(now_s) for serving in self._jobs.values()}

    def _remaining_device_quota(self, serving: JobController, now_s: float) -> float:
        """Return how many more devices the submitter's jobs may lease, or infinity without a limit."""
        # every submitter may use at least one device
        share = self._limits.submitter.share
        if share == 1.0:
            return math.inf
        most = max(1, int(share * len(self.registry.online_devices(now_s))))
        others = (each for each in self._jobs.values() if each.submitter == serving.submitter)
        return max(0, most - sum(len(self._desk.loans.leased_devices(each.id)) for each in others))

    def _remove_ended_job(self, serving: JobController, now_s: float) -> None:
        self._deactivate_job(serving, serving.job.rounds.phase, now_s)
        self.finished = self.finished or self._only == serving.id
        self._poll_s = -math.inf

    def _deactivate_job(self, serving: JobController, status: str, now_s: float) -> None:
        if serving.has_ended:
            # the bundle stays for the next run of it
            self._desk.garbage.add_candidates(serving.blobs_in_use() - serving.job.required_blobs())
        self._store.set_status(serving.id, status, unless="stopping" if status == "queued" else "")
        del self._jobs[serving.id]
        self._published.pop(serving.id, None)
        self._desk.loans.forget_job(serving.id, now_s)
