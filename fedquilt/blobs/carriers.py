"""Carriers of blobs beside the link: transfers in threads of their own, and reports of how each ended.

An event loop starts jobs and reads `take_ended` when `fds` become readable. No call waits for a job.
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

from fedquilt.blobs.intake import ClosedError, Intake
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, FedquiltError, LinkError, Source, StoreError
from fedquilt.transport.handshake import Identity

if TYPE_CHECKING:
    from fedquilt.blobs import over_http

log = logging.getLogger("fedquilt.blobs.carriers")

JOBS_MOST: Final = 2  # at once, on a board
HTTP: Final = "http"

Key = tuple[str, str]  # device, sha256


class Ended(NamedTuple):
    """Result of a transfer's job."""

    key: Key
    intake: Intake | None  # None: the job sent the blob
    error: str | None
    later: bool = False  # whether the same places may work after a while
    disk: bool = False  # whether this side's disk has refused
    source: int = 0  # index of the place that took the blob


class Carriers:
    """Carriers of a board, which knows no places but those that the coordinator names.

    Args:
        identity: this side's certificate, for the coordinator's server; None: unsigned.
        ca: authority of stores' certificates, beside those of the system.
        most: jobs at once.
    """

    def __init__(self, identity: Identity | None = None, ca: Path | None = None, most: int = JOBS_MOST) -> None:
        self._identity, self._ca, self._most = identity, ca, most
        self._reached: over_http.Reach | None = None
        self._ended: deque[tuple[Ended, int]] = deque()  # and how many jobs had ended by then
        self._running = 0
        self._left: deque[Callable[[], None]] = deque()  # jobs that wait for one of those that run to end
        self._wake: int | None = None

    # -- what a coordinator adds --

    def offers(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """Places where a device can fetch a blob."""
        return ()

    def accepts(self, device: str, intake: Intake) -> tuple[Source, ...]:
        """Places where a device can put a blob; an own server writes it into the intake."""
        return ()

    def brought(self, device: str, ref: BlobRef, source: int) -> tuple[Source, ...]:
        """Places from which this side fetches a blob that a device has put there; (): none."""
        return ()

    def over(self, key: Key) -> None:
        """Close the places of a transfer that has ended, or goes another way."""

    def take_ready(self) -> list[Key]:
        """Blobs that have reached a place since the last call, and the devices that asked for each meanwhile."""
        return []

    # -- for a loop --

    def fds(self) -> Sequence[int]:
        """File descriptors that become readable when a job has ended."""
        return () if self._wake is None else (self._wake,)

    @property
    def free(self) -> bool:
        """Whether a job that is started begins at once."""
        return self._running < self._most

    def take_ended(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        found = []
        while self._ended:
            ended, jobs = self._ended.popleft()
            self._running -= jobs
            found.append(ended)
        self._go_on()
        return found

    def tell(self, ended: Ended, jobs: int = 0) -> None:
        """Note the end of a transfer, from any thread, and wake the loop."""
        self._ended.append((ended, jobs))
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def rests_until_s(self, sources: Sequence[Source]) -> float:
        """Earliest time at which one of these places may be tried, in seconds of the monotonic clock."""
        reached = self._reached
        return min((reached.rests_until_s(each) for each in sources), default=math.inf) if reached else -math.inf

    def fetch(self, key: Key, intake: Intake, sources: Sequence[Source]) -> None:
        """Fetch a blob in a thread."""

        def job() -> Ended:
            from fedquilt.blobs import over_http

            try:
                over_http.fetch(self._reach(), sources, intake)
            except (LinkError, StoreError) as error:
                later = isinstance(error, over_http.CarrierError) and error.later
                return missed(key, intake, error, later=later)
            return Ended(key, intake, None)

        self.start(job, Ended(key, intake, "an error in the program ended the transfer"))

    def put(
        self, key: Key, depot: Depot, ref: BlobRef, sources: Sequence[Source], moved: Callable[[int], None]
    ) -> None:
        """Send a blob from a thread, which calls `moved` with the number of bytes of each piece."""

        def job() -> Ended:
            from fedquilt.blobs import over_http

            file = -1
            try:
                file = depot.opened(ref.sha256)
                return Ended(key, None, None, source=over_http.put(self._reach(), sources, file, ref, moved))
            except (LinkError, StoreError) as error:
                return Ended(key, None, str(error))
            finally:
                if file >= 0:
                    os.close(file)

        self.start(job, Ended(key, None, "an error in the program ended the transfer"))

    def finish(self, key: Key, intake: Intake) -> None:
        """Hash a part that is complete, and make it the blob, in a thread."""

        def job() -> Ended:
            try:
                intake.complete()
            except (ClosedError, StoreError) as error:
                return Ended(key, intake, str(error), disk=True)
            return Ended(key, intake, None)

        self.start(job, Ended(key, intake, "an error in the program ended the hashing", disk=True))

    def give_up(self, key: Key, intake: Intake, reason: str) -> None:
        """End an abandoned transfer: a thread finds out which chunks of the blob are here."""
        failed = Ended(key, intake, reason)
        self.start(lambda: missed(key, intake, LinkError(reason)), failed)

    def _reach(self) -> over_http.Reach:
        from fedquilt.blobs import over_http

        if self._reached is None:
            self._reached = over_http.Reach(self._identity, self._ca)
        return self._reached

    def ask(self, method: str, source: Source) -> tuple[int, str]:
        """Status and date of a place's answer to a request without a body. The call blocks: only jobs make it.

        Raises:
            LinkError: the place does not answer.
        """
        from fedquilt.blobs import over_http

        return over_http.ask(self._reach(), method, source)

    def start(self, job: Callable[[], Ended], failed: Ended) -> None:
        """Run a job in a thread, as soon as one is free; `failed` is its result if an error in the program ends it."""
        if self._wake is None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

        def run() -> None:
            ended = failed
            try:
                ended = job()
            except Exception:
                log.exception("a transfer of blob %s has ended", failed.key[1][:12])
            finally:
                self.tell(ended, 1)

        self._left.append(run)
        self._go_on()

    def _go_on(self) -> None:
        while self._left and self.free:
            self._running += 1
            threading.Thread(target=self._left.popleft(), name="blob", daemon=True).start()


def missed(key: Key, intake: Intake, error: FedquiltError, *, later: bool = False) -> Ended:
    """Result of a transfer that has failed, with the chunks that are here."""
    try:
        intake.look()
    except StoreError as full:
        return Ended(key, intake, str(full), disk=True)
    return Ended(key, intake, str(error), later, isinstance(error, StoreError))
