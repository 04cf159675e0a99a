"""Columns of a table as numbers: numeric inputs, one-hot categories, and labels by task."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedquilt import extras
from fedquilt.core import DataError
from fedquilt.core.errors import first_line
from fedquilt.data.readers.base import MAX_NAMED_CLASSES, ExampleReader
from fedquilt.data.spec import DataSpec, Windows
from fedquilt.formats import toml

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # in capital or small letters
SEPARATORS = (";", "|", " ")  # between the labels of one example, in one column
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class TableChunk:
    """Rows of a table by column, with each row's position in the file."""

    columns: Mapping[str, Sequence[Any]]
    positions: Sequence[int]
    unit: str = "line"  # unit of `positions`

    def __len__(self) -> int:
        return len(self.positions)


class ColumnDecoder:
    """Converter of table chunks to arrays, by the [data] table. Raises DataError for an unreadable cell."""

    def __init__(self, file: Path, spec: DataSpec, y: Sequence[str]) -> None:
        self._file, self._spec, self._y = file, spec, tuple(y)
        if spec.task == "classes" and len(self._y) > 1:
            raise DataError(
                f"{file}: [data] y names {len(self._y)} columns, but classes are in one: name one, or set task = "
                "'regression' or 'labels'"
            )
        if spec.task == "labels" and len(self._y) == 1 and not spec.labels:
            raise DataError(
                f"{file}: task = 'labels' has no labels: list columns of 0 and 1 as [data] y, or the words in column "
                f"{self._y[0]!r} as [data] labels"
            )

    def decode_inputs(self, chunk: TableChunk, x: Sequence[str]) -> np.ndarray:
        """Return the inputs (rows, features) float32. A category has a feature of 0 or 1 for each word."""
        parts = []
        for name in x:
            kinds = self._spec.categories.get(name)
            if kinds is None:
                parts.append(self.decode_numbers(chunk, name, self._fill_value(name))[:, None])
            else:
                parts.append(self._encode_one_hot(chunk, name, kinds))
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(chunk), 0), np.float32)

    def decode_labels(self, chunk: TableChunk) -> np.ndarray:
        if self._spec.task == "regression":
            return np.stack([self.decode_numbers(chunk, name) for name in self._y], axis=1)
        if self._spec.task == "labels":
            return self._decode_multi_labels(chunk)
        return self._decode_classes(chunk)

    def decode_numbers(self, chunk: TableChunk, name: str, fill: float | None = None) -> np.ndarray:
        """Return one column as (rows,) float32, with missing values replaced by `fill`."""
        parsed_numbers = parse_numbers(chunk.columns[name])
        if parsed_numbers is not None:
            with np.errstate(over="ignore"):
                numbers = parsed_numbers.astype(np.float32)
            if np.isfinite(numbers).all():
                return numbers
        return self._decode_cells(chunk, name, fill)

    def _decode_cells(self, chunk: TableChunk, name: str, fill: float | None) -> np.ndarray:
        numbers = np.empty(len(chunk), np.float32)
        for row, value in enumerate(chunk.columns[name]):
            if is_missing(value):
                if fill is None:
                    hint = "write a number or leave the row out, or train with [data] fill"
                    raise self._cell_error(chunk, row, name, f"the value is missing: {hint}")
                numbers[row] = fill
                continue
            try:
                numbers[row] = float(value)
            except (TypeError, ValueError):
                hint = self._number_hint(chunk, name, value)
                raise self._cell_error(chunk, row, name, f"{_quote(value)} is not a number: {hint}") from None
            if not np.isfinite(numbers[row]):
                problem = f"{_quote(value)} is not a finite number in 32 bits: leave it out"
                raise self._cell_error(chunk, row, name, problem)
        return numbers

    def _fill_value(self, name: str) -> float | None:
        fill = self._spec.fill
        return fill.get(name) if isinstance(fill, dict) else fill

    def _number_hint(self, chunk: TableChunk, name: str, value: object) -> str:
        if DECIMAL_COMMA.fullmatch(str(value)):
            return f"write it with a point, {str(value).replace(',', '.')}"
        if name in self._y:
            return "write numbers, or leave task = 'regression' out"
        kinds = sorted({str(value) for value in chunk.columns[name] if not is_missing(value)})
        if len(kinds) > 20:
            return "leave the column out of [data] x, or correct the value"
        entry = f"{toml.key_text(name)} = {json.dumps(kinds, ensure_ascii=False)}"
        return f"correct it, or list the column's words: categories = {{ {entry} }}"

    def _encode_one_hot(self, chunk: TableChunk, name: str, kinds: Sequence[str]) -> np.ndarray:
        column_by_kind = {kind: column for column, kind in enumerate(kinds)}
        one_hot = np.zeros((len(chunk), len(kinds)), np.float32)
        known_columns = find_all(column_by_kind, chunk.columns[name])
        if known_columns is not None:
            one_hot[np.arange(len(chunk)), known_columns] = 1
            return one_hot
        for row, value in enumerate(chunk.columns[name]):
            if str(value) in column_by_kind:
                one_hot[row, column_by_kind[str(value)]] = 1
            elif not (is_missing(value) and self._fill_value(name) is not None):  # a filled cell has no category
                hint = "correct it or leave the row out, or train with it in [data] categories"
                problem = f"{_quote(value)} is not a category ({', '.join(kinds)}): {hint}"
                raise self._cell_error(chunk, row, name, problem)
        return one_hot

    def _decode_classes(self, chunk: TableChunk) -> np.ndarray:
        (name,) = self._y
        class_by_name = {kind: class_index for class_index, kind in enumerate(self._spec.labels)}
        known_classes = find_all(class_by_name, chunk.columns[name])
        if known_classes is not None:
            return np.array(known_classes, np.int64)
        classes = np.empty(len(chunk), np.int64)
        for row, value in enumerate(chunk.columns[name]):
            word = class_word(value)
            if class_by_name:
                if word not in class_by_name:
                    raise self._unknown_label_error(chunk, row, name, value)
                classes[row] = class_by_name[word]
            elif word.isascii() and word.isdigit() and len(word) < 10:
                classes[row] = int(word)
            else:
                hint = self._label_hint(chunk, name)
                raise self._cell_error(chunk, row, name, f"{_quote(value)} is not the number of a class: {hint}")
        return classes

    def _label_hint(self, chunk: TableChunk, name: str) -> str:
        kinds = sorted({str(value) for value in chunk.columns[name]})
        try:
            kinds.sort(key=float)
            are_classes = all(float(kind).is_integer() for kind in kinds)
        except ValueError:
            are_classes = True
        if are_classes and len(kinds) <= MAX_NAMED_CLASSES:
            return f"name the classes in order: set [data] labels = {json.dumps(kinds, ensure_ascii=False)}"
        return "number the classes from 0, or set task = 'regression' to predict numbers"

    def _decode_multi_labels(self, chunk: TableChunk) -> np.ndarray:
        if len(self._y) > 1:
            flags = np.stack([self.decode_numbers(chunk, name) for name in self._y], axis=1)
            for row, column in np.argwhere((flags != 0) & (flags != 1)):
                name = self._y[column]
                problem = (
                    f"{_quote(chunk.columns[name][row])} is neither 0 nor 1, as task = 'labels' requires: correct it"
                )
                raise self._cell_error(chunk, int(row), name, problem)
            return flags.astype(np.uint8)
        (name,) = self._y
        column_by_label = {kind: column_index for column_index, kind in enumerate(self._spec.labels)}
        labels = np.zeros((len(chunk), len(column_by_label)), np.uint8)
        for row, value in enumerate(chunk.columns[name]):
            text = "" if value is None else str(value)
            separator = next((candidate for candidate in SEPARATORS if candidate in text), ";")
            for label in filter(None, map(str.strip, text.split(separator))):
                if label not in column_by_label:
                    raise self._unknown_label_error(chunk, row, name, label)
                labels[row, column_by_label[label]] = 1
        return labels

    def _unknown_label_error(self, chunk: TableChunk, row: int, name: str, value: object) -> DataError:
        names = ", ".join(self._spec.labels)
        return self._cell_error(
            chunk, row, name, f"{_quote(value)} is not in [data] labels ({names}): add or correct it"
        )

    def _cell_error(self, chunk: TableChunk, row: int, name: str, problem: str) -> DataError:
        return DataError(f"{self._file}, {chunk.unit} {chunk.positions[row]}, column {name!r}: {problem}")


def class_word(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def parse_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """Return the values as float64, or None if one of them is missing or is not a number."""
    try:
        numbers = np.fromiter(map(float, values), np.float64, len(values))
    except (TypeError, ValueError):
        return None
    return None if np.isnan(numbers).any() else numbers


def find_all(index_by_word: Mapping[str, int], words: Sequence[Any]) -> list[int] | None:
    try:
        return [index_by_word[word] for word in words]
    except (KeyError, TypeError):
        return None


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in MISSING) or value != value


def _quote(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 40 else text[:37] + "...")


CHUNK_ROWS = 4096  # rows of a chunk
SUFFIXES = (".csv", ".tsv", ".parquet")
ARCHIVE = b"PK\x03\x04"  # first bytes of a .zip and an .xlsx
AS_CSV = "save the sheet as CSV (UTF-8)"


class InputColumns(NamedTuple):
    x: tuple[str, ...]
    y: tuple[str, ...]
    owner: str


def feature_names(spec: DataSpec, x: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the inputs from these columns, "column=word" for each word of a category."""
    names: list[str] = []
    for name in x:
        words = spec.categories.get(name)
        names += [name] if words is None else [f"{name}={word}" for word in words]
    return tuple(names)


def open_table(path: Path, spec: DataSpec, *, labelled: bool = True) -> ExampleReader:
    """Read a table, and return a reader of its rows or windows. Without `labelled`, all labels are 0."""
    file = find_table(path, spec)
    table_rows = read_rows(
        file, spec, lambda chunk, decoder, names: decoder.decode_inputs(chunk, names), "an example", labelled=labelled
    )
    values = np.concatenate(table_rows.x)
    reader = ExampleReader(
        table_rows.y,
        values.__getitem__,
        values.shape[1:],
        values.dtype,
        owner=table_rows.owner,
        features=table_rows.features,
    )
    return reader if spec.windows is None else _cut_windows(file, spec, spec.windows, reader)


class TableRows(NamedTuple):
    x: list[Any]  # of each chunk: the result of `decode_inputs`
    y: np.ndarray  # labels, as in `ExampleReader`
    owner: np.ndarray | None  # (n,) of words: user of each row; None: not needed
    features: tuple[str, ...]  # names of the inputs


def read_rows(
    file: Path,
    spec: DataSpec,
    decode_inputs: Callable[[TableChunk, ColumnDecoder, tuple[str, ...]], Any],
    row_noun: str,
    role_hint: str = "",
    *,
    labelled: bool = True,
) -> TableRows:
    """Return inputs, labels and owners of a table, which is read in chunks.

    Args:
        file: The table.
        spec: Columns and task.
        decode_inputs: Function from a chunk, the decoder and the input columns to the chunk's inputs.
        row_noun: Noun for a row, for the error on a table without rows.
        role_hint: Verb phrase for the error on several input columns, or "" to permit several.
        labelled: Whether the table has label columns. Otherwise labels are zeros.

    Raises:
        DataError: If the table has no rows, a column is missing, or a cell does not fit.
    """
    chunks = read_chunks(file)
    first_chunk = next(chunks)
    roles = column_roles(file, tuple(first_chunk.columns), spec, labelled=labelled)
    if role_hint and len(roles.x) != 1:
        columns = ", ".join(roles.x)
        raise DataError(f"{file}: columns {columns} could all {role_hint}: set one, as in [data] x = {roles.x[0]!r}")
    decoder = ColumnDecoder(file, spec, roles.y)
    x, y, owner = [], [], []
    for chunk in chain((first_chunk,), chunks):
        x.append(decode_inputs(chunk, decoder, roles.x))
        y.append(decoder.decode_labels(chunk) if labelled else np.zeros(len(chunk), np.int64))
        if roles.owner:
            owner.append(np.array([str(value) for value in chunk.columns[roles.owner]]))
    labels = np.concatenate(y)
    if not len(labels):
        raise DataError(f"{file} has a header but no rows: write {row_noun} in each row")
    return TableRows(x, labels, np.concatenate(owner) if owner else None, feature_names(spec, roles.x))


def category_words(path: Path, spec: DataSpec, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the distinct words of each named column, sorted, or raise DataError for a missing column."""
    file = find_table(path, spec)
    words_by_column: dict[str, set[str]] = {name: set() for name in names}
    for chunk in read_chunks(file):
        require_columns(file, tuple(chunk.columns), "categories", names)
        for name, words in words_by_column.items():
            words.update(word for word in set(map(str, chunk.columns[name])) if not is_missing(word))
    return {name: tuple(sorted(words)) for name, words in words_by_column.items()}


# -- files and columns ------------------------------------------------------------------------------


def find_split_tables(folder: Path, split: str) -> list[Path]:
    return [file for suffix in SUFFIXES if (file := folder / f"{split}{suffix}").is_file()]


def find_table(path: Path, spec: DataSpec) -> Path:
    if path.is_dir():
        tables = find_split_tables(path, spec.split)
        if len(tables) != 1:
            raise DataError(
                f"{path} has {len(tables) or 'no'} tables of split {spec.split!r}: keep one, such as {spec.split}.csv"
            )
        return tables[0]
    if spec.split != "train":
        raise DataError(
            f"{path} is a single table without a split {spec.split!r}: put train.csv and {spec.split}.csv in a folder "
            "and set path to the folder, or set [test] path"
        )
    return path


def read_column_names(file: Path) -> tuple[str, ...]:
    return tuple(next(read_chunks(file)).columns)


def column_roles(file: Path, column_names: Sequence[str], spec: DataSpec, *, labelled: bool = True) -> InputColumns:
    """Return the columns of inputs, labels and owner. Defaults: "y" as label, the rest as inputs.

    Raise DataError if a column is missing, there are no inputs, or a column is both input and label.
    """
    y = label_columns(spec)
    owner = spec.column
    configured = (spec.x,) if isinstance(spec.x, str) else spec.x
    x = tuple(name for name in configured if name) or tuple(name for name in column_names if name not in (*y, owner))
    for key, names in (
        ("y", y if labelled else ()),
        ("x", x),
        ("column", (owner,) if owner else ()),
        ("categories", spec.categories),
    ):
        require_columns(file, column_names, key, names)
    if not x:
        raise DataError(f"{file} has no column other than {', '.join(y)}: add columns of inputs")
    if conflicting := [name for name in x if name in y]:
        raise DataError(f"{file}: column {conflicting[0]!r} is in both [data] x and y: remove it from one")
    return InputColumns(x, y, owner)


def label_columns(spec: DataSpec) -> tuple[str, ...]:
    configured = (spec.y,) if isinstance(spec.y, str) else spec.y
    return tuple(name for name in configured if name) or ("y",)


def require_columns(file: Path, column_names: Sequence[str], key: str, names: Iterable[str]) -> None:
    """Raise DataError if a name is not among a table's columns. `key` is the [data] key with the name."""
    if missing := [name for name in names if name not in column_names]:
        hint = toml.describe_choices(missing[0], column_names, "it has")
        if missing[0] == "y" and key == "y" and column_names and not hint.startswith("; did"):
            hint += f": name the column of labels, as in [data] y = {column_names[-1]!r}"
        if any(map(_is_number, column_names)):
            hint += ". If the first line is an example, insert a line with column names before it"
        raise DataError(f"{file} has no column {missing[0]!r} ([data] {key}){hint}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- rows -----------------------------------------------------------------------------------------


def read_chunks(file: Path) -> Iterator[TableChunk]:
    """Yield a table's rows in one or more chunks, or raise DataError if the file is damaged."""
    return _read_parquet(file) if file.suffix.lower() == ".parquet" else _read_csv(file)


def _read_csv(file: Path) -> Iterator[TableChunk]:
    # The delimiter is a semicolon or a tab if the header has no comma. A byte order mark is skipped.
    last_line = [0]  # line at which the last complete row ended, updated by `_chunk_rows`
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            head_line = stream.readline()
            if not head_line.strip():
                raise DataError(f"{file} is empty: write a first line with the columns' names")
            if "\0" in head_line:
                raise DataError(f"{file} is not text in UTF-8{encoding_hint(file)}")
            delimiter = next((candidate for candidate in (",", ";", "\t") if candidate in head_line), ",")
            stream.seek(0)
            rows = csv.reader(stream, delimiter=delimiter, strict=True)
            head = [name.strip() for name in next(rows)]
            if len(set(head)) < len(head):
                repeated = next(name for name in head if head.count(name) > 1)
                raise DataError(f"{file}, line 1: two columns are called {repeated!r}: rename one")
            yield from _chunk_rows(file, head, rows, last_line)
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text in UTF-8{encoding_hint(file)}") from None
    except csv.Error as error:
        raise DataError(f"{file}, line {last_line[0] + 1}: {error}: correct this line's quotes or separators") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}{toml.suggest_file(file)}") from None


def _chunk_rows(
    file: Path, head: Sequence[str], rows: Iterator[list[str]], last_line: list[int]
) -> Iterator[TableChunk]:
    # `last_line[0]` is set to the line at which the last complete row ended.
    lines: list[int] = []
    chunk_rows: list[list[str]] = []
    has_yielded = False
    last_line[0] = rows.line_num  # type: ignore[attr-defined]
    for row in rows:
        line = last_line[0] = rows.line_num  # type: ignore[attr-defined]
        if not row:
            continue  # an empty line
        if len(row) != len(head):
            raise DataError(
                f"{file}, line {line}: {len(row)} values for the {len(head)} columns of line 1: correct the line"
            )
        lines.append(line)
        chunk_rows.append(row)
        if len(chunk_rows) == CHUNK_ROWS:
            yield _chunk_from_rows(head, chunk_rows, lines)
            lines, chunk_rows, has_yielded = [], [], True
    if chunk_rows or not has_yielded:
        yield _chunk_from_rows(head, chunk_rows, lines)


def _chunk_from_rows(head: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[int]) -> TableChunk:
    values = list(zip(*rows, strict=True)) if rows else [() for _ in head]
    return TableChunk({name: list(map(str.strip, column)) for name, column in zip(head, values, strict=True)}, lines)


def encoding_hint(file: Path) -> str:
    """Return the likely format of a file and how to convert it, to end an error on text that is not UTF-8."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start == ARCHIVE:
        return f" but an archive, perhaps an Excel workbook: {AS_CSV}"
    is_utf16 = start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start
    name = "UTF-16" if is_utf16 else "LATIN1"
    guess = " but probably in UTF-16" if is_utf16 else " (perhaps Latin-1)"
    return f"{guess}: convert it with `iconv -f {name} -t UTF-8 {file.name} > new{file.suffix}`"


def _read_parquet(file: Path) -> Iterator[TableChunk]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        command = extras.installation_command("parquet")
        raise DataError(f"{file}: Parquet files need pyarrow, which is not installed: {command}") from None
    try:
        with parquet.ParquetFile(file) as opened:
            names, position = opened.schema_arrow.names, 1
            yield TableChunk({name: [] for name in names}, [])
            for batch in opened.iter_batches(CHUNK_ROWS):
                yield TableChunk(batch.to_pydict(), range(position, position + len(batch)), "row")
                position += len(batch)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {first_line(error)}: save the file again, or as CSV") from None


# -- windows --------------------------------------------------------------------------------------


def _cut_windows(file: Path, spec: DataSpec, windows: Windows, rows: ExampleReader) -> ExampleReader:
    """Return a reader of windows of consecutive rows, (steps, features). No window spans two users.

    A window's label is its most frequent class, and of equally frequent ones the smallest. In a regression it is the
    last row's target, and for several labels the union of the rows' labels.
    """
    stride = windows.stride or windows.steps
    count = len(rows.y)
    changes = [0] if rows.owner is None else [0, *(np.flatnonzero(rows.owner[1:] != rows.owner[:-1]) + 1)]
    starts = np.concatenate(
        [
            np.arange(start, end - windows.steps + 1, stride)
            for start, end in zip(changes, [*changes[1:], count], strict=True)
        ]
    ).astype(np.int64)
    if not len(starts):
        raise DataError(
            f"{file} has no {windows.steps} consecutive rows of one user ({count} rows): lower [data.windows] steps"
        )
    row_indices = starts[:, None] + np.arange(windows.steps)  # (n, steps)
    labels_by_window = rows.y[row_indices]
    if spec.task == "classes":
        kinds = int(rows.y.max()) + 1
        y = np.array(
            [np.bincount(window_labels, minlength=kinds).argmax() for window_labels in labels_by_window], np.int64
        )
    else:
        y = labels_by_window[:, -1] if spec.task == "regression" else labels_by_window.max(axis=1)
    return ExampleReader(
        y,
        lambda selected: rows.take(row_indices[selected]),
        (windows.steps, *rows.shape),
        rows.dtype,
        owner=None if rows.owner is None else rows.owner[starts],
        features=rows.features,
    )
