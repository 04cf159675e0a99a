"""Receiving side of transfers: the protocol over the link, and the writer for transfer backends.

`Download` decides requests, verification and timeouts without I/O.

Timeouts follow TCP (RFC 6298): a smoothed round-trip time, doubled when nothing arrives. The window grows by one chunk
for each arrival and is halved when a chunk is overdue, so that a slow line is not flooded. A chunk is also requested
again when OVERTAKEN_LIMIT chunks that were requested later have arrived, as in fast retransmit of TCP (RFC 5681),
because a broker delivers in order.
"""

from __future__ import annotations

import hashlib
import math
import threading
from typing import Final

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import MANIFEST
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobRef, LinkError, Retry

MAX_WINDOW: Final = 8  # chunks in flight at once, for one blob
CHUNKS_PER_REQUEST: Final = 4  # chunks requested in one message
OVERTAKEN_LIMIT: Final = 3  # arrivals of later requested chunks after which a chunk counts as lost
STALL_TIMEOUT_S: Final = 300.0  # time without progress after which a download fails

_START_WINDOW: Final = 2
_INITIAL_TIMEOUT_S: Final = 2.0  # timeout before the first measured round trip
_MIN_TIMEOUT_S: Final = 0.5  # RFC 6298 recommends 1 s, and Linux uses 0.2 s
_MAX_TIMEOUT_S: Final = 30.0
_MAX_BAD_MESSAGES: Final = 20
_MAX_MANIFESTS: Final = 8  # each manifest has smaller chunks than the previous, and all stored bytes are hashed again
# A "missing" message fails the download only if repeated after this time: the first may answer an outdated request.
_MISSING_CONFIRMATION_S: Final = 1.0


class Download:
    """Download of one blob from one peer.

    The caller sends the messages of `next_requests`, passes on all arrivals, and writes a chunk if `handle_chunk`
    returns True, until `is_complete` is true or `failure` contains a reason.
    """

    def __init__(self, ref: BlobRef, chunk_bytes: int, now_s: float) -> None:
        self.ref = ref
        self.chunk_bytes = chunk_bytes
        self.stored_chunks = bytearray()  # one byte per chunk: 1 if the chunk is written
        self.failure: str | None = None
        self.bad_messages = 0
        self.backoff = 0  # timeouts since the last arrival
        self._missing_chunks = 0
        self._manifests = 0
        self._window = _START_WINDOW
        self._request_times: dict[int, float] = {}  # index -> time of the last request, in the order of requests
        self._overtaken_counts: dict[int, int] = {}  # index -> number of later requests with a response
        self._has_lost_request = False  # whether a request was overtaken since the last `next_requests`
        # index -> times of the first and the last request
        self._first_and_last_request_s: dict[int, tuple[float, float]] = {}
        self._srtt_s: float | None = None
        self._last_message_s = self._progress_s = now_s
        self._suspended_s: float | None = None
        self._bad_messages_in_a_row = 0
        self._is_reported_missing = False
        self._resume_requests_s = -math.inf
        self.is_paused = False  # whether a transfer backend fetches the blob instead
        self.manifest: wire.BlobManifest | None = chunks.single_chunk_manifest(ref, chunk_bytes)
        if self.manifest is not None:
            self.set_stored_chunks(bytes(1))

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None and self._missing_chunks == 0

    @property
    def missing_bytes(self) -> int:
        """Upper bound of the bytes that have not arrived."""
        return 0 if self.manifest is None else min(self._missing_chunks * self.manifest.chunk, self.manifest.size)

    @property
    def timeout_s(self) -> float:
        normal_s = _INITIAL_TIMEOUT_S if self._srtt_s is None else max(_MIN_TIMEOUT_S, 4 * self._srtt_s)
        return Retry(normal_s, _MAX_TIMEOUT_S).delay_s(self.backoff)

    @property
    def outstanding_bytes(self) -> int:
        return len(self._request_times) * self._largest_chunk_bytes

    @property
    def due_s(self) -> float:
        if self.is_paused:
            return math.inf
        if not self._request_times:
            return self._resume_requests_s
        return min(min(self._request_times.values()) + self.timeout_s, self._progress_s + STALL_TIMEOUT_S)

    def next_requests(self, now_s: float, available_bytes: float = math.inf) -> list[wire.ChunkRequest]:
        """Return the requests to send now, for at most `available_bytes` beside the outstanding requests."""
        if self.is_paused:
            return []
        has_overdue = self._drop_overdue_requests(now_s) or self._has_lost_request
        self._has_lost_request = False
        if self.failure is not None or self.is_complete:
            return []
        if now_s < self._resume_requests_s or available_bytes < self._largest_chunk_bytes:
            return []
        if self.manifest is None:
            return [self._make_request((), now_s)] if MANIFEST not in self._request_times else []
        free_chunks = int(min(self._window - len(self._request_times), available_bytes // self._largest_chunk_bytes))
        if self._request_times and not has_overdue and free_chunks < min(CHUNKS_PER_REQUEST, self._window // 2):
            return []  # requesting several chunks in one message halves the number of messages
        indices = self._missing_indices(free_chunks)
        return [
            self._make_request(indices[start : start + CHUNKS_PER_REQUEST], now_s)
            for start in range(0, len(indices), CHUNKS_PER_REQUEST)
        ]

    def _make_request(self, indices: tuple[int, ...], now_s: float) -> wire.ChunkRequest:
        for index in indices or (MANIFEST,):
            self._request_times[index] = now_s
            self._overtaken_counts.pop(index, None)
            self._first_and_last_request_s[index] = (self._first_and_last_request_s.get(index, (now_s,))[0], now_s)
        return wire.ChunkRequest(sha256=self.ref.sha256, chunk=self.chunk_bytes, indices=indices)

    def _missing_indices(self, limit: int) -> tuple[int, ...]:
        indices: list[int] = []
        index = self.stored_chunks.find(0)
        while index >= 0 and len(indices) < limit:
            if index not in self._request_times:
                indices.append(index)
            index = self.stored_chunks.find(0, index + 1)
        return tuple(indices)

    def _drop_overdue_requests(self, now_s: float) -> bool:
        if now_s >= self._progress_s + STALL_TIMEOUT_S:
            self.failure = f"nothing arrived for {STALL_TIMEOUT_S:.0f} s"
        timeout_s = self.timeout_s
        # Sums are compared, as in `due_s`. A difference could be rounded to less than the timeout, and never be due.
        overdue = [index for index, request_s in self._request_times.items() if now_s >= request_s + timeout_s]
        if overdue and now_s >= self._last_message_s + timeout_s:
            # Without any arrival, all chunks are lost or the line is slower than estimated.
            self._request_times.clear()
            self._window = 1
            self.backoff += 1
        elif overdue:
            self._window = max(1, self._window // 2)
        for index in overdue:
            self._request_times.pop(index, None)
        return bool(overdue)

    @property
    def _largest_chunk_bytes(self) -> int:
        return max(1, min(self.chunk_bytes, self.ref.size))

    def handle_manifest(self, manifest: wire.BlobManifest, now_s: float) -> bool:
        """Adopt a manifest. Return whether it is new and valid: the caller must then call `set_stored_chunks`."""
        self._record_arrival(MANIFEST, now_s)
        if self.manifest is not None and manifest.chunk >= self.manifest.chunk:
            return False
        describes_blob = (
            manifest.sha256 == self.ref.sha256 and manifest.size == self.ref.size and manifest.chunk <= self.chunk_bytes
        )
        if not describes_blob or len(manifest.digests) != 64 * chunks.chunk_count(manifest):
            self._record_bad_message("manifests that do not describe this blob")
            return False
        self._manifests += 1
        if self._manifests > _MAX_MANIFESTS:
            self.failure = f"the peer changed the chunk size more than {_MAX_MANIFESTS} times"
            return False
        self._record_progress(now_s)
        self.manifest, self.chunk_bytes = manifest, manifest.chunk
        self._clear_requests()
        self.set_stored_chunks(bytes(chunks.chunk_count(manifest)))
        return True

    def set_stored_chunks(self, stored_chunks: bytes | bytearray) -> None:
        """Set which chunks are on disk and verified: one byte per chunk, 1 if stored."""
        self.stored_chunks = bytearray(stored_chunks)
        self._missing_chunks = self.stored_chunks.count(0)

    def handle_chunk(self, index: int, payload: bytes, now_s: float) -> bool:
        """Record an arrived chunk. Return whether the caller must store it: it was missing and is valid."""
        if self.manifest is None or not 0 <= index < len(self.stored_chunks):
            return False
        self._drop_overtaken_requests(index)
        self._record_arrival(index, now_s)
        if self.stored_chunks[index]:
            return False
        if not chunks.is_valid_chunk(self.manifest, index, payload):
            self._record_bad_message("chunks that are damaged")
            return False
        self._record_progress(now_s)
        self._window = min(self._window + 1, MAX_WINDOW)
        self.stored_chunks[index] = 1
        self._missing_chunks -= 1
        return True

    def handle_missing(self, reason: str, now_s: float) -> None:
        """Pause requests after the peer reported the blob missing. A repeated report fails the download."""
        if now_s < self._resume_requests_s:
            return
        if self._is_reported_missing:
            self.failure = f"the peer cannot send the blob: {reason or 'no reason given'}"
        self._is_reported_missing = True
        self._resume_requests_s = now_s + _MISSING_CONFIRMATION_S
        self._request_times.clear()

    def _record_arrival(self, index: int, now_s: float) -> None:
        self._last_message_s = now_s
        self.backoff = 0
        self._request_times.pop(index, None)
        first_s, last_s = self._first_and_last_request_s.pop(index, (None, now_s))
        if first_s is not None and index != MANIFEST:  # a manifest is smaller than a chunk
            round_trip_s = now_s - last_s
            if self._srtt_s is None or round_trip_s < self._srtt_s / 2:
                round_trip_s = now_s - first_s  # an arrival this early is the response to an earlier request
            self._srtt_s = round_trip_s if self._srtt_s is None else self._srtt_s + (round_trip_s - self._srtt_s) / 8

    def _drop_overtaken_requests(self, index: int) -> None:
        if index not in self._request_times:
            return
        earlier_indices = []
        for earlier_index in self._request_times:
            if earlier_index == index:
                break
            earlier_indices.append(earlier_index)
        for earlier_index in earlier_indices:
            self._overtaken_counts[earlier_index] = self._overtaken_counts.get(earlier_index, 0) + 1
            if self._overtaken_counts[earlier_index] >= OVERTAKEN_LIMIT:
                del self._request_times[earlier_index], self._overtaken_counts[earlier_index]
                self._window = max(1, self._window // 2)
                self._has_lost_request = True

    def _record_progress(self, now_s: float) -> None:
        self._progress_s = now_s
        self._bad_messages_in_a_row = 0
        self._is_reported_missing = False

    def _record_bad_message(self, description: str) -> None:
        self.bad_messages += 1
        self._bad_messages_in_a_row += 1
        if self._bad_messages_in_a_row >= _MAX_BAD_MESSAGES:
            self.failure = f"the peer sent {self._bad_messages_in_a_row} {description} in a row"

    def _clear_requests(self) -> None:
        self._request_times.clear()
        self._first_and_last_request_s.clear()

    def handle_reconnect(self, chunk_bytes: int, now_s: float) -> None:
        """Drop outstanding requests after a reconnection, and the manifest if chunks must be smaller now."""
        self._clear_requests()
        self.backoff = 0
        self._window = _START_WINDOW
        self._last_message_s = self._progress_s = now_s
        if chunk_bytes < self.chunk_bytes or self.manifest is None:
            self.chunk_bytes, self.manifest = chunk_bytes, chunks.single_chunk_manifest(self.ref, chunk_bytes)

    def pause_requests(self) -> None:
        self.is_paused = True
        self._clear_requests()

    def resume_requests(self, stored_chunks: bytes | bytearray | None, now_s: float) -> None:
        """Request the missing chunks again. `stored_chunks` marks those on disk, or is None if unchanged."""
        self.is_paused = False
        if stored_chunks is not None:
            self.set_stored_chunks(stored_chunks)
        self.backoff, self._window = 0, _START_WINDOW
        self._last_message_s = now_s
        self._record_progress(now_s)

    def suspend(self, now_s: float) -> None:
        self._clear_requests()
        self._suspended_s = now_s

    def resume(self, now_s: float) -> None:
        if self._suspended_s is not None:
            self._last_message_s += now_s - self._suspended_s
            self._progress_s += now_s - self._suspended_s
            self._suspended_s = None


class BlobLocationError(LinkError):
    def __init__(self, sentence: str, *, can_retry: bool = False) -> None:
        super().__init__(sentence)
        self.can_retry = can_retry


class WriterClosedError(LinkError): ...


class ContentError(LinkError): ...


class BlobWriter:
    """Writer of the missing ranges of a blob to the blob's part file, for transfers outside the link.

    Another thread may close the writer. The sha256 of the blob is verified at the end, and its chunks only if the
    sha256 differs. With `to_end`, all bytes from the first missing chunk on are one range, even if later chunks are
    stored already.
    """

    def __init__(
        self,
        blob_store: BlobStore,
        manifest: wire.BlobManifest,
        stored_chunks: bytes | bytearray,
        *,
        to_end: bool = False,
    ) -> None:
        self.manifest = manifest
        self.ref = BlobRef(sha256=manifest.sha256, size=manifest.size)
        self.stored_chunks: bytes | bytearray = bytes(stored_chunks)
        self.written_bytes = 0
        self.offset = 0  # offset of the next byte to write
        self.is_finished = False  # whether the part was verified and renamed to the blob
        self._blob_store = blob_store
        self._lock = threading.Lock()
        self._is_open = True
        self._writer_id = 0
        self._ranges = _missing_ranges(manifest, self.stored_chunks, to_end)
        self._blob_hash = hashlib.sha256() if 1 not in self.stored_chunks else None
        self._skip_complete_ranges()

    def replace_writer(self) -> int:
        """Return the id for a new connection's writes. Earlier ids raise WriterClosedError from now on."""
        with self._lock:
            self._writer_id += 1
            return self._writer_id

    def next_range(self) -> tuple[int, int] | None:
        """Return the next range of bytes to fetch, (offset, end), or None if all are written."""
        return (self.offset, self._ranges[0][1]) if self._ranges else None

    def write(self, data: memoryview, writer_id: int) -> None:
        """Write the next bytes of the range from `next_range`. May raise WriterClosedError or StoreError."""
        with self._lock:
            self._require_current(writer_id)
            if not self._ranges or self.offset + len(data) > self._ranges[0][1]:
                raise WriterClosedError("more bytes arrived than were requested")
            self._blob_store.write_part(self.ref.sha256, self.offset, data)
            if self._blob_hash is not None:
                self._blob_hash.update(data)
            self.offset += len(data)
            self.written_bytes += len(data)
            self._skip_complete_ranges()

    def finish(self, writer_id: int) -> None:
        """Verify the part, rename it to the blob and close. May raise WriterClosedError or StoreError.

        If chunks do not match the manifest, `stored_chunks` marks the matching chunks, and ContentError is raised.
        """
        with self._lock:
            self._require_current(writer_id)
            self._is_open = False
            digest = None if self._blob_hash is None else self._blob_hash.hexdigest()
            if digest != self.ref.sha256:
                digest = None
                self.stored_chunks = self._blob_store.open_part(self.manifest)
                if mismatches := self.stored_chunks.count(0):
                    raise ContentError(f"{mismatches} of {len(self.stored_chunks)} chunks do not match the manifest")
            self._blob_store.finish_part(self.ref, digest)
            self.is_finished = True

    def finish_received(self) -> None:
        """Verify a part whose chunks have all arrived, rename it to the blob, and close the writer."""
        with self._lock:
            self._require_current(self._writer_id)
            self._is_open = False
            self._blob_store.finish_part(self.ref)
            self.is_finished = True

    def close_and_check(self) -> None:
        """Close the writer, and set `stored_chunks` to the chunks of the part that match the manifest."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self.stored_chunks = self._blob_store.open_part(self.manifest)

    def close(self) -> None:
        """Close the writer. No thread writes to the part after this call."""
        with self._lock:
            self._is_open = False

    def _require_current(self, writer_id: int) -> None:
        if not self._is_open or writer_id != self._writer_id:
            raise WriterClosedError("another transfer has replaced this one")

    def _skip_complete_ranges(self) -> None:
        while self._ranges and self.offset >= self._ranges[0][1]:
            self._ranges.pop(0)
        if self._ranges:
            self.offset = max(self.offset, self._ranges[0][0])


def _missing_ranges(
    manifest: wire.BlobManifest, stored_chunks: bytes | bytearray, to_end: bool
) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for index, is_stored in enumerate(stored_chunks):
        offset, size = chunks.chunk_extent(manifest, index)
        if is_stored:
            continue
        if to_end:
            return [(offset, manifest.size)]
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + size)
        else:
            ranges.append((offset, offset + size))
    return ranges
