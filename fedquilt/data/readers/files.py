"""Files in a folder for each class: images, recordings, texts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.spec import DataSpec


def by_class(path: Path, spec: DataSpec, suffixes: Collection[str], what: str) -> tuple[list[Path], np.ndarray]:
    """Find files of <path>/<split>/<class>/, or of <path>/<class>/ for the training split; with their classes (n,).

    Classes are those of the training split's folders in order of name, or as [data] labels lists them, so that all
    splits number them alike.

    Args:
        path: of the data set.
        spec: gives the split and the names of classes.
        suffixes: endings of the files' names, in small letters.
        what: their name in errors: "images".

    Raises:
        DataError: there are none, or a folder is no class to train on.
    """
    root = path / spec.split if (path / spec.split).is_dir() else path
    if root == path and spec.split != "train":
        raise DataError(f"{path} has no folder {spec.split!r}: put its {what} in {path / spec.split}/<class>/")
    numbered = spec.labels or tuple(subfolders(path / "train" if (path / "train").is_dir() else root))
    if unknown := sorted(set(subfolders(root)) - set(numbered)):
        raise DataError(f"{root}: class {unknown[0]!r} is not among those to train on: {', '.join(numbered)}")
    files = [
        (file, label)
        for label, name in enumerate(numbered)
        for file in sorted((root / name).glob("*"))
        if file.suffix.lower() in suffixes
    ]
    if not files:
        raise DataError(f"{root} holds no {what}: put them in {root}/<class>/, as {', '.join(sorted(suffixes))}")
    return [file for file, _ in files], np.array([label for _, label in files], np.int64)


def subfolders(path: Path) -> list[str]:
    """Names of the folders in a folder, without hidden ones, sorted."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
