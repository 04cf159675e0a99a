"""Main loop of a coordinator, and the startup of its jobs.

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
from fedquilt.coordinator.delivery.rate_limiter import BLOCK_S
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.jobs.context import CoordinatorContext, Observe
from fedquilt.coordinator.jobs.controller import JobController
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rollout_runner import ObserveRollout, RolloutRunner
from fedquilt.coordinator.rounds import events, responses
from fedquilt.coordinator.rounds.job_state import EndedJob, JobConstants, JobState, apply_event
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
        context: The services shared by all jobs.
        load: The function that returns a method by its name.
        adapt_method: The function that adapts a job's method to the coordinator's level in a hierarchy of sites.
        activate: The callback for loaded jobs, `activate(jobs, now_s)`.
        uses_wall_clock: Whether a round's time continues while no coordinator runs. A job that was active in this
            process continues without a loss of time.

    Every method with an argument `now_s` raises StoreError if the store cannot be written.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        load: Callable[[str], Method],
        adapt_method: sites.AdaptMethod,
        activate: Serve,
        uses_wall_clock: bool,
    ) -> None:
        self._context = context
        self._load = load
        self._adapt_method = adapt_method
        self._activate = activate
        self._uses_wall_clock = uses_wall_clock
        self._loaded_jobs: set[str] = set()  # ids of the jobs that were active in this process
        self.jobs: dict[str, RunningJob] = {}
        self._wall_clock_offset_s: float | None = None  # wall clock minus the coordinator's clock

    def find_suspended_jobs(self, now_s: float) -> set[str]:
        """Return the ids of suspended jobs whose next retry is still in the future."""
        suspensions = self._context.store.suspensions.current_suspensions()
        return {job for job, suspension in suspensions.items() if self._to_wall_clock(now_s) < suspension.retry_time}

    def _to_wall_clock(self, now_s: float) -> float:
        # the offset is read once, so that a correction of the wall clock changes no retry time
        if self._wall_clock_offset_s is None:
            self._wall_clock_offset_s = self._context.store.blob_store.disk.wall_clock_s() - now_s
        return now_s + self._wall_clock_offset_s

    def open_jobs(self, rows: Sequence[StoredJob], now_s: float) -> None:
        """Rebuild jobs from their event logs, lease their devices and load their states.

        A job whose data cannot be read is suspended, and a job that cannot run ends as failed.
        """
        small_rows = []
        for row in rows:
            try:
                job = self._rebuild_job(row, now_s)
            except Exception as error:
                self._suspend_or_end_job(row, error, now_s)
                continue
            self.jobs[row.id] = job
            for device in sorted(job.job_state.pending_devices):
                self._context.leases.acquire_device(device, row.id, now_s)
            if job.is_large_to_load:
                self._context.start_work(job.build_state_loader(), partial(self._activate_loaded_job, row))
            else:
                small_rows.append(row)
        self._activate_loaded_jobs(
            [(row, run_and_capture(self.jobs[row.id].build_state_loader())) for row in small_rows], now_s
        )

    def _rebuild_job(self, row: StoredJob, now_s: float) -> RunningJob:
        bundle = job_blobs.open_bundle(row.id, row.bundle, row.content, self._context.store.blob_store)
        wire = compression.exclude_buffers(row.job.wire, bundle.meta)
        row = row._replace(job=msgspec.structs.replace(row.job, wire=wire))
        method = self._adapt_method(self._load(row.job.method), row.job, bundle.files)
        uses_wall_clock = self._uses_wall_clock and row.id not in self._loaded_jobs
        return RunningJob(
            row, self._context.store, now_s, method, self._context.worker.large_bytes, by_wall=uses_wall_clock
        )

    def _activate_loaded_job(self, row: StoredJob, result: Result, now_s: float) -> None:
        self._activate_loaded_jobs([(row, result)], now_s)

    def _activate_loaded_jobs(self, results: Sequence[tuple[StoredJob, Result]], now_s: float) -> None:
        ready, released_devices = [], set[str]()
        for row, result in results:
            job, leases = self.jobs.pop(row.id), self._context.leases
            devices = set(leases.leased_devices(row.id))
            leases.forget_job(row.id, now_s)
            try:
                job.use_loaded_state(result(), now_s)
                ready.append((row, job))
                self._loaded_jobs.add(row.id)
            except Exception as error:  # a job that cannot run must not stop the other jobs
                self._suspend_or_end_job(row, error, now_s)
                released_devices |= devices
        if ready:
            self._activate(ready, now_s)
        for device in sorted(released_devices):
            self._context.send_unsent_task(device, now_s)

    def _suspend_or_end_job(self, row: StoredJob, error: Exception, now_s: float) -> None:
        if (read_error := job_blobs.suspension_reason(error)) is not None:
            return self.suspend_job(row, read_error, now_s)
        if isinstance(error, StoreError):
            raise error
        end_event = events.failure_event(error)
        log.error("%s cannot run: %s", row.id, end_event.reason, exc_info=not isinstance(error, FedquiltError))
        self._end_and_observe(row, end_event)

    def _end_and_observe(self, job: StoredJob | RunningJob, event: events.JobEnded) -> None:
        ended_job = self.end_inactive_job(job, event)
        if ended_job.job_state.phase == event.status:
            self._context.observe(ended_job, event)

    def end_inactive_job(self, job: StoredJob | RunningJob, event: events.JobEnded) -> EndedJob:
        """Store the end of an inactive job and schedule its publication. A job that is done stays done."""
        store = self._context.store
        store.suspensions.delete_suspension(job.id)
        status = store.end_inactive_job(job.id, event)
        state = JobState(JobConstants.from_job(job.job))
        with contextlib.suppress(JobError):  # a damaged log
            for _, _, logged_event in store.read_events(job.id):
                state = apply_event(state, logged_event, 0.0)
        if state.phase != status:
            state = msgspec.structs.replace(state, phase=status, reason=event.reason)
        self._context.unpublished_jobs[job.id] = ended_job = EndedJob(job.id, job.job, state)
        return ended_job

    def suspend_job(self, job: StoredJob | RunningJob, error: UnreadableError, now_s: float) -> None:
        """Suspend a job after a failed read.

        After the last retry, a replaceable blob is discarded, so that the blob is rebuilt or requested again. Without
        such a blob, the job ends.
        """
        ids, suspensions, now = log_ids(run=job.id), self._context.store.suspensions, self._to_wall_clock(now_s)
        suspension = count_failure(
            suspensions.latest_suspension(job.id), error.subject, str(error), now, is_limited=not error.is_permanent
        )
        if suspension is not None:
            log.error(
                "%s. Suspended: %s is tried again in %.3g s", error, job.id, suspension.retry_time - now, extra=ids
            )
            return suspensions.record_suspension(job.id, suspension)
        suspensions.delete_suspension(job.id)
        if error.replaceable_blob:
            log.error("%s. The blob is discarded, and rebuilt or requested again", error, extra=ids)
            self._context.store.blob_store.discard_damaged(error.replaceable_blob)
        else:
            log.error("%s ends: %s. Fix: %s", job.id, error, fix := error.format_fix(job.id), extra=ids)
            self._end_and_observe(job, events.JobEnded("failed", f"{error}. Fix: {fix}"))


POLL_S = 0.5
PUBLICATION_INTERVAL_S = 0.5  # between two status messages of an unchanged round
RETENTION_INTERVAL_S = 600.0  # between two searches for expired runs


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
        observe_rollout: The callback for each new event of a rollout, `observe_rollout(rollout, event)`. With `only`,
            rollouts are not run.
        worker: The worker for updates and states that are too large for the loop, or None for no worker.
        adapt_method: The function that adapts a job's method to the coordinator's level in a hierarchy of sites.
        uses_wall_clock: Whether a round's time continues while no coordinator runs.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        observe: Observe = lambda job, event: None,
        only: str | None = None,
        load: Callable[[str], Method] = methods.load,
        poll_s: float = POLL_S,
        limits: CoordinatorLimits = CoordinatorLimits(),
        observe_rollout: ObserveRollout = lambda rollout, event: None,
        worker: BackgroundWorker | None = None,
        adapt_method: sites.AdaptMethod = sites.adapt_for_sites,
        uses_wall_clock: bool = False,
    ) -> None:
        self.finished = False
        self._context = CoordinatorContext(executor, store, observe, worker or BackgroundWorker())
        self._worker = self._context.worker
        self.registry = self._context.registry
        self._executor, self._store, self._only = executor, store, only
        self._job_loader = JobLoader(self._context, load, adapt_method, self._activate_jobs, uses_wall_clock)
        self._limits = limits
        self._jobs = self._context.jobs
        self._poll_interval_s, self._last_poll_s, self._next_retention_s = poll_s, -math.inf, -math.inf
        self._preempted_s: dict[str, float] = {}  # job -> time of the latest preemption
        self._rollouts = (
            RolloutRunner(executor, store, self.registry, poll_s, observe_rollout) if only is None else None
        )
        self._published: dict[str, tuple[object, float]] = {}  # job -> (phase, round and attempt), time
        self._reported_simulated_runs: set[str] = set()  # runs with a logged warning
        self._reported_unentitled_devices: set[str] = set()  # sites without a right, with a logged warning

    def fds(self) -> Sequence[int]:
        return [*self._executor.fds(), *self._worker.fds()]

    def active_jobs(self) -> list[RunningJob]:
        return [controller.job for controller in self._jobs.values()]

    def find_job(self, id: str) -> RunningJob | None:
        controller = self._jobs.get(id)
        return controller.job if controller else self._job_loader.jobs.get(id)

    def request_poll(self) -> None:
        self._last_poll_s = -math.inf

    def devices_of_other_jobs(self, id: str) -> AbstractSet[str]:
        return self._context.leases.devices_of_other_jobs(id)

    def wall_clock_state(self, id: str, now_s: float, now: float) -> tuple[JobState, float]:
        """Return the state of an active job and its round's deadline, with times in wall-clock seconds."""
        controller = self._jobs[id]
        offset_s = now - now_s
        state = controller.job.job_state
        selected_s = {
            device: time_s + offset_s for device, time_s in state.selected_s.items() if device in state.pending_devices
        }
        state = replace(state, opened_s=state.opened_s + offset_s, selected_s=selected_s)
        return state, controller.pipeline.wait_limit_s(now_s) + offset_s

    def jobs_by_leased_device(self, id: str) -> dict[str, str]:
        other_jobs = (job for job in (*self._jobs, *self._job_loader.jobs) if job != id)
        return {device: job_id for job_id in other_jobs for device in self._context.leases.leased_devices(job_id)}

    def step(self, now_s: float) -> float:
        """Handle all messages and do all work that is due. Return the time of the next call at the latest."""
        context = self._context
        self._schedule_jobs(now_s)
        deferred_actions = context.deferred_actions = []
        with self._store.batch_events():
            for input in self._executor.receive_inputs(now_s):
                if input is None:
                    self._resend_all(now_s)
                elif isinstance(input, tuple):
                    self._handle_message(*input, now_s)
                else:
                    self._handle_input(input, now_s)
        context.deferred_actions = None
        for controller, action in deferred_actions:
            controller.carry_out_action(action, now_s)
        self._worker.run_callbacks(now_s)
        rollouts_s = self._rollouts.step(now_s) if self._rollouts is not None else math.inf
        has_committed = self._advance_jobs(now_s)
        self._report_backlog()
        publication_s = self._publish_states(now_s)
        if not has_committed:  # after a commit, the next round's tasks are sent first
            self._context.collect_garbage()
        if has_committed or self._worker.has_results:
            return now_s  # the commit may have taken long, so the next decisions need the present time
        deadline_s = min(
            (controller.pipeline.wait_limit_s(now_s) for controller in self._jobs.values()), default=math.inf
        )
        return min(
            self._executor.send_pending(now_s),
            self._last_poll_s + self._poll_interval_s,
            deadline_s,
            rollouts_s,
            publication_s,
        )

    def shut_down(self) -> None:
        self._worker.close()
        self._executor.close()

    def _report_backlog(self) -> None:
        pending = [controller.pipeline.pending_updates for controller in self._jobs.values()]
        updates, total_bytes = sum(count for count, _ in pending), sum(size for _, size in pending)
        self._executor.set_backlog(updates, total_bytes, self._limits.waiting_mb * 1e6)

    def _publish_states(self, now_s: float) -> float:
        """Publish the changed jobs, and return when to call again.

        A change within an attempt is published at the earliest PUBLICATION_INTERVAL_S after the previous one.
        """
        unpublished, next_s = self._context.unpublished_jobs, math.inf
        for id, job in list(unpublished.items()):
            progress = job.job_state.phase, job.job_state.round, job.job_state.attempt
            last_progress, published_s = self._published.get(id, (None, -math.inf))
            if progress == last_progress and now_s < published_s + PUBLICATION_INTERVAL_S:
                next_s = min(next_s, published_s + PUBLICATION_INTERVAL_S)
                continue
            self._published[id] = progress, now_s
            self._executor.publish_state(job)
            del unpublished[id]
        return next_s

    def _resend_all(self, now_s: float) -> None:
        # the broker may have lost retained messages, so all tasks, states and unsettled releases are sent again
        for controller in self._jobs.values():
            controller.send_all_tasks(now_s)
            controller.schedule_publication()
        if self._rollouts is not None:
            self._rollouts.resend_unsettled_releases(now_s)

    def _handle_message(self, device: str, message: WireMessage, now_s: float) -> None:
        self.registry.set_site_right(device, self._executor.site_right(device) or self._limits.sites.get(device))
        match message:  # the most frequent first
            case wire.Claim():
                if (controller := self._jobs.get(message.job)) is not None:
                    controller.handle_claim(device, message, now_s)
                else:
                    self._answer_inactive_job(responses.ClaimReceived(device, message), now_s)
            case Update():
                stored_update = message
                if message.layouts or message.site_devices:  # fields that only sites send, and that are not stored
                    stored_update = msgspec.structs.replace(message, layouts={}, site_devices=())
                if (controller := self._jobs.get(message.job)) is not None:
                    controller.handle_update_offer(device, message, stored_update, now_s)
                else:
                    status, is_counted = self._store.stored_status(message.job), self._store.is_update_counted(message)
                    announcement = responses.UpdateAnnounced(device, stored_update, status, is_counted)
                    self._answer_inactive_job(announcement, now_s)
            case wire.Telemetry():
                self.registry.update_telemetry(device, message, now_s)
            case wire.Presence():
                if self.registry.update_presence(device, message, now_s):
                    self._handle_connection(device, now_s)
            case Profile():
                right = self.registry.site_right(device)
                if message.site_device_count and right is None and device not in self._reported_unentitled_devices:
                    self._reported_unentitled_devices.add(device)
                    log.warning(validation.NO_SITE_RIGHT_TEXT, device, extra=log_ids(device=device))
                self.registry.update_profile(device, validation.limit_profile(message, right))
                self._context.send_unsent_task(device, now_s)
            case wire.ReleaseStatus() if self._rollouts is not None:
                self._rollouts.receive_report(device, message)

    def _handle_connection(self, device: str, now_s: float) -> None:
        self._handle_input(responses.DeviceChange(device, "online"), now_s)
        if self._rollouts is not None:
            self._rollouts.resend_releases(device, now_s)

    def _handle_input(self, input: responses.DeviceChange | responses.UpdateReceived, now_s: float) -> None:
        device = input.device
        if isinstance(input, responses.UpdateReceived):
            if (fetched := self._context.fetching_jobs.pop(device, None)) is not None:
                fetched.handle_input(input, now_s)
            return None
        match input.kind:
            case "silent":
                return self.registry.mark_silent(device, now_s)
            case "returned":
                self.registry.mark_returned(device)
                return self._handle_connection(device, now_s)
            case "flooding":
                log.warning("%s %s", device, responses.FLOODED, extra=log_ids(device=device))
                self.registry.block_device(device, now_s + BLOCK_S)
            case "removed":
                log.info("%s is removed from the fleet by request", device, extra=log_ids(device=device))
                self.registry.forget_device(device, now_s)
        for controller in self._jobs.values():
            if device in controller.job.job_state.pending_devices:
                controller.handle_input(input, now_s)
        return None

    def _answer_inactive_job(self, input: responses.ClaimReceived | responses.UpdateAnnounced, now_s: float) -> None:
        for action in responses.decide_response("", None, None, input, now_s).actions:
            match action:
                case responses.AckUpdate():
                    self._context.acknowledge_update(action)
                case responses.CancelTask(device):
                    self._context.cancel_task(device, "", now_s)
                case _:
                    raise AssertionError(action)

    def _schedule_jobs(self, now_s: float) -> None:
        """If a poll is due, stop jobs by request, start triggered jobs, and start or preempt jobs as selected."""
        if now_s < self._last_poll_s + self._poll_interval_s:
            return
        self._last_poll_s = now_s
        for controller in list(self._jobs.values()):
            if self._store.stored_status(controller.id) == "stopping":
                controller.record_event(events.JobEnded("stopped", "by request"), now_s)
                self._remove_ended_job(controller, now_s)
        loading_jobs = self._job_loader.jobs
        if (self._jobs or loading_jobs) and self._only is not None:
            return
        jobs = [row for row in self._store.readable_jobs() if self._only in (None, row.id)]
        for row in jobs:
            if row.status == "stopping" and row.id not in self._jobs and row.id not in loading_jobs:
                self._job_loader.end_inactive_job(row, events.JobEnded("stopped", "by request"))
        self._warn_of_simulated_runs(jobs)
        if now_s >= self._next_retention_s:
            self._next_retention_s = now_s + RETENTION_INTERVAL_S
            self._remove_expired_runs()
        if self._only is None:
            fleet = self.registry.device_views(now_s)
            jobs += run_control.start_triggered_runs(self._store, jobs, fleet, time.time())
        schedulable_rows = [row for row in jobs if fair_share.is_schedulable(row, self._only)]
        idle_times_of_active = {
            controller.id: controller.measure_idle_time(now_s) for controller in self._jobs.values()
        }
        inactive_rows = [row for row in schedulable_rows if row.id not in self._jobs and row.id not in loading_jobs]
        suspended = self._job_loader.find_suspended_jobs(now_s) if inactive_rows else set()
        schedulable = [row for row in schedulable_rows if row.id not in suspended]
        idle_times = {**idle_times_of_active, **dict.fromkeys(loading_jobs, fair_share.IdleTime(0.0))}
        selected_ids = fair_share.select_jobs(schedulable, idle_times, self._preempted_s, self._limits)
        for controller in [controller for controller in self._jobs.values() if controller.id not in selected_ids]:
            self._preempt_job(controller, idle_times_of_active[controller.id], now_s)
        if selected_rows := [row for row in inactive_rows if row.id in selected_ids]:
            self._job_loader.open_jobs(selected_rows, now_s)
        elif not self._jobs and not loading_jobs and len(schedulable) == len(schedulable_rows):
            self.finished = self._only is not None

    def _remove_expired_runs(self) -> None:
        for id in retention.remove_expired_runs(self._store, self._limits.retention, time.time()):
            log.info("%s is deleted according to [retention] in limits.toml", id, extra=log_ids(run=id))
        self._context.garbage.add_all_blobs()

    def _preempt_job(self, controller: JobController, idle_time: fair_share.IdleTime, now_s: float) -> None:
        message = "%s preempted: after %.0f s without devices, its slot goes to the next queued job"
        level = logging.WARNING if idle_time.has_started else logging.INFO
        log.log(level, message, controller.id, idle_time.idle_s, extra=log_ids(run=controller.id))
        controller.cancel_all_tasks(now_s)
        self._deactivate_job(controller, "queued", now_s)
        self._preempted_s[controller.id] = now_s

    def _warn_of_simulated_runs(self, rows: Sequence[StoredJob]) -> None:
        for row in rows:
            is_simulated = row.status in UNDER_WAY and not fair_share.is_schedulable(row, self._only)
            if is_simulated and row.id not in self._reported_simulated_runs:
                self._reported_simulated_runs.add(row.id)
                log.warning("%s needs simulated devices: only `fedquilt simulate` continues this run", row.id)

    def _activate_jobs(self, loaded_jobs: Sequence[tuple[StoredJob, RunningJob]], now_s: float) -> None:
        controllers, min_device_time_s = [], fair_share.minimum_device_time(self._usage_by_job(now_s))
        for row, job in loaded_jobs:
            self._context.leases.raise_usage(row.id, min_device_time_s * row.job.priority, now_s)
            controllers.append(JobController(self._context, job, row.submitter, now_s))
            self._jobs[row.id] = controllers[-1]
        self._context.garbage.add_all_blobs()  # a killed process may have left unreferenced blobs
        for controller in controllers:
            controller.activate(now_s)

    def _advance_jobs(self, now_s: float) -> bool:
        """Make due decisions of all jobs, until the first commit of a round. Return whether one committed.

        After each decision the jobs are visited again from the start, the job with the least device time first.
        """
        usages = self._usage_by_job(now_s)
        min_device_time_s = fair_share.minimum_device_time(usages)
        for controller in self._jobs.values():
            controller.raise_usage_while_idle(min_device_time_s, now_s)
        job_ids = sorted(usages, key=lambda id: usages[id].device_time_s)
        is_unsettled = True
        while is_unsettled:
            is_unsettled = False
            for controller in [self._jobs[id] for id in job_ids if id in self._jobs]:
                if controller.has_ended:
                    self._remove_ended_job(controller, now_s)
                    continue
                if controller.read_error is not None:
                    controller.cancel_all_tasks(now_s)
                    self._deactivate_job(controller, "queued", now_s)
                    self._job_loader.suspend_job(controller.job, controller.read_error, now_s)
                    continue
                is_closing = controller.job.job_state.phase == "closing"
                yielded_devices = fair_share.devices_to_yield(controller.id, usages)
                max_devices = self._remaining_device_quota(controller, now_s)
                if controller.make_next_decision(now_s, yielded_devices, max_devices):
                    if is_closing:
                        return True
                    is_unsettled = True
                    break
        return False

    def _usage_by_job(self, now_s: float) -> dict[str, fair_share.JobUsage]:
        return {controller.id: controller.compute_usage(now_s) for controller in self._jobs.values()}

    def _remaining_device_quota(self, controller: JobController, now_s: float) -> float:
        share = self._limits.submitter.share
        if share == 1.0:
            return math.inf
        max_devices = max(1, int(share * len(self.registry.online_devices(now_s))))
        same_submitter = (other for other in self._jobs.values() if other.submitter == controller.submitter)
        return max(0, max_devices - sum(len(self._context.leases.leased_devices(other.id)) for other in same_submitter))

    def _remove_ended_job(self, controller: JobController, now_s: float) -> None:
        self._deactivate_job(controller, controller.job.job_state.phase, now_s)
        self.finished = self.finished or self._only == controller.id
        self._last_poll_s = -math.inf

    def _deactivate_job(self, controller: JobController, status: str, now_s: float) -> None:
        if controller.has_ended:
            # other runs of the job need the bundle
            self._context.garbage.add_candidates(controller.blobs_in_use() - controller.job.required_blobs())
        self._store.set_status(controller.id, status, unless="stopping" if status == "queued" else "")
        del self._jobs[controller.id]
        self._published.pop(controller.id, None)
        self._context.leases.forget_job(controller.id, now_s)
