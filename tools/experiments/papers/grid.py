"""Tables of runs in TOML: the jobs, the values shown, a paper's numbers and the claims.

A file holds one table, named like the file, or several, which share everything outside of `[tables.NAME]`. Each run is
the job in `[job]`, changed by one point of each of the `axes`, then by one of the `rows`, with one seed. A TOML table
with `like = NAME` starts from the entries of its sibling of that name. In paths "$mnist", "$cifar" and "$weights/NAME"
stand for files in the folder of `--data`, and "$digits" for the UCI digits that come with fedquilt. The papers' tables
may have code in a Python file of the same name (`cells.play`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import config
from fedquilt.coordinator import settings
from fedquilt.core import DataError, JobError
from fedquilt.tools.experiments.single_run import Mark

HERE: Final = Path(__file__).parent
DIGITS: Final = Path(__file__).resolve().parents[2] / "demo" / "digits.npz"
MARKED: Final = re.compile(r"\A\$(\w+)(?:/(.+))?\Z")
VALUES: Final = ("rounds_to", *Mark.__struct_fields__)  # values that any run has; see `cells.value_of`
NETWORK: Final = ("model", "input", "labels", "donors", "schedule", "int8")  # keys of a job that make its bundle


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a grid, strictly checked."""


class Pretrain(Struct, frozen=True):
    """Training of the network before any round, for the weights with which all devices start."""

    data: dict[str, Any]  # as [data] of a job, with the run's seed unless it has its own
    fit: dict[str, Any] = {}  # fields of `fedquilt.core.Fit`
    below: int = 0  # train on classes below this number only; 0: on all
    draw: tuple[str, ...] = ()  # words that, with the seed, determine the mini-batches
    new_head: bool = False  # reinitialise the last dense layer afterwards
    by: str = ""  # function of the table's own code that computes the weights; "": training


class Point(Struct, frozen=True):
    """Changes made by one point of an axis."""

    job: dict[str, Any] = {}  # merged over [job]
    shares: dict[str, float] = {}  # parameter -> its value as a share of the job's rounds
    pretrain: Pretrain | None = None
    target: float | None = None  # metric that ends the value "rounds_to"
    about: str = ""
    paper: dict[str, dict[str, tuple[float, ...]]] = {}  # row -> value -> mean and deviation; (): never


class Row(Struct, frozen=True):
    """One row of the table: the changes to its jobs."""

    job: dict[str, Any] = {}  # merged over [job] and the axes' points
    pretrain: Pretrain | None = None
    fixed: bool = False  # keep its number of rounds whatever `--rounds` says
    more: int = 0  # rounds on top of the table's
    members: tuple[int, ...] = ()  # first and one past the last of the devices that take part; (): all
    away: int = 0  # number of these, the last ones, that are offline at first
    play: str = ""  # function of the table's own code that plays it; "": as any job is played
    paper: dict[str, tuple[float, ...]] = {}  # value -> mean and deviation


class Show(Struct, frozen=True):
    """One column of the text."""

    value: str  # a name for `cells.value_of`
    title: str
    scale: float = 1.0
    digits: int = 1
    each: bool = False  # show the value of every seed instead of mean and deviation


class Claim(Struct, frozen=True):
    """A statement about each column, judged by its confidence interval over the seeds."""

    name: str  # {column} and {row} are replaced by their names
    value: str  # a name for `cells.value_of`
    row: str = ""  # row that it is about; "": every row but the one it is compared with
    over: str = ""  # row whose value is subtracted
    of: str = ""  # row whose value is 100 %
    columns: tuple[str, ...] = ()  # columns that it is about; (): all
    worst: bool = False  # one claim for all columns together, about the largest value of each seed
    scale: float = 1.0
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    told: bool = False  # print the comparison without claiming anything

    def rows(self, every: Iterable[str]) -> list[str]:
        """The rows that the claim is about, then the row that they are compared with, if any."""
        other = self.over or self.of
        return [*([self.row] if self.row else [row for row in every if row != other]), *([other] if other else [])]


class Grid(Struct, frozen=True):
    """One table."""

    about: str  # description, with differences from the paper; the first line is the title in the list
    job: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    axes: dict[str, dict[str, Point]] = {}
    seeds: tuple[int, ...] = (0, 1, 2)
    show: tuple[Show, ...] = (Show("test", "accuracy %", 100.0), Show("up_bytes", "MB up", 1e-6))
    claims: tuple[Claim, ...] = ()
    pretrain: Pretrain | None = None
    together: bool = True  # train the devices of a small network in one graph
    may_fail: bool = False  # a run that fails, as one whose model diverges, leaves its cell without that seed's value
    first: bool = False  # evaluate on the test set before the first round too, as the value "test@0"
    device: str = ""  # prefix of the devices' names, on which their random draws depend; "": names of their boards
    covers: tuple[str, ...] = ()  # methods whose pages name the table; (): those of its jobs
    run: str = ""  # function of its own code that returns its result; "": its cells are run
    page: str = ""  # page of docs/ with the figures

    @property
    def columns(self) -> dict[str, tuple[Point, ...]]:
        """Name of each column -> a point of each axis, in order; a table without axes has one column ""."""
        found = itertools.product(*(axis.items() for axis in self.axes.values()))
        return {", ".join(name for name, _ in each): tuple(point for _, point in each) for each in found}

    @property
    def points(self) -> list[Point]:
        """Points of all axes."""
        return [point for axis in self.axes.values() for point in axis.values()]

    @property
    def tested(self) -> bool:
        """Whether a value needs evaluations on the test set."""
        return any(value.partition("@")[0] in ("test", "rounds_to") for value in self.values)

    @property
    def values(self) -> list[str]:
        """Names of the values that are shown or claimed, each once."""
        return list(dict.fromkeys([*(show.value for show in self.show), *(claim.value for claim in self.claims)]))

    def only(self, rows: Sequence[str]) -> Grid:
        """Keep these rows alone, and the claims that compare no others.

        Raises:
            JobError: there is no such row.
        """
        _require("row", rows, self.rows)
        claims = tuple(claim for claim in self.claims if {claim.row, claim.over, claim.of} <= {"", *rows})
        kept = {name: row for name, row in self.rows.items() if name in rows}
        return msgspec.structs.replace(self, rows=kept, claims=claims)

    def job_of(self, points: Iterable[Point], row: Row, seed: int, rounds: int | None) -> dict[str, Any]:
        """The job of one run, as a table.

        Args:
            points: one of each axis, applied in this order.
            row: applied after the points.
            seed: of the job and its data.
            rounds: in place of the grid's, unless the row's are `fixed`; None: the grid's own.
        """
        found = self.job
        for point in points:
            found = merged(found, point.job)
            least = rounds or found.get("rounds", 1)
            found = merged(found, {"params": {key: round(share * least) for key, share in point.shares.items()}})
        found = merged(found, row.job)
        count = found.get("rounds", 1) if rounds is None or row.fixed else rounds
        return merged(found, {"rounds": count + row.more, "seed": seed, "data": {"seed": seed}})


@dataclass(frozen=True)
class Table:
    """A table as its file has it."""

    name: str
    file: Path
    raw: Mapping[str, Any]

    @property
    def grid(self) -> Grid:
        """The checked table, with marks left in its paths.

        Raises:
            JobError: a key is wrong; names file, key and mend.
        """
        return self._read(self.raw)

    def filled(self, data: Path | None) -> Grid:
        """The checked table, with the marks in its paths replaced.

        Args:
            data: the folder of `--data`; None: not given.

        Raises:
            JobError: a key is wrong, or a mark is unknown.
            DataError: a mark's files are not in the folder, or no folder is given.
        """
        with config.naming(str(self.file)):
            return self._read(
                _filled(self.raw, lambda mark, rest: place(self.name, mark, rest, data), self.file.parent)
            )

    @property
    def code(self) -> str:
        """Name of the module with the code of one of the papers' tables; "": none."""
        own = self.file.parent == HERE and self.file.with_suffix(".py").exists()
        return self.file.stem if own else ""

    @property
    def takes_data(self) -> bool:
        """Whether a path of the table has a mark that `--data` has to fill."""
        return any(mark != "digits" for mark in _marks(self.raw))

    def _read(self, raw: Any) -> Grid:
        with config.naming(f"{self.file}, table {self.name}"):
            found = config.convert(raw, Grid, "the table")
            if not self.code:  # a table's code may define other values
                _require("value", {value.partition("@")[0] for value in found.values}, VALUES)
                befores = [found.pretrain, *(row.pretrain for row in found.rows.values())]
                befores += [point.pretrain for point in found.points]
                named = [found.run, *(row.play for row in found.rows.values()), *(each.by for each in befores if each)]
                for function in filter(None, named):
                    raise JobError(
                        f"{function!r} names a function, and only the papers' tables have code: leave it out"
                    )
            for value in found.values:
                if "@" in value and not value.partition("@")[2].isdigit():
                    raise JobError(f"value {value!r}: a number of rounds is wanted after @")
            for claim in found.claims:
                _require(f"row of the claim {claim.name!r}", claim.rows(found.rows), found.rows)
                _require(f"column of the claim {claim.name!r}", claim.columns, found.columns)
                if not claim.told and (claim.at_least is None) == (claim.at_most is None):
                    raise JobError(f"the claim {claim.name!r} wants one of at_least and at_most")
            for name, points in found.columns.items():
                for point in points:
                    _require(f"row of the paper's numbers in {name!r}", point.paper, found.rows)
            return found


def _require(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    for word in sorted(set(wanted) - set(known)):
        raise JobError(f"{what}: there is no {word!r}; there are: {', '.join(known)}{config.nearest(word, known)}")


def tables(file: Path) -> dict[str, Table]:
    """Read the tables in a file, by name.

    Raises:
        JobError: the file cannot be read, is not TOML, or has a `like` without its table.
    """
    with config.naming(str(file)):
        common = _alike(config.read(file))
    several = common.pop("tables", None)
    if several is None:
        return {file.stem: Table(file.stem, file, common)}
    return {name: Table(name, file, merged(common, own)) for name, own in several.items()}


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables; `over` wins where both have a key, and tables in both are merged in turn."""
    found = dict(under)
    for key, value in over.items():
        known = found.get(key)
        found[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return found


def _alike(table: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve `like = NAME`: each such entry is merged over its sibling of that name."""
    found = {key: _alike(value) if isinstance(value, Mapping) else value for key, value in table.items()}

    def whole(key: str, seen: tuple[str, ...] = ()) -> Any:
        value = found[key]
        if not isinstance(value, Mapping) or not isinstance(other := value.get("like"), str):
            return value
        if other not in found or other in seen:
            raise JobError(f"{key}: like = {other!r}: there is no such table beside it to begin with")
        return merged(whole(other, (*seen, key)), {name: each for name, each in value.items() if name != "like"})

    return {key: whole(key) for key in found}


# -- the folder of data ---------------------------------------------------------------------------


def place(table: str, mark: str, rest: str, data: Path | None) -> dict[str, str]:
    """Keys that replace a mark in a path: "path", and other keys of the table with that path.

    Args:
        table: name of the table, for the error.
        mark: without "$".
        rest: part of the path after the mark.
        data: the folder of `--data`; None: not given.

    Raises:
        JobError: the mark is unknown.
        DataError: the mark's files are not in the folder, or no folder is given.
    """
    if mark == "digits":
        return {"path": str(DIGITS)}
    wanted = {"mnist": "MNIST's files", "cifar": "CIFAR-10", "weights": "torchvision's weights in weights/"}
    if mark not in wanted:
        raise JobError(f"{table}: ${mark} is unknown; there are: $digits, {', '.join(f'${each}' for each in wanted)}")
    if data is None:
        raise DataError(f"{table} needs --data: a folder with {wanted[mark]}")
    return mnist(data) if mark == "mnist" else cifar(data) if mark == "cifar" else weights(data, rest)


def mnist(data: Path) -> dict[str, str]:
    """MNIST as keys of a [data] table: the folder `data`, or torchvision's folder below it."""
    nested = data / "MNIST" / "raw"
    found = nested if nested.is_dir() else data
    if not any(found.glob("*images?idx3-ubyte*")):
        raise DataError(
            f"there is no MNIST in {found}: train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, "
            "or the same with .gz, are wanted there or in MNIST/raw below it"
        )
    return {"path": str(found)}


def cifar(data: Path) -> dict[str, str]:
    """CIFAR-10 as keys of a [data] table: a file cifar10*.npz, or torchvision's folder."""
    files = sorted(data.glob("cifar10*.npz"))
    if not files and not (data / "cifar-10-batches-py").is_dir():
        raise DataError(f"there is no CIFAR-10 in {data}: cifar10.npz, or torchvision's folder cifar-10-batches-py")
    return {"path": str(files[0])} if files else {"path": str(data), "dataset": "CIFAR10"}


def weights(data: Path, architecture: str) -> dict[str, str]:
    """The file with the ImageNet weights of one of torchvision's networks, under "path"."""
    files = sorted((data / "weights").glob(f"{architecture}*.pt*"))
    if not files:
        raise DataError(f"no {architecture}*.pt in {data / 'weights'}: put torchvision's weights there")
    return {"path": str(files[0])}


def _filled(value: Any, known: Any, folder: Path) -> Any:
    """Replace a table's marks, and resolve its other relative paths against the folder."""
    if isinstance(value, list):
        return [_filled(each, known, folder) for each in value]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for key, each in value.items():
        match = MARKED.match(each) if isinstance(each, str) else None
        if match is None:
            found[key] = _filled(each, known, folder)
            continue
        told = known(match[1], match[2] or "")
        found |= told if key == "path" else {key: told["path"]}
    return settings.anchored(found, folder)


def _marks(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _marks(each)
    elif isinstance(value, str) and (match := MARKED.match(value)):
        yield match[1]
