"""Chunks of a blob: cut, verified one by one, and served in turn. No I/O.

The side that wants a blob asks for its manifest, then for chunks (`fedquilt.blobs.download`); the side that
has it only answers. So a slow receiver never fills a broker's queue, and lost messages are requested
again: an upload is the coordinator fetching. Nothing here holds chunk bytes;
`fedquilt.blobs.transfer` moves them between a link and a depot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedquilt import wire
from fedquilt.core import BlobRef, LinkError, StoreError

HEADROOM_BYTES: Final = 1024  # of a packet, for its topic and MQTT's own header
MANIFEST: Final = -1  # index under which the manifest itself is requested and queued

_MANIFEST_BYTES: Final = 256  # most bytes of an encoded manifest without its digests
_QUEUED_MOST: Final = 4 * wire.MAX_WINDOW  # chunks queued for one device; an honest one requests fewer


class DamagedBlobError(StoreError):
    """Stored blob whose bytes no longer have the sha256 in its name."""


# -- cutting --------------------------------------------------------------------------------------


def chunk_for(max_payload: int) -> int:
    """Chunk size, in bytes, for a link whose largest payload is `max_payload` bytes.

    Raises:
        LinkError: too small for any chunk.
    """
    chunk = min(wire.MAX_CHUNK, max_payload - HEADROOM_BYTES)
    if chunk < wire.MIN_CHUNK:
        least = wire.MIN_CHUNK + HEADROOM_BYTES
        raise LinkError(f"the broker takes {max_payload} bytes at most: raise its packet limit to {least} or more")
    return chunk


def agreed(own: int, asked: int) -> int:
    """The chunk size for a peer that takes `asked` bytes: one's own, else that of a packet limit of a power of two.

    So there are few: for each size a blob is read and hashed once more, whoever asks for it.
    """
    packet = 1 << ((asked + HEADROOM_BYTES).bit_length() - 1)
    return own if asked >= own else max(packet - HEADROOM_BYTES, wire.MIN_CHUNK)


def single(ref: BlobRef, chunk: int) -> wire.Manifest | None:
    """Manifest of a blob that fits into one chunk, whose digest is the blob's own; None: it does not, or is empty.

    Nobody has to be asked for it: the chunk is requested at once, in half as many messages.
    """
    return (
        wire.Manifest(sha256=ref.sha256, size=ref.size, chunk=chunk, digests=ref.sha256)
        if 0 < ref.size <= chunk
        else None
    )


def count(manifest: wire.Manifest) -> int:
    """Number of chunks of a blob; the last may be shorter."""
    return -(-manifest.size // manifest.chunk)


def extent(manifest: wire.Manifest, index: int) -> tuple[int, int]:
    """(offset, size) of a chunk, in bytes."""
    offset = index * manifest.chunk
    return offset, min(manifest.chunk, manifest.size - offset)


def is_chunk(manifest: wire.Manifest, index: int, payload: bytes) -> bool:
    """Whether `payload` is that chunk, byte for byte."""
    digest = manifest.digests[64 * index : 64 * index + 64]
    return len(payload) == extent(manifest, index)[1] and hashlib.sha256(payload).hexdigest() == digest


class Cutting:
    """A blob that is being cut, some of it at a time.

    Args:
        ref: of the blob.
        chunk: bytes of a chunk.
        read: `read(offset, size)` is called chunk by chunk.

    Raises:
        LinkError: the manifest would not fit in one message of `chunk` bytes.
    """

    def __init__(self, ref: BlobRef, chunk: int, read: Callable[[int, int], bytes]) -> None:
        self._ref, self._chunk, self._read = ref, chunk, read
        self._whole, self._digests = hashlib.sha256(), list[str]()
        self._count = -(-ref.size // chunk)
        if _MANIFEST_BYTES + 64 * self._count > chunk:
            most_mb = (chunk - _MANIFEST_BYTES) // 64 * chunk / 1e6
            mend = "raise the broker's packet limit" if chunk < wire.MAX_CHUNK else "store it as several smaller files"
            raise LinkError(
                f"blob {ref.sha256[:12]} has {ref.size / 1e6:.0f} MB; "
                f"in chunks of {chunk} bytes {most_mb:.0f} MB is the most that can be sent: {mend}"
            )

    def go_on(self, most_bytes: float = math.inf) -> wire.Manifest | None:
        """Cut so many bytes, and one chunk at least; the manifest, or None: there is more to cut.

        Raises:
            DamagedBlobError: the bytes read are not the blob `ref` names.
        """
        ref, left_bytes = self._ref, most_bytes
        while len(self._digests) < self._count and left_bytes > 0:
            offset = len(self._digests) * self._chunk
            payload = self._read(offset, min(self._chunk, ref.size - offset))
            self._whole.update(payload)
            self._digests.append(hashlib.sha256(payload).hexdigest())
            left_bytes -= self._chunk
        if len(self._digests) < self._count:
            return None
        if self._whole.hexdigest() != ref.sha256:
            raise DamagedBlobError(
                f"blob {ref.sha256[:12]} is damaged on disk: its bytes are not the ones it was stored with"
            )
        return wire.Manifest(sha256=ref.sha256, size=ref.size, chunk=self._chunk, digests="".join(self._digests))


def cut(ref: BlobRef, chunk: int, read: Callable[[int, int], bytes]) -> wire.Manifest:
    """Manifest of a blob; arguments and errors as of `Cutting`."""
    made = Cutting(ref, chunk, read).go_on()
    assert made is not None
    return made


# -- serving --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """Message to send: a chunk, or with index MANIFEST the manifest."""

    device: str
    sha256: str
    chunk: int  # bytes of a chunk: how the blob is cut for this device
    index: int


class Serve:
    """Order of sending: each device in turn, and never more queued on the link than the budget."""

    def __init__(self, budget_bytes: int = 4 << 20) -> None:
        self._budget_bytes = budget_bytes
        self._queues: dict[str, dict[Item, None]] = {}  # device -> items, both in order

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        """Whether anything is queued."""
        return bool(self._queues)

    def ask(self, item: Item) -> None:
        """Queue one item, unless it is queued already or its device has requested too much."""
        queue = self._queues.setdefault(item.device, {})
        if len(queue) < _QUEUED_MOST:
            queue[item] = None

    def take(self, backlog_bytes: int) -> Item | None:
        """Next item to send while `backlog_bytes` wait on the link; None: nothing, or not yet."""
        if not self._queues:
            return None
        device, queue = next(iter(self._queues.items()))
        item = next(iter(queue))
        if backlog_bytes > 0 and backlog_bytes + item.chunk > self._budget_bytes:
            return None
        del self._queues[device], queue[item]
        if queue:
            self._queues[device] = queue  # at the end: the others first
        return item


def arrived_damaged(ref: BlobRef) -> DamagedBlobError:
    """Error for bytes that are not those of the blob that they were sent as."""
    said = f"blob {ref.sha256[:12]} arrived with other content than its name says"
    return DamagedBlobError(f"{said}: the sender's copy is damaged; ask for it anew")


def reference(payload: bytes, expected: BlobRef | None = None) -> BlobRef:
    """Reference of bytes.

    Raises:
        DamagedBlobError: they are not the blob `expected`.
    """
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    if expected is not None and expected != ref:
        raise arrived_damaged(expected)
    return ref
