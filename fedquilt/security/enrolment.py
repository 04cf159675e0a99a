"""Enrolment messages between a device and the enrolment server, and storage of secrets.

Each direction is one JSON object over HTTPS: a `SigningRequest` (with a one-time token for enrolment, or no token for
renewal) and a `SigningResponse` (a certificate, or the reason for its refusal). Both are limited in size and strictly
decoded. Private keys are never sent.
"""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from fedquilt.core import DECODE_ERRORS, Name, WireError
from fedquilt.host import disk

PORT: Final = 8884  # next to 8883 of MQTT
ENROL, RENEW, CRL = "/v1/enrol", "/v1/renew", "/crl.pem"
MAX_BODY_BYTES: Final = 16 * 1024  # size limit of a request or response
RENEWAL_SHARE: Final = 1 / 3  # a certificate is renewed in the last third of its life
EXPIRY_WARNING_S: Final = 30 * 86400.0  # a certificate without renewal is reported this long before its end
OTHER_REVOKED_NOTE: Final = (
    "The earlier certificate of this device is revoked: copy the authority's crl.pem to the broker, and restart the "
    "broker"
)

Pem = Annotated[str, Meta(max_length=8 * 1024)]


class SigningRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    device: Name
    csr: Pem
    token: Annotated[str, Meta(max_length=200)] | None = None


class SigningResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    certificate: Pem | None = None
    is_other_revoked: bool = False  # whether a certificate of the same device is revoked and has not expired
    reason: Annotated[str, Meta(max_length=1000)] = ""


M = TypeVar("M", bound=msgspec.Struct)


def decode_message(body: bytes, kind: type[M]) -> M:
    """Decode an enrolment message, or raise WireError without quoting the body, which may contain a token."""
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"enrolment message has {len(body)} bytes, more than {MAX_BODY_BYTES}")
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise WireError(f"enrolment message is malformed: {error}") from None


def is_renewal_due(not_before: datetime.datetime, not_after: datetime.datetime, time: datetime.datetime) -> bool:
    """Return whether a certificate is not valid yet, or in the last third of its validity."""
    return time < not_before or time >= not_after - (not_after - not_before) * RENEWAL_SHARE


def write_file_with_mode(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically and durably. No part of the file ever has other permission bits than `mode`."""
    with disk.disk_errors(f"write {path}"):
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)  # independent of the umask
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        disk.REAL.sync(path.parent)


def key_fingerprint(public_key: Any) -> str:
    """Return the SHA-256 of a public key's SubjectPublicKeyInfo (DER), in hex."""
    import hashlib

    from cryptography.hazmat.primitives import serialization

    der = public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def common_name(certificate: Any) -> str | None:
    """Return the common name of a certificate or request, or None unless there is exactly one."""
    from cryptography.x509.oid import NameOID

    attributes = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if len(attributes) == 1 else None
