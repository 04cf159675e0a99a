"""Common parts of readers: labels, access to inputs by row, and reading of streams in blocks."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from fedquilt.core import DataError, TaskKind
from fedquilt.data.spec import DataSpec

Bytes: TypeAlias = "IO[bytes] | gzip.GzipFile"
BLOCK_BYTES = 2**20
WHOLE_NUMBER = re.compile(r"-?\d+")
MAX_NAMED_CLASSES = 50  # classes that an error lists
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)  # raised by damaged files


@dataclass(frozen=True)
class ExampleReader:
    """Labels of a data set, with a function `take` that reads the inputs (rows, *shape) of any rows.

    Labels are (n,) int64 of classes, (n, k) float32 of a regression, (n, k) uint8 of several labels.
    """

    y: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]
    shape: tuple[int, ...]  # of one example
    dtype: np.dtype[Any]
    origin: np.ndarray | None = None  # (n,): source of each example
    owner: np.ndarray | None = None  # (n,) of words: user of each example
    features: tuple[str, ...] = ()  # of a table: names of the values of its last axis
    tokens: int = 0  # of texts: size of the vocabulary


def read_rows(stream: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any], rows: np.ndarray) -> np.ndarray:
    """Return rows of an array in the order of `rows`, or raise EOFError if the stream ends early."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    result = np.empty((len(rows), *shape[1:]), dtype)
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    block_rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], block_rows):
        count = min(block_rows, shape[0] - start)
        block = stream.read(count * row_bytes)
        if len(block) < count * row_bytes:
            raise EOFError(f"file ends in row {start + len(block) // max(1, row_bytes)} of {shape[0]}")
        low, high = np.searchsorted(rows, (start, start + count))
        result[order[low:high]] = np.frombuffer(block, dtype).reshape(count, *shape[1:])[rows[low:high] - start]
    return result


def describe_class_problem(y: np.ndarray, classes: int | None = None, *, is_table: bool = False) -> str:
    """Return a problem of the class numbers with its fix, or "" if all are from 0 to `classes` - 1.

    If `classes` is None, the largest number is not limited.
    """
    kinds = np.unique(y)
    if not len(kinds) or (kinds[0] >= 0 and (classes is None or kinds[-1] < classes)):
        return ""
    low, high, count = int(kinds[0]), int(kinds[-1]), len(kinds)
    if classes is not None and count > classes:
        return f"there are {count} classes: set [model] classes = {max(high + 1, count)}, and prepare again"
    if low >= 1 and high in (count, classes):
        problem, fix = "the labels are counted from 1", "subtract 1 from each label"
    elif (low, high, count) == (-1, 1, 2):
        problem, fix = "the labels are -1 and 1", "write 0 for -1"
    else:
        problem = "the labels have gaps" if low >= 0 else "there are labels below 0"
        fix = f"number the {count} classes from 0 to {count - 1}"
    if is_table and count <= MAX_NAMED_CLASSES:
        fix = f"set [data] labels = {json.dumps([str(kind) for kind in kinds])}, or {fix}"
    return f"{problem}: {fix}"


def number_labels(y: np.ndarray, path: Path | str, names: Sequence[str]) -> np.ndarray:
    """Return each label's index among the class names, (n,), or raise DataError for an unknown label.

    If no name is a number, whole-number labels are indices already.
    """
    kinds, kind_indices = np.unique(y, return_inverse=True)
    index_by_name = {name: class_index for class_index, name in enumerate(names)}
    if y.dtype.kind in "ui" and not any(map(WHOLE_NUMBER.fullmatch, names)):
        index_by_name = {str(class_index): class_index for class_index in range(len(names))}
    if unknown := [str(kind) for kind in kinds if str(kind) not in index_by_name]:
        raise DataError(f"{path}: label {unknown[0]!r} is not in [data] labels ({', '.join(names)}): add or correct it")
    return np.array([index_by_name[str(kind)] for kind in kinds], np.int64)[kind_indices]


def convert_labels(y: np.ndarray, path: Path | str, task: TaskKind = "classes") -> np.ndarray:
    """Return labels in the type of their task, or raise DataError.

    Classes become int64 (n,), several labels uint8 (n, outputs), and regression targets float32 (n, outputs).
    """
    description = f"{path}: labels of type {y.dtype}, shape {y.shape}"
    if task == "classes":
        if y.ndim != 1 or y.dtype.kind not in "ui" or (len(y) and y.min() < 0):
            fix = "for numbers to predict set [data] task = 'regression'" if y.dtype.kind == "f" else ""
            if y.ndim == 1 and y.dtype.kind == "i":
                fix = describe_class_problem(y)
            if y.ndim == 1 and y.dtype.kind == "U" and len(kinds := np.unique(y)) <= MAX_NAMED_CLASSES:
                fix = f"set [data] labels = {json.dumps(kinds.tolist(), ensure_ascii=False)}"
            raise DataError(f"{description}: each example needs one whole number from 0{f' ({fix})' if fix else ''}")
        return y.astype(np.int64)
    if y.ndim not in (1, 2) or (not len(y[:1].reshape(-1)) and len(y)):
        raise DataError(f"{description}: task = {task!r} requires a number or a row of numbers for each example")
    matrix = y.reshape(len(y), -1)
    if task == "labels":
        if invalid := [str(value) for value in np.unique(matrix) if value not in (0, 1)]:
            raise DataError(f"{description}: task = 'labels' requires 0 or 1, not {invalid[0]}")
        return matrix.astype(np.uint8)
    targets = matrix.astype(np.float32)
    if len(invalid_rows := np.flatnonzero(~np.isfinite(targets).all(axis=1))):
        raise DataError(f"{path}: the label of example {invalid_rows[0]} is NaN or infinity: leave such examples out")
    return targets


@contextmanager
def convert_read_errors(path: Path, *extra_errors: type[Exception]) -> Iterator[None]:
    """Convert READ_ERRORS and `extra_errors` in a `with` block to a DataError that names the file."""
    kinds: tuple[type[Exception], ...] = (*READ_ERRORS, *extra_errors)
    try:
        yield
    except kinds as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "incomplete file"
        raise DataError(f"cannot read {path}: {reason}") from None


def find_files_by_class(
    path: Path, spec: DataSpec, suffixes: Collection[str], noun: str
) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    """Return the files in <path>/<split>/<class>/, their classes (n,), and their users (n,) or None.

    The training split may also be in <path>/<class>/. With [data] column, each class has a folder for each user.
    Classes are numbered by [data] labels, or by the sorted folder names of the training split. Raise DataError if there
    are no such files. `noun` names the files in the error.
    """
    root = path / spec.split if (path / spec.split).is_dir() else path
    if root == path and spec.split != "train":
        raise DataError(f"{path} has no folder {spec.split!r}: put its {noun} in {path / spec.split}/<class>/")
    class_names = spec.labels or tuple(list_subfolders(path / "train" if (path / "train").is_dir() else root))
    if unknown := sorted(set(list_subfolders(root)) - set(class_names)):
        raise DataError(f"{root}: class {unknown[0]!r} is not a training class: choose among {', '.join(class_names)}")
    files = [
        (file, label)
        for label, name in enumerate(class_names)
        for file in sorted((root / name).glob("*/*" if spec.column else "*"))
        if file.suffix.lower() in suffixes
    ]
    if not files:
        expected_path = f"{root}/<class>/" + (f"<{spec.column}>/" if spec.column else "")
        raise DataError(f"{root} has no {noun}: put {', '.join(sorted(suffixes))} files in {expected_path}")
    owner = np.array([file.parent.name for file, _ in files]) if spec.column else None
    return [file for file, _ in files], np.array([label for _, label in files], np.int64), owner


def list_subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
