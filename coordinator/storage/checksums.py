"""Checksums of database rows.

The checksum of an event also covers the preceding event of the same job.
"""

from __future__ import annotations

import hashlib
from typing import Final

FIRST: Final = b""  # instead of the checksum of a fact before the first one
SUM_BYTES: Final = 16


def chain_checksum(before: bytes, job: str, at: float, body: str) -> bytes:
    """Return the checksum of an event that follows an event with the checksum `before`."""
    return checksum(before, job, at, body)


def checksum(*values: str | float | bytes) -> bytes:
    return hashlib.sha256(ascii(values).encode()).digest()[:SUM_BYTES]
