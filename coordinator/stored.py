"""Blobs in an object store: models that boards fetch there, and updates that boards put there."""

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
    """Object store of one coordinator. No call waits for the store: requests run in threads.

    Args:
        bucket: of the store.
        fleet: name of the folder of all objects.
        depot: of the blobs.
        carriers: runs the threads, and passes their results to `take`.
    """

    def __init__(self, bucket: Bucket, fleet: str, depot: Depot, carriers: Carriers) -> None:
        self._bucket, self._fleet, self._depot, self._carriers = bucket, fleet, depot, carriers
        self._there: dict[str, float] = {}  # sha256 -> time until which the object is assumed to exist
        self._wanted: dict[str, dict[str, None]] = {}  # sha256 of blobs under way to the store -> devices that wait
        self._ready: list[Key] = []
        self._asked: set[Key] = set()  # blobs that devices were given an address for
        self._clock_known = False
        self._not_before_s = -math.inf

    def offers(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """Places where a device can fetch a blob; a missing one is stored first, and then in `take_ready`."""
        if time.monotonic() < self._there.get(ref.sha256, -math.inf):
            return (self._bucket.source("GET", self._down(ref.sha256)),)
        if ref.sha256 in self._wanted:
            self._wanted[ref.sha256][device] = None
        elif self._usable():
            self._wanted[ref.sha256] = {device: None}
            source = self._bucket.source("PUT", self._down(ref.sha256), ref.size)
            self._carriers.put(("", ref.sha256), self._depot, ref, (source,), lambda size: None)
        return ()

    def accepts(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """Places where a device can put a blob."""
        if not self._usable():
            return ()
        self._asked.add((device, ref.sha256))
        return (self._bucket.source("PUT", self._up(device, ref.sha256), ref.size),)

    def brought(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """Places from which to fetch a device's upload."""
        known = (device, ref.sha256) in self._asked
        return (self._bucket.source("GET", self._up(device, ref.sha256)),) if known else ()

    def over(self, key: Key) -> None:
        """Remove a device's upload from the store: the blob is here, or not wanted any more."""
        if key in self._asked:
            self._asked.discard(key)
            source = self._bucket.source("DELETE", self._up(*key))
            self._carriers.start(lambda: self._removed(source), Ended(_REMOVED, None, None))

    def take_ready(self) -> list[Key]:
        """Blobs that have come to the store since the last call, and the devices that asked for them meanwhile."""
        ready, self._ready = self._ready, []
        return ready

    def take(self, ended: Ended) -> bool:
        """Note the end of a job; returns whether the job was the store's."""
        if ended.key == _CLOCK and ended.error is not None:
            self._rest(ended.error)
        if ended.key[0] != "":
            return False
        devices = self._wanted.pop(ended.key[1], {})
        if ended.key not in (_CLOCK, _REMOVED) and ended.error is None:
            self._there[ended.key[1]] = time.monotonic() + THERE_S
            self._ready += [(device, ended.key[1]) for device in devices]
        elif ended.key not in (_CLOCK, _REMOVED):
            self._rest(str(ended.error))
        return True

    def look(self) -> None:
        """Ask for the store's clock, by which addresses are signed."""
        source = self._bucket.source("HEAD", "")
        self._not_before_s = math.inf  # until the store has answered
        self._carriers.start(lambda: self._looked(source), Ended(_CLOCK, None, "no answer"))

    def _usable(self) -> bool:
        if time.monotonic() < self._not_before_s:
            return False
        if not self._clock_known:
            self.look()
        return self._clock_known

    def _looked(self, source: Source) -> Ended:
        try:
            _, date = self._carriers.ask("HEAD", source)
        except LinkError as error:
            return Ended(_CLOCK, None, str(error))
        if self._bucket.set_clock(date) > SKEW_S:
            log.warning("the clock of %s is %+.0f s from this machine's: set one of them", source.origin, self.offset_s)
        self._clock_known, self._not_before_s = True, -math.inf
        return Ended(_CLOCK, None, None)

    def _removed(self, source: Source) -> Ended:
        try:
            self._carriers.ask("DELETE", source)
        except LinkError as error:
            log.debug("an object is left in the store: %s", error)
        return Ended(_REMOVED, None, None)

    @property
    def offset_s(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's."""
        return self._bucket.offset_s

    def _rest(self, error: str) -> None:
        log.warning("the object store is not used for %g s: %s", REST_S, error)
        self._not_before_s, self._clock_known = time.monotonic() + REST_S, False

    def _down(self, sha256: str) -> str:
        return f"{self._fleet}/dn/{sha256}"

    def _up(self, device: str, sha256: str) -> str:
        return f"{self._fleet}/up/{device}/{sha256}"
