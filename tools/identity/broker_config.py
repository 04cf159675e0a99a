"""Configuration files of Mosquitto for a fleet: TLS, access rules and limits.

A device's certificate contains its name, and the broker lets the device write `dev/<name>/up/#` and read
`dev/<name>/dn/#` and the coordinator's state, nothing else. Observers are listed in the rules by name, because
Mosquitto's rules cannot distinguish observers from devices. The client id is also set to the certificate's name.
Otherwise a device could take over another device's session.

The options are tested with Mosquitto 2.0.11 (tests/tools/identity).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509

from fedquilt.core import JobError
from fedquilt.host import disk
from fedquilt.security import enrolment
from fedquilt.tools.identity.authority import CertificateAuthority
from fedquilt.wire import VERSION

ALL_ADDRESSES: Final = "0.0.0.0"  # noqa: S104
PORT: Final = 8883
MAX_PACKET: Final = 1024 * 1024  # bytes; a chunk is at most 256 KiB, a message or manifest less
MAX_QUEUED: Final = 50_000  # for one client: 10,000 devices that send at once, some twice
MAX_QUEUED_BYTES: Final = 512 * 1024 * 1024  # for one client: 10,000 profiles of 40 kB
MAX_INFLIGHT: Final = 100  # unacknowledged messages; a low limit slows a busy coordinator
SESSION_DAYS: Final = 1  # how long a session outlives its client
INSTALLED_FOLDER: Final = "/etc/mosquitto/fedquilt"


def mosquitto_config(host: str, port: int, folder: str) -> str:
    return f"""# made by `fedquilt broker config`
listener {port}{"" if host == ALL_ADDRESSES else f" {host}"}
cafile {folder}/ca.crt
certfile {folder}/broker.crt
keyfile {folder}/broker.key
crlfile {folder}/crl.pem
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
acl_file {folder}/acl
set_tcp_nodelay true
max_packet_size {MAX_PACKET}
max_inflight_messages {MAX_INFLIGHT}
max_queued_messages {MAX_QUEUED}
max_queued_bytes {MAX_QUEUED_BYTES}
persistent_client_expiration {SESSION_DAYS}d
persistence true
# Sessions survive a restart in this folder, unless mosquitto.conf sets it already:
# persistence_location /var/lib/mosquitto/
"""


def mosquitto_acl(fleet: str, observers: Sequence[str] = ()) -> str:
    """Return Mosquitto's acl_file, in which a client's user is its certificate's name.

    An observer may read everything except blobs and may not write.
    """
    root = f"fq/{VERSION}/{fleet}"
    watching = "".join(
        f"""
user {name}
topic deny {root}/dev/{name}/up/#
topic read {root}/dev/+/up/+
topic read {root}/dev/+/dn/+
topic read {root}/job/#
"""
        for name in observers
    )
    return f"""# made by `fedquilt broker config`
user coordinator
topic read {root}/dev/+/up/#
topic write {root}/dev/+/dn/#
topic write {root}/dev/+/up/presence
topic write {root}/dev/+/up/profile
topic write {root}/job/#
topic write {root}/dev/+/process
topic write {root}/coord/state
topic readwrite {root}/coord/process
{watching}
pattern write {root}/dev/%u/up/#
pattern read {root}/dev/%u/dn/#
pattern readwrite {root}/dev/%u/process
# Mosquitto warns that this pattern has no %u. A `topic` rule would not apply to devices, because they have a user.
pattern read {root}/coord/state
"""


def write_config(
    authority: CertificateAuthority,
    hosts: Sequence[str],
    out: Path,
    now_s: float,
    *,
    fleet: str = "fleet",
    listen: tuple[str, int] = (ALL_ADDRESSES, PORT),
    installed: str = INSTALLED_FOLDER,
) -> list[str]:
    """Write the configuration, certificates and key of a broker into a folder, and return next steps.

    An existing certificate stays if it is valid for these hosts, by which clients reach the broker. `installed` is the
    folder's later path on the broker's machine. Raise JobError if this path is invalid or there is no host.
    """
    if not hosts:
        raise JobError("--host is missing: give the names and addresses by which clients reach the broker")
    installed_folder = installed.rstrip("/")
    if not re.fullmatch(r'/[^\s"]*', installed_folder) or not installed_folder.isprintable():
        raise JobError(f"--installed {installed!r} must be an absolute path without spaces and quotes")
    with disk.disk_errors(f"create {out}"):
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    observers = authority.valid_observers(now_s)
    files = {
        "ca.crt": (authority.folder / "ca.crt").read_bytes(),
        "crl.pem": authority.write_crl(now_s).read_bytes(),
        "fedquilt.conf": mosquitto_config(*listen, installed_folder).encode(),
        "acl": mosquitto_acl(fleet, observers).encode(),
    }
    messages = []
    if not _is_certificate_current(authority, out, hosts, now_s):
        issued, key = authority.issue_with_new_key("broker", "server", now_s, hosts=hosts)
        files |= {"broker.crt": issued.pem.encode()}
        enrolment.write_file_with_mode(out / "broker.key", key, 0o600)
        messages.append(f"a new certificate of the broker, for {', '.join(hosts)}")
    for name, data in files.items():
        enrolment.write_file_with_mode(out / name, data, 0o644)
    return [
        *messages,
        f"{out}: {', '.join(sorted([*files, 'broker.key']))}",
        f"copy it to {installed_folder} on the broker's machine, as files of user mosquitto, broker.key 0600",
        f"link {installed_folder}/fedquilt.conf into /etc/mosquitto/conf.d; then restart the broker",
    ]


def _is_certificate_current(authority: CertificateAuthority, out: Path, hosts: Sequence[str], now_s: float) -> bool:
    try:
        cert = x509.load_pem_x509_certificate((out / "broker.crt").read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    registered = authority.register.find_by_serial(f"{cert.serial_number:x}")
    if registered is None or registered.revoked_s is not None or not (out / "broker.key").is_file():
        return False
    certificate_hosts = {str(name.value) for name in names}
    is_fresh = now_s < registered.ends_s - (registered.ends_s - registered.issued_s) * enrolment.RENEWAL_SHARE
    return certificate_hosts == set(hosts) and is_fresh
