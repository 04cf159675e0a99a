"""JSON files with a checksum, which detects bits flipped on the disk.

The checksum is a field of the JSON object, so that people and other programs can still read the file.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from fedquilt.core import DECODE_ERRORS

T = TypeVar("T", bound=msgspec.Struct)
FIELD = "sum"


class DamagedFileError(ValueError): ...


def encode_with_checksum(value: msgspec.Struct) -> bytes:
    table: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return msgspec.json.format(msgspec.json.encode({**table, FIELD: _checksum_of(table)}), indent=1)


def decode_with_checksum(payload: bytes, kind: type[T]) -> T:
    """Return the struct of type `kind`, or raise DamagedFileError if the checksum or the content is wrong."""
    try:
        table = msgspec.json.decode(payload)
        checksum = table.pop(FIELD, None) if isinstance(table, dict) else None
        if checksum != _checksum_of(table):
            raise DamagedFileError("the checksum does not match")
        return msgspec.json.decode(msgspec.json.encode(table), type=kind)
    except DECODE_ERRORS as error:
        raise DamagedFileError(str(error)) from None


def _checksum_of(table: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(table)).hexdigest()
