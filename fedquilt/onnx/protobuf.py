"""Strict and bounded reading and writing of protobuf messages, without a library.

Messages are bytes, memoryviews or mapped files, and are not copied, so that a file of 2 GB needs only the pages of its
headers. Unknown fields, repeated single fields and unexpected wire types are refused, because other readers may
interpret them differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["int", "float", "bytes", "ints", "floats", "doubles", "many"]
Schema: TypeAlias = Mapping[int, tuple[str, Kind]]
"""Field number -> name and kind: one whole number, one 32-bit float, one piece of bytes (a text or a message), packed
or single numbers any number of times (ints: variable length; floats: 4 bytes; doubles: 8), or pieces any number of
times."""
Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes of a message or text, one piece after the other."""

FIELDS_MOST: Final = 1_000_000  # of one file: about a second's work
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_WIRES: Final[Mapping[Kind, tuple[int, ...]]] = {
    "int": (_VARINT,),
    "float": (_FOUR,),
    "bytes": (_BYTES,),
    "ints": (_VARINT, _BYTES),
    "floats": (_FOUR, _BYTES),
    "doubles": (_EIGHT, _BYTES),
    "many": (_BYTES,),
}
_ONCE: Final = frozenset({"int", "float", "bytes"})


class ProtobufError(ValueError): ...


@dataclass
class ProtobufReader:
    """Reader of the messages of one file, with a limit on their fields.

    Args:
        fields_most: Maximum number of fields in total.
    """

    fields_most: int = FIELDS_MOST

    def read_message(self, data: memoryview, schema: Schema, what: str) -> dict[str, list[int | memoryview]]:
        """Return the values of each field by name, in order of appearance. Packed numbers remain bytes.

        Args:
            data: Bytes of the message.
            schema: Permitted fields.
            what: Name of the message in errors.

        Raises:
            ProtobufError: If the message is cut short, or has an unknown, repeated or excessive field.
        """
        found: dict[str, list[int | memoryview]] = {}
        for number, wire, value in self._read_fields(data, what):
            known = schema.get(number)
            if known is None:
                raise ProtobufError(f"{what} has field {number}, which is not expected there")
            name, kind = known
            if wire not in _WIRES[kind]:
                raise ProtobufError(f"{what}: field {name!r} has wire type {wire}")
            values = found.setdefault(name, [])
            if values and kind in _ONCE:
                raise ProtobufError(f"{what} has field {name!r} twice")
            values.append(value)
        return found

    def _read_fields(self, data: memoryview, what: str) -> Iterator[tuple[int, int, int | memoryview]]:
        at, end = 0, len(data)
        while at < end:
            self.fields_most -= 1
            if self.fields_most < 0:
                raise ProtobufError("more fields than a graph of a network has")
            tag, at = _read_varint(data, at, what)
            number, wire = tag >> 3, tag & 7
            value: int | memoryview
            if wire == _VARINT:
                value, at = _read_varint(data, at, what)
            else:
                if wire == _BYTES:
                    size, at = _read_varint(data, at, what)
                elif wire in (_EIGHT, _FOUR):
                    size = 8 if wire == _EIGHT else 4
                else:
                    raise ProtobufError(f"{what} has wire type {wire}")
                if size > end - at:
                    raise ProtobufError(f"{what} is cut short")
                value, at = data[at : at + size], at + size
            yield number, wire, value


def _read_varint(data: memoryview, at: int, what: str) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise ProtobufError(f"{what} is cut short")


def encode_message(
    fields: Mapping[str, Sequence[int | memoryview | Pieces]], schema: Schema
) -> list[bytes | memoryview]:
    """Return a message in pieces, with fields in the order of the schema and without copying.

    Args:
        fields: Values by name, as returned by `ProtobufReader.read_message`. Bytes may be in pieces.
        schema: Permitted fields.

    Raises:
        ProtobufError: If a field is of floats.
    """
    found: list[bytes | memoryview] = []
    for number, (name, kind) in schema.items():
        if name not in fields:
            continue
        if kind not in ("int", "ints", "bytes", "many"):
            raise ProtobufError(f"{name} is of the kind {kind}, which is not written")
        for value in fields[name]:
            if isinstance(value, int):
                found.append(_encode_varint(number << 3 | _VARINT) + _encode_varint(value))
                continue
            pieces = [value] if isinstance(value, memoryview) else value
            found.append(_encode_varint(number << 3 | _BYTES) + _encode_varint(sum(len(piece) for piece in pieces)))
            found += pieces
    return found


def _encode_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def to_signed(value: int | memoryview) -> int:
    """Convert a varint to a signed 64-bit integer. Raise ProtobufError for bytes."""
    if not isinstance(value, int):
        raise ProtobufError("bytes where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def decode_ints(values: list[int | memoryview], most: int, what: str) -> list[int]:
    """Return the signed integers of a field of kind "ints", packed or not.

    Raises:
        ProtobufError: If there are more than `most`.
    """
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(to_signed(value))
        else:
            at = 0
            while at < len(value) and len(found) <= most:
                number, at = _read_varint(value, at, what)
                found.append(to_signed(number))
        if len(found) > most:
            raise ProtobufError(f"{what} has more than {most} numbers")
    return found


def decode_text(values: list[int | memoryview] | None, most: int, what: str) -> str:
    """Return a field of kind "bytes" as text, or "" if absent.

    Raises:
        ProtobufError: If the text has more than `most` bytes, or is not UTF-8.
    """
    if not values:
        return ""
    (value,) = values
    if isinstance(value, int) or len(value) > most:
        raise ProtobufError(f"{what} is a text of more than {most} bytes")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise ProtobufError(f"{what} is not Unicode") from None
