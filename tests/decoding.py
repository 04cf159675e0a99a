"""What is known of one decoder, and the checksum that messages and a board's notes have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

SHA = "ab" * 32  # of a blob that nobody has


@dataclass(frozen=True)
class Decoder:
    """One way of bytes into a side.

    Args:
        module: that decodes, below the checkout.
        read: takes bytes; whatever it returns is right.
        errors: that it may raise, as its docstring says.
        seeds: valid inputs.
        dress: gives changed bytes the checksum or code that they need to be looked into.
        share: of the inputs, where it is slow.
    """

    module: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    dress: Callable[[bytes], bytes] | None = None
    share: float = 1.0


def numbered(payload: bytes) -> bytes:
    at = payload.find(b',"crc":"') + 16
    return b'{"v":1,"crc":"%08x"' % zlib.crc32(payload[at + 1 :]) + payload[at + 1 :] if at > 16 else payload
