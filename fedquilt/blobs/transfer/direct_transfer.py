"""Transfers of blobs outside the link, from the offer of a location to the result.

The coordinator offers locations (`wire.LocationOffer`), from which a device fetches a blob or to which the device
uploads one. Meanwhile the requests over the link are paused. If the transfer fails, the remaining chunks are requested
over the link. No call blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fedquilt.blobs import chunks
from fedquilt.blobs.storage.store import BlobStore
from fedquilt.blobs.transfer.backend import Key, TransferBackend, TransferResult
from fedquilt.blobs.transfer.blob_writer import BlobWriter
from fedquilt.blobs.transfer.download import Download
from fedquilt.core import BlobLocation, BlobRef, LocationOffer, UploadProgress, WireMessage, shorten_error

log = logging.getLogger("fedquilt.blobs.streaming")

QUIET_S: Final = 30.0  # longest pause of a device's upload, before its chunks are asked for over the link
TELL_S: Final = 5.0  # between two messages on the progress of putting a blob
_OFFERED_MOST: Final = 4096


@dataclass
class _DirectDownload:
    """Transfer of a blob from a location, or of an upload to a location by the device."""

    pull: Download
    intake: BlobWriter
    until_s: float = math.inf  # time by which further bytes have to arrive
    seen: int = 0  # bytes received at the latest step
    told: int = 0  # bytes sent, as the device reports


@dataclass
class _DirectUpload:
    """A blob that this device puts."""

    ref: BlobRef
    sources: tuple[BlobLocation, ...]
    begun: bool = False
    moved: int = 0
    tell_s: float = math.inf
    told: int = 0

    def add_bytes(self, size: int) -> None:
        self.moved += size


class DirectTransfers:
    """Transfers outside the link, of the coordinator or of a device.

    Args:
        carriers: The transfer backend. On the coordinator it defines the locations.
        depot: The blob store.
        publish: A function `publish(device, leaf, message)` that sends a message over the link.
    """

    def __init__(
        self, carriers: TransferBackend, depot: BlobStore, publish: Callable[[str, str, WireMessage], None]
    ) -> None:
        self._carriers, self._depot, self._publish = carriers, depot, publish
        self._places: dict[Key, tuple[BlobLocation, ...]] = {}  # where wanted blobs can be fetched
        self._asked: set[Key] = set()  # blobs that their devices were asked to put
        self._coming: dict[Key, _DirectDownload] = {}
        self._going: dict[Key, _DirectUpload] = {}
        self._offered: set[Key] = set()

    def fds(self) -> Sequence[int]:
        return self._carriers.fds()

    # -- who has the blob --

    def offer_locations(self, device: str, ref: BlobRef, *, again: bool = True) -> None:
        """Publish the locations of a blob to a device. Without `again`, only the first time."""
        if not again and (device, ref.sha256) in self._offered:
            return
        if len(self._offered) >= _OFFERED_MOST:
            self._offered.clear()
        self._offered.add((device, ref.sha256))
        if sources := self._carriers.download_locations(device, ref):
            self._publish(
                device, f"blob/{ref.sha256}/place", LocationOffer(sha256=ref.sha256, way="get", sources=sources)
            )

    def take_ready_blobs(self) -> list[Key]:
        return self._carriers.take_ready_blobs()

    def queue_upload(self, key: Key, ref: BlobRef, place: LocationOffer) -> None:
        if key not in self._going:
            self._going[key] = _DirectUpload(ref, place.sources)

    # -- who wants it --

    def add_locations(self, key: Key, place: LocationOffer) -> None:
        self._places[key] = place.sources

    def handle_upload_progress(self, key: Key, placed: UploadProgress, now_s: float) -> None:
        coming = self._coming.get(key)
        if coming is None or coming.until_s == math.inf:
            return
        if placed.error:
            self._abandon(key, coming, placed.error)
        elif not placed.done:
            coming.told = max(coming.told, placed.moved)
        elif sources := self._carriers.uploaded_locations(key[0], coming.intake.ref, placed.source):
            del self._coming[key]
            coming.intake.close()
            self._places[key] = sources
            coming.pull.resume_requests(None, now_s)

    def start_download(self, key: Key, pull: Download, now_s: float) -> None:
        """Start to fetch a blob from a location, if there is one, and pause its requests.

        On the coordinator, a device is offered a location for its upload instead.
        """
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
                self._publish(key[0], f"blob/{key[1]}/place", LocationOffer(sha256=key[1], way="put", sources=sources))

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

    # -- what has happened --

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
        """Do all due work and return the time of the next step."""
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
                    self._publish(key[0], f"blob/{key[1]}/placed", UploadProgress(sha256=key[1], moved=going.moved))
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
        """Publish that a carrier's transfer to the other side has ended, with its error if it failed."""
        going = self._going.pop(ended.key, None)
        if going is None:
            return
        sha256, error = ended.key[1], shorten_error(ended.error or "")
        if error:
            log.warning("blob %s is put nowhere: %s; it goes over the broker", sha256[:12], error)
        placed = UploadProgress(sha256=sha256, moved=going.moved, source=ended.source, done=True, error=error)
        self._publish(ended.key[0], f"blob/{sha256}/placed", placed)
