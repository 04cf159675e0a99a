"""Reading back what a job has in its depot, which gives only what is verified.

What is gone or damaged is rebuilt where the log allows it, asked for again from its device, or refused by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt import tensor_files, tensors
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import Depot
from fedquilt.coordinator.facts import Folded, Rounds
from fedquilt.core import BlobRef, Contribution, JobError, StoreError, Update
from fedquilt.disk import doing
from fedquilt.on_disk import Scratch
from fedquilt.wire import Claim

WHOLE_BYTES: Final = 1 << 20  # tensors up to this are in memory as bytes when they are read or stored

T = TypeVar("T")

log = logging.getLogger("fedquilt.coordinator")


class LostUpdateError(JobError):
    """Raised when an update that is here, or is in the running round's sum, is gone or damaged on disk."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"{device}'s update: {reason}")
        self.device, self.reason = device, reason


class UnreadableError(StoreError):
    """Raised when the disk fails where a job's blob is read: another try, a moment later, may find it well.

    Args:
        what: the blob, and whose it is.
        sha256: of the blob.
        again: whether it is made or asked for again once it is gone.
        error: of the disk.
    """

    def __init__(self, what: str, sha256: str, again: bool, error: StoreError) -> None:
        super().__init__(f"{what} ({sha256[:12]}) cannot be read: {error}")
        self.sha256, self.again = sha256, again


@contextmanager
def _reading(what: str, ref: BlobRef, again: bool) -> Iterator[None]:
    """Name a blob that the disk does not give back."""
    try:
        yield
    except tensors.NoStateError:
        raise
    except StoreError as error:
        raise UnreadableError(what, ref.sha256, again, error) from None


def streamed(depot: Depot, update: Update) -> Contribution:
    """An update whose tensors are read from disk one at a time, each time that one is asked for.

    Raises:
        LostUpdateError: a blob of it is gone, or damaged.
        UnreadableError: the disk fails.
        UpdateError: a bundle is no safetensors blob.
    """
    bundles = {}
    for name, ref in update.bundles.items():
        with _reading(f"{update.device}'s update", ref, again=True):
            path = depot.file(ref.sha256)
        if path is None:
            raise LostUpdateError(update.device, f"blob {ref.sha256[:12]} is gone from {depot.folder}, or damaged")
        bundles[name] = tensor_files.Stored(path, depot.disk)
    return Contribution(update.device, update.round, update.weight, update.metrics, bundles)


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
        large = partial(tensor_files.read_state, kind=kind, disk=depot.disk, lazy_bytes=lazy_bytes)
        with _reading(f"the state of {run}", ref, again):
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
        path = depot.file(ref.sha256)
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


def restore(depot: Depot, folder: Path, files: Mapping[str, BlobRef]) -> None:
    """Store the files of a bundle that the depot lacks, or whose copies there are damaged.

    Raises:
        JobError: the bundle's own file is not what the bundle says, or cannot be read.
        StoreError: the depot cannot be written.
    """
    for name, ref in files.items():
        if not depot.has(ref):
            source = folder / "blobs" / ref.sha256
            try:
                with doing(f"read {source}"):
                    source.open("rb").close()
            except StoreError as error:
                raise JobError(f"{folder}: file {name!r} cannot be used ({error})") from None
            try:
                depot.put_file(source, ref)
            except DamagedBlobError as error:
                raise JobError(f"{folder}: file {name!r} cannot be used ({error}): prepare it anew") from None
