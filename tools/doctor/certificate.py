"""Whose a certificate is and how long it is valid, by its bytes: a board need not have the cryptography library.

X.509 (RFC 5280, 4.1) in DER: a certificate is a sequence whose first member, tbsCertificate, holds the
version (tagged 0, may be absent), serial number, algorithm, issuer, validity, subject and more, in this order.
Nothing is verified here: that is what TLS does.
"""

from __future__ import annotations

import calendar
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_SEQUENCE, _SET, _OID, _UTC, _GENERALIZED, _VERSION = 0x30, 0x31, 0x06, 0x17, 0x18, 0xA0
_COMMON_NAME: Final = bytes((0x55, 0x04, 0x03))  # 2.5.4.3
_UNIT: Final = bytes((0x55, 0x04, 0x0B))  # 2.5.4.11
MOST_BYTES: Final = 64 * 1024


class Certificate(NamedTuple):
    """Seconds since 1970."""

    name: str | None  # the subject's common name
    begins_s: float
    ends_s: float
    unit: str | None = None  # the subject's organisational unit


def load(path: Path) -> Certificate:
    """The first certificate in a PEM file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no certificate.
    """
    with path.open("rb") as file:
        text = file.read(MOST_BYTES).decode("ascii", "replace")
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    if begin not in text or end not in text:
        raise ValueError("no PEM certificate")
    return parse(ssl.PEM_cert_to_DER_cert(f"{begin}{text.split(begin, 1)[1].split(end, 1)[0]}{end}"))


def parse(der: bytes) -> Certificate:
    """What the bytes of a certificate say.

    Raises:
        ValueError: they are none.
    """
    try:
        whole = _only(der, _SEQUENCE)
        tbs = next(content for tag, content in _members(whole) if tag == _SEQUENCE)
        fields = [content for tag, content in _members(tbs) if tag != _VERSION]
        begins, ends = (_seconds(tag, content) for tag, content in _members(fields[3]))
        return Certificate(_part(fields[4], _COMMON_NAME), begins, ends, _part(fields[4], _UNIT))
    except (IndexError, StopIteration) as problem:
        raise ValueError(f"no certificate ({type(problem).__name__})") from None


def _members(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each value, one after another."""
    at = 0
    while at < len(content):
        tag, length, at = content[at], content[at + 1], at + 2
        if length >= 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(content[at : at + size], "big"), at + size
        if at + length > len(content):
            raise ValueError("no certificate (it ends too early)")
        yield tag, content[at : at + length]
        at += length


def _only(der: bytes, tag: int) -> bytes:
    found, content = next(_members(der))
    if found != tag:
        raise ValueError("no certificate (not a sequence)")
    return content


def _seconds(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC:  # two digits of the year; from 50 on they are of the last century
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED:
        raise ValueError("no certificate (no date)")
    parts = (int(text[:4]), *(int(text[at : at + 2]) for at in (4, 6, 8, 10, 12)))
    return float(calendar.timegm((*parts, 0, 0, 0)))


def _part(subject: bytes, wanted: bytes) -> str | None:
    for tag, part in _members(subject):
        if tag != _SET:
            continue
        for _, pair in _members(part):
            (kind, oid), (_, value) = _members(pair)
            if kind == _OID and oid == wanted:
                return value.decode("utf-8", "replace")
    return None
