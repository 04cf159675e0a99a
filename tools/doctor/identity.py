"""Checks of what lets an agent in: the broker's settings, who may read its secrets, its certificate."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import enrolment
from fedquilt.core import FedquiltError
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.tools.doctor import certificate
from fedquilt.tools.doctor.findings import Finding, error, ok, there, warning
from fedquilt.transport.broker import Broker

PARTS: Final = ("ca", "cert", "key", "password_file")


def check(settings: AgentSettings, path: Path, clock_s: float) -> list[Finding]:
    """All findings about the identity that the settings in the file `path` give."""
    return there([credentials(settings, path), secret(settings), *identity(settings, path, clock_s)])


def credentials(settings: AgentSettings, path: Path) -> Finding:
    """Check that the broker's settings and credential files are usable."""
    try:
        broker = Broker.parse(**msgspec.structs.asdict(settings.broker))
    except FedquiltError as problem:
        files = [Path(name) for part in PARTS if (name := getattr(settings.broker, part)) is not None]
        if any(sysfs.hidden(one) for one in files):
            mend = f"sudo fedquilt doctor {path}"
        elif settings.enrol.url is not None and not all(sysfs.there(one) for one in files):
            mend = f"sudo fedquilt enrol board {path}"
        else:
            mend = f"correct [broker] in {path}"
        return error("FQ304", str(problem), mend)
    return ok("FQ304", f"[broker] can be used: {broker}")


def secret(settings: AgentSettings) -> Finding | None:
    """Keys and passwords are the agent's alone."""
    for name in (settings.broker.key, settings.broker.password_file, settings.enrol.token):
        try:
            mode = os.stat(name).st_mode if name is not None else 0
        except OSError:
            continue
        if name is not None and mode & 0o077:
            return warning("FQ305", f"{name} can be read by other users (mode {mode & 0o777:04o})", f"chmod 600 {name}")
    return None


def identity(settings: AgentSettings, path: Path, clock_s: float) -> list[Finding | None]:
    """The certificate's dates and name."""
    if settings.broker.cert is None:
        return []
    try:
        held = certificate.load(Path(settings.broker.cert))
    except (OSError, ValueError):
        return []  # `credentials` tells
    return [dates(held, settings.broker.cert, path, clock_s), named(held, settings)]


def dates(held: certificate.Certificate, file: str, path: Path, clock_s: float) -> Finding:
    """Check a certificate's validity by the machine's clock."""
    ends = day(held.ends_s)
    renew = f"sudo fedquilt enrol board {path}"
    if clock_s < held.begins_s:
        return error(
            "FQ306",
            f"certificate {file} begins on {day(held.begins_s)}, and the clock says {day(clock_s)}: it is behind",
            "sudo timedatectl set-ntp true",
        )
    if clock_s >= held.ends_s:
        return error("FQ306", f"certificate {file} ended on {ends}: the broker will refuse it", renew)
    if clock_s >= held.ends_s - (held.ends_s - held.begins_s) * enrolment.DUE_SHARE / 2:
        return warning("FQ306", f"certificate {file} ends on {ends} and was not renewed in time", renew)
    return ok("FQ306", f"certificate {file} is valid until {ends}")


def named(held: certificate.Certificate, settings: AgentSettings) -> Finding:
    """Check that the certificate is for this device."""
    if held.name != settings.device:
        return error(
            "FQ307",
            f"certificate {settings.broker.cert} is of {held.name!r}, and this device is {settings.device!r}: "
            "the broker keeps it to the other's branch",
            f"fedquilt enrol token {settings.device} on the authority's machine, then enrol this board anew",
        )
    return ok("FQ307", f"the certificate names {settings.device}")


def day(clock_s: float) -> str:
    """Day of a wall-clock time, UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(clock_s))
