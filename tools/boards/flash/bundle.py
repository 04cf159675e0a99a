"""Bundle for a board: a folder or tar archive that installs without a network.

bundle.json  install.sh  install.py  environment.py  launch.py  sysusers.conf  requirements.txt
wheels/      etc/ -> /etc/fedquilt      units/ -> /etc/systemd/system
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

import fedquilt
from fedquilt import open_metrics, profiles
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.core import JobError
from fedquilt.core.messages import Name
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.upgrade import launcher
from fedquilt.formats import toml
from fedquilt.host import virtual_environment
from fedquilt.host.disk import disk_errors
from fedquilt.tools.boards.flash import install, wheels
from fedquilt.tools.boards.targets import BundleTarget
from fedquilt.transport.mqtt.broker import Broker

HERE: Final = Path(__file__).parent
ETC: Final = "/etc/fedquilt"
HOME: Final = "/var/lib/fedquilt"
DAEMON_BYTES: Final = 256 << 20  # memory of the agent itself and its libraries, as the kernel counts it, beside a task
NAMES: Final = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key", "password_file": "password"}
OWN_CREDENTIALS: Final = "/run/fedquilt-agent"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
ODD: Final = r"[\s%$\"'\\;|&<>`()*?]"  # characters with a meaning to systemd or a shell
HIDDEN: Final = ("/home/", "/root/", "/run/", "/tmp/", "/var/tmp/", "/dev/", "/proc/", "/sys/")  # noqa: S108
SECRET: Final = frozenset({"etc/device.key", "etc/coordinator.key", "etc/password", "etc/token"})
OF_RUNNER: Final = "fedquilt-serve-model"
# units of one role alone; the others are for both
OF_AGENT: Final = ("fedquilt-agent", "fedquilt-clocks", "fedquilt-enrol", OF_RUNNER)
OF_COORDINATOR: Final = ("fedquilt-serve", "fedquilt-enrol-serve", "fedquilt-dash")
MODELS: Final = "/var/lib/fedquilt-models"  # folder that agent and runner share, unless [models] names another


@dataclass(frozen=True)
class BoardFiles:
    device: str
    files: Mapping[str, bytes]
    budget_bytes: int | None  # None for half of the board's memory
    enrols: bool = False  # whether the board gets or renews its certificate by itself
    models: str | None = None  # folder of models outside of the agent's home; None: in the home
    serve: str | None = None  # address of the board's model runner; None: the board has none

    @property
    def extras(self) -> tuple[str, ...]:
        identity = ("identity",) if self.enrols or "ca.crt" in self.files else ()
        return identity if self.serve is None else (*identity, "images", "onnx")


def read_board_files(
    path: Path,
    device: str | None = None,
    token: Path | None = None,
    budget: str | None = None,
    labels: Sequence[str] | None = None,
) -> BoardFiles:
    """Read the settings of one board from an agent.toml and the files named there.

    With a `url` under [enrol], the board creates a missing certificate and key.
    """
    given = {"device": device, "budget": budget, "labels": None if labels is None else list(labels)}
    others = {key: value for key, value in given.items() if value is not None}
    table = {**toml.read_toml(path), **others, "home": HOME}
    known = _parse_settings(path, table)
    enrols = known.enrol.url is not None
    broker = dict(table.get("broker", {}))
    here: dict[str, Any] = {key: str(path.parent / value) if key in NAMES else value for key, value in broker.items()}
    if enrols:
        if known.broker.ca is None:
            raise JobError(f"{path}: [broker] needs a ca, by which the board knows who enrols it")
        if not all(key in here and Path(here[key]).is_file() for key in ("cert", "key")):
            here = {key: value for key, value in here.items() if key not in ("cert", "key")}
        table["enrol"] = {"url": known.enrol.url}
        broker |= {key: f"{ETC}/{NAMES[key]}" for key in ("cert", "key")}
    elif token is not None:
        raise JobError(f'{path}: a token is for a board that enrols: write url = "https://HOST:8884" under [enrol]')
    Broker.from_url(**{"url": known.broker.url, **here})
    files: dict[str, bytes] = {}
    for key, name in NAMES.items():
        if key in here:
            files[name], broker[key] = _read_file(Path(here[key])), f"{ETC}/{name}"
    if (
        known.profile is not None
        and profiles.is_board_name(known.profile)
        and not (path.parent / known.profile).exists()
    ):
        profiles.find_board_profile(known.profile)  # a known profile ships with the agent
    elif known.profile is not None:
        files["profile.toml"], table["profile"] = _read_file(path.parent / known.profile), f"{ETC}/profile.toml"
        profiles.parse_board_profile(files["profile.toml"].decode(errors="replace"), known.profile)
    if token is not None:
        files["token"] = _read_file(token)
        if not re.fullmatch(rb"[A-Za-z0-9_-]+\s*", files["token"]):
            raise JobError(f"{token} holds no token: `fedquilt identity token {known.device} --out FILE` writes one")
    for place in _data_paths(table.get("data", {})):
        if not place.startswith("/"):
            raise JobError(f"{path}: [data] {place!r} is on the board, so its whole path is wanted: /srv/{place}, say")
    with toml.prefix_errors(str(path)):
        models = _resolve_model_folder(known.models)
    if models is not None:
        table["models"] = {**table.get("models", {}), "folder": models}
    files["agent.toml"] = toml.format_toml({**table, **({"broker": broker} if broker else {})}).encode()
    most = None if known.budget is None else agents.parse_size(known.budget)
    return BoardFiles(known.device, files, most, enrols, models, known.models.serve)


def _resolve_model_folder(table: agents.ModelSettings) -> str | None:
    if table.serve is not None:
        host, _ = open_metrics.parse_listen_address(table.serve)
        if host not in LOOPBACK or re.search(ODD, table.serve):
            raise JobError(
                f"[models] serve = {table.serve!r}: the runner answers its own board alone, at 127.0.0.1:PORT; who "
                "else is to reach it comes through a proxy of yours"
            )
    folder = table.folder or (None if table.serve is None else MODELS)
    if folder is None:
        return None
    if not folder.startswith("/"):
        raise JobError(f"[models] folder {folder!r} is on the board, so its whole path is wanted: /srv/{folder}")
    if odd := re.search(ODD, folder):
        raise JobError(f"[models] folder {folder!r}: {odd[0]!r} has no place in it")
    clean = str(PurePosixPath(folder))
    if ".." in PurePosixPath(clean).parts or clean.count("/") < 2 or clean.startswith(HIDDEN):
        raise JobError(f"[models] folder {folder!r}: the services see none there: name one such as /srv/models")
    if table.serve is not None and PurePosixPath(HOME) in (one := PurePosixPath(clean), *one.parents):
        raise JobError(f"[models] folder {folder!r} is the agent's home, which its runner may not enter: leave it out")
    return clean


def _parse_settings(path: Path, table: Mapping[str, Any]) -> agents.AgentSettings:
    try:
        return agents.parse_settings(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def _data_paths(data: Any) -> list[str]:
    return [one["path"] for one in (data, *data.get("sources", ())) if isinstance(one.get("path"), str) and one["path"]]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


# -- units ----------------------------------------------------------------------------------------


def render_units(board: BoardFiles | CoordinatorFiles, systemd: int = 249) -> dict[str, bytes]:
    if isinstance(board, CoordinatorFiles):
        left = {"fedquilt-enrol-serve": board.enrol, "fedquilt-dash": board.dash}
        others = (*OF_AGENT, *(name for name, words in left.items() if words is None))
        return _render_templates_except(others, template_values(board, systemd))
    others = (*OF_COORDINATOR, *["fedquilt-enrol"] * (not board.enrols), *[OF_RUNNER] * (board.serve is None))
    return _render_templates_except(others, _unit_template_values(board, systemd))


def _unit_template_values(board: BoardFiles, systemd: int) -> dict[str, str]:
    secrets = [
        name for name in ("device.key", "password") if name in board.files or (board.enrols and name == "device.key")
    ]
    return {
        "CONDITIONS": f"ConditionPathExists={ETC}/device.crt" if board.enrols else "",
        "CREDENTIALS": "\n".join(_credential_lines(name, systemd) for name in secrets),
        "MEMORY_MAX": "75%" if board.budget_bytes is None else str(board.budget_bytes + DAEMON_BYTES),
        "MODELS": board.models or "",
        "SERVE": board.serve or "",
        **_make_model_folder_lines(board),
    }


def _make_model_folder_lines(board: BoardFiles) -> dict[str, str]:
    # mode 3770: the runner's group may write, and only the owner of a file may remove that file
    if board.models is None:
        return {"WRITES": "", "FOLDER": "", "ABOVE": ""}
    group, mode = ("fedquilt", "0750") if board.serve is None else ("fedquilt-runner", "3770")
    make = f"install -d -o fedquilt -g {group} -m {mode} {board.models}"
    return {
        "WRITES": f"ReadWritePaths=-{board.models}",
        "FOLDER": f"ExecStart=/bin/sh -c 'test -d {board.models} || {make}'",
        "ABOVE": f"ReadWritePaths=-{PurePosixPath(board.models).parent}",
    }


def _render_templates_except(others: Sequence[str], words: Mapping[str, str]) -> dict[str, bytes]:
    made = {}
    for path in sorted((HERE / "units").iterdir()):
        if path.stem in others:
            continue
        made[path.name] = fill_template(path.read_text(encoding="utf-8"), words).encode()
    return made


def _credential_lines(name: str, systemd: int) -> str:
    if systemd >= 247:
        return f"LoadCredential={name}:{ETC}/{name}"
    copy = f"/usr/bin/install -o fedquilt -g fedquilt -m 0400 {ETC}/{name} {OWN_CREDENTIALS}/{name}"
    where = f"Environment=CREDENTIALS_DIRECTORY={OWN_CREDENTIALS}"  # as systemd sets it from version 247 on
    return f"RuntimeDirectory=fedquilt-agent\nRuntimeDirectoryMode=0700\n{where}\nExecStartPre=+{copy}"


def fill_template(text: str, words: Mapping[str, str]) -> str:
    """Replace each @WORD@ of a template by its value. Lines with only an empty value are dropped."""
    lines = []
    for line in text.splitlines():
        filled = line
        for word, value in words.items():
            filled = filled.replace(f"@{word}@", value)
        if filled or not line:
            lines.append(filled)
    return "\n".join(lines) + "\n"


# -- the whole ------------------------------------------------------------------------------------


def collect_files(
    board: BoardFiles | CoordinatorFiles,
    target: BundleTarget,
    house: Sequence[Path],
    lock: str,
) -> dict[str, bytes | Path]:
    digests = {path.name: wheels.file_sha256(path) for path in house}
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in house}
    files |= {f"etc/{name}": data for name, data in board.files.items()}
    files |= {f"units/{name}": data for name, data in render_units(board, target.systemd).items()}
    files["requirements.txt"] = lock.encode()
    programs = {"sysusers.conf": HERE / "sysusers.conf", "install.py": HERE / "install.py"}
    programs |= {"environment.py": Path(virtual_environment.__file__), "launch.py": Path(launcher.__file__)}
    files |= {name: path.read_bytes() for name, path in programs.items()}
    script = fill_template((HERE / "install.sh").read_text(encoding="utf-8"), {"INTERPRETER": target.interpreter})
    files["install.sh"] = script.encode()
    brings = [files[name] for name in install.BROUGHT]
    names = (*sorted(digests.items()), target.interpreter, *brings)
    manifest = {
        "format": install.FORMAT,
        "id": hashlib.sha256(repr(names).encode()).hexdigest()[:12],
        "version": fedquilt.__version__,
        "device": board.device,
        "target": target.name,
        "machine": target.machine,
        "python": target.python,
        "interpreter": target.interpreter,
        "wheels": [path.name for path in house],
        "unpacked_bytes": sum(map(unpacked_bytes, house)),
        "secret": sorted(SECRET & set(files)),
        "files": {name: _file_digest(name, data, digests) for name, data in sorted(files.items())},
    }
    files["bundle.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    return files


def _file_digest(name: str, data: bytes | Path, digests: Mapping[str, str]) -> str:
    return hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else digests[name.removeprefix("wheels/")]


def unpacked_bytes(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def write_folder(files: Mapping[str, bytes | Path], folder: Path) -> None:
    with disk_errors(f"write {folder}"):
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                path.symlink_to(data.resolve())
            else:
                path.touch(mode=0o600 if name in SECRET else 0o644)
                path.write_bytes(data)


def write_archive(files: Mapping[str, bytes | Path], path: Path, top: str = "", *, private: bool = True) -> int:
    """Write files as a tar archive and return its size in bytes. Same files give same bytes."""
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600 if private else 0o644)
        with tarfile.open(new, "w", format=tarfile.USTAR_FORMAT) as archive:
            for name in sorted(files):
                data = files[name]
                entry = tarfile.TarInfo(f"{top}/{name}" if top else name)
                entry.mode = 0o600 if name in SECRET else 0o644
                entry.size = len(data) if isinstance(data, bytes) else data.stat().st_size
                if isinstance(data, bytes):
                    archive.addfile(entry, io.BytesIO(data))
                else:
                    with data.open("rb") as file:
                        archive.addfile(entry, file)
        new.replace(path)
    return path.stat().st_size


# -- coordinators ---------------------------------------------------------------------------------

COORDINATOR_FILES: Final = {
    "ca": "ca.crt",
    "cert": "coordinator.crt",
    "key": "coordinator.key",
    "password_file": "password",
}
COORDINATOR_SECRETS: Final = ("coordinator.key", "password")
OLDEST_SYSTEMD: Final = 247  # the first that hands a service its secrets
_HOST: Final = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


class BrokerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    with toml.prefix_errors(str(path)):
        known = toml.convert_table(toml.read_toml(path), CoordinatorSettings, "a coordinator's settings")
        given = {key: getattr(known.broker, key) for key in COORDINATOR_FILES if getattr(known.broker, key) is not None}
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
    files = {COORDINATOR_FILES[key]: _read_file(Path(place)) for key, place in here.items()}
    words = ["--broker", known.broker.url, "--fleet", known.fleet]
    for key in given:
        folder = "${CREDENTIALS_DIRECTORY}" if COORDINATOR_FILES[key] in COORDINATOR_SECRETS else ETC
        words += [f"--{key.replace('_', '-')}", f"{folder}/{COORDINATOR_FILES[key]}"]
    if known.metrics is not None:
        words += ["--metrics", known.metrics]
    words += [word for name, value in blobs.items() for word in (f"--blobs-{name}", value)]
    files["coordinator.toml"] = path.read_bytes()  # for people: the units have all that it says
    enrol = None if known.enrol is None else _enrol_arguments(known.enrol)
    dash = None if known.dash is None else _dash_arguments(known.dash)
    return CoordinatorFiles(
        files, tuple(words), enrol, tuple(name for name in COORDINATOR_SECRETS if name in files), dash
    )


def _check_hosts(key: str, given: Sequence[str]) -> None:
    if wrong := [host for host in given if not _HOST.fullmatch(host)]:
        raise JobError(f"{key}: {wrong[0]!r} is no name of a host")


def _dash_arguments(table: DashTable) -> tuple[str, ...]:
    names = [word for name in table.names for word in ("--host", name)]
    return ("--listen", table.listen, *["--actions"] * table.actions, *names)


def _enrol_arguments(table: EnrolTable) -> tuple[str, ...]:
    return ("--listen", f"0.0.0.0:{table.port}", *(word for host in table.hosts for word in ("--host", host)))


def template_values(made: CoordinatorFiles, systemd: int) -> dict[str, str]:
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
