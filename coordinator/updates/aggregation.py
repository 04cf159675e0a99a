"""Aggregation of a round: its updates, evaluations and training metrics.

Each update is folded once, on arrival. Mergeable accumulators (`Aggregation.accumulator`) take updates in any order,
with bit-identical results. Others take updates in the order of device ids, as long as they arrive in this order. If a
folded update is not accepted, or the accepted update differs from it, the commit folds all updates again.

The coordinator's loop processes small updates in one pass. A worker processes large ones: their tensors are read from
disk one at a time and added to the partial aggregate in place. An exact partial aggregate is stored from time to time,
as an event, and the blobs of its updates are dropped.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt import compression
from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.rounds.events import UpdatesAggregated
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates import job_blobs, sites, validation
from fedquilt.coordinator.updates.job_blobs import WHOLE_BYTES
from fedquilt.coordinator.updates.private_sums import PrivateSums
from fedquilt.core import (
    BlobRef,
    DeviceUpdate,
    EvaluationRound,
    EvaluationSums,
    Method,
    StoreError,
    Tensors,
    Update,
    UpdateError,
    evaluation,
)
from fedquilt.core.messages import has_site_bundles
from fedquilt.host import process_resources

UNCHANGED_ROUNDS: Final = 5  # number of first rounds in which the loss must change
UNCHANGED_SHARE: Final = 1e-4  # relative change of the loss that counts as no change
LEARNT_LOSS: Final = 0.01  # smaller losses need not change
LOW_LR: Final = 1e-4
OUTLIER_LOSS_FACTOR: Final = 1000.0  # a note names devices whose loss exceeds this multiple of the median


def aggregate_evaluations(updates: Collection[Update]) -> EvaluationSums | None:
    """Return the sum of the evaluations with the most common task and outputs, or None without any."""
    return evaluation.add_evaluations(sums for _, sums in _select_consistent_evaluations(updates))


def explain_evaluation(updates: Collection[Update]) -> list[str]:
    """Return notes on a missing evaluation, ignored evaluations, and devices with an extreme loss."""
    consistent = dict(_select_consistent_evaluations(updates))
    reported = {update.device: update.evaluation for update in updates if update.evaluation is not None}
    if reported and not consistent:
        return ["no evaluation: no device has held-out examples ([data] held), or there is no model yet"]
    notes = [
        f"evaluation of {device} ignored: its network has {sums.outputs} outputs, unlike most devices' networks"
        for device, sums in sorted(reported.items())
        if sums.examples and device not in consistent
    ]
    losses = {device: math.fsum(sums.loss) / sums.examples for device, sums in consistent.items()}
    median_loss = statistics.median(losses.values()) if losses else 0.0
    return notes + [
        f"evaluation of {device}: the loss is {loss:.4g}, and the median of all devices is {median_loss:.4g}"
        for device, loss in sorted(losses.items())
        if loss > OUTLIER_LOSS_FACTOR * max(median_loss, LEARNT_LOSS)
    ]


def _select_consistent_evaluations(updates: Collection[Update]) -> list[tuple[str, EvaluationSums]]:
    evaluations = [
        (update.device, update.evaluation) for update in updates if update.evaluation and update.evaluation.examples
    ]
    shapes = Counter((sums.task, sums.outputs) for _, sums in evaluations)
    usual_shape = max(shapes, key=lambda shape: (shapes[shape], shape), default=None)
    return [(device, sums) for device, sums in evaluations if (sums.task, sums.outputs) == usual_shape]


def average_metrics(updates: Collection[Update]) -> dict[str, float]:
    """Return the weighted average of the training metrics that most devices report.

    A metric is left out if at most half of the devices report it, if all weights are 0, or if its average is not
    finite. See `explain_missing_metrics`.
    """
    reported: dict[str, list[tuple[float, float]]] = {}
    for update in sorted(updates, key=lambda update: update.device):
        for name, value in update.metrics.items():
            reported.setdefault(name, []).append((update.weight, value))
    result = {
        name: _weighted_mean(pairs)
        for name, pairs in reported.items()
        if 2 * len(pairs) > len(updates) and any(weight for weight, _ in pairs)
    }
    return {name: value for name, value in result.items() if math.isfinite(value)}


def explain_missing_metrics(updates: Collection[Update], averages: Mapping[str, float]) -> list[str]:
    """Return notes on metrics that most devices report and `average_metrics` leaves out."""
    names = Counter(name for update in updates for name in update.metrics)
    missing = {name for name, count in names.items() if 2 * count > len(updates)} - averages.keys()
    infinite_names = {name for update in updates if update.weight for name in update.metrics} & missing
    notes = []
    if unweighted_names := sorted(missing - infinite_names):
        notes.append(f"no average of {', '.join(unweighted_names)}: all updates have weight 0")
    if infinite_names:
        notes.append(f"no average of {', '.join(sorted(infinite_names))}: the sum of the reported values is not finite")
    return notes


def _weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of (weight, value) pairs. Weights must not be negative, and not all 0."""
    total = total_weight = 0.0
    for weight, value in pairs:
        total, total_weight = total + weight * value, total_weight + weight
    if math.isfinite(total) and math.isfinite(total_weight):
        return total / total_weight
    max_weight = max(weight for weight, _ in pairs)
    shares = sum(weight / max_weight for weight, _ in pairs)
    return sum(weight / max_weight / shares * value for weight, value in pairs)


def explain_unchanged_loss(losses: Mapping[int, float], lr: object) -> str | None:
    """Return the probable cause if the first UNCHANGED_ROUNDS losses barely differ, or else None."""
    first_losses = [losses[number] for number in range(UNCHANGED_ROUNDS) if number in losses]
    if len(losses) != UNCHANGED_ROUNDS or len(first_losses) != UNCHANGED_ROUNDS or max(first_losses) < LEARNT_LOSS:
        return None
    if max(first_losses) - min(first_losses) > UNCHANGED_SHARE * max(first_losses):
        return None
    if isinstance(lr, float) and lr < LOW_LR:
        cause = f"the learning rate is probably too low ({lr:g}): raise [params] lr"
    else:
        cause = "inputs or labels probably do not vary: check them, and set [input] standardise = true"
    return f"the loss has stayed at {first_losses[-1]:.4g} for {UNCHANGED_ROUNDS} rounds: {cause}"


def describe_early_end(method: Method, name: str, rounds: int, round: int) -> str | None:
    """Return a note in the last round of a method that should have ended by itself, or else None."""
    if method.is_done is Method.is_done or round + 1 < rounds:
        return None
    return f"{name} has not finished after the job's {rounds} rounds, and the result is preliminary: raise rounds"


FoldInputs = tuple[float, Mapping[str, float], Mapping[str, BlobRef]]  # weight, metrics and bundles


class PartialAggregate:
    """Updates of a round folded so far. Without `any_order`, they are folded in the order of device ids."""

    def __init__(self, any_order: bool = False) -> None:
        self._any_order = any_order
        self.reset()

    def reset(self) -> None:
        self._folded_inputs: dict[str, FoldInputs] = {}  # by device, in the order of folding
        self.total: Any = None  # aggregate of these updates, or None without updates
        self._pending_sums: list[tuple[dict[str, FoldInputs], Callable[[], Any]]] = []  # sums of simulation processes

    def can_fold_now(self, device: str, accepted: Mapping[str, Update], pending: Iterable[str]) -> bool:
        if self._any_order:
            return not self._contains_device(device)
        is_next = self.can_fold_in_order(device) and device == min(pending, default="")
        return is_next and len(self._folded_inputs) == len(accepted)

    def can_fold_in_order(self, device: str) -> bool:
        """Return whether a device is not folded yet, and comes after all folded devices if the order matters."""
        return (
            not self._contains_device(device) if self._any_order else device > next(reversed(self._folded_inputs), "")
        )

    def include_update(self, device: str, inputs: FoldInputs, total: Any) -> None:
        self._folded_inputs[device], self.total = inputs, total

    def add_pending_sum(self, inputs: Mapping[str, FoldInputs], total: Callable[[], Any]) -> None:
        """Add a sum computed by another process. `total` waits for it, and returns None after a failure."""
        self._pending_sums.append((dict(inputs), total))

    def merge_pending_sums(self, updates: Mapping[str, Update]) -> None:
        """Merge each pending sum of which all updates were accepted with the same content. Drop the rest."""
        for inputs_by_device, compute_sum in self._pending_sums:
            is_unchanged = all(
                device in updates and fold_inputs(updates[device]) == inputs
                for device, inputs in inputs_by_device.items()
            )
            if is_unchanged and (total := compute_sum()) is not None:
                self.total = total if self.total is None else exact_sums.merge_accumulators(self.total, total)
                self._folded_inputs |= inputs_by_device
        self._pending_sums = []

    def contains_update(self, update: Update) -> bool:
        """Return whether this update is folded or in a pending sum, with the same content."""
        device, inputs = update.device, fold_inputs(update)
        return self._folded_inputs.get(device) == inputs or any(
            pending_inputs.get(device) == inputs for pending_inputs, _ in self._pending_sums
        )

    def _contains_device(self, device: str) -> bool:
        return device in self._folded_inputs or any(
            device in pending_inputs for pending_inputs, _ in self._pending_sums
        )

    def __len__(self) -> int:
        return len(self._folded_inputs)

    def consists_of(self, updates: Mapping[str, Update]) -> bool:
        return len(updates) == len(self) and all(self.contains_update(update) for update in updates.values())

    def is_part_of(self, updates: Mapping[str, Update]) -> bool:
        """Return whether all folded updates are among these and, if the order matters, the first of them."""
        in_order = self._any_order or sorted(updates)[: len(self._folded_inputs)] == list(self._folded_inputs)
        return in_order and all(
            device in updates and self.contains_update(updates[device]) for device in self._folded_inputs
        )

    def remaining_devices(self, updates: Mapping[str, Update]) -> list[str]:
        """Return the devices left to fold, sorted. All folded updates must be in `updates`."""
        if not self.is_part_of(updates):
            self.reset()
        return [device for device in sorted(updates) if device not in self._folded_inputs]


def foldable_updates(job_state: JobState, any_order: bool) -> dict[str, Update]:
    """Return the accepted updates that can be folded now or are folded already, by device."""
    if any_order or job_state.phase == "closing":
        return dict(job_state.accepted_updates)
    first_pending = min(job_state.pending_devices, default="")  # without open tasks, no update can be folded yet
    return {device: update for device, update in job_state.accepted_updates.items() if device < first_pending}


def fold_inputs(update: Update) -> FoldInputs:
    return update.weight, update.metrics, update.bundles


def total_blob_bytes(update: Update) -> int:
    return sum(ref.size for ref in update.bundles.values())


def blob_hashes(updates: Iterable[Update]) -> set[str]:
    return {ref.sha256 for update in updates for ref in update.bundles.values()}


UPDATE_CACHE_BYTES: Final = 32 << 20  # bytes of validated updates cached in memory until the commit

BaseTensors = Callable[[str], Tensors | None]
"""Function that returns the tensors that a bundle's differences are relative to, or None for a full bundle."""


class Aggregator:
    """Aggregation of one round. With `large`, exact partial aggregates stay on disk.

    `rebase` returns an update of an earlier state as an update of the state at the start of the round, clipped with
    [privacy].
    """

    def __init__(
        self,
        blob_store: BlobStore,
        method_functions: Method | EvaluationRound,
        state: Any,
        job: JobSettings,
        *,
        large: bool = False,
        rebase: Callable[[DeviceUpdate], DeviceUpdate] = lambda update: update,
    ) -> None:
        self._blob_store, self._state, self._job = blob_store, state, job
        self._aggregation = method_functions.aggregation
        self._rebase = rebase
        self._accumulator_type, self.large = method_functions.aggregation.accumulator(state), large
        if large:
            process_resources.release_freed_memory()  # memory of the previous round
        self._partial_aggregate = self._new_partial_aggregate()
        self._cached_updates: dict[str, tuple[Update, DeviceUpdate]] = {}  # by device, up to UPDATE_CACHE_BYTES
        self._cached_bytes = 0
        # state, folded updates and result of the latest count
        self._unfolded_count: tuple[JobState, int, tuple[int, int]] | None = None

    def decode_update(
        self, update: Update, job_state: JobState, find_base: BaseTensors, bounds: validation.ClaimBounds
    ) -> Update:
        """Decode, check and store an update, and fold it if its turn has come. Return the update as stored.

        Raise UpdateError if the update is invalid, and StoreError or LostUpdateError if a blob cannot be stored or
        read.
        """
        is_site_update = has_site_bundles(update.bundles)
        if self._job.wire.codec == "raw" and not is_site_update and self._partial_aggregate.contains_update(update):
            return update
        with validation.name_device_in_errors(update.device):
            decoded = self._decode_bundles(job_blobs.load_update(self._blob_store, update), find_base)
            update = self._with_site_devices(update, decoded, bounds)
            is_foldable_now = self._partial_aggregate.can_fold_now(
                update.device, job_state.accepted_updates, job_state.pending_devices
            )
            is_foldable_now = is_foldable_now and (self._is_exact or not is_site_update)
            if is_foldable_now:
                total = self._fold_update(decoded)
            else:
                self._aggregation.require_valid_update(self._state, self._rebase(decoded))
        try:
            update = self._store_decoded(update, decoded)
        except StoreError:
            self._partial_aggregate.reset()  # the sum may contain this update, which is not accepted yet
            raise
        if is_foldable_now:
            self._partial_aggregate.include_update(update.device, fold_inputs(update), total)
        else:
            self._cache_update_if_room(update, decoded)
        return update

    def can_fold_early(self, job_state: JobState, round: int, device: str) -> bool:
        """Return whether a device's update may be folded before the device announces the update."""
        return (
            round == job_state.round
            and not job_state.is_buffered  # the update may belong to a later round
            and device in job_state.pending_devices
            and self._job.wire.codec == "raw"
            and "work" in job_state.task_actions
            and self._partial_aggregate.can_fold_in_order(device)
        )

    def fold_early(self, update: DeviceUpdate, bundles: Mapping[str, BlobRef]) -> None:
        """Fold an update before its announcement, while other devices are still at work.

        The update counts only if the announced update has the same content. Errors are ignored, because the announced
        update raises them again.
        """
        with contextlib.suppress(Exception):
            for bundle in update.bundles.values():
                tensors.require_finite(bundle)
            total = self._fold_update(update)
            self._partial_aggregate.include_update(update.device, (update.weight, update.metrics, bundles), total)

    def state_path_for_folding(self, job_state: JobState) -> str | None:
        """Return the path of the state for folding in other processes, or None if that is not allowed."""
        is_raw_training = self._job.wire.codec == "raw" and "work" in job_state.task_actions
        if not self._is_exact or not is_raw_training or job_state.is_evaluation_round or job_state.is_buffered:
            return None
        if self._job.privacy is not None:  # other processes do not clip updates
            return None
        state = job_state.state
        return None if state is None or state.size > WHOLE_BYTES else self._blob_store.verified_path(state.sha256)

    def fold_aggregate_early(
        self, job_state: JobState, round: int, inputs: Mapping[str, FoldInputs], wait_for_packed: Callable[[], bytes]
    ) -> None:
        """Add a partial aggregate of another process, if all its devices are at work on this round.

        The aggregate counts only after all its updates were accepted with the same content. `wait_for_packed` is called
        at the end of the round, waits for the aggregate, and returns b"" if there is none.
        """
        if not all(self.can_fold_early(job_state, round, device) for device in inputs):
            return

        def unpack_total() -> Any:
            with contextlib.suppress(Exception):
                assert self._accumulator_type is not None
                return tensors.unpack_state(wait_for_packed(), self._accumulator_type)
            return None

        self._partial_aggregate.add_pending_sum(inputs, unpack_total)

    def _cache_update_if_room(self, update: Update, decoded: DeviceUpdate) -> None:
        size = total_blob_bytes(update)
        if self._cached_bytes + size <= UPDATE_CACHE_BYTES:
            self._cached_bytes += size
            self._cached_updates[update.device] = (update, decoded)

    def decode_large_update(self, update: Update, find_base: BaseTensors, bounds: validation.ClaimBounds) -> Update:
        """Decode, check and store an update with its tensors on disk, or raise UpdateError. Do not fold it."""
        with validation.name_device_in_errors(update.device):
            decoded = self._open_update(update)
            for bundle in decoded.bundles.values():
                tensors.require_finite(bundle)
            decoded = self._decode_bundles(decoded, find_base)
            update = self._with_site_devices(update, decoded, bounds)
            self._aggregation.require_valid_update(self._state, self._rebase(decoded))
        return self._store_decoded(update, decoded)

    def has_foldable_update(self, job_state: JobState) -> bool:
        """Return whether an accepted update can be folded now. Must not be called while a worker folds."""
        return "work" in job_state.task_actions and not self._partial_aggregate.consists_of(
            self._foldable_updates(job_state)
        )

    def count_unfolded(self, job_state: JobState) -> tuple[int, int]:
        """Return the number and bytes of updates that wait for folding. May be called while a worker folds."""
        if "work" not in job_state.task_actions:
            return 0, 0
        cached = self._unfolded_count
        if job_state.phase == "closing":  # the commit folds all updates
            return cached[2] if cached else (0, 0)
        if cached is None or cached[0] is not job_state or cached[1] != len(self._partial_aggregate):
            stored_devices = job_state.partial_aggregate.devices if job_state.partial_aggregate else ()
            foldable, count = self._foldable_updates(job_state), len(self._partial_aggregate)
            remaining = [
                update
                for device, update in foldable.items()
                if device not in stored_devices and not self._partial_aggregate.contains_update(update)
            ]
            self._unfolded_count = cached = job_state, count, (len(remaining), sum(map(total_blob_bytes, remaining)))
        return cached[2]

    def fold_next(self, job_state: JobState, stored_at: float) -> UpdatesAggregated | None:
        """Fold at most one update. Return an event if the partial aggregate was stored, or None.

        The aggregate is stored once the updates added since the last time have `stored_at` times its bytes. Further
        updates wait for later calls, so that the loop can admit another update for each folded one.
        """
        self._fold_pending(job_state, max_updates=1)
        if not self._is_worth_storing(job_state, stored_at):
            return None
        folded_devices = [
            device
            for device, update in job_state.accepted_updates.items()
            if self._partial_aggregate.contains_update(update)
        ]
        return UpdatesAggregated(
            job_state.round,
            tuple(sorted(folded_devices)),
            job_blobs.store_tensors(self._blob_store, *tensors.split_state(self._partial_aggregate.total)),
        )

    def _is_worth_storing(self, job_state: JobState, stored_at: float) -> bool:
        if not self._is_exact or not job_state.pending_devices:
            return False
        folded_updates = [
            update for update in job_state.accepted_updates.values() if self._partial_aggregate.contains_update(update)
        ]
        stored_devices = job_state.partial_aggregate.devices if job_state.partial_aggregate else ()
        new_bytes = sum(total_blob_bytes(update) for update in folded_updates if update.device not in stored_devices)
        own_bytes = tensors.total_bytes([tensors.split_state(self._partial_aggregate.total)[0]]) if new_bytes else 0
        return new_bytes > 0 and new_bytes >= stored_at * own_bytes

    def take_aggregate(self, job_state: JobState, private_sums: PrivateSums | None = None) -> Any:
        """Fold the remaining updates, then return and release the aggregate of a closed round, with any noise."""
        if self._are_devices_interleaved(job_state):
            total = self._fold_in_device_order(job_state.accepted_updates)
        else:
            self._fold_pending(job_state)
            total = self._partial_aggregate.total
        if private_sums is not None:
            with exact_sums.sums_on_disk(self._scratch_file() if self.large and self._is_exact else None):
                total = private_sums.add_noise(job_state, total)
        self._partial_aggregate = self._new_partial_aggregate()
        if self.large:
            process_resources.release_freed_memory()  # memory for the new state
        return total

    def _are_devices_interleaved(self, job_state: JobState) -> bool:
        # without exact aggregates, updates are folded in the order of all devices, those of sites included
        return not self._is_exact and bool(job_state.sites_by_device)

    def _fold_in_device_order(self, updates: Mapping[str, Update]) -> Any:
        """Fold all updates in the order of device ids. A site's update is split into those of its devices."""
        loaders: dict[str, Callable[[], DeviceUpdate]] = {}
        for device, update in updates.items():
            if update.site_devices:
                site_update = self._open_update(update)
                for device_update in sites.split_site_update(site_update):
                    loaders[device_update.device] = partial(_return_update, device_update)
            elif not has_site_bundles(update.bundles):
                loaders[device] = partial(self._open_update, update)
        total = None
        for device in sorted(loaders):
            total = self._aggregation.fold(self._state, total, loaders[device]())
        return total

    def _foldable_updates(self, job_state: JobState) -> dict[str, Update]:
        return {} if self._are_devices_interleaved(job_state) else foldable_updates(job_state, self._is_exact)

    def _fold_pending(self, job_state: JobState, max_updates: int | None = None) -> None:
        """Fold up to `max_updates` updates. An unusable running aggregate is replaced by the stored one."""
        updates = self._foldable_updates(job_state)
        self._partial_aggregate.merge_pending_sums(updates)
        if not self._partial_aggregate.is_part_of(updates) or not len(self._partial_aggregate):
            self._partial_aggregate = self._load_or_create_partial_aggregate(job_state)
        for device in self._partial_aggregate.remaining_devices(updates)[:max_updates]:
            cached_update, decoded = self._cached_updates.get(device, (None, None))
            if decoded is None or cached_update != updates[device]:
                decoded = self._open_update(updates[device])
            self._partial_aggregate.include_update(device, fold_inputs(updates[device]), self._fold_update(decoded))

    def _load_or_create_partial_aggregate(self, job_state: JobState) -> PartialAggregate:
        aggregate, stored = self._new_partial_aggregate(), job_state.partial_aggregate
        if stored is None:
            return aggregate
        assert self._accumulator_type is not None
        total = job_blobs.load_partial_aggregate(self._blob_store, stored, self._accumulator_type, self._scratch_file())
        for device in stored.devices:
            aggregate.include_update(device, fold_inputs(job_state.accepted_updates[device]), total)
        return aggregate

    @property
    def _is_exact(self) -> bool:
        return self._accumulator_type is not None

    def _new_partial_aggregate(self) -> PartialAggregate:
        self._scratch: ScratchFile | None = None
        return PartialAggregate(self._is_exact)

    def _scratch_file(self) -> ScratchFile:
        self._scratch = self._scratch or ScratchFile(self._blob_store.folder, self._blob_store.disk)
        return self._scratch

    def _fold_update(self, update: DeviceUpdate) -> Any:
        """Return the aggregate with another update. Reset the aggregate after an error other than UpdateError."""
        try:
            with exact_sums.sums_on_disk(self._scratch_file() if self.large and self._is_exact else None):
                return self._aggregation.fold(self._state, self._partial_aggregate.total, self._rebase(update))
        except UpdateError:  # raised before the aggregate is changed
            raise
        except Exception:  # may leave the aggregate half changed
            self._partial_aggregate.reset()
            raise

    def _open_update(self, update: Update) -> DeviceUpdate:
        lazily = total_blob_bytes(update) > WHOLE_BYTES
        return job_blobs.load_update(self._blob_store, update, lazily=lazily)

    def _decode_bundles(self, update: DeviceUpdate, find_base: BaseTensors) -> DeviceUpdate:
        # a site has decoded its bundles already
        if has_site_bundles(update.bundles):
            return update
        return replace(update, bundles=compression.decode_update(self._job.wire, update.bundles, find_base))

    def _with_site_devices(self, update: Update, decoded: DeviceUpdate, bounds: validation.ClaimBounds) -> Update:
        if not has_site_bundles(decoded.bundles):
            return update
        parts = sites.parts_of_site(decoded)
        validation.require_site_right(update, parts, bounds)
        return msgspec.structs.replace(update, site_devices=tuple(part.device for part in parts))

    def _store_decoded(self, update: Update, decoded: DeviceUpdate) -> Update:
        if self._job.wire.codec == "raw" or has_site_bundles(update.bundles):
            return update
        refs = {
            name: job_blobs.store_tensors(self._blob_store, bundle, store_payload=self._blob_store.store_small)
            for name, bundle in decoded.bundles.items()
        }
        return msgspec.structs.replace(update, bundles=refs, bases={})


def _return_update(update: DeviceUpdate) -> DeviceUpdate:
    return update
