"""Tables of runs in TOML: jobs, shown values, numbers of papers, and claims.

A file contains one table, named like the file, or several that share everything outside of `[tables.NAME]`. Each run
is the job in `[job]`, changed by one point of each of the `axes`, then by one of the `rows`, with one seed. A TOML
table with `like = NAME` starts from the entries of its sibling of that name. In paths "$mnist", "$cifar" and
"$weights/NAME" stand for files in the folder of `--data`, and "$digits" for the UCI digits of fedquilt. Tables of
papers may name functions of `fedquilt.tools.lab.papers.custom`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from fedquilt.coordinator import settings
from fedquilt.core import DataError, JobError
from fedquilt.formats import toml
from fedquilt.tools.experiments.single_run import EvaluationPoint

HERE: Final = Path(__file__).parent
DIGITS: Final = Path(__file__).resolve().parents[1] / "demo" / "digits.npz"
MARK: Final = re.compile(r"\A\$(\w+)(?:/(.+))?\Z")
TO_TARGET: Final = ("rounds_to", "seconds_to", "energy_j_to")  # values until "test" reaches the target
VALUES: Final = (*TO_TARGET, "prior_gain", *(name for name in EvaluationPoint.__struct_fields__ if name != "metric"))
NETWORK: Final = ("model", "input", "public", "labels", "donors", "schedule")  # keys of a job that make its bundle


class GridStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...


class PretrainSettings(GridStruct, frozen=True):
    """Settings of training before the first round, for the starting weights of all devices."""

    data: dict[str, Any]  # as [data] of a job, with the run's seed unless it has its own
    fit: dict[str, Any] = {}  # fields of `fedquilt.core.Fit`
    below: int = 0  # train only on classes below this number, or 0 for all
    draw: tuple[str, ...] = ()  # words that, with the seed, determine the mini-batches
    new_head: bool = False  # reinitialise the last dense layer afterwards
    by: str = ""  # function of `custom` that computes the weights, or "" for training


class AxisPoint(GridStruct, frozen=True):
    job: dict[str, Any] = {}  # merged over [job]
    data_set: str = ""  # name in `data_sets`, whose job by `fedquilt simulate` comes before [job]
    shares: dict[str, float] = {}  # parameter -> its value as a share of the job's rounds
    pretrain: PretrainSettings | None = None
    target: float | None = None  # value of "test" that ends TO_TARGET, or its share of that of `target_row`
    about: str = ""
    paper: dict[str, dict[str, tuple[float, ...]]] = {}  # row -> value -> mean and deviation, or () for never reached


class GridRow(GridStruct, frozen=True):
    job: dict[str, Any] = {}  # merged over [job] and the axes' points
    pretrain: PretrainSettings | None = None
    fixed: bool = False  # ignore `--rounds`
    more: int = 0  # rounds on top of the table's
    members: tuple[int, ...] = ()  # first device and one past the last, or () for all devices
    away: int = 0  # number of the last devices that are offline at first
    alone: int = 0  # number of devices that run the job, each alone, with mean values; or 0 for all together
    best_of: tuple[str, ...] = ()  # instead of runs: for each seed, the row of these with the least `best_by`
    best_by: str = ""  # a name for `cells.read_value`
    play: str = ""  # function of `custom` that runs the row, or "" for a normal run
    paper: dict[str, tuple[float, ...]] = {}  # value -> mean and deviation


class GridColumn(GridStruct, frozen=True):
    value: str  # a name for `cells.read_value`
    title: str
    scale: float = 1.0
    digits: int = 1
    each: bool = False  # show the value of every seed instead of mean and deviation


class ClaimSpec(GridStruct, frozen=True):
    name: str  # {column} and {row} are replaced by their names
    value: str  # a name for `cells.read_value`
    row: str = ""  # row of the claim, or "" for all rows except the baseline
    over: str = ""  # row whose value is subtracted
    of: str = ""  # row whose value is 100 %
    columns: tuple[str, ...] = ()  # columns of the claim, or () for all
    worst: bool = False  # one claim for all columns together, on the largest value of each seed
    scale: float = 1.0
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    told: bool = False  # print the comparison without claiming anything

    def list_rows(self, rows: Iterable[str]) -> list[str]:
        """Return the rows of the claim, then its baseline if it has one."""
        baseline = self.over or self.of
        return [
            *([self.row] if self.row else [row for row in rows if row != baseline]),
            *([baseline] if baseline else []),
        ]


class Grid(GridStruct, frozen=True):
    about: str  # description, with differences from the paper; the first line is the title in the list
    job: dict[str, Any] = {}
    rows: dict[str, GridRow] = {}
    axes: dict[str, dict[str, AxisPoint]] = {}
    seeds: tuple[int, ...] = (0, 1, 2)
    show: tuple[GridColumn, ...] = (GridColumn("test", "accuracy %", 100.0), GridColumn("up_bytes", "MB up", 1e-6))
    claims: tuple[ClaimSpec, ...] = ()
    pretrain: PretrainSettings | None = None
    together: bool = True  # train the devices of a small network in one graph
    may_fail: bool = False  # a failed run, as of a model that diverges, leaves its cell without that seed's value
    first: bool = False  # evaluate on the test set also before the first round, as the value "test@0"
    target_row: str = ""  # row whose last "test" is multiplied by the targets, or "" for absolute targets
    flops: float = 0.0  # FLOPs of one example for times and joules, or 0 for those of the network
    device: str = ""  # prefix of the devices' names, which seed their random draws, or "" for the names of boards
    observe: str = ""  # function of `custom` that returns further values of a run, or "" for none
    page: str = ""  # page of docs/ with the figures

    @property
    def columns(self) -> dict[str, tuple[AxisPoint, ...]]:
        """Points of each axis by column name. Without axes there is one column ""."""
        combinations = itertools.product(*(axis.items() for axis in self.axes.values()))
        return {
            ", ".join(name for name, _ in combination): tuple(point for _, point in combination)
            for combination in combinations
        }

    @property
    def points(self) -> list[AxisPoint]:
        return [point for axis in self.axes.values() for point in axis.values()]

    @property
    def function_names(self) -> list[str]:
        pretrainings = [
            self.pretrain,
            *(row.pretrain for row in self.rows.values()),
            *(each.pretrain for each in self.points),
        ]
        names = [self.observe, *(row.play for row in self.rows.values()), *(each.by for each in pretrainings if each)]
        return [name for name in names if name]

    @property
    def methods(self) -> set[str]:
        jobs = [self.make_job(points, row, 0, None) for points in self.columns.values() for row in self.rows.values()]
        return {job["method"] for job in jobs}

    @property
    def needs_test_set(self) -> bool:
        return any(value.partition("@")[0] in ("test", *TO_TARGET) for value in self.value_names)

    @property
    def value_names(self) -> list[str]:
        values = [*(show.value for show in self.show), *(claim.value for claim in self.claims)]
        return list(dict.fromkeys([*values, *(row.best_by for row in self.rows.values() if row.best_of)]))

    def select_rows(self, rows: Sequence[str]) -> Grid:
        """Return the grid with these rows and the claims on them. Raise JobError if a row is unknown."""
        _require_known("row", rows, self.rows)
        rows = [*rows, *(name for row in rows for name in self.rows[row].best_of)]
        claims = tuple(claim for claim in self.claims if {claim.row, claim.over, claim.of} <= {"", *rows})
        selected = {name: row for name, row in self.rows.items() if name in rows}
        return msgspec.structs.replace(self, rows=selected, claims=claims)

    def make_job(
        self,
        points: Iterable[AxisPoint],
        row: GridRow,
        seed: int,
        rounds: int | None,
        data_set_job: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the job of a cell as a table, with `rounds` instead of its own unless the row is `fixed`.

        [job] is merged over `data_set_job`, the job of the points' data set.
        """
        table = merge_tables(data_set_job, self.job)
        for point in points:
            table = merge_tables(table, point.job)
            total_rounds = rounds or _get_rounds(table)
            table = merge_tables(
                table, {"params": {key: round(share * total_rounds) for key, share in point.shares.items()}}
            )
        table = merge_tables(table, row.job)
        count = _get_rounds(table) if rounds is None or row.fixed else rounds
        return merge_tables(table, {"rounds": count + row.more, "seed": seed, "data": {"seed": seed}})


@dataclass(frozen=True)
class GridTable:
    name: str
    file: Path
    raw: Mapping[str, Any]

    @property
    def grid(self) -> Grid:
        """Parsed table with unresolved marks such as "$mnist". Raises JobError if the table is invalid."""
        return self._parse_grid(self.raw)

    def fill_marks(self, data: Path | None) -> Grid:
        """Return the parsed table with the marks in its paths replaced. `data` is the folder of `--data`.

        Rows and points of axes whose files are missing keep their marks (`find_missing_data`). Raise JobError if the
        table is invalid, and DataError if files of the whole table are missing.
        """
        parts = {"rows": self._resolve_each(self.raw.get("rows", {}), data)[0]}
        parts["axes"] = {name: self._resolve_each(axis, data)[0] for name, axis in self.raw.get("axes", {}).items()}
        common = {key: value for key, value in self.raw.items() if key not in parts}
        return self._parse_grid({**self._resolve(common, data), **parts})

    def find_missing_data(self, data: Path | None) -> dict[str, str]:
        """Return the rows and columns whose files are missing, each with the reason."""
        missing = self._resolve_each(self.raw.get("rows", {}), data)[1]
        axes = self.raw.get("axes", {})
        reasons = {name: self._resolve_each(axis, data)[1] for name, axis in axes.items()}
        for points in itertools.product(*axes.values()):
            point_reasons = [
                reasons[name][point] for name, point in zip(axes, points, strict=True) if point in reasons[name]
            ]
            missing |= {", ".join(points): reason for reason in point_reasons}
        return missing

    def _resolve_each(self, entries: Mapping[str, Any], data: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
        # the entries, resolved unless files are missing, and the reasons by name
        resolved, reasons = dict(entries), {}
        for name, entry in entries.items():
            try:
                resolved[name] = self._resolve(entry, data)
            except DataError as error:
                reasons[name] = str(error)
        return resolved, reasons

    def _resolve(self, value: Any, data: Path | None) -> Any:
        with toml.prefix_errors(str(self.file)):
            return _resolve_paths_and_marks(
                value, lambda mark, name: resolve_mark(self.name, mark, name, data), self.file.parent
            )

    @property
    def takes_data(self) -> bool:
        return any(mark != "digits" for mark in _iterate_mark_names(self.raw))

    def _parse_grid(self, raw: Any) -> Grid:
        with toml.prefix_errors(f"{self.file}, table {self.name}"):
            grid = toml.convert_table(raw, Grid, "the table")
            if self.file.parent != HERE:  # functions of a paper's table may define other values
                _require_known("value", {value.partition("@")[0] for value in grid.value_names}, VALUES)
                for function in grid.function_names:
                    raise JobError(f"function {function!r}: only the papers' tables can name functions: leave it out")
            for value in grid.value_names:
                if "@" in value and not value.partition("@")[2].isdigit():
                    raise JobError(f"value {value!r}: write a number of rounds after @")
            for name, row in grid.rows.items():
                for key, count in (("alone", row.alone), ("away", row.away)):
                    if count < 0:
                        raise JobError(f"rows.{name}.{key} = {count}: write a number of devices, at least 0")
                if row.members and not (len(row.members) == 2 and 0 <= row.members[0] < row.members[1]):
                    raise JobError(
                        f"rows.{name}.members = {list(row.members)} is invalid: write the first device and one past "
                        "the last, such as [0, 5]"
                    )
            for name, points in grid.columns.items():
                values_to_target = [value for value in grid.value_names if value in TO_TARGET]
                if values_to_target and all(point.target is None for point in points):
                    column = f"column {name!r}" if name else "a table without axes"
                    fix = "write target = 0.9 in [axes.AXIS.POINT]"
                    raise JobError(f"value {values_to_target[0]!r}: {column} has no target: {fix}")
            _require_known("target_row", filter(None, [grid.target_row]), grid.rows)
            for name, row in grid.rows.items():
                _require_known(f"rows.{name}.best_of", row.best_of, grid.rows)
            for claim in grid.claims:
                _require_known(f"row of the claim {claim.name!r}", claim.list_rows(grid.rows), grid.rows)
                _require_known(f"column of the claim {claim.name!r}", claim.columns, grid.columns)
                if not claim.told and (claim.at_least is None) == (claim.at_most is None):
                    raise JobError(f"claim {claim.name!r} must have one of at_least and at_most: add or remove one")
            for name, points in grid.columns.items():
                for point in points:
                    _require_known(f"row of the paper's numbers in {name!r}", point.paper, grid.rows)
            return grid


def _get_rounds(job: Mapping[str, Any]) -> int:
    count = job.get("rounds", 1)
    if not isinstance(count, int):
        raise JobError(f"job.rounds = {count!r}: write a whole number")
    return count


def match_names(kind: str, words: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that the words of a command line form. A name with commas is several words.

    Raise JobError if a word belongs to no name.
    """
    known_names, matched_names, first = set(names), list[str](), 0
    while first < len(words):
        lasts = range(len(words), first, -1)
        candidates = {last: ", ".join(word.strip() for word in words[first:last]) for last in lasts}
        last = next((last for last, candidate in candidates.items() if candidate in known_names), first + 1)
        _require_known(kind, [candidates[last]], names)
        matched_names.append(candidates[last])
        first = last
    return matched_names


def _require_known(kind: str, names: Iterable[str], choices: Iterable[str]) -> None:
    for name in sorted(set(names) - set(choices)):
        raise JobError(f"{kind}: {name!r} is unknown{toml.describe_choices(name, choices)}")


def read_tables(file: Path) -> dict[str, GridTable]:
    """Return the tables of a file by name. Raise JobError if it cannot be read or `like` names no table."""
    with toml.prefix_errors(str(file)):
        common = _resolve_likes(toml.read_toml(file))
    several = common.pop("tables", None)
    if several is None:
        return {file.stem: GridTable(file.stem, file, common)}
    return {name: GridTable(name, file, merge_tables(common, own)) for name, own in several.items()}


def merge_tables(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        base_value = merged.get(key)
        merged[key] = (
            merge_tables(base_value, value) if isinstance(base_value, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _resolve_likes(table: Mapping[str, Any]) -> dict[str, Any]:
    resolved = {key: _resolve_likes(value) if isinstance(value, Mapping) else value for key, value in table.items()}

    def resolve(key: str, ancestors: tuple[str, ...] = ()) -> Any:
        value = resolved[key]
        if not isinstance(value, Mapping) or not isinstance(sibling := value.get("like"), str):
            return value
        if sibling not in resolved or sibling in ancestors:
            raise JobError(f"{key}: like = {sibling!r} names no table of the same level, or forms a loop")
        return merge_tables(
            resolve(sibling, (*ancestors, key)), {name: entry for name, entry in value.items() if name != "like"}
        )

    return {key: resolve(key) for key in resolved}


def resolve_mark(table: str, mark: str, name: str, data: Path | None) -> dict[str, str]:
    """Return the keys that replace a mark in a path: "path", and further keys of the same table.

    Raise JobError if the mark is unknown, and DataError if files are missing.
    """
    if mark == "digits":
        return {"path": str(DIGITS)}
    descriptions = {"mnist": "MNIST's files", "cifar": "CIFAR-10", "weights": "torchvision's weights in weights/"}
    if mark not in descriptions:
        raise JobError(
            f"{table}: unknown ${mark}: choose one of $digits, {', '.join(f'${each}' for each in descriptions)}"
        )
    if data is None:
        raise DataError(f"table {table} needs data: add --data with a folder that contains {descriptions[mark]}")
    if mark == "mnist":
        nested = data / "MNIST" / "raw"  # as torchvision has it
        folder = nested if nested.is_dir() else data
        if not any(folder.glob("*images?idx3-ubyte*")):
            raise DataError(
                f"no MNIST in {folder}: put train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, also as "
                ".gz, there or in MNIST/raw below"
            )
        return {"path": str(folder)}
    if mark == "cifar":
        files = sorted(data.glob("cifar10*.npz"))
        if not files and not (data / "cifar-10-batches-py").is_dir():
            raise DataError(f"no CIFAR-10 in {data}: put cifar10.npz or torchvision's cifar-10-batches-py there")
        return {"path": str(files[0])} if files else {"path": str(data), "dataset": "CIFAR10"}
    files = sorted((data / "weights").glob(f"{name}*.pt*"))
    if not files:
        raise DataError(f"no {name}*.pt in {data / 'weights'}: put torchvision's weights there")
    return {"path": str(files[0])}


def _resolve_paths_and_marks(value: Any, resolve: Any, folder: Path) -> Any:
    # other relative paths are resolved against the folder
    if isinstance(value, list):
        return [_resolve_paths_and_marks(entry, resolve, folder) for entry in value]
    if not isinstance(value, Mapping):
        return value
    resolved: dict[str, Any] = {}
    for key, entry in value.items():
        match = MARK.match(entry) if isinstance(entry, str) else None
        if match is None:
            resolved[key] = _resolve_paths_and_marks(entry, resolve, folder)
            continue
        replacement = resolve(match[1], match[2] or "")
        resolved |= replacement if key == "path" else {key: replacement["path"]}
    return settings.make_paths_absolute(resolved, folder)


def _iterate_mark_names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_mark_names(each)
    elif isinstance(value, str) and (match := MARK.match(value)):
        yield match[1]
