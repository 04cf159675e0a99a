"""Verified reads of a job's blobs.

A blob that is missing or damaged is rebuilt from the event log, requested again from its device, or reported as an
error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt.arrays import disk_arrays, exact_sums, tensors
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.rounds.events import JobState, UpdatesAggregated
from fedquilt.core import BlobRef, Bundle, DeviceUpdate, JobError, StoreError, Tensors, Update
from fedquilt.formats import job_bundle
from fedquilt.host.disk import DESCRIPTORS, Disk, PathInfo, Place, disk_errors
from fedquilt.wire import Claim

WHOLE_BYTES: Final = 1 << 20  # tensors up to this are in memory as bytes when they are read or stored

_HOME: Final = "the home"

T = TypeVar("T")

log = logging.getLogger("fedquilt.coordinator")


class LostUpdateError(JobError):
    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"{device}'s update: {reason}")
        self.device, self.reason = device, reason


class UnreadableError(StoreError):
    """Error for a failed disk read of a job's data. A later attempt may succeed.

    Args:
        what: The data that cannot be read, and their owner.
        error: The error of the disk.
        again: The sha256 of a blob that can be rebuilt or requested again, else "".
        place: The folder that must be readable before the job can continue.
        lasts: Whether the job waits without a limit, because no file descriptor is left.
    """

    def __init__(
        self, what: str, error: StoreError, again: str = "", place: str = _HOME, *, lasts: bool = False
    ) -> None:
        super().__init__(f"{what} cannot be read: {error}")
        self.what, self.again, self.place = what, again, place
        self.lasts = lasts or _find_descriptor_error(error) is not None

    def format_fix(self, run: str) -> str:
        back = " or put a backup back (`fedquilt backup restore`)" if self.place == _HOME else ""
        return f"move {self.place} to another disk{back}, then `fedquilt resume {run}`"


@contextmanager
def convert_read_errors(what: str, again: str = "", place: str = _HOME) -> Iterator[None]:
    """Convert StoreErrors raised in the body to UnreadableErrors with these arguments."""
    try:
        yield
    except (tensors.NoStateError, UnreadableError):
        raise
    except StoreError as error:
        raise UnreadableError(what, error, again, place) from None


def suspension_reason(error: BaseException) -> UnreadableError | None:
    """Return why an error suspends its job, or None if the error does not concern the disk."""
    if isinstance(error, UnreadableError):
        return error
    if (lack := _find_descriptor_error(error)) is None:
        return None
    why = StoreError(f"{lack.strerror}; raise the limit on open files (LimitNOFILE, ulimit -n)")
    return UnreadableError("a file of the job", why, lasts=True)


def _find_descriptor_error(error: BaseException | None) -> OSError | None:
    """Return the error in the chain of causes that no file descriptor is left, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DESCRIPTORS:
            return error
        error = error.__cause__ or error.__context__
    return None


def _convert_blob_read_errors(what: str, ref: BlobRef, again: bool) -> AbstractContextManager[None]:
    return convert_read_errors(f"{what} ({ref.sha256[:12]})", ref.sha256 if again else "")


class _BlobReadDisk(Disk):
    """Disk whose read errors name the blob and the devices it came from."""

    def __init__(self, disk: Disk, naming: Callable[[], AbstractContextManager[None]]) -> None:
        self._disk, self._naming = disk, naming

    def stat(self, path: Place) -> PathInfo | None:
        with self._naming(), disk_errors(f"read {path}"):
            return self._disk.stat(path)

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        with self._naming(), disk_errors(f"read {path}"):
            return self._disk.read(path, offset, size)

    def read_into(self, path: Place, buffer: Any, offset: int) -> int:
        with self._naming(), disk_errors(f"read {path}"):
            return self._disk.read_into(path, buffer, offset)


def load_update(depot: BlobStore, update: Update, *, lazily: bool = False) -> DeviceUpdate:
    """Return an update, with its tensors in memory or, `lazily`, read from disk each time they are used.

    Raises:
        LostUpdateError: If a blob of the update is missing or damaged.
        UnreadableError: If the disk fails.
        UpdateError: If a bundle is no safetensors blob, or contains values that are not finite and are in memory.
    """
    bundles: dict[str, Tensors] = {}
    for name, ref in update.bundles.items():
        naming = partial(_convert_blob_read_errors, f"{update.device}'s update", ref, again=True)
        with naming():
            found = depot.verified_path(ref.sha256) if lazily else depot.load(ref.sha256)
        if found is None:
            raise LostUpdateError(update.device, f"blob {ref.sha256[:12]} is gone from {depot.folder}, or damaged")
        if isinstance(found, bytes):
            bundles[name] = tensors.decode_tensors(found)
            tensors.require_finite(bundles[name])
        else:
            bundles[name] = disk_arrays.SafetensorsReader(found, _BlobReadDisk(depot.disk, naming))
    return DeviceUpdate(update.device, update.round, update.weight, update.metrics, bundles)


def open_base_tensors(depot: BlobStore, device: str, sha256: str) -> Tensors | None:
    """Return the float32 tensors that an update is relative to, or None if they are lost.

    Each tensor is read when it is used.

    Raises:
        UnreadableError: If the disk fails.
    """
    naming = partial(convert_read_errors, f"what {device}'s update has moved from ({sha256[:12]})", sha256)
    with naming():
        path = depot.verified_path(sha256)
    return None if path is None else disk_arrays.FloatReader(path, _BlobReadDisk(depot.disk, naming))


def load_partial_aggregate(depot: BlobStore, folded: UpdatesAggregated, kind: type, room: ScratchFile) -> Any:
    """Return the stored partial aggregate of an event, in the scratch file if large.

    Raises:
        LostUpdateError: If the partial aggregate is missing, damaged or from another version, and its updates are lost
            too.
        UnreadableError: If the disk fails.
    """
    told = f"the sum {folded.sum.sha256[:12]} of {len(folded.devices)} updates"
    try:
        large = partial(exact_sums.read_accumulator, kind=kind, disk=depot.disk, room=room)
        with _convert_blob_read_errors(f"the sum of {len(folded.devices)} updates", folded.sum, again=True):
            if (found := _load_object(depot, folded.sum, kind, large)) is not None:
                return found
    except tensors.NoStateError as error:
        log.warning("%s cannot be used: %s", told, error)
    raise LostUpdateError(folded.devices[0], f"{told} is gone from {depot.folder}, or damaged")


def load_or_rebuild_state(
    run: str,
    depot: BlobStore,
    ref: BlobRef,
    kind: type,
    rebuild: Callable[[], Any],
    lazy_bytes: float = math.inf,
    *,
    again: bool = False,
) -> Any:
    """Return a method state from the blob store. Rebuild and store a lost state.

    Args:
        run: The id of the job.
        depot: The blob store.
        ref: The reference of the state.
        kind: The class of the state.
        rebuild: The function that makes the state again, or returns None if its origin is lost too.
        lazy_bytes: The size from which on tensors stay on disk. See `disk_arrays.read_state`.
        again: Whether the origin is available, so that a lost state can be stored again.

    Raises:
        JobError: If the state is lost, or from another version of fedquilt.
        UnreadableError: If the disk fails.
        StoreError: If the rebuilt state cannot be written.
    """
    try:
        naming = partial(_convert_blob_read_errors, f"the state of {run}", ref, again)
        disk = _BlobReadDisk(depot.disk, naming)
        large = partial(disk_arrays.read_state, kind=kind, disk=disk, lazy_bytes=lazy_bytes)
        with naming():
            found = _load_object(depot, ref, kind, large)
        if found is not None:
            return found
        made = rebuild()
        if made is None or depot.store_bytes(packed := tensors.pack_state(made)) != ref:
            raise JobError(
                f"the state of {run} ({ref.sha256[:12]}) is gone from {depot.folder}, or damaged, and cannot be made "
                "again from its log: put back a copy of the whole home, or run the job anew"
            )
        log.warning("the state of %s (%s) was gone or damaged: it is made again", run, ref.sha256[:12])
        return tensors.unpack_state(packed, kind)
    except tensors.NoStateError as error:
        raise JobError(f"the state of {run} ({ref.sha256[:12]}) cannot be read ({error}): run it anew") from None


def _load_object(depot: BlobStore, ref: BlobRef, kind: type[T], large: Callable[[str], T]) -> T | None:
    """Return the state in a blob, through `large` above WHOLE_BYTES, or None if the blob is lost."""
    if ref.size > WHOLE_BYTES:
        path = depot.verified_path(ref.sha256)
        return None if path is None else large(path)
    payload = depot.load(ref.sha256)
    return None if payload is None else tensors.unpack_state(payload, kind)


def warn_of_rolled_back_log(rounds: JobState, job: str, device: str, claim: Claim, reported: set[str]) -> None:
    """Log a warning, once per job, if a device has counted a round that the event log lacks."""
    if claim.counted is None or job in reported or (claim.job, claim.round) != (job, rounds.round):
        return
    if device not in rounds.asked or device in rounds.lost:
        return
    reported.add(job)
    log.warning(
        "%s has counted round %d of %s, whose log here is at round %d: this home is an older copy, or has lost its "
        "end; the job goes on from its log, and what devices know beyond does not count",
        *(device, claim.counted + 1, job, rounds.round + 1),
    )


def convert_bundle_read_errors(run: str, folder: Path) -> AbstractContextManager[None]:
    return convert_read_errors(f"the bundle of {run}", place=f"the bundle {folder}")


def open_bundle(run: str, folder: Path, content: str, depot: BlobStore) -> Bundle:
    """Return the bundle of a run. Files are read on first use.

    Raises:
        JobError: If the bundle is missing or damaged, or its content differs from `content`.
        UnreadableError: If the disk fails.
    """
    with convert_bundle_read_errors(run, folder):
        return job_bundle.load_bundle(folder, depot.disk, content)


def restore_bundle_files(run: str, depot: BlobStore, folder: Path, files: Mapping[str, BlobRef]) -> None:
    """Store the files of a run's bundle that are missing or damaged in the blob store.

    Raises:
        JobError: If the bundle's own copy is missing or damaged.
        UnreadableError: If the disk fails while the bundle is read.
        StoreError: If the blob store cannot be written.
    """
    for name, ref in files.items():
        if not depot.has_blob(ref):
            with convert_bundle_read_errors(run, folder):
                path = job_bundle.verify_file(folder, ref, depot.disk)
            try:
                depot.store_file(path, ref)
            except DamagedBlobError as error:  # it has changed since
                raise JobError(f"{folder}: file {name!r} cannot be used ({error}): prepare it anew") from None
