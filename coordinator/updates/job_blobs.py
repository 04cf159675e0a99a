"""Blobs of a job: its bundle, its method states, its updates and their partial aggregates.

A blob that is missing or damaged is rebuilt from the event log, requested again from its device, or reported as an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from fedquilt.arrays import disk_arrays, exact_sums, tensors
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdatesAggregated
from fedquilt.coordinator.rounds.job_state import JobState, TaskVersion
from fedquilt.coordinator.settings import JobSettings, create_initial_state
from fedquilt.core import (
    BlobRef,
    Bundle,
    DeviceUpdate,
    DeviceView,
    JobError,
    Method,
    StoreError,
    TaskSpec,
    Tensors,
    Update,
    UpdateError,
)
from fedquilt.formats import job_bundle
from fedquilt.host.disk import DESCRIPTOR_ERRORS, Disk, PathInfo, StrPath, disk_errors
from fedquilt.wire import Claim

WHOLE_BYTES: Final = 1 << 20  # tensors up to this size are read and stored as bytes in memory

_HOME: Final = "the home"

T = TypeVar("T")

log = logging.getLogger("fedquilt.coordinator")


class LostUpdateError(JobError):
    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"{device}'s update: {reason}")
        self.device, self.reason = device, reason


class UnreadableError(StoreError):
    """Failed disk read of a job's data. A later attempt may succeed.

    Attributes:
        subject: The data that cannot be read.
        replaceable_blob: The sha256 of a blob that can be rebuilt or requested again, or "".
        location: The folder that must become readable.
        is_permanent: Whether retries are unlimited, because the process has no file descriptor left.
    """

    def __init__(
        self,
        subject: str,
        error: StoreError,
        replaceable_blob: str = "",
        location: str = _HOME,
        *,
        is_permanent: bool = False,
    ) -> None:
        super().__init__(f"{subject} cannot be read: {error}")
        self.subject, self.replaceable_blob, self.location = subject, replaceable_blob, location
        self.is_permanent = is_permanent or _find_descriptor_error(error) is not None

    def format_fix(self, run: str) -> str:
        restore_hint = " or restore a backup (`fedquilt backup restore`)" if self.location == _HOME else ""
        return f"move {self.location} to another disk{restore_hint}, then `fedquilt resume {run}`"


@contextmanager
def convert_read_errors(subject: str, replaceable_blob: str = "", location: str = _HOME) -> Iterator[None]:
    """Convert a StoreError in the context into an UnreadableError about `subject`, except NoStateError."""
    try:
        yield
    except (tensors.NoStateError, UnreadableError):
        raise
    except StoreError as error:
        raise UnreadableError(subject, error, replaceable_blob, location) from None


def suspension_reason(error: BaseException) -> UnreadableError | None:
    """Return the read error that suspends a job after `error`, or None if the error has another cause."""
    if isinstance(error, UnreadableError):
        return error
    if (descriptor_error := _find_descriptor_error(error)) is None:
        return None
    reason = StoreError(f"{descriptor_error.strerror}; raise the limit on open files (LimitNOFILE, ulimit -n)")
    return UnreadableError("a file of the job", reason, is_permanent=True)


def _find_descriptor_error(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in DESCRIPTOR_ERRORS:
            return error
        error = error.__cause__ or error.__context__
    return None


def _convert_blob_read_errors(subject: str, ref: BlobRef, can_replace: bool) -> AbstractContextManager[None]:
    return convert_read_errors(f"{subject} ({ref.sha256[:12]})", ref.sha256 if can_replace else "")


class _BlobReadDisk(Disk):
    def __init__(self, disk: Disk, convert_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._disk, self._convert_errors = disk, convert_errors

    def stat(self, path: StrPath) -> PathInfo | None:
        with self._convert_errors(), disk_errors(f"read {path}"):
            return self._disk.stat(path)

    def read(self, path: StrPath, offset: int = 0, size: int | None = None) -> bytes:
        with self._convert_errors(), disk_errors(f"read {path}"):
            return self._disk.read(path, offset, size)

    def read_into(self, path: StrPath, buffer: Any, offset: int) -> int:
        with self._convert_errors(), disk_errors(f"read {path}"):
            return self._disk.read_into(path, buffer, offset)


def load_update(blob_store: BlobStore, update: Update, *, lazily: bool = False) -> DeviceUpdate:
    """Return an update, with its tensors in memory or, `lazily`, read from disk each time they are used.

    Raises:
        LostUpdateError: If a blob of the update is missing or damaged.
        UnreadableError: If the disk fails.
        UpdateError: If a bundle is not a safetensors blob or, unless `lazily`, contains values that are not finite.
    """
    bundles: dict[str, Tensors] = {}
    for name, ref in update.bundles.items():
        convert_errors = partial(_convert_blob_read_errors, f"{update.device}'s update", ref, can_replace=True)
        with convert_errors():
            content = blob_store.verified_path(ref.sha256) if lazily else blob_store.load(ref.sha256)
        if content is None:
            raise LostUpdateError(
                update.device, f"blob {ref.sha256[:12]} is missing from {blob_store.folder} or damaged"
            )
        if isinstance(content, bytes):
            bundles[name] = tensors.decode_tensors(content)
            tensors.require_finite(bundles[name])
        else:
            bundles[name] = disk_arrays.SafetensorsReader(content, _BlobReadDisk(blob_store.disk, convert_errors))
    return DeviceUpdate(update.device, update.round, update.weight, update.metrics, bundles)


def load_partial_aggregate(blob_store: BlobStore, event: UpdatesAggregated, kind: type, scratch: ScratchFile) -> Any:
    """Return the stored partial aggregate of an event, in the scratch file if large.

    Raises:
        LostUpdateError: If the partial aggregate is missing, damaged or from another version, and its updates are lost
            too.
        UnreadableError: If the disk fails.
    """
    description = f"the partial aggregate {event.sum.sha256[:12]} of {len(event.devices)} updates"
    try:
        read_large = partial(exact_sums.read_accumulator, kind=kind, disk=blob_store.disk, scratch_file=scratch)
        with _convert_blob_read_errors(
            f"the partial aggregate of {len(event.devices)} updates", event.sum, can_replace=True
        ):
            if (aggregate := _load_object(blob_store, event.sum, kind, read_large)) is not None:
                return aggregate
    except tensors.NoStateError as error:
        log.warning("%s cannot be used: %s", description, error)
    raise LostUpdateError(event.devices[0], f"{description} is missing from {blob_store.folder} or damaged")


def _load_object(blob_store: BlobStore, ref: BlobRef, kind: type[T], read_large: Callable[[str], T]) -> T | None:
    if ref.size > WHOLE_BYTES:
        path = blob_store.verified_path(ref.sha256)
        return None if path is None else read_large(path)
    payload = blob_store.load(ref.sha256)
    return None if payload is None else tensors.unpack_state(payload, kind)


def warn_of_rolled_back_log(job_state: JobState, job: str, device: str, claim: Claim, reported: set[str]) -> None:
    """Log a warning, once per job, if a device has completed a round that the event log lacks."""
    if claim.last_counted_round is None or job in reported or (claim.job, claim.round) != (job, job_state.round):
        return
    if device not in job_state.pending_devices or device in job_state.redoing_devices:
        return
    reported.add(job)
    log.warning(
        "%s has completed round %d of %s, but the event log is at round %d: this home is an older copy or has lost "
        "events. The job continues from its log, and later results of devices do not count",
        *(device, claim.last_counted_round + 1, job, job_state.round + 1),
    )


def convert_bundle_read_errors(run: str, folder: Path) -> AbstractContextManager[None]:
    return convert_read_errors(f"the bundle of {run}", location=f"the bundle {folder}")


def open_bundle(run: str, folder: Path, content: str, blob_store: BlobStore) -> Bundle:
    """Return the bundle in `folder`, or raise JobError if the hash of its content is not `content`."""
    with convert_bundle_read_errors(run, folder):
        return job_bundle.load_bundle(folder, blob_store.disk, content)


def restore_bundle_files(run: str, blob_store: BlobStore, folder: Path, files: Mapping[str, BlobRef]) -> None:
    """Copy files of a run's bundle to the blob store, if missing or damaged there."""
    for name, ref in files.items():
        if not blob_store.has_blob(ref):
            with convert_bundle_read_errors(run, folder):
                path = job_bundle.verify_file(folder, ref, blob_store.disk)
            try:
                blob_store.store_file(path, ref)
            except DamagedBlobError as error:  # changed since `verify_file`
                raise JobError(f"{folder}: file {name!r} cannot be used ({error}): prepare the bundle again") from None


def base_tensors(blob_store: BlobStore, update: Update, sent_blobs: Set[str], name: str) -> Tensors | None:
    """Return the float32 tensors to which a bundle's differences are relative, or None for a full bundle.

    Each tensor is read when it is used. Raise UpdateError unless the tensors are in `sent_blobs`, the sha256 of the
    blobs that the running round has sent.
    """
    sha256 = update.bases.get(name)
    if sha256 is None:
        return None
    convert_errors = partial(convert_read_errors, f"the base of {update.device}'s update ({sha256[:12]})", sha256)
    with convert_errors():
        path = blob_store.verified_path(sha256) if sha256 in sent_blobs else None
    if path is None:
        raise UpdateError(f"bundle {name!r} is relative to the blob {sha256[:12]}, which this round has not sent")
    return disk_arrays.Float32Reader(path, _BlobReadDisk(blob_store.disk, convert_errors))


def store_tensors(
    blob_store: BlobStore,
    named_tensors: Tensors,
    metadata: dict[str, str] | None = None,
    store_payload: Callable[[bytes], BlobRef] | None = None,
) -> BlobRef:
    """Store tensors as one blob. Large tensors are never in memory as bytes."""
    if tensors.total_bytes([named_tensors]) <= WHOLE_BYTES:
        return (store_payload or blob_store.store_bytes)(tensors.encode_tensors(named_tensors, metadata))
    return blob_store.store_written(
        lambda path: disk_arrays.write_safetensors(path, named_tensors, metadata, blob_store.disk)
    )


EncodedBundles = dict[int, tuple[Tensors, BlobRef]]  # `id` of tensors -> tensors and their stored blob


class CommitResult(NamedTuple):
    event: RoundCommitted
    state: Any  # loaded from the stored blob
    encoded_bundles: EncodedBundles  # task bundles common to all devices


def encode_common_bundles(method: Method, state: Any, ref: BlobRef, blob_store: BlobStore) -> EncodedBundles:
    """Store the task bundles of a large state, if all devices receive the same bundles."""
    if ref.size <= WHOLE_BYTES or not method.common_task:
        return {}
    task_spec = method.send(state, DeviceView("", None))
    bundles = [value for value in task_spec.bundles.values() if not isinstance(value, BlobRef)] if task_spec else []
    return {id(value): (value, store_tensors(blob_store, value)) for value in bundles}


class LoadedState(NamedTuple):
    ref: BlobRef
    state: Any  # loaded from the stored blob
    has_evaluation_rounds: bool
    encoded_bundles: EncodedBundles  # task bundles common to all devices


class ModelStates:
    """Method states of a job. A worker may use them while the loop does not.

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
        blob_store: BlobStore,
        lazy_bytes: float,
    ) -> None:
        self._run = run
        self._job = job
        self._method = method
        self._blob_store = blob_store
        self._lazy_bytes = lazy_bytes
        self._bundle, self._folder = bundle, folder

    def load_starting_state(self, job_state: JobState) -> LoadedState:
        """Store missing bundle files, and load the current state or create the first state of a new job."""
        restore_bundle_files(self._run, self._blob_store, self._folder, self._bundle.files)
        ref = job_state.state or store_tensors(self._blob_store, *tensors.split_state(self._create_initial_state()))
        # a new state is read back too
        state = self.load_state(ref, job_state.round, can_recreate=not job_state.round)
        evaluation_round = self._method.evaluation_round
        has_evaluation_rounds = evaluation_round is not None and evaluation_round.is_needed(state)
        common_bundles = encode_common_bundles(self._method, state, ref, self._blob_store)
        return LoadedState(ref, state, has_evaluation_rounds, common_bundles)

    def load_state(self, ref: BlobRef, round: int, *, can_recreate: bool) -> Any:
        """Return a stored state. A lost initial state is created again from the bundle and stored.

        Args:
            ref: The reference of the state.
            round: The number of the round at whose start or end the state was stored.
            can_recreate: Whether a state that the disk fails to read can be created or computed again.
        """
        run, kind, blob_store = self._run, self._method.state, self._blob_store
        subject = f"the state of {run} ({ref.sha256[:12]})"
        try:
            convert_errors = partial(_convert_blob_read_errors, f"the state of {run}", ref, can_recreate)
            disk = _BlobReadDisk(blob_store.disk, convert_errors)
            read_large = partial(disk_arrays.read_state, kind=kind, disk=disk, lazy_bytes=self._lazy_bytes)
            with convert_errors():
                stored_state = _load_object(blob_store, ref, kind, read_large)
            if stored_state is not None:
                return stored_state
            initial_state = None if round else self._create_initial_state()
            if initial_state is None or blob_store.store_bytes(packed := tensors.pack_state(initial_state)) != ref:
                raise JobError(
                    f"{subject} is missing from {blob_store.folder} or damaged, and cannot be recomputed: restore a "
                    "backup of the whole home, or submit the job again"
                )
            log.warning("%s was missing or damaged: created again from the bundle", subject)
            return tensors.unpack_state(packed, kind)
        except tensors.NoStateError as error:
            raise JobError(f"{subject} cannot be read ({error}): submit the job again") from None

    def _create_initial_state(self) -> Any:
        with convert_bundle_read_errors(self._run, self._folder):
            return create_initial_state(self._job, self._bundle, self._method)


class EarlierStates:
    """States of earlier rounds on which devices still work, in buffered mode. The latest one stays in memory."""

    def __init__(self, method: Method, model_states: ModelStates) -> None:
        self._method, self._model_states = method, model_states
        self._latest: tuple[BlobRef | None, Any] = (None, None)

    def make_task_spec(self, version: TaskVersion, view: DeviceView) -> TaskSpec | None:
        return self._method.send(self._load_state(version), view)

    def rebase_update(self, update: DeviceUpdate, state: Any, job_state: JobState) -> DeviceUpdate:
        """Return an update of an earlier state as one of the present state, or any other update unchanged.

        Raises:
            UpdateError: If the update is invalid in its own state.
        """
        version, change = job_state.earlier_versions.get(update.device), self._method.aggregation.change
        if version is None or change is None:
            return update
        earlier_state = self._load_state(version)
        self._method.aggregation.require_valid_update(earlier_state, update)
        weight = job_state.constants.cohort.staleness.weight(job_state.round - version.round)
        return change.scale(state, earlier_state, update, weight)

    def _load_state(self, version: TaskVersion) -> Any:
        assert version.state is not None
        if self._latest[0] != version.state:
            state = self._model_states.load_state(version.state, version.round, can_recreate=not version.round)
            self._latest = version.state, state
        return self._latest[1]
