"""Checks of an agent's broker settings, secret files and certificate."""

from __future__ import annotations

import os
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt.core import FedquiltError
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.host import sysfs
from fedquilt.security import enrolment
from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.transport.mqtt.broker import Broker

PARTS: Final = ("ca", "cert", "key", "password_file")


class Certificate(NamedTuple):
    """Names and validity of a certificate, in seconds since 1970."""

    file: str
    name: str | None  # the subject's common name
    begins_s: float
    ends_s: float
    unit: str | None = None  # the subject's organisational unit


def load_certificate(file: str) -> Certificate:
    """Load the first certificate of a PEM file, with Python's own ssl alone, and without verification.

    Raises:
        OSError: If the file cannot be read, or holds no certificate.
    """
    told: dict[str, Any] = _test_decode_cert(file)  # boards may not have the cryptography library
    subject: dict[str, str] = {}
    for key, value in (each for names in told["subject"] for each in names):
        subject.setdefault(key, value)
    begins_s, ends_s = (ssl.cert_time_to_seconds(told[key]) for key in ("notBefore", "notAfter"))
    return Certificate(file, subject.get("commonName"), begins_s, ends_s, subject.get("organizationalUnitName"))


def _check_credentials(settings: AgentSettings, path: Path) -> Verdict:
    try:
        return f"[broker] can be used: {Broker.from_url(**msgspec.structs.asdict(settings.broker))}"
    except FedquiltError as problem:
        files = [Path(name) for part in PARTS if (name := getattr(settings.broker, part)) is not None]
        if any(sysfs.is_forbidden(one) for one in files):
            return error(str(problem), f"sudo fedquilt doctor {path}")
        if settings.enrol.url is not None and not all(sysfs.is_visible(one) for one in files):
            return error(str(problem), f"sudo fedquilt identity enrol {path}")
        return error(str(problem), f"correct [broker] in {path}")


def _check_secret_modes(settings: AgentSettings) -> Verdict:
    """Check that other users cannot read keys and passwords."""
    for name in (settings.broker.key, settings.broker.password_file, settings.enrol.token):
        try:
            mode = os.stat(name).st_mode if name is not None else 0
        except OSError:
            continue
        if mode & 0o077:
            return Problem(f"{name} can be read by other users (mode {mode & 0o777:04o})", f"chmod 600 {name}")
    return None


def _check_validity(held: Certificate, path: Path, clock_s: float) -> Verdict:
    certificate, ends, renew = (
        f"certificate {held.file}",
        format_day(held.ends_s),
        f"sudo fedquilt identity enrol {path}",
    )
    if clock_s < held.begins_s:
        return error(
            f"{certificate} begins on {format_day(held.begins_s)}, and the clock says {format_day(clock_s)}: "
            "it is behind",
            "sudo timedatectl set-ntp true",
        )
    if clock_s >= held.ends_s:
        return error(f"{certificate} ended on {ends}: the broker will refuse it", renew)
    if clock_s >= held.ends_s - (held.ends_s - held.begins_s) * enrolment.DUE_SHARE / 2:
        return Problem(f"{certificate} ends on {ends} and was not renewed in time", renew)
    return f"{certificate} is valid until {ends}"


def _check_certificate_name(held: Certificate, settings: AgentSettings) -> Verdict:
    if held.name == settings.device:
        return f"the certificate names {settings.device}"
    return error(
        f"certificate {held.file} is of {held.name!r}, and this device is {settings.device!r}: "
        "the broker keeps it to the other's branch",
        f"fedquilt identity token {settings.device} on the authority's machine, then enrol this board anew",
    )


def format_day(clock_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(clock_s))


IDENTITY: Final = (
    Check("FQ304", ("settings", "path"), _check_credentials),
    Check("FQ305", ("settings",), _check_secret_modes),
    Check("FQ306", ("certificate", "path", "clock_s"), _check_validity),
    Check("FQ307", ("certificate", "settings"), _check_certificate_name),
)
