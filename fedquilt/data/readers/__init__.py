"""Readers of examples: npz, IDX, folders of images, torchvision's data sets, tables, recordings, texts. Never a pickle.

A reader loads all labels, and the inputs of chosen rows only: from npz and IDX as a stream,
block by block, so that a device with a hundredth of a data set never holds the rest. One file for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from fedquilt.core import DataError
from fedquilt.data.readers import audio, files, image_file, images, npz, outside, table, text
from fedquilt.data.readers.base import Reader, reading
from fedquilt.data.readers.table import words
from fedquilt.data.spec import DataSpec

__all__ = ["Reader", "image_depth", "open_", "require_supported_images", "words"]

TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}  # by suffix
OPENERS: dict[str, Callable[[Path, DataSpec], Reader]] = {
    "npz": npz.open_,
    "idx": images.idx,
    "folder": images.open_folder,
    "torchvision": images.open_torchvision,
    "csv": table.open_,
    "parquet": table.open_,
    "audio": audio.open_,
    "text": text.open_,
}
BY_CLASS = ("idx", "folder", "torchvision")  # kinds with classes only


def open_(spec: DataSpec) -> Reader:
    """Open the reader for the content of the spec's path.

    Raises:
        DataError: nothing is there, or nothing readable; names the file and the mend.
    """
    if not spec.path:
        return outside.open_(spec)
    path = Path(spec.path)
    with reading(path):  # in a folder closed to this user, no file can even be looked for
        kind = spec.format if spec.format != "auto" else _kind(path, spec)
        if kind != "torchvision" and not path.exists():
            raise DataError(
                f"no data at {path}: set [data] path to a .npz or IDX file, a table, or a folder of images by class"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is a device or a pipe, which has no end: set [data] path to a file or a folder")
        if kind in BY_CLASS and spec.task != "classes":
            raise DataError(f"{path}: {kind} has a class for each example: leave task = {spec.task!r} out")
        return OPENERS[kind](path, spec)


def image_depth(spec: DataSpec) -> int:
    """Return the bits of a grey level in the training images of a folder, or 0 for 8-bit images and other data.

    Raises:
        DataError: If the folder holds no images, or an image cannot be decoded.
    """
    return image_file.measure_grey_depth(_image_files(msgspec.structs.replace(spec, split="train")))


def require_supported_images(spec: DataSpec) -> None:
    """Check the header of each image in a folder. Other data have no such headers.

    Raises:
        DataError: If an image is of a kind that cannot be read.
    """
    image_file.require_supported(_image_files(spec))


def _image_files(spec: DataSpec) -> list[Path]:
    """Return the image files of a folder, or [] for other data, and without Pillow, which the reader reports."""
    path = Path(spec.path)
    with reading(path):
        if not image_file.has_pillow() or (spec.format if spec.format != "auto" else _kind(path, spec)) != "folder":
            return []
        return files.by_class(path, spec, image_file.SUFFIXES, "images")[0]


def _kind(path: Path, spec: DataSpec) -> str:
    if spec.dataset:
        return "torchvision"
    if spec.audio is not None:
        return "audio"
    if spec.text is not None:
        return "text"
    if path.is_dir():
        if images.idx_files(path):
            return "idx"
        return next((TABLES[file.suffix] for file in table.split_files(path, spec.split)), "folder")
    return TABLES.get(path.suffix.lower(), "idx" if images.IDX_IMAGES.match(path.name) else "npz")
