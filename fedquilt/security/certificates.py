"""Names and dates in certificate files, read with Python's own library."""

from __future__ import annotations

import ssl
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedquilt.core import JobError

ENROL_AGAIN_FIX: Final = (
    "fedquilt identity token {device} on the authority's machine, then enrol this board again without its old "
    "certificate"
)


COORDINATOR: Final = "coordinator"  # common name in the coordinator's certificate


class Certificate(NamedTuple):
    file: str
    name: str | None  # the subject's common name
    begins_s: float
    ends_s: float
    unit: str | None = None  # the subject's organisational unit


def load_certificate(file: str | Path) -> Certificate:
    """Load the first certificate of a PEM file without verification. Raise OSError if that fails."""
    certificate: dict[str, Any] = _test_decode_cert(str(file))
    subject: dict[str, str] = {}
    for key, value in (entry for names in certificate["subject"] for entry in names):
        subject.setdefault(key, value)
    begins_s, ends_s = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    return Certificate(str(file), subject.get("commonName"), begins_s, ends_s, subject.get("organizationalUnitName"))


def find_name_problem(certificate: Certificate, device: str) -> str | None:
    if certificate.name == device:
        return None
    return (
        f"certificate {certificate.file} is of {certificate.name!r}, but this device is {device!r}: "
        f"the broker permits only topics of {certificate.name!r}"
    )


def require_device_name(file: Path, device: str) -> None:
    """Raise JobError if the certificate is of another device, which the broker would disconnect."""
    try:
        problem = find_name_problem(load_certificate(file), device)
    except OSError:  # the connection reports a damaged file
        return
    if problem is not None:
        raise JobError(f"{problem}. Fix: {ENROL_AGAIN_FIX.format(device=device)}")


def require_coordinator_name(file: Path) -> None:
    """Raise JobError if the certificate is not a coordinator's, so that devices would reject it."""
    try:
        name = load_certificate(file).name
    except OSError:  # the connection reports a damaged file
        return
    if name != COORDINATOR:
        raise JobError(
            f"certificate {file} is of {name!r}, not of {COORDINATOR!r}: "
            "make one with `fedquilt identity issue coordinator`"
        )


def require_enrolled(broker_cert: str | None, enrol_url: str | None, device: str) -> None:
    """Raise JobError if a device that can enrol has no certificate yet."""
    if enrol_url is not None and broker_cert is not None and not Path(broker_cert).exists():
        raise JobError(
            f"{device} has no certificate {broker_cert}: run `fedquilt identity enrol` with this settings file first"
        )
