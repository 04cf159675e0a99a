"""Sums over devices that determine a linear head on frozen features.

A device sends its `DeviceMoments`: the number of its examples of each class, their mean features, and a factor R of the
centred second moments (R'R = sum of (z - mean)(z - mean)') with min(examples, d) rows.
`fedquilt.models.stitching.algebra.joint_head` solves heads from the sums over all devices
(`fedquilt.models.stitching.algebra.exact_moments`). Requires numpy only.

Privacy: the factor of a device with few examples reveals the span of its activations. Moments of a single device should
be deleted after their round. Only the sum over devices is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import Tensors, UpdateError

WANTED = ("counts", "mean", "means", "factor", "rows")  # tensors that a device sends
LARGEST = 1e9  # limit of means and factors, which no pooled map reaches
NEGATIVE = 1e-3  # most negative eigenvalue taken for rounding, as a share of the largest


@dataclass(frozen=True)
class DeviceMoments:
    """Class counts, class means and second moments of one device's features.

    Attributes:
        counts: (labels,) number of examples of each class, int64.
        means: (labels, d) mean features of each class, float64, zeros for classes without examples.
        factor: (rows, d) upper trapezoid R with R'R = sum of (z - mean)(z - mean)', about the device's own mean.
    """

    counts: np.ndarray
    means: np.ndarray
    factor: np.ndarray

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.counts @ self.means / self.n)


@dataclass(frozen=True)
class ClassMoments:
    """Class counts, feature sums and scatter of any number of devices, float64.

    Attributes:
        counts: (labels,) number of examples of each class.
        totals: (labels, d) sums of features over each class.
        scatter: (d, d) sum of (z - mean)(z - mean)', about the mean of all examples.
    """

    counts: np.ndarray
    totals: np.ndarray
    scatter: np.ndarray

    @property
    def n(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.totals.sum(axis=0) / self.n)


# -- on a device ----------------------------------------------------------------------------------


def factor_bytes(rows: int, width: int) -> int:
    """Return the memory of `device_moments` for `rows` examples of `width` features."""
    return 32 * rows * width


def device_moments(z: np.ndarray, y: np.ndarray, labels: int) -> DeviceMoments:
    """Compute a device's moments from features z (n, d) and classes y (n,), n >= 1."""
    z = z.astype(np.float64)
    counts = np.bincount(y, minlength=labels).astype(np.int64)
    means = np.zeros((labels, z.shape[1]))
    for label in np.flatnonzero(counts):
        means[label] = z[y == label].mean(axis=0)
    z -= z.mean(axis=0)
    return DeviceMoments(counts, means, np.asarray(np.linalg.qr(z, mode="r")))


def to_tensors(given: DeviceMoments, exact: bool = False) -> dict[str, np.ndarray]:
    """Pack moments for sending: the mean, the offsets of class means from it, and the factor.

    Centred values are sent as float32, which is accurate for large means, or as float64 if `exact`.
    """
    kind = np.float64 if exact else np.float32
    rows, width = given.factor.shape
    mean = given.mean
    packed = np.empty(_trapezoid_size(rows, width), kind)
    for row, place in _trapezoid_rows(rows, width):
        packed[place] = given.factor[row, row:]
    return {
        "counts": given.counts,
        "mean": mean,
        "means": (given.means[given.counts > 0] - mean).astype(kind),
        "factor": packed,
        "rows": np.array([rows], np.int64),
    }


# -- on the coordinator ---------------------------------------------------------------------------


def from_tensors(given: Tensors, labels: int, width: int, exact: bool = False) -> DeviceMoments:
    """Validate and unpack the moments that a device sent.

    Args:
        given: Tensors of the device.
        labels: Number of labels of the job.
        width: Number of features d.
        exact: Whether the values are float64, as in `to_tensors`.

    Raises:
        UpdateError: If tensors are missing or have wrong shapes, or if no examples can have such moments.
    """
    if missing := sorted(set(WANTED) - given.keys()):
        raise UpdateError(f"moments: {', '.join(missing)} missing: update the agent")
    _require_shapes({"counts": given["counts"], "rows": given["rows"]}, {"counts": (labels,), "rows": (1,)}, np.int64)
    counts, rows = given["counts"], int(given["rows"][0])
    if not counts.any():
        raise UpdateError("moments: counts of examples that are all 0")
    if not 1 <= rows <= min(int(counts.sum()), width):
        raise UpdateError(f"moments: a factor of {rows} rows from {counts.sum()} examples of {width} features")
    present = counts > 0
    shapes = {"means": (int(present.sum()), width), "factor": (_trapezoid_size(rows, width),)}
    _require_shapes({name: given[name] for name in shapes}, shapes, np.float64 if exact else np.float32)
    _require_shapes({"mean": given["mean"]}, {"mean": (width,)}, np.float64)
    for name in ("mean", *shapes):
        if np.abs(given[name]).max(initial=0.0) > LARGEST:
            raise UpdateError(f"moments: {name} beyond {LARGEST:g}, which no pooled maps reach")
    found = unpack_tensors(given)
    _require_consistent(found)
    return found


def unpack_tensors(given: Tensors) -> DeviceMoments:
    counts, mean, rows = given["counts"], given["mean"], int(given["rows"][0])
    packed, width = given["factor"], len(mean)
    means, factor = np.zeros((len(counts), width)), np.zeros((rows, width))
    means[counts > 0] = mean + given["means"]
    for row, place in _trapezoid_rows(rows, width):
        factor[row, row:] = packed[place]
    return DeviceMoments(counts.astype(np.int64), means, factor)


def require_weight(given: DeviceMoments, weight: float) -> None:
    """Raise an error unless the number of examples equals the update's weight.

    Raises:
        UpdateError: If the numbers differ.
    """
    if given.n != weight:
        raise UpdateError(f"moments: of {given.n:.0f} examples, in an update that weighs {weight:g}")


def merge_moments(sums: Sequence[ClassMoments], parts: Sequence[DeviceMoments]) -> ClassMoments:
    """Merge sums and devices' moments into the sums of all their examples.

    All second moments are shifted to the common mean before they are added, so that no large numbers cancel.
    """
    counts = sum(each.counts for each in sums) + sum(each.counts.astype(np.float64) for each in parts)
    totals = sum(each.totals for each in sums) + sum(each.counts[:, None] * each.means for each in parts)
    counts, totals = np.asarray(counts), np.asarray(totals)
    mean, rows = totals.sum(axis=0) / counts.sum(), [each.factor for each in parts]
    every: list[ClassMoments | DeviceMoments] = [*sums, *parts]
    rows += [np.sqrt(each.n) * (each.mean - mean)[None] for each in every]
    stacked = np.concatenate(rows)
    scatter = stacked.T @ stacked
    for one in sums:
        scatter += one.scatter
    return ClassMoments(counts, totals, scatter)


# -- packing --------------------------------------------------------------------------------------


def pack_symmetric(matrix: np.ndarray) -> np.ndarray:
    """Pack the upper half of a symmetric matrix (d, d) into a vector of d (d + 1) / 2."""
    half = np.empty(_trapezoid_size(*matrix.shape), matrix.dtype)
    for row, place in _trapezoid_rows(*matrix.shape):
        half[place] = matrix[row, row:]
    return half


def unpack_symmetric(half: np.ndarray, width: int) -> np.ndarray:
    matrix = np.empty((width, width), half.dtype)
    for row, place in _trapezoid_rows(width, width):
        matrix[row, row:] = matrix[row:, row] = half[place]
    return matrix


# -- checks and packing ---------------------------------------------------------------------------


def _require_consistent(given: DeviceMoments) -> None:
    # Second moments within classes must be positive semi-definite. Only small matrices are decomposed.
    apart = np.sqrt(given.counts)[:, None] * (given.means - given.mean)
    apart = apart[given.counts > 0]
    both = np.concatenate([given.factor, apart])
    values, vectors = np.linalg.eigh(both @ both.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    signs = np.concatenate([np.ones(len(given.factor)), -np.ones(len(apart))])
    inner = np.linalg.eigvalsh(root.T @ (signs[:, None] * root))
    if inner[0] < -NEGATIVE * max(float(values[-1]), np.finfo(np.float64).tiny):
        raise UpdateError(
            "moments: class means that differ by more than the second moments allow: within classes these are not "
            "positive semi-definite"
        )


def _require_shapes(given: Tensors, shapes: dict[str, tuple[int, ...]], kind: type) -> None:
    try:
        tensors.require_addable(given, {name: TensorSpec(shape, np.dtype(kind)) for name, shape in shapes.items()})
    except UpdateError as error:
        raise UpdateError(f"moments: {error}") from None


def _trapezoid_size(rows: int, width: int) -> int:
    return rows * width - rows * (rows - 1) // 2


def _trapezoid_rows(rows: int, width: int) -> Iterator[tuple[int, slice]]:
    start = 0
    for row in range(rows):
        yield row, slice(start, start + width - row)
        start += width - row
