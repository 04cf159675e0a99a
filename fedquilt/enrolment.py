"""Enrolment messages between a board and the endpoint, and storage of secrets.

One JSON object each way over HTTPS: a `Request` (a signing request; with a one-time token to enrol,
without one to renew) and an `Answer` (a certificate, or a sentence with the reason). Both are
bounded and strictly decoded. Keys never travel.
"""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from fedquilt import disk
from fedquilt.core import UNDECODABLE, Name, WireError

PORT: Final = 8884  # beside MQTT's 8883
ENROL, RENEW, CRL = "/v1/enrol", "/v1/renew", "/crl.pem"
MAX_BODY: Final = 16 * 1024  # bytes, either way
DUE_SHARE: Final = 1 / 3  # a certificate is renewed in the last third of its life
SOON_S: Final = 30 * 86400.0  # so long before its end a certificate is named that nothing renews by itself

Pem = Annotated[str, Meta(max_length=8 * 1024)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request to sign `csr`: PKCS#10, PEM, for the common name `device`; `token` only to enrol."""

    device: Name
    csr: Pem
    token: Annotated[str, Meta(max_length=200)] | None = None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Certificate, PEM, or None and the reason in a sentence that names the mend."""

    certificate: Pem | None = None
    reason: Annotated[str, Meta(max_length=1000)] = ""


M = TypeVar("M", bound=msgspec.Struct)


def decode(body: bytes, kind: type[M]) -> M:
    """Decode the message in `body`.

    Raises:
        WireError: too large, not JSON, or of another kind. It quotes nothing: the body may hold a token.
    """
    if len(body) > MAX_BODY:
        raise WireError(f"{len(body)} bytes are more than the {MAX_BODY} of an enrolment message")
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise WireError(f"this is no enrolment {kind.__name__.lower()}: {error}") from None


def due(begins: datetime.datetime, ends: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether a certificate should be renewed now: in the last third of its life, or if the clock is before it.

    A certificate is made before it is used, so a clock before its beginning is wrong (a board
    without a battery may say 1970): the endpoint, whose clock is right, then decides.
    """
    return now < begins or now >= ends - (ends - begins) * DUE_SHARE


def keep(path: Path, data: bytes, mode: int) -> None:
    """Write a file at once or not at all; at no moment can others read a secret (mode 0o600).

    Raises:
        StoreError: the folder cannot be written.
    """
    with disk.doing(f"write {path}"):
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)  # whatever the umask
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        disk.REAL.sync(path.parent)


# -- certificates, where the cryptography library is installed -------------------------------------


def key_id(public: Any) -> str:
    """Fingerprint of a public key for people to compare: SHA-256 (SubjectPublicKeyInfo, DER) in hex."""
    import hashlib

    from cryptography.hazmat.primitives import serialization

    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def common_name(named: Any) -> str | None:
    """The only common name of a certificate or signing request; None if there is none, or several."""
    from cryptography.x509.oid import NameOID

    found = named.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else None
