"""Board profiles: data, not code. One TOML file per board; every number names its source.

    board = "jetson-tx2"
    title = "..."
    memory_bytes = { value = 8235515904, source = "tegrastats" }

    [sources.tegrastats]
    provenance = "table"
    text = "what the number is and where it comes from"

    [clocks]                         # every clock the board can be set to, rising
    gpu_hz = { values = [114750000, 1300500000], source = "steps" }

    [model]                          # how speed and power follow from clocks: `fedquilt.profiles.model`
    flop_gpu_cycles = { value = 0.0028, source = "fit" }

    [workloads.torch-conv]           # how speed does for one workload, an engine's kind of work: `record` measures it
    flop_cpu_cycles = { value = 0.034, source = "fit" }
    launch_cpu_cycles = { value = 22000, source = "fit" }

    [[points]]                       # named modes; a board is held at the first unless told otherwise
    name = "MAXN"
    gpu_hz = { value = 1300500000, source = "modes" }

What nobody knows is left out. What nobody measured is "assumed", and its source says from what it is
derived. A running agent replaces these numbers by what its own board says.
`Board.operating_points` are the named modes, and then the grid that the model spans over the clocks.
A mode may turn cores off; the grid's points leave all of them on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fedquilt import config
from fedquilt.core import JobError, Label, Name, OperatingPoint, Rates
from fedquilt.profiles import model as laws

Provenance = Literal["measured", "datasheet", "table", "assumed"]
FROM_SUREST: Final[tuple[Provenance, ...]] = ("measured", "datasheet", "table", "assumed")
MOST_POINTS: Final = 200  # of one profile on the wire


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where numbers come from."""

    provenance: Provenance
    text: Annotated[str, Meta(min_length=20)]  # a sentence: a name alone explains nothing


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number and the key of its source in `[sources]`."""

    value: Annotated[float, Meta(gt=0)]
    source: str


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values one clock can be set to, and the key of their source."""

    values: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1, max_length=200)]
    source: str


Sourced: TypeAlias = Figure | Steps


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every clock of the board, in hertz, rising."""

    cpu_hz: Steps | None = None
    gpu_hz: Steps | None = None
    emc_hz: Steps | None = None  # memory controller

    def lists(self) -> dict[str, tuple[float, ...]]:
        """Frequencies by axis."""
        return {axis: getattr(self, axis).values for axis in laws.AXES if getattr(self, axis) is not None}


Unit: TypeAlias = Literal["flop", "byte", "launch", "task"]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coefficients of the times in `fedquilt.profiles.model`; one left out is 0."""

    flop_s: Figure | None = None  # a: seconds per FLOP that no clock shortens
    flop_cpu_cycles: Figure | None = None  # b
    flop_gpu_cycles: Figure | None = None  # c
    flop_emc_cycles: Figure | None = None  # d
    byte_s: Figure | None = None
    byte_cpu_cycles: Figure | None = None
    byte_gpu_cycles: Figure | None = None
    byte_emc_cycles: Figure | None = None
    launch_s: Figure | None = None
    launch_cpu_cycles: Figure | None = None
    launch_gpu_cycles: Figure | None = None
    launch_emc_cycles: Figure | None = None
    task_s: Figure | None = None
    task_cpu_cycles: Figure | None = None
    task_gpu_cycles: Figure | None = None
    task_emc_cycles: Figure | None = None

    def inverse(self, unit: Unit) -> laws.Inverse:
        """The time of one FLOP, byte, launch or task."""
        cycles = {axis: self._value(f"{unit}_{axis[:-3]}_cycles") for axis in laws.AXES}
        return laws.Inverse(self._value(f"{unit}_s"), {axis: count for axis, count in cycles.items() if count})

    def rates(self, clocks: laws.Clocks, top: Mapping[str, float]) -> dict[str, float]:
        """The numbers of `fedquilt.core.Rates` that these times tell, at clocks of a board with these highest ones."""
        found = {}
        for key, unit in UNITS.items():
            each_s = self.inverse(unit).seconds(clocks, top)
            if each_s is not None:
                found[key] = _rounded(1 / each_s if key.endswith("_per_s") else each_s)
        return found

    def figures(self, *prefixes: str) -> tuple[Figure, ...]:
        """The coefficients whose names begin so; all of them without a prefix."""
        named = [key for key in self.__struct_fields__ if not prefixes or key.startswith(prefixes)]
        return tuple(figure for key in named if (figure := getattr(self, key)) is not None)

    def _value(self, key: str) -> float:
        figure: Figure | None = getattr(self, key)
        return 0.0 if figure is None else figure.value


class Model(Times, frozen=True, forbid_unknown_fields=True):
    """The coefficients of `fedquilt.profiles.model`; one left out is 0."""

    base_w: Figure | None = None
    cpu_w: Figure | None = None  # at the highest clock, as the next two
    gpu_w: Figure | None = None
    emc_w: Figure | None = None
    exponent: Figure | None = None  # k

    def draw(self) -> laws.Draw:
        """The power while busy."""
        axes_w = {axis: self._value(key) for axis, key in laws.POWERED.items()}
        known = {axis: watts for axis, watts in axes_w.items() if watts}
        return laws.Draw(self._value("base_w"), known, self._value("exponent") or laws.Draw.exponent)


UNITS: Final[Mapping[str, Unit]] = {  # a number of `fedquilt.core.Rates` -> what the time is of
    "flops_per_s": "flop",
    "bytes_per_s": "byte",
    "launch_s": "launch",
    "task_s": "task",
}
BEHIND: Final[Mapping[str, tuple[str, ...]]] = {  # a point's number -> the coefficients it comes from
    "flops_per_s": ("flop_",),
    "bytes_per_s": ("byte_",),
    "launch_s": ("launch_",),
    "task_s": ("task_",),
    "busy_w": ("base_w", "cpu_w", "gpu_w", "emc_w", "exponent"),
}


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mode of the board. The unit is in the name; bytes_per_s is memory traffic."""

    name: Label
    cores: Figure | None = None  # processor cores that are on; for people: no point tells it to a board
    cpu_hz: Figure | None = None
    gpu_hz: Figure | None = None
    emc_hz: Figure | None = None
    flops_per_s: Figure | None = None
    bytes_per_s: Figure | None = None
    launch_s: Figure | None = None
    task_s: Figure | None = None
    busy_w: Figure | None = None

    def figures(self) -> tuple[Figure, ...]:
        """Figures with their provenance, all that are given."""
        every = (getattr(self, key) for key in self.__struct_fields__ if key != "name")
        return tuple(figure for figure in every if figure is not None)


class Thermal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hottest zone as one heat capacity behind one resistance: T -> ambient + rise * P, with a time constant."""

    ambient_c: Figure
    rise_c_per_w: Figure
    time_s: Figure

    def figures(self) -> tuple[Figure, ...]:
        """Figures with their provenance."""
        return (self.ambient_c, self.rise_c_per_w, self.time_s)


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile file."""

    board: Name
    title: Label
    memory_bytes: Figure
    sources: dict[str, Source]
    points: Annotated[tuple[Point, ...], Meta(min_length=1, max_length=MOST_POINTS)]
    idle_w: Figure | None = None
    clocks: Clocks | None = None
    model: Model | None = None
    workloads: Annotated[dict[Label, Times], Meta(max_length=20)] = {}  # by `fedquilt.core.Work.workload`
    thermal: Thermal | None = None

    def figures(self) -> tuple[Sourced, ...]:
        """Every number, or list of numbers, in the file."""
        whole: list[Sourced | None] = [self.memory_bytes, self.idle_w]
        if self.clocks is not None:
            whole += [self.clocks.cpu_hz, self.clocks.gpu_hz, self.clocks.emc_hz]
        parts = [
            part for part in (self.model, *self.workloads.values(), self.thermal, *self.points) if part is not None
        ]
        return (*(f for f in whole if f is not None), *(figure for part in parts for figure in part.figures()))

    def provenance(self, *figures: Sourced | None) -> Provenance:
        """The least sure of what these numbers rest on; of all of them when none is given."""
        chosen = [figure for figure in figures or self.figures() if figure is not None]
        return max((self.sources[figure.source].provenance for figure in chosen), key=FROM_SUREST.index)

    def operating_points(self) -> tuple[OperatingPoint, ...]:
        """As they travel: the named modes, what they do not say filled in by the model, then the grid."""
        named = [
            self._filled(point.name, {key: _value(getattr(point, key)) for key in NUMBERS}) for point in self.points
        ]
        if self.clocks is None or self.model is None:
            return tuple(named)
        taken = [{axis: getattr(point, axis) for axis in laws.AXES} for point in named]
        room = MOST_POINTS - len(named)
        clocks = laws.grid(self.clocks.lists(), room)
        every: list[dict[str, float | None]] = [{axis: each.get(axis) for axis in laws.AXES} for each in clocks]
        new = [(laws.name(each), full) for each, full in zip(clocks, every, strict=True) if full not in taken]
        return (*named, *(self._filled(name, full) for name, full in new))

    def basis(self, point: str, *numbers: str, workload: str = "") -> tuple[Figure, ...]:
        """What some numbers of an operating point rest on: the figures of its mode, or the model's coefficients.

        `workload`: the one whose speed is meant, where the board has measured it.
        """
        mode = next((mode for mode in self.points if mode.name == point), None)
        found: list[Figure] = []
        for number in numbers:
            if number in UNITS and workload in self.workloads:
                found += self.workloads[workload].figures(*BEHIND[number])
                continue
            given: Figure | None = getattr(mode, number, None)
            found += [given] if given is not None else self.model.figures(*BEHIND[number]) if self.model else []
        return tuple(found)

    def _filled(self, name: str, known: Mapping[str, float | None]) -> OperatingPoint:
        numbers = {key: value for key, value in known.items() if value is not None}
        top = self.top()
        if self.model is not None:
            numbers = {**self.model.rates(known, top), **numbers}
            busy_w = self.model.draw().watts(known, top)
            if busy_w is not None:
                numbers.setdefault("busy_w", _rounded(busy_w))
        each = {workload: Rates(**times.rates(known, top)) for workload, times in self.workloads.items()}
        return OperatingPoint(name=name, **numbers, rates=each)

    def top(self) -> dict[str, float]:
        """The highest value of each clock there is a list of."""
        return {} if self.clocks is None else {axis: values[-1] for axis, values in self.clocks.lists().items()}


NUMBERS: Final = (*laws.AXES, *BEHIND)  # of an operating point


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def _rounded(value: float) -> float:
    """Four digits: a model knows no more, and 200 points fit into one message."""
    return float(f"{value:.4g}")


def names() -> list[str]:
    """The boards there are, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def load(name: str) -> Board:
    """The profile in `profiles/<name>.toml`.

    Raises:
        JobError: there is no such file, or it does not fit the schema; says where.
    """
    if name not in names():
        hint = config.nearest(name, names())
        raise JobError(f"board {name!r} is unknown; there are: {', '.join(names())}, and auto for this host{hint}")
    path = Path(__file__).parent / f"{name}.toml"
    return parse(path.read_text(encoding="utf-8"), str(path))


def find(given: str) -> Board:
    """A board's own profile by its file, or one that ships by its name.

    Raises:
        JobError: neither, a file that cannot be read, or one that does not fit the schema.
    """
    path = Path(given)
    if not path.exists() and is_name(given):
        if given in names():
            return load(given)
        hint = config.nearest(given, names())
        raise JobError(f"profile {given!r} is no file, and none that ships; there are: {', '.join(names())}{hint}")
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"profile: {path} cannot be read ({error}): `fedquilt record` writes one") from None


def is_name(given: str) -> bool:
    """Whether this can be a profile's name; else it is a path."""
    return "/" not in given and not given.endswith(".toml")


_SUM: Final = "# sha256 of the lines above: "


def signed(text: str) -> str:
    """A profile's text with a last line that tells its checksum."""
    return f"{text}{_SUM}{hashlib.sha256(text.encode()).hexdigest()}\n"


def parse(text: str, where: str) -> Board:
    """The profile in TOML text.

    Raises:
        JobError: its last line tells another checksum than it has, it does not fit the schema, a number names a source
            that is not there, two points share a name, clocks do not rise, or the model uses a clock that [clocks]
            does not list.
    """
    body, mark, told = text.rpartition(_SUM)
    if mark and told.strip() != hashlib.sha256(body.encode()).hexdigest():
        raise JobError(
            f"{where} is damaged, or was changed since `fedquilt record` wrote it: record it anew, or remove its last "
            "line if you changed it"
        )
    try:
        board = msgspec.convert(config.parse(text, where), Board)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {error}") from None
    unknown = sorted({figure.source for figure in board.figures()} - set(board.sources))
    if unknown:
        raise JobError(f"{where}: numbers name the sources {', '.join(unknown)}, which [sources] does not hold")
    called = [point.name for point in board.points]
    if len(set(called)) < len(called):
        raise JobError(f"{where}: two points share a name: {', '.join(sorted(called))}")
    lists = {} if board.clocks is None else board.clocks.lists()
    for axis, values in lists.items():
        if list(values) != sorted(set(values)):
            raise JobError(f"{where}: [clocks] {axis} must rise from the lowest value to the highest")
    for table, times in {
        "model": board.model,
        **{f"workloads.{key}": one for key, one in board.workloads.items()},
    }.items():
        if times is None:
            continue
        axes = {axis for unit in UNITS.values() for axis in times.inverse(unit).cycles}
        axes |= set(times.draw().axes_w) if isinstance(times, Model) else set()
        if missing := sorted(axes - set(lists)):
            raise JobError(f"{where}: [{table}] uses {', '.join(missing)}, of which [clocks] lists no values")
    return board
