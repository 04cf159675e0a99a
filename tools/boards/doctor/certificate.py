"""Reader of X.509 certificates without the cryptography library, which boards may not have.

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
    """Names and validity of a certificate, in seconds since 1970."""

    name: str | None  # the subject's common name
    begins_s: float
    ends_s: float
    unit: str | None = None  # the subject's organisational unit


def load_certificate(path: Path) -> Certificate:
    """Load the first certificate of a PEM file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file does not contain a certificate.
    """
    with path.open("rb") as file:
        text = file.read(MOST_BYTES).decode("ascii", "replace")
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    if begin not in text or end not in text:
        raise ValueError("no PEM certificate")
    return parse_certificate(ssl.PEM_cert_to_DER_cert(f"{begin}{text.split(begin, 1)[1].split(end, 1)[0]}{end}"))


def parse_certificate(der: bytes) -> Certificate:
    """Parse a certificate in DER form, without verification.

    Raises:
        ValueError: If the bytes are not a certificate.
    """
    try:
        whole = _unwrap_value(der, _SEQUENCE)
        tbs = next(content for tag, content in _iterate_members(whole) if tag == _SEQUENCE)
        fields = [content for tag, content in _iterate_members(tbs) if tag != _VERSION]
        begins, ends = (_parse_time(tag, content) for tag, content in _iterate_members(fields[3]))
        return Certificate(_find_attribute(fields[4], _COMMON_NAME), begins, ends, _find_attribute(fields[4], _UNIT))
    except (IndexError, StopIteration) as problem:
        raise ValueError(f"no certificate ({type(problem).__name__})") from None


def _iterate_members(content: bytes) -> Iterator[tuple[int, bytes]]:
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


def _unwrap_value(der: bytes, tag: int) -> bytes:
    found, content = next(_iterate_members(der))
    if found != tag:
        raise ValueError("no certificate (not a sequence)")
    return content


def _parse_time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC:  # two digits of the year; from 50 on they are of the last century
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED:
        raise ValueError("no certificate (no date)")
    parts = (int(text[:4]), *(int(text[at : at + 2]) for at in (4, 6, 8, 10, 12)))
    return float(calendar.timegm((*parts, 0, 0, 0)))


def _find_attribute(subject: bytes, wanted: bytes) -> str | None:
    for tag, part in _iterate_members(subject):
        if tag != _SET:
            continue
        for _, pair in _iterate_members(part):
            (kind, oid), (_, value) = _iterate_members(pair)
            if kind == _OID and oid == wanted:
                return value.decode("utf-8", "replace")
    return None
