"""Signature of a message: session, number and authentication code around the payload.

{"mac":"...","in":"<session>","no":12,"said":{"v":1,"crc":"...", ...}}
"""

from __future__ import annotations

import binascii
import re
from typing import Final

from fedquilt import wire
from fedquilt.core import WireError
from fedquilt.security.handshake import Session
from fedquilt.transport.link import Message

ENVELOPE_BYTES: Final = 128  # largest overhead of an envelope
MOST_BYTES: Final = wire.MAX_CHUNK + ENVELOPE_BYTES  # of a message with its envelope

_FORM = re.compile(rb'\{"mac":"([A-Za-z0-9+/]{43}=)","in":"([0-9a-f]{16})","no":(\d{1,15}),"said":')
_NOTHING: Final = b"null"  # an empty message, which takes a task back


def is_signed(payload: bytes) -> bool:
    return _FORM.match(payload) is not None


def make_signed_payload(session: Session, topic: str, payload: bytes) -> bytes:
    payload = payload or _NOTHING
    number, code = session.sign(topic, payload)
    mac = binascii.b2a_base64(code, newline=False)
    return b'{"mac":"%b","in":"%b","no":%d,"said":%b}' % (mac, session.name.encode(), number, payload)


class UnknownSessionError(WireError):
    def __init__(self, session: str) -> None:
        super().__init__(
            "stale: it is sealed under another session than there is now: it is late, replayed, or of a second "
            "board with this one's name and certificate, as a copied card has"
        )
        self.session = session  # its name


class UnsignedMessageError(WireError):
    def __init__(self) -> None:
        super().__init__("unsigned: the sender has no certificate")


def verify_message(session: Session | None, route: wire.Route, message: Message) -> Message:
    """Return a signed message with its bare payload, after verification.

    Raises:
        UnsignedMessageError: If the message is not signed.
        UnknownSessionError: If the message was signed in another session.
        WireError: If the message is forged or replayed.
    """
    found = _FORM.match(message.payload)
    if found is None:
        raise UnsignedMessageError
    if (size := len(message.payload)) > MOST_BYTES:
        raise WireError(f"oversized: it has {size} bytes, and a message has at most {MOST_BYTES}")
    if message.payload[-1:] != b"}":
        raise WireError("forged: its envelope has no end")
    if session is None or found[2] != session.name.encode():
        raise UnknownSessionError(found[2].decode())
    said = message.payload[found.end() : -1]
    session.verify(message.topic, route.leaf, int(found[3]), binascii.a2b_base64(found[1]), said)
    return message._replace(payload=b"" if said == _NOTHING else said)
