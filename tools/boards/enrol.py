"""Commands `fedquilt identity enrol`, `request` and `accept`, the device's side of enrolment."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from fedquilt.edge_agent import enrolment as device_enrolment
from fedquilt.edge_agent import settings as agent
from fedquilt.host import disk
from fedquilt.security import enrolment


def enrol_device(settings: Path, *, waits: bool) -> int:
    def current_time() -> datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)

    told = agent.load_settings(settings)
    print(
        device_enrolment.enrol_with_retries(told, current_time, time.sleep)
        if waits
        else device_enrolment.enrol(told, current_time())
    )
    return 0


def request_certificate(settings: Path, csr: Path) -> int:
    told = agent.load_settings(settings)
    key = device_enrolment.load_or_create_key(device_enrolment.paths_from_settings(told))
    enrolment.write_file_with_mode(csr, device_enrolment.create_signing_request(key, told.device).encode(), 0o644)
    print(f"{csr}: for {told.device}; its key's fingerprint is {enrolment.key_fingerprint(key.public_key())}")
    print(f"carry it to the authority: fedquilt identity sign {csr.name} --device {told.device}")
    return 0


def accept_certificate(settings: Path, certificate: Path) -> int:
    told = agent.load_settings(settings)
    with disk.disk_errors(f"read {certificate}"):
        pem = certificate.read_bytes()
    print(f"{told.device} is enrolled, until {device_enrolment.install_certificate(told, pem):%Y-%m-%d}")
    return 0
