"""A blob of several chunks, and the files of a depot."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.core import BlobRef

KIB = 1024


def ref_of(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


# 5 chunks of 8 KiB, no two alike, the last one short
BLOB = b"".join(hashlib.sha256(bytes([number])).digest() * 256 for number in range(5))[:-100]
REF = ref_of(BLOB)


def cut(chunk: int = 8 * KIB) -> wire.BlobManifest:
    return chunks.ManifestBuilder(REF, chunk, lambda offset, size: BLOB[offset : offset + size]).hash_chunks()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
