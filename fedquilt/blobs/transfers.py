"""Transfers of blobs over a link, in both directions, for both sides.

`fedquilt.blobs.download` and `fedquilt.blobs.chunks` decide, and this module reads, writes and publishes.

An agent publishes "up" and a coordinator "dn". Each requests on `.../<own direction>/blob/get` and gets the response
under the peer's `.../blob/<sha256>/`. Chunks are sent unreliably, because lost chunks are requested again. Requests
and refusals are sent reliably. Uploads in turn wait in an `UploadQueue`, for every transfer
backend. Only chunks are in memory, never a whole blob: at most `BUDGET_BYTES` queued for sending, and as much requested
and not written yet.
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
from fedquilt.blobs.upload import HASHED_BYTE_S, ChunkSender, UploadQueue
from fedquilt.core import BlobRef, LinkError, LocationOffer, StoreError, UploadProgress, WireMessage
from fedquilt.transport.link import Link

_LEAVES: Final = frozenset({"get", "manifest", "missing", "chunk", "place", "placed"})
_DRAIN_POLL_S: Final = 0.01  # interval between looks at a link with a full queue
_OFFLINE_POLL_S: Final = 1.0
DOWNLOADS_MOST: Final = 16  # at once
_MANY: Final = 128  # at once, of blobs that are small together


class Transfers:
    """Transfers of blobs: fetches wanted blobs and serves requests that are `allowed`, driven by `step`."""

    def __init__(
        self,
        link: Link,
        depot: BlobStore,
        topics: wire.Topics,
        direction: wire.Direction,
        allowed: Callable[[str, str], bool],
        carriers: TransferBackend | None = None,
        apart_bytes: float = math.inf,
    ) -> None:
        self._link, self._depot, self._topics = link, depot, topics
        self._direction: wire.Direction = direction
        # graphs on a device read their weights from files in the same folder, so a device needs one file for each blob
        self._store = depot.store_small if direction == "dn" else depot.store_bytes
        self._allowed = allowed
        self._apart_bytes = apart_bytes
        self._wanted: dict[Key, BlobRef] = {}
        self._askers: dict[str, dict[Key, None]] = {}  # sha256 -> the keys of `_wanted` with it, in order
        self._waiting: dict[Key, None] = {}  # in order
        self.queue = UploadQueue()  # of devices whose blobs come in turn
        self._held: dict[str, dict[Key, None]] = {}  # device that waits for its turn -> keys of these blobs, in order
        self._pulls: dict[Key, Download] = {}  # begun, some of them parked
        self._open: dict[Key, Download] = {}  # active, the longest without a request first
        self._done: list[tuple[str, str, str | None]] = []
        self._carriers = carriers or TransferBackend()
        self._streaming = DirectTransfers(self._carriers, depot, self._publish)
        self._sender = ChunkSender(link, depot, topics, direction, allowed, self._streaming, strain=self._charge)
        self._came_bytes: Counter[str] = Counter()  # device -> bytes of chunks, repetitions included
        self._strain_s: dict[str, float] = {}
        self._unasked: list[str] = []
        self._session = link.session

    def fds(self) -> Sequence[int]:
        return self._carriers.fds()

    def request_blob(self, device: str, ref: BlobRef, *, in_turn: bool = False) -> None:
        """Fetch a blob from a device, with `in_turn` only when the upload queue permits. An agent names itself."""
        key = (device, ref.sha256)
        if key in self._wanted:
            return
        self._wanted[key] = ref
        self._askers.setdefault(ref.sha256, {})[key] = None
        if self._depot.has_blob(ref):
            self._end_transfer(key, None)
        elif in_turn and not self.queue.add_blob(device, ref.sha256, ref.size):
            self._held.setdefault(device, {})[key] = None
        else:
            self._waiting[key] = None

    def cancel(self, device: str, sha256: str) -> None:
        """Stop fetching a blob. Chunks on disk are kept, and `take_finished` does not report the transfer."""
        self._forget_transfer((device, sha256))

    def yield_turn(self, device: str, now_s: float) -> None:
        """End a device's turn in the upload queue if other devices wait. Received chunks are kept."""
        if not self.queue or not self.queue.is_sending(device):
            return
        keys = [(device, sha256) for sha256 in self.queue.pending_blobs(device)]
        if held := [key for key in keys if key in self._open and self._open[key].held]:
            for key in held:
                self._streaming.fall_back_to_link(key, "it takes too long, and others wait for their turn")
        else:
            self._park_blobs(keys, now_s)

    def take_finished(self) -> list[tuple[str, str, str | None]]:
        """Return (device, sha256, error or None) of the transfers that ended since the last call."""
        done, self._done = self._done, []
        return done

    def traffic_bytes(self, device: str, direction: wire.Direction) -> int:
        """Return the bytes of chunks sent to ("dn") or received from ("up") a device, with repetitions."""
        return (self._sender.sent_bytes if direction == self._direction else self._came_bytes)[device]

    def take_charges(self) -> dict[str, float]:
        """Return the seconds of processing to charge to each device since the last call. Credits are negative."""
        strain, self._strain_s = self._strain_s, {}
        return strain

    def take_senders_of_unrequested_chunks(self) -> list[str]:
        unasked, self._unasked = self._unasked, []
        return unasked

    def _charge(self, device: str, seconds: float) -> None:
        self._strain_s[device] = self._strain_s.get(device, 0.0) + seconds

    def handle_message(self, route: wire.Route, payload: bytes, now_s: float) -> bool:
        """Process a message if it concerns a blob. Return whether it does, or raise WireError."""
        if route.subtopic not in _LEAVES:
            return False
        if route.direction == self._direction:
            return True  # an own message, returned
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
            self._streaming.handle_upload_progress(key, wire.decode(payload, UploadProgress), now_s)
        else:
            missing = wire.decode(payload, wire.MissingBlob)
            if pull := self._pulls.get(key):
                pull.handle_missing(missing.reason, now_s)
        return True

    def _handle_manifest(self, key: Key, manifest: wire.BlobManifest, now_s: float) -> None:
        pull = self._pulls.get(key)
        if pull is not None and pull.handle_manifest(manifest, now_s) and not _is_single_chunk(manifest):
            try:
                pull.set_stored_chunks(self._depot.open_part(manifest))
                self._charge(key[0], (manifest.size - pull.missing_bytes) * HASHED_BYTE_S)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._finish_if_complete(key, pull)

    def _handle_chunk(self, key: Key, index: int, payload: bytes, now_s: float) -> None:
        pull = self._pulls.get(key)
        if pull is None:
            return self._unasked.append(key[0])
        self._came_bytes[key[0]] += len(payload)
        bad = pull.bad
        if not pull.handle_chunk(index, payload, now_s):
            self._charge(key[0], len(payload) * (pull.bad - bad) * HASHED_BYTE_S)
        elif pull.manifest is not None:
            try:
                if _is_single_chunk(pull.manifest):
                    self._store(payload, pull.ref)
                else:
                    self._depot.write_part(key[1], chunks.chunk_extent(pull.manifest, index)[0], payload)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._finish_if_complete(key, pull)

    def _handle_location_offer(self, key: Key, place: LocationOffer) -> None:
        if place.direction == "get" and key in self._wanted:
            self._streaming.add_locations(key, place)
        elif place.direction == "put" and self._allowed(*key) and (ref := self._depot.find_ref(key[1])) is not None:
            self._streaming.queue_upload(key, ref, place)

    def _handle_direct_results(self, now_s: float) -> None:
        for ended, moved in self._streaming.take_results(now_s):
            self._came_bytes[ended.key[0]] += moved
            if ended.error is None or ended.disk:
                self._end_transfer(ended.key, ended.error)
            else:
                self._finish_if_complete(ended.key, self._pulls[ended.key])

    def _finish_if_complete(self, key: Key, pull: Download) -> None:
        if pull.is_complete and pull.manifest is not None:
            if pull.ref.size >= self._apart_bytes and not _is_single_chunk(pull.manifest):
                return self._streaming.start_completion(key, pull)
            self._streaming.cancel_download(key)
            try:
                if not _is_single_chunk(pull.manifest):
                    self._depot.finish_part(pull.ref)
            except StoreError as error:
                self._end_transfer(key, str(error))
            else:
                self._end_transfer(key, None)

    def _end_transfer(self, key: Key, error: str | None) -> None:
        ref = self._wanted[key]
        if self._depot.has_blob(ref):
            error = None
        for other in list(self._askers[key[1]]) if error is None else [key]:
            self._done.append((*other, error))
            self._forget_transfer(other)

    def _forget_transfer(self, key: Key) -> None:
        self._streaming.cancel_download(key)
        places: tuple[dict[Key, Any], ...] = (self._wanted, self._waiting, self._pulls, self._open)
        for place in places:
            place.pop(key, None)
        self.queue.remove_blob(*key)
        if key in (held := self._held.get(key[0], {})):
            del held[key]
            if not held:
                del self._held[key[0]]
        askers = self._askers.get(key[1], {})
        askers.pop(key, None)
        if not askers:
            self._askers.pop(key[1], None)

    def step(self, now_s: float) -> float:
        """Do all due work and return the time of the next step."""
        self._handle_direct_results(now_s)
        due_s = [self._streaming.step(now_s)]
        for device, sha256 in self._carriers.take_ready_blobs() if self._link.connected else ():
            if self._allowed(device, sha256) and (ref := self._depot.find_ref(sha256)) is not None:
                self._streaming.offer_locations(device, ref)
        if not self._wanted and not self._sender:
            return due_s[0]
        if not self._link.connected:
            return min(now_s + _OFFLINE_POLL_S, *due_s)
        try:
            chunk = chunks.chunk_size_for(self._link.max_payload)
        except LinkError as error:
            for key in list(self._wanted):
                self._end_transfer(key, str(error))
        else:
            self._start_downloads(chunk, now_s)
            for key, pull in self._open.items():
                self._streaming.start_download(key, pull, now_s)
            while self._send_requests(now_s):
                self._start_downloads(chunk, now_s)
        self._sender.step()
        due_s += [pull.due_s for pull in self._open.values() if pull.due_s > now_s]
        if self._sender:
            due_s.append(now_s + _DRAIN_POLL_S)
        return min(due_s, default=math.inf)

    def _start_downloads(self, chunk: int, now_s: float) -> None:
        if self._link.session != self._session:
            self._session = self._link.session
            for pull in self._pulls.values():
                pull.handle_reconnect(chunk, now_s)
        for device in self.queue.start_turns(now_s):
            self._waiting |= self._held.pop(device)
        if not self._waiting or len(self._open) >= _MANY:
            return
        under_way = {sha256 for _, sha256 in self._open}
        wanted_bytes = sum(pull.ref.size for pull in self._open.values())
        for key in list(itertools.islice(self._waiting, 4 * _MANY)):
            small = len(self._open) < _MANY and wanted_bytes + self._wanted[key].size <= chunks.BUDGET_BYTES
            if len(self._open) >= DOWNLOADS_MOST and not small:
                return
            if key[1] not in under_way:
                wanted_bytes += self._wanted[key].size
                under_way.add(key[1])
                del self._waiting[key]
                pull = self._pulls.get(key) or Download(self._wanted[key], chunk, now_s)
                pull.resume(now_s)
                self._pulls[key] = self._open[key] = pull

    def _send_requests(self, now_s: float) -> bool:
        """Send due requests. Return whether a download has ended or was suspended, so that others can start."""
        outstanding_bytes, left = self._outstanding_bytes, False
        for key, pull in list(self._open.items()):
            if key not in self._open:
                continue  # another blob of its device has stalled
            before_bytes, backoff = pull.outstanding_bytes, pull.backoff
            room_bytes = max(chunks.BUDGET_BYTES - outstanding_bytes, 0 if outstanding_bytes else pull.chunk)
            requests = pull.next_requests(now_s, room_bytes)
            if pull.failed is not None:
                self._end_transfer(key, pull.failed)
                left = True
            elif pull.backoff > backoff and (stalled := self._blobs_to_suspend(key)):
                self._park_blobs(stalled, now_s)
                outstanding_bytes, left = self._outstanding_bytes, True
                continue
            else:
                for request in requests:
                    self._publish(key[0], "blob/get", request)
                if requests:
                    self._open[key] = self._open.pop(key)
            outstanding_bytes += pull.outstanding_bytes - before_bytes
        return left

    @property
    def _outstanding_bytes(self) -> int:
        return sum(pull.outstanding_bytes for pull in self._open.values())

    def _blobs_to_suspend(self, key: Key) -> list[Key]:
        """Return the blobs to suspend with a stalled one, or none if no other blob waits."""
        if not self._waiting and not self.queue:
            return []
        if not self.queue.contains(*key):
            return [key]
        found = [(key[0], sha256) for sha256 in self.queue.pending_blobs(key[0])]
        return [] if any(each in self._open and self._open[each].held for each in found) else found

    def _park_blobs(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            if (pull := self._open.pop(key, None)) is not None:
                pull.suspend(now_s)
            self._waiting.pop(key, None)
        if self.queue.contains(*keys[0]):
            self.queue.move_to_end(keys[0][0], now_s)
            self._held[keys[0][0]] = dict.fromkeys(keys)
        else:
            self._waiting |= dict.fromkeys(keys)

    def _publish(self, device: str, leaf: str, message: WireMessage) -> None:
        self._link.publish(self._topics.device_topic(device, self._direction, leaf), wire.encode(message))


def _is_single_chunk(manifest: wire.BlobManifest) -> bool:
    return chunks.chunk_count(manifest) == 1
