"""Method states of a job in the blob store: the initial state, and the state after each round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedquilt.arrays import tensors
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.rounds.events import JobState, RoundCommitted
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates import aggregator, blob_recovery
from fedquilt.coordinator.updates.job_validation import create_initial_state
from fedquilt.core import BlobRef, Bundle, DeviceView, Method, Tensors

Encoded = dict[int, tuple[Tensors, BlobRef]]  # bundles that are stored, by their identity


class CommitResult(NamedTuple):
    """Result of a commit: event, stored state, and encoded bundles of the next round."""

    fact: RoundCommitted
    state: Any  # as it is stored
    encoded: Encoded  # bundles that all devices are sent next


def can_encode_early(method: Method, ref: BlobRef) -> bool:
    """Return whether a stored state is large and all devices receive the same bundles."""
    return ref.size > blob_recovery.WHOLE_BYTES and method.common_task


def encode_common_bundles(method: Method, state: Any, ref: BlobRef, depot: BlobStore) -> Encoded:
    """Store the bundles that all devices receive of a state.

    Return an empty mapping unless `can_encode_early`.
    """
    order = method.send(state, DeviceView("", None)) if can_encode_early(method, ref) else None
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)] if order else []
    return {id(value): (value, aggregator.store_tensors(depot, value)) for value in made}


class LoadedState(NamedTuple):
    ref: BlobRef
    state: Any  # as it is stored
    settles: bool  # whether the method has evaluation rounds, for a new job
    encoded: Encoded  # what all devices are sent of the state


class ModelStates:
    """Method states of a job. A worker may use them while the loop does not.

    Args:
        run: The id of the job.
        job: The settings of the job.
        method: The method of the job.
        bundle: The bundle of the job.
        folder: The folder of the bundle.
        depot: The store of states, and of the bundle's files for devices.
        lazy_bytes: The size from which on tensors stay on disk.

    Every method raises JobError or ModelError if the bundle is invalid or the state is lost, UnreadableError if the
    disk fails while reading, and StoreError if the blob store cannot be written.
    """

    def __init__(
        self,
        run: str,
        job: JobSettings,
        method: Method,
        bundle: Bundle,
        folder: Path,
        depot: BlobStore,
        lazy_bytes: float,
    ) -> None:
        self._run, self._job, self._method, self._depot, self._lazy_bytes = run, job, method, depot, lazy_bytes
        self._bundle, self._folder = bundle, folder

    def load_starting_state(self, rounds: JobState) -> LoadedState:
        """Store missing bundle files and load the current state, which is created for a new job."""
        self.restore_bundle_files(self._bundle.files)
        ref = rounds.state or aggregator.store_tensors(self._depot, *tensors.split_state(self._create_initial_state()))
        state = self.load_state(ref, rounds.round, again=not rounds.round)  # what is stored, also of a new job
        settles = self._method.settle is not None and self._method.settle.wanted(state)
        return LoadedState(ref, state, settles, encode_common_bundles(self._method, state, ref, self._depot))

    def load_state(self, ref: BlobRef, round: int, *, again: bool) -> Any:
        """Return a stored state.

        Args:
            ref: The reference of the state.
            round: The round that begins or ends with the state. Before round 1, a lost state is rebuilt from the
                bundle.
            again: Whether the origin of the state is available, so that a lost state can be stored again.
        """

        def rebuild() -> Any:
            return None if round else self._create_initial_state()

        return blob_recovery.load_or_rebuild_state(
            self._run, self._depot, ref, self._method.state, rebuild, self._lazy_bytes, again=again
        )

    def restore_bundle_files(self, files: Mapping[str, BlobRef]) -> None:
        blob_recovery.restore_bundle_files(self._run, self._depot, self._folder, files)

    def _create_initial_state(self) -> Any:
        with blob_recovery.convert_bundle_read_errors(self._run, self._folder):
            return create_initial_state(self._job, self._bundle, self._method)
