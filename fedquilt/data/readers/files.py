"""Files of examples in a folder per class: images, recordings and texts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.spec import DataSpec


def find_files_by_class(
    path: Path, spec: DataSpec, suffixes: Collection[str], what: str
) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    """Find the files of <path>/<split>/<class>/, and return them with their classes and users, each (n,).

    The training split may also be in <path>/<class>/. With [data] column, each class has a folder for each user.
    Classes are numbered by [data] labels, or by the sorted folder names of the training split.

    Args:
        path: Folder of the data set.
        spec: Split and class names.
        suffixes: File name suffixes in lower case.
        what: Noun for the files in errors, such as "images".

    Raises:
        DataError: If there are no files, or a folder is not a class of the training split.
    """
    root = path / spec.split if (path / spec.split).is_dir() else path
    if root == path and spec.split != "train":
        raise DataError(f"{path} has no folder {spec.split!r}: put its {what} in {path / spec.split}/<class>/")
    numbered = spec.labels or tuple(list_subfolders(path / "train" if (path / "train").is_dir() else root))
    if unknown := sorted(set(list_subfolders(root)) - set(numbered)):
        raise DataError(f"{root}: class {unknown[0]!r} is not among those to train on: {', '.join(numbered)}")
    files = [
        (file, label)
        for label, name in enumerate(numbered)
        for file in sorted((root / name).glob("*/*" if spec.column else "*"))
        if file.suffix.lower() in suffixes
    ]
    if not files:
        place = f"{root}/<class>/" + (f"<{spec.column}>/" if spec.column else "")
        raise DataError(f"{root} holds no {what}: put them in {place}, as {', '.join(sorted(suffixes))}")
    owner = np.array([file.parent.name for file, _ in files]) if spec.column else None
    return [file for file, _ in files], np.array([label for _, label in files], np.int64), owner


def list_subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
