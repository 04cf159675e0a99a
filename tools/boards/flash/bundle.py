"""Bundle for a board: a folder or tar archive that installs without a network.

bundle.json  install.sh  install.py  environment.py  launch.py  sysusers.conf
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
from fedquilt import metrics_endpoint, profiles
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.core import JobError
from fedquilt.core.messages import Name
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.upgrade import launcher
from fedquilt.formats import toml
from fedquilt.host import virtual_environment
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.boards.flash import install
from fedquilt.tools.boards.targets import BundleTarget
from fedquilt.transport.mqtt.broker import Broker

FOLDER: Final = Path(__file__).parent
ETC: Final = "/etc/fedquilt"
HOME: Final = "/var/lib/fedquilt"
DAEMON_BYTES: Final = 256 << 20  # memory of the agent and its libraries, without tasks
BROKER_FILE_NAMES: Final = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key", "password_file": "password"}
OWN_CREDENTIALS: Final = "/run/fedquilt-agent"
SPECIAL_CHARACTERS: Final = r"[\s%$\"'\\;|&<>`()*?]"  # characters with a meaning to systemd or a shell
HIDDEN_FOLDERS: Final = ("/home/", "/root/", "/run/", "/tmp/", "/var/tmp/", "/dev/", "/proc/", "/sys/")  # noqa: S108
SECRET_FILES: Final = frozenset({"etc/device.key", "etc/coordinator.key", "etc/password", "etc/token"})
RUNNER_UNIT: Final = "fedquilt-serve-model"
# units of one role alone; the others are for both
AGENT_UNITS: Final = ("fedquilt-agent", "fedquilt-clocks", "fedquilt-enrol", RUNNER_UNIT)
COORDINATOR_UNITS: Final = ("fedquilt-serve", "fedquilt-enrol-serve", "fedquilt-dash")
MODELS_FOLDER: Final = "/var/lib/fedquilt-models"  # folder that agent and runner share, unless [models] names another


@dataclass(frozen=True)
class BoardFiles:
    device: str
    files: Mapping[str, bytes]
    budget_bytes: int | None  # None for half of the board's memory
    can_enrol: bool = False  # whether the board gets or renews its certificate by itself
    models: str | None = None  # folder of models, or None for the agent's home
    serve: str | None = None  # address of the model runner, or None without a runner

    @property
    def extras(self) -> tuple[str, ...]:
        identity = ("identity",) if self.can_enrol or "ca.crt" in self.files else ()
        return identity if self.serve is None else (*identity, "images", "onnx")


def read_board_files(
    path: Path,
    device: str | None = None,
    token: Path | None = None,
    budget: str | None = None,
    labels: Sequence[str] | None = None,
) -> BoardFiles:
    """Read the settings of one board from an agent.toml and the files named there, or raise JobError.

    With a `url` under [enrol], the board creates a missing certificate and key. The other arguments replace values of
    the agent.toml.
    """
    possible_overrides = {"device": device, "budget": budget, "labels": None if labels is None else list(labels)}
    set_overrides = {key: value for key, value in possible_overrides.items() if value is not None}
    table = {**toml.read_toml(path), **set_overrides, "home": HOME}
    settings = _parse_settings(path, table)
    can_enrol = settings.enrol.url is not None
    broker = dict(table.get("broker", {}))
    broker_files: dict[str, Any] = {
        key: str(path.parent / value) if key in BROKER_FILE_NAMES else value for key, value in broker.items()
    }
    if can_enrol:
        if settings.broker.ca is None:
            raise JobError(f"{path}: [broker] has no ca: add the authority's ca.crt, by which the board trusts it")
        if not all(key in broker_files and Path(broker_files[key]).is_file() for key in ("cert", "key")):
            broker_files = {key: value for key, value in broker_files.items() if key not in ("cert", "key")}
        table["enrol"] = {"url": settings.enrol.url}
        broker |= {key: f"{ETC}/{BROKER_FILE_NAMES[key]}" for key in ("cert", "key")}
    elif token is not None:
        raise JobError(f'{path}: --token needs enrolment: write url = "https://HOST:8884" under [enrol]')
    Broker.from_url(**{"url": settings.broker.url, **broker_files})
    files: dict[str, bytes] = {}
    for key, name in BROKER_FILE_NAMES.items():
        if key in broker_files:
            files[name], broker[key] = _read_file(Path(broker_files[key])), f"{ETC}/{name}"
    if (
        settings.profile is not None
        and profiles.is_board_name(settings.profile)
        and not (path.parent / settings.profile).exists()
    ):
        profiles.find_board_profile(settings.profile)  # a known profile ships with the agent
    elif settings.profile is not None:
        files["profile.toml"], table["profile"] = _read_file(path.parent / settings.profile), f"{ETC}/profile.toml"
        profiles.parse_board_profile(files["profile.toml"].decode(errors="replace"), settings.profile)
    if token is not None:
        files["token"] = _read_file(token)
        if not re.fullmatch(rb"[A-Za-z0-9_-]+\s*", files["token"]):
            fix = f"create one with `fedquilt identity token {settings.device} --out FILE`"
            raise JobError(f"{token} contains no token: {fix}")
    for data_path in _data_paths(table.get("data", {})):
        if not data_path.startswith("/"):
            raise JobError(f"{path}: [data] path {data_path!r} is not absolute: write it as on the board, /srv/...")
    with toml.prefix_errors(str(path)):
        models = _resolve_model_folder(settings.models)
    if models is not None:
        table["models"] = {**table.get("models", {}), "folder": models}
    files["agent.toml"] = toml.format_toml({**table, **({"broker": broker} if broker else {})}).encode()
    budget_bytes = None if settings.budget is None else agents.parse_size(settings.budget)
    return BoardFiles(settings.device, files, budget_bytes, can_enrol, models, settings.models.serve)


def _resolve_model_folder(table: agents.ModelSettings) -> str | None:
    if table.serve is not None:
        host, _ = metrics_endpoint.parse_listen_address(table.serve)
        if not metrics_endpoint.is_loopback(host) or re.search(SPECIAL_CHARACTERS, table.serve):
            raise JobError(
                f"[models] serve = {table.serve!r} is not a loopback address: write 127.0.0.1:PORT, and give other "
                "machines access through a proxy"
            )
    folder = table.folder or (None if table.serve is None else MODELS_FOLDER)
    if folder is None:
        return None
    if not folder.startswith("/"):
        raise JobError(f"[models] folder {folder!r} is not absolute: write it as on the board, such as /srv/models")
    if special := re.search(SPECIAL_CHARACTERS, folder):
        raise JobError(f"[models] folder {folder!r} contains {special[0]!r}: use a path without special characters")
    clean = str(PurePosixPath(folder))
    if ".." in PurePosixPath(clean).parts or clean.count("/") < 2 or clean.startswith(HIDDEN_FOLDERS):
        raise JobError(f"[models] folder {folder!r} is hidden from the services: choose one such as /srv/models")
    if table.serve is not None and PurePosixPath(HOME) in (model_path := PurePosixPath(clean), *model_path.parents):
        raise JobError(f"[models] folder {folder!r} is in the agent's home, which the runner cannot read: leave it out")
    return clean


def _parse_settings(path: Path, table: Mapping[str, Any]) -> agents.AgentSettings:
    try:
        return agents.parse_settings(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def _data_paths(data: Any) -> list[str]:
    return [
        source["path"]
        for source in (data, *data.get("sources", ()))
        if isinstance(source.get("path"), str) and source["path"]
    ]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


# -- units ----------------------------------------------------------------------------------------


def render_units(board: BoardFiles | CoordinatorFiles, systemd: int = 249) -> dict[str, bytes]:
    if isinstance(board, CoordinatorFiles):
        optional_units = {"fedquilt-enrol-serve": board.enrol, "fedquilt-dash": board.dash}
        excluded = (*AGENT_UNITS, *(name for name, arguments in optional_units.items() if arguments is None))
        return _render_templates_except(excluded, template_values(board, systemd))
    excluded = (*COORDINATOR_UNITS, *["fedquilt-enrol"] * (not board.can_enrol), *[RUNNER_UNIT] * (board.serve is None))
    return _render_templates_except(excluded, _unit_template_values(board, systemd))


def _unit_template_values(board: BoardFiles, systemd: int) -> dict[str, str]:
    secrets = [
        name for name in ("device.key", "password") if name in board.files or (board.can_enrol and name == "device.key")
    ]
    return {
        "CONDITIONS": f"ConditionPathExists={ETC}/device.crt" if board.can_enrol else "",
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


def _render_templates_except(excluded: Sequence[str], values: Mapping[str, str]) -> dict[str, bytes]:
    units = {}
    for path in sorted((FOLDER / "units").iterdir()):
        if path.stem in excluded:
            continue
        units[path.name] = fill_template(path.read_text(encoding="utf-8"), values).encode()
    return units


def _credential_lines(name: str, systemd: int) -> str:
    if systemd >= 247:
        return f"LoadCredential={name}:{ETC}/{name}"
    copy_command = f"/usr/bin/install -o fedquilt -g fedquilt -m 0400 {ETC}/{name} {OWN_CREDENTIALS}/{name}"
    environment_line = f"Environment=CREDENTIALS_DIRECTORY={OWN_CREDENTIALS}"  # as systemd sets it from version 247 on
    return (
        f"RuntimeDirectory=fedquilt-agent\nRuntimeDirectoryMode=0700\n{environment_line}\nExecStartPre=+{copy_command}"
    )


def fill_template(text: str, values: Mapping[str, str]) -> str:
    """Return a template with its @WORD@ marks replaced. Lines with only an empty value are dropped."""
    lines = []
    for line in text.splitlines():
        filled = line
        for key, value in values.items():
            filled = filled.replace(f"@{key}@", value)
        if filled or not line:
            lines.append(filled)
    return "\n".join(lines) + "\n"


# -- files of the bundle --------------------------------------------------------------------------


def collect_files(
    board: BoardFiles | CoordinatorFiles, target: BundleTarget, wheel_paths: Sequence[Path]
) -> dict[str, bytes | Path]:
    """Return a bundle's files by their path in the bundle, each as its content or as a file to copy."""
    digests = {path.name: REAL.hash_file(path) for path in wheel_paths}
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in wheel_paths}
    files |= {f"etc/{name}": data for name, data in board.files.items()}
    files |= {f"units/{name}": data for name, data in render_units(board, target.systemd).items()}
    programs = {"sysusers.conf": FOLDER / "sysusers.conf", "install.py": FOLDER / "install.py"}
    programs |= {"environment.py": Path(virtual_environment.__file__), "launch.py": Path(launcher.__file__)}
    files |= {name: path.read_bytes() for name, path in programs.items()}
    script = fill_template((FOLDER / "install.sh").read_text(encoding="utf-8"), {"INTERPRETER": target.interpreter})
    files["install.sh"] = script.encode()
    installer_files = [files[name] for name in install.INSTALLER_FILES]
    content = (*sorted(digests.items()), target.interpreter, *installer_files)
    manifest = {
        "format": install.FORMAT,
        "id": hashlib.sha256(repr(content).encode()).hexdigest()[:12],
        "version": fedquilt.__version__,
        "device": board.device,
        "target": target.name,
        "machine": target.machine,
        "python": target.python,
        "interpreter": target.interpreter,
        "wheels": [path.name for path in wheel_paths],
        "unpacked_bytes": sum(map(unpacked_bytes, wheel_paths)),
        "secret": sorted(SECRET_FILES & set(files)),
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
                path.touch(mode=0o600 if name in SECRET_FILES else 0o644)
                path.write_bytes(data)


def write_archive(files: Mapping[str, bytes | Path], path: Path, top_folder: str = "", *, private: bool = True) -> int:
    """Write files as a tar archive and return its size in bytes. The same files give the same bytes.

    Without `private`, other users may read the archive.
    """
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600 if private else 0o644)
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for name in sorted(files):
                data = files[name]
                entry = tarfile.TarInfo(f"{top_folder}/{name}" if top_folder else name)
                entry.mode = 0o600 if name in SECRET_FILES else 0o644
                entry.size = len(data) if isinstance(data, bytes) else data.stat().st_size
                if isinstance(data, bytes):
                    archive.addfile(entry, io.BytesIO(data))
                else:
                    with data.open("rb") as file:
                        archive.addfile(entry, file)
        temporary.replace(path)
    return path.stat().st_size


# -- coordinators ---------------------------------------------------------------------------------

COORDINATOR_FILES: Final = {**BROKER_FILE_NAMES, "cert": "coordinator.crt", "key": "coordinator.key"}
COORDINATOR_SECRETS: Final = ("coordinator.key", "password")
MIN_SYSTEMD: Final = 247  # the first version with credentials
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
        requirements = {
            "identity": self.enrol is not None or "coordinator.crt" in self.files,
            "metrics": "--metrics" in self.serve,
            "web": self.dash is not None,
        }
        return tuple(name for name, is_required in requirements.items() if is_required)


def read_coordinator_files(path: Path) -> CoordinatorFiles:
    with toml.prefix_errors(str(path)):
        settings = toml.convert_table(toml.read_toml(path), CoordinatorSettings, "a coordinator's settings")
        file_names = {
            key: getattr(settings.broker, key) for key in COORDINATOR_FILES if getattr(settings.broker, key) is not None
        }
        paths: dict[str, Any] = {key: str(path.parent / value) for key, value in file_names.items()}
        Broker.from_url(settings.broker.url, **paths)
        blobs = {name: value for name in ("http", "url") if (value := getattr(settings.blobs, name)) is not None}
        for key, address in (
            ("[broker] url", settings.broker.url),
            *((f"[blobs] {name}", blobs[name]) for name in blobs),
        ):
            if special := re.search(r"[\s%$\"'\\]", address):
                raise JobError(f"{key} {address!r} contains {special[0]!r}: write an address without it")
        BlobLocationSettings(settings.blobs.http, settings.blobs.url)
        if settings.metrics is not None:
            metrics_endpoint.parse_listen_address(settings.metrics)
        if settings.enrol is not None:
            _check_hosts("[enrol] hosts", settings.enrol.hosts)
        if settings.dash is not None:
            host, _ = metrics_endpoint.parse_listen_address(settings.dash.listen)
            _check_hosts("[dash] listen", [host])
            _check_hosts("[dash] names", settings.dash.names)
    files = {COORDINATOR_FILES[key]: _read_file(Path(source)) for key, source in paths.items()}
    arguments = ["--broker", settings.broker.url, "--fleet", settings.fleet]
    for key in file_names:
        folder = "${CREDENTIALS_DIRECTORY}" if COORDINATOR_FILES[key] in COORDINATOR_SECRETS else ETC
        arguments += [f"--{key.replace('_', '-')}", f"{folder}/{COORDINATOR_FILES[key]}"]
    if settings.metrics is not None:
        arguments += ["--metrics", settings.metrics]
    arguments += [argument for name, value in blobs.items() for argument in (f"--blobs-{name}", value)]
    files["coordinator.toml"] = path.read_bytes()  # for people. The units contain all settings
    enrol = None if settings.enrol is None else _enrol_arguments(settings.enrol)
    dash = None if settings.dash is None else _dash_arguments(settings.dash)
    return CoordinatorFiles(
        files, tuple(arguments), enrol, tuple(name for name in COORDINATOR_SECRETS if name in files), dash
    )


def _check_hosts(key: str, hosts: Sequence[str]) -> None:
    if invalid := [host for host in hosts if not _HOST.fullmatch(host)]:
        raise JobError(f"{key} {invalid[0]!r} is not a host name: use letters, digits, '.', ':', '_' and '-'")


def _dash_arguments(table: DashTable) -> tuple[str, ...]:
    names = [argument for name in table.names for argument in ("--host", name)]
    return ("--listen", table.listen, *["--actions"] * table.actions, *names)


def _enrol_arguments(table: EnrolTable) -> tuple[str, ...]:
    return ("--listen", f"0.0.0.0:{table.port}", *(argument for host in table.hosts for argument in ("--host", host)))


def template_values(coordinator: CoordinatorFiles, systemd: int) -> dict[str, str]:
    if systemd < MIN_SYSTEMD:
        raise JobError(f"target has systemd {systemd}, but a coordinator needs {MIN_SYSTEMD}: choose a newer system")
    return {
        "CONDITIONS": f"ConditionPathExists={ETC}/coordinator.crt" if "coordinator.crt" in coordinator.files else "",
        "ARGUMENTS": _join_arguments(coordinator.serve),
        "CREDENTIALS": "\n".join(f"LoadCredential={name}:{ETC}/{name}" for name in coordinator.secrets),
        "ENROL": _join_arguments(coordinator.enrol or ()),
        "DASH": _join_arguments(coordinator.dash or ()),
        **dict.fromkeys(("FOLDER", "ABOVE"), ""),
    }


def _join_arguments(arguments: Sequence[str]) -> str:
    return "".join(f" {argument}" for argument in arguments)
