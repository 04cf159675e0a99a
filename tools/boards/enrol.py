"""Command `fedquilt enrol board`, the device's side of enrolment."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import msgspec

from fedquilt.edge_agent import enrolment as device_enrolment
from fedquilt.edge_agent import settings as agent
from fedquilt.host import disk
from fedquilt.security import enrolment


def enrol_device(settings: Path, *, url: str | None, waits: bool, request: Path | None, accept: Path | None) -> int:
    """Enrol this device online, or write a signing request, or accept a certificate."""
    told = agent.load_settings(settings)
    if url is not None:
        told = msgspec.structs.replace(told, enrol=msgspec.structs.replace(told.enrol, url=url))
    if request is not None:
        key = device_enrolment.load_or_create_key(device_enrolment.paths_from_settings(told))
        enrolment.write_file_with_mode(
            request, device_enrolment.create_signing_request(key, told.device).encode(), 0o644
        )
        print(f"{request}: for {told.device}; its key's fingerprint is {enrolment.key_fingerprint(key.public_key())}")
        print(f"carry it to the authority: fedquilt enrol sign {request.name} --device {told.device}")
        return 0
    if accept is not None:
        with disk.disk_errors(f"read {accept}"):
            pem = accept.read_bytes()
        print(f"{told.device} is enrolled, until {device_enrolment.install_certificate(told, pem):%Y-%m-%d}")
        return 0

    def current_time() -> datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)

    print(
        device_enrolment.enrol_with_retries(told, current_time, time.sleep)
        if waits
        else device_enrolment.enrol(told, current_time())
    )
    return 0
