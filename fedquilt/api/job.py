"""Public classes for jobs, with the keys and checks of a job file, and for derived methods."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from fedquilt import extras, methods
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.privacy_settings import PrivacySettings
from fedquilt.core import Encoding, JobError, Method
from fedquilt.data.spec import DataSpec
from fedquilt.formats import toml
from fedquilt.host import disk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")
T = TypeVar("T")


class ValidatedMeta(type):
    """Metaclass of the public classes for job tables, which checks keys and values."""

    table: type[msgspec.Struct]
    table_name: str

    def __call__(cls, *positional: Any, **keys: Any) -> Any:
        names = cls.table.__struct_fields__
        if len(positional) > len(names):
            raise JobError(
                f"{cls.table_name} got {len(positional)} values for {len(names)} keys: give {', '.join(names)}"
            )
        positional_keys = dict(zip(names, positional, strict=False))
        for key in (key for key in positional_keys if key in keys):
            conflict = f"{positional_keys[key]!r} by position and {keys[key]!r} by name"
            raise JobError(f"{cls.table_name}: {key} is given twice, {conflict}: give it once")
        return toml.convert_table(_to_plain({**positional_keys, **keys}), cls.table, cls.table_name)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.table)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(cls.table)


if TYPE_CHECKING:
    Cohort, Data, Fleet = jobs.CohortSettings, DataSpec, jobs.FleetSettings
else:

    class Data(metaclass=ValidatedMeta):
        """Source of examples and their partition: the [data] table (`fedquilt.data.spec.DataSpec`).

        Raises:
            JobError: If a key is unknown or a value does not fit.
        """

        table, table_name = DataSpec, "[data]"

    class Cohort(metaclass=ValidatedMeta):
        """Rules for selecting the devices of a round and for closing it: the [cohort] table.

        Raises:
            JobError: If a key is unknown or a value does not fit.
        """

        table, table_name = jobs.CohortSettings, "[cohort]"

    class Fleet(metaclass=ValidatedMeta):
        """Simulated devices with their boards and memory budgets: the [fleet] table.

        Raises:
            JobError: If a key is unknown or a value does not fit.
        """

        table, table_name = jobs.FleetSettings, "[fleet]"


def _wrap_init_with_checks(init: Callable[P, T]) -> Callable[P, T]:
    @wraps(init)
    def checked_init(*positional: P.args, **keys: P.kwargs) -> T:
        job_keys = [field_.name for field_ in dataclasses.fields(Job)]
        for key in keys:
            if key not in job_keys:
                raise JobError(f"a job has no key {key!r}{toml.describe_choices(key, job_keys)}")
        if "method" not in keys:
            names = ", ".join(methods.builtin_names())
            raise JobError(f"the job has no method: give one, as in fq.Job(method='fedavg'), of {names}")
        return init(*positional, **{**keys, "method": importable_name(keys["method"])})  # type: ignore[arg-type]

    return checked_init


@dataclass(frozen=True, kw_only=True)
class Job:
    """One experiment: method, network, data and devices, with exactly the content of a job file.

    Each field is a key or a table of the file, with its default (docs/jobs.md). Tables are given as values of their
    types or as mappings. A job is checked on creation, and its relative paths start at the working directory.

    Raises:
        JobError: If a key, method or parameter is unknown, or a value does not fit.
    """

    method: str  # name, module or object of a method; stored as an importable name
    name: str = "job"  # part of every seed drawn, and of a run's id
    params: Mapping[str, Any] = field(default_factory=dict)  # parameters of the method
    rounds: int = 10
    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)  # network, as in [model]
    data: DataSpec | Mapping[str, Any] = field(default_factory=dict)
    test: DataSpec | Mapping[str, Any] = field(default_factory=dict)
    public: DataSpec | Mapping[str, Any] = field(default_factory=dict)  # examples that all devices get
    cohort: jobs.CohortSettings = jobs.CohortSettings()
    fleet: jobs.FleetSettings = jobs.FleetSettings()
    wire: Encoding | Mapping[str, Any] = Encoding()
    stop: jobs.JobLimits | Mapping[str, Any] = jobs.JobLimits()
    check: jobs.EvaluationSettings | Mapping[str, Any] = jobs.EvaluationSettings()
    personal: jobs.PersonalSettings | Mapping[str, Any] = jobs.PersonalSettings()
    privacy: PrivacySettings | Mapping[str, Any] | None = None
    trigger: jobs.DriftTrigger | Mapping[str, Any] | None = None  # for `fedquilt run` only
    engine: str | None = None
    priority: float = 1.0
    compare: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[str] = ()
    donors: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        table = {field_.name: _to_plain(getattr(self, field_.name)) for field_ in dataclasses.fields(self)}
        settings = jobs.parse_job(jobs.complete_table(table, Path.cwd()))
        if settings.data:
            DataSpec.parse(settings.data)
        if {"path", "sources"} & settings.test.keys():
            DataSpec.parse(settings.test, "[test]")
        for field_ in dataclasses.fields(self):
            object.__setattr__(self, field_.name, getattr(settings, field_.name))

    @property
    def settings(self) -> jobs.JobSettings:
        """Settings of the job as the coordinator's `JobSettings`."""
        return jobs.JobSettings(**{field_.name: getattr(self, field_.name) for field_ in dataclasses.fields(self)})

    def to_table(self) -> dict[str, Any]:
        """Return the job as a table of a job file, without keys at their defaults."""
        plain: dict[str, Any] = _to_plain(self.settings)
        return plain

    def replace(self, **changes: Any) -> Job:
        """Return a copy with some keys changed.

        A new table replaces the old one completely. With another method and no new `params`, parameters that the new
        method does not have are dropped.

        Args:
            changes: New values by key.

        Returns:
            The new job.

        Raises:
            JobError: If a key, method or parameter is unknown, or a value does not fit.
        """
        current = {field_.name: getattr(self, field_.name) for field_ in dataclasses.fields(self)}
        if "method" in changes:
            changes["method"] = importable_name(changes["method"])
        if "method" in changes and "params" not in changes:
            method_params = {field_.name for field_ in dataclasses.fields(methods.load(changes["method"]).params)}
            changes["params"] = {key: value for key, value in self.params.items() if key in method_params}
        return Job(**{**current, **changes})

    @extras.report_missing_extras()
    def plot_fleet(self) -> Axes:
        """Draw a dot for each simulated device and class, whose size is the number of examples.

        Returns:
            The axes of a new figure of matplotlib.

        Raises:
            JobError: If matplotlib is not installed, or the job has no data.
            DataError: If the data cannot be read or divided.
        """
        from fedquilt.tools.report import partition, plots

        return plots.draw_picture(partition.draw_counts(partition.count_examples(self.settings)))

    @classmethod
    def read(cls, path: str | Path) -> Job:
        """Read a job from a TOML file. Relative paths start at the file's folder.

        Args:
            path: Path of the file.

        Returns:
            The job.

        Raises:
            JobError: If the file cannot be read, is not TOML, or is not a job.
        """
        return cls.from_settings(jobs.load_job(Path(path)))

    @classmethod
    def from_settings(cls, job: jobs.JobSettings) -> Job:
        """Return the public form of a coordinator's job settings."""
        return cls(**{name: getattr(job, name) for name in job.__struct_fields__})

    def write(self, path: str | Path) -> Path:
        """Write the job as a TOML file.

        Args:
            path: Path of the file.

        Returns:
            The path.

        Raises:
            StoreError: If the file cannot be written.
        """
        disk.write_output(Path(path), toml.format_toml(self.to_table()))
        return Path(path)

    def __repr__(self) -> str:
        return f"Job({', '.join(f'{key}={value!r}' for key, value in self.to_table().items())})"


if not TYPE_CHECKING:
    Job.__init__ = _wrap_init_with_checks(Job.__init__)


def _to_plain(value: Any) -> Any:
    """Return a value as TOML tables, lists and scalars, without None and fields at their defaults."""
    if isinstance(value, msgspec.Struct):
        fields = {item.name: (item, getattr(value, item.name)) for item in msgspec.structs.fields(value)}
        return {
            name: _to_plain(current)
            for name, (item, current) in fields.items()
            if item.required or current != _field_default(item)
        }
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple | range):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _field_default(field_: msgspec.structs.FieldInfo) -> Any:
    return field_.default if field_.default_factory is msgspec.NODEFAULT else field_.default_factory()


# -- methods --------------------------------------------------------------------------------------


def method(base: Method | ModuleType, **parts: Any) -> Method:
    """Return a copy of a method with some fields replaced.

    A job can name the result if a module stores it, usually as METHOD.

    Args:
        base: A method, or a module of `fedquilt.methods` such as `fedquilt.fedavg`.
        parts: Fields of `fedquilt.core.Method`, mostly `paper`, `params` (a frozen dataclass) and `work`.

    Returns:
        The new method.

    Raises:
        JobError: If `base` is not a method, a field is unknown, or a type is not a frozen dataclass.
    """
    method_ = getattr(base, "METHOD", base)
    if not isinstance(method_, Method):
        raise JobError(
            f"{getattr(base, '__name__', base)!r} is not a method: give a Method, or a module such as fq.fedavg"
        )
    field_names = [field_.name for field_ in dataclasses.fields(Method)]
    for name in parts:
        if name not in field_names:
            raise JobError(f"a method has no field {name!r}{toml.describe_choices(name, field_names)}")
    for name in ("params", "state"):
        if name in parts and not _is_frozen_dataclass(parts[name]):
            raise JobError(
                f"{name} = {parts[name]!r} is not a frozen dataclass: write @dataclass(frozen=True) above its class"
            )
    return dataclasses.replace(method_, **parts)


def importable_name(value: object) -> object:
    """Return the name under which another process can import a method object.

    A built-in method has a short name such as "fedavg", any other "module:NAME". Jobs are written into logs and
    bundles, so other processes import the method by this name.

    Args:
        value: A method, a module with METHOD, or any other value.

    Returns:
        The name. A value that is not a method is returned unchanged.

    Raises:
        JobError: If no importable module contains the method.
    """
    candidate = getattr(value, "METHOD", value) if isinstance(value, ModuleType) else value
    if not isinstance(candidate, Method):
        return value
    locations = [
        (module.__name__, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and getattr(module, "__spec__", None) is not None
        for name, member in list(vars(module).items())
        if member is candidate and module.__name__ != "__main__"
    ]
    if not locations:
        raise JobError(
            "method cannot be imported by other processes, because it is defined in a notebook or in the running "
            "script: move it to a file mine.py as METHOD = ..., and give mine.METHOD"
        )
    builtin_prefix = "fedquilt.methods."
    module_name, name = min(locations, key=lambda location: (not location[0].startswith(builtin_prefix), location))
    if module_name.startswith(builtin_prefix) and name == "METHOD":
        return module_name.removeprefix(builtin_prefix)
    return f"{module_name}:{name}"


def _is_frozen_dataclass(kind: object) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
