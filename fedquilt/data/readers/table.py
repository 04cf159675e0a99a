"""Tables: CSV by the standard library, Parquet by pyarrow. One row is one example, or one step of a window.

A table is read once, in chunks, and kept as float32 numbers: errors in it are found when it is opened, with
file, line and column.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedquilt import config
from fedquilt.core import DataError
from fedquilt.core.errors import first_line
from fedquilt.data.readers import columns
from fedquilt.data.readers.base import Reader
from fedquilt.data.readers.columns import Chunk
from fedquilt.data.spec import DataSpec, Windows

AT_ONCE = 4096  # rows of a chunk
SUFFIXES = (".csv", ".tsv", ".parquet")


class Inputs(NamedTuple):
    """Columns of a table by their role."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    owner: str


def open_(path: Path, spec: DataSpec, *, labelled: bool = True) -> Reader:
    """Open the rows of a table, or windows of them, with their labels: zeros for an unlabelled table.

    Raises:
        DataError: a column does not exist, a value cannot be read, or there is no row; names file, line and mend.
    """
    file = file_of(path, spec)
    found = read_rows(
        file, spec, lambda chunk, decoder, names: decoder.features(chunk, names), "an example", labelled=labelled
    )
    values = np.concatenate(found.x)
    rows = Reader(
        found.y, values.__getitem__, values.shape[1:], values.dtype, owner=found.owner, features=found.features
    )
    return rows if spec.windows is None else _windows(file, spec, spec.windows, rows)


class Gathered(NamedTuple):
    """All rows of a table."""

    x: list[Any]  # of each chunk: the result of `inputs`
    y: np.ndarray  # labels, as in `Reader`
    owner: np.ndarray | None  # (n,) of words: user of each row; None: not needed
    features: tuple[str, ...]  # names of the inputs


def read_rows(
    file: Path,
    spec: DataSpec,
    inputs: Callable[[Chunk, columns.Decoder, tuple[str, ...]], Any],
    each: str,
    alone: str = "",
    *,
    labelled: bool = True,
) -> Gathered:
    """Read a table in chunks: labels and owners from their columns, inputs by the function `inputs`.

    Args:
        file: the table.
        spec: names the columns and the task.
        inputs: (chunk, decoder, names of the input columns) -> the inputs of the chunk's rows.
        each: content of a row, for the error on a table without rows.
        alone: if one column holds the inputs: what several columns could all be, for the error; "": any number is fine.
        labelled: whether the table has the columns of labels. Labels of an unlabelled table are zeros.

    Raises:
        DataError: a column does not exist, a value cannot be read, or there is no row; names file, line and mend.
    """
    chunks = read(file)
    first = next(chunks)
    parts = column_roles(file, tuple(first.columns), spec, labelled=labelled)
    if alone and len(parts.x) != 1:
        raise DataError(f"{file}: columns {', '.join(parts.x)} could all {alone}, as [data] x = {parts.x[0]!r}")
    decoder = columns.Decoder(file, spec, parts.y)
    x, y, owner = [], [], []
    for chunk in chain((first,), chunks):
        x.append(inputs(chunk, decoder, parts.x))
        y.append(decoder.targets(chunk) if labelled else np.zeros(len(chunk), np.int64))
        if parts.owner:
            owner.append(np.array([str(value) for value in chunk.columns[parts.owner]]))
    labels = np.concatenate(y)
    if not len(labels):
        raise DataError(f"{file} has a head and no rows: {each} in each row is wanted")
    return Gathered(x, labels, np.concatenate(owner) if owner else None, decoder.names(parts.x))


def words(path: Path, spec: DataSpec, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The different words of some columns, sorted; missing values are none.

    Raises:
        DataError: a column that there is not, or a table that cannot be read.
    """
    file = file_of(path, spec)
    found: dict[str, set[str]] = {name: set() for name in names}
    for chunk in read(file):
        require_columns(file, tuple(chunk.columns), "categories", names)
        for name, seen in found.items():
            seen.update(str(value) for value in chunk.columns[name] if not columns.missing(value))
    return {name: tuple(sorted(seen)) for name, seen in found.items()}


# -- which file, which columns --------------------------------------------------------------------


def split_files(folder: Path, split: str) -> list[Path]:
    """Tables named like the split in a folder: train.csv, test.parquet."""
    return [file for suffix in SUFFIXES if (file := folder / f"{split}{suffix}").is_file()]


def file_of(path: Path, spec: DataSpec) -> Path:
    """Table of the split: the file itself for the training split, or the file named like it in the folder.

    Raises:
        DataError: there is none.
    """
    if path.is_dir():
        found = split_files(path, spec.split)
        if len(found) != 1:
            raise DataError(
                f"{path} has {len(found) or 'no'} tables of split {spec.split!r}: name one {spec.split}.csv"
            )
        return found[0]
    if spec.split != "train":
        raise DataError(
            f"{path} is one table, of the training split: put {spec.split}.csv beside a train.csv and set path to "
            "their folder, or give [test] a path of its own"
        )
    return path


def columns_of(file: Path) -> tuple[str, ...]:
    """Return the names of a table's columns.

    Raises:
        DataError: If the file is no table.
    """
    return tuple(next(read(file)).columns)


def column_roles(file: Path, there: Sequence[str], spec: DataSpec, *, labelled: bool = True) -> Inputs:
    """Return the input, label and owner columns. By default "y" is the label and all others are inputs.

    Raises:
        DataError: a column does not exist; lists those that do.
    """
    y = label_columns(spec)
    owner = spec.column
    given = (spec.x,) if isinstance(spec.x, str) else spec.x
    x = tuple(name for name in given if name) or tuple(name for name in there if name not in (*y, owner))
    for key, names in (
        ("y", y if labelled else ()),
        ("x", x),
        ("column", (owner,) if owner else ()),
        ("categories", spec.categories),
    ):
        require_columns(file, there, key, names)
    if not x:
        raise DataError(f"{file} has no column beside {', '.join(y)}: inputs are wanted too")
    if both := [name for name in x if name in y]:
        raise DataError(f"{file}: column {both[0]!r} is input and label at once: name it in [data] x or y, not in both")
    return Inputs(x, y, owner)


def label_columns(spec: DataSpec) -> tuple[str, ...]:
    """Return the names of the columns of labels."""
    given = (spec.y,) if isinstance(spec.y, str) else spec.y
    return tuple(name for name in given if name) or ("y",)


def require_columns(file: Path, there: Sequence[str], key: str, names: Iterable[str]) -> None:
    """Check that a table has the columns that a key of [data] names.

    Raises:
        DataError: it has one of them not; lists those there are.
    """
    if missing := [name for name in names if name not in there]:
        hint = config.nearest(missing[0], there)
        if missing[0] == "y" and key == "y" and not hint:
            hint = f": name the column of labels, as [data] y = {there[-1]!r}" if there else ""
        raise DataError(f"{file} has no column {missing[0]!r} ([data] {key}): it has {_some(there)}{hint}")


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- rows -----------------------------------------------------------------------------------------


def read(file: Path) -> Iterator[Chunk]:
    """Read a table in chunks, at least one, which may be empty; values are words from CSV, and typed from Parquet.

    Raises:
        DataError: it is no such table; names the line.
    """
    return _parquet(file) if file.suffix.lower() == ".parquet" else _csv(file)


def _csv(file: Path) -> Iterator[Chunk]:
    """Read CSV by commas, or by semicolons or tabs if the head has no comma. UTF-8, with or without byte order mark."""
    begun = [0]  # line at which the last whole row ended
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            head_line = stream.readline()
            if not head_line.strip():
                raise DataError(f"{file} is empty: a first line with the columns' names is wanted")
            if "\0" in head_line:
                raise DataError(f"{file} is not text in UTF-8{encoding(file)}")
            delimiter = next((mark for mark in (",", ";", "\t") if mark in head_line), ",")
            stream.seek(0)
            rows = csv.reader(stream, delimiter=delimiter, strict=True)
            head = [name.strip() for name in next(rows)]
            if len(set(head)) < len(head):
                twice = next(name for name in head if head.count(name) > 1)
                raise DataError(f"{file}, line 1: two columns are called {twice!r}: give each its own name")
            yield from _gathered(file, head, rows, begun)
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text in UTF-8{encoding(file)}") from None
    except csv.Error as error:
        raise DataError(f"{file}, line {begun[0] + 1}: {error}: mend this line's quotes or separators") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None


def _gathered(file: Path, head: Sequence[str], rows: Iterator[list[str]], ended: list[int]) -> Iterator[Chunk]:
    """Rows in chunks; `ended[0]` becomes the line at which the last whole row ended."""
    lines: list[int] = []
    held: list[list[str]] = []
    told = False
    ended[0] = rows.line_num  # type: ignore[attr-defined]
    for row in rows:
        line = ended[0] = rows.line_num  # type: ignore[attr-defined]
        if not row:
            continue  # an empty line
        if len(row) != len(head):
            raise DataError(
                f"{file}, line {line}: {len(row)} values, and the head names {len(head)} columns: mend the line"
            )
        lines.append(line)
        held.append(row)
        if len(held) == AT_ONCE:
            yield _chunk(head, held, lines)
            lines, held, told = [], [], True
    if held or not told:
        yield _chunk(head, held, lines)


def _chunk(head: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[int]) -> Chunk:
    values = list(zip(*rows, strict=True)) if rows else [() for _ in head]
    return Chunk({name: [each.strip() for each in column] for name, column in zip(head, values, strict=True)}, lines)


def encoding(file: Path) -> str:
    """Probable encoding of a file that is not UTF-8, and how to convert it."""
    with file.open("rb") as stream:
        start = stream.read(4)
    wide = start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start
    name = "UTF-16" if wide else "LATIN1"
    seems = " but, it seems, in UTF-16" if wide else " (perhaps Latin-1)"
    return f"{seems}: save it as UTF-8, as `iconv -f {name} -t UTF-8 {file.name} > new{file.suffix}` does"


def _parquet(file: Path) -> Iterator[Chunk]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{file}: Parquet files need pyarrow, which is not installed: pip install 'fedquilt[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(file) as opened:
            names, at = opened.schema_arrow.names, 1
            yield Chunk({name: [] for name in names}, [])
            for batch in opened.iter_batches(AT_ONCE):
                yield Chunk(batch.to_pydict(), range(at, at + len(batch)), "row")
                at += len(batch)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {first_line(error)}") from None


# -- windows --------------------------------------------------------------------------------------


def _windows(file: Path, spec: DataSpec, windows: Windows, rows: Reader) -> Reader:
    """Runs of consecutive rows as examples (steps, features); none spans two users.

    A window's label: of classes the most frequent among its rows (of equally many the least), of a regression
    its last row's, of several labels those that any of its rows has.
    """
    stride = windows.stride or windows.steps
    count = len(rows.y)
    changes = [0] if rows.owner is None else [0, *(np.flatnonzero(rows.owner[1:] != rows.owner[:-1]) + 1)]
    starts = np.concatenate(
        [
            np.arange(first, last - windows.steps + 1, stride)
            for first, last in zip(changes, [*changes[1:], count], strict=True)
        ]
    ).astype(np.int64)
    if not len(starts):
        raise DataError(f"{file}: no {windows.steps} rows in a row, of {count}: lower [data.windows] steps")
    places = starts[:, None] + np.arange(windows.steps)  # (n, steps)
    within = rows.y[places]
    if spec.task == "classes":
        kinds = int(rows.y.max()) + 1
        y = np.array([np.bincount(each, minlength=kinds).argmax() for each in within], np.int64)
    else:
        y = within[:, -1] if spec.task == "regression" else within.max(axis=1)
    return Reader(
        y,
        lambda wanted: rows.take(places[wanted]),
        (windows.steps, *rows.shape),
        rows.dtype,
        owner=None if rows.owner is None else rows.owner[starts],
        features=rows.features,
    )
