"""Control of one active job: its messages, events, tasks and updates.

A controller uses only devices that are leased to its job, and cancels only its own tasks. Small updates are handled in
the main loop, large ones by a worker, one after the other. A round waits past its deadline for updates that are late
only because other updates were transferred or validated first. The result of a work item is used only if the job is
still in the state in which the work item was started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from fedquilt import wire
from fedquilt.coordinator.background_worker import run_and_capture
from fedquilt.coordinator.device_columns import ELIGIBLE
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.jobs.context import CoordinatorContext
from fedquilt.coordinator.jobs.job import RunningJob, decide_next_event
from fedquilt.coordinator.rounds import decisions, events, responses
from fedquilt.coordinator.rounds.selection import NO_WORK
from fedquilt.coordinator.updates import job_blobs
from fedquilt.coordinator.updates.aggregation import blob_hashes, total_blob_bytes
from fedquilt.coordinator.updates.job_blobs import CommitResult
from fedquilt.core import FedquiltError, JobError, StoreError, Update
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")


class UpdatePipeline:
    def __init__(self, controller: JobController, context: CoordinatorContext) -> None:
        self._controller, self._context = controller, context
        self._job, self._executor = controller.job, context.executor
        self._is_folding = False  # whether the worker folds updates or commits the round
        self._validating_updates: dict[str, Update] = {}  # device -> update that the worker validates
        self._punctual_devices: set[str] = set()  # devices in `_validating_updates` whose update arrived in time
        # device -> large update announced before the deadline, which waits for its transfer
        self._queued_updates: dict[str, Update] = {}
        # start of the running attempt, and `BrokerOutage.lost_s` at that time
        self._outage_at_attempt_start = (-math.inf, 0.0)

    @property
    def pending_updates(self) -> tuple[int, int]:
        """Number and bytes of received large updates that are not validated and folded yet."""
        if not self._is_large:
            return 0, 0
        count, size = self._job.aggregator.count_unfolded(self._job.job_state)
        updates = self._validating_updates.values()
        return count + len(updates), size + sum(map(total_blob_bytes, updates))

    def register_update(self, device: str, update: Update, now_s: float) -> bool:
        """Register an update before its transfer. Return whether it is large enough to be sent in turn."""
        if total_blob_bytes(update) < self._context.worker.large_bytes:
            return False
        if self._queued_updates.get(device) != update and now_s < self._extended_deadline_s:
            self._queued_updates[device] = update
        return True

    @property
    def lost_s(self) -> float:
        """Seconds by which broker outages extend the deadline. A site's round never passes its fixed end."""
        outage, state = self._executor.outage, self._job.job_state
        if state.opened_s != self._outage_at_attempt_start[0]:
            self._outage_at_attempt_start = state.opened_s, outage.lost_s
        max_lost_s = decisions.site_deadline_s(state) - state.opened_s - state.deadline_s
        return min(outage.lost_since(self._outage_at_attempt_start[1]), max_lost_s)

    @property
    def _extended_deadline_s(self) -> float:
        return decisions.next_decision_s(decisions.delay_attempt(self._job.job_state, self.lost_s))

    def wait_limit_s(self, now_s: float) -> float:
        """Return the deadline, or the later time until which the round waits for punctual updates.

        An update is punctual if it was received in time and is being validated, or if it was announced in time and
        waits for its transfer. A site never waits past the fixed end of its round.
        """
        deadline_s, latest_s = self._extended_deadline_s, decisions.site_deadline_s(self._job.job_state)
        if self._punctual_devices:
            return latest_s
        if now_s < deadline_s or not self._queued_updates:
            return deadline_s
        arriving = self._controller.arriving_updates
        self._queued_updates = {
            device: update for device, update in self._queued_updates.items() if arriving.get(device) == update
        }
        return min(deadline_s + max(map(self._executor.transfer_wait_s, self._queued_updates), default=0.0), latest_s)

    def wait_for_punctual_updates(self, now_s: float) -> bool:
        """Return whether the round waits past its deadline. Late devices lose their transfer turn to others."""
        deadline_s = self._extended_deadline_s
        if not deadline_s <= now_s < self.wait_limit_s(now_s) or decisions.has_full_cohort(self._job.job_state):
            return False
        for device in self._controller.arriving_updates:
            if now_s >= deadline_s + self._executor.transfer_wait_s(device):
                self._executor.yield_transfer_turn(device, now_s)
        return True

    @property
    def _is_job_inactive(self) -> bool:
        return self._controller.has_ended or self._context.jobs.get(self._controller.id) is not self._controller

    @property
    def _is_large(self) -> bool:
        return self._job.aggregator.large

    def validate_update(self, device: str, update: Update, now_s: float) -> None:
        """Validate an update after its transfer, in the worker if large, and pass the result to the job."""
        # a site's aggregate may be large although the updates of devices are small
        if total_blob_bytes(update) >= self._context.worker.large_bytes:
            self._job.aggregator.large = True
        is_large = self._is_large
        if is_large and self._validating_updates.get(device) == update:  # announced again
            return
        registry = self._context.registry
        profile, site_right = registry.latest_profile(device), registry.site_right(device)
        validation = self._job.build_validation(device, update, profile, now_s, large=is_large, right=site_right)
        if is_large:
            self._validating_updates[device] = update
            was_queued = self._queued_updates.pop(device, None) == update
            queue_wait_s = self._executor.transfer_wait_s(device) if was_queued else 0.0
            if now_s < self._extended_deadline_s + queue_wait_s:
                self._punctual_devices.add(device)
            callback = partial(self._apply_validation_if_current, device, update, self._job.job_state.round)
            self._context.start_work(validation, callback)
        else:
            self._apply_validation(device, validation, now_s)

    def _apply_validation_if_current(
        self, device: str, update: Update, round: int, validation: Callable[[], responses.UpdateValidated], now_s: float
    ) -> None:
        if self._validating_updates.get(device) != update:
            return  # the device has announced another update
        del self._validating_updates[device]
        self._punctual_devices.discard(device)
        if self._is_job_inactive or self._controller.arriving_updates.get(device) != update:
            return  # the round is closed, and the blobs may be deleted
        if self._job.job_state.round != round and self._job.job_state.phase == "open":
            return self.validate_update(device, update, now_s)  # for the present state
        self._apply_validation(device, validation, now_s)

    def _apply_validation(self, device: str, validation: Callable[[], responses.UpdateValidated], now_s: float) -> None:
        try:
            result = validation()
        except job_blobs.LostUpdateError as lost:
            text = "update of %s could not be read (%s): the device will submit it again"
            log.warning(text, device, lost.reason, extra=log_ids(device=device))
            return self._controller.handle_input(responses.UpdateReceived(device, lost.reason), now_s)
        except job_blobs.UnreadableError as error:  # the device announces the update again when the job continues
            return self._controller.handle_failure(error, now_s)
        if result.implausible_claims:
            log.warning(
                "%s: implausible claims corrected: %s", device, result.implausible_claims, extra=log_ids(device=device)
            )
        self._controller.handle_input(result, now_s)

    def start_folding(self) -> None:
        """Fold the next accepted update in the worker, if updates are large and no fold or commit runs."""
        if self._is_large and not self._is_folding and self._job.has_updates_to_fold():
            self._is_folding = True
            fold = self._job.build_fold(self._context.worker.min_unsaved_ratio)
            self._context.start_work(fold, self._record_partial_aggregate)

    def _record_partial_aggregate(self, result: Callable[[], events.UpdatesAggregated | None], now_s: float) -> None:
        self._is_folding = False
        previous_state = self._job.job_state
        if self._is_job_inactive:
            return
        event = self._result_or_lost_event(result, now_s)
        if event is not None:
            self._controller.record_event(event, now_s)
        if isinstance(event, events.UpdatesAggregated):
            aggregated_blobs = blob_hashes(previous_state.accepted_updates[device] for device in event.devices)
            if previous_state.partial_aggregate is not None:
                aggregated_blobs.add(previous_state.partial_aggregate.sum.sha256)
            self._context.garbage.add_candidates(aggregated_blobs, urgent=True)

    def commit_round(self, now_s: float) -> bool:
        """Commit the round, in the worker if updates are large. Return whether the commit has ended."""
        if self._is_folding:
            return False
        commit = self._job.build_commit(now_s)
        if self._is_large:
            self._is_folding = True
            self._context.start_work(commit, self._finish_commit)
            return False
        with self._executor.keep_alive():  # a step of the method may exceed the keep-alive period of the broker
            result = run_and_capture(commit)
        self._finish_commit(result, now_s)
        return True

    def _finish_commit(self, result: Callable[[], CommitResult], now_s: float) -> None:
        self._is_folding = False
        if self._is_job_inactive:
            return
        outcome = self._result_or_lost_event(result, now_s)
        if isinstance(outcome, CommitResult):
            self._controller.record_event(outcome.event, now_s, outcome)
        elif outcome is not None:
            self._controller.record_event(outcome, now_s)

    def _result_or_lost_event(self, result: Callable[[], T], now_s: float) -> T | events.UpdateLost | None:
        try:
            return result()
        except job_blobs.LostUpdateError as lost:
            return events.UpdateLost(self._job.job_state.round, lost.device, lost.reason)
        except Exception as error:
            self._controller.handle_failure(error, now_s)
            return None


START_S = 20.0  # time after the activation of a job for which selected devices count as working without a message
IMMEDIATE_ACTIONS = frozenset((responses.FetchUpdate, responses.ValidateUpdate))  # actions without external effect


class JobController:
    """Controller of an active job.

    Every method with an argument `now_s` raises StoreError if the store cannot be written.
    """

    def __init__(self, context: CoordinatorContext, job: RunningJob, submitter: str, now_s: float) -> None:
        self.job, self.id, self.submitter, self._context = job, job.id, submitter, context
        # device time of the latest round, and of all rounds up to its end
        self._device_times = (0.0, self._device_time_s(now_s))
        # selected devices without a profile or leased to another job
        self.unsent_devices: set[str] = set()
        self.arriving_updates: dict[str, Update] = {}  # device -> update whose blobs are being fetched
        self._incomplete_updates: dict[str, Update] = {}  # device -> latest update that is not accepted yet
        self._activated_s = self._last_work_s = now_s  # times of activation, and of the latest work on a device
        # registry version, `max_devices` and unreachable devices of the latest call without a decision
        self._inputs_without_decision: tuple[int, float, AbstractSet[str]] | None = None
        self.pipeline = UpdatePipeline(self, context)
        # this job, once its log has been reported as older than a device's history
        self._jobs_with_rolled_back_log: set[str] = set()
        self.read_error: job_blobs.UnreadableError | None = None  # failed read that suspends the job

    @property
    def has_ended(self) -> bool:
        return self.job.job_state.phase in events.ENDED_PHASES

    def activate(self, now_s: float) -> None:
        """Mark the job as running, resume a stopped or failed job, and send its open tasks."""
        self._context.store.mark_running(self.id)
        if self.job.job_state.phase in ("stopped", "failed"):
            self.record_event(events.JobResumed(), now_s)
        self.send_all_tasks(now_s)
        self.schedule_publication()

    def send_all_tasks(self, now_s: float) -> None:
        for device in sorted(self.job.job_state.pending_devices):
            self.send_task(device, now_s)

    def cancel_all_tasks(self, now_s: float) -> None:
        self._cancel_tasks(self.job.job_state.pending_devices | set(self.job.job_state.silent_devices), now_s)

    def measure_idle_time(self, now_s: float) -> fair_share.IdleTime:
        if not self._is_idle(now_s):
            self._last_work_s = now_s
        return fair_share.IdleTime(now_s - self._last_work_s, self.job.job_state.phase != "selecting")

    def compute_usage(self, now_s: float) -> fair_share.JobUsage:
        device_time_s = self._device_time_s(now_s)
        round_s, previous_time_s = self._device_times
        round_s = max(round_s, device_time_s - previous_time_s)
        return fair_share.JobUsage(device_time_s, round_s, self.job.job_state.cohort, not self._is_idle(now_s))

    def raise_usage_while_idle(self, min_usage_s: float, now_s: float) -> None:
        """Raise the usage of an idle job to `min_usage_s`, the least usage of all working jobs.

        So a job whose devices were offline has no claim to the device time of that period. The usage stays the same
        while the job waits for devices leased to other jobs.
        """
        if self._is_idle(now_s) and not self._is_waiting_for_leases(now_s):
            self._context.leases.raise_usage(self.id, min_usage_s * self.job.job.priority, now_s)
            self._device_times = (self._device_times[0], self._device_time_s(now_s))

    def _is_waiting_for_leases(self, now_s: float) -> bool:
        registry = self._context.registry
        free = registry.eligibility(self.job.requirements, now_s).devices_with(ELIGIBLE)
        has_enough_devices = len(free) >= decisions.minimum_devices_to_start(self.job.job_state)
        return has_enough_devices and not free.isdisjoint(self._context.leases.devices_of_other_jobs(self.id))

    def _device_time_s(self, now_s: float) -> float:
        return self._context.leases.device_seconds(self.id, now_s) / self.job.job.priority

    def blobs_in_use(self) -> set[str]:
        """Return the sha256 of blobs that the job needs besides those in its event log."""
        state = self.job.job_state
        aggregated_devices = state.partial_aggregate.devices if state.partial_aggregate else ()
        unaggregated_updates = [
            update for device, update in state.accepted_updates.items() if device not in aggregated_devices
        ]
        return (
            self.job.required_blobs()
            | self.job.sent_blobs()
            | blob_hashes([*unaggregated_updates, *self.arriving_updates.values(), *self._incomplete_updates.values()])
        )

    def _discard_unfinished_update(self, device: str, new_update: Update | None = None) -> None:
        """Mark the blobs of a device's unfinished update as garbage, unless `new_update` has the same bundles."""
        # a device may store at most one unfinished update per job
        old_update = self._incomplete_updates.pop(device, None)
        if old_update is not None and (new_update is None or old_update.bundles != new_update.bundles):
            self._context.garbage.add_candidates(blob_hashes([old_update]))

    def schedule_publication(self) -> None:
        self._context.unpublished_jobs[self.id] = self.job

    def handle_claim(self, device: str, claim: wire.Claim, now_s: float) -> None:
        registry = self._context.registry
        job_blobs.warn_of_rolled_back_log(self.job.job_state, self.id, device, claim, self._jobs_with_rolled_back_log)
        input = responses.ClaimReceived(device, claim)
        if not claim.accepted:
            workload = self.job.device_workload(device, registry.latest_profile(device))
            input = responses.ClaimReceived(device, claim, workload, registry.agent_start_key(device))
        self.handle_input(input, now_s)

    def handle_update_offer(self, device: str, update: Update, stored_update: Update, now_s: float) -> None:
        """Process a device's announcement of an update. `stored_update` is the part of the message to store."""
        problem = self.job.manifest_problem(update, self._context.registry.latest_profile(device))
        self.handle_input(responses.UpdateAnnounced(device, stored_update, manifest_problem=problem), now_s)

    def handle_input(self, input: responses.Input, now_s: float) -> None:
        decision = responses.decide_response(
            self.id, self.job.job_state, self.arriving_updates.get(input.device), input, now_s
        )
        if decision.arriving_update is None:
            self.arriving_updates.pop(input.device, None)
        else:
            self.arriving_updates[input.device] = decision.arriving_update
        for event in decision.events:
            self.record_event(event, now_s)
        for action in decision.actions:
            self._schedule_action(action, now_s)

    def _schedule_action(self, action: responses.Action, now_s: float) -> None:
        """Carry out an action, or defer one with an external effect until the events are written."""
        if self._context.deferred_actions is None or type(action) in IMMEDIATE_ACTIONS:
            self.carry_out_action(action, now_s)
        else:
            self._context.deferred_actions.append((self, action))

    def carry_out_action(self, action: responses.Action, now_s: float) -> None:
        match action:  # the most frequent first
            case responses.SlowResends(device):
                self._context.executor.slow_resends(device)
            case responses.CancelTask(device):
                self.unsent_devices.discard(device)
                self._context.cancel_task(device, self.id, now_s)
                self._discard_unfinished_update(device)
            case responses.AckUpdate():
                self._context.acknowledge_update(action)
            case responses.FetchUpdate(device, update):
                self._discard_unfinished_update(device, update)
                self._incomplete_updates[device] = update
                self._context.fetching_jobs[device] = self
                in_turn = self.pipeline.register_update(device, update, now_s)
                self._context.executor.fetch_blobs(device, update.bundles.values(), in_turn=in_turn)
            case responses.ValidateUpdate(device, update):
                self.pipeline.validate_update(device, update, now_s)
            case responses.SendTask(device):
                self.send_task(device, now_s)
            case responses.DiscardUpdate(update):
                self._context.garbage.add_candidates(blob_hashes([update]))
            case responses.RenewTask(device, epoch):
                self._context.adopt_epoch(device, epoch)
                self.send_task(device, now_s)

    def send_task(self, device: str, now_s: float) -> None:
        """Send a device its task of the running round, at once or when the device becomes available.

        If the method has no work for the device, record the task as declined. An error fails the job.
        """
        job, context = self.job, self._context
        # an error in another device's task may have ended the job
        if self.has_ended or device not in job.job_state.pending_devices:
            return
        profile = context.registry.latest_profile(device)
        # after a restart, the profile with the engines may not have arrived yet
        if profile is None or not context.leases.acquire_device(device, self.id, now_s):
            return self.unsent_devices.add(device)
        engine = next((name for name in job.engines if name in profile.engines), job.engines[0])
        try:
            task = job.build_task(device, engine, profile, now_s)
        except Exception as error:
            return self.handle_failure(error, now_s)
        if task is None:
            self.record_event(
                events.TaskDeclined(job.job_state.round, device, NO_WORK, "the method has no task for this device now"),
                now_s,
            )
            return context.release_device(device, self.id, now_s)
        try:
            return context.executor.send_task(device, task, now_s)
        except FedquiltError as error:
            return self.handle_failure(error, now_s)

    def make_next_decision(
        self, now_s: float, yielded_devices: AbstractSet[str] = frozenset(), max_devices: float = math.inf
    ) -> bool:
        """Make the job's next decision, if one is due. Return whether the job has changed."""
        job = self.job
        self.pipeline.start_folding()
        if job.job_state.phase == "closing":
            return self.pipeline.commit_round(now_s)
        if self.pipeline.wait_for_punctual_updates(now_s):
            return False
        try:
            busy_devices = self._context.leases.devices_of_other_jobs(self.id) | yielded_devices
            if self._has_nothing_to_decide(busy_devices, max_devices, now_s):
                return False
            registry, unreachable_devices = self._context.registry, self._unreachable_devices(now_s)
            working_devices = self._devices_at_work(now_s) - unreachable_devices
            lost_s = self.pipeline.lost_s
            event = decide_next_event(
                job, registry, working_devices, now_s, busy_devices, max_devices, lost_s, unreachable_devices
            )
        except Exception as error:
            self.handle_failure(error, now_s)
            return True
        if event is None:
            if now_s >= self._activated_s + START_S and self._context.executor.outage.can_reach_devices(now_s):
                self._inputs_without_decision = registry.refresh_views(now_s), max_devices, unreachable_devices
            return False
        self.record_event(event, now_s)
        return True

    def _has_nothing_to_decide(self, busy_devices: AbstractSet[str], max_devices: float, now_s: float) -> bool:
        # the cost of a decision grows with the fleet, and updates arrive a few at a time
        if self._inputs_without_decision is None or busy_devices:
            return False
        fleet_version, previous_max, unreachable_devices = self._inputs_without_decision
        is_unchanged = fleet_version == self._context.registry.refresh_views(now_s) and previous_max == max_devices
        return is_unchanged and decisions.can_skip_decision(self.job.job_state, now_s, unreachable_devices)

    def _able_devices(self, now_s: float) -> Collection[str]:
        return self._context.registry.usable_engines(self.job.engines, now_s).keys()

    def _is_idle(self, now_s: float) -> bool:
        return decisions.is_round_idle(
            self.job.job_state, self._able_devices(now_s), self._context.leases.devices_of_other_jobs(self.id)
        )

    def _devices_at_work(self, now_s: float) -> set[str]:
        # just after the activation all selected devices count, because authentication delays their messages
        pending = set(self.job.job_state.pending_devices - self._context.leases.devices_of_other_jobs(self.id))
        return pending if now_s < self._activated_s + START_S else pending.intersection(self._able_devices(now_s))

    def _unreachable_devices(self, now_s: float) -> frozenset[str]:
        state = self.job.job_state
        if state.phase != "open" or not self._context.executor.outage.can_reach_devices(now_s):
            return frozenset()
        return self._context.registry.find_unreachable(state.pending_devices | state.expected_devices, now_s)

    def handle_failure(self, error: Exception, now_s: float) -> None:
        """Suspend the job after a failed read, else fail it. StoreError and MemoryError are raised again."""
        if (read_error := job_blobs.suspension_reason(error)) is not None:
            self.read_error = read_error
            return
        if isinstance(error, StoreError | MemoryError):
            raise error
        log.error("%s: the method failed, and ends the job", self.id, exc_info=error, extra=log_ids(run=self.id))
        self.record_event(events.failure_event(error), now_s)

    def record_event(self, event: events.AnyEvent, now_s: float, commit: CommitResult | None = None) -> None:
        """Record an event, then send or cancel the tasks that follow. A forbidden event fails the job."""
        job = self.job
        previous_state = job.job_state
        try:
            job.record_event(event, now_s)
        except JobError as error:  # an event that the job state does not allow
            return self.handle_failure(error, now_s)
        if not isinstance(event, events.UpdateAccepted):
            self._inputs_without_decision = None
            self.arriving_updates = {
                device: update
                for device, update in self.arriving_updates.items()
                if device in job.job_state.pending_devices
            }
        self._context.observe(job, event)
        match event:
            case events.UpdateAccepted():  # the most frequent first
                self._incomplete_updates.pop(event.update.device, None)  # `blobs_in_use` contains accepted updates
            case events.CohortSelected():
                for device in event.devices:
                    self.send_task(device, now_s)
                # silent devices of earlier attempts that were not selected again
                self._cancel_tasks(set(job.job_state.silent_devices) - job.job_state.pending_devices, now_s)
                if previous_state.phase == "selecting":
                    self._continue_arriving_updates(now_s)
            case events.UpdateLost():
                ids = log_ids(run=job.id, round=event.round, device=event.device)
                log.warning("%s: %s's update is requested again: %s", job.id, event.device, event.reason, extra=ids)
                self._context.raise_epoch(self._context.store.epoch)
                self.send_task(event.device, now_s)
            case events.RoundClosed() | events.TasksCancelled() | events.JobEnded():
                open_devices = frozenset[str]() if self.has_ended else job.job_state.pending_devices
                ended_devices = previous_state.pending_devices.union(previous_state.silent_devices) - open_devices
                self._cancel_tasks(ended_devices, now_s)
            case events.RoundCommitted() if commit is not None:
                self._context.garbage.add_candidates(job.blobs_released_by_commit(previous_state))
                job.start_next_round(commit)
                device_time_s = self._device_time_s(now_s)
                self._device_times = (device_time_s - self._device_times[1], device_time_s)
        if isinstance(event, events.RoundCommitted | events.JobEnded):
            self._context.store.snapshots.save_if_due(job.id, job.snapshot)
        self.schedule_publication()

    def _continue_arriving_updates(self, now_s: float) -> None:
        """Fetch and validate the updates that arrived between two rounds."""
        for device, update in list(self.arriving_updates.items()):
            fetch, validate = responses.FetchUpdate(device, update), responses.ValidateUpdate(device, update)
            self._schedule_action(fetch if update.bundles else validate, now_s)

    def _cancel_tasks(self, devices: Collection[str], now_s: float) -> None:
        for device in sorted(devices):
            self._schedule_action(responses.CancelTask(device), now_s)
