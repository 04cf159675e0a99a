"""A job as a value in Python: the tables of a job file, with the same keys, defaults and checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import msgspec

from fedquilt import config, disk, methods
from fedquilt.api import derived
from fedquilt.coordinator import settings as jobs
from fedquilt.core import Encoding, JobError
from fedquilt.data.spec import DataSpec

P = ParamSpec("P")
T = TypeVar("T")


class Checked(type):
    """Metaclass of the public name of a job's table: keys and values are checked as by the commands."""

    table: type[msgspec.Struct]
    where: str

    def __call__(cls, *given: Any, **keys: Any) -> Any:
        """Make the table's struct from keys; checks names and values."""
        names = cls.table.__struct_fields__
        if len(given) > len(names):
            raise JobError(f"{cls.where}: {len(given)} values, and there are {len(names)} keys: {', '.join(names)}")
        placed = dict(zip(names, given, strict=False))
        for key in (key for key in placed if key in keys):
            both = f"{placed[key]!r} by its place and {keys[key]!r} by its name"
            raise JobError(f"{cls.where}: {key} is given twice: {both}")
        return config.convert(_plain({**placed, **keys}), cls.table, cls.where)

    def __instancecheck__(cls, other: object) -> bool:
        return isinstance(other, cls.table)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(cls.table)


if TYPE_CHECKING:
    from fedquilt.coordinator.settings import Cohort as Cohort

    Data = DataSpec

    class Fleet(jobs.Fleet, frozen=True):
        """See below."""

        def __init__(
            self,
            devices: int = ...,
            boards: Sequence[str] = ...,
            budgets: Sequence[str] = ...,
            policy: Literal["energy", "paper", "max", "board"] = ...,
            adversaries: jobs.Adversaries | None = ...,
            labels: Sequence[str] = ...,
            links: Sequence[str] = ...,
        ) -> None: ...

else:

    class Data(metaclass=Checked):
        """Source of examples and their partition: the [data] table (`fedquilt.data.spec.DataSpec`).

        Raises:
            JobError: an unknown key or a value that does not fit; names the key and what is possible there.
        """

        table, where = DataSpec, "[data]"

    class Cohort(metaclass=Checked):
        """Devices in a round, when it closes: the [cohort] table (`fedquilt.coordinator.settings.Cohort`).

        Raises:
            JobError: an unknown key or a value that does not fit; names the key and what is possible there.
        """

        table, where = jobs.Cohort, "[cohort]"

    class Fleet(metaclass=Checked):
        """Simulated devices, boards and budgets taken in turn: the [fleet] table (`coordinator.settings.Fleet`).

        Raises:
            JobError: an unknown key or a value that does not fit; names the key and what is possible there.
        """

        table, where = jobs.Fleet, "[fleet]"


def _named(init: Callable[P, T]) -> Callable[P, T]:
    """Raise for an unknown key of a job a JobError that lists the keys and the nearest one."""

    @wraps(init)
    def checked(*given: P.args, **keys: P.kwargs) -> T:
        known = [each.name for each in dataclasses.fields(Job)]
        for key in keys:
            if key not in known:
                raise JobError(f"a job has no key {key!r}; there are: {', '.join(known)}{config.nearest(key, known)}")
        if "method" not in keys:
            raise JobError("a job names its method, as in fq.Job(method='fedavg'): " + ", ".join(methods.names()))
        return init(*given, **{**keys, "method": derived.name_of(keys["method"])})  # type: ignore[arg-type]

    return checked


@dataclass(frozen=True, kw_only=True)
class Job:
    """One experiment: method, network, data and devices, with exactly the content of a job file.

    Each field is a key or a table of the file, with its default (docs/jobs.md). Tables are given as values of their
    types or as mappings. A job is checked when it is made; relative paths in it are taken from the working folder.

    Raises:
        JobError: an unknown key, a value that does not fit, or an unknown method or parameter; says the mend.
    """

    method: str  # an object or module of a method is taken too, and named as other processes import it
    name: str = "job"  # part of every seed drawn, and of a run's id
    params: Mapping[str, Any] = field(default_factory=dict)  # the method's own
    rounds: int = 10
    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)  # made by fedquilt.models
    data: DataSpec | Mapping[str, Any] = field(default_factory=dict)
    test: DataSpec | Mapping[str, Any] = field(default_factory=dict)
    cohort: jobs.Cohort = jobs.Cohort()
    fleet: jobs.Fleet = jobs.Fleet()
    wire: Encoding | Mapping[str, Any] = Encoding()
    stop: jobs.Stop | Mapping[str, Any] = jobs.Stop()
    check: jobs.Check | Mapping[str, Any] = jobs.Check()
    trigger: jobs.Trigger | Mapping[str, Any] | None = None  # of `fedquilt run` alone
    engine: str | None = None
    max_update_mb: int | None = None
    priority: float = 1.0
    compare: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[str] = ()
    donors: Sequence[Mapping[str, Any]] = ()
    int8: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self)}
        made = jobs.parse(jobs.complete_table(given, Path.cwd()))
        if made.data:
            DataSpec.parse(made.data)
        if {"path", "sources", "synthetic"} & made.test.keys():
            DataSpec.parse(made.test, "[test]")
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, getattr(made, each.name))

    @property
    def settings(self) -> jobs.Job:
        """The job as the coordinator's own type."""
        return jobs.Job(**{each.name: getattr(self, each.name) for each in dataclasses.fields(self)})

    def table(self) -> dict[str, Any]:
        """The job as a table of a job file, without the keys that are at their defaults."""
        plain: dict[str, Any] = _plain(self.settings)
        return plain

    def replace(self, **changes: Any) -> Job:
        """Copy with some keys changed; a table replaces the whole table.

        With another method, parameters that it lacks are dropped unless new ones are given.

        Raises:
            JobError: as for a new job.
        """
        now = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if "method" in changes:
            changes["method"] = derived.name_of(changes["method"])
        if "method" in changes and "params" not in changes:
            known = {each.name for each in dataclasses.fields(methods.load(changes["method"]).params)}
            changes["params"] = {key: value for key, value in self.params.items() if key in known}
        return Job(**{**now, **changes})

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job from a TOML file; relative paths in it start at the file's folder.

        Raises:
            JobError: unreadable, not TOML, or not a job; says the mend.
        """
        return cls.of(jobs.load(Path(path)))

    @classmethod
    def of(cls, job: jobs.Job) -> Job:
        """The public form of a coordinator's job."""
        return cls(**{name: getattr(job, name) for name in job.__struct_fields__})

    def write(self, path: str | Path) -> Path:
        """Write the job as a TOML file for the commands. Returns its path.

        Raises:
            StoreError: the file cannot be written.
        """
        disk.write(Path(path), config.text(self.table()))
        return Path(path)

    def __repr__(self) -> str:
        return f"Job({', '.join(f'{key}={value!r}' for key, value in self.table().items())})"


if not TYPE_CHECKING:
    Job.__init__ = _named(Job.__init__)


def _plain(value: Any) -> Any:
    """Value in TOML's types: structs become tables without defaults, sequences become lists."""
    if isinstance(value, msgspec.Struct):
        fields = {each.name: (each, getattr(value, each.name)) for each in msgspec.structs.fields(value)}
        return {name: _plain(now) for name, (each, now) in fields.items() if each.required or now != _default(each)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple | range):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _default(of: msgspec.structs.FieldInfo) -> Any:
    return of.default if of.default_factory is msgspec.NODEFAULT else of.default_factory()
