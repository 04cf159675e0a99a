"""Chunks of a blob: manifest and verification. No I/O.

The receiving side requests the manifest of a blob, then chunks (`fedquilt.blobs.download`). The sending side only
responds, so that a slow receiver never fills a broker's queue. Lost messages are requested again. An upload is a
download by the coordinator. This module stores no chunks: `fedquilt.blobs.transfers` moves chunks between a link and
a blob store.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Final

from fedquilt import wire
from fedquilt.core import BlobRef, LinkError, StoreError

HEADROOM_BYTES: Final = 1024  # bytes of a packet that are left for topic and MQTT header
MANIFEST: Final = -1  # index of the manifest in requests and queues, where chunks have indices from 0

BUDGET_BYTES: Final = 4 << 20  # limit on chunks queued for sending, and on chunks requested and not written yet

_MANIFEST_BYTES: Final = 256  # upper bound of an encoded manifest without digests


class DamagedBlobError(StoreError): ...


def chunk_size_for(max_payload: int) -> int:
    """Return the chunk size in bytes for payloads of at most `max_payload` bytes, or raise LinkError."""
    chunk_bytes = min(wire.MAX_CHUNK, max_payload - HEADROOM_BYTES)
    if chunk_bytes < wire.MIN_CHUNK:
        min_bytes = wire.MIN_CHUNK + HEADROOM_BYTES
        raise LinkError(f"broker accepts only {max_payload} bytes a message: raise its packet limit to {min_bytes}")
    return chunk_bytes


def negotiate_chunk_size(max_bytes: int, requested_bytes: int) -> int:
    """Return the chunk size in bytes for a peer that requests chunks of up to `requested_bytes`.

    A blob is hashed for each chunk size. To have few sizes, a size below `max_bytes` is rounded down to a power of two
    minus the headroom, but not below `wire.MIN_CHUNK`.
    """
    packet_bytes = 1 << ((requested_bytes + HEADROOM_BYTES).bit_length() - 1)
    return max_bytes if requested_bytes >= max_bytes else max(packet_bytes - HEADROOM_BYTES, wire.MIN_CHUNK)


def single_chunk_manifest(ref: BlobRef, chunk: int) -> wire.BlobManifest | None:
    """Return the manifest of a blob of one chunk, or None for an empty or larger blob."""
    if not 0 < ref.size <= chunk:
        return None
    return wire.BlobManifest(sha256=ref.sha256, size=ref.size, chunk=chunk, digests=ref.sha256)


def chunk_count(manifest: wire.BlobManifest) -> int:
    return -(-manifest.size // manifest.chunk)


def chunk_extent(manifest: wire.BlobManifest, index: int) -> tuple[int, int]:
    """Return offset and size of a chunk in bytes."""
    offset = index * manifest.chunk
    return offset, min(manifest.chunk, manifest.size - offset)


def is_valid_chunk(manifest: wire.BlobManifest, index: int, payload: bytes) -> bool:
    digest = manifest.digests[64 * index : 64 * index + 64]
    return len(payload) == chunk_extent(manifest, index)[1] and hashlib.sha256(payload).hexdigest() == digest


class ManifestBuilder:
    def __init__(self, ref: BlobRef, chunk: int, read: Callable[[int, int], bytes]) -> None:
        self._blob_ref, self._chunk, self._read = ref, chunk, read
        self._blob_hash, self._digests = hashlib.sha256(), list[str]()
        self._count = -(-ref.size // chunk)
        if _MANIFEST_BYTES + 64 * self._count > chunk:
            max_mb = (chunk - _MANIFEST_BYTES) // 64 * chunk / 1e6
            fix = "raise the broker's packet limit" if chunk < wire.MAX_CHUNK else "store it as several smaller files"
            raise LinkError(
                f"blob {ref.sha256[:12]} of {ref.size / 1e6:.0f} MB is above the limit of {max_mb:.0f} MB in chunks of "
                f"{chunk} bytes: {fix}"
            )

    def hash_chunks(self, limit_bytes: float = math.inf) -> wire.BlobManifest | None:
        """Hash about `limit_bytes` more. Return the manifest when complete, or raise DamagedBlobError."""
        ref, remaining_bytes = self._blob_ref, limit_bytes
        while len(self._digests) < self._count and remaining_bytes > 0:
            offset = len(self._digests) * self._chunk
            payload = self._read(offset, min(self._chunk, ref.size - offset))
            self._blob_hash.update(payload)
            self._digests.append(hashlib.sha256(payload).hexdigest())
            remaining_bytes -= self._chunk
        if len(self._digests) < self._count:
            return None
        if self._blob_hash.hexdigest() != ref.sha256:
            raise DamagedBlobError(f"blob {ref.sha256[:12]} is damaged on the disk: its sha256 has changed")
        return wire.BlobManifest(sha256=ref.sha256, size=ref.size, chunk=self._chunk, digests="".join(self._digests))


def damaged_arrival_error(ref: BlobRef) -> DamagedBlobError:
    return DamagedBlobError(f"blob {ref.sha256[:12]} arrived with another sha256: the sender's copy is damaged")


def ref_from_bytes(payload: bytes, expected: BlobRef | None = None) -> BlobRef:
    """Return the reference of a blob's bytes, or raise DamagedBlobError if they are not `expected`."""
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    if expected is not None and expected != ref:
        raise damaged_arrival_error(expected)
    return ref
