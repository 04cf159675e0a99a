"""Validation, aggregation and commit of one job's updates.

Small updates are handled in the main loop, large ones by a worker, one after the other. A round waits past its
deadline for updates that are late only because of their place in the queue. The result of a work item counts only if
the job is still in the state in which the work item was started.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from fedquilt.coordinator.background_worker import BackgroundWorker, Then, run_and_capture
from fedquilt.coordinator.delivery.executor import Executor
from fedquilt.coordinator.jobs.garbage_collection import GarbageCollector
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds import events, message_handler, next_event
from fedquilt.coordinator.updates import blob_recovery
from fedquilt.coordinator.updates.model_states import CommitResult
from fedquilt.coordinator.updates.partial_aggregate import blob_hashes, total_blob_bytes
from fedquilt.core import Profile, SiteRight, Update
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")


class PipelineJob(Protocol):
    """Interface of a job to its `UpdatePipeline`, implemented by `JobController`."""

    job: RunningJob
    arriving: dict[str, Update]
    garbage: GarbageCollector

    @property
    def has_ended(self) -> bool: ...

    def handle_input(self, event: message_handler.Input, now_s: float) -> None: ...

    def record_event(self, fact: events.AnyEvent, now_s: float, done: CommitResult | None = None) -> None: ...

    def handle_failure(self, error: Exception, now_s: float) -> None: ...


class UpdatePipeline:
    """Validation, aggregation and commit of one job's updates.

    Args:
        served: Job of the updates.
        worker: Worker for large updates.
        start: Starts a work item, as `CoordinatorContext.start_work` does.
        executor: Executor that receives the updates.
        left: Returns whether the coordinator no longer runs the job.
    """

    def __init__(
        self,
        served: PipelineJob,
        worker: BackgroundWorker,
        start: Callable[[Callable[[], Any], Then[Any]], None],
        executor: Executor,
        left: Callable[[], bool],
    ) -> None:
        self._served, self._worker, self._start, self._executor, self._left = served, worker, start, executor, left
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
        """Record an update that is fetched next.

        Return whether the update is large and must wait for its turn.
        """
        if total_blob_bytes(update) < self._worker.large_bytes:
            return False
        if self._offered.get(device) != update and now_s < self._moved_deadline_s:
            self._offered[device] = update
        return True

    @property
    def lost_s(self) -> float:
        """Seconds added to the deadline because no device was reachable, or infinity while none is.

        The deadline of a site moves at most to the time at which its round must end.
        """
        absence, state = self._executor.absence, self._served.job.rounds
        if state.opened_s != self._lost[0]:
            self._lost = state.opened_s, absence.lost_s
        return min(
            absence.lost_since(self._lost[1]), next_event.site_deadline_s(state) - state.opened_s - state.deadline_s
        )

    @property
    def _moved_deadline_s(self) -> float:
        return next_event.next_decision_s(next_event.delay_attempt(self._served.job.rounds, self.lost_s))

    def wait_limit_s(self, now_s: float) -> float:
        """Return the time of the deadline, or later, until which the round waits for punctual updates.

        Updates are punctual if they were received in time and are still being validated, or were announced in time and
        had to wait for their turn. The deadline of the latter moves by their waiting time. The round of a site has a
        fixed end.
        """
        deadline_s, latest_s = self._moved_deadline_s, next_event.site_deadline_s(self._served.job.rounds)
        if self._in_time:
            return latest_s
        if now_s < deadline_s or not self._offered:
            return deadline_s
        arriving = self._served.arriving
        self._offered = {device: each for device, each in self._offered.items() if arriving.get(device) == each}
        return min(deadline_s + max(map(self._executor.transfer_wait_s, self._offered), default=0.0), latest_s)

    def wait_for_punctual_updates(self, now_s: float) -> bool:
        """Return whether the round waits past its deadline.

        Let punctual devices transfer before late ones.
        """
        deadline_s = self._moved_deadline_s
        if not deadline_s <= now_s < self.wait_limit_s(now_s) or next_event.has_full_cohort(self._served.job.rounds):
            return False
        for device in self._served.arriving:
            if now_s >= deadline_s + self._executor.transfer_wait_s(device):
                self._executor.yield_transfer_turn(device, now_s)
        return True

    @property
    def _is_job_gone(self) -> bool:
        return self._served.has_ended or self._left()

    @property
    def _is_large(self) -> bool:
        return self._served.job.is_large

    def validate_update(
        self, device: str, update: Update, profile: Profile | None, right: SiteRight | None, now_s: float
    ) -> None:
        """Validate an update whose blobs have arrived, then accept or reject it.

        Large updates use the worker.
        """
        if (
            total_blob_bytes(update) >= self._worker.large_bytes
        ):  # as a site's sum may be, whose boards' updates are small
            self._served.job.aggregator.large = True
        large = self._is_large
        if large and self._examining.get(device) == update:  # it was offered once more meanwhile
            return
        examining = self._served.job.build_validation(device, update, profile, now_s, large=large, right=right)
        if large:
            self._examining[device] = update
            held_s = self._executor.transfer_wait_s(device) if self._offered.pop(device, None) == update else 0.0
            if now_s < self._moved_deadline_s + held_s:
                self._in_time.add(device)
            self._start(examining, partial(self._apply_validation_if_current, device, update))
        else:
            self._apply_validation(device, examining, now_s)

    def _apply_validation_if_current(
        self, device: str, update: Update, examining: Callable[[], message_handler.UpdateValidated], now_s: float
    ) -> None:
        if self._examining.get(device) != update:
            return  # the device has offered another one since
        del self._examining[device]
        self._in_time.discard(device)
        if self._is_job_gone or self._served.arriving.get(device) != update:
            return  # it was not waited for any more while it was read, and its blobs may be gone
        self._apply_validation(device, examining, now_s)

    def _apply_validation(
        self, device: str, examining: Callable[[], message_handler.UpdateValidated], now_s: float
    ) -> None:
        """Pass the validated update to the job. If a read fails, request the update again or suspend the job."""
        try:
            examined = examining()
        except blob_recovery.LostUpdateError as lost:
            said = "%s's update could not be read (%s); it will offer it again"
            log.warning(said, device, lost.reason, extra=log_ids(device=device))
            return self._served.handle_input(message_handler.UpdateReceived(device, lost.reason), now_s)
        except blob_recovery.UnreadableError as error:  # its device offers it again, once the job goes on
            return self._served.handle_failure(error, now_s)
        if examined.odd:
            log.warning("%s claims what cannot be: %s", device, examined.odd, extra=log_ids(device=device))
        self._served.handle_input(examined, now_s)

    def start_folding(self) -> None:
        """Start to fold accepted updates in the worker, if updates are large and no fold is running."""
        if self._is_large and not self._summing and self._served.job.has_updates_to_fold():
            self._summing = True
            self._start(self._served.job.build_fold(self._worker.stored_at), self._record_partial_aggregate)

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
            self._served.garbage.add_candidates(
                done | ({before.folded.sum.sha256} if before.folded else set()), soon=True
            )

    def commit_round(self, now_s: float) -> bool:
        """Commit the round, in the worker if updates are large. Return whether the round is committed already."""
        if self._summing:
            return False
        committing = self._served.job.build_commit(now_s)
        if self._is_large:
            self._summing = True
            self._start(committing, self._finish_commit)
            return False
        with self._executor.keep_alive():  # a method may compute for longer than a broker waits for a word
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
        except blob_recovery.LostUpdateError as lost:
            return events.UpdateLost(self._served.job.rounds.round, lost.device, lost.reason)
        except Exception as error:
            self._served.handle_failure(error, now_s)
            return None
