"""JSON files with a checksum of what they hold: a bit that the disk has flipped must not become another number.

The checksum is a field beside the others, so that people and other programs still read the file. One that lacks it, as
earlier versions wrote, is taken as it is.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from fedquilt.core import UNDECODABLE

T = TypeVar("T", bound=msgspec.Struct)
FIELD = "sum"


class DamagedFileError(ValueError):
    """Bytes that are not what was written."""


def encode(value: msgspec.Struct) -> bytes:
    """JSON of a struct, with its checksum, for people to read.

    Args:
        value: of a type without unknown fields and without one called "sum".
    """
    table: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return msgspec.json.format(msgspec.json.encode({**table, FIELD: _sum(table)}), indent=1)


def decode(payload: bytes, kind: type[T]) -> T:
    """The struct that `encode` was given.

    Raises:
        DamagedFileError: the bytes are not JSON, not of this type, or do not match their checksum.
    """
    try:
        table = msgspec.json.decode(payload)
        told = table.pop(FIELD, None) if isinstance(table, dict) else None
        if told is not None and told != _sum(table):
            raise DamagedFileError("its checksum does not match")
        return msgspec.json.decode(msgspec.json.encode(table), type=kind)
    except UNDECODABLE as error:
        raise DamagedFileError(str(error)) from None


def _sum(table: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(table)).hexdigest()
