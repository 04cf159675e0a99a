"""Commands `fedquilt identity` and `fedquilt broker config`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedquilt import metrics_endpoint
from fedquilt.core import JobError, SiteRight
from fedquilt.host import disk, http_server
from fedquilt.security import enrolment
from fedquilt.tools.identity import broker_config
from fedquilt.tools.identity.authority import RESERVED_NAMES, CertificateAuthority, clock_s, describe_state
from fedquilt.tools.identity.endpoint import EnrolmentServer, EnrolmentService, serve_until_signal
from fedquilt.tools.identity.register import TOKEN_VALIDITY_S, Kind, format_time


def create_authority(folder: Path) -> None:
    authority = CertificateAuthority.create(folder, "fedquilt", clock_s())
    print(f"{folder}: a new authority, until {authority.cert.not_valid_after_utc:%Y-%m-%d}")
    print(f"fingerprint of its key: {enrolment.key_fingerprint(authority.cert.public_key())}")
    print(f"give boards {folder}/ca.crt; keep {folder} secret, with a backup: its ca.key controls the fleet")


def issue_and_write_certificate(
    folder: Path,
    name: str,
    hosts: Sequence[str],
    out: Path,
    role: Literal["observer", "site"] | None = None,
    device_patterns: Sequence[str] = (),
    max_devices: int | None = None,
) -> None:
    """Write a new certificate and key for a server (with `hosts`), observer, site or coordinator.

    Existing files are replaced. Raise JobError if the name or options do not fit the kind of certificate.
    """
    kind: Kind = role or ("server" if hosts else "coordinator")
    if role is not None and hosts:
        raise JobError(f"{name}: --host is only for servers: leave it out with --role {role}")
    if (role == "site") != bool(device_patterns and max_devices):
        problem = "--role site needs" if role == "site" else "only --role site has"
        raise JobError(f"{name}: {problem} --boards and --most-boards, such as --boards 'cam-*' --most-boards 40")
    site_right = _parse_right(device_patterns, max_devices) if device_patterns and max_devices else None
    if kind == "coordinator" and name not in RESERVED_NAMES:
        raise JobError(
            f"{name} is not the coordinator: add --host HOST for a server or --role ROLE for an observer or site, or "
            f"enrol a device with `fedquilt identity token {name}`"
        )
    authority = CertificateAuthority(folder)
    issued, key = authority.issue_with_new_key(name, kind, clock_s(), hosts=hosts, site_right=site_right)
    with disk.disk_errors(f"make {out}"):
        out.mkdir(parents=True, exist_ok=True)
    enrolment.write_file_with_mode(out / f"{name}.key", key, 0o600)
    enrolment.write_file_with_mode(out / f"{name}.crt", issued.pem.encode(), 0o644)
    print(f"{out / name}.crt and .key, until {format_time(issued.ends_s)}")
    if role == "observer":
        print("to give the observer access, repeat `fedquilt broker config`, copy the files and reload the broker")


def _parse_right(device_patterns: Sequence[str], max_devices: int) -> SiteRight:
    try:
        return msgspec.convert({"boards": device_patterns, "most": max_devices}, SiteRight)
    except msgspec.ValidationError as error:
        raise JobError(
            f"--boards {', '.join(device_patterns)} --most-boards {max_devices} is invalid ({error}): write names, "
            "or the beginning of names and *"
        ) from None


def print_certificates(folder: Path, format: str) -> None:
    register, now_s = CertificateAuthority(folder).register, clock_s()
    issued, tokens = register.list_certificates(), register.list_tokens()
    if format == "json":
        rows: Any = {
            "certificates": [{k: v for k, v in cert._asdict().items() if k != "pem"} for cert in issued],
            "tokens": [cert._asdict() for cert in tokens],
        }
        print(msgspec.json.encode(rows).decode())
        return
    for cert in issued:
        print(f"{cert.name:24} {cert.kind:12} {describe_state(cert, now_s):34} key {cert.key_id[:16]}")
    for token in tokens:
        if token.used_s is None:
            validity = f"{'expired' if token.ends_s <= now_s else 'until'} {format_time(token.ends_s)}"
            print(f"{token.pattern:24} {'token':12} {validity}")


def revoke_certificates(folder: Path, name: str) -> None:
    revoked = CertificateAuthority(folder).revoke_name(name, clock_s())
    print(f"{name}: {len(revoked)} certificate{'' if len(revoked) == 1 else 's'} revoked, its tokens deleted")
    print(f"wrote {folder / 'crl.pem'}: copy it into Mosquitto's folder, and then")
    print("  `systemctl reload mosquitto` to refuse new connections, or")
    print("  `systemctl restart mosquitto` to close existing ones too")


def create_and_print_token(folder: Path, pattern: str, out: Path | None) -> None:
    if pattern in RESERVED_NAMES:
        raise JobError(f"{pattern!r} is reserved: use `fedquilt identity issue {pattern}` for its certificate")
    register, now_s = CertificateAuthority(folder).register, clock_s()
    with register.transaction():
        text = register.create_token(pattern, TOKEN_VALIDITY_S, now_s)
        if out is not None:
            disk.make_output_folder(out)
            enrolment.write_file_with_mode(out, f"{text}\n".encode(), 0o600)
    notice = f"for one board named {pattern}, until {format_time(now_s + TOKEN_VALIDITY_S)}; it is not shown again"
    if out is None:
        print(text)
        print(notice, file=sys.stderr)
    else:
        print(f"{out}: {notice}")


def serve_enrolment(folder: Path, listen: str, hosts: Sequence[str]) -> None:
    names = tuple(hosts) or tuple(dict.fromkeys((socket.gethostname(), socket.getfqdn())))
    http_server.raise_descriptor_limit()
    host, port = metrics_endpoint.parse_listen_address(listen)
    endpoint = EnrolmentServer(CertificateAuthority(folder), host, port, names)
    serve_until_signal(endpoint, lambda line: print(line, flush=True))


def sign_request_file(folder: Path, csr: Path, device: str, out: Path | None) -> None:
    with disk.disk_errors(f"read {csr}"):
        data = csr.read_bytes()[: enrolment.MAX_BODY_BYTES]
    authority = CertificateAuthority(folder)
    issued = EnrolmentService(authority).sign_request(data.decode("ascii", "replace"), device)
    out = out or csr.with_suffix(".crt")
    disk.make_output_folder(out)
    enrolment.write_file_with_mode(out, issued.pem.encode(), 0o644)
    print(f"{out}: certificate of {device} until {format_time(issued.ends_s)}, key fingerprint {issued.key_id}")
    print("compare the fingerprint with the board's, then run there: fedquilt identity accept AGENT.toml FILE")
    if authority.register.has_revoked_certificate(device, clock_s()):
        print(enrolment.OTHER_REVOKED_NOTE)


def write_broker_config(
    folder: Path, hosts: Sequence[str], out: Path, *, fleet: str, listen: str, installed: str
) -> None:
    authority, address = CertificateAuthority(folder), metrics_endpoint.parse_listen_address(listen)
    messages = broker_config.write_config(
        authority, hosts, out, clock_s(), fleet=fleet, listen=address, installed=installed
    )
    print("\n".join(messages))
