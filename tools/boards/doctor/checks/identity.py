"""Checks of an agent's broker settings, secret files and certificate."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from fedquilt.core import FedquiltError
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.host import sysfs
from fedquilt.security import enrolment
from fedquilt.tools.boards.doctor import certificate
from fedquilt.tools.boards.doctor.findings import Finding, drop_missing, error, ok, warning
from fedquilt.transport.mqtt.broker import Broker

PARTS: Final = ("ca", "cert", "key", "password_file")


def check_identity(settings: AgentSettings, path: Path, clock_s: float) -> list[Finding]:
    return drop_missing(
        [check_credentials(settings, path), check_secret_modes(settings), *check_certificate(settings, path, clock_s)]
    )


def check_credentials(settings: AgentSettings, path: Path) -> Finding:
    try:
        broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    except FedquiltError as problem:
        files = [Path(name) for part in PARTS if (name := getattr(settings.broker, part)) is not None]
        if any(sysfs.is_forbidden(one) for one in files):
            mend = f"sudo fedquilt doctor {path}"
        elif settings.enrol.url is not None and not all(sysfs.is_visible(one) for one in files):
            mend = f"sudo fedquilt identity enrol {path}"
        else:
            mend = f"correct [broker] in {path}"
        return error("FQ304", str(problem), mend)
    return ok("FQ304", f"[broker] can be used: {broker}")


def check_secret_modes(settings: AgentSettings) -> Finding | None:
    """Check that other users cannot read keys and passwords. Return None if so."""
    for name in (settings.broker.key, settings.broker.password_file, settings.enrol.token):
        try:
            mode = os.stat(name).st_mode if name is not None else 0
        except OSError:
            continue
        if name is not None and mode & 0o077:
            return warning("FQ305", f"{name} can be read by other users (mode {mode & 0o777:04o})", f"chmod 600 {name}")
    return None


def check_certificate(settings: AgentSettings, path: Path, clock_s: float) -> list[Finding | None]:
    if settings.broker.cert is None:
        return []
    try:
        held = certificate.load_certificate(Path(settings.broker.cert))
    except (OSError, ValueError):
        return []  # `check_credentials` tells
    return [check_validity(held, settings.broker.cert, path, clock_s), check_certificate_name(held, settings)]


def check_validity(held: certificate.Certificate, file: str, path: Path, clock_s: float) -> Finding:
    ends = format_day(held.ends_s)
    renew = f"sudo fedquilt identity enrol {path}"
    if clock_s < held.begins_s:
        return error(
            "FQ306",
            f"certificate {file} begins on {format_day(held.begins_s)}, and the clock says "
            f"{format_day(clock_s)}: it is behind",
            "sudo timedatectl set-ntp true",
        )
    if clock_s >= held.ends_s:
        return error("FQ306", f"certificate {file} ended on {ends}: the broker will refuse it", renew)
    if clock_s >= held.ends_s - (held.ends_s - held.begins_s) * enrolment.DUE_SHARE / 2:
        return warning("FQ306", f"certificate {file} ends on {ends} and was not renewed in time", renew)
    return ok("FQ306", f"certificate {file} is valid until {ends}")


def check_certificate_name(held: certificate.Certificate, settings: AgentSettings) -> Finding:
    if held.name != settings.device:
        return error(
            "FQ307",
            f"certificate {settings.broker.cert} is of {held.name!r}, and this device is {settings.device!r}: "
            "the broker keeps it to the other's branch",
            f"fedquilt identity token {settings.device} on the authority's machine, then enrol this board anew",
        )
    return ok("FQ307", f"the certificate names {settings.device}")


def format_day(clock_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(clock_s))
