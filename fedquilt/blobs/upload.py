"""Sending side of transfers: order of the devices' uploads, and requested chunks and manifests.

Uploads take disk space until they are processed. Devices therefore upload in order of arrival, within a limit on the
bytes of active and unprocessed uploads. A device whose transfer stalls moves to the end of the queue.
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

_MAX_REMEMBERED_BLOBS: Final = 4096
_MAX_REMEMBERED_CHUNKS: Final = 4096
HASH_S_PER_BYTE: Final = 2e-9  # estimated seconds to read and hash a byte
SMALL_CHUNK_CHARGE_S: Final = 200e-6  # charge for a chunk that is small or was sent before
CHUNK_CREDIT_S: Final = 500e-6  # credit for a larger chunk that is sent for the first time, as useful work
MIN_CREDITED_BYTES: Final = 16 * 1024  # smallest chunk with this credit
HASH_STEP_BYTES: Final = 8 << 20  # bytes hashed in one step, during which nothing else is read or sent
_MAX_MANIFEST_CHARACTERS: Final = 1 << 20  # digests of cached manifests: 16,000 chunks, or 4 GB of blobs
_MAX_QUEUED_CHUNKS: Final = 4 * wire.MAX_WINDOW  # chunks queued for one device; an honest device requests fewer
MIN_UPLOADING_DEVICES: Final = 2  # allowed beyond the byte limit, so that one uploads while an update is processed


class UploadQueue:
    def __init__(self) -> None:
        self._limit_bytes = 0.0
        self._unprocessed_devices = 0
        self._unprocessed_bytes = 0
        self._pending: dict[str, dict[str, int]] = {}  # device -> sha256 -> bytes of blobs to upload
        self._waiting_since_s: dict[str, float] = {}  # device -> start of waiting, in the order of turns
        self._new_devices: list[str] = []  # waiting devices that were added since the last `start_turns`
        self._uploading: dict[str, int] = {}  # device -> bytes of its turn
        self._uploading_bytes = 0
        self._waited_s: dict[str, float] = {}  # device -> seconds of waiting for its first turn
        self._finished_devices: set[str] = set()  # devices without pending blobs since the last `set_unprocessed`
        self._changes: dict[str, bool] = {}  # device -> whether the device waits, for devices that changed

    def __bool__(self) -> bool:
        return bool(self._waiting_since_s)

    def set_unprocessed(self, devices: int, unprocessed_bytes: int, limit_bytes: float) -> None:
        """Set the unprocessed uploads and the byte limit. End the turns of devices without pending blobs."""
        self._unprocessed_devices, self._unprocessed_bytes, self._limit_bytes = devices, unprocessed_bytes, limit_bytes
        for device in self._finished_devices - self._pending.keys():
            self._end_turn(device)
            self._waited_s.pop(device, None)
        self._finished_devices.clear()

    def add_blob(self, device: str, sha256: str, size: int) -> bool:
        """Add a blob that a device is to upload. Return whether the device's turn has already started."""
        self._pending.setdefault(device, {})[sha256] = size
        if device in self._uploading:
            added_bytes = max(sum(self._pending[device].values()) - self._uploading[device], 0)
            self._uploading[device] += added_bytes
            self._uploading_bytes += added_bytes
            return True
        if device not in self._waiting_since_s:
            self._waiting_since_s[device] = math.inf
            self._new_devices.append(device)
        return False

    def contains(self, device: str, sha256: str) -> bool:
        return sha256 in self._pending.get(device, ())

    def pending_blobs(self, device: str) -> list[str]:
        return list(self._pending.get(device, ()))

    def remove_blob(self, device: str, sha256: str) -> None:
        pending = self._pending.get(device, {})
        if pending.pop(sha256, None) is not None and not pending:
            del self._pending[device]
            self._waiting_since_s.pop(device, None)
            self._changes.pop(device, None)
            self._finished_devices.add(device)

    def start_turns(self, now_s: float) -> list[str]:
        """Start the turns of waiting devices within the limit. Return these devices."""
        started_devices = []
        while self._waiting_since_s and self._fits(
            size := sum(self._pending[next(iter(self._waiting_since_s))].values())
        ):
            device = next(iter(self._waiting_since_s))
            since_s = self._waiting_since_s.pop(device)
            self._waited_s.setdefault(device, max(now_s - since_s, 0.0))
            self._uploading[device] = size
            self._uploading_bytes += size
            if since_s < math.inf:
                self._changes[device] = False
            started_devices.append(device)
        for device in self._new_devices:
            if self._waiting_since_s.get(device) == math.inf:
                self._waiting_since_s[device], self._changes[device] = now_s, True
        self._new_devices.clear()
        return started_devices

    def is_sending(self, device: str) -> bool:
        return device in self._uploading and device in self._pending

    def move_to_end(self, device: str, now_s: float) -> None:
        self._end_turn(device)
        self._waiting_since_s[device], self._changes[device] = now_s, True

    def waiting_s(self, device: str) -> float:
        """Return the seconds a device waited for its first turn, or infinity while it waits."""
        return self._waited_s.get(device, math.inf if device in self._waiting_since_s else 0.0)

    def take_changes(self) -> dict[str, bool]:
        """Return the devices that began to wait (True) or to send (False) since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def _fits(self, size: int) -> bool:
        is_below_minimum = self._unprocessed_devices + len(self._uploading) < MIN_UPLOADING_DEVICES
        return is_below_minimum or self._unprocessed_bytes + self._uploading_bytes + size <= self._limit_bytes

    def _end_turn(self, device: str) -> None:
        self._uploading_bytes -= self._uploading.pop(device, 0)


@dataclass(frozen=True)
class OutgoingChunk:
    device: str
    sha256: str
    chunk_bytes: int  # chunk size for this device
    index: int


class OutgoingChunkQueue:
    def __init__(self) -> None:
        self._queues: dict[str, dict[OutgoingChunk, None]] = {}  # device -> chunks, both in order

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, chunk: OutgoingChunk) -> None:
        queue = self._queues.setdefault(chunk.device, {})
        if len(queue) < _MAX_QUEUED_CHUNKS:
            queue[chunk] = None

    def take_next(self, backlog_bytes: int) -> OutgoingChunk | None:
        """Return the next chunk to send, devices in turn, or None if no chunk is queued or the link is busy."""
        if not self._queues:
            return None
        device, queue = next(iter(self._queues.items()))
        chunk = next(iter(queue))
        if backlog_bytes > 0 and backlog_bytes + chunk.chunk_bytes > chunks.BUDGET_BYTES:
            return None
        del self._queues[device], queue[chunk]
        if queue:
            self._queues[device] = queue  # moves the device to the end
        return chunk


class ChunkSender:
    """Sender of requested chunks and manifests, at the speed of the link.

    `charge` is called with a device and the seconds of work that its requests have caused. Credits are negative.
    """

    def __init__(
        self,
        link: Link,
        blob_store: BlobStore,
        topics: wire.Topics,
        direction: wire.Direction,
        is_allowed: Callable[[str, str], bool],
        direct_transfers: DirectTransfers,
        charge: Callable[[str, float], None],
    ) -> None:
        self._link, self._blob_store, self._topics, self._direct_transfers = link, blob_store, topics, direct_transfers
        self._direction: wire.Direction = direction
        self._is_allowed, self._charge = is_allowed, charge
        self.sent_bytes: Counter[str] = Counter()  # device -> bytes of chunks, with repetitions
        self._queue = OutgoingChunkQueue()
        # (sha256, chunk size) -> manifest, least recently used first
        self._manifests: dict[tuple[str, int], wire.BlobManifest] = {}
        self._sent_chunks: set[OutgoingChunk] = set()
        self._latest_chunk: tuple[tuple[str, int, int], bytes] = ("", 0, 0), b""  # (sha256, chunk size, index), bytes
        self._hashed_blobs: set[str] = set()  # sha256 of blobs that were hashed once, which is not charged
        # (sha256, chunk size) -> (device to charge, builder)
        self._manifest_builders: dict[tuple[str, int], tuple[str, ManifestBuilder]] = {}
        # sha256 of a blob whose manifest is being built -> device -> latest request
        self._waiting: dict[str, dict[str, wire.ChunkRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue) or bool(self._manifest_builders)

    def handle_request(self, device: str, request: wire.ChunkRequest) -> None:
        try:
            manifest = self._find_or_build_manifest(device, request.sha256, request.chunk)
        except FedquiltError as error:
            return self._publish_missing(device, request.sha256, str(error))
        if manifest is None:
            self._waiting.setdefault(request.sha256, {})[device] = request
            return None
        if chunks.chunk_count(manifest) > 1:
            ref = BlobRef(sha256=request.sha256, size=manifest.size)
            self._direct_transfers.offer_locations(device, ref, repeat=not request.indices)
        if request.indices and manifest.chunk == request.chunk:
            for index in request.indices:
                if index < chunks.chunk_count(manifest):
                    self._queue.add(OutgoingChunk(device, request.sha256, manifest.chunk, index))
        else:  # chunks also become smaller if the broker's packet limit has changed
            self._queue.add(OutgoingChunk(device, request.sha256, manifest.chunk, MANIFEST))
        return None

    def _find_or_build_manifest(self, device: str, sha256: str, requested_bytes: int) -> wire.BlobManifest | None:
        """Return the manifest, or None while it is built. Raise StoreError if missing or not permitted."""
        if not self._is_allowed(device, sha256):
            raise StoreError(f"blob {sha256[:12]} is not for {device} at this time")
        ref = self._blob_store.find_ref(sha256)
        if ref is None:
            raise StoreError(f"blob {sha256[:12]} is no longer stored")
        chunk_bytes = chunks.negotiate_chunk_size(chunks.chunk_size_for(self._link.max_payload), requested_bytes)
        key = sha256, chunk_bytes
        if key not in self._manifests and key not in self._manifest_builders:
            read = partial(self._blob_store.read_range, sha256)
            self._manifest_builders[key] = device, ManifestBuilder(ref, chunk_bytes, read)
            self._continue_building(key)
        if key in self._manifests:
            self._manifests[key] = self._manifests.pop(key)  # now the most recently used
        return self._manifests.get(key)

    def _continue_building(self, key: tuple[str, int]) -> bool:
        device, builder = self._manifest_builders[key]
        try:
            manifest = builder.hash_chunks(HASH_STEP_BYTES)
        except StoreError as error:
            del self._manifest_builders[key]
            if isinstance(error, chunks.DamagedBlobError):
                self._blob_store.discard_damaged(key[0])
            raise
        if manifest is None:
            return False
        del self._manifest_builders[key]
        self._charge(device, manifest.size * HASH_S_PER_BYTE if key[0] in self._hashed_blobs else 0.0)
        if len(self._hashed_blobs) >= _MAX_REMEMBERED_BLOBS:
            self._hashed_blobs.clear()
        self._hashed_blobs.add(key[0])
        while self._manifests and sum(len(m.digests) for m in self._manifests.values()) > _MAX_MANIFEST_CHARACTERS:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[key] = manifest
        return True

    def step(self) -> None:
        if self._manifest_builders:
            key = next(iter(self._manifest_builders))
            try:
                is_ended, reason = self._continue_building(key), ""
            except StoreError as error:
                is_ended, reason = True, str(error)
            for device, request in self._waiting.pop(key[0], {}).items() if is_ended else ():
                if reason:
                    self._publish_missing(device, request.sha256, reason)
                else:
                    self.handle_request(device, request)
        while (chunk := self._queue.take_next(self._link.backlog)) is not None:
            self._send_chunk(chunk)

    def _send_chunk(self, chunk: OutgoingChunk) -> None:
        device, sha256, index = chunk.device, chunk.sha256, chunk.index
        try:
            manifest = self._find_or_build_manifest(device, sha256, chunk.chunk_bytes)
            if manifest is None:  # the manifest was removed from the cache and is built again
                indices = () if index == MANIFEST else (index,)
                self.handle_request(device, wire.ChunkRequest(sha256=sha256, chunk=chunk.chunk_bytes, indices=indices))
            elif index == MANIFEST:
                self._publish(device, f"blob/{sha256}/manifest", manifest)
            elif manifest.chunk == chunk.chunk_bytes:
                # Many devices often request the same chunk in succession.
                if self._latest_chunk[0] != (sha256, chunk.chunk_bytes, index):
                    payload = self._blob_store.read_range(sha256, *chunks.chunk_extent(manifest, index))
                    self._latest_chunk = (sha256, chunk.chunk_bytes, index), payload
                payload = self._latest_chunk[1]
                self._charge_and_verify_chunk(chunk, manifest, payload)
                topic = self._topics.chunk_topic(device, self._direction, sha256, index)
                self._link.publish(topic, payload, reliable=False)
                self.sent_bytes[device] += len(payload)
        except FedquiltError as error:
            self._publish_missing(device, sha256, str(error))

    def _charge_and_verify_chunk(self, chunk: OutgoingChunk, manifest: wire.BlobManifest, payload: bytes) -> None:
        # Only chunks requested again are hashed: hashing each chunk for each device takes half a millisecond.
        if chunk not in self._sent_chunks:
            if len(self._sent_chunks) >= _MAX_REMEMBERED_CHUNKS:
                self._sent_chunks.clear()
            self._sent_chunks.add(chunk)
            charge_s = SMALL_CHUNK_CHARGE_S if len(payload) < MIN_CREDITED_BYTES else -CHUNK_CREDIT_S
            return self._charge(chunk.device, charge_s)
        self._charge(chunk.device, SMALL_CHUNK_CHARGE_S + len(payload) * HASH_S_PER_BYTE)
        if not chunks.is_valid_chunk(manifest, chunk.index, payload):
            self._manifests.pop((chunk.sha256, chunk.chunk_bytes), None)
            self._latest_chunk = ("", 0, 0), b""
            self._blob_store.discard_damaged(chunk.sha256)
            raise chunks.DamagedBlobError(f"blob {chunk.sha256[:12]} is damaged on the disk: store the blob again")

    def _publish_missing(self, device: str, sha256: str, reason: str) -> None:
        log.info("blob %s is not sent to %s: %s", sha256[:12], device, reason)
        self._publish(device, f"blob/{sha256}/missing", wire.MissingBlob(sha256=sha256, reason=shorten_error(reason)))

    def _publish(self, device: str, subtopic: str, message: WireMessage) -> None:
        self._link.publish(self._topics.device_topic(device, self._direction, subtopic), wire.encode(message))
