"""Options that several verbs share, the kinds of words that options take, and what a shell completes for them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from fedquilt import config, units
from fedquilt.cli.commands import F, argument, option

HOME: Final = Path("fedquilt-runs")
BROKER: Final = "mqtt://127.0.0.1:1883"


# -- kinds of words -------------------------------------------------------------------------------


class Checked(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A word that `read` turns into a value; it raises ValueError with a sentence.

    Args:
        name: Shown in --help in place of the word.
        read: The function.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value of a word; what is no text is one already."""
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class File(click.Path):
    """A path, of which nothing is checked here: whoever opens it says what is wrong, with the exit code for that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path."""
        return Path(value)


class OneOf(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """One of some words; another is answered with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word."""
        known = [str(each) for each in self.choices]
        if value not in known:
            self.fail(f"{value!r} is none of {', '.join(known)}{config.nearest(str(value), known)}", param, ctx)
        return value


def _number(text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole number' if kind is int else 'number'}") from None


def _positive(text: str) -> int:
    value: int = _number(text, int)
    if value < 1:
        raise ValueError(f"{value} is less than 1")
    return value


def _count(text: str) -> int:
    value: int = _number(text, int)
    if value < 0:
        raise ValueError(f"{value} is less than 0")
    return value


def _port(text: str) -> int:
    value: int = _number(text, int)
    if not 0 < value < 65536:
        raise ValueError(f"{value} is no port: 1 to 65535")
    return value


def _above_0(text: str) -> float:
    value: float = _number(text, float)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return value


def _seconds(text: str) -> float:
    value: float = _number(text, float)
    if not 0 < value < 1e9:
        raise ValueError(f"{text} is no time in seconds")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", text):
        raise ValueError(f"{text!r}: up to 64 of a-z, 0-9, '.', '_' and '-', beginning with one of a-z, 0-9")
    return text


PATH: Final = File()
FOLDER: Final = File(file_okay=False)
POSITIVE: Final = Checked("n", _positive)
PORT: Final = Checked("port", _port)
ABOVE_0: Final = Checked("x", _above_0)
SECONDS: Final = Checked("s", _seconds)
NAME: Final = Checked("name", _name)
COUNT: Final = Checked("n", _count)
TIME: Final = Checked("time", units.seconds)
WHOLE: Final = Checked("n", lambda text: _number(text, int))
NUMBER: Final = Checked("x", lambda text: _number(text, float))


# -- what a shell completes -----------------------------------------------------------------------


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Ids of the runs in --home, the latest first, and the names of their jobs; none where it cannot be read."""
    from fedquilt.core import FedquiltError

    home = Path(context.params.get("home") or HOME)
    if not (home / "fedquilt.db").is_file():
        return []
    try:
        from fedquilt.coordinator.store import Store

        with Store(home) as store:
            found = [row.id for row in reversed(store.all_jobs())]
    except (FedquiltError, OSError):
        return []
    return [each for each in found if each.startswith(incomplete)]


def methods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of methods."""
    from fedquilt import methods as known

    return [each for each in [*known.names(), *known.outside()] if each.startswith(incomplete)]


def boards(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of boards that have a profile."""
    from fedquilt import profiles

    return [each for each in profiles.names() if each.startswith(incomplete)]


# -- options --------------------------------------------------------------------------------------


def home(function: F) -> F:
    """--home: the coordinator's folder."""
    return option("--home", type=FOLDER, default=HOME, help="The coordinator's folder.")(function)


def format(function: F) -> F:
    """--format: text for people, JSON for programs."""
    return option("--format", type=OneOf(("text", "json")), default="text", help="Output for people, or for programs.")(
        function
    )


def log_format(function: F) -> F:
    """--log-format: sentences for people, or a JSON object a line with ids of run, round and device."""
    return option(
        "--log-format",
        type=OneOf(("text", "json")),
        default="text",
        help="Log sentences, or a JSON object a line with the ids of run, round and device.",
    )(function)


def run_argument(function: F) -> F:
    """RUN: which run."""
    return argument("run", "A run's id, or a job's name for its latest run.", shell_complete=runs)(function)


def job_argument(function: F) -> F:
    """JOB: a job file."""
    return argument("job", "The job file, TOML.", type=PATH)(function)


def bundle(function: F) -> F:
    """--bundle: what `prepare` made."""
    return option("--bundle", type=FOLDER, help="The bundle that `prepare` made (default: JOB.bundle beside the job).")(
        function
    )


def authority(function: F) -> F:
    """--ca: the folder of a fleet's certificate authority."""
    return option("--ca", type=FOLDER, default=Path("fedquilt-ca"), help="Folder of the certificate authority.")(
        function
    )


@dataclass(frozen=True)
class Broker:
    """The broker as options give it."""

    url: str | None
    ca: Path | None
    cert: Path | None
    key: Path | None
    password_file: Path | None
    fleet: str

    @property
    def files(self) -> dict[str, Path]:
        """The files that were given, by their names in an agent.toml."""
        named = {"ca": self.ca, "cert": self.cert, "key": self.key, "password_file": self.password_file}
        return {name: path for name, path in named.items() if path is not None}

    def table(self) -> dict[str, Any]:
        """The broker as an agent.toml's [broker] table."""
        return {"url": self.url, **{name: str(path.resolve()) for name, path in self.files.items()}}


def broker(default: str | None = BROKER) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the options of a broker; the function gets them as `broker`, a `Broker`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(**given: Any) -> Any:
            files = {name: given.pop(name) for name in ("ca", "cert", "key", "password_file", "fleet")}
            return function(broker=Broker(given.pop("broker"), **files), **given)

        for add in reversed(
            (
                option(
                    "--broker",
                    default=default,
                    metavar="URL",
                    help="Address of the broker: mqtt[s]://[user@]host[:port]",
                    group="Broker",
                ),
                option("--ca", type=PATH, help="Certificate authority of the broker, PEM.", group="Broker"),
                option("--cert", type=PATH, help="This side's certificate, PEM.", group="Broker"),
                option("--key", type=PATH, help="This side's private key, PEM.", group="Broker"),
                option(
                    "--password-file",
                    type=PATH,
                    help="File with the user's password on its first line.",
                    group="Broker",
                ),
                option("--fleet", type=NAME, default="fleet", help="Name of the fleet in MQTT topics.", group="Broker"),
            )
        ):
            called = add(called)
        return called

    return decorate


@dataclass(frozen=True)
class Workers:
    """Who carries simulated boards' work out, as options give it."""

    engine: str | None
    count: int | None
    mixed: bool

    @property
    def given(self) -> bool:
        """Whether any of the options was given."""
        return self.engine is not None or self.count is not None or self.mixed

    @property
    def words(self) -> list[str]:
        """The options as they were given."""
        engine = [] if self.engine is None else ["--engine", self.engine]
        count = [] if self.count is None else ["--workers", str(self.count)]
        return [*engine, *count, *(["--mixed"] if self.mixed else [])]

    def options(self) -> dict[str, Any]:
        """As the functions of `fedquilt.tools.experiments` take them."""
        return {"engine": self.engine or "auto", "workers": self.count, "mixed": self.mixed}


def workers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the options of simulated boards' workers; the function gets them as `workers`."""

    @functools.wraps(function)
    def called(**given: Any) -> Any:
        found = Workers(given.pop("engine"), given.pop("workers"), given.pop("mixed"))
        return function(workers=found, **given)

    for add in (
        option(
            "--mixed",
            is_flag=True,
            help="Permit machines whose processor, GPU or libraries differ; results then do not repeat bit for bit.",
            group="Workers",
        ),
        option(
            "--workers",
            type=POSITIVE,
            help="Number of workers (default: one for each core, of this machine or of the Ray cluster).",
            group="Workers",
        ),
        option(
            "--engine",
            metavar="ENGINE",
            help="Workers that do the boards' work: pool, processes of this machine; ray, of the Ray cluster that it "
            "is a node of, or of a Ray that is started for the run; ray://HOST:PORT, of a cluster elsewhere; auto, "
            "pool unless RAY_ADDRESS is set.",
            group="Workers",
        ),
    ):
        called = add(called)
    return called


@dataclass(frozen=True)
class Blobs:
    """Places of models and updates beside the broker, as options give them."""

    http: str | None
    url: str | None
    s3: str | None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        named = {"--blobs-http": self.http, "--blobs-url": self.url, "--blobs-s3": self.s3}
        return [name for name, value in named.items() if value is not None]

    def where(self, ca: Path | None) -> Any:
        """The places as a coordinator takes them; `ca`: authority of the store's certificate.

        Raises:
            JobError: an address is malformed, boards cannot reach it, or a bucket's key is missing.
        """
        from fedquilt.coordinator.object_store import Bucket
        from fedquilt.coordinator.places import Where

        return Where(self.http, self.url, None if self.s3 is None else Bucket.parse(self.s3, os.environ), ca)


def blobs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of places beside the broker; the function gets them as `blobs`, a `Blobs`."""

    @functools.wraps(function)
    def called(**given: Any) -> Any:
        return function(blobs=Blobs(*(given.pop(f"blobs_{name}") for name in ("http", "url", "s3"))), **given)

    for add in reversed(
        (
            option(
                "--blobs-http",
                metavar="HOST:PORT",
                help="Serve models and take updates by HTTP (with --cert HTTPS) too; boards that do not reach it use "
                "the broker.",
                group="Blobs",
            ),
            option("--blobs-url", metavar="URL", help="Address by which boards reach --blobs-http.", group="Blobs"),
            option(
                "--blobs-s3",
                metavar="URL",
                help="Use a bucket of an S3-compatible store for models and updates: "
                "https://HOST/BUCKET/PREFIX?region=REGION. Its keys: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
                "the environment.",
                group="Blobs",
            ),
        )
    ):
        called = add(called)
    return called


def exclusive(**given: Any) -> None:
    """Refuse a command line that has more than one of these options.

    Raises:
        click.UsageError: names two that were given.
    """
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(named) > 1:
        raise click.UsageError(f"{named[0]} and {named[1]}: one of them, not both", click.get_current_context())
