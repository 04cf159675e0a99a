"""Control of one active job: its messages, events, tasks and updates.

A controller uses only devices that are leased to its job, and cancels only its own tasks. Small updates are handled in
the main loop, large ones by a worker, one after the other. A round waits past its deadline for updates that are late
only because of their place in the queue. The result of a work item counts only if the job is still in the state in
which the work item was started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from fedquilt import wire
from fedquilt.coordinator.background_worker import BackgroundWorker, Then, run_and_capture
from fedquilt.coordinator.delivery.executor import Executor
from fedquilt.coordinator.device_columns import ELIGIBLE
from fedquilt.coordinator.fleet import fair_share
from fedquilt.coordinator.fleet.fair_share import DeviceLeases
from fedquilt.coordinator.fleet.registry import DeviceRegistry
from fedquilt.coordinator.jobs.job import RunningJob, decide_next_event
from fedquilt.coordinator.jobs.retention import GarbageCollector
from fedquilt.coordinator.rounds import decisions, events
from fedquilt.coordinator.rounds.events import JobView
from fedquilt.coordinator.rounds.selection import NOTHING
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import job_blobs, validation
from fedquilt.coordinator.updates.aggregation import blob_hashes, total_blob_bytes
from fedquilt.coordinator.updates.job_blobs import CommitResult
from fedquilt.core import FedquiltError, JobError, Profile, SiteRight, StoreError, Update, shorten_error
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")


class UpdatePipeline:
    """Validation, aggregation and commit of one job's updates."""

    def __init__(self, served: JobController, desk: CoordinatorContext) -> None:
        self._served, self._desk = served, desk
        self._summing = False  # whether the worker folds or commits
        self._examining: dict[str, Update] = {}  # device -> update that the worker validates
        self._in_time: set[str] = set()  # devices among these whose update arrived before the deadline
        self._offered: dict[str, Update] = {}  # device -> update that is fetched in turn, offered before the deadline
        self._lost = (-math.inf, 0.0)  # when the running attempt began; `BrokerOutage.lost_s` at that time

    @property
    def pending_updates(self) -> tuple[int, int]:
        """Number and bytes of the received updates that the worker has not yet read or folded."""
        if not self._is_large:
            return 0, 0
        count, size = self._served.job.aggregator.count_unfolded(self._served.job.rounds)
        return count + len(self._examining), size + sum(map(total_blob_bytes, self._examining.values()))

    def register_update(self, device: str, update: Update, now_s: float) -> bool:
        """Record an update that is fetched next. Return whether the update is large and must wait for its turn."""
        if total_blob_bytes(update) < self._desk.worker.large_bytes:
            return False
        if self._offered.get(device) != update and now_s < self._moved_deadline_s:
            self._offered[device] = update
        return True

    @property
    def lost_s(self) -> float:
        """Seconds added to the deadline because no device was reachable. The end of a site's round is fixed."""
        absence, state = self._desk.executor.absence, self._served.job.rounds
        if state.opened_s != self._lost[0]:
            self._lost = state.opened_s, absence.lost_s
        return min(
            absence.lost_since(self._lost[1]), decisions.site_deadline_s(state) - state.opened_s - state.deadline_s
        )

    @property
    def _moved_deadline_s(self) -> float:
        return decisions.next_decision_s(decisions.delay_attempt(self._served.job.rounds, self.lost_s))

    def wait_limit_s(self, now_s: float) -> float:
        """Return the time of the deadline, or later, until which the round waits for punctual updates.

        Updates are punctual if they were received in time and are still being validated, or were announced in time and
        had to wait for their turn. The deadline of the latter moves by their waiting time. The round of a site has a
        fixed end.
        """
        deadline_s, latest_s = self._moved_deadline_s, decisions.site_deadline_s(self._served.job.rounds)
        if self._in_time:
            return latest_s
        if now_s < deadline_s or not self._offered:
            return deadline_s
        arriving = self._served.arriving
        self._offered = {device: each for device, each in self._offered.items() if arriving.get(device) == each}
        return min(deadline_s + max(map(self._desk.executor.transfer_wait_s, self._offered), default=0.0), latest_s)

    def wait_for_punctual_updates(self, now_s: float) -> bool:
        """Return whether the round waits past its deadline. Let punctual devices transfer before late ones."""
        deadline_s = self._moved_deadline_s
        if not deadline_s <= now_s < self.wait_limit_s(now_s) or decisions.has_full_cohort(self._served.job.rounds):
            return False
        for device in self._served.arriving:
            if now_s >= deadline_s + self._desk.executor.transfer_wait_s(device):
                self._desk.executor.yield_transfer_turn(device, now_s)
        return True

    @property
    def _is_job_gone(self) -> bool:
        return self._served.has_ended or self._desk.jobs.get(self._served.id) is not self._served

    @property
    def _is_large(self) -> bool:
        return self._served.job.aggregator.large

    def validate_update(
        self, device: str, update: Update, profile: Profile | None, right: SiteRight | None, now_s: float
    ) -> None:
        """Validate an update whose blobs have arrived, then accept or reject it. Large updates use the worker."""
        # as a site's sum may be, whose boards' updates are small
        if total_blob_bytes(update) >= self._desk.worker.large_bytes:
            self._served.job.aggregator.large = True
        large = self._is_large
        if large and self._examining.get(device) == update:  # it was offered once more meanwhile
            return
        examining = self._served.job.build_validation(device, update, profile, now_s, large=large, right=right)
        if large:
            self._examining[device] = update
            held_s = self._desk.executor.transfer_wait_s(device) if self._offered.pop(device, None) == update else 0.0
            if now_s < self._moved_deadline_s + held_s:
                self._in_time.add(device)
            self._desk.start_work(examining, partial(self._apply_validation_if_current, device, update))
        else:
            self._apply_validation(device, examining, now_s)

    def _apply_validation_if_current(
        self, device: str, update: Update, examining: Callable[[], decisions.UpdateValidated], now_s: float
    ) -> None:
        if self._examining.get(device) != update:
            return  # the device has offered another one since
        del self._examining[device]
        self._in_time.discard(device)
        if self._is_job_gone or self._served.arriving.get(device) != update:
            return  # it was not waited for any more while it was read, and its blobs may be gone
        self._apply_validation(device, examining, now_s)

    def _apply_validation(self, device: str, examining: Callable[[], decisions.UpdateValidated], now_s: float) -> None:
        """Pass the validated update to the job. If a read fails, request the update again or suspend the job."""
        try:
            examined = examining()
        except job_blobs.LostUpdateError as lost:
            said = "%s's update could not be read (%s); it will offer it again"
            log.warning(said, device, lost.reason, extra=log_ids(device=device))
            return self._served.handle_input(decisions.UpdateReceived(device, lost.reason), now_s)
        except job_blobs.UnreadableError as error:  # its device offers it again, once the job goes on
            return self._served.handle_failure(error, now_s)
        if examined.odd:
            log.warning("%s claims what cannot be: %s", device, examined.odd, extra=log_ids(device=device))
        self._served.handle_input(examined, now_s)

    def start_folding(self) -> None:
        if self._is_large and not self._summing and self._served.job.has_updates_to_fold():
            self._summing = True
            self._desk.start_work(
                self._served.job.build_fold(self._desk.worker.stored_at), self._record_partial_aggregate
            )

    def _record_partial_aggregate(self, result: Callable[[], events.UpdatesAggregated | None], now_s: float) -> None:
        self._summing = False
        before = self._served.job.rounds
        if self._is_job_gone:
            return
        fact = self._result_or_lost_event(result, now_s)
        if fact is not None:
            self._served.record_event(fact, now_s)
        if isinstance(fact, events.UpdatesAggregated):
            done = blob_hashes(before.answered[device] for device in fact.devices)
            self._desk.garbage.add_candidates(
                done | ({before.folded.sum.sha256} if before.folded else set()), soon=True
            )

    def commit_round(self, now_s: float) -> bool:
        """Commit the round, in the worker if updates are large. Return whether the round is committed already."""
        if self._summing:
            return False
        committing = self._served.job.build_commit(now_s)
        if self._is_large:
            self._summing = True
            self._desk.start_work(committing, self._finish_commit)
            return False
        with self._desk.executor.keep_alive():  # a method may compute for longer than a broker waits for a word
            result = run_and_capture(committing)
        self._finish_commit(result, now_s)
        return True

    def _finish_commit(self, result: Callable[[], CommitResult], now_s: float) -> None:
        self._summing = False
        if self._is_job_gone:
            return
        done = self._result_or_lost_event(result, now_s)
        if isinstance(done, CommitResult):
            self._served.record_event(done.fact, now_s, done)
        elif done is not None:
            self._served.record_event(done, now_s)

    def _result_or_lost_event(self, result: Callable[[], T], now_s: float) -> T | events.UpdateLost | None:
        """Return the result, `UpdateLost` for a lost update, or None after an error that failed the job."""
        try:
            return result()
        except job_blobs.LostUpdateError as lost:
            return events.UpdateLost(self._served.job.rounds.round, lost.device, lost.reason)
        except Exception as error:
            self._served.handle_failure(error, now_s)
            return None


START_S = 20.0  # after a job is taken up, until a device of its round that has not been heard of is not at work
AT_ONCE = frozenset((decisions.FetchUpdate, decisions.ValidateUpdate))  # actions that nobody sees outside
Observe = Callable[[JobView, events.AnyEvent], None]


class CoordinatorContext:
    """Services shared by all jobs of a coordinator."""

    def __init__(self, executor: Executor, store: Store, observe: Observe, worker: BackgroundWorker) -> None:
        self.executor, self.store, self.observe, self.worker = executor, store, observe, worker
        self.registry, self.loans = DeviceRegistry(), DeviceLeases()
        self.jobs: dict[str, JobController] = {}  # by id, in the order in which they were taken up
        self.news: dict[str, JobView] = {}  # jobs with changes that have not been published yet
        self.fetching: dict[str, JobController] = {}  # device -> the job that its blobs are fetched for
        self.later: list[tuple[JobController, decisions.Action]] | None = None  # what is done once messages are heard
        self._followed: set[str] = set()  # devices whose claim of a later start has been followed
        self.garbage = GarbageCollector(store, self.blobs_in_use)

    def start_work(self, item: Callable[[], T], then: Then[T]) -> None:
        """Pass a work item to the worker. Blobs that the item uses are pinned until `then` has returned."""
        self.worker.submit(*self.store.depot.pin_during(item, then))

    def cancel_task(self, device: str, job: str, now_s: float) -> None:
        """Cancel a job's task on a device. Without a lease, only the transfer of its update is stopped."""
        if not self.loans.release_device(device, job, now_s):
            if (fetched := self.fetching.get(device)) is not None and fetched.id == job:
                self.executor.fetch_blobs(device, ())
            return
        self.executor.cancel_task(device)
        self.fetching.pop(device, None)
        self.send_unsent_task(device, now_s)

    def release_device(self, device: str, job: str, now_s: float) -> None:
        if self.loans.release_device(device, job, now_s):
            self.send_unsent_task(device, now_s)

    def send_unsent_task(self, device: str, now_s: float) -> None:
        for serving in self.jobs.values():
            if device in serving.unsent:
                serving.unsent.remove(device)
                serving.send_task(device, now_s)

    def acknowledge_update(self, device: str, update: Update, accepted: bool, reason: str) -> None:
        self.executor.send_ack(
            device, wire.Ack(update.job, update.round, update.attempt, accepted, shorten_error(reason))
        )

    def adopt_epoch(self, device: str, epoch: int) -> None:
        """Raise the epoch above a device's epoch, in case the home is an older copy.

        Each device can cause this once, and only for the next LATER_EPOCHS.
        """
        if epoch < self.store.epoch:
            return
        if device in self._followed or epoch > self.store.epoch + validation.LATER_EPOCHS:
            log.warning(
                "%s claims to know start %d of the coordinator: ignored", device, epoch, extra=log_ids(device=device)
            )
            return
        self._followed.add(device)
        self.raise_epoch(epoch)

    def raise_epoch(self, above: int) -> None:
        """Start an epoch above `above`, unless the present epoch is higher already."""
        if above >= self.store.epoch:
            self.executor.set_epoch(self.store.begin_epoch(above))
            for id in self.jobs:
                self.store.mark_running(id)

    def blobs_in_use(self) -> set[str]:
        return self.executor.unacknowledged_update_blobs.union(
            *(serving.blobs_in_use() for serving in self.jobs.values())
        )

    def collect_garbage(self) -> None:
        if self.garbage.is_due(sum(len(serving.job.rounds.answered) for serving in self.jobs.values())):
            self.garbage.collect()


class JobController:
    """Controller of an active job, with the progress of its tasks and updates.

    Every method with an argument `now_s` raises StoreError if the store cannot be written.
    """

    def __init__(self, desk: CoordinatorContext, job: RunningJob, submitter: str, now_s: float) -> None:
        self.job, self.id, self.submitter, self._desk = job, job.id, submitter, desk
        self._rounds_s = (0.0, self._device_time_s(now_s))  # boards' time of the latest round, and of all up to its end
        self.unsent: set[str] = set()  # devices with a task to come: no profile of them yet, or another job has them
        self.arriving: dict[str, Update] = {}  # device -> its update while its blobs are fetched
        self._begun: dict[str, Update] = {}  # device -> the last update of it that began to be fetched
        self._opened_s = self._busy_s = now_s  # when it was taken up; when a device was last seen working on it
        # version of the fleet, `most` and devices that were gone when there was nothing to decide
        self._undecided: tuple[int, float, AbstractSet[str]] | None = None
        self.summed = UpdatePipeline(self, desk)
        self._behind: set[str] = set()  # this job, once devices are reported to know more rounds than its log
        self.unreadable: job_blobs.UnreadableError | None = None  # unreadable blob, for which the job waits

    @property
    def has_ended(self) -> bool:
        return self.job.rounds.phase in events.ENDED

    @property
    def pending_devices(self) -> frozenset[str]:
        return self.job.rounds.asked

    def activate(self, now_s: float) -> None:
        self._desk.store.mark_running(self.id)
        if self.job.rounds.phase in ("stopped", "failed"):
            self.record_event(events.JobResumed(), now_s)
        self.send_all_tasks(now_s)
        self.schedule_publication()

    def send_all_tasks(self, now_s: float) -> None:
        for device in sorted(self.pending_devices):
            self.send_task(device, now_s)

    def cancel_all_tasks(self, now_s: float) -> None:
        self._cancel_tasks(self.pending_devices | set(self.job.rounds.silent), now_s)

    def measure_idle_time(self, now_s: float) -> fair_share.IdleTime:
        if not self._is_idle(now_s):
            self._busy_s = now_s
        return fair_share.IdleTime(now_s - self._busy_s, self.job.rounds.phase != "selecting")

    def compute_usage(self, now_s: float) -> fair_share.JobUsage:
        had_s = self._device_time_s(now_s)
        round_s, until_s = self._rounds_s
        return fair_share.JobUsage(had_s, max(round_s, had_s - until_s), self.job.rounds.roll, not self._is_idle(now_s))

    def raise_usage_while_idle(self, least_s: float, now_s: float) -> None:
        """Raise the usage of an idle job to the least usage of all working jobs, `least_s`.

        A job cannot catch up on device time that was unused while its own devices were away. The usage stays the same
        while the job waits for devices that are leased to other jobs.
        """
        if self._is_idle(now_s) and not self._is_waiting_for_leases(now_s):
            self._desk.loans.raise_usage(self.id, least_s * self.job.job.priority, now_s)
            self._rounds_s = (self._rounds_s[0], self._device_time_s(now_s))

    def _is_waiting_for_leases(self, now_s: float) -> bool:
        registry = self._desk.registry
        free = registry.eligibility(self.job.wants, now_s).devices_with(ELIGIBLE)
        enough = len(free) >= decisions.minimum_devices_to_start(self.job.rounds)
        return enough and not free.isdisjoint(self._desk.loans.devices_of_other_jobs(self.id))

    def _device_time_s(self, now_s: float) -> float:
        return self._desk.loans.device_seconds(self.id, now_s) / self.job.job.priority

    def blobs_in_use(self) -> set[str]:
        state = self.job.rounds
        folded = state.folded.devices if state.folded else ()
        accepted = [update for device, update in state.answered.items() if device not in folded]
        return (
            self.job.required_blobs()
            | self.job.sent_blobs()
            | blob_hashes([*accepted, *self.arriving.values(), *self._begun.values()])
        )

    def _discard_unfinished_update(self, device: str, instead: Update | None = None) -> None:
        """Mark the blobs of a device's unfinished update as garbage, unless `instead` has the same bundles."""
        # so a device has at most one unfinished update of a job on the disk, whatever the device announces
        begun = self._begun.pop(device, None)
        if begun is not None and (instead is None or begun.bundles != instead.bundles):
            self._desk.garbage.add_candidates(blob_hashes([begun]))

    def schedule_publication(self) -> None:
        self._desk.news[self.id] = self.job

    def handle_claim(self, device: str, claim: wire.Claim, now_s: float) -> None:
        registry = self._desk.registry
        job_blobs.warn_of_rolled_back_log(self.job.rounds, self.id, device, claim, self._behind)
        event = decisions.ClaimReceived(device, claim)
        if not claim.accepted:
            ask = self.job.device_workload(device, registry.latest_profile(device))
            event = decisions.ClaimReceived(device, claim, ask, registry.agent_start_key(device))
        self.handle_input(event, now_s)

    def handle_update_offer(self, device: str, update: Update, told: Update, now_s: float) -> None:
        """Process a device's announcement of an update. `told` is the part of the message to store."""
        unfit = self.job.manifest_problem(update, self._desk.registry.latest_profile(device))
        self.handle_input(decisions.UpdateAnnounced(device, told, unfit=unfit), now_s)

    def handle_input(self, event: decisions.Input, now_s: float) -> None:
        step = decisions.decide_response(self.id, self.job.rounds, self.arriving.get(event.device), event, now_s)
        if step.arriving is None:
            self.arriving.pop(event.device, None)
        else:
            self.arriving[event.device] = step.arriving
        for fact in step.facts:
            self.record_event(fact, now_s)
        for action in step.actions:
            self._schedule_action(action, now_s)

    def _schedule_action(self, action: decisions.Action, now_s: float) -> None:
        """Carry out an action, but only after the events are written if the action has an effect outside."""
        if self._desk.later is None or type(action) in AT_ONCE:
            self.carry_out_action(action, now_s)
        else:
            self._desk.later.append((self, action))

    def carry_out_action(self, action: decisions.Action, now_s: float) -> None:
        match action:  # the most frequent first
            case decisions.SlowResends(device):
                self._desk.executor.slow_resends(device)
            case decisions.CancelTask(device):
                self.unsent.discard(device)
                self._desk.cancel_task(device, self.id, now_s)
                self._discard_unfinished_update(device)
            case decisions.AckUpdate(device, update, accepted, reason):
                self._desk.acknowledge_update(device, update, accepted, reason)
            case decisions.FetchUpdate(device, update):
                self._discard_unfinished_update(device, update)
                self._begun[device] = update
                self._desk.fetching[device] = self
                in_turn = self.summed.register_update(device, update, now_s)
                self._desk.executor.fetch_blobs(device, update.bundles.values(), in_turn=in_turn)
            case decisions.ValidateUpdate(device, update):
                registry = self._desk.registry
                self.summed.validate_update(
                    device, update, registry.latest_profile(device), registry.site_right(device), now_s
                )
            case decisions.SendTask(device):
                self.send_task(device, now_s)
            case decisions.DiscardUpdate(update):
                self._desk.garbage.add_candidates(blob_hashes([update]))
            case decisions.RenewTask(device, epoch):
                self._desk.adopt_epoch(device, epoch)
                self.send_task(device, now_s)

    def send_task(self, device: str, now_s: float) -> None:
        """Send a device its task of the running round, at once or when the device becomes available.

        If the method has no work for the device, record the task as declined. An error fails the job.
        """
        job, desk = self.job, self._desk
        if job.rounds.phase != "open" or device not in job.rounds.asked:  # it may have ended with another device's task
            return
        profile = desk.registry.latest_profile(device)
        # after a restart the profile, which names its engine, may not be here yet
        if profile is None or not desk.loans.acquire_device(device, self.id, now_s):
            return self.unsent.add(device)
        engine = next((name for name in job.engines if name in profile.engines), job.engines[0])
        try:
            task = job.build_task(device, engine, profile, now_s)
        except Exception as error:
            return self.handle_failure(error, now_s)
        if task is None:
            self.record_event(
                events.TaskDeclined(job.rounds.round, device, NOTHING, "the method has nothing for it now"), now_s
            )
            return desk.release_device(device, self.id, now_s)
        try:
            return desk.executor.send_task(device, task, now_s)
        except FedquiltError as error:
            return self.handle_failure(error, now_s)

    def make_next_decision(self, now_s: float, left: AbstractSet[str] = frozenset(), most: float = math.inf) -> bool:
        """Make the job's next decision, if one is due. Return whether the job has changed."""
        job = self.job
        self.summed.start_folding()
        if job.rounds.phase == "closing":
            return self.summed.commit_round(now_s)
        if self.summed.wait_for_punctual_updates(now_s):
            return False
        try:
            busy = self._desk.loans.devices_of_other_jobs(self.id) | left
            if self._has_nothing_to_decide(busy, most, now_s):
                return False
            registry, gone = self._desk.registry, self._unreachable_devices(now_s)
            at_work = self._devices_at_work(now_s) - gone
            fact = decide_next_event(job, registry, at_work, now_s, busy, most, self.summed.lost_s, gone)
            if (
                fact is None
                and now_s >= self._opened_s + START_S
                and self._desk.executor.absence.can_reach_devices(now_s)
            ):
                self._undecided = registry.refresh_views(now_s), most, gone
        except Exception as error:
            self.handle_failure(error, now_s)
            return True
        if fact is None:
            return False
        self.record_event(fact, now_s)
        return True

    def _has_nothing_to_decide(self, busy: AbstractSet[str], most: float, now_s: float) -> bool:
        # a decision costs time in proportion to the fleet, and updates arrive a few at a time
        if self._undecided is None or busy:
            return False
        fleet, before, gone = self._undecided
        same = fleet == self._desk.registry.refresh_views(now_s) and before == most
        return same and decisions.can_skip_decision(self.job.rounds, now_s, gone)

    def _able_devices(self, now_s: float) -> Collection[str]:
        return self._desk.registry.usable_engines(self.job.engines, now_s).keys()

    def _is_idle(self, now_s: float) -> bool:
        return decisions.is_round_idle(
            self.job.rounds, self._able_devices(now_s), self._desk.loans.devices_of_other_jobs(self.id)
        )

    def _devices_at_work(self, now_s: float) -> set[str]:
        # just after a start these are all selected devices, because devices of a signed fleet authenticate first
        asked = set(self.pending_devices - self._desk.loans.devices_of_other_jobs(self.id))
        return asked if now_s < self._opened_s + START_S else asked.intersection(self._able_devices(now_s))

    def _unreachable_devices(self, now_s: float) -> frozenset[str]:
        state = self.job.rounds
        if state.phase != "open" or not self._desk.executor.absence.can_reach_devices(now_s):
            return frozenset()
        return self._desk.registry.find_unreachable(state.asked | state.due, now_s)

    def handle_failure(self, error: Exception, now_s: float) -> None:
        """End the job after an error of its method, suspend it after a failed read, or raise the error again."""
        if (hold := job_blobs.suspension_reason(error)) is not None:
            self.unreadable = hold
            return
        if isinstance(error, StoreError | MemoryError):
            raise error
        log.error("%s failed in its method", self.id, exc_info=error, extra=log_ids(run=self.id))
        self.record_event(events.failure_event(error), now_s)

    def record_event(self, fact: events.AnyEvent, now_s: float, done: CommitResult | None = None) -> None:
        """Record an event, then send or cancel the tasks that follow. A JobError fails the job."""
        job = self.job
        before = job.rounds
        try:
            job.record_event(fact, now_s)
        except JobError as error:  # a fact that could not be read back is the job's fault, not the coordinator's
            return self.handle_failure(error, now_s)
        if not isinstance(fact, events.UpdateAccepted) and not self.arriving.keys() <= job.rounds.asked:
            self.arriving = {device: each for device, each in self.arriving.items() if device in job.rounds.asked}
        self._desk.observe(job, fact)
        if not isinstance(fact, events.UpdateAccepted):
            self._undecided = None
        match fact:
            case events.UpdateAccepted():  # the most frequent first
                self._begun.pop(fact.update.device, None)  # its blobs are in use until they are folded
            case events.CohortSelected():
                for device in fact.devices:
                    self.send_task(device, now_s)
                self._cancel_tasks(set(job.rounds.silent) - job.rounds.asked, now_s)  # whom this attempt does without
            case events.UpdateLost():
                ids = log_ids(run=job.id, round=fact.round, device=fact.device)
                log.warning("%s: %s's update is asked for again: %s", job.id, fact.device, fact.reason, extra=ids)
                self._desk.raise_epoch(self._desk.store.epoch)
                self.send_task(fact.device, now_s)
            case events.RoundClosed() | events.JobEnded():
                self._cancel_tasks(before.asked | set(before.silent), now_s)
            case events.RoundCommitted() if done is not None:
                self._desk.garbage.add_candidates(job.blobs_released_by_commit(before))
                job.start_next_round(done)
                self._rounds_s = ((had_s := self._device_time_s(now_s)) - self._rounds_s[1], had_s)
        if isinstance(fact, events.RoundCommitted | events.JobEnded):
            self._desk.store.snapshots.save_if_due(job.id, job.standing)
        self.schedule_publication()

    def _cancel_tasks(self, devices: Collection[str], now_s: float) -> None:
        for device in sorted(devices):
            self._schedule_action(decisions.CancelTask(device), now_s)
