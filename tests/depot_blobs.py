"""A blob of several chunks, and the files of a depot."""

from __future__ import annotations

import hashlib
from pathlib import Path

import two_sides
from two_sides import KIB, ref_of

from fedquilt import wire

# 5 chunks of 8 KiB, no two alike, the last one short
BLOB = b"".join(hashlib.sha256(bytes([number])).digest() * 256 for number in range(5))[:-100]
REF = ref_of(BLOB)


def cut(chunk: int = 8 * KIB) -> wire.BlobManifest:
    return two_sides.cut(BLOB, chunk)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
