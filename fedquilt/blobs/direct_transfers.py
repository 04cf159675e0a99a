"""Blob transfers outside the link, from the offer of a location to the result.

The coordinator offers locations (`LocationOffer`), from which a device fetches a blob or to which the device uploads
one. Meanwhile the requests over the link are paused. If the transfer fails, the remaining chunks are requested over the
link. Threads move the bytes: no call blocks, and the result of each thread wakes the event loop by `fds`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fedquilt.blobs import chunks
from fedquilt.blobs.download import BlobLocationError, BlobWriter, Download
from fedquilt.blobs.store import BlobStore
from fedquilt.core import (
    BlobLocation,
    BlobRef,
    FedquiltError,
    LinkError,
    LocationOffer,
    StoreError,
    UploadProgress,
    WireMessage,
    shorten_error,
)
from fedquilt.security.handshake import LinkIdentity

if TYPE_CHECKING:
    from fedquilt.blobs.http_client import HttpClient

log = logging.getLogger("fedquilt.blobs.direct_transfers")

JOBS_MOST: Final = 2  # at once, on a board
QUIET_S: Final = 30.0  # longest pause of a device's upload, before its chunks are asked for over the link
TELL_S: Final = 5.0  # between two messages on the progress of putting a blob
_OFFERED_MOST: Final = 4096
_BUG: Final = "an error in the program ended the transfer"

Key = tuple[str, str]  # device, sha256


class TransferResult(NamedTuple):
    key: Key
    intake: BlobWriter | None  # None for uploads
    error: str | None
    later: bool = False  # whether the same places may work after a while
    disk: bool = False  # whether this side's disk has refused
    source: int = 0  # index of the place that took the blob


class TransferBackend:
    """Blob transfers of a device, at locations that the coordinator offers."""

    def __init__(self, identity: LinkIdentity | None = None, ca: Path | None = None, most: int = JOBS_MOST) -> None:
        self._identity, self._ca, self._most = identity, ca, most
        self._http: HttpClient | None = None
        self._ended: deque[tuple[TransferResult, int]] = deque()  # and how many jobs had ended by then
        self._running = 0
        self._left: deque[Callable[[], None]] = deque()  # jobs that wait for one of those that run to end
        self._wake: int | None = None

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return ()

    def upload_locations(self, device: str, intake: BlobWriter) -> tuple[BlobLocation, ...]:
        """Return the locations for an upload. The coordinator's own server writes the blob into `intake`."""
        return ()

    def uploaded_locations(self, device: str, ref: BlobRef, source: int) -> tuple[BlobLocation, ...]:
        return ()

    def close_locations(self, key: Key) -> None: ...

    def take_ready_blobs(self) -> list[Key]:
        """Return the blobs that reached a location since the last call, and the devices waiting for them."""
        return []

    def fds(self) -> Sequence[int]:
        return () if self._wake is None else (self._wake,)

    @property
    def has_free_thread(self) -> bool:
        return self._running < self._most

    def take_results(self) -> list[TransferResult]:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        found = []
        while self._ended:
            ended, jobs = self._ended.popleft()
            self._running -= jobs
            found.append(ended)
        self._start_queued_jobs()
        return found

    def add_result(self, ended: TransferResult, jobs: int = 0) -> None:
        """Record the end of a transfer and wake the event loop. May be called from any thread."""
        self._ended.append((ended, jobs))
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def retry_at_s(self, sources: Sequence[BlobLocation]) -> float:
        """Return the earliest time to try one of the locations, in seconds of the monotonic clock."""
        client = self._http
        return min((client.retry_at_s(each) for each in sources), default=math.inf) if client else -math.inf

    def start_download(self, key: Key, intake: BlobWriter, sources: Sequence[BlobLocation]) -> None:
        def job() -> TransferResult:
            try:
                self.http.fetch_blob(sources, intake)
            except (LinkError, StoreError) as error:
                return close_failed_transfer(key, intake, error)
            return TransferResult(key, intake, None)

        self.start_job(job, TransferResult(key, intake, _BUG))

    def start_upload(
        self, key: Key, depot: BlobStore, ref: BlobRef, sources: Sequence[BlobLocation], moved: Callable[[int], None]
    ) -> None:
        def job() -> TransferResult:
            file = depot.open_blob_file(ref.sha256)
            try:
                return TransferResult(key, None, None, source=self.http.upload_blob(sources, file, ref, moved))
            finally:
                os.close(file)

        self.start_job(job, TransferResult(key, None, _BUG))

    def start_completion(self, key: Key, intake: BlobWriter) -> None:
        def job() -> TransferResult:
            intake.finish_received()
            return TransferResult(key, intake, None)

        self.start_job(job, TransferResult(key, intake, _BUG, disk=True))

    def abandon_download(self, key: Key, intake: BlobWriter, reason: str) -> None:
        self.start_job(lambda: close_failed_transfer(key, intake, LinkError(reason)), TransferResult(key, intake, _BUG))

    @property
    def http(self) -> HttpClient:
        from fedquilt.blobs.http_client import HttpClient

        if self._http is None:
            self._http = HttpClient(self._identity, self._ca)
        return self._http

    def start_job(self, job: Callable[[], TransferResult], failed: TransferResult) -> None:
        """Run a job in a thread as soon as one is free. `failed` is its result if it raises an exception."""
        if self._wake is None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        def run() -> None:
            ended = failed
            try:
                ended = job()
            except (LinkError, StoreError) as error:
                ended = failed._replace(error=str(error))
            except Exception:
                log.exception("a transfer of blob %s has ended", failed.key[1][:12])
            finally:
                self.add_result(ended, 1)

        self._left.append(run)
        self._start_queued_jobs()

    def _start_queued_jobs(self) -> None:
        while self._left and self.has_free_thread:
            self._running += 1
            threading.Thread(target=self._left.popleft(), name="blob", daemon=True).start()


def close_failed_transfer(key: Key, intake: BlobWriter, error: FedquiltError) -> TransferResult:
    try:
        intake.close_and_check()
    except StoreError as full:
        return TransferResult(key, intake, str(full), disk=True)
    later = isinstance(error, BlobLocationError) and error.later
    return TransferResult(key, intake, str(error), later, isinstance(error, StoreError))


@dataclass
class _DirectDownload:
    pull: Download
    intake: BlobWriter
    until_s: float = math.inf  # time by which further bytes have to arrive
    seen: int = 0  # bytes that had come at the last look
    told: int = 0  # bytes sent, as the device reports


@dataclass
class _DirectUpload:
    ref: BlobRef
    sources: tuple[BlobLocation, ...]
    begun: bool = False
    moved: int = 0
    tell_s: float = math.inf
    told: int = 0

    def add_bytes(self, size: int) -> None:
        self.moved += size


class DirectTransfers:
    def __init__(
        self, carriers: TransferBackend, depot: BlobStore, publish: Callable[[str, str, WireMessage], None]
    ) -> None:
        self._carriers, self._depot, self._publish = carriers, depot, publish
        self._places: dict[Key, tuple[BlobLocation, ...]] = {}  # where wanted blobs can be fetched
        self._asked: set[Key] = set()  # blobs that their devices were asked to put
        self._coming: dict[Key, _DirectDownload] = {}
        self._going: dict[Key, _DirectUpload] = {}
        self._offered: set[Key] = set()

    def offer_locations(self, device: str, ref: BlobRef, *, again: bool = True) -> None:
        """Publish the locations of a blob to a device. Without `again`, only the first time."""
        if not again and (device, ref.sha256) in self._offered:
            return
        if len(self._offered) >= _OFFERED_MOST:
            self._offered.clear()
        self._offered.add((device, ref.sha256))
        if sources := self._carriers.download_locations(device, ref):
            self._publish(
                device, f"blob/{ref.sha256}/place", LocationOffer(sha256=ref.sha256, direction="get", locations=sources)
            )

    def queue_upload(self, key: Key, ref: BlobRef, place: LocationOffer) -> None:
        if key not in self._going:
            self._going[key] = _DirectUpload(ref, place.locations)

    def add_locations(self, key: Key, place: LocationOffer) -> None:
        self._places[key] = place.locations

    def handle_upload_progress(self, key: Key, placed: UploadProgress, now_s: float) -> None:
        coming = self._coming.get(key)
        if coming is None or coming.until_s == math.inf:
            return
        if placed.error:
            self._abandon(key, coming, placed.error)
        elif not placed.complete:
            coming.told = max(coming.told, placed.uploaded_bytes)
        elif sources := self._carriers.uploaded_locations(key[0], coming.intake.ref, placed.location_index):
            del self._coming[key]
            coming.intake.close()
            self._places[key] = sources
            coming.pull.resume_requests(None, now_s)

    def start_download(self, key: Key, pull: Download, now_s: float) -> None:
        """Start to fetch a blob from a location, or offer its device one for the upload, and pause its requests."""
        manifest = pull.manifest
        if pull.held or pull.is_complete or manifest is None or chunks.chunk_count(manifest) == 1:
            return
        if sources := self._places.get(key):
            if self._carriers.has_free_thread and self._carriers.retry_at_s(sources) <= time.monotonic():
                intake = BlobWriter(self._depot, manifest, pull.had)
                pull.pause_requests()
                self._coming[key] = _DirectDownload(pull, intake)
                self._carriers.start_download(key, intake, sources)
        elif key not in self._asked:
            self._asked.add(key)
            intake = BlobWriter(self._depot, manifest, pull.had, through=True)
            if sources := self._carriers.upload_locations(key[0], intake):
                pull.pause_requests()
                self._coming[key] = _DirectDownload(pull, intake, now_s + QUIET_S)
                self._publish(
                    key[0], f"blob/{key[1]}/place", LocationOffer(sha256=key[1], direction="put", locations=sources)
                )

    def start_completion(self, key: Key, pull: Download) -> None:
        if key not in self._coming and pull.manifest is not None:
            pull.pause_requests()
            self._coming[key] = _DirectDownload(pull, BlobWriter(self._depot, pull.manifest, pull.had))
            self._carriers.start_completion(key, self._coming[key].intake)

    def cancel_download(self, key: Key) -> None:
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.intake.close()
        if coming is not None or key in self._asked:
            self._carriers.close_locations(key)
        self._places.pop(key, None)
        self._asked.discard(key)

    def fall_back_to_link(self, key: Key, reason: str) -> None:
        coming = self._coming.get(key)
        if coming is not None and coming.until_s < math.inf:
            self._abandon(key, coming, reason)

    def take_results(self, now_s: float) -> list[tuple[TransferResult, int]]:
        """Return the finished downloads with the number of bytes received, and resume failed ones."""
        found = []
        for ended in self._carriers.take_results():
            if ended.intake is None:
                self._publish_transfer_end(ended)
                continue
            coming = self._coming.get(ended.key)
            if coming is None or coming.intake is not ended.intake:
                continue
            del self._coming[ended.key]
            self._carriers.close_locations(ended.key)
            if not ended.later:
                self._places.pop(ended.key, None)
            if ended.error is not None:
                said = "blob %s of %s: %s; the rest comes over the broker"
                log.warning(said, ended.key[1][:12], ended.key[0], ended.error)
                same = coming.pull.manifest is ended.intake.manifest
                coming.pull.resume_requests(ended.intake.had if same else None, now_s)
            found.append((ended, ended.intake.moved))
        return found

    def step(self, now_s: float) -> float:
        if not (self._coming or self._going or self._places):  # as where all blobs go over the broker
            return math.inf
        for key, coming in list(self._coming.items()):
            if now_s >= coming.until_s:
                seen = coming.intake.moved + coming.told
                if seen == coming.seen:
                    self._abandon(key, coming, f"nothing has come for {QUIET_S:g} s from where it was to be put")
                else:
                    coming.seen, coming.until_s = seen, now_s + QUIET_S
        for key, going in self._going.items():
            if not going.begun and self._carriers.has_free_thread:
                going.begun, going.tell_s = True, now_s + TELL_S
                self._carriers.start_upload(key, self._depot, going.ref, going.sources, going.add_bytes)
            elif now_s >= going.tell_s:
                going.tell_s = now_s + TELL_S
                if going.moved != going.told:
                    going.told = going.moved
                    self._publish(
                        key[0], f"blob/{key[1]}/placed", UploadProgress(sha256=key[1], uploaded_bytes=going.moved)
                    )
        until = [coming.until_s for coming in self._coming.values()] + [going.tell_s for going in self._going.values()]
        resting = [
            self._carriers.retry_at_s(sources) for key, sources in self._places.items() if key not in self._coming
        ]
        return min((each for each in until + resting if each > now_s), default=math.inf)

    def _abandon(self, key: Key, coming: _DirectDownload, reason: str) -> None:
        coming.until_s = math.inf
        self._carriers.close_locations(key)
        self._carriers.abandon_download(key, coming.intake, reason)

    def _publish_transfer_end(self, ended: TransferResult) -> None:
        going = self._going.pop(ended.key, None)
        if going is None:
            return
        sha256, error = ended.key[1], shorten_error(ended.error or "")
        if error:
            log.warning("blob %s is put nowhere: %s; it goes over the broker", sha256[:12], error)
        placed = UploadProgress(
            sha256=sha256, uploaded_bytes=going.moved, location_index=ended.source, complete=True, error=error
        )
        self._publish(ended.key[0], f"blob/{sha256}/placed", placed)
