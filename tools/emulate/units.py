"""Services of a flashed root file system, started from their units without systemd.

Used entries of a unit are its path conditions, command, user, folders, environment, umask and credentials
(systemd.service(5), systemd.exec(5)). Limits and sandbox are ignored, because only systemd can apply them.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from fedquilt.core import JobError
from fedquilt.tools.emulate.guest import ENVIRONMENT, Guest

UNITS: Final = "etc/systemd/system"
NOTIFY: Final = "run/fedquilt-notify"
STOP_S: Final = 30.0


@dataclass(frozen=True)
class UnitService:
    """Content of a unit. Paths are of the root file system."""

    name: str
    command: tuple[str, ...]
    kind: str = "simple"
    user: str = "root"
    folder: str = "/"
    umask: int = 0o022
    state: str | None = None  # names in /var/lib
    state_mode: int = 0o755
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Mapping[str, str] = field(default_factory=dict)  # name -> path
    wanted: tuple[str, ...] = ()  # paths that must be there; with "!" must not

    @property
    def credentials_folder(self) -> str:
        """Folder in which systemd puts the service's credentials."""
        return f"/run/credentials/{self.name}.service"

    @property
    def words(self) -> tuple[str, ...]:
        """The command with the variables that systemd puts in."""
        return tuple(word.replace("${CREDENTIALS_DIRECTORY}", self.credentials_folder) for word in self.command)


def parse(name: str, text: str) -> UnitService:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(key.strip(), []).append(value.strip())
    last = {key: values[-1] for key, values in found.items()}
    if "ExecStart" not in last:
        raise JobError(f"{name} has no ExecStart: flash the root file system anew")
    variables = [word.partition("=") for value in found.get("Environment", ()) for word in shlex.split(value)]
    return UnitService(
        name,
        tuple(shlex.split(last["ExecStart"].lstrip("-@:+!"))),
        last.get("Type", "simple"),
        last.get("User", "root"),
        last.get("WorkingDirectory", "/"),
        int(last.get("UMask", "0022"), 8),
        last.get("StateDirectory"),
        int(last.get("StateDirectoryMode", "0755"), 8),
        {key: value for key, _, value in variables},
        {name: path for name, _, path in (value.partition(":") for value in found.get("LoadCredential", ()))},
        tuple(found.get("ConditionPathExists", ())),
    )


def read(guest: Guest, name: str) -> UnitService:
    path = guest.root / UNITS / f"{name}.service"
    try:
        return parse(name, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


def start(guest: Guest, service: UnitService, log: IO[bytes], notify: str | None = None) -> subprocess.Popen[bytes]:
    for path in service.wanted:
        if (guest.root / path.lstrip("!/")).exists() is path.startswith("!"):
            raise JobError(f"{service.name} would not start: {path} {'is' if path.startswith('!') else 'is not'} there")
    user, group = (0, 0) if service.user == "root" else guest.read_ids(service.user)
    environment = {**ENVIRONMENT, **service.environment}
    for name in (service.state or "").split():
        state = guest.root / "var/lib" / name
        state.mkdir(parents=True, exist_ok=True)
        _own(state, user, group, service.state_mode)
    if service.credentials:
        environment["CREDENTIALS_DIRECTORY"] = service.credentials_folder
        _write_credentials(guest.root, service, user, group)
    if notify is not None:
        environment["NOTIFY_SOCKET"] = notify
    return subprocess.Popen(
        guest.command_inside(service.words, user, group, service.folder),
        env=environment,
        umask=service.umask,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _write_credentials(root: Path, service: UnitService, user: int, group: int) -> None:
    folder = root / service.credentials_folder.lstrip("/")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, path in service.credentials.items():
        shutil.copyfile(root / path.lstrip("/"), folder / name)
        _own(folder / name, user, group, 0o400)
    _own(folder, user, group, 0o500)


def _own(path: Path, user: int, group: int, mode: int) -> None:
    os.chown(path, user, group)
    path.chmod(mode)


class StatusNotices:
    """Status messages of a service: systemd's end of sd_notify(3)."""

    def __init__(self, guest: Guest) -> None:
        self.inside = f"/{NOTIFY}"
        self._path = guest.root / NOTIFY
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        folder = os.open(self._path.parent, os.O_PATH)  # a socket's path has at most 107 bytes
        try:
            self._socket.bind(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)
        self._path.chmod(0o666)
        self.said: dict[str, str] = {}  # READY, STATUS, ... as last told

    def wait(self, until: Callable[[Mapping[str, str]], bool], limit_s: float, alive: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + limit_s
        while not until(self.said):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not alive():
                return False
            if select.select([self._socket], [], [], min(left_s, 0.2))[0]:
                for line in self._socket.recv(65536).decode(errors="replace").splitlines():
                    key, _, value = line.partition("=")
                    self.said[key] = value
        return True

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
