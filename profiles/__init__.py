"""Board profiles: data, not code. One TOML file per board; every number names its source.

    board = "jetson-tx2"
    title = "..."
    memory_bytes = { value = 8235515904, source = "tegrastats" }

    [sources.tegrastats]
    provenance = "table"
    text = "what the number is and where it comes from"

    [[points]]                       # operating points; a board is held at the first unless told otherwise
    name = "MAXN"
    gpu_hz = { value = 1300500000, source = "modes" }

What nobody knows is left out. What nobody measured is "assumed", and its source says from what it is
derived. A running agent replaces these numbers by what its own board says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fedquilt import tables
from fedquilt.core import JobError, Label, Name, OperatingPoint

Provenance = Literal["measured", "datasheet", "table", "assumed"]
FROM_SUREST: Final[tuple[Provenance, ...]] = ("measured", "datasheet", "table", "assumed")


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where numbers come from."""

    provenance: Provenance
    text: Annotated[str, Meta(min_length=20)]  # a sentence: a name alone explains nothing


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number and the key of its source in `[sources]`."""

    value: Annotated[float, Meta(gt=0)]
    source: str


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setting of the clocks. The unit is in the name; bytes_per_s is memory traffic."""

    name: Label
    cpu_hz: Figure | None = None
    gpu_hz: Figure | None = None
    emc_hz: Figure | None = None  # memory controller
    flops_per_s: Figure | None = None
    bytes_per_s: Figure | None = None
    busy_w: Figure | None = None

    def figures(self) -> tuple[Figure, ...]:
        every = (self.cpu_hz, self.gpu_hz, self.emc_hz, self.flops_per_s, self.bytes_per_s, self.busy_w)
        return tuple(figure for figure in every if figure is not None)

    def operating_point(self) -> OperatingPoint:
        """As it travels: the numbers alone."""
        names = ("cpu_hz", "gpu_hz", "emc_hz", "flops_per_s", "bytes_per_s", "busy_w")
        known = {name: getattr(self, name).value for name in names if getattr(self, name) is not None}
        return OperatingPoint(name=self.name, **known)


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile file."""

    board: Name
    title: Label
    memory_bytes: Figure
    sources: dict[str, Source]
    points: Annotated[tuple[Point, ...], Meta(min_length=1)]
    idle_w: Figure | None = None

    def figures(self) -> tuple[Figure, ...]:
        """Every number in the file."""
        whole = (self.memory_bytes, self.idle_w)
        return (*(f for f in whole if f is not None), *(f for point in self.points for f in point.figures()))

    def provenance(self, *figures: Figure | None) -> Provenance:
        """The least sure of what these numbers rest on; of all of them when none is given."""
        chosen = [figure for figure in figures or self.figures() if figure is not None]
        return max((self.sources[figure.source].provenance for figure in chosen), key=FROM_SUREST.index)


def names() -> list[str]:
    """The boards there are, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def load(name: str) -> Board:
    """The profile in `profiles/<name>.toml`.

    Raises:
        JobError: there is no such file, or it does not fit the schema; says where.
    """
    if name not in names():
        raise JobError(f"board {name!r} is unknown; there are: {', '.join(names())}, and auto for this host")
    path = Path(__file__).parent / f"{name}.toml"
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, where: str) -> Board:
    """The profile in TOML text.

    Raises:
        JobError: it does not fit the schema, or a number names a source that is not there.
    """
    try:
        board = msgspec.convert(tables.parse(text, where), Board)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {error}") from None
    unknown = sorted({figure.source for figure in board.figures()} - set(board.sources))
    if unknown:
        raise JobError(f"{where}: numbers name the sources {', '.join(unknown)}, which [sources] does not hold")
    return board
