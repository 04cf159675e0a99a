"""Blob transfers outside the broker, in threads, with a report of each result.

An event loop starts jobs and calls `take_results` when `fds` become readable. No call waits for a job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fedquilt.blobs.storage.store import BlobStore
from fedquilt.blobs.transfer.blob_writer import BlobWriter, WriterClosedError
from fedquilt.core import BlobLocation, BlobRef, FedquiltError, LinkError, StoreError
from fedquilt.security.handshake import LinkIdentity

if TYPE_CHECKING:
    from fedquilt.blobs.transfer import http_client

log = logging.getLogger("fedquilt.blobs.carriers")

JOBS_MOST: Final = 2  # at once, on a board
HTTP: Final = "http"

Key = tuple[str, str]  # device, sha256


class TransferResult(NamedTuple):
    key: Key
    intake: BlobWriter | None  # None for uploads
    error: str | None
    later: bool = False  # whether the same places may work after a while
    disk: bool = False  # whether this side's disk has refused
    source: int = 0  # index of the place that took the blob


class TransferBackend:
    """Blob transfers of a device, at locations that the coordinator offers.

    Args:
        identity: The certificate of this side, for the coordinator's server, or None if unsigned.
        ca: The authority of blob stores' certificates, in addition to those of the system.
        most: The number of jobs at once.
    """

    def __init__(self, identity: LinkIdentity | None = None, ca: Path | None = None, most: int = JOBS_MOST) -> None:
        self._identity, self._ca, self._most = identity, ca, most
        self._reached: http_client.ConnectionPool | None = None
        self._ended: deque[tuple[TransferResult, int]] = deque()  # and how many jobs had ended by then
        self._running = 0
        self._left: deque[Callable[[], None]] = deque()  # jobs that wait for one of those that run to end
        self._wake: int | None = None

    # -- what a coordinator adds --

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return ()

    def upload_locations(self, device: str, intake: BlobWriter) -> tuple[BlobLocation, ...]:
        """Return the locations to which a device may upload a blob.

        The coordinator's own server writes the blob into `intake`.
        """
        return ()

    def uploaded_locations(self, device: str, ref: BlobRef, source: int) -> tuple[BlobLocation, ...]:
        return ()

    def close_locations(self, key: Key) -> None: ...

    def take_ready_blobs(self) -> list[Key]:
        """Return the blobs that reached a location since the last call, and the devices waiting for them."""
        return []

    # -- for a loop --

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
        reached = self._reached
        return min((reached.retry_at_s(each) for each in sources), default=math.inf) if reached else -math.inf

    def start_download(self, key: Key, intake: BlobWriter, sources: Sequence[BlobLocation]) -> None:
        def job() -> TransferResult:
            from fedquilt.blobs.transfer import http_client

            try:
                http_client.fetch_blob(self._get_connection_pool(), sources, intake)
            except (LinkError, StoreError) as error:
                later = isinstance(error, http_client.BlobLocationError) and error.later
                return fail_transfer(key, intake, error, later=later)
            return TransferResult(key, intake, None)

        self.start_job(job, TransferResult(key, intake, "an error in the program ended the transfer"))

    def start_upload(
        self, key: Key, depot: BlobStore, ref: BlobRef, sources: Sequence[BlobLocation], moved: Callable[[int], None]
    ) -> None:
        def job() -> TransferResult:
            from fedquilt.blobs.transfer import http_client

            file = -1
            try:
                file = depot.open_blob_file(ref.sha256)
                return TransferResult(
                    key,
                    None,
                    None,
                    source=http_client.upload_blob(self._get_connection_pool(), sources, file, ref, moved),
                )
            except (LinkError, StoreError) as error:
                return TransferResult(key, None, str(error))
            finally:
                if file >= 0:
                    os.close(file)

        self.start_job(job, TransferResult(key, None, "an error in the program ended the transfer"))

    def start_completion(self, key: Key, intake: BlobWriter) -> None:
        def job() -> TransferResult:
            try:
                intake.finish_received()
            except (WriterClosedError, StoreError) as error:
                return TransferResult(key, intake, str(error), disk=True)
            return TransferResult(key, intake, None)

        self.start_job(job, TransferResult(key, intake, "an error in the program ended the hashing", disk=True))

    def abandon_download(self, key: Key, intake: BlobWriter, reason: str) -> None:
        failed = TransferResult(key, intake, reason)
        self.start_job(lambda: fail_transfer(key, intake, LinkError(reason)), failed)

    def _get_connection_pool(self) -> http_client.ConnectionPool:
        from fedquilt.blobs.transfer import http_client

        if self._reached is None:
            self._reached = http_client.ConnectionPool(self._identity, self._ca)
        return self._reached

    def send_request(self, method: str, source: BlobLocation) -> tuple[int, str]:
        """Return the status and date of a location's answer to a request without a body. Blocks.

        Raises:
            LinkError: If the location does not answer.
        """
        from fedquilt.blobs.transfer import http_client

        return http_client.send_request(self._get_connection_pool(), method, source)

    def start_job(self, job: Callable[[], TransferResult], failed: TransferResult) -> None:
        """Run a job in a thread as soon as one is free.

        `failed` is the result if the job raises an unexpected exception.
        """
        if self._wake is None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        def run() -> None:
            ended = failed
            try:
                ended = job()
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


def fail_transfer(key: Key, intake: BlobWriter, error: FedquiltError, *, later: bool = False) -> TransferResult:
    try:
        intake.close_and_check()
    except StoreError as full:
        return TransferResult(key, intake, str(full), disk=True)
    return TransferResult(key, intake, str(error), later, isinstance(error, StoreError))
