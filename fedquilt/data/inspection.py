"""Inspection of a data set, and the `[data]` and `[input]` tables that read it.

The tables state every choice, and a bundle and an exported network store them, so that training, evaluation and
predictions read files alike. Inspection reads files on this machine, and sends nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import DataError
from fedquilt.data import examples, inputs, readers, reading_settings
from fedquilt.data.readers import ExampleReader, arrays, base, images, table
from fedquilt.data.readers.table import DECIMAL_COMMA, class_word, is_missing
from fedquilt.data.reading_settings import MAX_CATEGORIES
from fedquilt.data.spec import AUTO, SKLEARN, DataSpec
from fedquilt.formats import toml

TORCHVISION: Final = "torchvision/"  # prefix of torchvision's data sets
SAMPLE_IMAGES: Final = 256  # images of which colours and scales are measured
BLOCK_NUMBERS: Final = 2**26  # numbers of an array that are read at once
TARGET_SIDE: Final = 32  # pixels to which large images, and those of several sizes, are scaled


@dataclass(frozen=True)
class DataInspection:
    data: dict[str, Any]
    input: dict[str, Any]
    shape: tuple[int, ...]
    outputs: int
    examples: int
    notes: tuple[str, ...]


def inspect_data(source: str, label: str = "") -> DataInspection:
    """Return the tables that read a data set, and notes on its content, or raise DataError.

    `source` is a file, a folder, or a name such as "sklearn/iris" or "torchvision/MNIST". `label` is the column or
    array to predict, or "" for the default.
    """
    data = _locate_data(source)
    kind = readers.detect_format(Path(data.get("path", "")), DataSpec(**data)) if "path" in data else "sklearn"
    notes: list[str] = []
    if kind in ("csv", "parquet"):
        data |= inspect_table(Path(source), label, notes)
    elif kind == "npz":
        data |= _name_arrays(Path(source), label) if label else {}
        data |= settings_from_labels(arrays.read_labels(Path(source), DataSpec(**data)), source)
    elif kind == "sklearn":
        data |= settings_from_labels(arrays.load_sklearn_data(DataSpec(**data))[1], source)
    elif kind == "folder":
        data |= _inspect_folder(Path(source), notes)
    if label and kind not in ("csv", "parquet", "npz"):
        raise DataError(f"{source} has no columns to choose from: leave --label out")
    reader = examples.open_split(DataSpec.parse(reading_settings.complete_data_table(data)))
    if not len(reader.y):
        raise DataError(f"{source} has no examples: add some")
    if not reader.shape:
        raise DataError(f"{source}: examples have shape ({len(reader.y)},): save x.reshape(-1, 1)")
    if (reader.y == reader.y[:1]).all():
        raise DataError(
            f"{source}: all {len(reader.y)} examples have the same label, so there is nothing to learn: "
            "add examples with other labels, or choose another --label"
        )
    _fill_gaps(reader, data, source, notes)
    input_table = _inspect_inputs(reader, data, notes)
    notes.append(describe_labels(reader.y, data))
    outputs = reader.y.shape[1] if reader.y.ndim > 1 else max(2, len(data.get("labels", ())) or int(reader.y.max()) + 1)
    return DataInspection(
        data, input_table, reader.shape, outputs, len(reader.y), (f"{source}: {len(reader.y)} examples", *notes)
    )


def _locate_data(source: str) -> dict[str, Any]:
    if source.startswith(SKLEARN):
        return {"dataset": source}
    name = source.removeprefix(TORCHVISION)
    if name != source and "/" not in name:
        return {"dataset": name, "path": "torchvision", "download": True}
    if not source or not Path(source).exists():
        raise DataError(
            f"no data at {source or repr(source)}"
            + (
                toml.suggest_file(Path(source))
                or f": name a CSV, Parquet or .npz file, a folder of images by class or of IDX files, {SKLEARN}iris or "
                f"{TORCHVISION}MNIST"
            )
        )
    return {"path": source}


def _name_arrays(path: Path, label: str) -> dict[str, Any]:
    input_arrays = [name for name in arrays.list_arrays(path) if name != label]
    return {"y": label, **({"x": input_arrays[0]} if len(input_arrays) == 1 else {})}


def _inspect_folder(path: Path, notes: list[str]) -> dict[str, Any]:
    splits = [split for split in ("train", "test") if (path / "train").is_dir() and (path / split).is_dir()]
    table: dict[str, Any] = {"labels": base.list_subfolders(path / "train" if splits else path)}
    sizes: list[tuple[int, int]] = []
    for split in splits or ["train"]:
        spec = DataSpec(path=str(path), split=split)
        sizes += images.measure_sizes(base.find_files_by_class(path, spec, images.SUFFIXES, "images")[0])
    sides = sorted(map(min, sizes))
    low, high = sides[0], max(map(max, sizes))
    if low != high or high > 2 * TARGET_SIDE:
        table["size"] = min(TARGET_SIDE, sides[(len(sides) - 1) // 2])
        span = f"{low} pixels" if low == high else f"{low} to {high} pixels a side"
        notes.append(f"images of {span} are scaled to {table['size']} x {table['size']}")
    return table


def _fill_gaps(reader: ExampleReader, data: dict[str, Any], source: str, notes: list[str]) -> None:
    """Add the key `fill` to the [data] table, with a note, if an array of inputs contains NaN."""
    if reader.dtype.kind != "f" or reader.features:
        return
    count, size = len(reader.y), max(1, math.prod(reader.shape))
    step = max(1, BLOCK_NUMBERS // size)
    gaps = sum(
        int(np.isnan(reader.take(np.arange(start, min(start + step, count)))).sum()) for start in range(0, count, step)
    )
    if not gaps:
        return
    x = reader.take(_choose_rows(reader, step))
    if np.isnan(x).all():
        raise DataError(f"{source}: all inputs of {len(x)} examples are NaN: save numbers, or choose another array")
    data["fill"] = float(f"{np.nanmedian(x):.6g}")
    notes.append(f"missing: {gaps} of {count * size} numbers, filled with the median of all, {data['fill']:g}")


def _choose_rows(reader: ExampleReader, max_rows: int) -> np.ndarray:
    return np.unique(np.linspace(0, len(reader.y) - 1, min(len(reader.y), max_rows)).astype(np.int64))


def _inspect_inputs(reader: ExampleReader, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if not _is_image(reader):
        if len(reader.shape) == 1 and not reader.features:
            notes.append(f"{reader.shape[0]} numbers each")
        notes.append("numbers are standardised: mean 0, standard deviation 1")
        return {"standardise": True}
    x = inputs.fill_missing(reader.take(_choose_rows(reader, SAMPLE_IMAGES)), data.get("fill"))
    grey = x.ndim == 3 or x.shape[3] == 1 or bool((x == x[..., :1]).all())
    high = max(reader.shape[:2])
    side = high if high <= 2 * TARGET_SIDE else TARGET_SIDE
    table: dict[str, Any] = {"channels": 1 if grey else 3, "size": side}
    maps = inputs.prepare_images(x, table).transpose(0, 2, 3, 1)
    scales = inputs.measure_scales(maps)
    table |= {key: [float(f"{value:.4g}") for value in getattr(scales, key)] for key in ("mean", "std")}
    notes.append(f"{'grey' if grey else 'colour'} images, {side} x {side} pixels, levels standardised")
    return table


def _is_image(reader: ExampleReader) -> bool:
    shape = reader.shape
    if reader.dtype.kind not in "uf":
        return False
    if len(shape) == 3:
        return shape[2] in (1, 3)
    return len(shape) == 2 and (reader.dtype.kind == "u" or shape[0] == shape[1])


COMMA_PROBLEM: Final = (
    "numbers with a decimal comma: write a point, in a file with semicolons by `sed 's/,/./g' OLD.csv > NEW.csv`"
)
DATE: Final = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[ T].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}(?: .*)?")
ID_COLUMN: Final = re.compile(r"(?i:(?:^|[_ .-])(?:id|uuid|guid|index|row|nr|key)$|^unnamed)|[a-z]I[dD]$")
PERSONAL_COLUMN: Final = re.compile(
    r"(?i)(?:^|[_ .-])(?:e-?mail|phone|mobile|address|ssn|passport|iban|(?:first|last|family|full|user)[_ -]?name)s?$"
)


NUMBER_WITH_SEPARATOR: Final = re.compile(r"[+-]?\d+(?:[.,]\d+)?")


class Column:
    """Statistics of a table column: its numbers, or at most MAX_CATEGORIES + 1 distinct words."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = self.missing = 0
        self.distinct_words: set[str] = set()
        self._parts: list[np.ndarray] | None = []

    def add_values(self, values: Sequence[Any]) -> None:
        self.rows += len(values)
        numbers = None if self._parts is None else table.parse_numbers(values)
        if self._parts is not None and numbers is not None:
            self._parts.append(numbers)
            self._add_words(values)
        else:
            self._add_words_and_gaps(values)

    def _add_words(self, values: Iterable[Any]) -> None:
        if len(self.distinct_words) <= MAX_CATEGORIES:
            self.distinct_words.update(map(class_word, values))

    def _add_words_and_gaps(self, values: Iterable[Any]) -> None:
        counts = Counter(map(class_word, values))
        for word in [word for word in counts if is_missing(word)]:
            self.missing += counts.pop(word)
        self._add_words(counts)
        if self._parts is not None:
            numbers = table.parse_numbers(list(counts.elements()))
            self._parts = None if numbers is None else [*self._parts, numbers]

    @property
    def numbers(self) -> np.ndarray | None:
        return None if self._parts is None else np.concatenate(self._parts)

    @property
    def fill(self) -> float:
        return 0.0 if (values := self.numbers) is None else float(f"{np.median(values):.6g}")

    @property
    def has_decimal_commas(self) -> bool:
        words = self.distinct_words
        return any(map(DECIMAL_COMMA.fullmatch, words)) and all(map(NUMBER_WITH_SEPARATOR.fullmatch, words))

    def describe_unusable_values(self) -> str:
        """Return why the column cannot be an input, such as "looks like ids", or "" if it can."""
        present_count = self.rows - self.missing
        if not present_count:
            return "is empty"
        if len(self.distinct_words) == 1 and not self.missing:
            return "has only one value"
        if PERSONAL_COLUMN.search(self.name):
            return "looks like personal data"
        values = self.numbers
        if values is None:
            if self.has_decimal_commas:
                return COMMA_PROBLEM
            if all(map(DATE.fullmatch, self.distinct_words)):
                return "looks like dates"
            if len(self.distinct_words) > min(MAX_CATEGORIES, max(2, present_count // 2)):
                return "looks like ids, names or texts"
            return ""
        if len(np.unique(values)) < len(values) or (values != np.rint(values)).any():
            return ""
        is_count = present_count > 2 and (np.diff(values) == 1).all()
        return "looks like ids" if is_count or ID_COLUMN.search(self.name) else ""


def inspect_table(path: Path, label: str, notes: list[str]) -> dict[str, Any]:
    """Return the [data] keys that read a table, and append notes. Raise DataError without usable columns."""
    file = table.find_table(path, DataSpec(path=str(path)))
    columns: dict[str, Column] = {}
    for chunk in table.read_chunks(file):
        for name, values in chunk.columns.items():
            columns.setdefault(name, Column(name)).add_values(values)
    row_count = max((column.rows for column in columns.values()), default=0)
    if row_count < 2:
        raise DataError(f"{file} has {'one row' if row_count else 'a header but no rows'}: add a row for each example")
    label = label or _require_default_label(file, list(columns))
    is_words = label in columns and columns[label].numbers is None
    if is_words and (pair := _find_case_variants(columns[label].distinct_words)):
        notes.append(f"labels {pair[0]} and {pair[1]} differ only in case: write them alike if they are one class")
    table.require_columns(file, tuple(columns), "y", [label])
    settings = _settings_from_label_column(file, columns.pop(label))
    left_out = {name: problem for name, column in columns.items() if (problem := column.describe_unusable_values())}
    used_columns = [column for name, column in columns.items() if name not in left_out]
    if not used_columns:
        problem = _join_reasons(left_out) or f"{label} is the only column"
        raise DataError(f"{file} has no usable input column ({problem}): add others")
    number_columns = [column for column in used_columns if column.numbers is not None]
    word_columns = [column for column in used_columns if column.numbers is None]
    if number_columns:
        notes.append(f"numbers: {_shorten([column.name for column in number_columns])}")
    if word_columns:
        notes.append(
            "categories, an input for each word: "
            + _shorten([f"{column.name} ({len(column.distinct_words)})" for column in word_columns])
        )
    if left_out:
        notes.append(f"left out: {_join_reasons(left_out)}")
    for column in used_columns:
        if column.missing:
            treatment = "no category" if column in word_columns else f"filled with the median {column.fill:g}"
            notes.append(f"missing: {column.name} in {column.missing} of {column.rows} rows, {treatment}")
    fill = {column.name: column.fill for column in used_columns if column.missing}
    return {
        "y": label,
        "x": [column.name for column in used_columns],
        **settings,
        **({"categories": {column.name: AUTO for column in word_columns}} if word_columns else {}),
        **({"fill": fill} if fill else {}),
    }


def _find_case_variants(words: Iterable[str]) -> list[str]:
    words_by_key: dict[str, list[str]] = {}
    for word in sorted(words):
        words_by_key.setdefault(word.casefold(), []).append(word)
    return next((variants[:2] for variants in words_by_key.values() if len(variants) > 1), [])


def _require_default_label(file: Path, column_names: Sequence[str]) -> str:
    if "y" in column_names:
        return "y"
    raise DataError(
        f"{file} has no column 'y': name the column to predict, as in --label {column_names[-1]}; columns: "
        f"{_shorten(column_names)}"
    )


def _settings_from_label_column(file: Path, column: Column) -> dict[str, Any]:
    if column.missing:
        raise DataError(
            f"{file}: column {column.name!r} is missing in {column.missing} of {column.rows} rows: leave these rows out"
        )
    values, location = column.numbers, f"{file}, column {column.name!r}"
    if values is None:
        if column.has_decimal_commas:
            raise DataError(f"{location} has {COMMA_PROBLEM}")
        return {"labels": require_classes(list(column.distinct_words), column.rows, location)}
    if not (np.isfinite(values).all() and are_classes(np.unique(values), len(values))):
        return settings_from_labels(values, location)
    labels = sorted(column.distinct_words, key=lambda label: (float(label), label))
    if len(labels) > MAX_CATEGORIES or labels == [str(class_) for class_ in range(len(labels))]:
        return {}
    for label, next_label in itertools.pairwise(labels):
        if float(label) == float(next_label):
            is_equal = Decimal(label) == Decimal(next_label)
            fix = "write each class in one way" if is_equal else "write large classes as words"
            raise DataError(
                f"{location}: {label} and {next_label} are the same {'' if is_equal else '64-bit '}number: {fix}"
            )
    return {"labels": labels}


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _join_reasons(problems: dict[str, str]) -> str:
    names_by_problem: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names_by_problem.setdefault(problem, []).append(toml.key_text(name))
    return ", ".join(f"{_shorten(names)} ({problem})" for problem, names in names_by_problem.items())


MAX_DISTINCT_CLASSES: Final = 20  # different whole numbers that are classes in any case
MAX_LISTED_CLASSES: Final = 10  # classes whose examples are listed
MAX_CLASS_RATIO: Final = 10.0  # ratio of the largest to the smallest class that adds a warning


def settings_from_labels(y: np.ndarray, location: str) -> dict[str, Any]:
    """Return the [data] keys `task`, `labels` and `target` that fit stored labels, or raise DataError."""
    if not y.size:
        raise DataError(f"{location} has no labels (shape {y.shape}): add an example with a label")
    if y.dtype.kind == "f" and (gaps := len(y) - int(np.isfinite(y.reshape(len(y), -1)).all(axis=1).sum())):
        raise DataError(f"{location}: {gaps} of {len(y)} labels are NaN or infinity: leave these examples out")
    if y.ndim > 2:
        raise DataError(f"{location}: labels have shape {y.shape}: save one label, or a row of them, for each example")
    if y.ndim == 2:
        return _settings_from_label_rows(y, location)
    kinds = np.unique(y)
    if y.dtype.kind in "USb":
        return {"labels": require_classes([str(label) for label in kinds], len(y), location)}
    if not are_classes(kinds, len(y)):
        return _regression_settings(y.reshape(-1, 1))
    if y.dtype.kind != "f" and list(kinds) == list(range(len(kinds))):
        return {}
    return {"labels": [str(label) for label in kinds]}


def _settings_from_label_rows(y: np.ndarray, location: str) -> dict[str, Any]:
    label_shape = f"{location}: labels have shape {y.shape}"
    if y.dtype.kind in "US" or (y.shape[1] == 1 and are_classes(np.unique(y), len(y))):
        fix = "y.reshape(-1)" if y.shape[1] == 1 else "one column of them"
        raise DataError(f"{label_shape}, but a class is one label for each example: save {fix}")
    if y.shape[1] == 1 or not np.isin(y, (0, 1)).all():
        return _regression_settings(y)
    if (y.sum(axis=1) == 1).all():
        raise DataError(f"{label_shape} with exactly one 1 in each row, which are classes: save y.argmax(axis=1)")
    return {"task": "labels"}


def require_classes(labels: Sequence[str], count: int, location: str) -> list[str]:
    if len(labels) > min(MAX_CATEGORIES, max(2, count // 2)):
        problem = f"{len(labels)} different labels in {count} examples are too many for classes"
        raise DataError(f"{location}: {problem}: choose another --label")
    return sorted(labels)


def are_classes(kinds: np.ndarray, count: int) -> bool:
    """Return whether `count` labels with these distinct values are classes rather than measurements."""
    if not len(kinds) or (kinds != np.rint(kinds)).any():
        return False
    return len(kinds) <= MAX_DISTINCT_CLASSES or (
        list(kinds) == list(range(len(kinds))) and MAX_DISTINCT_CLASSES * len(kinds) <= count
    )


def _regression_settings(y: np.ndarray) -> dict[str, Any]:
    mean, std = y.mean(axis=0, dtype=np.float64), y.std(axis=0, dtype=np.float64)
    return {
        "task": "regression",
        "target": {
            "mean": [float(f"{value:.6g}") for value in mean],
            "std": [float(f"{value:.6g}") or 1.0 for value in std],
        },
    }


def describe_labels(y: np.ndarray, data: Mapping[str, Any]) -> str:
    if data.get("task") == "regression":
        mean, std = (", ".join(f"{value:g}" for value in data["target"][key]) for key in ("mean", "std"))
        return f"predicted: a number, scaled by its mean {mean} and standard deviation {std}, the unit of errors"
    if data.get("task") == "labels":
        return f"predicted: {y.shape[1]} labels that apply or not"
    counts = np.bincount(y)
    names: Sequence[str] = data.get("labels") or [str(kind) for kind in range(len(counts))]
    nonzero_counts = counts[counts > 0]
    if len(names) <= MAX_LISTED_CLASSES:
        counts_by_name = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=False))
    else:
        counts_by_name = f"{nonzero_counts.min()} to {nonzero_counts.max()} examples each"
    unequal = (
        "; unequal, so read the balanced accuracy too"
        if nonzero_counts.max() >= MAX_CLASS_RATIO * nonzero_counts.min()
        else ""
    )
    return f"predicted: {len(names)} classes ({counts_by_name}){unequal}"
