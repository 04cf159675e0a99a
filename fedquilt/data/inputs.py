"""Network inputs from stored examples, in numpy: resizing, standardisation, simulated domain shift.

Resizing is separable and linear: along one axis it is a matrix whose rows sum to one. So the same two matrix products
resize here, in an exported ONNX graph and in training, with equal results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import cos, prod, radians, sin
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt.core import DataError, JobError
from fedquilt.formats import toml

MAX_SIDE_PIXELS: Final = 16384  # larger images fit in no board's memory
BLOCK_PIXELS: Final = 2**18  # resized or changed at once, so that copies of floats stay small
COORDINATE_GRID: Final = 2.0**24  # coordinates are rounded to 1 / this: the last bit of a sine depends on the machine


class ImageInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Image input of a network: (channels, size, size) float32, scaled to 0..1, then (x - mean) / std."""

    channels: Annotated[int, Meta(ge=1)]
    size: Annotated[int, Meta(ge=1, le=MAX_SIDE_PIXELS)]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def is_image_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))


@lru_cache(maxsize=256)
def resize_matrix(size: int, new_size: int) -> np.ndarray:
    """Return the read-only float32 matrix (new_size, size) that resizes one axis.

    Shrinking is adaptive average pooling. Growing interpolates linearly with half-pixel centres.
    """
    matrix = np.zeros((new_size, size))
    if new_size <= size:
        for row in range(new_size):
            start, end = row * size // new_size, -(-(row + 1) * size // new_size)
            matrix[row, start:end] = 1.0 / (end - start)
    else:
        centres = np.clip((np.arange(new_size) + 0.5) * size / new_size - 0.5, 0, size - 1)
        lower = np.floor(centres).astype(int)
        upper = np.minimum(lower + 1, size - 1)
        rows = np.arange(new_size)
        np.add.at(matrix, (rows, lower), 1 - (centres - lower))
        np.add.at(matrix, (rows, upper), centres - lower)
    result = matrix.astype(np.float32)
    result.flags.writeable = False
    return result


def resize_maps(maps: np.ndarray, *sizes: int) -> np.ndarray:
    """Return float32 feature maps resized to `sizes`.

    Maps (n, c, h, w) get the sizes (height, width), and maps (n, c, l) the size (length,).
    """
    if maps.shape[2:] == sizes:
        return maps
    if len(sizes) == 2:
        maps = np.matmul(resize_matrix(maps.shape[2], sizes[0]), maps)
    return np.matmul(maps, resize_matrix(maps.shape[-1], sizes[-1]).T)


def resize_images(x: np.ndarray, size: int) -> np.ndarray:
    """Return stored images (n, h, w[, c]) resized to (n, size, size[, c]), of the same type."""
    result = np.empty((len(x), size, size, *x.shape[3:]), x.dtype)
    step = max(1, BLOCK_PIXELS // max(1, x.shape[1] * x.shape[2]))
    for start in range(0, len(x), step):
        part = x[start : start + step]
        for channel in np.ndindex(x.shape[3:]):  # channel by channel, because float32 copies of photographs are large
            scaled = resize_maps(part[(..., *channel)][:, None].astype(np.float32), size, size)[:, 0]
            # Averages of levels stay within the range of the type.
            result[(slice(start, start + step), ..., *channel)] = scaled if x.dtype.kind == "f" else np.rint(scaled)
    return result


def prepare_images(x: np.ndarray, image_input: ImageInput | Mapping[str, Any]) -> np.ndarray:
    """Return standardised network inputs, (n, channels, size, size) float32, of stored images.

    Grey becomes colour by repetition, and colour becomes grey by the BT.601 luma weights. Raise DataError for arrays
    that are no images.
    """
    spec = image_input if isinstance(image_input, ImageInput) else msgspec.convert(image_input, ImageInput)
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise DataError(f"images have shape {x.shape}: save them as (n, h, w) or (n, h, w, 1 or 3)")
    if x.dtype.kind not in "uf":
        raise DataError(f"images have type {x.dtype}: save them as uint8 or floating point")
    maps = x.transpose(0, 3, 1, 2).astype(np.float32)  # (n, c, h, w)
    if x.dtype.kind == "u":
        maps /= np.float32(np.iinfo(x.dtype).max)
    if maps.shape[1] == 1 and spec.channels == 3:
        maps = np.repeat(maps, 3, axis=1)
    elif maps.shape[1] == 3 and spec.channels == 1:
        luma = np.array([0.299, 0.587, 0.114], np.float32)
        maps = np.tensordot(maps, luma, axes=([1], [0]))[:, None]
    maps = resize_maps(maps, spec.size, spec.size)
    mean = np.array(spec.mean, np.float32).reshape(1, -1, 1, 1)
    std = np.array(spec.std, np.float32).reshape(1, -1, 1, 1)
    return np.ascontiguousarray((maps - mean) / std)


def change_images(
    x: np.ndarray, rng: np.random.Generator, *, rotation: float, brightness: float, noise: float
) -> np.ndarray:
    """Return stored images (n, h, w[, c]) rotated, multiplied by `brightness`, and with Gaussian noise.

    Args:
        x: Images, unsigned integers (rounded and clipped in the end) or floats (not clipped).
        rng: Generator of the noise.
        rotation: Degrees, counter-clockwise.
        brightness: Factor.
        noise: Standard deviation as a share of the largest level, which is 1 for floats.
    """
    result, step = np.empty_like(x), max(1, BLOCK_PIXELS // prod(x.shape[1:3]))
    highest = np.iinfo(x.dtype).max if x.dtype.kind == "u" else 1.0
    for start in range(0, len(x), step):
        levels = rotate_images(x[start : start + step].astype(np.float64), rotation) * brightness
        if noise:
            levels += noise * highest * rng.standard_normal(levels.shape)
        result[start : start + step] = np.clip(np.rint(levels), 0, highest) if x.dtype.kind == "u" else levels
    return result


def rotate_images(x: np.ndarray, degrees: float) -> np.ndarray:
    """Return float images (n, h, w[, c]) rotated counter-clockwise, bilinearly, with 0 outside the image."""
    if not degrees:
        return x
    height, width = x.shape[1:3]
    sine, cosine = sin(radians(degrees)), cos(radians(degrees))
    down, right = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    # Source coordinates of each pixel (h, w).
    row = np.rint((sine * right + cosine * down + (height - 1) / 2) * COORDINATE_GRID) / COORDINATE_GRID
    column = np.rint((cosine * right - sine * down + (width - 1) / 2) * COORDINATE_GRID) / COORDINATE_GRID
    result = np.zeros_like(x)
    for i in (np.floor(row).astype(int), np.floor(row).astype(int) + 1):
        for j in (np.floor(column).astype(int), np.floor(column).astype(int) + 1):
            is_inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
            weight = is_inside * (1 - abs(row - i)) * (1 - abs(column - j))  # (h, w)
            source_pixels = x[:, np.clip(i, 0, height - 1), np.clip(j, 0, width - 1)]
            result += weight.reshape(weight.shape + (1,) * (x.ndim - 3)) * source_pixels
    return result


MAX_SCALE_RATIO = 100.0  # factor between the standard deviations of two features

Table: TypeAlias = dict[str, int | bool | tuple[float, ...]]
"""`[input]` table as stored in a bundle (see `parse_input_table`)."""


class ValueInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numeric input of a network: float32, (x - mean) / std along the last axis."""

    mean: tuple[float, ...] = (0.0,)  # one for all features, or one each
    std: tuple[float, ...] = (1.0,)
    standardise: bool = False  # in a job: `fedquilt prepare` computes both from the training split of [data]


def parse_input_table(table: Mapping[str, Any]) -> ImageInput | ValueInput:
    """Return a checked [input] table, for images if it has `channels` or `size`, or raise JobError."""
    if "channels" in table or "size" in table:
        input_spec: ImageInput | ValueInput = toml.convert_table(table, ImageInput, "[input]")
        assert isinstance(input_spec, ImageInput)
        lengths = (1, input_spec.channels)
    else:
        input_spec = toml.convert_table(table, ValueInput, "[input]")
        assert isinstance(input_spec, ValueInput)
        if input_spec.standardise and ("mean" in table or "std" in table):
            raise JobError("[input] standardise = true computes mean and std: leave mean and std out")
        lengths = (1, max(len(input_spec.mean), len(input_spec.std), 1))
    for key in ("mean", "std"):
        values = getattr(input_spec, key)
        if len(values) not in lengths:
            raise JobError(f"[input] {key} has {len(values)} values: give 1 or {lengths[1]}")
    if min(input_spec.std) <= 0:
        raise JobError(f"[input] std = {min(input_spec.std):g}: each standard deviation must be above 0")
    return input_spec


def measure_scales(x: np.ndarray) -> ValueInput:
    """Return the mean and standard deviation of each feature of the last axis.

    A constant feature gets the deviation 1.
    """
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    std = flat.std(axis=0)
    return ValueInput(tuple(map(float, flat.mean(axis=0))), tuple(map(float, np.where(std > 0, std, 1.0))))


def describe_unequal_scales(x: np.ndarray, names: Sequence[str] = ()) -> str:
    """Return a sentence on the features with the largest and the smallest scale, or "" if all are similar."""
    if x.dtype.kind not in "fiu" or x.ndim != 2 or not x.size:
        return ""
    std = x.astype(np.float64).std(axis=0)
    if not std.any() or std.max() <= MAX_SCALE_RATIO * std[std > 0].min():
        return ""
    ends = [int(np.argmax(std)), int(np.argmin(np.where(std > 0, std, np.inf)))]
    large, small = (
        f"{names[index]!r} by {std[index]:.3g}" if names else f"number {index} by {std[index]:.3g}" for index in ends
    )
    return f"features differ in scale by a factor of {std[ends[0]] / std[ends[1]]:.0f} ({large}, {small})"


def fill_missing(x: np.ndarray, fill: object) -> np.ndarray:
    """Return stored examples with NaN replaced, if `fill` is a number. Table readers fill their own gaps."""
    return np.where(np.isnan(x), x.dtype.type(fill), x) if isinstance(fill, float) and x.dtype.kind == "f" else x


def network_input_shape(input_table: Mapping[str, Any], stored: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a prepared example: (channels, size, size) for images, otherwise `stored`."""
    if "channels" in input_table:
        return (int(input_table["channels"]), int(input_table["size"]), int(input_table["size"]))
    return stored


def prepare_inputs(x: np.ndarray, input_table: Mapping[str, Any]) -> np.ndarray:
    """Return float32 network inputs of stored examples, or raise DataError for a wrong type or shape."""
    if "channels" in input_table:
        return prepare_images(x, input_table)
    spec = msgspec.convert(input_table, ValueInput)
    if x.dtype.kind not in "fiub":
        raise DataError(f"examples have type {x.dtype}: save them as numbers")
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    features = max(len(mean), len(std))
    if features > 1 and (x.ndim < 2 or x.shape[-1] != features):
        raise DataError(
            f"examples have shape {tuple(x.shape[1:])}, but the job's [input] standardises {features} features: save "
            f"{features} values along the last axis"
        )
    return (x.astype(np.float32) - mean) / std
