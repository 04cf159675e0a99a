"""Sending side of transfers: order of the devices' uploads, and sending of requested chunks and manifests.

Uploads take disk space until they are processed. So they are served in order of arrival, within a limit on the bytes
that are being sent or not processed yet. A device whose transfer stalls goes to the end.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import MANIFEST, ManifestBuilder
from fedquilt.blobs.direct_transfers import DirectTransfers
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobRef, FedquiltError, StoreError, WireMessage, shorten_error
from fedquilt.transport.link import Link

log = logging.getLogger("fedquilt.blobs.upload")

_CUT_MOST: Final = 4096  # blobs of which it is remembered that they have been cut
_SENT_MOST: Final = 4096  # chunks of which it is remembered that they have been sent
HASHED_BYTE_S: Final = 2e-9  # of work, as estimated, for each byte that a peer makes this side read and hash
SENT_S: Final = 200e-6  # for a chunk that is small, or was sent before
PAID_S: Final = 500e-6  # credit for a larger chunk that is sent for the first time, as useful work
PAYING_BYTES: Final = 16 * 1024  # smallest chunk with this credit
CUT_BYTES: Final = 8 << 20  # that are cut at once: nothing else is read or sent meanwhile
_DIGESTS_MOST: Final = 1 << 20  # characters of manifests kept: 16,000 chunks, 4 GB of blobs
_QUEUED_MOST: Final = 4 * wire.MAX_WINDOW  # chunks queued for one device; an honest one requests fewer
LEAST: Final = 2  # devices whose turn it may be, whatever the bytes: one sends while another's is worked on


class UploadQueue:
    """Queue of devices that wait to upload, and devices that are uploading."""

    def __init__(self) -> None:
        self._most_bytes, self._here, self._here_bytes = 0.0, 0, 0
        self._wanted: dict[str, dict[str, int]] = {}  # device -> sha256 -> bytes, of what is to come
        self._waits: dict[str, float] = {}  # device -> since when, the first to send first
        self._came: list[str] = []  # those of them that came since the last look
        self._sends: dict[str, int] = {}  # device -> bytes
        self._sends_bytes = 0
        self._held_s: dict[str, float] = {}  # device -> seconds that it waited for its first turn
        self._left: set[str] = set()  # devices of which nothing is to come, since the last `set_unprocessed`
        self._news: dict[str, bool] = {}  # device -> whether it waits, as far as that is another thing than before

    def __bool__(self) -> bool:
        return bool(self._waits)

    def set_unprocessed(self, here: int, here_bytes: int, most_bytes: float) -> None:
        """Set the devices and bytes of uploads stored and not processed yet, and the limit on bytes."""
        self._here, self._here_bytes, self._most_bytes = here, here_bytes, most_bytes
        for device in self._left - self._wanted.keys():
            self._end_turn(device)
            self._held_s.pop(device, None)
        self._left.clear()

    def add_blob(self, device: str, sha256: str, size: int) -> bool:
        """Add a blob that a device is to upload. Return whether the device's turn has begun already."""
        self._wanted.setdefault(device, {})[sha256] = size
        if device in self._sends:
            more = max(sum(self._wanted[device].values()) - self._sends[device], 0)
            self._sends[device] += more
            self._sends_bytes += more
            return True
        if device not in self._waits:
            self._waits[device] = math.inf
            self._came.append(device)
        return False

    def contains(self, device: str, sha256: str) -> bool:
        return sha256 in self._wanted.get(device, ())

    def pending_blobs(self, device: str) -> list[str]:
        return list(self._wanted.get(device, ()))

    def remove_blob(self, device: str, sha256: str) -> None:
        wanted = self._wanted.get(device, {})
        if wanted.pop(sha256, None) is not None and not wanted:
            del self._wanted[device]
            self._waits.pop(device, None)
            self._news.pop(device, None)
            self._left.add(device)

    def start_turns(self, now_s: float) -> list[str]:
        """Start the turns of waiting devices within the limit. Return these devices."""
        begun = []
        while self._waits and self._fits(size := sum(self._wanted[next(iter(self._waits))].values())):
            device = next(iter(self._waits))
            since_s = self._waits.pop(device)
            self._held_s.setdefault(device, max(now_s - since_s, 0.0))
            self._sends[device] = size
            self._sends_bytes += size
            if since_s < math.inf:
                self._news[device] = False
            begun.append(device)
        for device in self._came:
            if self._waits.get(device) == math.inf:
                self._waits[device], self._news[device] = now_s, True
        self._came.clear()
        return begun

    def is_sending(self, device: str) -> bool:
        return device in self._sends and device in self._wanted

    def move_to_end(self, device: str, now_s: float) -> None:
        self._end_turn(device)
        self._waits[device], self._news[device] = now_s, True

    def waiting_s(self, device: str) -> float:
        """Return the seconds a device waited for its first turn, or infinity while it waits."""
        return self._held_s.get(device, math.inf if device in self._waits else 0.0)

    def take_changes(self) -> dict[str, bool]:
        """Return the devices that began to wait (True) or to send (False) since the last call."""
        news, self._news = self._news, {}
        return news

    def _fits(self, size: int) -> bool:
        few = self._here + len(self._sends) < LEAST
        return few or self._here_bytes + self._sends_bytes + size <= self._most_bytes

    def _end_turn(self, device: str) -> None:
        self._sends_bytes -= self._sends.pop(device, 0)


@dataclass(frozen=True)
class OutgoingChunk:
    device: str
    sha256: str
    chunk: int  # bytes of a chunk: how the blob is cut for this device
    index: int


class OutgoingChunkQueue:
    def __init__(self) -> None:
        self._queues: dict[str, dict[OutgoingChunk, None]] = {}  # device -> items, both in order

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, item: OutgoingChunk) -> None:
        queue = self._queues.setdefault(item.device, {})
        if len(queue) < _QUEUED_MOST:
            queue[item] = None

    def take_next(self, backlog_bytes: int) -> OutgoingChunk | None:
        """Return the next chunk to send, or None if the queue is empty or the link is busy."""
        if not self._queues:
            return None
        device, queue = next(iter(self._queues.items()))
        item = next(iter(queue))
        if backlog_bytes > 0 and backlog_bytes + item.chunk > chunks.BUDGET_BYTES:
            return None
        del self._queues[device], queue[item]
        if queue:
            self._queues[device] = queue  # at the end: the others first
        return item


class ChunkSender:
    """Sender of requested chunks and manifests, at the speed of the link. `strain` charges seconds to a device."""

    def __init__(
        self,
        link: Link,
        depot: BlobStore,
        topics: wire.Topics,
        direction: wire.Direction,
        allowed: Callable[[str, str], bool],
        streaming: DirectTransfers,
        strain: Callable[[str, float], None],
    ) -> None:
        self._link, self._depot, self._topics, self._streaming = link, depot, topics, streaming
        self._direction: wire.Direction = direction
        self._allowed, self._strain = allowed, strain
        self.sent_bytes: Counter[str] = Counter()  # device -> bytes of chunks, repetitions included
        self._serve = OutgoingChunkQueue()
        self._manifests: dict[tuple[str, int], wire.BlobManifest] = {}  # the latest ones
        self._sent: set[OutgoingChunk] = set()
        self._latest: tuple[tuple[str, int, int], bytes] = ("", 0, 0), b""  # chunk sent last, by blob, cut and index
        self._cut: set[str] = set()  # sha256 of blobs that have been cut once, for whoever asked first
        self._cutting: dict[
            tuple[str, int], tuple[str, ManifestBuilder]
        ] = {}  # by blob and chunk: for whom, and how far
        self._waiting: dict[
            str, dict[str, wire.ChunkRequest]
        ] = {}  # blob that is being cut -> device -> its latest request

    def __bool__(self) -> bool:
        return bool(self._serve) or bool(self._cutting)

    def handle_request(self, device: str, get: wire.ChunkRequest) -> None:
        try:
            manifest = self._find_or_build_manifest(device, get.sha256, get.chunk)
        except FedquiltError as error:
            return self._publish_missing(device, get.sha256, str(error))
        if manifest is None:
            self._waiting.setdefault(get.sha256, {})[device] = get
            return None
        if chunks.chunk_count(manifest) > 1:
            self._streaming.offer_locations(
                device, BlobRef(sha256=get.sha256, size=manifest.size), again=not get.indices
            )
        if get.indices and manifest.chunk == get.chunk:
            for index in get.indices:
                if index < chunks.chunk_count(manifest):
                    self._serve.add(OutgoingChunk(device, get.sha256, manifest.chunk, index))
        else:  # also when our packets have become smaller since the manifest was sent
            self._serve.add(OutgoingChunk(device, get.sha256, manifest.chunk, MANIFEST))
        return None

    def _find_or_build_manifest(self, device: str, sha256: str, asked: int) -> wire.BlobManifest | None:
        """Return the manifest, or None while it is built. Raise StoreError for a missing or forbidden blob."""
        if not self._allowed(device, sha256):
            raise StoreError(f"blob {sha256[:12]} is not offered to {device} now")
        ref = self._depot.find_ref(sha256)
        if ref is None:
            raise StoreError(f"blob {sha256[:12]} is not here any more")
        chunk = chunks.negotiate_chunk_size(chunks.chunk_size_for(self._link.max_payload), asked)
        key = sha256, chunk
        if key not in self._manifests and key not in self._cutting:
            read = partial(self._depot.read_range, sha256)
            self._cutting[key] = device, ManifestBuilder(ref, chunk, read)
            self._continue_building(key)
        if key in self._manifests:
            self._manifests[key] = self._manifests.pop(key)  # as the latest
        return self._manifests.get(key)

    def _continue_building(self, key: tuple[str, int]) -> bool:
        device, cutting = self._cutting[key]
        try:
            manifest = cutting.hash_chunks(CUT_BYTES)
        except StoreError as error:
            del self._cutting[key]
            if isinstance(error, chunks.DamagedBlobError):
                self._depot.discard_damaged(key[0])
            raise
        if manifest is None:
            return False
        del self._cutting[key]
        self._strain(device, manifest.size * (key[0] in self._cut) * HASHED_BYTE_S)
        if len(self._cut) >= _CUT_MOST:
            self._cut.clear()
        self._cut.add(key[0])
        while self._manifests and sum(len(m.digests) for m in self._manifests.values()) > _DIGESTS_MOST:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[key] = manifest
        return True

    def step(self) -> None:
        if self._cutting:
            key = next(iter(self._cutting))
            try:
                ended, reason = self._continue_building(key), ""
            except StoreError as error:
                ended, reason = True, str(error)
            for device, get in self._waiting.pop(key[0], {}).items() if ended else ():
                self._publish_missing(device, get.sha256, reason) if reason else self.handle_request(device, get)
        while (item := self._serve.take_next(self._link.backlog)) is not None:
            self._send_item(item)

    def _send_item(self, item: OutgoingChunk) -> None:
        device, sha256, index = item.device, item.sha256, item.index
        try:
            manifest = self._find_or_build_manifest(device, sha256, item.chunk)
            if manifest is None:  # it was forgotten, and is being cut anew
                indices = () if index == MANIFEST else (index,)
                self.handle_request(device, wire.ChunkRequest(sha256=sha256, chunk=item.chunk, indices=indices))
            elif index == MANIFEST:
                self._publish(device, f"blob/{sha256}/manifest", manifest)
            elif manifest.chunk == item.chunk:
                if self._latest[0] != (sha256, item.chunk, index):  # the same for many devices, one after the other
                    payload = self._depot.read_range(sha256, *chunks.chunk_extent(manifest, index))
                    self._latest = (sha256, item.chunk, index), payload
                payload = self._latest[1]
                self._charge_and_verify_resent_chunk(item, manifest, payload)
                topic = self._topics.chunk_topic(device, self._direction, sha256, index)
                self._link.publish(topic, payload, reliable=False)
                self.sent_bytes[device] += len(payload)
        except FedquiltError as error:
            self._publish_missing(device, sha256, str(error))

    def _charge_and_verify_resent_chunk(self, item: OutgoingChunk, manifest: wire.BlobManifest, payload: bytes) -> None:
        # Only chunks requested again are hashed: hashing each chunk for each device takes half a millisecond.
        if item not in self._sent:
            if len(self._sent) >= _SENT_MOST:
                self._sent.clear()
            self._sent.add(item)
            return self._strain(item.device, SENT_S if len(payload) < PAYING_BYTES else -PAID_S)
        self._strain(item.device, SENT_S + len(payload) * HASHED_BYTE_S)
        if not chunks.is_valid_chunk(manifest, item.index, payload):
            self._manifests.pop((item.sha256, item.chunk), None)
            self._latest = ("", 0, 0), b""
            self._depot.discard_damaged(item.sha256)
            raise chunks.DamagedBlobError(f"blob {item.sha256[:12]} is damaged on disk: it has to be stored again")

    def _publish_missing(self, device: str, sha256: str, reason: str) -> None:
        log.info("%s is not sent blob %s: %s", device, sha256[:12], reason)
        self._publish(device, f"blob/{sha256}/missing", wire.MissingBlob(sha256=sha256, reason=shorten_error(reason)))

    def _publish(self, device: str, leaf: str, message: WireMessage) -> None:
        self._link.publish(self._topics.device_topic(device, self._direction, leaf), wire.encode(message))
