"""Blobs moved by carriers beside the link, from the offer of a place to the end of the transfer; part of `Transfers`.

The coordinator names places (`wire.Place`), by which a device fetches a blob or puts one. A pull is held while bytes of
it come from a place, and goes on over the link from what is there when that fails. Nothing here blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fedquilt.blobs import chunks
from fedquilt.blobs.carriers import Carriers, Ended, Key
from fedquilt.blobs.download import Pull
from fedquilt.blobs.intake import Intake
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, Place, Placed, Source, Wired, shorten_error

log = logging.getLogger("fedquilt.blobs.streaming")

QUIET_S: Final = 30.0  # longest pause of a device's upload, before its chunks are asked for over the link
TELL_S: Final = 5.0  # between two messages on the progress of putting a blob
_OFFERED_MOST: Final = 4096


@dataclass
class _Coming:
    """A blob that comes from a place, or that its device was asked to put."""

    pull: Pull
    intake: Intake
    until_s: float = math.inf  # time by which further bytes have to arrive
    seen: int = 0  # bytes that had come at the last look
    told: int = 0  # bytes sent, as the device reports


@dataclass
class _Going:
    """A blob that this device puts."""

    ref: BlobRef
    sources: tuple[Source, ...]
    begun: bool = False
    moved: int = 0
    tell_s: float = math.inf
    told: int = 0

    def add(self, size: int) -> None:
        """Note bytes that have gone."""
        self.moved += size


class Streaming:
    """Transfers by carriers, of the coordinator or of a board.

    Args:
        carriers: moves the bytes; on the coordinator it knows the places.
        depot: holds the blobs.
        publish: `publish(device, leaf, message)` sends a message over the link.
    """

    def __init__(self, carriers: Carriers, depot: Depot, publish: Callable[[str, str, Wired], None]) -> None:
        self._carriers, self._depot, self._publish = carriers, depot, publish
        self._places: dict[Key, tuple[Source, ...]] = {}  # where wanted blobs can be fetched
        self._asked: set[Key] = set()  # blobs that their devices were asked to put
        self._coming: dict[Key, _Coming] = {}
        self._going: dict[Key, _Going] = {}
        self._offered: set[Key] = set()

    def fds(self) -> Sequence[int]:
        """File descriptors that become readable when a transfer has ended."""
        return self._carriers.fds()

    # -- who has the blob --

    def offer(self, device: str, ref: BlobRef, *, again: bool = True) -> None:
        """Name the places of a blob to a device; without `again` only if none was named before."""
        if not again and (device, ref.sha256) in self._offered:
            return
        if len(self._offered) >= _OFFERED_MOST:
            self._offered.clear()
        self._offered.add((device, ref.sha256))
        if sources := self._carriers.offers(device, ref):
            self._publish(device, f"blob/{ref.sha256}/place", Place(sha256=ref.sha256, way="get", sources=sources))

    def ready(self) -> list[Key]:
        """Blobs that have reached a place since devices asked for them, and are to be offered again."""
        return self._carriers.take_ready()

    def put(self, key: Key, ref: BlobRef, place: Place) -> None:
        """Send a blob to the place that the coordinator names."""
        if key not in self._going:
            self._going[key] = _Going(ref, place.sources)

    # -- who wants it --

    def place(self, key: Key, place: Place) -> None:
        """Note where a wanted blob can be fetched."""
        self._places[key] = place.sources

    def placed(self, key: Key, placed: Placed, now_s: float) -> None:
        """Note how far a device's upload of a blob is."""
        coming = self._coming.get(key)
        if coming is None or coming.until_s == math.inf:
            return
        if placed.error:
            self._give_up(key, coming, placed.error)
        elif not placed.done:
            coming.told = max(coming.told, placed.moved)
        elif sources := self._carriers.brought(key[0], coming.intake.ref, placed.source):
            del self._coming[key]
            coming.intake.close()
            self._places[key] = sources
            coming.pull.release(None, now_s)

    def begin(self, key: Key, pull: Pull, now_s: float) -> None:
        """Start fetching a blob from a place, if there is one; the pull is held meanwhile."""
        manifest = pull.manifest
        if pull.held or pull.done or manifest is None or chunks.count(manifest) == 1:
            return
        if sources := self._places.get(key):
            if self._carriers.free and self._carriers.rests_until_s(sources) <= time.monotonic():
                intake = Intake(self._depot, manifest, pull.had)
                pull.hold()
                self._coming[key] = _Coming(pull, intake)
                self._carriers.fetch(key, intake, sources)
        elif key not in self._asked:
            self._asked.add(key)
            intake = Intake(self._depot, manifest, pull.had, through=True)
            if sources := self._carriers.accepts(key[0], intake):
                pull.hold()
                self._coming[key] = _Coming(pull, intake, now_s + QUIET_S)
                self._publish(key[0], f"blob/{key[1]}/place", Place(sha256=key[1], way="put", sources=sources))

    def finish(self, key: Key, pull: Pull) -> None:
        """Turn a part into the blob in a thread, now that all of it has come over the link."""
        if key not in self._coming and pull.manifest is not None:
            pull.hold()
            self._coming[key] = _Coming(pull, Intake(self._depot, pull.manifest, pull.had))
            self._carriers.finish(key, self._coming[key].intake)

    def forget(self, key: Key) -> None:
        """Drop a blob that is not wanted any more; bytes under way are not written."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.intake.close()
        if coming is not None or key in self._asked:
            self._carriers.over(key)
        self._places.pop(key, None)
        self._asked.discard(key)

    def hand_over(self, key: Key, reason: str) -> None:
        """Have the rest of a blob that its device puts come over the link."""
        coming = self._coming.get(key)
        if coming is not None and coming.until_s < math.inf:
            self._give_up(key, coming, reason)

    # -- what has happened --

    def take_ended(self, now_s: float) -> list[tuple[Ended, int]]:
        """Transfers of wanted blobs that have ended, and the bytes each has brought; their pulls are held no more."""
        found = []
        for ended in self._carriers.take_ended():
            if ended.intake is None:
                self._publish_transfer_end(ended)
                continue
            coming = self._coming.get(ended.key)
            if coming is None or coming.intake is not ended.intake:
                continue
            del self._coming[ended.key]
            self._carriers.over(ended.key)
            if not ended.later:
                self._places.pop(ended.key, None)
            if ended.error is not None:
                said = "blob %s of %s: %s; the rest comes over the broker"
                log.warning(said, ended.key[1][:12], ended.key[0], ended.error)
                same = coming.pull.manifest is ended.intake.manifest
                coming.pull.release(ended.intake.had if same else None, now_s)
            found.append((ended, ended.intake.moved))
        return found

    def step(self, now_s: float) -> float:
        """Do what is due; returns the time of the next step."""
        if not (self._coming or self._going or self._places):  # as where all blobs go over the broker
            return math.inf
        for key, coming in list(self._coming.items()):
            if now_s >= coming.until_s:
                seen = coming.intake.moved + coming.told
                if seen == coming.seen:
                    self._give_up(key, coming, f"nothing has come for {QUIET_S:g} s from where it was to be put")
                else:
                    coming.seen, coming.until_s = seen, now_s + QUIET_S
        for key, going in self._going.items():
            if not going.begun and self._carriers.free:
                going.begun, going.tell_s = True, now_s + TELL_S
                self._carriers.put(key, self._depot, going.ref, going.sources, going.add)
            elif now_s >= going.tell_s:
                going.tell_s = now_s + TELL_S
                if going.moved != going.told:
                    going.told = going.moved
                    self._publish(key[0], f"blob/{key[1]}/placed", Placed(sha256=key[1], moved=going.moved))
        until = [coming.until_s for coming in self._coming.values()] + [going.tell_s for going in self._going.values()]
        resting = [
            self._carriers.rests_until_s(sources) for key, sources in self._places.items() if key not in self._coming
        ]
        return min((each for each in until + resting if each > now_s), default=math.inf)

    def _give_up(self, key: Key, coming: _Coming, reason: str) -> None:
        coming.until_s = math.inf
        self._carriers.over(key)
        self._carriers.give_up(key, coming.intake, reason)

    def _publish_transfer_end(self, ended: Ended) -> None:
        """Publish that a carrier's transfer to the other side has ended, with its error if it failed."""
        going = self._going.pop(ended.key, None)
        if going is None:
            return
        sha256, error = ended.key[1], shorten_error(ended.error or "")
        if error:
            log.warning("blob %s is put nowhere: %s; it goes over the broker", sha256[:12], error)
        placed = Placed(sha256=sha256, moved=going.moved, source=ended.source, done=True, error=error)
        self._publish(ended.key[0], f"blob/{sha256}/placed", placed)
