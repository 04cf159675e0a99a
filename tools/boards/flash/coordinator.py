"""Settings of a coordinator's machine (coordinator.toml), as files and command arguments.

    fleet = "site"
    metrics = "127.0.0.1:9464"

    [broker]
    url = "mqtts://broker.site:8883"
    ca = "ca.crt"
    cert = "coordinator.crt"
    key = "coordinator.key"

    [enrol]
    hosts = ["hub.site"]
    port = 8884

    [dash]
    listen = "127.0.0.1:8080"

Without [enrol] nothing there enrols boards, without [dash] there is no dashboard. Runs are in /var/lib/fedquilt/runs,
the authority in /var/lib/fedquilt-ca.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fedquilt import open_metrics
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.core import JobError
from fedquilt.core.messages import Name
from fedquilt.formats import toml
from fedquilt.transport.mqtt.broker import Broker

ETC: Final = "/etc/fedquilt"
FILES: Final = {"ca": "ca.crt", "cert": "coordinator.crt", "key": "coordinator.key", "password_file": "password"}
SECRET: Final = ("coordinator.key", "password")
OLDEST_SYSTEMD: Final = 247  # the first that hands a service its secrets
_HOST: Final = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


class BrokerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The [broker] table. File names are relative to the settings."""

    url: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    password_file: str | None = None


class EnrolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: tuple[str, ...] = ()
    port: Annotated[int, Meta(ge=1, le=65535)] = 8884


class DashTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    listen: str = "127.0.0.1:8080"
    actions: bool = False
    names: tuple[str, ...] = ()


class BlobsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    http: str | None = None
    url: str | None = None


class CoordinatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    broker: BrokerTable
    fleet: Name = "fleet"
    metrics: str | None = None
    blobs: BlobsTable = BlobsTable()
    enrol: EnrolTable | None = None
    dash: DashTable | None = None


class CoordinatorFiles(msgspec.Struct, frozen=True):
    files: dict[str, bytes]
    serve: tuple[str, ...]
    enrol: tuple[str, ...] | None  # None without enrolment
    secrets: tuple[str, ...]
    dash: tuple[str, ...] | None = None  # None without a dashboard
    device: str = "coordinator"

    @property
    def extras(self) -> tuple[str, ...]:
        asked = {
            "identity": self.enrol is not None or "coordinator.crt" in self.files,
            "metrics": "--metrics" in self.serve,
            "web": self.dash is not None,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


def read_coordinator_files(path: Path) -> CoordinatorFiles:
    """Read the settings of a coordinator's machine and the files named there.

    Raises:
        JobError: If settings, a file or certificates are unusable.
    """
    with toml.prefix_errors(str(path)):
        known = toml.convert_table(toml.read_toml(path), CoordinatorSettings, "a coordinator's settings")
        given = {key: getattr(known.broker, key) for key in FILES if getattr(known.broker, key) is not None}
        here: dict[str, Any] = {key: str(path.parent / value) for key, value in given.items()}
        Broker.from_url(known.broker.url, **here)
        blobs = {name: value for name in ("http", "url") if (value := getattr(known.blobs, name)) is not None}
        for key, address in (("[broker] url", known.broker.url), *((f"[blobs] {name}", blobs[name]) for name in blobs)):
            if odd := re.search(r"[\s%$\"'\\]", address):
                raise JobError(f"{key}: {odd[0]!r} has no place in an address")
        BlobLocationSettings(known.blobs.http, known.blobs.url)
        if known.metrics is not None:
            open_metrics.parse_listen_address(known.metrics)
        if known.enrol is not None:
            _check_hosts("[enrol] hosts", known.enrol.hosts)
        if known.dash is not None:
            host, _ = open_metrics.parse_listen_address(known.dash.listen)
            _check_hosts("[dash] listen", [host])
            _check_hosts("[dash] names", known.dash.names)
    files = {FILES[key]: _read_file(Path(place)) for key, place in here.items()}
    words = ["--broker", known.broker.url, "--fleet", known.fleet]
    for key in given:
        folder = "${CREDENTIALS_DIRECTORY}" if FILES[key] in SECRET else ETC
        words += [f"--{key.replace('_', '-')}", f"{folder}/{FILES[key]}"]
    if known.metrics is not None:
        words += ["--metrics", known.metrics]
    words += [word for name, value in blobs.items() for word in (f"--blobs-{name}", value)]
    files["coordinator.toml"] = path.read_bytes()  # for people: the units have all that it says
    enrol = None if known.enrol is None else _enrol_arguments(known.enrol)
    dash = None if known.dash is None else _dash_arguments(known.dash)
    return CoordinatorFiles(files, tuple(words), enrol, tuple(name for name in SECRET if name in files), dash)


def _check_hosts(key: str, given: Sequence[str]) -> None:
    if wrong := [host for host in given if not _HOST.fullmatch(host)]:
        raise JobError(f"{key}: {wrong[0]!r} is no name of a host")


def _dash_arguments(table: DashTable) -> tuple[str, ...]:
    names = [word for name in table.names for word in ("--host", name)]
    return ("--listen", table.listen, *["--actions"] * table.actions, *names)


def _enrol_arguments(table: EnrolTable) -> tuple[str, ...]:
    return ("--listen", f"0.0.0.0:{table.port}", *(word for host in table.hosts for word in ("--host", host)))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


def template_values(made: CoordinatorFiles, systemd: int) -> dict[str, str]:
    """Return the values for the templates of a coordinator's units, by word.

    Raises:
        JobError: If systemd is older than version 247, which introduced credentials.
    """
    if systemd < OLDEST_SYSTEMD:
        raise JobError(f"a coordinator needs systemd {OLDEST_SYSTEMD} or later, and that target has {systemd}")
    return {
        "CONDITIONS": f"ConditionPathExists={ETC}/coordinator.crt" if "coordinator.crt" in made.files else "",
        "ARGUMENTS": _join_arguments(made.serve),
        "CREDENTIALS": "\n".join(f"LoadCredential={name}:{ETC}/{name}" for name in made.secrets),
        "ENROL": _join_arguments(made.enrol or ()),
        "DASH": _join_arguments(made.dash or ()),
        **dict.fromkeys(("FOLDER", "ABOVE"), ""),
    }


def _join_arguments(given: Sequence[str]) -> str:
    return "".join(f" {word}" for word in given)
