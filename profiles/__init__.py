"""Board profiles: one TOML file per board, in which every number names its source.

    board = "jetson-tx2"
    title = "..."
    memory_bytes = { value = 8235515904, source = "tegrastats" }

    [sources.tegrastats]
    provenance = "table"
    text = "what the number is and where it comes from"

    [clocks]                         # every clock that can be set, in rising order
    gpu_hz = { values = [114750000, 1300500000], source = "steps" }

    [model]                          # speed and power as functions of the clocks: `fedquilt.profiles.clock_model`
    flop_gpu_cycles = { value = 0.0028, source = "fit" }

    [workloads.torch-conv]           # speed of one workload (a kind of work of an engine), measured by `record`
    flop_cpu_cycles = { value = 0.034, source = "fit" }
    launch_cpu_cycles = { value = 22000, source = "fit" }

    [[points]]                       # named modes, the first of which is the default
    name = "MAXN"
    gpu_hz = { value = 1300500000, source = "modes" }

Unknown numbers are left out. Numbers that nobody has measured are "assumed", and their source names the derivation. A
running agent replaces these numbers with those of its own board.

`BoardProfile.operating_points` consists of the named modes and of the grid that the model spans over the clocks. A mode
may turn cores off. The points of the grid use all cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fedquilt.core import JobError, Name, OperatingPoint, Rates, ShortText
from fedquilt.formats import toml
from fedquilt.profiles import clock_model as laws

Provenance = Literal["measured", "datasheet", "table", "assumed"]
FROM_SUREST: Final[tuple[Provenance, ...]] = ("measured", "datasheet", "table", "assumed")
MAX_POINTS: Final = 200  # limit on the operating points of a profile, which are sent in one message


class NumberSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    provenance: Provenance
    text: Annotated[str, Meta(min_length=20)]  # sentence on the origin of the number


class SourcedValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: Annotated[float, Meta(gt=0)]
    source: str


class ClockSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1, max_length=200)]
    source: str


Sourced: TypeAlias = SourcedValue | ClockSteps


class BoardClocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cpu_hz: ClockSteps | None = None
    gpu_hz: ClockSteps | None = None
    emc_hz: ClockSteps | None = None  # memory controller

    def frequencies_by_axis(self) -> dict[str, tuple[float, ...]]:
        """Return the frequencies of each axis in hertz, ascending. Axes without a clock are left out."""
        return {axis: getattr(self, axis).values for axis in laws.AXES if getattr(self, axis) is not None}


Unit: TypeAlias = Literal["flop", "byte", "launch", "task"]


class TimeCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the time laws in `fedquilt.profiles.clock_model`, each 0 if left out."""

    flop_s: SourcedValue | None = None  # a: seconds per FLOP that no clock shortens
    flop_cpu_cycles: SourcedValue | None = None  # b
    flop_gpu_cycles: SourcedValue | None = None  # c
    flop_emc_cycles: SourcedValue | None = None  # d
    byte_s: SourcedValue | None = None
    byte_cpu_cycles: SourcedValue | None = None
    byte_gpu_cycles: SourcedValue | None = None
    byte_emc_cycles: SourcedValue | None = None
    launch_s: SourcedValue | None = None
    launch_cpu_cycles: SourcedValue | None = None
    launch_gpu_cycles: SourcedValue | None = None
    launch_emc_cycles: SourcedValue | None = None
    task_s: SourcedValue | None = None
    task_cpu_cycles: SourcedValue | None = None
    task_gpu_cycles: SourcedValue | None = None
    task_emc_cycles: SourcedValue | None = None

    def time_law(self, unit: Unit) -> laws.InverseTimeLaw:
        cycles = {axis: self._coefficient(f"{unit}_{axis[:-3]}_cycles") for axis in laws.AXES}
        return laws.InverseTimeLaw(
            self._coefficient(f"{unit}_s"), {axis: count for axis, count in cycles.items() if count}
        )

    def compute_rates(self, clocks: laws.Clocks, top: Mapping[str, float]) -> dict[str, float]:
        """Return the fields of `fedquilt.core.Rates` at these clocks, without unknown ones.

        `top` contains the highest clocks of the board, by axis.
        """
        rates = {}
        for key, unit in UNITS.items():
            each_s = self.time_law(unit).compute_seconds(clocks, top)
            if each_s is not None:
                rates[key] = _round_to_four_digits(1 / each_s if key.endswith("_per_s") else each_s)
        return rates

    def sourced_values(self, *prefixes: str) -> tuple[SourcedValue, ...]:
        """Return the coefficients with one of these name prefixes, or all without a prefix."""
        keys = [key for key in self.__struct_fields__ if not prefixes or key.startswith(prefixes)]
        return tuple(value for key in keys if (value := getattr(self, key)) is not None)

    def _coefficient(self, key: str) -> float:
        return _value_or_none(getattr(self, key)) or 0.0


class ModelCoefficients(TimeCoefficients, frozen=True, forbid_unknown_fields=True):
    base_w: SourcedValue | None = None
    cpu_w: SourcedValue | None = None  # power at the highest clock, as of the next two
    gpu_w: SourcedValue | None = None
    emc_w: SourcedValue | None = None
    exponent: SourcedValue | None = None  # k

    def power_model(self) -> laws.PowerModel:
        axes_w = {axis: self._coefficient(key) for axis, key in laws.POWERED.items()}
        watts_by_axis = {axis: watts for axis, watts in axes_w.items() if watts}
        return laws.PowerModel(
            self._coefficient("base_w"), watts_by_axis, self._coefficient("exponent") or laws.PowerModel.exponent
        )


UNITS: Final[Mapping[str, Unit]] = {  # field of `fedquilt.core.Rates` -> unit of work
    "flops_per_s": "flop",
    "bytes_per_s": "byte",
    "launch_s": "launch",
    "task_s": "task",
}
BEHIND: Final[Mapping[str, tuple[str, ...]]] = {  # number of a point -> prefixes of the coefficients that give it
    "flops_per_s": ("flop_",),
    "bytes_per_s": ("byte_",),
    "launch_s": ("launch_",),
    "task_s": ("task_",),
    "busy_w": ("base_w", "cpu_w", "gpu_w", "emc_w", "exponent"),
}


class ProfilePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named mode of a board. `bytes_per_s` is the rate of memory traffic."""

    name: ShortText
    cores: SourcedValue | None = None  # processor cores that are on, for readers of the profile only
    cpu_hz: SourcedValue | None = None
    gpu_hz: SourcedValue | None = None
    emc_hz: SourcedValue | None = None
    flops_per_s: SourcedValue | None = None
    bytes_per_s: SourcedValue | None = None
    launch_s: SourcedValue | None = None
    task_s: SourcedValue | None = None
    busy_w: SourcedValue | None = None

    def sourced_values(self) -> tuple[SourcedValue, ...]:
        values = (getattr(self, key) for key in self.__struct_fields__ if key != "name")
        return tuple(value for value in values if value is not None)


class ThermalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ambient_c: SourcedValue
    rise_c_per_w: SourcedValue
    time_s: SourcedValue

    def sourced_values(self) -> tuple[SourcedValue, ...]:
        return (self.ambient_c, self.rise_c_per_w, self.time_s)


class BoardProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    board: Name
    title: ShortText
    memory_bytes: SourcedValue
    sources: dict[str, NumberSource]
    points: Annotated[tuple[ProfilePoint, ...], Meta(min_length=1, max_length=MAX_POINTS)]
    idle_w: SourcedValue | None = None
    clocks: BoardClocks | None = None
    model: ModelCoefficients | None = None
    workloads: Annotated[dict[ShortText, TimeCoefficients], Meta(max_length=20)] = {}  # by `WorkEstimate.workload`
    thermal: ThermalModel | None = None

    def sourced_values(self) -> tuple[Sourced, ...]:
        values: list[Sourced | None] = [self.memory_bytes, self.idle_w]
        if self.clocks is not None:
            values += [self.clocks.cpu_hz, self.clocks.gpu_hz, self.clocks.emc_hz]
        parts = [
            part for part in (self.model, *self.workloads.values(), self.thermal, *self.points) if part is not None
        ]
        return (*(v for v in values if v is not None), *(value for part in parts for value in part.sourced_values()))

    def provenance(self, *values: Sourced | None) -> Provenance:
        """Return the least certain provenance among these values, or in the whole profile without arguments."""
        known_values = [value for value in values or self.sourced_values() if value is not None]
        return max((self.sources[value.source].provenance for value in known_values), key=FROM_SUREST.index)

    def operating_points(self) -> tuple[OperatingPoint, ...]:
        """Return up to MAX_POINTS points: the named modes, then the grid, with missing numbers modelled."""
        listed_points = [
            self._make_point_with_predictions(point.name, {key: _value_or_none(getattr(point, key)) for key in NUMBERS})
            for point in self.points
        ]
        if self.clocks is None or self.model is None:
            return tuple(listed_points)
        listed_clocks = [{axis: getattr(point, axis) for axis in laws.AXES} for point in listed_points]
        room = MAX_POINTS - len(listed_points)
        clocks = laws.make_grid(self.clocks.frequencies_by_axis(), room)
        full_clocks: list[dict[str, float | None]] = [
            {axis: clocks_of_point.get(axis) for axis in laws.AXES} for clocks_of_point in clocks
        ]
        new_points = [
            (laws.format_point_name(clocks_of_point), full)
            for clocks_of_point, full in zip(clocks, full_clocks, strict=True)
            if full not in listed_clocks
        ]
        return (*listed_points, *(self._make_point_with_predictions(name, full) for name, full in new_points))

    def values_behind(self, point: str, *numbers: str, workload: str = "") -> tuple[SourcedValue, ...]:
        """Return the sourced values from which numbers of an operating point are derived.

        A number comes from the point's mode, or else from coefficients of the model or of the `workload`.
        """
        mode = next((mode for mode in self.points if mode.name == point), None)
        values: list[SourcedValue] = []
        for number in numbers:
            if number in UNITS and workload in self.workloads:
                values += self.workloads[workload].sourced_values(*BEHIND[number])
                continue
            value: SourcedValue | None = getattr(mode, number, None)
            values += [value] if value is not None else self.model.sourced_values(*BEHIND[number]) if self.model else []
        return tuple(values)

    def _make_point_with_predictions(self, name: str, known_numbers: Mapping[str, float | None]) -> OperatingPoint:
        numbers = {key: value for key, value in known_numbers.items() if value is not None}
        top = self.highest_clocks()
        if self.model is not None:
            numbers = {**self.model.compute_rates(known_numbers, top), **numbers}
            busy_w = self.model.power_model().compute_watts(known_numbers, top)
            if busy_w is not None:
                numbers.setdefault("busy_w", _round_to_four_digits(busy_w))
        rates = {
            workload: Rates(**times.compute_rates(known_numbers, top)) for workload, times in self.workloads.items()
        }
        return OperatingPoint(name=name, **numbers, rates=rates)

    def highest_clocks(self) -> dict[str, float]:
        frequencies = {} if self.clocks is None else self.clocks.frequencies_by_axis()
        return {axis: values[-1] for axis, values in frequencies.items()}


NUMBERS: Final = (*laws.AXES, *BEHIND)  # numeric fields of an operating point


def _value_or_none(value: SourcedValue | None) -> float | None:
    return None if value is None else value.value


def _round_to_four_digits(value: float) -> float:
    # A model is not more precise, and MAX_POINTS points fit into one message.
    return float(f"{value:.4g}")


def board_names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def load_board_profile(name: str) -> BoardProfile:
    if name not in board_names():
        names_text = toml.describe_choices(name, board_names())
        raise JobError(f"board {name!r} is unknown{names_text}, or auto for this machine")
    path = Path(__file__).parent / f"{name}.toml"
    return parse_board_profile(path.read_text(encoding="utf-8"), str(path))


def find_board_profile(name_or_path: str) -> BoardProfile:
    """Return the profile in a file, or the shipped profile with this name, or raise JobError."""
    path = Path(name_or_path)
    if not path.exists() and is_board_name(name_or_path):
        if name_or_path in board_names():
            return load_board_profile(name_or_path)
        names_text = toml.describe_choices(name_or_path, board_names())
        raise JobError(f"profile {name_or_path!r} is neither a file nor a shipped profile{names_text}")
    try:
        return parse_board_profile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"profile {path} cannot be read ({error}): write one with `fedquilt board record`") from None


def is_board_name(text: str) -> bool:
    return "/" not in text and not text.endswith(".toml")


_SUM: Final = "# sha256 of the lines above: "


def add_checksum(text: str) -> str:
    return f"{text}{_SUM}{hashlib.sha256(text.encode()).hexdigest()}\n"


def parse_board_profile(text: str, source: str) -> BoardProfile:
    """Return the profile in TOML text, or raise JobError, which names the text by `source`."""
    body, marker, checksum = text.rpartition(_SUM)
    if marker and checksum.strip() != hashlib.sha256(body.encode()).hexdigest():
        raise JobError(
            f"{source} has changed since `fedquilt board record` wrote it: record the board again, or remove the last "
            "line of the file if you changed it"
        )
    try:
        board = msgspec.convert(toml.parse_toml(text, source), BoardProfile)
    except msgspec.ValidationError as error:
        raise JobError(f"{source}: {error}") from None
    unknown = sorted({value.source for value in board.sourced_values()} - set(board.sources))
    if unknown:
        raise JobError(f"{source}: sources {', '.join(unknown)} are unknown: describe them under [sources]")
    names = [point.name for point in board.points]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise JobError(f"{source}: several points have the name {', '.join(repeated)}: use other names")
    lists = {} if board.clocks is None else board.clocks.frequencies_by_axis()
    for axis, values in lists.items():
        if list(values) != sorted(set(values)):
            raise JobError(f"{source}: [clocks] {axis} is not in rising order: sort the values")
    for table, times in {
        "model": board.model,
        **{f"workloads.{key}": workload for key, workload in board.workloads.items()},
    }.items():
        if times is None:
            continue
        axes = {axis for unit in UNITS.values() for axis in times.time_law(unit).cycles}
        axes |= set(times.power_model().axes_w) if isinstance(times, ModelCoefficients) else set()
        if missing := sorted(axes - set(lists)):
            raise JobError(f"{source}: [{table}] uses {', '.join(missing)}: list these clocks under [clocks]")
    return board
