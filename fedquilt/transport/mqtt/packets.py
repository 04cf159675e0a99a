"""MQTT packets with messages, PUBLISH and PUBACK, of versions 3.1.1 (level 4) and 5. No I/O."""

from __future__ import annotations

import struct
from typing import Final

PUBLISH: Final = 0x30
PUBACK: Final = 0x40
LONGEST: Final = 2**28 - 1  # bytes of a packet's body, by its four bytes of length
_SHORT: Final = struct.Struct("!H")


class MalformedPacketError(Exception): ...


def find_packet(data: bytearray, at: int, most: int = LONGEST) -> tuple[int, int, int] | None:
    """Return the packet at an offset, or None if incomplete.

    Returns:
        The first byte of the packet, the offset of its body, and the offset of its end.

    Raises:
        MalformedPacketError: If the length field is longer than four bytes, or the body longer than `most` bytes.
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


def publish_packet(level: int, mid: int, topic: str, payload: bytes, qos: int, retain: bool) -> bytes:
    """Return a PUBLISH packet. The packet id `mid` is used only with QoS 1."""
    name = topic.encode()
    head = _SHORT.pack(len(name)) + name + (_SHORT.pack(mid) if qos else b"") + (b"\0" if level == 5 else b"")
    return b"".join((bytes((PUBLISH | qos << 1 | retain,)), _encode_length(len(head) + len(payload)), head, payload))


def puback_packet(mid: int) -> bytes:
    return b"\x40\x02" + _SHORT.pack(mid)


def parse_publish(level: int, head: int, body: bytearray) -> tuple[str | None, bytes, int | None]:
    """Return topic, payload and packet id of a PUBLISH packet of QoS 0 or 1.

    The topic is None if not UTF-8, and the id is None with QoS 0.

    Raises:
        MalformedPacketError: If the packet is shorter than its fields.
    """
    mid = None
    try:
        at = 2 + _SHORT.unpack_from(body)[0]
        name = body[2:at]
        if head & 0x06:
            (mid,) = _SHORT.unpack_from(body, at)
            at += 2
        if level == 5:
            found = find_packet(body, at - 1)  # properties have a length as packets have
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


def parse_puback(body: bytearray) -> tuple[int, int]:
    """Return the id and the reason code of a PUBACK packet. Codes from 128 on are failures.

    Raises:
        MalformedPacketError: If the packet is shorter than two bytes.
    """
    if len(body) < 2:
        raise MalformedPacketError("an acknowledgement without an id")
    return _SHORT.unpack_from(body)[0], body[2] if len(body) > 2 else 0


def _encode_length(size: int) -> bytes:
    found = bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
