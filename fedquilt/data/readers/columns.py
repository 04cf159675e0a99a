"""Columns of a table as numbers: numeric inputs, one-hot categories, and labels by task."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers.base import NAMED_MOST
from fedquilt.data.spec import DataSpec
from fedquilt.formats import toml

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # in capital or small letters
SEPARATORS = (";", "|", " ")  # between the labels of one example, in one column
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class TableChunk:
    """Rows of a table by column, with each row's position in the file."""

    columns: Mapping[str, Sequence[Any]]
    places: Sequence[int]
    unit: str = "line"  # unit of `places`

    def __len__(self) -> int:
        return len(self.places)


class ColumnDecoder:
    """Converter of table chunks to arrays, by the [data] table.

    Args:
        file: File named in errors.
        spec: The [data] table.
        y: Label columns.
    """

    def __init__(self, file: Path, spec: DataSpec, y: Sequence[str]) -> None:
        self._file, self._spec, self._y = file, spec, tuple(y)
        if spec.task == "classes" and len(self._y) > 1:
            raise DataError(
                f"{file}: labels in {len(self._y)} columns are for task = 'regression' or 'labels'; a class is in one"
            )
        if spec.task == "labels" and len(self._y) == 1 and not spec.labels:
            raise DataError(
                f"{file}: name the columns of 0 and 1 in [data] y = [...], or in `labels` the words that column "
                f"{self._y[0]!r} holds"
            )

    def feature_names(self, x: Sequence[str]) -> tuple[str, ...]:
        found: list[str] = []
        for name in x:
            kinds = self._spec.categories.get(name)
            found += [name] if kinds is None else [f"{name}={kind}" for kind in kinds]
        return tuple(found)

    def decode_inputs(self, chunk: TableChunk, x: Sequence[str]) -> np.ndarray:
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
        """Return one column as (rows,) float32, with missing values replaced by `fill`.

        Raises:
            DataError: If a value is missing and `fill` is None, or a value is not a finite number.
        """
        found = np.empty(len(chunk), np.float32)
        for row, value in enumerate(chunk.columns[name]):
            if is_missing(value):
                if fill is None:
                    self._raise_cell_error(
                        chunk, row, name, "the value is missing", "give [data] fill a number, or leave such rows out"
                    )
                found[row] = fill
                continue
            try:
                found[row] = float(value)
            except (TypeError, ValueError):
                self._raise_cell_error(
                    chunk, row, name, f"{_quote(value)} is not a number", self._number_hint(chunk, name, value)
                )
            if not np.isfinite(found[row]):
                self._raise_cell_error(
                    chunk, row, name, f"{_quote(value)} is not a finite number in 32 bits", "leave it out"
                )
        return found

    def _fill_value(self, name: str) -> float | None:
        fill = self._spec.fill
        return fill.get(name) if isinstance(fill, dict) else fill

    def _number_hint(self, chunk: TableChunk, name: str, value: object) -> str:
        if DECIMAL_COMMA.fullmatch(str(value)):
            return f"write it with a point, {str(value).replace(',', '.')}"
        if isinstance(name, str) and name in self._y:
            return "with task = 'regression' labels are numbers"
        kinds = sorted({str(value) for value in chunk.columns[name] if not is_missing(value)})
        if len(kinds) > 20:
            return "leave the column out of [data] x, or correct the value"
        words = f"{toml.key_text(name)} = {json.dumps(kinds, ensure_ascii=False)}"
        return f"correct it, or list the column's words: categories = {{ {words} }}"

    def _encode_one_hot(self, chunk: TableChunk, name: str, kinds: Sequence[str]) -> np.ndarray:
        places = {kind: place for place, kind in enumerate(kinds)}
        found = np.zeros((len(chunk), len(kinds)), np.float32)
        for row, value in enumerate(chunk.columns[name]):
            if str(value) in places:
                found[row, places[str(value)]] = 1
            elif not (is_missing(value) and self._fill_value(name) is not None):  # filled: none of them
                known = ", ".join(kinds)
                self._raise_cell_error(
                    chunk,
                    row,
                    name,
                    f"{_quote(value)} is none of its categories ({known})",
                    "add it to [data] categories",
                )
        return found

    def _decode_classes(self, chunk: TableChunk) -> np.ndarray:
        (name,) = self._y
        known = {kind: place for place, kind in enumerate(self._spec.labels)}
        found = np.empty(len(chunk), np.int64)
        for row, value in enumerate(chunk.columns[name]):
            said = class_word(value)
            if known:
                if said not in known:
                    self._raise_cell_error(
                        chunk,
                        row,
                        name,
                        f"{_quote(value)} is none of [data] labels ({', '.join(known)})",
                        "add or correct it",
                    )
                found[row] = known[said]
            elif said.isascii() and said.isdigit() and len(said) < 10:
                found[row] = int(said)
            else:
                self._raise_cell_error(
                    chunk, row, name, f"{_quote(value)} is not a class's number", self._label_hint(chunk, name)
                )
        return found

    def _label_hint(self, chunk: TableChunk, name: str) -> str:
        """Return a hint for a label column with values other than class numbers."""
        kinds = sorted({str(value) for value in chunk.columns[name]})
        try:
            kinds.sort(key=float)
            are_classes = all(float(kind).is_integer() for kind in kinds)
        except ValueError:
            are_classes = True
        if are_classes and len(kinds) <= NAMED_MOST:
            return f"name the classes in order: set [data] labels = {json.dumps(kinds, ensure_ascii=False)}"
        return "classes are whole numbers from 0; to predict numbers set task = 'regression'"

    def _decode_multi_labels(self, chunk: TableChunk) -> np.ndarray:
        if len(self._y) > 1:
            found = np.stack([self.decode_numbers(chunk, name) for name in self._y], axis=1)
            for row, column in np.argwhere((found != 0) & (found != 1)):
                name = self._y[column]
                self._raise_cell_error(
                    chunk,
                    int(row),
                    name,
                    f"{_quote(chunk.columns[name][row])} is neither 0 nor 1",
                    "task = 'labels' requires these",
                )
            return found.astype(np.uint8)
        (name,) = self._y
        known = {kind: place for place, kind in enumerate(self._spec.labels)}
        held = np.zeros((len(chunk), len(known)), np.uint8)
        for row, value in enumerate(chunk.columns[name]):
            text = "" if value is None else str(value)
            mark = next((each for each in SEPARATORS if each in text), ";")
            for word in filter(None, map(str.strip, text.split(mark))):
                if word not in known:
                    self._raise_cell_error(
                        chunk,
                        row,
                        name,
                        f"{_quote(word)} is none of [data] labels ({', '.join(known)})",
                        "add or correct it",
                    )
                held[row, known[word]] = 1
        return held

    def _raise_cell_error(self, chunk: TableChunk, row: int, name: str, what: str, mend: str) -> NoReturn:
        raise DataError(f"{self._file}, {chunk.unit} {chunk.places[row]}, column {name!r}: {what}: {mend}")


def class_word(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in MISSING) or value != value


def _quote(value: Any) -> str:
    said = str(value)
    return repr(said if len(said) <= 40 else said[:37] + "...")
