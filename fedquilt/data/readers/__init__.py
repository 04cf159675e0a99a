"""Readers of examples: .npz, IDX, image folders, torchvision, tables, recordings and texts.

A reader loads all labels, but only the inputs of selected rows: .npz and IDX files are streamed block by block, so that
a device never loads the other devices' examples. No reader loads a pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from fedquilt.core import DataError
from fedquilt.data.readers import audio, files, images, npz, pixels, plugin, table, text
from fedquilt.data.readers.base import ExampleReader, convert_read_errors
from fedquilt.data.readers.table import category_words
from fedquilt.data.spec import SKLEARN, DataSpec
from fedquilt.formats import toml

__all__ = [
    "ExampleReader",
    "category_words",
    "detect_format",
    "measure_image_depth",
    "open_reader",
    "require_supported_images",
]

TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}  # by suffix
OPENERS: dict[str, Callable[[Path, DataSpec], ExampleReader]] = {
    "npz": npz.open_npz,
    "idx": images.open_idx,
    "folder": images.open_folder,
    "torchvision": images.open_torchvision,
    "csv": table.open_table,
    "parquet": table.open_table,
    "audio": audio.open_recordings,
    "text": text.open_texts,
}
BY_CLASS = ("idx", "folder", "torchvision")  # kinds with classes only


def open_reader(spec: DataSpec) -> ExampleReader:
    reader = _open_stored(spec)
    if spec.target is None:
        return reader
    mean, std = np.array(spec.target.mean), np.array(spec.target.std)
    if not len(mean) == len(std) == reader.y.shape[1]:
        raise DataError(
            f"{spec.source_name}: [data] target needs one mean and std for each of {reader.y.shape[1]} numbers"
        )
    return replace(reader, y=((reader.y - mean) / std).astype(np.float32))


def _open_stored(spec: DataSpec) -> ExampleReader:
    if spec.dataset.startswith(SKLEARN):
        return plugin.open_sklearn_data(spec)
    if not spec.path:
        return plugin.open_plugin_data(spec)
    path = Path(spec.path)
    with convert_read_errors(path):  # in a folder closed to this user, no file can even be looked for
        kind = detect_format(path, spec)
        if kind != "torchvision" and not path.exists():
            fix = toml.suggest_file(path) or (
                ": set [data] path to a .npz or IDX file, a table, or a folder of images by class"
            )
            raise DataError(f"no data at {path}{fix}")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is a device or a pipe, which has no end: set [data] path to a file or a folder")
        if kind in BY_CLASS and spec.task != "classes":
            raise DataError(f"{path}: {kind} has a class for each example: leave task = {spec.task!r} out")
        return OPENERS[kind](path, spec)


def measure_image_depth(spec: DataSpec) -> int:
    """Return the bits of a grey level in a folder's training images, or 0 for 8-bit images.

    Other data have the depth 0.

    Raises:
        DataError: If the folder has no images, or an image cannot be decoded.
    """
    return pixels.measure_grey_depth(_list_image_files(msgspec.structs.replace(spec, split="train")))


def require_supported_images(spec: DataSpec) -> None:
    """Check the header of each image in a folder. Do nothing for other data.

    Raises:
        DataError: If an image is of a kind that cannot be read.
    """
    pixels.require_supported_files(_list_image_files(spec))


def _list_image_files(spec: DataSpec) -> list[Path]:
    """Return the images of a folder by class, or [] for other data or without Pillow."""
    path = Path(spec.path)
    with convert_read_errors(path):
        if not pixels.has_pillow() or detect_format(path, spec) != "folder":
            return []
        return files.find_files_by_class(path, spec, pixels.SUFFIXES, "images")[0]


def detect_format(path: Path, spec: DataSpec) -> str:
    if spec.dataset:
        return "torchvision"
    if spec.audio is not None:
        return "audio"
    if spec.text is not None:
        return "text"
    if path.is_dir():
        if images.find_idx_images(path):
            return "idx"
        return next((TABLES[file.suffix] for file in table.find_split_tables(path, spec.split)), "folder")
    return TABLES.get(path.suffix.lower(), "idx" if images.IDX_IMAGES.match(path.name) else "npz")
