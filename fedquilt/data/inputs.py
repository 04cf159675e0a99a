"""The `[input]` table: conversion of stored examples to network inputs, the same on every device.

With `channels` and `size` they are images (`fedquilt.data.images`). Without, they are numbers (a row of a table, time
steps, a spectrogram), each feature of the last axis scaled to (x - mean) / std. `fedquilt prepare` writes the means
and standard deviations into the bundle, so that no device computes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedquilt import config
from fedquilt.core import DataError, JobError
from fedquilt.data import images
from fedquilt.data.images import Input

SCALES_MOST = 100.0  # factor between the standard deviations of two features

Table: TypeAlias = dict[str, int | bool | tuple[float, ...]]
"""An `[input]` table that `parse` takes, as a bundle holds it."""


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input of a network of numbers: float32, (x - mean) / std along the last axis."""

    mean: tuple[float, ...] = (0.0,)  # one for all features, or one each
    std: tuple[float, ...] = (1.0,)
    standardise: bool = False  # in a job: `prepare` computes both from the training split of [data]


def parse(table: Mapping[str, Any]) -> Input | Values:
    """Read the `[input]` table of a job.

    Raises:
        JobError: an unknown key, or different numbers of means and deviations.
    """
    if "channels" in table or "size" in table:
        found: Input | Values = config.convert(table, Input, "[input]")
        assert isinstance(found, Input)
        lengths = (1, found.channels)
    else:
        found = config.convert(table, Values, "[input]")
        assert isinstance(found, Values)
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


def measured(x: np.ndarray) -> Values:
    """Mean and standard deviation of each feature of the last axis; a feature that never varies has deviation 1.

    Args:
        x: (n, ..., features), any type of number.
    """
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    std = flat.std(axis=0)
    return Values(tuple(map(float, flat.mean(axis=0))), tuple(map(float, np.where(std > 0, std, 1.0))))


def describe_unequal_scales(x: np.ndarray, names: Sequence[str] = ()) -> str:
    """Return a sentence on two features that differ too much in scale, or "" if none do.

    Args:
        x: (n, features).
        names: of the features, where they have any.
    """
    if x.dtype.kind not in "fiu" or x.ndim != 2 or not x.size:
        return ""
    std = x.astype(np.float64).std(axis=0)
    if not std.any() or std.max() <= SCALES_MOST * std[std > 0].min():
        return ""
    ends = [int(np.argmax(std)), int(np.argmin(np.where(std > 0, std, np.inf)))]
    large, small = (f"{names[at]!r} by {std[at]:.3g}" if names else f"number {at} by {std[at]:.3g}" for at in ends)
    return f"features differ in scale by a factor of {std[ends[0]] / std[ends[1]]:.0f} ({large}, {small})"


def shape(wanted: Mapping[str, Any], stored: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one example as a network takes it, of one that is stored in the shape `stored`."""
    if "channels" in wanted:
        return (int(wanted["channels"]), int(wanted["size"]), int(wanted["size"]))
    return stored


def prepare(x: np.ndarray, wanted: Mapping[str, Any]) -> np.ndarray:
    """Prepare stored examples (n, ...) for a network with this table, float32.

    Raises:
        DataError: examples of another shape or type.
    """
    if "channels" in wanted:
        return images.prepare(x, wanted)
    spec = msgspec.convert(wanted, Values)
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
