"""Receiving side of transfers: the protocol with one peer over the link, and the writer for transfer backends.

`Download` decides requests, verification and timeouts without I/O.

Timeouts follow TCP (RFC 6298): a smoothed round-trip time, doubled when nothing arrives. The window grows by one
chunk for each arrival and is halved when a chunk is overdue. So a slow line is not flooded. A chunk is also requested
again when OVERTAKEN chunks that were requested later have arrived, as in fast retransmit of TCP (RFC 5681), because
a broker delivers in order.
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

WINDOW: Final = 8  # chunks in flight at once, for one blob
BATCH: Final = 4  # chunks requested in one message
OVERTAKEN: Final = 3  # arrivals of chunks requested later, after which one counts as lost
PATIENCE_S: Final = 300.0  # without progress, after which a download fails

_START_WINDOW: Final = 2
_TIMEOUT_FIRST_S: Final = 2.0  # before the line's round-trip time is known
_TIMEOUT_LEAST_S: Final = 0.5  # RFC 6298 asks for 1 s and Linux takes 0.2 s; the last chunk, or a peer that was away
_TIMEOUT_MOST_S: Final = 30.0
_BAD_IN_A_ROW: Final = 20
_CUTS_MOST: Final = 8  # manifests, each of smaller chunks than the one before: all that is here is hashed for each
_DOUBT_S: Final = 1.0  # a "missing" counts when repeated after this time: it may be a late answer to an old Get


class Download:
    """Download of one blob from one peer.

    The caller sends the messages of `next_requests`, passes on all arrivals, and writes a chunk if `handle_chunk`
    returns True, until `is_complete` is true or `failed` contains a reason.
    """

    def __init__(self, ref: BlobRef, chunk: int, now_s: float) -> None:
        self.ref = ref
        self.chunk = chunk
        self.had = bytearray()  # one byte per chunk: 1 if it is written
        self.failed: str | None = None
        self.bad = 0
        self.backoff = 0  # time-outs since the last arrival
        self._missing_chunks = 0
        self._cuts = 0
        self._window = _START_WINDOW
        self._asked: dict[int, float] = {}  # index -> time of the last request, in the order of requests
        self._overtaken: dict[int, int] = {}  # index of a request -> later ones that were answered
        self._lost = False  # a request was overtaken since the last look
        self._times: dict[int, tuple[float, float]] = {}  # index -> times of the first and the last request
        self._srtt_s: float | None = None
        self._heard_s = self._progress_s = now_s
        self._parked_s: float | None = None
        self._bad_run = 0
        self._doubted = False
        self._hold_s = -math.inf
        self.held = False  # its chunks come another way
        self.manifest: wire.BlobManifest | None = chunks.single_chunk_manifest(ref, chunk)
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
        normal_s = _TIMEOUT_FIRST_S if self._srtt_s is None else max(_TIMEOUT_LEAST_S, 4 * self._srtt_s)
        return Retry(normal_s, _TIMEOUT_MOST_S).delay_s(self.backoff)

    @property
    def outstanding_bytes(self) -> int:
        return len(self._asked) * self._largest_chunk_bytes

    @property
    def due_s(self) -> float:
        if self.held:
            return math.inf
        if not self._asked:
            return self._hold_s
        return min(min(self._asked.values()) + self.timeout_s, self._progress_s + PATIENCE_S)

    def next_requests(self, now_s: float, room_bytes: float = math.inf) -> list[wire.ChunkRequest]:
        """Return the messages to send now, for at most `room_bytes` beyond the outstanding ones."""
        if self.held:
            return []
        late = self._drop_overdue_requests(now_s) or self._lost
        self._lost = False
        if (
            self.failed is not None
            or self.is_complete
            or now_s < self._hold_s
            or room_bytes < self._largest_chunk_bytes
        ):
            return []
        if self.manifest is None:
            return [self._make_request((), now_s)] if MANIFEST not in self._asked else []
        free = int(min(self._window - len(self._asked), room_bytes // self._largest_chunk_bytes))
        if self._asked and not late and free < min(BATCH, self._window // 2):
            return []  # a few at a time: half as many messages, and the window never runs dry
        indices = self._missing_indices(free)
        return [self._make_request(indices[at : at + BATCH], now_s) for at in range(0, len(indices), BATCH)]

    def _make_request(self, indices: tuple[int, ...], now_s: float) -> wire.ChunkRequest:
        for index in indices or (MANIFEST,):
            self._asked[index] = now_s
            self._overtaken.pop(index, None)
            self._times[index] = (self._times.get(index, (now_s,))[0], now_s)
        return wire.ChunkRequest(sha256=self.ref.sha256, chunk=self.chunk, indices=indices)

    def _missing_indices(self, most: int) -> tuple[int, ...]:
        found: list[int] = []
        index = self.had.find(0)
        while index >= 0 and len(found) < most:
            if index not in self._asked:
                found.append(index)
            index = self.had.find(0, index + 1)
        return tuple(found)

    def _drop_overdue_requests(self, now_s: float) -> bool:
        if now_s >= self._progress_s + PATIENCE_S:
            self.failed = f"no answer for {PATIENCE_S:.0f} s"
        timeout_s = self.timeout_s
        # sums are compared, as in due_s: a difference may round to below the time-out, and nothing would ever be due
        overdue = [index for index, asked_s in self._asked.items() if now_s >= asked_s + timeout_s]
        if overdue and now_s >= self._heard_s + timeout_s:
            # nothing arrives: all is lost, or the line is slower than estimated; request one and wait longer
            self._asked.clear()
            self._window = 1
            self.backoff += 1
        elif overdue:
            self._window = max(1, self._window // 2)
        for index in overdue:
            self._asked.pop(index, None)
        return bool(overdue)

    @property
    def _largest_chunk_bytes(self) -> int:
        return max(1, min(self.chunk, self.ref.size))

    def handle_manifest(self, manifest: wire.BlobManifest, now_s: float) -> bool:
        """Return whether a manifest is new and valid. The caller must then call `set_stored_chunks`."""
        self._record_arrival(MANIFEST, now_s)
        if self.manifest is not None and manifest.chunk >= self.manifest.chunk:
            return False
        fits = manifest.sha256 == self.ref.sha256 and manifest.size == self.ref.size and manifest.chunk <= self.chunk
        if not fits or len(manifest.digests) != 64 * chunks.chunk_count(manifest):
            self._record_bad_message("manifests that do not describe this blob")
            return False
        self._cuts += 1
        if self._cuts > _CUTS_MOST:
            self.failed = f"the other side cut it anew more than {_CUTS_MOST} times"
            return False
        self._record_progress(now_s)
        self.manifest, self.chunk = manifest, manifest.chunk
        self._clear_requests()
        self.set_stored_chunks(bytes(chunks.chunk_count(manifest)))
        return True

    def set_stored_chunks(self, had: bytes | bytearray) -> None:
        """Set which chunks are on disk and verified: one byte per chunk, 1 if stored."""
        self.had = bytearray(had)
        self._missing_chunks = self.had.count(0)

    def handle_chunk(self, index: int, payload: bytes, now_s: float) -> bool:
        """Return whether the caller must write the chunk to disk."""
        if self.manifest is None or not 0 <= index < len(self.had):
            return False
        self._drop_overtaken_requests(index)
        self._record_arrival(index, now_s)
        if self.had[index]:
            return False
        if not chunks.is_valid_chunk(self.manifest, index, payload):
            self._record_bad_message("chunks that are damaged")
            return False
        self._record_progress(now_s)
        self._window = min(self._window + 1, WINDOW)
        self.had[index] = 1
        self._missing_chunks -= 1
        return True

    def handle_missing(self, reason: str, now_s: float) -> None:
        if now_s < self._hold_s:
            return
        if self._doubted:
            self.failed = f"the other side cannot send it: {reason or 'no reason given'}"
        self._doubted = True
        self._hold_s = now_s + _DOUBT_S
        self._asked.clear()

    def _record_arrival(self, index: int, now_s: float) -> None:
        self._heard_s = now_s
        self.backoff = 0
        self._asked.pop(index, None)
        first_s, last_s = self._times.pop(index, (None, now_s))
        if first_s is not None and index != MANIFEST:  # a manifest is small and its time says little on a chunk
            took_s = now_s - last_s
            if self._srtt_s is None or took_s < self._srtt_s / 2:
                took_s = now_s - first_s  # too soon for an answer to the last request: it answers an earlier one
            self._srtt_s = took_s if self._srtt_s is None else self._srtt_s + (took_s - self._srtt_s) / 8

    def _drop_overtaken_requests(self, index: int) -> None:
        if index not in self._asked:
            return
        earlier = []
        for other in self._asked:
            if other == index:
                break
            earlier.append(other)
        for other in earlier:
            self._overtaken[other] = self._overtaken.get(other, 0) + 1
            if self._overtaken[other] >= OVERTAKEN:
                del self._asked[other], self._overtaken[other]
                self._window = max(1, self._window // 2)
                self._lost = True

    def _record_progress(self, now_s: float) -> None:
        self._progress_s = now_s
        self._bad_run = 0
        self._doubted = False

    def _record_bad_message(self, what: str) -> None:
        self.bad += 1
        self._bad_run += 1
        if self._bad_run >= _BAD_IN_A_ROW:
            self.failed = f"the other side sent {self._bad_run} {what}, one after the other"

    def _clear_requests(self) -> None:
        self._asked.clear()
        self._times.clear()

    def handle_reconnect(self, chunk: int, now_s: float) -> None:
        """Forget outstanding requests after a reconnection, and the manifest if chunks must be smaller."""
        self._clear_requests()
        self.backoff = 0
        self._window = _START_WINDOW
        self._heard_s = self._progress_s = now_s
        if chunk < self.chunk or self.manifest is None:
            self.chunk, self.manifest = chunk, chunks.single_chunk_manifest(self.ref, chunk)

    def pause_requests(self) -> None:
        self.held = True
        self._clear_requests()

    def resume_requests(self, had: bytes | bytearray | None, now_s: float) -> None:
        self.held = False
        if had is not None:
            self.set_stored_chunks(had)
        self.backoff, self._window = 0, _START_WINDOW
        self._heard_s = now_s
        self._record_progress(now_s)

    def suspend(self, now_s: float) -> None:
        """Suspend the download, with all timeouts, until `resume`."""
        self._clear_requests()
        self._parked_s = now_s

    def resume(self, now_s: float) -> None:
        if self._parked_s is not None:
            self._heard_s += now_s - self._parked_s
            self._progress_s += now_s - self._parked_s
            self._parked_s = None


class BlobLocationError(LinkError):
    def __init__(self, sentence: str, *, later: bool = False) -> None:
        super().__init__(sentence)
        self.later = later


class WriterClosedError(LinkError): ...


class ContentError(LinkError): ...


class BlobWriter:
    """Writer of one transfer's bytes to the partial file of a blob.

    Another thread may close the writer. A blob that arrives from the first byte to the last is hashed once, on arrival.
    Chunks are compared with the manifest only if the whole blob does not match. With `through`, one range is written,
    from the first missing chunk to the end, even if later chunks are there already.
    """

    def __init__(
        self, depot: BlobStore, manifest: wire.BlobManifest, had: bytes | bytearray, *, through: bool = False
    ) -> None:
        self.manifest = manifest
        self.ref = BlobRef(sha256=manifest.sha256, size=manifest.size)
        self.had: bytes | bytearray = bytes(had)
        self.moved = 0  # bytes written
        self.at = 0  # offset of the next byte
        self.finished = False  # whether the part is the blob
        self._depot = depot
        self._lock = threading.Lock()
        self._open = True
        self._turn = 0
        self._runs = _missing_ranges(manifest, self.had, through)
        self._whole = hashlib.sha256() if 1 not in self.had else None
        self._skip_complete_ranges()

    def replace_writer(self) -> int:
        """Return the number of a new writer. Writes of earlier writers then fail."""
        with self._lock:
            self._turn += 1
            return self._turn

    def next_range(self) -> tuple[int, int] | None:
        """Return the next range of bytes to fetch, (offset, end), or None if all are written."""
        return (self.at, self._runs[0][1]) if self._runs else None

    def write(self, piece: memoryview, turn: int) -> None:
        """Write the next bytes of the range that `next_range` returns, or raise WriterClosedError or StoreError."""
        with self._lock:
            self._require_current(turn)
            if not self._runs or self.at + len(piece) > self._runs[0][1]:
                raise WriterClosedError("more bytes came than were asked for")
            self._depot.write_part(self.ref.sha256, self.at, piece)
            if self._whole is not None:
                self._whole.update(piece)
            self.at += len(piece)
            self.moved += len(piece)
            self._skip_complete_ranges()

    def finish(self, turn: int) -> None:
        """Verify the part and turn it into the blob. After a ContentError, `had` tells the matching chunks."""
        with self._lock:
            self._require_current(turn)
            self._open = False
            digest = None if self._whole is None else self._whole.hexdigest()
            if digest != self.ref.sha256:
                digest = None
                self.had = self._depot.open_part(self.manifest)
                if bad := self.had.count(0):
                    raise ContentError(f"it brought {bad} of {len(self.had)} chunks with other content")
            self._depot.finish_part(self.ref, digest)
            self.finished = True

    def finish_received(self) -> None:
        with self._lock:
            self._require_current(self._turn)
            self._open = False
            self._depot.finish_part(self.ref)
            self.finished = True

    def close_and_check(self) -> None:
        with self._lock:
            was, self._open = self._open, False
        if was:
            self.had = self._depot.open_part(self.manifest)

    def close(self) -> None:
        """Close the writer. After the return no thread writes to the part."""
        with self._lock:
            self._open = False

    def _require_current(self, turn: int) -> None:
        if not self._open or turn != self._turn:
            raise WriterClosedError("it comes another way meanwhile")

    def _skip_complete_ranges(self) -> None:
        while self._runs and self.at >= self._runs[0][1]:
            self._runs.pop(0)
        if self._runs:
            self.at = max(self.at, self._runs[0][0])


def _missing_ranges(manifest: wire.BlobManifest, had: bytes | bytearray, through: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index, here in enumerate(had):
        offset, size = chunks.chunk_extent(manifest, index)
        if here:
            continue
        if through:
            return [(offset, manifest.size)]
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + size)
        else:
            found.append((offset, offset + size))
    return found
