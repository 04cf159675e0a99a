"""Conversion of stored examples to network inputs by the `[input]` table, equal on every device.

With `channels` and `size`, inputs are images (`fedquilt.data.images`). Otherwise inputs are numbers, and each feature
of the last axis becomes (x - mean) / std. `fedquilt prepare` stores the means and deviations in the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedquilt.core import DataError, JobError
from fedquilt.data import images
from fedquilt.data.images import ImageInput
from fedquilt.formats import toml

SCALES_MOST = 100.0  # factor between the standard deviations of two features

Table: TypeAlias = dict[str, int | bool | tuple[float, ...]]
"""An `[input]` table that `parse` takes, as a bundle holds it."""


class ValueInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numeric input of a network: float32, (x - mean) / std along the last axis."""

    mean: tuple[float, ...] = (0.0,)  # one for all features, or one each
    std: tuple[float, ...] = (1.0,)
    standardise: bool = False  # in a job: `prepare_inputs` computes both from the training split of [data]


def parse_input_table(table: Mapping[str, Any]) -> ImageInput | ValueInput:
    """Parse the `[input]` table of a job.

    Raises:
        JobError: If a key is unknown, or the numbers of means and deviations differ.
    """
    if "channels" in table or "size" in table:
        found: ImageInput | ValueInput = toml.convert_table(table, ImageInput, "[input]")
        assert isinstance(found, ImageInput)
        lengths = (1, found.channels)
    else:
        found = toml.convert_table(table, ValueInput, "[input]")
        assert isinstance(found, ValueInput)
        if found.standardise and ("mean" in table or "std" in table):
            raise JobError("[input] standardise computes mean and std: leave these two out, or standardise")
        lengths = (1, max(len(found.mean), len(found.std), 1))
    for key in ("mean", "std"):
        given = getattr(found, key)
        if len(given) not in lengths:
            raise JobError(f"[input] {key} has {len(given)} values: give 1 or {lengths[1]}")
    if min(found.std) <= 0:
        raise JobError(f"[input] std = {min(found.std):g}: each standard deviation has to be above 0")
    return found


def measure_scales(x: np.ndarray) -> ValueInput:
    """Return the mean and standard deviation of each feature of the last axis.

    A constant feature gets the deviation 1.

    Args:
        x: Numbers of any type, (n, ..., features).
    """
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    std = flat.std(axis=0)
    return ValueInput(tuple(map(float, flat.mean(axis=0))), tuple(map(float, np.where(std > 0, std, 1.0))))


def describe_unequal_scales(x: np.ndarray, names: Sequence[str] = ()) -> str:
    """Return a sentence on two features of very different scales, or "" if there are none.

    Args:
        x: Numbers (n, features).
        names: Names of the features, or () without names.
    """
    if x.dtype.kind not in "fiu" or x.ndim != 2 or not x.size:
        return ""
    std = x.astype(np.float64).std(axis=0)
    if not std.any() or std.max() <= SCALES_MOST * std[std > 0].min():
        return ""
    ends = [int(np.argmax(std)), int(np.argmin(np.where(std > 0, std, np.inf)))]
    large, small = (f"{names[at]!r} by {std[at]:.3g}" if names else f"number {at} by {std[at]:.3g}" for at in ends)
    return f"features differ in scale by a factor of {std[ends[0]] / std[ends[1]]:.0f} ({large}, {small})"


def fill_missing(x: np.ndarray, fill: object) -> np.ndarray:
    """Replace NaN by a [data] fill of one number. Tables are filled by their reader."""
    return np.where(np.isnan(x), x.dtype.type(fill), x) if isinstance(fill, float) and x.dtype.kind == "f" else x


def network_input_shape(wanted: Mapping[str, Any], stored: tuple[int, ...]) -> tuple[int, ...]:
    if "channels" in wanted:
        return (int(wanted["channels"]), int(wanted["size"]), int(wanted["size"]))
    return stored


def prepare_inputs(x: np.ndarray, wanted: Mapping[str, Any]) -> np.ndarray:
    """Convert stored examples (n, ...) to float32 network inputs.

    Raises:
        DataError: If the examples have another shape or type.
    """
    if "channels" in wanted:
        return images.prepare_images(x, wanted)
    spec = msgspec.convert(wanted, ValueInput)
    if x.dtype.kind not in "fiub":
        raise DataError(f"examples of type {x.dtype}: expected numbers")
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    features = max(len(mean), len(std))
    if features > 1 and (x.ndim < 2 or x.shape[-1] != features):
        raise DataError(
            f"examples of shape {tuple(x.shape[1:])}: the job's [input] standardises {features} features, which the "
            "last axis has to hold"
        )
    return (x.astype(np.float32) - mean) / std
