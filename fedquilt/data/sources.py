"""Sources of examples: one file, or several with common class numbers and one image shape.

The common shape is found from headers alone, and rows are read only from the sources that contain
them. Images are resized by the same maps as network inputs (`data.images`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from fedquilt.core import DataError
from fedquilt.data import images, readers
from fedquilt.data.readers import ExampleReader
from fedquilt.data.spec import DataSpec


def open_sources(spec: DataSpec) -> ExampleReader:
    if not spec.sources:
        return _resize_images(readers.open_reader(spec), spec)
    found = []
    for source in spec.sources:
        given = {name: value for name, value in msgspec.structs.asdict(source).items() if name != "labels_from"}
        one = DataSpec(split=spec.split, size=spec.size, depth=spec.depth, **given)
        found.append(_resize_images(_offset_labels(readers.open_reader(one), source.labels_from), one))
    _require_consistent_labels(found, spec)
    return _combine_readers(found, spec)


def _offset_labels(reader: ExampleReader, first: int) -> ExampleReader:
    return replace(reader, y=reader.y + first) if first else reader


def _require_consistent_labels(found: Sequence[ExampleReader], spec: DataSpec) -> None:
    for number, (source, reader) in enumerate(zip(spec.sources, found, strict=True)):
        for other, earlier in zip(spec.sources[:number], found[:number], strict=True):
            common = np.intersect1d(reader.y, earlier.y)
            if len(common) and source.labels_from != other.labels_from:
                raise DataError(
                    f"{other.path} and {source.path}: class {common[0]} is in both, which do not number theirs alike: "
                    "set labels_from apart by all classes of the first, or equal if the classes are the same"
                )


# -- one shape ------------------------------------------------------------------------------------


def _resize_images(reader: ExampleReader, spec: DataSpec) -> ExampleReader:
    """Return the reader with images scaled to the spec's size, unless they have it already."""
    if not spec.size or reader.shape[:2] == (spec.size, spec.size):
        return reader
    if not images.is_image_shape(reader.shape):
        raise DataError(f"{spec.source_name}: [data] size is for images, not for inputs of shape {reader.shape}")

    return replace(
        reader,
        take=lambda rows: images.resize_images(reader.take(rows), spec.size),
        shape=(spec.size, spec.size, *reader.shape[2:]),
    )


def _combine_readers(found: Sequence[ExampleReader], spec: DataSpec) -> ExampleReader:
    """Return one reader of several: grey becomes colour if any has colour, and bytes become 0 to 1."""
    shape, dtype = _common_shape(found, spec), _common_type(found, spec)
    sizes = [len(reader.y) for reader in found]
    starts, origin = np.cumsum([0, *sizes]), np.repeat(np.arange(len(found)), sizes)

    def take(rows: np.ndarray) -> np.ndarray:
        result = np.empty((len(rows), *shape), dtype)
        for number, reader in enumerate(found):
            mine = np.flatnonzero(origin[rows] == number)
            if len(mine):
                x = reader.take(rows[mine] - starts[number])
                if x.ndim < result.ndim:
                    x = x[..., None]
                result[mine] = x if x.dtype.kind == dtype.kind else x / np.float32(np.iinfo(x.dtype).max)
        return result

    return ExampleReader(np.concatenate([reader.y for reader in found]), take, shape, dtype, origin)


def _common_shape(found: Sequence[ExampleReader], spec: DataSpec) -> tuple[int, ...]:
    shapes = {reader.shape for reader in found}
    if len(shapes) == 1:
        return shapes.pop()
    if all(map(images.is_image_shape, shapes)) and len({shape[:2] for shape in shapes}) == 1:
        height, width = found[0].shape[:2]
        return (height, width, max(shape[2] if len(shape) == 3 else 1 for shape in shapes))
    each = ", ".join(f"{source.path} {reader.shape}" for source, reader in zip(spec.sources, found, strict=True))
    mend = "set [data] size" if all(map(images.is_image_shape, shapes)) else "they cannot be mixed"
    raise DataError(f"sources of several shapes: {each}: {mend}")


def _common_type(found: Sequence[ExampleReader], spec: DataSpec) -> np.dtype:
    """Return the type of all readers, or float32 for different types of images or floats."""
    kinds = {reader.dtype for reader in found}
    if len(kinds) == 1:
        return kinds.pop()
    if all(kind in (np.uint8, np.uint16) or kind.kind == "f" for kind in kinds):
        return np.dtype(np.float32)
    each = ", ".join(f"{source.path} {reader.dtype}" for source, reader in zip(spec.sources, found, strict=True))
    raise DataError(f"sources of several types: {each}: save all as uint8, or as floats from 0 to 1")
