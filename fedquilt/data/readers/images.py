"""Image data sets: IDX files, folders by class, and torchvision's data sets."""

from __future__ import annotations

import gzip
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.core import DataError
from fedquilt.data import images
from fedquilt.data.readers import files
from fedquilt.data.readers import pixels as readers_pixels
from fedquilt.data.readers.base import BROKEN, Bytes, ExampleReader, convert_labels, convert_read_errors, read_rows
from fedquilt.data.spec import DataSpec

IDX_IMAGES = re.compile(r"(.*)images([-.])idx3-ubyte(\.gz)?$")

# -- IDX, the format of MNIST ---------------------------------------------------------------------


def open_idx(path: Path, spec: DataSpec) -> ExampleReader:
    if path.is_dir():
        wanted = ("t10k", "test") if spec.split == "test" else (spec.split,)
        found = [file for file in find_idx_images(path) if any(part in file.name for part in wanted)]
        if len(found) != 1:
            have = ", ".join(file.name for file in find_idx_images(path)) or "none"
            raise DataError(f"{path}: one IDX file of images for split {spec.split!r} is wanted; it has {have}")
        path = found[0]
    match = IDX_IMAGES.match(path.name)
    if match is None:
        raise DataError(f"{path}: an IDX file of images is named like train-images-idx3-ubyte, or so with .gz")
    beside = path.with_name(f"{match[1]}labels{match[2]}idx1-ubyte{match[3] or ''}")
    if not beside.is_file():
        raise DataError(f"{path} has no labels: {beside.name} is not beside it")
    with convert_read_errors(beside), _open_stream(beside) as stream:
        (count,) = _read_idx_header(stream, beside, 1)
        labels = read_rows(stream, (count,), np.dtype(np.uint8), np.arange(count))
    with convert_read_errors(path), _open_stream(path) as stream:
        shape = _read_idx_header(stream, path, 3)
    if shape[0] != count:
        raise DataError(f"{path} holds {shape[0]} images, {beside.name} {count} labels: they do not match")

    def take(rows: np.ndarray) -> np.ndarray:
        with convert_read_errors(path), _open_stream(path) as stream:
            return read_rows(stream, _read_idx_header(stream, path, 3), np.dtype(np.uint8), rows)

    return ExampleReader(convert_labels(labels, beside), take, shape[1:], np.dtype(np.uint8))


def find_idx_images(path: Path) -> list[Path]:
    """Return the IDX image files in a folder and its subfolder `raw`, uncompressed ones first.

    Of a file that exists in both forms, only one is returned.
    """
    found: dict[str, Path] = {}
    for folder in (path, path / "raw"):
        for file in sorted(folder.glob("*")) if folder.is_dir() else ():
            if IDX_IMAGES.match(file.name):
                found.setdefault(file.name.removesuffix(".gz"), file)
    return list(found.values())


def _read_idx_header(stream: Bytes, path: Path, dimensions: int) -> tuple[int, ...]:
    # Two zero bytes, the type (8 is unsigned byte), the rank, then the sizes as big-endian uint32.
    head = stream.read(4 * (1 + dimensions))
    if len(head) < 4 * (1 + dimensions) or head[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: fetch it anew")
    return tuple(int(size) for size in np.frombuffer(head, ">u4")[1:])


def _open_stream(path: Path) -> Bytes:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


# -- image files, torchvision ---------------------------------------------------------------------


def open_folder(path: Path, spec: DataSpec) -> ExampleReader:
    found, labels, owner = files.find_files_by_class(path, spec, readers_pixels.SUFFIXES, "images")
    reader = _make_image_reader(labels, lambda row: readers_pixels.read_image(found[row], spec.size, spec.depth), path)
    return replace(reader, owner=owner)


def open_torchvision(path: Path, spec: DataSpec) -> ExampleReader:
    from fedquilt.host.torchvision_compat import import_torchvision

    import_torchvision()
    from torchvision import datasets

    kind = getattr(datasets, spec.dataset, None)
    if not isinstance(kind, type):
        raise DataError(f"torchvision has no data set {spec.dataset!r}: set [data] dataset, to MNIST or CIFAR10, say")
    taken = inspect.signature(kind).parameters
    options: dict[str, Any] = {"train": spec.split == "train"} if "train" in taken else {"split": spec.split}
    if "download" in taken:
        options["download"] = spec.download
    try:
        held = kind(str(path), **options)
    except (RuntimeError, *BROKEN) as error:
        raise DataError(f"{spec.dataset} in {path}: {error}; or set [data] download = true") from None
    labels = next((getattr(held, name) for name in ("targets", "labels", "_labels") if hasattr(held, name)), None)
    if labels is None:
        raise DataError(f"torchvision's {spec.dataset} does not list its labels: give it as a folder of images")

    def read_pixels(row: int) -> np.ndarray:
        pixels = readers_pixels.pixels_from_image(
            held[row][0], f"{spec.dataset}, image {row}", spec.depth, keep_grey=True
        )
        return images.resize_images(pixels[None], spec.size)[0] if spec.size else pixels

    return _make_image_reader(convert_labels(np.asarray(labels), path), read_pixels, path)


def _make_image_reader(y: np.ndarray, image: Callable[[int], np.ndarray], path: Path) -> ExampleReader:
    """Return a reader that decodes images one by one. The first image gives the shape of all."""
    if not len(y):
        raise DataError(f"{path} holds no images of this split")
    first = image(0)
    return ExampleReader(y, lambda rows: _stack_images(path, image, rows), first.shape, first.dtype)


def _stack_images(path: Path, image: Callable[[int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return the images of these rows as one array (rows, h, w[, 3])."""
    first = image(int(rows[0])) if len(rows) else np.zeros((0, 0), np.uint8)
    result = np.empty((len(rows), *first.shape), first.dtype)
    for place, row in enumerate(rows):
        pixels = image(int(row))
        if pixels.shape != first.shape:
            raise DataError(f"{path}: images of {pixels.shape[:2]} and {first.shape[:2]} pixels: set [data] size")
        result[place] = pixels
    return result
