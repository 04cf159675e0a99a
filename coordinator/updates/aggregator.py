"""Aggregation of a running round: updates are read, checked, decoded and folded.

The coordinator's loop processes small updates in one pass. A worker processes large ones: their tensors are read from
disk one at a time and added to the partial aggregate in place. An exact partial aggregate is stored from time to time,
as an event, and the blobs of its updates are dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt import compression
from fedquilt.arrays import exact_sums, safetensors_files, tensors
from fedquilt.arrays.lazy_arrays import ScratchFile
from fedquilt.blobs.storage.store import BlobStore
from fedquilt.coordinator.rounds import claim_bounds
from fedquilt.coordinator.rounds.events import JobState, UpdatesAggregated
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates import blob_recovery, checks, partial_aggregate, site_updates
from fedquilt.coordinator.updates.blob_recovery import WHOLE_BYTES
from fedquilt.coordinator.updates.partial_aggregate import PartialAggregate, Told
from fedquilt.core import (
    BlobRef,
    DeviceUpdate,
    EvaluationRound,
    Method,
    StoreError,
    Tensors,
    Update,
    UpdateError,
)
from fedquilt.core.messages import has_site_bundles
from fedquilt.host import process_memory

READ_BYTES: Final = 32 << 20  # updates of a round that stay in memory after their examination, for the commit

BaseTensors = Callable[[str], Tensors | None]
"""`base` for the bundles of one update."""


class Aggregator:
    """Aggregation of one running round.

    Args:
        depot: The blob store with the updates.
        half: The part of the method whose tasks the round sends.
        state: The method state at the start of the round.
        job: The settings of the job.
        large: Whether exact partial aggregates of large tensors stay on disk. Becomes True with the first large update.
    """

    def __init__(
        self, depot: BlobStore, half: Method | EvaluationRound, state: Any, job: JobSettings, *, large: bool = False
    ) -> None:
        self._depot, self._aggregation, self._state, self._job = depot, half.aggregation, state, job
        self._sums, self.large = half.aggregation.accumulator(state), large
        if large:
            process_memory.release_freed_memory()  # of the round before
        self._folding = self._new_folding()
        self._read: dict[str, tuple[Update, DeviceUpdate]] = {}  # by device, up to READ_BYTES
        self._read_bytes = 0
        self._unfolded: tuple[JobState, int, tuple[int, int]] | None = None  # what was counted last, and of what

    # -- small updates, in the loop --

    def read_update(
        self, update: Update, rounds: JobState, base: BaseTensors, bounds: claim_bounds.ClaimBounds
    ) -> Update:
        """Decode, check and store an update, fold the update if due in order, and return it as stored.

        Raises:
            UpdateError: If the update does not fit the method or its encoding is invalid.
        """
        of_site = has_site_bundles(update.bundles)
        if self._job.wire.codec == "raw" and not of_site and self._folding.contains_update(update):
            return update
        with checks.name_device_in_errors(update.device):
            given = self._decode_update(blob_recovery.load_update(self._depot, update), base)
            update = self._with_permitted_devices(update, given, bounds)
            next_one = self._folding.can_fold_now(update.device, rounds.answered, rounds.asked)
            next_one = next_one and (self._is_exact or not of_site)  # a site's boards have places among the others
            if next_one:
                total = self._fold_update(given)
            else:
                self._aggregation.require_valid_update(self._state, given)
        try:
            update = self._store_decoded(update, given)
        except StoreError:
            self._folding.reset()  # the sum may have this update, which does not count yet
            raise
        if next_one:
            self._folding.include_update(update.device, partial_aggregate.fold_inputs(update), total)
        else:
            self._cache_update_if_room(update, given)
        return update

    def can_fold_early(self, rounds: JobState, round: int, device: str) -> bool:
        """Return whether a device's update is expected and may be folded before its acceptance."""
        return (
            round == rounds.round
            and device in rounds.asked
            and self._job.wire.codec == "raw"
            and "work" in rounds.task_actions
            and self._folding.can_fold_in_order(device)
        )

    def fold_early(self, given: DeviceUpdate, bundles: Mapping[str, BlobRef]) -> None:
        """Fold an expected update early, while other devices are still at work.

        The update counts only after an offer with the same content. Errors are ignored here and raised then.
        """
        with contextlib.suppress(Exception):
            for bundle in given.bundles.values():
                tensors.require_finite(bundle)
            total = self._fold_update(given)
            self._folding.include_update(given.device, (given.weight, given.metrics, bundles), total)

    def state_path_for_folding(self, rounds: JobState) -> str | None:
        """Return the file of the state with which another process may fold updates, or None.

        Other processes may fold small updates of exact methods in the raw encoding.
        """
        able = self._sums is not None and self._job.wire.codec == "raw" and "work" in rounds.task_actions
        if not able or rounds.settling or rounds.state is None or rounds.state.size > WHOLE_BYTES:
            return None
        return self._depot.verified_path(rounds.state.sha256)

    def fold_aggregate_early(
        self, rounds: JobState, round: int, given: Mapping[str, Told], packed: Callable[[], bytes]
    ) -> None:
        """Accept a packed partial aggregate of updates, if all of them are expected.

        The aggregate counts only after all its updates were accepted with the same content. `packed` is called at the
        end of the round. The call waits for the aggregate, and returns b"" if there is none.
        """
        if not all(self.can_fold_early(rounds, round, device) for device in given):
            return

        def unpack_total() -> Any:
            with contextlib.suppress(Exception):
                assert self._sums is not None
                return tensors.unpack_state(packed(), self._sums)
            return None

        self._folding.add_pending_sum(given, unpack_total)

    def _cache_update_if_room(self, update: Update, given: DeviceUpdate) -> None:
        size = partial_aggregate.total_blob_bytes(update)
        if self._read_bytes + size <= READ_BYTES:
            self._read_bytes += size
            self._read[update.device] = (update, given)

    # -- large updates, by a worker: one call at a time --

    def validate_large_update(self, update: Update, base: BaseTensors, bounds: claim_bounds.ClaimBounds) -> Update:
        """Validate an update and return it with stored, decoded tensors."""
        with checks.name_device_in_errors(update.device):
            given = self._open_update(update)
            for bundle in given.bundles.values():
                tensors.require_finite(bundle)
            given = self._decode_update(given, base)
            update = self._with_permitted_devices(update, given, bounds)
            self._aggregation.require_valid_update(self._state, given)
        return self._store_decoded(update, given)

    def has_foldable_update(self, rounds: JobState) -> bool:
        """Return whether an accepted update can be folded now. Not to be called during a worker's call."""
        return "work" in rounds.task_actions and not self._folding.consists_of(self._foldable_updates(rounds))

    def count_unfolded(self, rounds: JobState) -> tuple[int, int]:
        """Return the number and bytes of updates that wait for folding. Valid during a worker's call."""
        if "work" not in rounds.task_actions:
            return 0, 0
        known = self._unfolded
        if rounds.phase == "closing":  # the sum goes into the new state
            return known[2] if known else (0, 0)
        if known is None or known[0] is not rounds or known[1] != len(self._folding):
            stored = rounds.folded.devices if rounds.folded else ()
            ready, count = self._foldable_updates(rounds), len(self._folding)
            left = [
                each
                for device, each in ready.items()
                if device not in stored and not self._folding.contains_update(each)
            ]
            self._unfolded = known = rounds, count, (len(left), sum(map(partial_aggregate.total_blob_bytes, left)))
        return known[2]

    def fold_next(self, rounds: JobState, stored_at: float) -> UpdatesAggregated | None:
        """Fold at most one update. Return the event of a newly stored partial aggregate, or None.

        Other updates are left to later calls, so that the loop can admit another update for each one that is folded and
        dropped.

        Raises:
            LostUpdateError: If an update, or the stored partial aggregate, is missing or damaged.
        """
        self._fold_pending(rounds, most=1)
        if not self._is_worth_storing(rounds, stored_at):
            return None
        folded = [device for device, update in rounds.answered.items() if self._folding.contains_update(update)]
        return UpdatesAggregated(
            rounds.round, tuple(sorted(folded)), store_tensors(self._depot, *tensors.split_state(self._folding.total))
        )

    def _is_worth_storing(self, rounds: JobState, stored_at: float) -> bool:
        """Return whether the exact aggregate has enough new updates to be stored while devices are at work."""
        if not self._is_exact or not rounds.asked:
            return False
        folded = [update for update in rounds.answered.values() if self._folding.contains_update(update)]
        known = rounds.folded.devices if rounds.folded else ()
        new_bytes = sum(partial_aggregate.total_blob_bytes(update) for update in folded if update.device not in known)
        own_bytes = tensors.total_bytes([tensors.split_state(self._folding.total)[0]]) if new_bytes else 0
        return new_bytes > 0 and new_bytes >= stored_at * own_bytes

    # -- the end of a round --

    def take_aggregate(self, rounds: JobState) -> Any:
        """Fold the remaining updates, then return and release the aggregate of a closed round.

        Raises:
            LostUpdateError: If an update can no longer be read.
        """
        if self._are_devices_interleaved(rounds):
            total = self._fold_in_device_order(rounds.answered)
        else:
            self._fold_pending(rounds)
            total = self._folding.total
        self._folding = self._new_folding()
        if self.large:
            process_memory.release_freed_memory()  # a new state is made now
        return total

    def _are_devices_interleaved(self, rounds: JobState) -> bool:
        # without exact aggregates, updates are folded in the order of all devices, those of sites included
        return not self._is_exact and bool(rounds.through)

    def _fold_in_device_order(self, updates: Mapping[str, Update]) -> Any:
        """Fold all updates in the order of device ids, with each site's update split into those of its devices."""
        boards: dict[str, Callable[[], DeviceUpdate]] = {}
        for device, update in updates.items():
            if update.boards:
                given = self._open_update(update)
                boards.update(
                    {each.device: partial(_return_update, each) for each in site_updates.split_site_update(given)}
                )
            elif not has_site_bundles(update.bundles):
                boards[device] = partial(self._open_update, update)
        total = None
        for device in sorted(boards):
            total = self._aggregation.fold(self._state, total, boards[device]())
        return total

    def _foldable_updates(self, rounds: JobState) -> dict[str, Update]:
        return (
            {} if self._are_devices_interleaved(rounds) else partial_aggregate.foldable_updates(rounds, self._is_exact)
        )

    def _fold_pending(self, rounds: JobState, most: int | None = None) -> None:
        """Fold up to `most` updates, from the stored aggregate or none if the running one is unusable."""
        updates = self._foldable_updates(rounds)
        self._folding.merge_pending_sums(updates)
        if not self._folding.is_part_of(updates) or not len(self._folding):
            self._folding = self._load_or_create_partial_aggregate(rounds)
        for device in self._folding.remaining_devices(updates)[:most]:
            known, given = self._read.get(device, (None, None))
            if given is None or known != updates[device]:
                given = self._open_update(updates[device])
            self._folding.include_update(
                device, partial_aggregate.fold_inputs(updates[device]), self._fold_update(given)
            )

    def _load_or_create_partial_aggregate(self, rounds: JobState) -> PartialAggregate:
        begun, folded = self._new_folding(), rounds.folded
        if folded is None:
            return begun
        assert self._sums is not None
        total = blob_recovery.load_partial_aggregate(self._depot, folded, self._sums, self._scratch_file())
        for device in folded.devices:
            begun.include_update(device, partial_aggregate.fold_inputs(rounds.answered[device]), total)
        return begun

    @property
    def _is_exact(self) -> bool:
        return self._sums is not None

    def _new_folding(self) -> PartialAggregate:
        self._scratch: ScratchFile | None = None
        return PartialAggregate(self._is_exact)

    def _scratch_file(self) -> ScratchFile:
        self._scratch = self._scratch or ScratchFile(self._depot.folder, self._depot.disk)
        return self._scratch

    def _fold_update(self, given: DeviceUpdate) -> Any:
        """Return the aggregate with another update. Reset it after an error other than UpdateError."""
        # after an error, which may have come halfway, the aggregate is computed again
        try:
            with exact_sums.sums_on_disk(self._scratch_file() if self.large and self._is_exact else None):
                return self._aggregation.fold(self._state, self._folding.total, given)
        except UpdateError:  # checked before anything was added, also of a site
            raise
        except Exception:
            self._folding.reset()
            raise

    def _open_update(self, update: Update) -> DeviceUpdate:
        lazily = partial_aggregate.total_blob_bytes(update) > WHOLE_BYTES
        return blob_recovery.load_update(self._depot, update, lazily=lazily)

    def _decode_update(self, given: DeviceUpdate, base: BaseTensors) -> DeviceUpdate:
        if has_site_bundles(
            given.bundles
        ):  # the site has decoded them, and types and shapes of its bundles are not kept
            return given
        return replace(given, bundles=compression.decode_update(self._job.wire, given.bundles, base))

    def _with_permitted_devices(self, update: Update, given: DeviceUpdate, bounds: claim_bounds.ClaimBounds) -> Update:
        """Return a site's update with the ids of its devices, if permitted, or any other update unchanged."""
        if not has_site_bundles(given.bundles):
            return update
        parts = site_updates.parts_of_site(given)
        claim_bounds.require_site_right(update, parts, bounds)
        return msgspec.structs.replace(update, boards=tuple(part.device for part in parts))

    def _store_decoded(self, update: Update, given: DeviceUpdate) -> Update:
        """Store the decoded bundles of an update, and return the update with their references.

        Updates in the raw encoding and updates of sites are returned unchanged.
        """
        if self._job.wire.codec == "raw" or has_site_bundles(update.bundles):
            return update
        refs = {
            name: store_tensors(self._depot, bundle, put=self._depot.store_small)
            for name, bundle in given.bundles.items()
        }
        return msgspec.structs.replace(update, bundles=refs, bases={})


# -- reading and storing --------------------------------------------------------------------------------------


def _return_update(given: DeviceUpdate) -> DeviceUpdate:
    return given


def base_tensors(depot: BlobStore, update: Update, sent: Set[str], name: str) -> Tensors | None:
    """Return the tensors that a bundle's differences are relative to, or None for a full bundle.

    Args:
        depot: The blob store.
        update: The update, which names the base of each of its bundles.
        sent: The sha256 of the blobs that the running round has sent.
        name: The name of the bundle.

    Raises:
        UpdateError: If the round has not sent the named base.
        UnreadableError: If the disk fails.
    """
    sha256 = update.bases.get(name)
    if sha256 is None:
        return None
    found = blob_recovery.open_base_tensors(depot, update.device, sha256) if sha256 in sent else None
    if found is None:
        raise UpdateError(f"bundle {name!r} has moved from {sha256[:12]}, which this round has not sent")
    return found


def store_tensors(
    depot: BlobStore,
    given: Tensors,
    metadata: dict[str, str] | None = None,
    put: Callable[[bytes], BlobRef] | None = None,
) -> BlobRef:
    """Store tensors as one blob. Large tensors are never in memory as bytes.

    Args:
        depot: The blob store.
        given: The tensors.
        metadata: The metadata to store with the tensors.
        put: The function that stores the bytes of small tensors, or None for the blob store's `put`.
    """
    if tensors.total_bytes([given]) <= WHOLE_BYTES:
        return (put or depot.store_bytes)(tensors.encode_tensors(given, metadata))
    return depot.store_written(lambda path: safetensors_files.write_safetensors(path, given, metadata, depot.disk))
