"""A bundle: one folder, or tar archive, with all that a board needs. Nothing is fetched when it is installed.

bundle.json  install.sh  install.py  environment.py  launch.py  sysusers.conf  requirements.txt
python.tar, if the board's own Python is too old
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
from typing import Any, Final

import fedquilt
from fedquilt import config, environment, open_metrics, profiles
from fedquilt.core import JobError
from fedquilt.disk import doing
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.clocks.helper import HOTTEST_C
from fedquilt.edge_agent.upgrade import launch
from fedquilt.tools.flash import coordinator, install, wheels
from fedquilt.tools.flash.coordinator import Coordinator
from fedquilt.tools.flash.targets import Target
from fedquilt.transport.broker import Broker

HERE: Final = Path(__file__).parent
ETC: Final = "/etc/fedquilt"
HOME: Final = "/var/lib/fedquilt"
DAEMON_BYTES: Final = 256 << 20  # memory of the agent itself and its libraries, as the kernel counts it, beside a task
NAMES: Final = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key", "password_file": "password"}
CREDENTIALS: Final = "${CREDENTIALS_DIRECTORY}"  # folder that systemd provides from version 247 on
OWN_CREDENTIALS: Final = "/run/fedquilt-agent"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
ODD: Final = r"[\s%$\"'\\;|&<>`()*?]"  # characters with a meaning to systemd or a shell
HIDDEN: Final = ("/home/", "/root/", "/run/", "/tmp/", "/var/tmp/", "/dev/", "/proc/", "/sys/")  # noqa: S108
PYTHON: Final = "python.tar"  # archive of a Python in the bundle
SECRET: Final = frozenset({"etc/device.key", "etc/coordinator.key", "etc/password", "etc/token"})
OF_RUNNER: Final = "fedquilt-serve-model"
# units of one role alone; the others are for both
OF_AGENT: Final = ("fedquilt-agent", "fedquilt-clocks", "fedquilt-enrol", OF_RUNNER)
OF_COORDINATOR: Final = ("fedquilt-serve", "fedquilt-enrol-serve", "fedquilt-dash")
MODELS: Final = "/var/lib/fedquilt-models"  # folder that agent and runner share, unless [models] names another


@dataclass(frozen=True)
class Board:
    """Files for /etc/fedquilt of one board, by name, and the facts that its units need."""

    device: str
    files: Mapping[str, bytes]
    budget_bytes: int | None  # None: half of the board's memory
    enrols: bool = False  # whether the board gets or renews its certificate by itself
    limits: tuple[str, ...] = ()  # arguments of `fedquilt clocks serve` for the bounds that the board's owner has set
    models: str | None = None  # folder of models outside of the agent's home; None: in the home
    serve: str | None = None  # address of the board's model runner; None: the board has none

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of fedquilt that the board needs."""
        identity = ("identity",) if self.enrols or "ca.crt" in self.files else ()
        return identity if self.serve is None else (*identity, "images", "onnx")


def board(
    path: Path,
    device: str | None = None,
    token: Path | None = None,
    budget: str | None = None,
    labels: Sequence[str] | None = None,
) -> Board:
    """Settings of one board, from its operator's agent.toml and the files named there.

    With a `url` under [enrol], the board makes a missing certificate and key itself.

    Args:
        path: the agent.toml.
        device: another name than the file's: one file can serve many boards.
        token: one-time enrolment token.
        budget: another budget than the file's, such as "1GB".
        labels: other labels than the file's, words as of `fedquilt.labels`.

    Raises:
        JobError: settings, a file or certificates are unusable, or would not be found on the board.
    """
    given = {"device": device, "budget": budget, "labels": None if labels is None else list(labels)}
    others = {key: value for key, value in given.items() if value is not None}
    table = {**config.read(path), **others, "home": HOME}
    known = _parsed(path, table)
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
    Broker.parse(**{"url": known.broker.url, **here})
    files: dict[str, bytes] = {}
    for key, name in NAMES.items():
        if key in here:
            files[name], broker[key] = _read(Path(here[key])), f"{ETC}/{name}"
    if known.profile is not None and profiles.is_name(known.profile) and not (path.parent / known.profile).exists():
        profiles.find(known.profile)  # a known profile ships with the agent
    elif known.profile is not None:
        files["profile.toml"], table["profile"] = _read(path.parent / known.profile), f"{ETC}/profile.toml"
        profiles.parse(files["profile.toml"].decode(errors="replace"), known.profile)
    if token is not None:
        files["token"] = _read(token)
        if not re.fullmatch(rb"[A-Za-z0-9_-]+\s*", files["token"]):
            raise JobError(f"{token} holds no token: `fedquilt enrol token {known.device} --out FILE` writes one")
    for place in _places(table.get("data", {})):
        if not place.startswith("/"):
            raise JobError(f"{path}: [data] {place!r} is on the board, so its whole path is wanted: /srv/{place}, say")
    with config.naming(str(path)):
        models = _models(known.models)
    if models is not None:
        table["models"] = {**table.get("models", {}), "folder": models}
    files["agent.toml"] = config.text({**table, **({"broker": broker} if broker else {})}).encode()
    most = None if known.budget is None else agents.size_bytes(known.budget)
    limits = _limits(known.governor, table.get("profile"))
    return Board(known.device, files, most, enrols, limits, models, known.models.serve)


def _models(table: agents.ModelSettings) -> str | None:
    """Folder of the models on the board; None: in the agent's home, which no other user may read.

    Raises:
        JobError: a unit cannot name that folder, or the runner cannot answer at that address.
    """
    if table.serve is not None:
        host, _ = open_metrics.address(table.serve)
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


def _limits(governor: agents.GovernorSettings, profile: str | None) -> tuple[str, ...]:
    """Arguments by which the clock helper, too, enforces the bounds under [governor]; () if there are none."""
    told = [] if governor.max_w is None else ["--max-w", f"{governor.max_w:g}"]
    if told and profile is not None:
        told += ["--profile", profile]
    if governor.max_c is not None and governor.max_c < HOTTEST_C:
        told += ["--hottest", f"{governor.max_c:g}"]
    return tuple(told)


def _parsed(path: Path, table: Mapping[str, Any]) -> agents.AgentSettings:
    try:
        return agents.parse(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def _places(data: Any) -> list[str]:
    return [one["path"] for one in (data, *data.get("sources", ())) if isinstance(one.get("path"), str) and one["path"]]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


# -- units ----------------------------------------------------------------------------------------


def units(board: Board | Coordinator, systemd: int = 249) -> dict[str, bytes]:
    """The systemd units of one board or coordinator, as its version of systemd takes them.

    Raises:
        JobError: systemd is too old for a coordinator.
    """
    if isinstance(board, Coordinator):
        left = {"fedquilt-enrol-serve": board.enrol, "fedquilt-dash": board.dash}
        others = (*OF_AGENT, *(name for name, words in left.items() if words is None))
        return _filled(others, coordinator.words(board, systemd), systemd)
    others = (*OF_COORDINATOR, *["fedquilt-enrol"] * (not board.enrols), *[OF_RUNNER] * (board.serve is None))
    return _filled(others, _words(board, systemd), systemd)


def _words(board: Board, systemd: int) -> dict[str, str]:
    """Values for the templates of a board's units, by their words."""
    secrets = [
        name for name in ("device.key", "password") if name in board.files or (board.enrols and name == "device.key")
    ]
    return {
        "CONDITIONS": f"ConditionPathExists={ETC}/device.crt" if board.enrols else "",
        "ARGUMENTS": f" --credentials {CREDENTIALS if systemd >= 247 else OWN_CREDENTIALS}" if secrets else "",
        "CREDENTIALS": "\n".join(_handed(name, systemd) for name in secrets),
        "LIMITS": "".join(f" {word}" for word in board.limits),
        "MEMORY_MAX": "75%" if board.budget_bytes is None else str(board.budget_bytes + DAEMON_BYTES),
        "MODELS": board.models or "",
        "SERVE": board.serve or "",
        **_folder(board),
    }


def _folder(board: Board) -> dict[str, str]:
    """Lines of a unit that make a missing folder of models, and let the agent write it.

    Where there is a runner, its group may write too, and nobody may remove what is another's (the mode's 3).
    """
    if board.models is None:
        return {"WRITES": "", "FOLDER": "", "ABOVE": ""}
    group, mode = ("fedquilt", "0750") if board.serve is None else ("fedquilt-runner", "3770")
    make = f"install -d -o fedquilt -g {group} -m {mode} {board.models}"
    return {
        "WRITES": f"ReadWritePaths=-{board.models}",
        "FOLDER": f"ExecStart=/bin/sh -c 'test -d {board.models} || {make}'",
        "ABOVE": f"ReadWritePaths=-{PurePosixPath(board.models).parent}",
    }


def _filled(others: Sequence[str], words: Mapping[str, str], systemd: int) -> dict[str, bytes]:
    made = {}
    for path in sorted((HERE / "units").iterdir()):
        if path.stem in others:
            continue
        text = fill(path.read_text(encoding="utf-8"), words)
        if systemd < 247:
            text = re.sub(r"^(Exec\w+=[-+]*)(?=systemd-|systemctl )", r"\1/bin/", text, flags=re.MULTILINE)
        if systemd < 239:  # an unknown group of calls would leave next to nothing allowed
            text = "".join(line for line in text.splitlines(True) if not line.startswith("SystemCall"))
        made[path.name] = text.encode()
    return made


def _handed(name: str, systemd: int) -> str:
    """Lines of a unit that hand a secret of root's to the agent: as a credential, or as a copy in a private folder."""
    if systemd >= 247:
        return f"LoadCredential={name}:{ETC}/{name}"
    copy = f"/usr/bin/install -o fedquilt -g fedquilt -m 0400 {ETC}/{name} {OWN_CREDENTIALS}/{name}"
    return f"RuntimeDirectory=fedquilt-agent\nRuntimeDirectoryMode=0700\nExecStartPre=+{copy}"


def fill(text: str, words: Mapping[str, str]) -> str:
    """Fill each @WORD@ of a template; a line that holds only an empty word is left out."""
    lines = []
    for line in text.splitlines():
        filled = line
        for word, value in words.items():
            filled = filled.replace(f"@{word}@", value)
        if filled or not line:
            lines.append(filled)
    return "\n".join(lines) + "\n"


# -- the whole ------------------------------------------------------------------------------------


def contents(
    board: Board | Coordinator,
    target: Target,
    house: Sequence[Path],
    lock: str,
    *,
    system_packages: bool = False,
    own_python: Path | None = None,
) -> dict[str, bytes | Path]:
    """Files of a bundle: name -> bytes, or the path of a file that has them."""
    brought = {} if own_python is None else {PYTHON: own_python}
    digests = {path.name: wheels.sha256(path) for path in house}
    digests |= {name: wheels.sha256(path) for name, path in brought.items()}
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in house}
    files |= brought
    files |= {f"etc/{name}": data for name, data in board.files.items()}
    files |= {f"units/{name}": data for name, data in units(board, target.systemd).items()}
    files["requirements.txt"] = lock.encode()
    programs = {"sysusers.conf": HERE / "sysusers.conf", "install.py": HERE / "install.py"}
    programs |= {"environment.py": Path(environment.__file__), "launch.py": Path(launch.__file__)}
    files |= {name: path.read_bytes() for name, path in programs.items()}
    script = fill((HERE / "install.sh").read_text(encoding="utf-8"), {"INTERPRETER": target.interpreter})
    files["install.sh"] = script.encode()
    brings = [files[name] for name in install.BROUGHT]
    names = (*sorted(digests.items()), target.interpreter, system_packages, *brings)
    manifest = {
        "format": install.FORMAT,
        "id": hashlib.sha256(repr(names).encode()).hexdigest()[:12],
        "version": fedquilt.__version__,
        "device": board.device,
        "target": target.name,
        "machine": target.machine,
        "python": target.python,
        "interpreter": target.interpreter,
        "system_packages": system_packages,
        "wheels": [path.name for path in house],
        "own_python": own_python is not None,
        "unpacked_bytes": sum(map(unpacked_bytes, house)) + sum(one.stat().st_size for one in brought.values()),
        "secret": sorted(SECRET & set(files)),
        "files": {name: _digest(name, data, digests) for name, data in sorted(files.items())},
    }
    files["bundle.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    return files


def _digest(name: str, data: bytes | Path, digests: Mapping[str, str]) -> str:
    return hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else digests[name.removeprefix("wheels/")]


def unpacked_bytes(path: Path) -> int:
    """Bytes of all files in a wheel."""
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def write(files: Mapping[str, bytes | Path], folder: Path) -> None:
    """Write the bundle as a folder, its secrets readable by this user alone.

    Raises:
        StoreError: it cannot be written.
    """
    with doing(f"write {folder}"):
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                path.symlink_to(data.resolve())
            else:
                path.touch(mode=0o600 if name in SECRET else 0o644)
                path.write_bytes(data)


def pack(files: Mapping[str, bytes | Path], path: Path, top: str = "", *, private: bool = True) -> int:
    """Write files as a tar archive; returns its size in bytes. The same files make the same bytes.

    Args:
        files: name -> content, or the file that has it.
        path: of the archive.
        top: folder that all names are put into; "": none.
        private: only this user reads the archive, as it may hold a key or a token.

    Raises:
        StoreError: it cannot be written.
    """
    with doing(f"write {path}"):
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
