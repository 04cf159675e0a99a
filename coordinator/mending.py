"""Reading back what a job has in its depot, which gives only what is verified.

What is gone or damaged is rebuilt where the log allows it, asked for again from its device, or refused by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt import bundle, tensor_files, tensors
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import Depot
from fedquilt.coordinator.facts import Folded, Rounds
from fedquilt.core import BlobRef, Bundle, Contribution, JobError, StoreError, Tensors, Update
from fedquilt.disk import Disk, Found, Place, doing
from fedquilt.on_disk import Scratch
from fedquilt.open_file import DESCRIPTORS
from fedquilt.wire import Claim

WHOLE_BYTES: Final = 1 << 20  # tensors up to this are in memory as bytes when they are read or stored

_HOME: Final = "the home"

T = TypeVar("T")

log = logging.getLogger("fedquilt.coordinator")


class LostUpdateError(JobError):
    """Raised when an update that is here, or is in the running round's sum, is gone or damaged on disk."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"{device}'s update: {reason}")
        self.device, self.reason = device, reason


class UnreadableError(StoreError):
    """Raised when the disk fails where something of a job is read: another try, a moment later, may find it well.

    Args:
        what: cannot be read, and whose it is.
        error: of the disk.
        again: sha256 of the blob, if it is made or asked for again once it is gone.
        place: what has to be on a disk that can be read, so that the job can go on.
        lasts: whether the job waits as long as necessary, because no file descriptor is left.
    """

    def __init__(
        self, what: str, error: StoreError, again: str = "", place: str = _HOME, *, lasts: bool = False
    ) -> None:
        super().__init__(f"{what} cannot be read: {error}")
        self.what, self.again, self.place = what, again, place
        self.lasts = lasts or _find_descriptor_error(error) is not None

    def mend(self, run: str) -> str:
        """What lets the run go on, as a sentence's end."""
        back = " or put a backup back (`fedquilt restore`)" if self.place == _HOME else ""
        return f"move {self.place} to another disk{back}, then `fedquilt resume {run}`"


@contextmanager
def reading(what: str, again: str = "", place: str = _HOME) -> Iterator[None]:
    """Name what the disk does not give back; arguments as of `UnreadableError`."""
    try:
        yield
    except (tensors.NoStateError, UnreadableError):
        raise
    except StoreError as error:
        raise UnreadableError(what, error, again, place) from None


def suspension_reason(error: BaseException) -> UnreadableError | None:
    """Return the reason to hold a job for an error of the disk or a lack of file descriptors, or None."""
    if isinstance(error, UnreadableError):
        return error
    if (lack := _find_descriptor_error(error)) is None:
        return None
    why = StoreError(f"{lack.strerror}; raise the limit on open files (LimitNOFILE, ulimit -n)")
    return UnreadableError("a file of the job", why, lasts=True)


def _find_descriptor_error(error: BaseException | None) -> OSError | None:
    """Return the OSError in the chain of causes that no file descriptor is left, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DESCRIPTORS:
            return error
        error = error.__cause__ or error.__context__
    return None


def _reading(what: str, ref: BlobRef, again: bool) -> AbstractContextManager[None]:
    return reading(f"{what} ({ref.sha256[:12]})", ref.sha256 if again else "")


class _Named(Disk):
    """A disk as readers of one blob see it, who read it piece by piece: they are told whose it is that cannot be read.

    Args:
        disk: on which it is.
        naming: as `reading`.
    """

    def __init__(self, disk: Disk, naming: Callable[[], AbstractContextManager[None]]) -> None:
        self._disk, self._naming = disk, naming

    def stat(self, path: Place) -> Found | None:
        """See `Disk`."""
        with self._naming(), doing(f"read {path}"):
            return self._disk.stat(path)

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        """See `Disk`."""
        with self._naming(), doing(f"read {path}"):
            return self._disk.read(path, offset, size)

    def read_into(self, path: Place, buffer: Any, offset: int) -> int:
        """See `Disk`."""
        with self._naming(), doing(f"read {path}"):
            return self._disk.read_into(path, buffer, offset)


def streamed(depot: Depot, update: Update) -> Contribution:
    """An update whose tensors are read from disk one at a time, each time that one is asked for.

    Raises:
        LostUpdateError: a blob of it is gone, or damaged.
        UnreadableError: the disk fails.
        UpdateError: a bundle is no safetensors blob.
    """
    bundles = {}
    for name, ref in update.bundles.items():
        naming = partial(_reading, f"{update.device}'s update", ref, again=True)
        with naming():
            path = depot.verified_path(ref.sha256)
        if path is None:
            raise LostUpdateError(update.device, f"blob {ref.sha256[:12]} is gone from {depot.folder}, or damaged")
        bundles[name] = tensor_files.Stored(path, _Named(depot.disk, naming))
    return Contribution(update.device, update.round, update.weight, update.metrics, bundles)


def base(depot: Depot, device: str, sha256: str) -> Tensors | None:
    """Float32 tensors that a device's update has moved from, read one at a time; None: they are gone, or damaged.

    Raises:
        UnreadableError: the disk fails.
    """
    naming = partial(reading, f"what {device}'s update has moved from ({sha256[:12]})", sha256)
    with naming():
        path = depot.verified_path(sha256)
    return None if path is None else tensor_files.Floats(path, _Named(depot.disk, naming))


def stored_sum(depot: Depot, folded: Folded, kind: type, room: Scratch) -> Any:
    """Sum of updates that a fact names, in a scratch file if it is large.

    Raises:
        LostUpdateError: it is gone, damaged, or of another version of fedquilt: so are the updates that were in it.
        UnreadableError: the disk fails.
    """
    told = f"the sum {folded.sum.sha256[:12]} of {len(folded.devices)} updates"
    try:
        large = partial(tensor_files.read_sum, kind=kind, disk=depot.disk, room=room)
        with _reading(f"the sum of {len(folded.devices)} updates", folded.sum, again=True):
            if (found := _read(depot, folded.sum, kind, large)) is not None:
                return found
    except tensors.NoStateError as error:
        log.warning("%s cannot be used: %s", told, error)
    raise LostUpdateError(folded.devices[0], f"{told} is gone from {depot.folder}, or damaged")


def contribution(depot: Depot, update: Update) -> Contribution:
    """An update with its tensors, read from disk.

    Raises:
        LostUpdateError: a blob of it is gone, or damaged.
        UnreadableError: the disk fails.
        UpdateError: a bundle is no safetensors blob, or holds values that are not finite.
    """
    bundles = {}
    for name, ref in update.bundles.items():
        with _reading(f"{update.device}'s update", ref, again=True):
            payload = depot.load(ref.sha256)
        if payload is None:
            raise LostUpdateError(update.device, f"blob {ref.sha256[:12]} is gone from {depot.folder}, or damaged")
        bundles[name] = tensors.decode(payload)
        tensors.require_finite(bundles[name])
    return Contribution(update.device, update.round, update.weight, update.metrics, bundles)


def state(
    run: str,
    depot: Depot,
    ref: BlobRef,
    kind: type,
    rebuild: Callable[[], Any],
    lazy_bytes: float = math.inf,
    *,
    again: bool = False,
) -> Any:
    """A job's state.

    Args:
        run: id of the job.
        depot: where it is stored.
        ref: of the state.
        kind: class of the state.
        rebuild: makes the state anew from what it followed from; None: that is not here any more.
        lazy_bytes: tensors of as many bytes stay on the disk: see `tensor_files.read_state`.
        again: whether what it followed from is here still, so that it is stored anew once it is gone.

    Raises:
        JobError: it is lost, or of another version of fedquilt.
        UnreadableError: the disk fails.
        StoreError: the disk takes no state that is made anew.
    """
    try:
        naming = partial(_reading, f"the state of {run}", ref, again)
        disk = _Named(depot.disk, naming)
        large = partial(tensor_files.read_state, kind=kind, disk=disk, lazy_bytes=lazy_bytes)
        with naming():
            found = _read(depot, ref, kind, large)
        if found is not None:
            return found
        made = rebuild()
        if made is None or depot.put(packed := tensors.pack(made)) != ref:
            raise JobError(
                f"the state of {run} ({ref.sha256[:12]}) is gone from {depot.folder}, or damaged, and cannot be made "
                "again from its log: put back a copy of the whole home, or run the job anew"
            )
        log.warning("the state of %s (%s) was gone or damaged: it is made again", run, ref.sha256[:12])
        return tensors.unpack(packed, kind)
    except tensors.NoStateError as error:
        raise JobError(f"the state of {run} ({ref.sha256[:12]}) cannot be read ({error}): run it anew") from None


def _read(depot: Depot, ref: BlobRef, kind: type[T], large: Callable[[str], T]) -> T | None:
    """A stored state or sum, which `large` reads from its path if it is large; None: it is gone, or damaged.

    Raises:
        StoreError: it cannot be read, or is none of that type.
    """
    if ref.size > WHOLE_BYTES:
        path = depot.verified_path(ref.sha256)
        return None if path is None else large(path)
    payload = depot.load(ref.sha256)
    return None if payload is None else tensors.unpack(payload, kind)


def compare(rounds: Rounds, job: str, device: str, claim: Claim, reported: set[str]) -> None:
    """Report, once for each job, that a device has counted a round which the log does not know."""
    if claim.counted is None or job in reported or (claim.job, claim.round) != (job, rounds.round):
        return
    if device not in rounds.asked or device in rounds.lost:
        return
    reported.add(job)
    log.warning(
        "%s has counted round %d of %s, whose log here is at round %d: this home is an older copy, or has lost its "
        "end; the job goes on from its log, and what devices know beyond does not count",
        *(device, claim.counted, job, rounds.round),
    )


def of_bundle(run: str, folder: Path) -> AbstractContextManager[None]:
    """Name the bundle of a run where the disk does not give it back."""
    return reading(f"the bundle of {run}", place=f"the bundle {folder}")


def bundle_of(run: str, folder: Path, depot: Depot) -> Bundle:
    """The bundle of a run, whose files are read when they are asked for.

    Raises:
        JobError: there is none, or it is damaged.
        UnreadableError: the disk fails.
    """
    with of_bundle(run, folder):
        return bundle.load(folder, depot.disk)


def restore(run: str, depot: Depot, folder: Path, files: Mapping[str, BlobRef]) -> None:
    """Store the files of a run's bundle that the depot lacks, or whose copies there are damaged.

    Raises:
        JobError: the bundle's own file is gone, or not what the bundle says.
        UnreadableError: the disk fails where it is read.
        StoreError: the depot cannot be written.
    """
    for name, ref in files.items():
        if not depot.has(ref):
            with of_bundle(run, folder):
                path = bundle.file(folder, ref, depot.disk)
            try:
                depot.put_file(path, ref)
            except DamagedBlobError as error:  # it has changed since
                raise JobError(f"{folder}: file {name!r} cannot be used ({error}): prepare it anew") from None
