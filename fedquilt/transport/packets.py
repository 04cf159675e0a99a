"""Packets of MQTT 3.1.1 (level 4) and 5 that carry messages: PUBLISH and PUBACK, as bytes. No I/O."""

from __future__ import annotations

import struct
from typing import Final

PUBLISH: Final = 0x30
PUBACK: Final = 0x40
LONGEST: Final = 2**28 - 1  # bytes of a packet's body, by its four bytes of length
_SHORT: Final = struct.Struct("!H")


class MalformedPacketError(Exception):
    """Raised for bytes that are no packet."""


def first(data: bytearray, at: int, most: int = LONGEST) -> tuple[int, int, int] | None:
    """First packet from `at` on: its first byte, where its body begins, and where it ends; None: it is not whole yet.

    Raises:
        MalformedPacketError: its length is longer than four bytes, or its body than `most` bytes.
    """
    size, begin = 0, at + 1
    while True:
        if begin >= len(data):
            return None
        byte = data[begin]
        size |= (byte & 0x7F) << 7 * (begin - at - 1)
        begin += 1
        if byte < 0x80:
            break
        if begin > at + 4:
            raise MalformedPacketError("the length of a packet takes more than four bytes")
    if size > most:
        raise MalformedPacketError(f"a packet of {size} bytes, where {most} are the most")
    return (data[at], begin, begin + size) if begin + size <= len(data) else None


def publish(level: int, mid: int, topic: str, payload: bytes, qos: int, retain: bool) -> bytes:
    """PUBLISH packet; `mid` is used with QoS 1."""
    name = topic.encode()
    head = _SHORT.pack(len(name)) + name + (_SHORT.pack(mid) if qos else b"") + (b"\0" if level == 5 else b"")
    return b"".join((bytes((PUBLISH | qos << 1 | retain,)), _length(len(head) + len(payload)), head, payload))


def acknowledgement(mid: int) -> bytes:
    """PUBACK packet of success, the same at both levels."""
    return b"\x40\x02" + _SHORT.pack(mid)


def published(level: int, head: int, body: bytearray) -> tuple[str | None, bytes, int | None]:
    """Topic, payload and id of a PUBLISH packet of QoS 0 or 1. Topic None: it is no UTF-8. Id None: QoS 0.

    Raises:
        MalformedPacketError: it is shorter than it says.
    """
    mid = None
    try:
        at = 2 + _SHORT.unpack_from(body)[0]
        name = body[2:at]
        if head & 0x06:
            (mid,) = _SHORT.unpack_from(body, at)
            at += 2
        if level == 5:
            found = first(body, at - 1)  # properties have a length as packets have
            if found is None:
                raise MalformedPacketError("the properties of a message are longer than its packet")
            at = found[2]
    except struct.error:
        raise MalformedPacketError("a message is shorter than its packet says") from None
    if at > len(body):
        raise MalformedPacketError("a topic is longer than its packet")
    try:
        return name.decode(), bytes(body[at:]), mid
    except UnicodeDecodeError:
        return None, b"", mid


def acknowledged(body: bytearray) -> tuple[int, int]:
    """Id and reason code of a PUBACK packet; 128 and more: the broker has not taken the message.

    Raises:
        MalformedPacketError: it is shorter than two bytes.
    """
    if len(body) < 2:
        raise MalformedPacketError("an acknowledgement without an id")
    return _SHORT.unpack_from(body)[0], body[2] if len(body) > 2 else 0


def _length(size: int) -> bytes:
    found = bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
