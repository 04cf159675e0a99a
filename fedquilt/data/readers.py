"""Reading examples: npz, IDX, folders of images, torchvision's data sets. Never a pickle.

A reader knows all labels, and reads the inputs of chosen rows only: from npz and IDX as a stream,
block by block, so that a device that owns a hundredth of a data set never holds the rest.
"""

from __future__ import annotations

import gzip
import inspect
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from fedquilt.core import DataError
from fedquilt.data.spec import DataSpec

Bytes: TypeAlias = "IO[bytes] | gzip.GzipFile"
BLOCK_BYTES = 2**20
IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
IDX_IMAGES = re.compile(r"(.*)images([-.])idx3-ubyte(\.gz)?$")
BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)  # what damaged files raise


@dataclass(frozen=True)
class Reader:
    """Labels (n,) int64, and a function from rows, in any order, to their inputs (rows, *shape)."""

    y: np.ndarray
    take: Callable[[np.ndarray], np.ndarray]
    shape: tuple[int, ...]  # of one example
    dtype: np.dtype[Any]
    origin: np.ndarray | None = None  # (n,): which of several sources each is from


def open_(spec: DataSpec) -> Reader:
    """The reader for what is at the spec's path.

    Raises:
        DataError: nothing is there, or nothing that can be read; names the file and the mend.
    """
    path = Path(spec.path)
    with _reading(path):  # in a folder that is shut to this user, nothing can even be looked for
        kind = spec.format if spec.format != "auto" else _kind(path, spec)
        if kind != "torchvision" and not path.exists():
            raise DataError(f"no data at {path}: set [data] path to a .npz or IDX file, or a folder of images by class")
        return {"npz": _npz, "idx": _idx, "folder": _folder, "torchvision": _torchvision}[kind](path, spec)


def _kind(path: Path, spec: DataSpec) -> str:
    if spec.dataset:
        return "torchvision"
    if path.is_dir():
        return "idx" if _idx_files(path) else "folder"
    return "idx" if IDX_IMAGES.match(path.name) else "npz"


# -- npz ------------------------------------------------------------------------------------------


def _npz(path: Path, spec: DataSpec) -> Reader:
    with _reading(path), zipfile.ZipFile(path) as archive:
        names = [Path(name).stem for name in archive.namelist() if name.endswith(".npy")]
        x, y = (_key(path, spec, letter, names) for letter in "xy")
        with archive.open(f"{y}.npy") as stream:
            head = _npy_header(stream, path, y)
            labels = _rows(stream, *head, np.arange(head[0][0]))
        with archive.open(f"{x}.npy") as stream:
            shape, dtype = _npy_header(stream, path, x)
    if len(labels) != shape[0]:
        raise DataError(f"{path}: {x} has {shape[0]} examples and {y} {len(labels)} labels: give one label for each")

    def take(rows: np.ndarray) -> np.ndarray:
        with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{x}.npy") as stream:
            return _rows(stream, *_npy_header(stream, path, x), rows)

    return Reader(_labels(labels, path), take, shape[1:], dtype)


def _key(path: Path, spec: DataSpec, letter: str, names: Sequence[str]) -> str:
    """The array of inputs ("x") or labels ("y"): the one named, else x_<split>, else x for the training split."""
    given = spec.x if letter == "x" else spec.y
    tried = [given] if given else [f"{letter}_{spec.split}", *([letter] if spec.split == "train" else [])]
    for name in tried:
        if name in names:
            return name
    raise DataError(f"{path} holds {', '.join(names) or 'no arrays'}, not {' or '.join(tried)}: set [data] {letter}")


def _npy_header(stream: Bytes, path: Path, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that follows in the stream."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise DataError(f"{path}: {name} is in .npy version {version}; save it as a plain array of numbers")
    shape, fortran, dtype = read(stream)
    if dtype.kind not in "uifb":
        held = "Python objects" if dtype.hasobject else f"values of type {dtype}"
        mend = "with all examples of one shape, save np.stack(...)" if dtype.hasobject else "save them as numbers"
        raise DataError(f"{path}: {name} holds {held}, and numbers are wanted: {mend}")
    if not shape:
        raise DataError(f"{path}: {name} is a single number, and an array with a row for each example is wanted")
    if fortran:
        raise DataError(f"{path}: {name} lies in Fortran order: save np.ascontiguousarray({name})")
    return shape, dtype


# -- IDX, the format of MNIST ---------------------------------------------------------------------


def _idx(path: Path, spec: DataSpec) -> Reader:
    if path.is_dir():
        wanted = ("t10k", "test") if spec.split == "test" else (spec.split,)
        found = [file for file in _idx_files(path) if any(part in file.name for part in wanted)]
        if len(found) != 1:
            have = ", ".join(file.name for file in _idx_files(path)) or "none"
            raise DataError(f"{path}: one IDX file of images for split {spec.split!r} is wanted; it has {have}")
        path = found[0]
    match = IDX_IMAGES.match(path.name)
    if match is None:
        raise DataError(f"{path}: an IDX file of images is named like train-images-idx3-ubyte, or so with .gz")
    beside = path.with_name(f"{match[1]}labels{match[2]}idx1-ubyte{match[3] or ''}")
    if not beside.is_file():
        raise DataError(f"{path} has no labels: {beside.name} is not beside it")
    with _reading(beside), _opened(beside) as stream:
        (count,) = _idx_header(stream, beside, 1)
        labels = _rows(stream, (count,), np.dtype(np.uint8), np.arange(count))
    with _reading(path), _opened(path) as stream:
        shape = _idx_header(stream, path, 3)
    if shape[0] != count:
        raise DataError(f"{path} holds {shape[0]} images, {beside.name} {count} labels: they are not of one set")

    def take(rows: np.ndarray) -> np.ndarray:
        with _reading(path), _opened(path) as stream:
            return _rows(stream, _idx_header(stream, path, 3), np.dtype(np.uint8), rows)

    return Reader(_labels(labels, beside), take, shape[1:], np.dtype(np.uint8))


def _idx_files(path: Path) -> list[Path]:
    """Files of images in a folder, or in `raw` in it, where torchvision puts them; unpacked before packed."""
    found: dict[str, Path] = {}
    for folder in (path, path / "raw"):
        for file in sorted(folder.glob("*")) if folder.is_dir() else ():
            if IDX_IMAGES.match(file.name):
                found.setdefault(file.name.removesuffix(".gz"), file)
    return list(found.values())


def _idx_header(stream: Bytes, path: Path, dimensions: int) -> tuple[int, ...]:
    """Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each as a big-endian uint32."""
    head = stream.read(4 * (1 + dimensions))
    if len(head) < 4 * (1 + dimensions) or head[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: fetch it anew")
    return tuple(int(size) for size in np.frombuffer(head, ">u4")[1:])


def _opened(path: Path) -> Bytes:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


# -- image files, torchvision ---------------------------------------------------------------------


def _folder(path: Path, spec: DataSpec) -> Reader:
    """<path>/<split>/<class>/*.png, or <path>/<class>/*.png, which is the training split. Classes in order of name."""
    root = path / spec.split if (path / spec.split).is_dir() else path
    if root == path and spec.split != "train":
        raise DataError(f"{path} has no folder {spec.split!r}: put its images in {path / spec.split}/<class>/")
    # one numbering for all splits, even where one lacks a class
    numbered = _subfolders(path / "train" if (path / "train").is_dir() else root)
    if unknown := sorted(set(_subfolders(root)) - set(numbered)):
        raise DataError(f"{root}: class {unknown[0]!r} is not among those to train on: {', '.join(numbered)}")
    files = [
        (file, label)
        for label, name in enumerate(numbered)
        for file in sorted((root / name).glob("*"))
        if file.suffix.lower() in IMAGES
    ]
    if not files:
        raise DataError(f"{root} holds no images: put them in {root}/<class>/, as {', '.join(sorted(IMAGES))}")
    labels = np.array([label for _, label in files], np.int64)
    pillow = _pillow()

    def image(row: int) -> np.ndarray:
        file = files[row][0]
        # of a damaged image the headers are read first, and each format's reader has an error of its own
        with _reading(file, SyntaxError, pillow.DecompressionBombError), pillow.open(file) as opened:
            return _pixels(opened.convert("RGB"), spec.size)

    return _images(labels, image, root)


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _torchvision(path: Path, spec: DataSpec) -> Reader:
    from fedquilt.torchvision_compat import torchvision

    torchvision()
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

    def image(row: int) -> np.ndarray:
        opened = held[row][0]
        return _pixels(opened if opened.mode == "L" else opened.convert("RGB"), spec.size)

    return _images(_labels(np.asarray(labels), path), image, path)


def _images(y: np.ndarray, image: Callable[[int], np.ndarray], path: Path) -> Reader:
    """The reader of images one by one; the first of them tells the shape of all."""
    if not len(y):
        raise DataError(f"{path} holds no images of this split")
    return Reader(y, lambda rows: _stacked(path, image, rows), image(0).shape, np.dtype(np.uint8))


def _pillow() -> Any:
    try:
        from PIL import Image

        return Image
    except ImportError:
        raise DataError("image files need Pillow, which is not installed: pip install 'fedquilt[images]'") from None


def _pixels(image: Any, size: int) -> np.ndarray:
    """A Pillow image as (h, w) or (h, w, 3) bytes."""
    if size and image.size != (size, size):
        image = image.resize((size, size), _pillow().Resampling.BILINEAR)
    return np.asarray(image, np.uint8)


def _stacked(path: Path, image: Callable[[int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """(rows, h, w[, 3]); written in place, so that nothing is held twice."""
    first = image(int(rows[0])) if len(rows) else np.zeros((0, 0), np.uint8)
    result = np.empty((len(rows), *first.shape), np.uint8)
    for place, row in enumerate(rows):
        pixels = image(int(row))
        if pixels.shape != first.shape:
            raise DataError(f"{path}: images of {pixels.shape[:2]} and {first.shape[:2]} pixels: set [data] size")
        result[place] = pixels
    return result


# -- common ---------------------------------------------------------------------------------------


def _rows(stream: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any], rows: np.ndarray) -> np.ndarray:
    """These rows, in their order, of the array that the stream holds from here on, read to its end in blocks."""
    each = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    result = np.empty((len(rows), *shape[1:]), dtype)
    places = np.argsort(rows, kind="stable")
    rows = rows[places]
    step = max(1, BLOCK_BYTES // max(1, each))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        block = stream.read(count * each)
        if len(block) < count * each:
            raise EOFError(f"cut short in row {first + len(block) // max(1, each)} of {shape[0]}")
        low, high = np.searchsorted(rows, (first, first + count))
        result[places[low:high]] = np.frombuffer(block, dtype).reshape(count, *shape[1:])[rows[low:high] - first]
    return result


def _labels(y: np.ndarray, path: Path) -> np.ndarray:
    if y.ndim != 1 or y.dtype.kind not in "ui" or (len(y) and y.min() < 0):
        raise DataError(f"{path}: labels of type {y.dtype}, shape {y.shape}: one whole number from 0 each is wanted")
    return y.astype(np.int64)


@contextmanager
def _reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Whatever a damaged or forbidden file raises becomes one error that names it."""
    kinds: tuple[type[Exception], ...] = (*BROKEN, *more)
    try:
        yield
    except kinds as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "it is cut short"
        raise DataError(f"cannot read {path}: {reason}") from None
