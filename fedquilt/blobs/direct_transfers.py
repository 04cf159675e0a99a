"""Blob transfers outside the link, from the offer of a location to the result.

The coordinator offers locations (`LocationOffer`), from which a device fetches a blob or to which a device uploads a
blob. During the transfer, requests over the link are paused. If the transfer fails, the remaining chunks are requested
over the link. Threads transfer the bytes, so that no call blocks. The end of each thread wakes the event loop by `fds`.
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

MAX_TRANSFERS: Final = 2  # threads that transfer blobs at the same time on a device
UPLOAD_TIMEOUT_S: Final = 30.0  # pause of a device's upload after which its chunks are requested over the link
PROGRESS_INTERVAL_S: Final = 5.0  # interval of `UploadProgress` messages
_MAX_REMEMBERED_OFFERS: Final = 4096
_PROGRAM_ERROR: Final = "transfer was ended by an error in fedquilt (see the log)"

Key = tuple[str, str]  # device, sha256


class TransferResult(NamedTuple):
    key: Key
    writer: BlobWriter | None  # None for uploads
    error: str | None
    can_retry: bool = False  # whether the same locations may work later
    is_disk_error: bool = False  # whether the error is of this side's disk
    location_index: int = 0  # index of the location that received the upload


class TransferBackend:
    """Transfers between a blob store and locations, in threads. A subclass can offer locations."""

    def __init__(
        self, identity: LinkIdentity | None = None, ca: Path | None = None, max_transfers: int = MAX_TRANSFERS
    ) -> None:
        self._identity, self._ca, self._max_transfers = identity, ca, max_transfers
        self._http: HttpClient | None = None
        self._results: deque[tuple[TransferResult, int]] = deque()  # (result, number of threads that ended with it)
        self._running = 0
        self._queued_jobs: deque[Callable[[], None]] = deque()  # jobs that wait for a free thread
        self._wake_fd: int | None = None

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return ()

    def upload_locations(self, device: str, writer: BlobWriter) -> tuple[BlobLocation, ...]:
        """Return where a device may upload a blob. The coordinator's HTTP server passes uploads to `writer`."""
        return ()

    def uploaded_locations(self, device: str, ref: BlobRef, location_index: int) -> tuple[BlobLocation, ...]:
        """Return where to fetch a blob that a device uploaded to the location with this index."""
        return ()

    def close_locations(self, key: Key) -> None: ...

    def take_ready_blobs(self) -> list[Key]:
        return []

    def fds(self) -> Sequence[int]:
        return () if self._wake_fd is None else (self._wake_fd,)

    @property
    def has_free_thread(self) -> bool:
        return self._running < self._max_transfers

    def take_results(self) -> list[TransferResult]:
        """Return the results since the last call, and start queued jobs in the threads that became free."""
        if self._wake_fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        results = []
        while self._results:
            result, jobs = self._results.popleft()
            self._running -= jobs
            results.append(result)
        self._start_queued_jobs()
        return results

    def add_result(self, result: TransferResult, jobs: int = 0) -> None:
        """Record the end of a transfer and wake the event loop. May be called from any thread."""
        self._results.append((result, jobs))
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    def retry_at_s(self, locations: Sequence[BlobLocation]) -> float:
        """Return the monotonic time from which a location may be tried, -infinity without an HTTP client."""
        client = self._http
        return min((client.retry_at_s(location) for location in locations), default=math.inf) if client else -math.inf

    def start_download(self, key: Key, writer: BlobWriter, locations: Sequence[BlobLocation]) -> None:
        def job() -> TransferResult:
            try:
                self.http.fetch_blob(locations, writer)
            except (LinkError, StoreError) as error:
                return close_failed_transfer(key, writer, error)
            return TransferResult(key, writer, None)

        self.start_job(job, TransferResult(key, writer, _PROGRAM_ERROR))

    def start_upload(
        self,
        key: Key,
        blob_store: BlobStore,
        ref: BlobRef,
        locations: Sequence[BlobLocation],
        count_bytes: Callable[[int], None],
    ) -> None:
        def job() -> TransferResult:
            file = blob_store.open_blob_file(ref.sha256)
            try:
                location_index = self.http.upload_blob(locations, file, ref, count_bytes)
                return TransferResult(key, None, None, location_index=location_index)
            finally:
                os.close(file)

        self.start_job(job, TransferResult(key, None, _PROGRAM_ERROR))

    def start_completion(self, key: Key, writer: BlobWriter) -> None:
        def job() -> TransferResult:
            writer.finish_received()
            return TransferResult(key, writer, None)

        self.start_job(job, TransferResult(key, writer, _PROGRAM_ERROR, is_disk_error=True))

    def abandon_download(self, key: Key, writer: BlobWriter, reason: str) -> None:
        failure_result = TransferResult(key, writer, _PROGRAM_ERROR)
        self.start_job(lambda: close_failed_transfer(key, writer, LinkError(reason)), failure_result)

    @property
    def http(self) -> HttpClient:
        from fedquilt.blobs.http_client import HttpClient

        if self._http is None:
            self._http = HttpClient(self._identity, self._ca)
        return self._http

    def start_job(self, job: Callable[[], TransferResult], failure_result: TransferResult) -> None:
        """Run a job in a thread when a thread is free.

        If the job raises an exception, the result is `failure_result`, with the text of a LinkError or StoreError.
        """
        if self._wake_fd is None:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        def run() -> None:
            result = failure_result
            try:
                result = job()
            except (LinkError, StoreError) as error:
                result = failure_result._replace(error=str(error))
            except Exception:
                log.exception("transfer of blob %s failed", failure_result.key[1][:12])
            finally:
                self.add_result(result, 1)

        self._queued_jobs.append(run)
        self._start_queued_jobs()

    def _start_queued_jobs(self) -> None:
        while self._queued_jobs and self.has_free_thread:
            self._running += 1
            threading.Thread(target=self._queued_jobs.popleft(), name="blob", daemon=True).start()


def close_failed_transfer(key: Key, writer: BlobWriter, error: FedquiltError) -> TransferResult:
    try:
        writer.close_and_check()
    except StoreError as disk_error:
        return TransferResult(key, writer, str(disk_error), is_disk_error=True)
    can_retry = isinstance(error, BlobLocationError) and error.can_retry
    return TransferResult(key, writer, str(error), can_retry, isinstance(error, StoreError))


@dataclass
class _DirectDownload:
    download: Download
    writer: BlobWriter
    deadline_s: float = math.inf  # time by which further bytes must arrive, infinite for a fetch by this side
    checked_bytes: int = 0  # bytes that had arrived at the previous deadline
    reported_bytes: int = 0  # bytes that the device reports as uploaded


@dataclass
class _DirectUpload:
    ref: BlobRef
    locations: tuple[BlobLocation, ...]
    is_started: bool = False
    sent_bytes: int = 0
    next_report_s: float = math.inf
    reported_bytes: int = 0

    def add_bytes(self, size: int) -> None:
        self.sent_bytes += size


class DirectTransfers:
    def __init__(
        self, backend: TransferBackend, blob_store: BlobStore, publish: Callable[[str, str, WireMessage], None]
    ) -> None:
        self._backend, self._blob_store, self._publish = backend, blob_store, publish
        self._locations: dict[Key, tuple[BlobLocation, ...]] = {}  # locations from which to fetch requested blobs
        self._offered_uploads: set[Key] = set()  # blobs whose devices have an offer to upload to a location
        self._downloads: dict[Key, _DirectDownload] = {}
        self._uploads: dict[Key, _DirectUpload] = {}
        self._offered_downloads: set[Key] = set()

    def offer_locations(self, device: str, ref: BlobRef, *, repeat: bool = True) -> None:
        """Publish the locations of a blob to a device. Without `repeat`, only the first time."""
        if not repeat and (device, ref.sha256) in self._offered_downloads:
            return
        if len(self._offered_downloads) >= _MAX_REMEMBERED_OFFERS:
            self._offered_downloads.clear()
        self._offered_downloads.add((device, ref.sha256))
        if locations := self._backend.download_locations(device, ref):
            offer = LocationOffer(sha256=ref.sha256, direction="get", locations=locations)
            self._publish(device, f"blob/{ref.sha256}/place", offer)

    def queue_upload(self, key: Key, ref: BlobRef, offer: LocationOffer) -> None:
        if key not in self._uploads:
            self._uploads[key] = _DirectUpload(ref, offer.locations)

    def add_locations(self, key: Key, offer: LocationOffer) -> None:
        self._locations[key] = offer.locations

    def handle_upload_progress(self, key: Key, progress: UploadProgress, now_s: float) -> None:
        transfer = self._downloads.get(key)
        if transfer is None or transfer.deadline_s == math.inf:
            return
        if progress.error:
            self._abandon(key, transfer, progress.error)
        elif not progress.complete:
            transfer.reported_bytes = max(transfer.reported_bytes, progress.uploaded_bytes)
        elif locations := self._backend.uploaded_locations(key[0], transfer.writer.ref, progress.location_index):
            del self._downloads[key]
            transfer.writer.close()
            self._locations[key] = locations
            transfer.download.resume_requests(None, now_s)

    def start_download(self, key: Key, download: Download, now_s: float) -> None:
        """Fetch a blob from a location, or offer the device an upload location. Pause requests on the link.

        Blobs of one chunk and blobs without a location remain on the link.
        """
        manifest = download.manifest
        if download.is_paused or download.is_complete or manifest is None or chunks.chunk_count(manifest) == 1:
            return
        if locations := self._locations.get(key):
            if self._backend.has_free_thread and self._backend.retry_at_s(locations) <= time.monotonic():
                writer = BlobWriter(self._blob_store, manifest, download.stored_chunks)
                download.pause_requests()
                self._downloads[key] = _DirectDownload(download, writer)
                self._backend.start_download(key, writer, locations)
        elif key not in self._offered_uploads:
            self._offered_uploads.add(key)
            writer = BlobWriter(self._blob_store, manifest, download.stored_chunks, to_end=True)
            if locations := self._backend.upload_locations(key[0], writer):
                download.pause_requests()
                self._downloads[key] = _DirectDownload(download, writer, now_s + UPLOAD_TIMEOUT_S)
                offer = LocationOffer(sha256=key[1], direction="put", locations=locations)
                self._publish(key[0], f"blob/{key[1]}/place", offer)

    def start_completion(self, key: Key, download: Download) -> None:
        if key not in self._downloads and download.manifest is not None:
            download.pause_requests()
            writer = BlobWriter(self._blob_store, download.manifest, download.stored_chunks)
            self._downloads[key] = _DirectDownload(download, writer)
            self._backend.start_completion(key, writer)

    def cancel_download(self, key: Key) -> None:
        """End a download without a result, and revoke its locations."""
        transfer = self._downloads.pop(key, None)
        if transfer is not None:
            transfer.writer.close()
        if transfer is not None or key in self._offered_uploads:
            self._backend.close_locations(key)
        self._locations.pop(key, None)
        self._offered_uploads.discard(key)

    def fall_back_to_link(self, key: Key, reason: str) -> None:
        transfer = self._downloads.get(key)
        if transfer is not None and transfer.deadline_s < math.inf:
            self._abandon(key, transfer, reason)

    def take_results(self, now_s: float) -> list[tuple[TransferResult, int]]:
        """Return the downloads that ended, with bytes received, and continue failed ones over the link."""
        results = []
        for result in self._backend.take_results():
            if result.writer is None:
                self._publish_transfer_end(result)
                continue
            transfer = self._downloads.get(result.key)
            if transfer is None or transfer.writer is not result.writer:
                continue
            del self._downloads[result.key]
            self._backend.close_locations(result.key)
            if not result.can_retry:
                self._locations.pop(result.key, None)
            if result.error is not None:
                text = "blob %s of %s: %s; requesting the rest over the broker"
                log.warning(text, result.key[1][:12], result.key[0], result.error)
                has_same_manifest = transfer.download.manifest is result.writer.manifest
                transfer.download.resume_requests(result.writer.stored_chunks if has_same_manifest else None, now_s)
            results.append((result, result.writer.written_bytes))
        return results

    def step(self, now_s: float) -> float:
        """Start queued uploads, report progress and abandon stalled uploads by devices.

        Return the time by which the next call is due.
        """
        if not (self._downloads or self._uploads or self._locations):
            return math.inf
        for key, download in list(self._downloads.items()):
            if now_s >= download.deadline_s:
                received_bytes = download.writer.written_bytes + download.reported_bytes
                if received_bytes == download.checked_bytes:
                    self._abandon(key, download, f"upload made no progress for {UPLOAD_TIMEOUT_S:g} s")
                else:
                    download.checked_bytes, download.deadline_s = received_bytes, now_s + UPLOAD_TIMEOUT_S
        for key, upload in self._uploads.items():
            if not upload.is_started and self._backend.has_free_thread:
                upload.is_started, upload.next_report_s = True, now_s + PROGRESS_INTERVAL_S
                self._backend.start_upload(key, self._blob_store, upload.ref, upload.locations, upload.add_bytes)
            elif now_s >= upload.next_report_s:
                upload.next_report_s = now_s + PROGRESS_INTERVAL_S
                if upload.sent_bytes != upload.reported_bytes:
                    upload.reported_bytes = upload.sent_bytes
                    progress = UploadProgress(sha256=key[1], uploaded_bytes=upload.sent_bytes)
                    self._publish(key[0], f"blob/{key[1]}/placed", progress)
        times_s = [download.deadline_s for download in self._downloads.values()]
        times_s += [upload.next_report_s for upload in self._uploads.values()]
        waiting = [locations for key, locations in self._locations.items() if key not in self._downloads]
        times_s += map(self._backend.retry_at_s, waiting)
        return min((time_s for time_s in times_s if time_s > now_s), default=math.inf)

    def _abandon(self, key: Key, transfer: _DirectDownload, reason: str) -> None:
        transfer.deadline_s = math.inf
        self._backend.close_locations(key)
        self._backend.abandon_download(key, transfer.writer, reason)

    def _publish_transfer_end(self, result: TransferResult) -> None:
        upload = self._uploads.pop(result.key, None)
        if upload is None:
            return
        sha256, error = result.key[1], shorten_error(result.error or "")
        if error:
            log.warning("blob %s was not uploaded to a location: %s; sending over the broker", sha256[:12], error)
        progress = UploadProgress(
            sha256=sha256,
            uploaded_bytes=upload.sent_bytes,
            location_index=result.location_index,
            complete=True,
            error=error,
        )
        self._publish(result.key[0], f"blob/{sha256}/placed", progress)
