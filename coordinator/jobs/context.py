"""Services shared by all jobs of a coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fedquilt import wire
from fedquilt.coordinator.background_worker import BackgroundWorker, Callback
from fedquilt.coordinator.delivery.executor import Executor
from fedquilt.coordinator.fleet.fair_share import DeviceLeases
from fedquilt.coordinator.fleet.registry import DeviceRegistry
from fedquilt.coordinator.jobs.retention import GarbageCollector
from fedquilt.coordinator.rounds import events, responses
from fedquilt.coordinator.rounds.job_state import JobView
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import validation
from fedquilt.core import shorten_error
from fedquilt.host.logs import log_ids

if TYPE_CHECKING:
    from fedquilt.coordinator.jobs.controller import JobController

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")
Observe = Callable[[JobView, events.AnyEvent], None]


class CoordinatorContext:
    """Services shared by all jobs of a coordinator."""

    def __init__(self, executor: Executor, store: Store, observe: Observe, worker: BackgroundWorker) -> None:
        self.executor, self.store, self.observe, self.worker = executor, store, observe, worker
        self.registry, self.leases = DeviceRegistry(), DeviceLeases()
        self.jobs: dict[str, JobController] = {}  # by id, in the order of activation
        self.unpublished_jobs: dict[str, JobView] = {}  # jobs with unpublished changes
        self.fetching_jobs: dict[str, JobController] = {}  # device -> job whose update is being transferred
        # actions to carry out after the events are written, or None outside of a batch
        self.deferred_actions: list[tuple[JobController, responses.Action]] | None = None
        self._epoch_raising_devices: set[str] = set()  # devices that have raised the epoch
        self.garbage = GarbageCollector(store, self.blobs_in_use)

    def start_work(self, item: Callable[[], T], callback: Callback[T]) -> None:
        """Pass a work item to the worker. Blobs that the item uses are pinned until `callback` has returned."""
        self.worker.submit(*self.store.blob_store.pin_during(item, callback))

    def cancel_task(self, device: str, job: str, now_s: float) -> None:
        """Cancel a job's task on a device. If another job holds the lease, only stop the transfer of the update."""
        if not self.leases.release_device(device, job, now_s):
            if (fetching_job := self.fetching_jobs.get(device)) is not None and fetching_job.id == job:
                self.executor.fetch_blobs(device, ())
            return
        self.executor.cancel_task(device)
        self.fetching_jobs.pop(device, None)
        self.send_unsent_task(device, now_s)

    def release_device(self, device: str, job: str, now_s: float) -> None:
        if self.leases.release_device(device, job, now_s):
            self.send_unsent_task(device, now_s)

    def send_unsent_task(self, device: str, now_s: float) -> None:
        for controller in self.jobs.values():
            if device in controller.unsent_devices:
                controller.unsent_devices.remove(device)
                controller.send_task(device, now_s)

    def acknowledge_update(self, action: responses.AckUpdate) -> None:
        update, reason = action.update, shorten_error(action.reason)
        ack = wire.Ack(update.job, update.round, update.attempt, action.accepted, reason, is_late=action.is_late)
        self.executor.send_ack(action.device, ack)

    def adopt_epoch(self, device: str, epoch: int) -> None:
        """Raise the epoch above a device's epoch. The home may have been restored from an older copy.

        Each device can raise the epoch once, and by no more than MAX_EPOCH_LEAD.
        """
        if epoch < self.store.epoch:
            return
        if device in self._epoch_raising_devices or epoch > self.store.epoch + validation.MAX_EPOCH_LEAD:
            log.warning(
                "%s claims to know start %d of the coordinator: ignored", device, epoch, extra=log_ids(device=device)
            )
            return
        self._epoch_raising_devices.add(device)
        self.raise_epoch(epoch)

    def raise_epoch(self, min_epoch: int) -> None:
        """Start an epoch above `min_epoch`, unless the present epoch is higher already."""
        if min_epoch >= self.store.epoch:
            self.executor.set_epoch(self.store.begin_epoch(min_epoch))
            for id in self.jobs:
                self.store.mark_running(id)

    def blobs_in_use(self) -> set[str]:
        return self.executor.unacknowledged_update_blobs.union(
            *(controller.blobs_in_use() for controller in self.jobs.values())
        )

    def collect_garbage(self) -> None:
        accepted_updates = [controller.job.job_state.accepted_updates for controller in self.jobs.values()]
        if self.garbage.is_due(sum(map(len, accepted_updates))):
            self.garbage.collect()
