"""Choice of classes, several labels or numbers to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.measured_settings import MOST

FEW: Final = 20  # different whole numbers that are classes in any case
LISTED: Final = 10  # classes whose examples are listed
UNEQUAL: Final = 10.0  # the largest class by the smallest from which a note warns


def choose_settings(y: np.ndarray, where: str) -> dict[str, Any]:
    """Return the [data] keys `task`, `labels` and `target` that fit stored labels.

    Args:
        y: Labels (n,) of numbers or words, or (n, k) of numbers.
        where: Name of the data in errors.

    Raises:
        DataError: If there is no label, one is NaN or infinity, words differ too much to be classes, or the shape fits
            no task.
    """
    if not y.size:
        raise DataError(f"{where} has no labels (shape {y.shape}): add an example with a label")
    if y.dtype.kind == "f" and (gaps := len(y) - int(np.isfinite(y.reshape(len(y), -1)).all(axis=1).sum())):
        raise DataError(f"{where}: {gaps} of {len(y)} labels are NaN or infinity: leave these examples out")
    if y.ndim > 2:
        raise DataError(f"{where}: labels have shape {y.shape}: save one label, or a row of them, for each example")
    if y.ndim == 2:
        return _choose_row_settings(y, where)
    kinds = np.unique(y)
    if y.dtype.kind in "USb":
        return {"labels": require_classes([str(kind) for kind in kinds], len(y), where)}
    if not are_classes(kinds, len(y)):
        return _regression_settings(y.reshape(-1, 1))
    if y.dtype.kind != "f" and list(kinds) == list(range(len(kinds))):
        return {}
    return {"labels": [str(kind) for kind in kinds]}


def _choose_row_settings(y: np.ndarray, where: str) -> dict[str, Any]:
    """Return the settings of several numbers for each example."""
    said = f"{where}: labels have shape {y.shape}"
    if y.dtype.kind in "US" or (y.shape[1] == 1 and are_classes(np.unique(y), len(y))):
        fix = "y.reshape(-1)" if y.shape[1] == 1 else "one column of them"
        raise DataError(f"{said}, and classes are one label for each example: save {fix}")
    if y.shape[1] == 1 or not np.isin(y, (0, 1)).all():
        return _regression_settings(y)
    if (y.sum(axis=1) == 1).all():
        raise DataError(f"{said} with exactly one 1 in each row, which are classes: save y.argmax(axis=1)")
    return {"task": "labels"}


def require_classes(words: Sequence[str], count: int, where: str) -> list[str]:
    """Return the names of the classes, which are the sorted words.

    Raises:
        DataError: If words differ too much to be classes of `count` examples.
    """
    if len(words) > min(MOST, max(2, count // 2)):
        raise DataError(f"{where}: {len(words)} different labels in {count} examples are no classes: name another")
    return sorted(words)


def are_classes(kinds: np.ndarray, count: int) -> bool:
    """Return whether different numbers are classes of `count` examples, rather than numbers to predict."""
    if not len(kinds) or (kinds != np.rint(kinds)).any():
        return False
    return len(kinds) <= FEW or (list(kinds) == list(range(len(kinds))) and FEW * len(kinds) <= count)


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
    """Return a sentence on the labels.

    Args:
        y: Labels as a reader returns them.
        data: The [data] table.
    """
    if data.get("task") == "regression":
        mean, std = (", ".join(f"{value:g}" for value in data["target"][key]) for key in ("mean", "std"))
        return f"predicted: a number, scaled by its mean {mean} and standard deviation {std}, the unit of errors"
    if data.get("task") == "labels":
        return f"predicted: {y.shape[1]} labels that apply or not"
    counts = np.bincount(y)
    names: Sequence[str] = data.get("labels") or [str(kind) for kind in range(len(counts))]
    there = counts[counts > 0]
    if len(names) <= LISTED:
        said = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=False))
    else:
        said = f"{there.min()} to {there.max()} examples each"
    unequal = "; unequal, so read the balanced accuracy too" if there.max() >= UNEQUAL * there.min() else ""
    return f"predicted: {len(names)} classes ({said}){unequal}"
