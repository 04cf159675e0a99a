"""Readers of examples: .npz, IDX, image folders, torchvision, tables, recordings and texts.

A reader loads all labels, but only the inputs of selected rows: .npz and IDX files are streamed block by block, so that
a device never loads the other devices' examples. No reader loads a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from fedquilt.core import DataError
from fedquilt.data import inputs
from fedquilt.data.readers import arrays, audio, base, images, table, text
from fedquilt.data.readers.base import ExampleReader, convert_read_errors
from fedquilt.data.readers.table import category_words
from fedquilt.data.spec import SKLEARN, DataSpec, describe_path_problem

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
    "npz": arrays.open_npz,
    "idx": images.open_idx,
    "folder": images.open_folder,
    "torchvision": images.open_torchvision,
    "csv": table.open_table,
    "parquet": table.open_table,
    "audio": audio.open_recordings,
    "text": text.open_texts,
}
CLASS_FORMATS = ("idx", "folder", "torchvision")  # formats whose labels are always classes


def open_reader(spec: DataSpec) -> ExampleReader:
    """Return a reader of a single source, with targets scaled by [data] target, or raise DataError."""
    reader = _open_source(spec)
    if spec.target is None:
        return reader
    mean, std = np.array(spec.target.mean), np.array(spec.target.std)
    if not len(mean) == len(std) == reader.y.shape[1]:
        raise DataError(
            f"{spec.source_name}: [data] target must have a mean and a std for each of {reader.y.shape[1]} numbers"
        )
    return replace(reader, y=((reader.y - mean) / std).astype(np.float32))


def _open_source(spec: DataSpec) -> ExampleReader:
    if spec.dataset.startswith(SKLEARN):
        return arrays.open_sklearn_data(spec)
    if not spec.path:
        return arrays.open_plugin_data(spec)
    path = Path(spec.path)
    with convert_read_errors(path):  # a folder without permission to read raises here
        kind = detect_format(path, spec)
        if kind != "torchvision" and (problem := describe_path_problem(path)):
            raise DataError(problem)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is a device or a pipe: set [data] path to a file or a folder")
        if kind in CLASS_FORMATS and spec.task != "classes":
            raise DataError(f"{path}: data of format {kind} have only classes: leave task = {spec.task!r} out")
        return OPENERS[kind](path, spec)


def measure_image_depth(spec: DataSpec) -> int:
    """Return the bits of a grey level, 9 to 16, in a folder's training images, or 0 for other data."""
    return images.measure_grey_depth(_list_image_files(msgspec.structs.replace(spec, split="train")))


def require_supported_images(spec: DataSpec) -> None:
    """Raise DataError if a folder contains an image with several pages or unsupported levels."""
    images.require_supported_files(_list_image_files(spec))


def _list_image_files(spec: DataSpec) -> list[Path]:
    path = Path(spec.path)
    with convert_read_errors(path):
        if not images.has_pillow() or detect_format(path, spec) != "folder":
            return []
        return base.find_files_by_class(path, spec, images.SUFFIXES, "images")[0]


def detect_format(path: Path, spec: DataSpec) -> str:
    """Return the key of OPENERS for the data at `path`, from the [data] table, folder and file name."""
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


def has_test_split(path: Path, spec: DataSpec) -> bool:
    """Return whether a file or folder has a split "test" besides other examples."""
    if path.is_dir():
        return (path / "test").is_dir() or bool(table.find_split_tables(path, "test"))
    return detect_format(path, spec) == "npz" and "x_test" in arrays.list_arrays(path)


def open_sources(spec: DataSpec) -> ExampleReader:
    """Return a reader of the spec's source, or of all its `sources`, with images resized if requested."""
    if not spec.sources:
        return _resize_images(open_reader(spec), spec)
    readers = []
    for source in spec.sources:
        source_keys = {name: value for name, value in msgspec.structs.asdict(source).items() if name != "labels_from"}
        source_spec = DataSpec(split=spec.split, size=spec.size, depth=spec.depth, **source_keys)
        readers.append(_resize_images(_offset_labels(open_reader(source_spec), source.labels_from), source_spec))
    _require_consistent_labels(readers, spec)
    return _combine_readers(readers, spec)


def _offset_labels(reader: ExampleReader, first_label: int) -> ExampleReader:
    return replace(reader, y=reader.y + first_label) if first_label else reader


def _require_consistent_labels(readers: Sequence[ExampleReader], spec: DataSpec) -> None:
    for number, (source, reader) in enumerate(zip(spec.sources, readers, strict=True)):
        for earlier_source, earlier_reader in zip(spec.sources[:number], readers[:number], strict=True):
            common = np.intersect1d(reader.y, earlier_reader.y)
            if len(common) and source.labels_from != earlier_source.labels_from:
                raise DataError(
                    f"{earlier_source.path} and {source.path} both have class {common[0]}, but other labels_from: set "
                    "equal labels_from for the same classes, or one that skips all classes of the first source"
                )


def _resize_images(reader: ExampleReader, spec: DataSpec) -> ExampleReader:
    if not spec.size or reader.shape[:2] == (spec.size, spec.size):
        return reader
    if not inputs.is_image_shape(reader.shape):
        raise DataError(f"{spec.source_name}: inputs of shape {reader.shape} are no images: leave [data] size out")
    return replace(
        reader,
        take=lambda rows: inputs.resize_images(reader.take(rows), spec.size),
        shape=(spec.size, spec.size, *reader.shape[2:]),
    )


def _combine_readers(readers: Sequence[ExampleReader], spec: DataSpec) -> ExampleReader:
    """Return a reader of all sources. Mixed grey and colour becomes colour, and mixed types become floats."""
    shape, dtype = _common_shape(readers, spec), _common_type(readers, spec)
    sizes = [len(reader.y) for reader in readers]
    starts, origin = np.cumsum([0, *sizes]), np.repeat(np.arange(len(readers)), sizes)

    def take(rows: np.ndarray) -> np.ndarray:
        result = np.empty((len(rows), *shape), dtype)
        for number, reader in enumerate(readers):
            positions = np.flatnonzero(origin[rows] == number)
            if len(positions):
                x = reader.take(rows[positions] - starts[number])
                if x.ndim < result.ndim:
                    x = x[..., None]
                result[positions] = x if x.dtype.kind == dtype.kind else x / np.float32(np.iinfo(x.dtype).max)
        return result

    return ExampleReader(np.concatenate([reader.y for reader in readers]), take, shape, dtype, origin)


def _common_shape(readers: Sequence[ExampleReader], spec: DataSpec) -> tuple[int, ...]:
    shapes = {reader.shape for reader in readers}
    if len(shapes) == 1:
        return shapes.pop()
    if all(map(inputs.is_image_shape, shapes)) and len({shape[:2] for shape in shapes}) == 1:
        height, width = readers[0].shape[:2]
        return (height, width, max(shape[2] if len(shape) == 3 else 1 for shape in shapes))
    source_shapes = ", ".join(
        f"{source.path} {reader.shape}" for source, reader in zip(spec.sources, readers, strict=True)
    )
    fix = "set [data] size" if all(map(inputs.is_image_shape, shapes)) else "leave out all but one shape"
    raise DataError(f"sources have examples of different shapes ({source_shapes}): {fix}")


def _common_type(readers: Sequence[ExampleReader], spec: DataSpec) -> np.dtype:
    kinds = {reader.dtype for reader in readers}
    if len(kinds) == 1:
        return kinds.pop()
    if all(kind in (np.uint8, np.uint16) or kind.kind == "f" for kind in kinds):
        return np.dtype(np.float32)
    source_types = ", ".join(
        f"{source.path} {reader.dtype}" for source, reader in zip(spec.sources, readers, strict=True)
    )
    raise DataError(f"sources have different types ({source_types}): save all as uint8, or as floats from 0 to 1")
