"""Options shared by several verbs, their value types, and shell completion."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fedquilt import plugins
from fedquilt.cli.commands import F, argument, option
from fedquilt.console import units
from fedquilt.formats import toml

if TYPE_CHECKING:
    from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings

HOME: Final = Path("fedquilt-runs")
FLEET: Final = "fleet"
BROKER: Final = "mqtt://127.0.0.1:1883"


# -- value types ----------------------------------------------------------------------------------


class ParsedType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Type of an option that a function reads. Its ValueError is the message, and --help shows `name`."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FilePath(click.Path):
    """Path without checks. Errors of later use have their own exit codes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value)


class WordChoice(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """Choice of words. The error for another word names the most similar choice."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        choices = [str(choice) for choice in self.choices]
        if value not in choices:
            self.fail(f"{value!r} is unknown{toml.describe_choices(str(value), choices)}", param, ctx)
        return value


def _parse_number(text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole number' if kind is int else 'number'}") from None


def _parse_new_job(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".toml":
        raise ValueError(f"{text!r} is not the name of a job file: write {path.stem or 'job'}.toml")
    return path


def _parse_count(text: str, minimum: int = 0) -> int:
    value: int = _parse_number(text, int)
    if value < minimum:
        raise ValueError(f"{value} is below the minimum of {minimum}")
    return value


def _parse_above_0(text: str, limit: float = float("inf"), problem: str = "is not above 0") -> float:
    value: float = _parse_number(text, float)
    if not 0 < value < limit:
        raise ValueError(f"{text} {problem}")
    return value


def _parse_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", text):
        form = "up to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
        raise ValueError(f"{text!r} is not a valid name: write {form}")
    return text


PATH: Final = FilePath()
FOLDER: Final = FilePath(file_okay=False)
NEW_JOB: Final = ParsedType("path", _parse_new_job)
POSITIVE: Final = ParsedType("n", lambda text: _parse_count(text, minimum=1))
POSITIVE_NUMBER: Final = ParsedType("x", _parse_above_0)
SECONDS: Final = ParsedType("s", lambda text: _parse_above_0(text, 1e9, "is not a time in seconds"))
NAME: Final = ParsedType("name", _parse_name)
COUNT: Final = ParsedType("n", _parse_count)
TIME: Final = ParsedType("time", units.parse_seconds)
INTEGER: Final = ParsedType("n", lambda text: _parse_number(text, int))


# -- shell completion -----------------------------------------------------------------------------


def home_argument(home: Path) -> str:
    """Return the option, after a space, that names a home in a command, or "" for the default."""
    return "" if home == HOME else f" --home {shlex.quote(str(home))}"


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from fedquilt.core import FedquiltError

    home = Path(context.params.get("home") or HOME)
    if not (home / "fedquilt.db").is_file():
        return []
    try:
        from fedquilt.coordinator.storage.store import open_store

        with open_store(home) as store:
            ids = [row.id for row in reversed(store.all_jobs())]
    except (FedquiltError, OSError):
        return []
    return [id_ for id_ in ids if id_.startswith(incomplete)]


def complete_methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from fedquilt import methods as methods_

    return [name for name in [*methods_.builtin_names(), *methods_.plugin_names()] if name.startswith(incomplete)]


def complete_targets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from fedquilt.tools.boards import targets

    return [name for name in targets.TARGETS if name.startswith(incomplete)]


# -- options --------------------------------------------------------------------------------------

home_option: Final = option("--home", type=FOLDER, default=HOME, help="The coordinator's folder.")
format_option: Final = option(
    "--format", type=WordChoice(("text", "json")), default="text", help="Output for people, or JSON for programs."
)
target_option: Final = option(
    "--target",
    metavar="TARGET",
    help="System of the board: jetpack5 to jetpack7, jetpack6-gpu, raspberry-pi-os, arm64 or amd64.",
    shell_complete=complete_targets,
)
python_option: Final = option(
    "--python",
    metavar="3.N|PATH",
    help="Python of the board: version, or path ending in python3.N (default: the target's).",
)
extras_option: Final = option(
    "--extras",
    variadic=True,
    allow_empty=True,
    default=("onnx",),
    metavar="EXTRA",
    help="Extras of fedquilt to install, such as onnx or train; without a word, none.",
)
authority_option: Final = option(
    "--ca", type=FOLDER, default=Path("fedquilt-ca"), help="Folder of the certificate authority."
)
run_argument: Final = argument("run", "A run's id, or a job's name for its latest run.", shell_complete=complete_runs)
job_argument: Final = argument("job", "The job file, TOML.", type=PATH)
source_argument: Final = argument(
    "source",
    "A job file, or data: a CSV, Parquet or .npz file, a folder of images by class or of IDX files, sklearn/NAME, "
    "torchvision/NAME, or digits, which come with fedquilt.",
)
label_column_option: Final = option(
    "--label",
    default="",
    show_default=False,
    metavar="COLUMN",
    help="Column or array to predict, with data (default: y).",
)


def label_option(name: str) -> Callable[[F], F]:
    return option(
        "--label", name, variadic=True, metavar="WORD", help="Only boards with this label or group; !WORD: without it."
    )


def group_options(name: str, kind: type, *added: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds options to a command and passes their values as one dataclass.

    Args:
        name: Name of the command's parameter for the dataclass.
        kind: Dataclass with a field for each option.
        added: Decorators of the options.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            values = {field_.name: arguments.pop(field_.name) for field_ in fields(kind)}
            return command(**{name: kind(**values)}, **arguments)

        for add in reversed(added):
            wrapper = add(wrapper)
        return wrapper

    return decorate


@dataclass(frozen=True)
class BrokerOptions:
    url: str | None
    ca: Path | None
    cert: Path | None
    key: Path | None
    password_file: Path | None
    fleet: str

    @property
    def files(self) -> dict[str, Path]:
        paths = {"ca": self.ca, "cert": self.cert, "key": self.key, "password_file": self.password_file}
        return {name: path for name, path in paths.items() if path is not None}

    @property
    def arguments(self) -> list[str]:
        arguments = [] if self.url in (None, BROKER) else ["--broker", str(self.url)]
        for name, path in self.files.items():
            arguments += [f"--{name.replace('_', '-')}", str(path)]
        return arguments + ([] if self.fleet == FLEET else ["--fleet", self.fleet])

    def to_table(self) -> dict[str, Any]:
        return {"url": self.url, **{name: str(path.resolve()) for name, path in self.files.items()}}


def broker_options(default: str | None = BROKER) -> Callable[[Callable[..., Any]], Any]:
    add = functools.partial(option, group="Broker")
    return group_options(
        "broker",
        BrokerOptions,
        add(
            "--broker",
            "url",
            default=default,
            metavar="URL",
            help="Address of the broker: mqtt[s]://[user@]host[:port]",
        ),
        add("--ca", type=PATH, help="Certificate authority of the broker, PEM."),
        add("--cert", type=PATH, help="This side's certificate, PEM."),
        add("--key", type=PATH, help="This side's private key, PEM."),
        add("--password-file", type=PATH, help="File with the user's password on its first line."),
        add("--fleet", type=NAME, default=FLEET, help="Name of the fleet in MQTT topics."),
    )


@dataclass(frozen=True)
class WorkerOptions:
    engine: str | None
    workers: int | None
    mixed: bool

    @property
    def is_given(self) -> bool:
        return self.engine is not None or self.workers is not None or self.mixed

    @property
    def arguments(self) -> list[str]:
        engine = [] if self.engine is None else ["--engine", self.engine]
        count = [] if self.workers is None else ["--workers", str(self.workers)]
        return [*engine, *count, *(["--mixed"] if self.mixed else [])]

    def to_keywords(self) -> dict[str, Any]:
        return {"engine": self.engine or "auto", "workers": self.workers, "mixed": self.mixed}


worker_options: Final = group_options(
    "workers",
    WorkerOptions,
    option(
        "--engine",
        metavar="ENGINE",
        help="Workers: pool (processes of this machine), ray (this node's Ray cluster, or a new local Ray), "
        "ray://HOST:PORT (another cluster), or auto (pool unless RAY_ADDRESS is set).",
        group="Workers",
    ),
    option(
        "--workers",
        type=POSITIVE,
        help="Number of workers (default: one for each core).",
        group="Workers",
    ),
    option(
        "--mixed",
        is_flag=True,
        help="Permit different processors, GPUs or libraries; results then differ in the last bits.",
        group="Workers",
    ),
)


@dataclass(frozen=True)
class BlobOptions:
    blobs_http: str | None
    blobs_url: str | None
    blobs_backend: str | None

    @property
    def given_options(self) -> list[str]:
        names = [field_.name for field_ in fields(self) if getattr(self, field_.name) is not None]
        return [f"--{name.replace('_', '-')}" for name in names]

    def to_locations(self, ca: Path | None) -> BlobLocationSettings:
        """Return the blob locations for a coordinator. `ca` is the CA certificate of the backend's server.

        Raises:
            JobError: If an address is malformed or unreachable for devices, or the backend is unknown or unusable.
        """
        from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings

        opener = None
        if self.blobs_backend is not None:
            name, _, address = self.blobs_backend.partition("=")
            opener = plugins.load_plugin("blobs", name)(address)
        return BlobLocationSettings(self.blobs_http, self.blobs_url, opener, ca)


blob_options: Final = group_options(
    "blobs",
    BlobOptions,
    option(
        "--blobs-http",
        metavar="HOST:PORT",
        help="Also transfer models and updates by HTTP (with --cert HTTPS), where boards reach this address.",
        group="Blobs",
    ),
    option("--blobs-url", metavar="URL", help="Address by which boards reach --blobs-http.", group="Blobs"),
    option(
        "--blobs-backend",
        metavar="NAME=ADDRESS",
        help="Also transfer models and updates by a package's store, such as s3=https://HOST/BUCKET.",
        group="Blobs",
    ),
)


def require_exclusive(**options_: Any) -> None:
    names = [f"--{name.replace('_', '-')}" for name, value in options_.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{names[0]} is not possible with {names[1]}", click.get_current_context())
