"""Main loop of a coordinator, between the executor, the jobs and the store.

The loop passes each message to its job, writes the job's new events to the log, and then carries out the resulting
actions. Pure functions in other modules make all decisions.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from fedquilt import methods, wire
from fedquilt.coordinator import sites, triggers
from fedquilt.coordinator.background_worker import BackgroundWorker, SynchronousWorker
from fedquilt.coordinator.delivery.executor import Executor
from fedquilt.coordinator.delivery.rate_limiter import ASIDE_S
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.jobs.controller import CoordinatorContext, JobController, Observe
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.jobs.startup import JobLoader
from fedquilt.coordinator.limits import CoordinatorLimits
from fedquilt.coordinator.rollout_runner import RolloutRunner, Tell
from fedquilt.coordinator.rounds import claim_bounds, events, message_handler
from fedquilt.coordinator.rounds.events import JobState
from fedquilt.coordinator.storage.store import UNDER_WAY, Store, StoredJob
from fedquilt.core import Method, Profile, Update, WireMessage
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

Happening: TypeAlias = (
    message_handler.DeviceOnline
    | message_handler.UpdateReceived
    | message_handler.RateLimitExceeded
    | message_handler.DeviceSilent
    | message_handler.DeviceReturned
    | message_handler.DeviceRemoved
)

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
        self._desk = CoordinatorContext(executor, store, observe, worker or SynchronousWorker())
        self._worker = self._desk.worker
        self.registry = self._desk.registry
        self._executor, self._store, self._only = executor, store, only
        self._opening = JobLoader(self._desk, load, around, self._activate_jobs, by_wall)
        self._limits = limits
        self._jobs = self._desk.jobs
        self._every_s, self._poll_s, self._tidy_s = poll_s, -math.inf, -math.inf
        self._gave_way_s: dict[str, float] = {}  # job -> when it last gave way to another
        self._rollouts = RolloutRunner(executor, store, self.registry, poll_s, tell) if only is None else None
        self._told: dict[str, tuple[object, float]] = {}  # job -> phase, round and attempt published last, and when
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
        """Return the job of each device that is leased to a job other than `id`."""
        others = (each for each in (*self._jobs, *self._opening.jobs) if each != id)
        return {device: other for other in others for device in self._desk.loans.leased_devices(other)}

    def step(self, now_s: float) -> float:
        """Handle all messages and do all work that is due. Return the time of the next call.

        Raises:
            StoreError: If the store cannot be written. Accepted updates are safe, and a restarted coordinator
                continues.
        """
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
            before, told_s = self._told.get(id, (None, -math.inf))
            if mark == before and now_s < told_s + TELL_S:
                again_s = min(again_s, told_s + TELL_S)
                continue
            self._told[id] = mark, now_s
            self._executor.publish_state(job)
            del news[id]
        return again_s

    # -- messages --

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
                    self._answer_inactive_job(message_handler.ClaimReceived(device, message), now_s)
            case Update():
                own = message.layouts or message.boards  # not stored, and not from a device
                told = msgspec.structs.replace(message, layouts={}, boards=()) if own else message
                if (serving := self._jobs.get(message.job)) is not None:
                    serving.handle_update_offer(device, message, told, now_s)
                else:
                    status, counted = self._store.stored_status(message.job), self._store.is_update_counted(message)
                    self._answer_inactive_job(message_handler.UpdateAnnounced(device, told, status, counted), now_s)
            case wire.Telemetry():
                self.registry.update_telemetry(device, message, now_s)
            case wire.Presence():
                if self.registry.update_presence(device, message, now_s):
                    self._handle_connection(device, now_s)
            case Profile():
                right = self.registry.site_right(device)
                if message.boards and right is None and device not in self._unentitled:
                    self._unentitled.add(device)
                    log.warning(claim_bounds.UNENTITLED, device, extra=log_ids(device=device))
                self.registry.update_profile(device, claim_bounds.limit_profile(message, right))
                self._desk.send_unsent_task(device, now_s)
            case wire.ReleaseStatus() if self._rollouts is not None:
                self._rollouts.receive_report(device, message)

    def _handle_connection(self, device: str, now_s: float) -> None:
        self._handle_input(message_handler.DeviceOnline(device), now_s)
        if self._rollouts is not None:
            self._rollouts.resend_releases(device, now_s)

    def _handle_input(self, event: Happening, now_s: float) -> None:
        if isinstance(event, message_handler.DeviceSilent):
            return self.registry.mark_silent(event.device, now_s)
        if isinstance(event, message_handler.DeviceReturned):
            self.registry.mark_returned(event.device)
            return self._handle_connection(event.device, now_s)
        if isinstance(event, message_handler.UpdateReceived):
            if (fetched := self._desk.fetching.pop(event.device, None)) is not None:
                fetched.handle_input(event, now_s)
            return None
        if isinstance(event, message_handler.RateLimitExceeded):
            log.warning("%s %s", event.device, message_handler.FLOODED, extra=log_ids(device=event.device))
            self.registry.block_device(event.device, now_s + ASIDE_S)
        if isinstance(event, message_handler.DeviceRemoved):
            log.info("%s is removed by request", event.device, extra=log_ids(device=event.device))
            self.registry.forget_device(event.device, now_s)
        for serving in self._jobs.values():
            if event.device in serving.pending_devices:
                serving.handle_input(event, now_s)
        return None

    def _answer_inactive_job(
        self, event: message_handler.ClaimReceived | message_handler.UpdateAnnounced, now_s: float
    ) -> None:
        """Acknowledge an update of an inactive job, or cancel its task on the device."""
        for action in message_handler.decide_response("", None, None, event, now_s).actions:
            match action:
                case message_handler.AckUpdate(device, update, accepted, reason):
                    self._desk.acknowledge_update(device, update, accepted, reason)
                case message_handler.CancelTask(device):
                    self._desk.cancel_task(device, "", now_s)
                case _:
                    raise AssertionError(action)

    # -- jobs --

    def _schedule_jobs(self, now_s: float) -> None:
        """Read the store at intervals: stop, preempt and load jobs, start triggered runs and delete expired ones."""
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
            started := triggers.start_triggered_runs(
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
        """Make all decisions that are due. Return True after a commit, when others may be due.

        After each decision, the jobs are considered again from the start, because devices may have been leased or
        released.
        """
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
            self._desk.garbage.add_candidates(
                serving.blobs_in_use() - serving.job.required_blobs()
            )  # the bundle stays for the next run of it
        self._store.set_status(serving.id, status, unless="stopping" if status == "queued" else "")
        del self._jobs[serving.id]
        self._told.pop(serving.id, None)
        self._desk.loans.forget_job(serving.id, now_s)
