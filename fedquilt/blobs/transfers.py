"""Transfers of blobs over a link, in both directions, for agent and coordinator.

`fedquilt.blobs.download` and `fedquilt.blobs.chunks` decide, and this module reads, writes and publishes.

An agent publishes "up" and a coordinator "dn". Each requests on `.../<own direction>/blob/get` and receives the
response under the peer's `.../blob/<sha256>/`. Chunks are sent unreliably, because lost chunks are requested again.
Requests and refusals are sent reliably. Uploads to the coordinator wait in an `UploadQueue`, for every transfer
backend. Only chunks are in memory, never a whole blob: at most `BUDGET_BYTES` queued for sending, and at most
`BUDGET_BYTES` requested and not written yet.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.direct_transfers import DirectTransfers, Key, TransferBackend
from fedquilt.blobs.download import Download
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.upload import HASH_S_PER_BYTE, ChunkSender, UploadQueue
from fedquilt.core import BlobRef, LinkError, LocationOffer, StoreError, UploadProgress, WireMessage
from fedquilt.transport.link import Link

_SUBTOPICS: Final = frozenset({"get", "manifest", "missing", "chunk", "place", "placed"})
_DRAIN_POLL_S: Final = 0.01  # interval of steps while chunks are queued
_OFFLINE_POLL_S: Final = 1.0
MAX_DOWNLOADS: Final = 16  # simultaneous downloads
_MAX_SMALL_DOWNLOADS: Final = 128  # simultaneous downloads of blobs with at most BUDGET_BYTES together


class Transfers:
    """Downloads of blobs from peers, and responses to peers that request blobs.

    The owner calls `handle_message` and `step`. `is_allowed(device, sha256)` permits the response to a request. Blobs
    of `background_bytes` and more are verified in a thread.
    """

    def __init__(
        self,
        link: Link,
        blob_store: BlobStore,
        topics: wire.Topics,
        direction: wire.Direction,
        is_allowed: Callable[[str, str], bool],
        backend: TransferBackend | None = None,
        background_bytes: float = math.inf,
    ) -> None:
        self._link, self._blob_store, self._topics = link, blob_store, topics
        self._direction: wire.Direction = direction
        # ONNX graphs on a device read their weights from files in the same folder, so each blob needs its own file.
        self._store = blob_store.store_small if direction == "dn" else blob_store.store_bytes
        self._is_allowed = is_allowed
        self._background_bytes = background_bytes
        self._requested: dict[Key, BlobRef] = {}
        self._keys_by_blob: dict[str, dict[Key, None]] = {}  # sha256 -> keys of `_requested`, in order
        self._waiting: dict[Key, None] = {}  # requested blobs that no download is active for, in order
        self.queue = UploadQueue()
        self._keys_in_queue: dict[str, dict[Key, None]] = {}  # device waiting in `queue` -> keys of its blobs, in order
        self._downloads: dict[Key, Download] = {}  # active and suspended downloads
        self._active_downloads: dict[Key, Download] = {}  # by time of the last request, oldest first
        self._finished: list[tuple[str, str, str | None]] = []
        self._backend = backend or TransferBackend()
        self._direct_transfers = DirectTransfers(self._backend, blob_store, self._publish)
        self._sender = ChunkSender(
            link, blob_store, topics, direction, is_allowed, self._direct_transfers, charge=self._charge
        )
        self._received_bytes: Counter[str] = Counter()  # device -> bytes of chunks, with repetitions
        self._charges_s: dict[str, float] = {}
        self._unrequested_senders: list[str] = []
        self._session = link.session

    def fds(self) -> Sequence[int]:
        return self._backend.fds()

    def request_blob(self, device: str, ref: BlobRef, *, use_queue: bool = False) -> None:
        """Fetch a blob from the peer. With `use_queue`, the fetch starts when the upload queue permits.

        `device` is the device at the other end of the link, or the agent's own device. `take_finished` reports the end.
        """
        key = (device, ref.sha256)
        if key in self._requested:
            return
        self._requested[key] = ref
        self._keys_by_blob.setdefault(ref.sha256, {})[key] = None
        if self._blob_store.has_blob(ref):
            self._end_transfer(key, None)
        elif use_queue and not self.queue.add_blob(device, ref.sha256, ref.size):
            self._keys_in_queue.setdefault(device, {})[key] = None
        else:
            self._waiting[key] = None

    def cancel(self, device: str, sha256: str) -> None:
        """Stop fetching a blob. Stored chunks are kept, and `take_finished` does not report the transfer."""
        self._forget_transfer((device, sha256))

    def yield_turn(self, device: str, now_s: float) -> None:
        """End a device's turn in the upload queue if other devices wait. Received chunks are kept."""
        if not self.queue or not self.queue.is_sending(device):
            return
        keys = [(device, sha256) for sha256 in self.queue.pending_blobs(device)]
        active = self._active_downloads
        if paused_keys := [key for key in keys if key in active and active[key].is_paused]:
            for key in paused_keys:
                self._direct_transfers.fall_back_to_link(key, "turn exceeded while other devices wait")
        else:
            self._suspend_blobs(keys, now_s)

    def take_finished(self) -> list[tuple[str, str, str | None]]:
        """Return (device, sha256, error or None) of the transfers that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def traffic_bytes(self, device: str, direction: wire.Direction) -> int:
        """Return the bytes of chunks sent to ("dn") or received from ("up") a device. Repeated chunks count."""
        return (self._sender.sent_bytes if direction == self._direction else self._received_bytes)[device]

    def take_charges(self) -> dict[str, float]:
        """Return the seconds of processing to charge to each device since the last call. Credits are negative."""
        charges, self._charges_s = self._charges_s, {}
        return charges

    def take_senders_of_unrequested_chunks(self) -> list[str]:
        devices, self._unrequested_senders = self._unrequested_senders, []
        return devices

    def _charge(self, device: str, seconds: float) -> None:
        self._charges_s[device] = self._charges_s.get(device, 0.0) + seconds

    def handle_message(self, route: wire.Route, payload: bytes, now_s: float) -> bool:
        """Process a message about a blob. Return False for other messages. Raise WireError if malformed."""
        if route.subtopic not in _SUBTOPICS:
            return False
        if route.direction == self._direction:
            return True  # the broker returns this side's own messages
        if route.subtopic == "get":
            self._sender.handle_request(route.device, wire.decode(payload, wire.ChunkRequest))
            return True
        key = (route.device, route.sha256)
        if route.subtopic == "chunk":
            self._handle_chunk(key, route.index, payload, now_s)
        elif route.subtopic == "manifest":
            self._handle_manifest(key, wire.decode(payload, wire.BlobManifest), now_s)
        elif route.subtopic == "place":
            self._handle_location_offer(key, wire.decode(payload, LocationOffer))
        elif route.subtopic == "placed":
            self._direct_transfers.handle_upload_progress(key, wire.decode(payload, UploadProgress), now_s)
        else:
            missing = wire.decode(payload, wire.MissingBlob)
            if download := self._downloads.get(key):
                download.handle_missing(missing.reason, now_s)
        return True

    def _handle_manifest(self, key: Key, manifest: wire.BlobManifest, now_s: float) -> None:
        download = self._downloads.get(key)
        if download is not None and download.handle_manifest(manifest, now_s) and not _is_single_chunk(manifest):
            try:
                download.set_stored_chunks(self._blob_store.open_part(manifest))
                self._charge(key[0], (manifest.size - download.missing_bytes) * HASH_S_PER_BYTE)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._finish_if_complete(key, download)

    def _handle_chunk(self, key: Key, index: int, payload: bytes, now_s: float) -> None:
        download = self._downloads.get(key)
        if download is None:
            return self._unrequested_senders.append(key[0])
        self._received_bytes[key[0]] += len(payload)
        bad_messages = download.bad_messages
        if not download.handle_chunk(index, payload, now_s):
            self._charge(key[0], len(payload) * (download.bad_messages - bad_messages) * HASH_S_PER_BYTE)
        elif download.manifest is not None:
            try:
                if _is_single_chunk(download.manifest):
                    self._store(payload, download.ref)
                else:
                    self._blob_store.write_part(key[1], chunks.chunk_extent(download.manifest, index)[0], payload)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._finish_if_complete(key, download)

    def _handle_location_offer(self, key: Key, offer: LocationOffer) -> None:
        if offer.direction == "get" and key in self._requested:
            self._direct_transfers.add_locations(key, offer)
        elif offer.direction == "put" and self._is_allowed(*key):
            ref = self._blob_store.find_ref(key[1])
            if ref is not None:
                self._direct_transfers.queue_upload(key, ref, offer)

    def _handle_direct_results(self, now_s: float) -> None:
        for result, received_bytes in self._direct_transfers.take_results(now_s):
            self._received_bytes[result.key[0]] += received_bytes
            if result.error is None or result.is_disk_error:
                self._end_transfer(result.key, result.error)
            else:
                self._finish_if_complete(result.key, self._downloads[result.key])

    def _finish_if_complete(self, key: Key, download: Download) -> None:
        if download.is_complete and download.manifest is not None:
            if download.ref.size >= self._background_bytes and not _is_single_chunk(download.manifest):
                return self._direct_transfers.start_completion(key, download)
            self._direct_transfers.cancel_download(key)
            try:
                if not _is_single_chunk(download.manifest):
                    self._blob_store.finish_part(download.ref)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._end_transfer(key, None)

    def _end_transfer(self, key: Key, error: str | None) -> None:
        ref = self._requested[key]
        if self._blob_store.has_blob(ref):
            error = None
        for other_key in list(self._keys_by_blob[key[1]]) if error is None else [key]:
            self._finished.append((*other_key, error))
            self._forget_transfer(other_key)

    def _forget_transfer(self, key: Key) -> None:
        self._direct_transfers.cancel_download(key)
        tables: tuple[dict[Key, Any], ...] = (self._requested, self._waiting, self._downloads, self._active_downloads)
        for table in tables:
            table.pop(key, None)
        self.queue.remove_blob(*key)
        if key in (queued_keys := self._keys_in_queue.get(key[0], {})):
            del queued_keys[key]
            if not queued_keys:
                del self._keys_in_queue[key[0]]
        keys = self._keys_by_blob.get(key[1], {})
        keys.pop(key, None)
        if not keys:
            self._keys_by_blob.pop(key[1], None)

    def step(self, now_s: float) -> float:
        """Send due requests and queued chunks, start and end transfers, and return the time of the next step."""
        self._handle_direct_results(now_s)
        due_s = [self._direct_transfers.step(now_s)]
        for device, sha256 in self._backend.take_ready_blobs() if self._link.connected else ():
            if self._is_allowed(device, sha256) and (ref := self._blob_store.find_ref(sha256)) is not None:
                self._direct_transfers.offer_locations(device, ref)
        if not self._requested and not self._sender:
            return due_s[0]
        if not self._link.connected:
            return min(now_s + _OFFLINE_POLL_S, *due_s)
        try:
            chunk_bytes = chunks.chunk_size_for(self._link.max_payload)
        except LinkError as error:
            for key in list(self._requested):
                self._end_transfer(key, str(error))
        else:
            self._start_downloads(chunk_bytes, now_s)
            for key, download in self._active_downloads.items():
                self._direct_transfers.start_download(key, download, now_s)
            while self._send_requests(now_s):
                self._start_downloads(chunk_bytes, now_s)
        self._sender.step()
        due_s += [download.due_s for download in self._active_downloads.values() if download.due_s > now_s]
        if self._sender:
            due_s.append(now_s + _DRAIN_POLL_S)
        return min(due_s, default=math.inf)

    def _start_downloads(self, chunk_bytes: int, now_s: float) -> None:
        if self._link.session != self._session:
            self._session = self._link.session
            for download in self._downloads.values():
                download.handle_reconnect(chunk_bytes, now_s)
        for device in self.queue.start_turns(now_s):
            self._waiting |= self._keys_in_queue.pop(device)
        if not self._waiting or len(self._active_downloads) >= _MAX_SMALL_DOWNLOADS:
            return
        active_blobs = {sha256 for _, sha256 in self._active_downloads}
        active_bytes = sum(download.ref.size for download in self._active_downloads.values())
        for key in list(itertools.islice(self._waiting, 4 * _MAX_SMALL_DOWNLOADS)):
            has_room = active_bytes + self._requested[key].size <= chunks.BUDGET_BYTES
            is_small = has_room and len(self._active_downloads) < _MAX_SMALL_DOWNLOADS
            if len(self._active_downloads) >= MAX_DOWNLOADS and not is_small:
                return
            if key[1] not in active_blobs:
                active_bytes += self._requested[key].size
                active_blobs.add(key[1])
                del self._waiting[key]
                download = self._downloads.get(key) or Download(self._requested[key], chunk_bytes, now_s)
                download.resume(now_s)
                self._downloads[key] = self._active_downloads[key] = download

    def _send_requests(self, now_s: float) -> bool:
        """Send due requests. Return whether a download has ended or was suspended, so that another may start."""
        outstanding_bytes, has_ended = self._outstanding_bytes, False
        for key, download in list(self._active_downloads.items()):
            if key not in self._active_downloads:
                continue  # suspended with another blob of its device
            bytes_before, backoff_before = download.outstanding_bytes, download.backoff
            min_bytes = 0 if outstanding_bytes else download.chunk_bytes
            available_bytes = max(chunks.BUDGET_BYTES - outstanding_bytes, min_bytes)
            requests = download.next_requests(now_s, available_bytes)
            if download.failure is not None:
                self._end_transfer(key, download.failure)
                has_ended = True
            elif download.backoff > backoff_before and (stalled_keys := self._blobs_to_suspend(key)):
                self._suspend_blobs(stalled_keys, now_s)
                outstanding_bytes, has_ended = self._outstanding_bytes, True
                continue
            else:
                for request in requests:
                    self._publish(key[0], "blob/get", request)
                if requests:
                    self._active_downloads[key] = self._active_downloads.pop(key)
            outstanding_bytes += download.outstanding_bytes - bytes_before
        return has_ended

    @property
    def _outstanding_bytes(self) -> int:
        return sum(download.outstanding_bytes for download in self._active_downloads.values())

    def _blobs_to_suspend(self, key: Key) -> list[Key]:
        """Return the downloads to suspend after the timeout of `key`, or [] if no other download waits."""
        if not self._waiting and not self.queue:
            return []
        if not self.queue.contains(*key):
            return [key]
        keys = [(key[0], sha256) for sha256 in self.queue.pending_blobs(key[0])]
        active_downloads = [self._active_downloads[other] for other in keys if other in self._active_downloads]
        return [] if any(download.is_paused for download in active_downloads) else keys

    def _suspend_blobs(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            if (download := self._active_downloads.pop(key, None)) is not None:
                download.suspend(now_s)
            self._waiting.pop(key, None)
        if self.queue.contains(*keys[0]):
            self.queue.move_to_end(keys[0][0], now_s)
            self._keys_in_queue[keys[0][0]] = dict.fromkeys(keys)
        else:
            self._waiting |= dict.fromkeys(keys)

    def _publish(self, device: str, subtopic: str, message: WireMessage) -> None:
        self._link.publish(self._topics.device_topic(device, self._direction, subtopic), wire.encode(message))


def _is_single_chunk(manifest: wire.BlobManifest) -> bool:
    return chunks.chunk_count(manifest) == 1
