"""Read protobuf messages field by field, strictly and within a bound, without a library: boards need not have one.

`written` puts fields that were read, or others in their place, together to a message again.

A message is given as bytes, a memoryview or a mapped file; nothing is copied, so a file of 2 GB costs the pages that
hold its headers. A field that the caller did not list, one that stands twice where one is expected and one of
another wire type are refused, because another reader may take them otherwise than this one does.
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


class ProtobufError(ValueError):
    """Bytes that are not such a message, or more of them than are read."""


@dataclass
class Reader:
    """Reads the messages of one file; counts their fields.

    Args:
        fields_most: fields read in all; more are refused.
    """

    fields_most: int = FIELDS_MOST

    def message(self, data: memoryview, schema: Schema, what: str) -> dict[str, list[int | memoryview]]:
        """Each field's values in order of appearance, by name; packed numbers stay the bytes they are.

        Args:
            data: bytes of the message.
            schema: fields that it may have.
            what: names the message in errors.

        Raises:
            ProtobufError: cut short, a field that is not in `schema`, twice where once is expected, or too many.
        """
        found: dict[str, list[int | memoryview]] = {}
        for number, wire, value in self._fields(data, what):
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

    def _fields(self, data: memoryview, what: str) -> Iterator[tuple[int, int, int | memoryview]]:
        at, end = 0, len(data)
        while at < end:
            self.fields_most -= 1
            if self.fields_most < 0:
                raise ProtobufError("more fields than a graph of a network has")
            tag, at = _varint(data, at, what)
            number, wire = tag >> 3, tag & 7
            value: int | memoryview
            if wire == _VARINT:
                value, at = _varint(data, at, what)
            else:
                if wire == _BYTES:
                    size, at = _varint(data, at, what)
                elif wire in (_EIGHT, _FOUR):
                    size = 8 if wire == _EIGHT else 4
                else:
                    raise ProtobufError(f"{what} has wire type {wire}")
                if size > end - at:
                    raise ProtobufError(f"{what} is cut short")
                value, at = data[at : at + size], at + size
            yield number, wire, value


def _varint(data: memoryview, at: int, what: str) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise ProtobufError(f"{what} is cut short")


def written(fields: Mapping[str, Sequence[int | memoryview | Pieces]], schema: Schema) -> list[bytes | memoryview]:
    """A message in pieces, its fields in the order of the schema; nothing is copied.

    Args:
        fields: values as `Reader.message` gives them, of kinds other than floats. Bytes may be in pieces.
        schema: fields that the message may have.

    Raises:
        ProtobufError: a field holds floats.
    """
    found: list[bytes | memoryview] = []
    for number, (name, kind) in schema.items():
        if name not in fields:
            continue
        if kind not in ("int", "ints", "bytes", "many"):
            raise ProtobufError(f"{name} is of the kind {kind}, which is not written")
        for value in fields[name]:
            if isinstance(value, int):
                found.append(_encoded(number << 3 | _VARINT) + _encoded(value))
                continue
            pieces = [value] if isinstance(value, memoryview) else value
            found.append(_encoded(number << 3 | _BYTES) + _encoded(sum(len(piece) for piece in pieces)))
            found += pieces
    return found


def _encoded(value: int) -> bytes:
    """A number of variable length: 7 bits in a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def signed(value: int | memoryview) -> int:
    """A number as protobuf's int64 means it."""
    if not isinstance(value, int):
        raise ProtobufError("bytes where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def numbers(values: list[int | memoryview], most: int, what: str) -> list[int]:
    """The signed whole numbers of a field of kind "ints", packed or not.

    Raises:
        ProtobufError: more than `most`.
    """
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(signed(value))
        else:
            at = 0
            while at < len(value) and len(found) <= most:
                number, at = _varint(value, at, what)
                found.append(signed(number))
        if len(found) > most:
            raise ProtobufError(f"{what} has more than {most} numbers")
    return found


def text(values: list[int | memoryview] | None, most: int, what: str) -> str:
    """A field of kind "bytes" as text; "" where it is absent.

    Raises:
        ProtobufError: longer than `most` bytes, or not UTF-8.
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
