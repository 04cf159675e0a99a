"""Checksums of the database's rows. A fact's covers the fact before it of the same job too."""

from __future__ import annotations

import hashlib
from typing import Final

FIRST: Final = b""  # instead of the checksum of a fact before the first one
SUM_BYTES: Final = 16


def link(before: bytes, job: str, at: float, body: str) -> bytes:
    """Checksum of a fact that follows one with the checksum `before`."""
    return checksum(before, job, at, body)


def checksum(*values: str | float | bytes) -> bytes:
    """Checksum of a row's values."""
    return hashlib.sha256(ascii(values).encode()).digest()[:SUM_BYTES]
