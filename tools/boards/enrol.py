"""Commands `fedquilt identity enrol`, `request` and `accept`, the device's side of enrolment."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from fedquilt.edge_agent import enrolment as device_enrolment
from fedquilt.edge_agent import settings as agent
from fedquilt.host import disk
from fedquilt.security import enrolment


def enrol_device(path: Path, *, should_retry: bool) -> None:
    """Enrol the device of an agent.toml, or renew its certificate if due, and print the result."""

    def current_time() -> datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)

    agent_settings = agent.load_settings(path)
    print(
        device_enrolment.enrol_with_retries(agent_settings, current_time, time.sleep)
        if should_retry
        else device_enrolment.enrol(agent_settings, current_time())
    )


def request_certificate(path: Path, csr: Path) -> None:
    """Write a certificate signing request into `csr`, and create a missing key of the device."""
    agent_settings = agent.load_settings(path)
    key = device_enrolment.load_or_create_key(device_enrolment.paths_from_settings(agent_settings))
    enrolment.write_file_with_mode(
        csr, device_enrolment.create_signing_request(key, agent_settings.device).encode(), 0o644
    )
    print(f"{csr}: request of {agent_settings.device}, key fingerprint {enrolment.key_fingerprint(key.public_key())}")
    print(f"copy it to the authority, then: fedquilt identity sign {csr.name} --device {agent_settings.device}")


def accept_certificate(path: Path, certificate: Path) -> None:
    """Install a requested certificate, or raise JobError if it does not fit the device's key."""
    agent_settings = agent.load_settings(path)
    with disk.disk_errors(f"read {certificate}"):
        pem = certificate.read_bytes()
    print(
        f"{agent_settings.device} is enrolled, until "
        f"{device_enrolment.install_certificate(agent_settings, pem):%Y-%m-%d}"
    )
