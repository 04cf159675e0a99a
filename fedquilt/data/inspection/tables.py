"""Inspection of the columns of a table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.inspection import labels
from fedquilt.data.measured_settings import MOST
from fedquilt.data.readers import table
from fedquilt.data.readers.columns import DECIMAL_COMMA, class_word, is_missing
from fedquilt.data.spec import AUTO, DataSpec
from fedquilt.formats import toml

COMMA: Final = "holds numbers with a comma: write them with a point"
NUMBERED: Final = re.compile(r"(?i:(?:^|[_ .-])(?:id|uuid|guid|index|row|nr|key)$|^unnamed)|[a-z]I[dD]$")
PERSONAL: Final = re.compile(
    r"(?i)(?:^|[_ .-])(?:e-?mail|phone|mobile|address|ssn|passport|iban|(?:first|last|family|full|user)[_ -]?name)s?$"
)


WITH_COMMA: Final = re.compile(r"[+-]?\d+(?:[.,]\d+)?")


class Column:
    """Values of a column: numbers while all are numbers, and its different words up to a limit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = self.missing = 0
        self.words: set[str] = set()
        self._parts: list[np.ndarray] | None = []

    def add_values(self, values: Sequence[Any]) -> None:
        present = [value for value in values if not is_missing(value)]
        self.rows += len(values)
        self.missing += len(values) - len(present)
        if len(self.words) <= MOST:
            self.words.update(map(class_word, present))
        if self._parts is not None:
            try:
                self._parts.append(np.array([float(value) for value in present]))
            except (TypeError, ValueError):
                self._parts = None

    @property
    def numbers(self) -> np.ndarray | None:
        """Values without the missing ones, or None if one is not a number."""
        return None if self._parts is None else np.concatenate(self._parts)

    @property
    def fill(self) -> float:
        """Value for missing ones: the median, or 0 for words, which sets no category."""
        return 0.0 if (values := self.numbers) is None else float(f"{np.median(values):.6g}")

    @property
    def has_decimal_commas(self) -> bool:
        words = self.words
        return any(map(DECIMAL_COMMA.fullmatch, words)) and all(map(WITH_COMMA.fullmatch, words))

    def describe_unusable_values(self) -> str:
        """Return why the column is no input, or "" if it is one."""
        present = self.rows - self.missing
        if not present:
            return "is empty"
        if len(self.words) == 1 and not self.missing:
            return "holds one value"
        if PERSONAL.search(self.name):
            return "looks like data on persons"
        values = self.numbers
        if values is None:
            if self.has_decimal_commas:
                return COMMA
            if len(self.words) > min(MOST, max(2, present // 2)):
                return "looks like ids, names, dates or texts"
            return ""
        if len(np.unique(values)) < len(values) or (values != np.rint(values)).any():
            return ""
        return "looks like ids" if NUMBERED.search(self.name) or (present > 2 and (np.diff(values) == 1).all()) else ""


def inspect_table(path: Path, label: str, notes: list[str]) -> dict[str, Any]:
    """Return the [data] keys that read a table, and append notes.

    Args:
        path: The table, or a folder with a table of each split.
        label: Column to predict, or "" for "y".
        notes: Receives a sentence on each kind of column.

    Raises:
        DataError: If the table cannot be read, has no such column, or no column is an input.
    """
    file = table.find_table(path, DataSpec(path=str(path)))
    found: dict[str, Column] = {}
    for chunk in table.read_chunks(file):
        for name, values in chunk.columns.items():
            found.setdefault(name, Column(name)).add_values(values)
    if not any(column.rows for column in found.values()):
        raise DataError(f"{file} has a head and no rows: write a line for each example")
    label = label or _require_default_label(file, list(found))
    table.require_columns(file, tuple(found), "y", [label])
    settings = _label_settings(file, found.pop(label))
    left = {name: why for name, column in found.items() if (why := column.describe_unusable_values())}
    used = [column for name, column in found.items() if name not in left]
    if not used:
        raise DataError(
            f"{file} has no column that is an input: {_join_reasons(left) or f'it has {label} only, add others'}"
        )
    numeric = [column for column in used if column.numbers is not None]
    worded = [column for column in used if column.numbers is None]
    if numeric:
        notes.append(f"numbers: {_shorten([column.name for column in numeric])}")
    if worded:
        notes.append(
            "categories, an input for each word: "
            + _shorten([f"{column.name} ({len(column.words)})" for column in worded])
        )
    if left:
        notes.append(f"left out: {_join_reasons(left)}")
    for column in used:
        if column.missing:
            how = "no category" if column in worded else f"filled with the median {column.fill:g}"
            notes.append(f"missing: {column.name} in {column.missing} of {column.rows} rows, {how}")
    fill = {column.name: column.fill for column in used if column.missing}
    return {
        "y": label,
        "x": [column.name for column in used],
        **settings,
        **({"categories": {column.name: AUTO for column in worded}} if worded else {}),
        **({"fill": fill} if fill else {}),
    }


def _require_default_label(file: Path, there: Sequence[str]) -> str:
    if "y" in there:
        return "y"
    raise DataError(f"{file}: name the column to predict, as --label {there[-1]}: it has {_shorten(there)}")


def _label_settings(file: Path, column: Column) -> dict[str, Any]:
    if column.missing:
        raise DataError(
            f"{file}: column {column.name!r} is missing in {column.missing} of {column.rows} rows: leave these rows out"
        )
    values, where = column.numbers, f"{file}, column {column.name!r}"
    if values is None:
        if column.has_decimal_commas:
            raise DataError(f"{where} {COMMA}")
        return {"labels": labels.require_classes(list(column.words), column.rows, where)}
    if not (np.isfinite(values).all() and labels.are_classes(np.unique(values), len(values))):
        return labels.choose_settings(values, where)
    words = sorted(column.words, key=lambda word: (float(word), word))
    if len(words) > MOST or words == [str(place) for place in range(len(words))]:  # more words than that are not kept
        return {}
    for word, other in itertools.pairwise(words):
        if float(word) == float(other):
            is_equal = Decimal(word) == Decimal(other)
            fix = "write each class in one way" if is_equal else "write large classes as words"
            raise DataError(f"{where}: {word} and {other} are the same {'' if is_equal else '64-bit '}number: {fix}")
    return {"labels": words}


def _shorten(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _join_reasons(left: dict[str, str]) -> str:
    return _shorten([f"{toml.key_text(name)} ({why})" for name, why in left.items()])
