"""Blobs in an object store: models for devices, and updates of devices."""

from __future__ import annotations

import logging
import math
import time
from typing import Final

from fedquilt.blobs.carriers import Carriers, Ended, Key
from fedquilt.blobs.store import Depot
from fedquilt.coordinator.object_store import Bucket
from fedquilt.core import BlobRef, LinkError, Source

log = logging.getLogger("fedquilt.coordinator.blobs")

THERE_S: Final = 3600.0  # time for which a stored object is assumed to exist; then it is stored again
REST_S: Final = 60.0  # pause after the store has refused
SKEW_S: Final = 60.0  # least difference of the store's clock that is logged
_CLOCK: Final = ("", "clock")
_REMOVED: Final = ("", "removed")


class Stored:
    """Blobs of one coordinator in an object store. Requests run in threads and never block.

    Args:
        bucket: The bucket of the store.
        fleet: The name of the folder of all objects.
        depot: The local blob store.
        carriers: The runner of the threads, which passes their results to `handle_result`.
    """

    def __init__(self, bucket: Bucket, fleet: str, depot: Depot, carriers: Carriers) -> None:
        self._bucket, self._fleet, self._depot, self._carriers = bucket, fleet, depot, carriers
        self._there: dict[str, float] = {}  # sha256 -> time until which the object is assumed to exist
        self._wanted: dict[str, dict[str, None]] = {}  # sha256 of blobs under way to the store -> devices that wait
        self._ready: list[Key] = []
        self._asked: set[Key] = set()  # blobs that devices were given an address for
        self._clock_known = False
        self._not_before_s = -math.inf

    def download_locations(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """Return the locations from which a device can fetch a blob.

        A blob that is missing in the store is uploaded first, and then returned by `take_ready_blobs`.
        """
        if time.monotonic() < self._there.get(ref.sha256, -math.inf):
            return (self._bucket.sign_source("GET", self._download_name(ref.sha256)),)
        if ref.sha256 in self._wanted:
            self._wanted[ref.sha256][device] = None
        elif self._ensure_usable():
            self._wanted[ref.sha256] = {device: None}
            source = self._bucket.sign_source("PUT", self._download_name(ref.sha256), ref.size)
            self._carriers.start_upload(("", ref.sha256), self._depot, ref, (source,), lambda size: None)
        return ()

    def upload_locations(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        if not self._ensure_usable():
            return ()
        self._asked.add((device, ref.sha256))
        return (self._bucket.sign_source("PUT", self._upload_name(device, ref.sha256), ref.size),)

    def uploaded_locations(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        known = (device, ref.sha256) in self._asked
        return (self._bucket.sign_source("GET", self._upload_name(device, ref.sha256)),) if known else ()

    def delete_upload(self, key: Key) -> None:
        if key in self._asked:
            self._asked.discard(key)
            source = self._bucket.sign_source("DELETE", self._upload_name(*key))
            self._carriers.start_job(lambda: self._delete_object(source), Ended(_REMOVED, None, None))

    def take_ready_blobs(self) -> list[Key]:
        """Return the blobs that reached the store since the last call, once per waiting device."""
        ready, self._ready = self._ready, []
        return ready

    def handle_result(self, ended: Ended) -> bool:
        """Process the result of a request. Return whether the request was made by this object."""
        if ended.key == _CLOCK and ended.error is not None:
            self._pause(ended.error)
        if ended.key[0] != "":
            return False
        devices = self._wanted.pop(ended.key[1], {})
        if ended.key not in (_CLOCK, _REMOVED) and ended.error is None:
            self._there[ended.key[1]] = time.monotonic() + THERE_S
            self._ready += [(device, ended.key[1]) for device in devices]
        elif ended.key not in (_CLOCK, _REMOVED):
            self._pause(str(ended.error))
        return True

    def request_clock(self) -> None:
        source = self._bucket.sign_source("HEAD", "")
        self._not_before_s = math.inf  # until the store has answered
        self._carriers.start_job(lambda: self._fetch_clock(source), Ended(_CLOCK, None, "no answer"))

    def _ensure_usable(self) -> bool:
        if time.monotonic() < self._not_before_s:
            return False
        if not self._clock_known:
            self.request_clock()
        return self._clock_known

    def _fetch_clock(self, source: Source) -> Ended:
        try:
            _, date = self._carriers.send_request("HEAD", source)
        except LinkError as error:
            return Ended(_CLOCK, None, str(error))
        if self._bucket.set_clock(date) > SKEW_S:
            log.warning("the clock of %s is %+.0f s from this machine's: set one of them", source.origin, self.offset_s)
        self._clock_known, self._not_before_s = True, -math.inf
        return Ended(_CLOCK, None, None)

    def _delete_object(self, source: Source) -> Ended:
        try:
            self._carriers.send_request("DELETE", source)
        except LinkError as error:
            log.debug("an object is left in the store: %s", error)
        return Ended(_REMOVED, None, None)

    @property
    def offset_s(self) -> float:
        return self._bucket.offset_s

    def _pause(self, error: str) -> None:
        log.warning("the object store is not used for %g s: %s", REST_S, error)
        self._not_before_s, self._clock_known = time.monotonic() + REST_S, False

    def _download_name(self, sha256: str) -> str:
        return f"{self._fleet}/dn/{sha256}"

    def _upload_name(self, device: str, sha256: str) -> str:
        return f"{self._fleet}/up/{device}/{sha256}"
