"""Sums over devices that determine a linear head on frozen features.

A device sends its `DeviceMoments`: the number of its examples of each class, their mean features, and a factor R of the
centred second moments (R'R = sum of (z - mean)(z - mean)') with min(examples, d) rows.
`ExactMomentSums` adds the moments of all devices, and `fedquilt.models.stitching.algebra.joint_head` solves heads from
the total. Requires numpy only.

Privacy: the factor of a device with few examples reveals the span of its activations. Moments of a single device should
be deleted after their round. Only the sum over devices is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import ExactSum
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import DeviceUpdate, Tensors, UpdateError
from fedquilt.models.stitching.algebra import least_squares

PANEL_ROWS: Final = 128  # rows of second moments in one sum
DEVICES_PER_BATCH: Final = 8  # devices unpacked at a time, so that a panel stays in the processor's cache
SLACK: Final = 1e-9  # tolerance of Cauchy-Schwarz: rounding may raise |sum a b| by this share of its bound
TENSOR_NAMES = ("counts", "mean", "means", "factor", "rows")  # tensors that a device sends
MAX_ABSOLUTE = 1e9  # limit of means and factors, which no pooled map reaches
NEGATIVE_TOLERANCE = 1e-3  # negative eigenvalues up to this share of the largest eigenvalue are rounding errors


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

    def to_sums(self) -> ClassMoments:
        counts = self.counts.astype(np.float64)
        return ClassMoments(counts, counts[:, None] * self.means, self.factor.T @ self.factor)


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
    """Return the peak memory in bytes of `compute_moments` on `rows` examples of `width` features."""
    return 32 * rows * width


def compute_moments(z: np.ndarray, y: np.ndarray, labels: int) -> DeviceMoments:
    """Return the moments of features z (n, d) with labels y (n,) below `labels`."""
    z = z.astype(np.float64)
    counts = np.bincount(y, minlength=labels).astype(np.int64)
    means = np.zeros((labels, z.shape[1]))
    for label in np.flatnonzero(counts):
        means[label] = z[y == label].mean(axis=0)
    z -= z.mean(axis=0)
    return DeviceMoments(counts, means, np.asarray(np.linalg.qr(z, mode="r")))


def pack_moments(moments: DeviceMoments, exact: bool = False) -> dict[str, np.ndarray]:
    """Pack moments for sending: the mean, the offsets of class means from the mean, and the factor.

    Centred values are sent as float32, which is accurate for large means, or as float64 if `exact`.
    """
    kind, mean = np.float64 if exact else np.float32, moments.mean
    return {
        "counts": moments.counts,
        "mean": mean,
        "means": (moments.means[moments.counts > 0] - mean).astype(kind),
        "factor": least_squares.pack_upper(moments.factor, kind),
        "rows": np.array([len(moments.factor)], np.int64),
    }


# -- on the coordinator ---------------------------------------------------------------------------


def read_sent_moments(sent_tensors: Tensors, labels: int, width: int, exact: bool = False) -> DeviceMoments:
    """Validate and unpack the moments that a device sent, with float64 values if `exact`.

    Raises:
        UpdateError: If tensors are missing or have wrong shapes, or if no examples can have such moments.
    """
    if missing := sorted(set(TENSOR_NAMES) - sent_tensors.keys()):
        raise UpdateError(f"moments: {', '.join(missing)} missing: update the agent")
    _require_shapes(
        {"counts": sent_tensors["counts"], "rows": sent_tensors["rows"]}, {"counts": (labels,), "rows": (1,)}, np.int64
    )
    counts, rows = sent_tensors["counts"], int(sent_tensors["rows"][0])
    if not counts.any():
        raise UpdateError("moments: the number of examples is 0 in every class")
    if not 1 <= rows <= min(int(counts.sum()), width):
        raise UpdateError(
            f"moments: the factor has {rows} rows: {counts.sum()} examples of {width} features allow 1 to "
            f"{min(int(counts.sum()), width)}"
        )
    has_examples = counts > 0
    shapes = {"means": (int(has_examples.sum()), width), "factor": (least_squares.packed_size(rows, width),)}
    _require_shapes({name: sent_tensors[name] for name in shapes}, shapes, np.float64 if exact else np.float32)
    _require_shapes({"mean": sent_tensors["mean"]}, {"mean": (width,)}, np.float64)
    for name in ("mean", *shapes):
        if np.abs(sent_tensors[name]).max(initial=0.0) > MAX_ABSOLUTE:
            raise UpdateError(f"moments: {name!r} has values above {MAX_ABSOLUTE:g}, which pooled maps never reach")
    moments = unpack_without_validation(sent_tensors)
    _require_positive_semidefinite(moments)
    return moments


def unpack_without_validation(sent_tensors: Tensors) -> DeviceMoments:
    counts, mean = sent_tensors["counts"], sent_tensors["mean"]
    means = np.zeros((len(counts), len(mean)))
    means[counts > 0] = mean + sent_tensors["means"]
    factor = least_squares.unpack_upper(sent_tensors["factor"], int(sent_tensors["rows"][0]), len(mean))
    return DeviceMoments(counts.astype(np.int64), means, factor)


def _require_positive_semidefinite(moments: DeviceMoments) -> None:
    # Second moments within classes must be positive semi-definite. Only small matrices are decomposed.
    class_offsets = np.sqrt(moments.counts)[:, None] * (moments.means - moments.mean)
    class_offsets = class_offsets[moments.counts > 0]
    rows_between_classes = np.concatenate([moments.factor, class_offsets])
    values, vectors = np.linalg.eigh(rows_between_classes @ rows_between_classes.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    signs = np.concatenate([np.ones(len(moments.factor)), -np.ones(len(class_offsets))])
    inner = np.linalg.eigvalsh(root.T @ (signs[:, None] * root))
    if inner[0] < -NEGATIVE_TOLERANCE * max(float(values[-1]), np.finfo(np.float64).tiny):
        raise UpdateError(
            "moments: the class means differ by more than the second moments allow: second moments within classes are "
            "not positive semi-definite"
        )


def _require_shapes(sent_tensors: Tensors, shapes: dict[str, tuple[int, ...]], kind: type) -> None:
    least_squares.require_tensors(
        sent_tensors, {name: TensorSpec(shape, np.dtype(kind)) for name, shape in shapes.items()}
    )


# -- sums of devices ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactMomentSums:
    """Moments of the devices of one round, as received (`parts`) or as exact sums (`sums`).

    Moments are added once the parts need more memory than the sums. The order of the additions has no effect on the
    sums. Only the processor has: it rounds a device's second moments about zero, computed from its factor and mean.

    The matrix of second moments is divided into panels of PANEL_ROWS rows, from the diagonal to the right. Panels are
    added one by one, so that a device's whole matrix is never in memory.

    Attributes:
        sums: Exact sums "counts" (labels,), "totals" (labels, d), and "second.<row>" of the panel that begins there.
        parts: Moments as received, by device.
        devices: Number of contributions by device, which is valid only if all are 1.
        short: Number of devices with memory for only some of the requested examples.
    """

    sums: Mapping[str, ExactSum] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    short: int = 0

    def add_update(self, update: DeviceUpdate) -> ExactMomentSums:
        arrays = {name: np.asarray(update.bundles["moments"][name]) for name in TENSOR_NAMES}
        return self.merge_with(
            ExactMomentSums(
                parts={update.device: arrays},
                devices={update.device: 1},
                short=int(update.metrics.get("short", 0.0) > 0),
            )
        )

    def merge_with(self, other: ExactMomentSums) -> ExactMomentSums:
        """Return the moments merged with those of other devices. `self` must not be used afterwards.

        `fedquilt.arrays.exact_sums.merge_accumulators` calls this method.
        """
        merged = ExactMomentSums(
            exact_sums.merge_accumulators(self.sums, other.sums),
            exact_sums.merge_accumulators(self.parts, other.parts),
            exact_sums.merge_accumulators(self.devices, other.devices),
            self.short + other.short,
        )
        parts_bytes = sum(tensors.total_bytes([part]) for part in merged.parts.values())
        width = max((len(part["mean"]) for part in merged.parts.values()), default=0)
        return merged.fold_parts_into_sums() if merged.sums or parts_bytes > sum_bytes(width) else merged

    def total_sums(self, earlier_sums: ClassMoments | None = None) -> ClassMoments:
        """Return the moments of all devices, added to `earlier_sums` if given.

        The mean is subtracted at the end, so that second moments are imprecise if (mean / deviation)^2 nears 1e16.
        """
        parts = [unpack_without_validation(part) for part in self.parts.values()]
        counts_and_totals = _add_counts_and_totals(dict(self.sums), parts)
        counts, totals = counts_and_totals["counts"].rounded_value(), counts_and_totals["totals"].rounded_value()
        n, features, width = counts.sum(), totals.sum(axis=0), totals.shape[1]
        scatter, factors = np.empty((width, width)), [_rows_about_zero(part) for part in parts]
        if earlier_sums is not None:
            mean_difference, share = features / n - earlier_sums.mean, n * earlier_sums.n / (n + earlier_sums.n)
            counts, totals = counts + earlier_sums.counts, totals + earlier_sums.totals
        for start in range(0, width, PANEL_ROWS):
            rows = slice(start, start + PANEL_ROWS)
            panel = _add_second_moment_panel(self.sums.get(f"second.{start}"), factors, start).rounded_value()
            panel -= np.outer(features[rows], features[start:] / n)
            if earlier_sums is not None:
                panel += earlier_sums.scatter[rows, start:]
                panel += np.outer(share * mean_difference[rows], mean_difference[start:])
            square = np.triu(panel[:, : len(panel)])
            panel[:, : len(panel)] = square + np.triu(square, 1).T
            scatter[rows, start:], scatter[start:, rows] = panel, panel.T
        return ClassMoments(counts, totals, scatter)

    def fold_parts_into_sums(self) -> ExactMomentSums:
        sums, parts = dict(self.sums), list(self.parts.values())
        for start_index in range(0, len(parts), DEVICES_PER_BATCH):
            moments = [unpack_without_validation(part) for part in parts[start_index : start_index + DEVICES_PER_BATCH]]
            factors, sums = [_rows_about_zero(part) for part in moments], _add_counts_and_totals(sums, moments)
            for start in range(0, factors[0].shape[1], PANEL_ROWS):
                sums[f"second.{start}"] = _add_second_moment_panel(sums.get(f"second.{start}"), factors, start)
        return replace(self, sums=sums, parts={})


def sum_bytes(width: int) -> int:
    """Return the approximate size of exact second moments of `width` features."""
    return 6 * width * width


def validate_update_moments(update: DeviceUpdate, labels: int, width: int, exact: bool = False) -> None:
    """Raise UpdateError unless an update has valid moments and its weight is their number of examples."""
    part = read_sent_moments(update.bundles.get("moments", {}), labels, width, exact)
    least_squares.require_weight(part.n, update.weight)


def validate_site_moments(total: ExactMomentSums, labels: int, width: int, weight: float, exact: bool = False) -> None:
    """Validate the moments of a site's devices before they are merged.

    Raises:
        UpdateError: If names, shapes, devices or numbers of examples are wrong, or if the values cannot be moments.
    """
    if not 0 <= total.short <= len(total.devices) or set(total.devices.values()) != {1}:
        raise UpdateError("moments: the site names no device, counts a device twice, or has a wrong number `short`")
    if total.parts.keys() != (set() if total.sums else total.devices.keys()):
        raise UpdateError("moments: the devices of the parts differ from the listed devices")
    parts = [read_sent_moments(part, labels, width, exact) for part in total.parts.values()]
    n = sum(part.n for part in parts)
    if total.sums:
        n = _validate_and_count_examples(total.sums, labels, width, weight)
    least_squares.require_weight(n, weight)


def _add_counts_and_totals(sums: dict[str, ExactSum], parts: Sequence[DeviceMoments]) -> dict[str, ExactSum]:
    for part in parts:
        counts = part.counts.astype(np.float64)
        sums |= exact_sums.add_arrays(sums, {"counts": counts, "totals": counts[:, None] * part.means})
    return sums


def _rows_about_zero(part: DeviceMoments) -> np.ndarray:
    # R with R'R = the second moments about zero.
    return np.concatenate([part.factor, np.sqrt(part.n) * part.mean[None]])


def _add_second_moment_panel(total: ExactSum | None, factors: Sequence[np.ndarray], start: int) -> ExactSum:
    for factor in factors:
        total = exact_sums.add_to_sum(total, factor[:, start : start + PANEL_ROWS].T @ factor[:, start:])
    assert total is not None
    return total


def _validate_and_count_examples(sums: Mapping[str, ExactSum], labels: int, width: int, weight: float) -> float:
    shapes: dict[str, tuple[int, ...]] = {"counts": (labels,), "totals": (labels, width)}
    starts = range(0, width, PANEL_ROWS)
    shapes |= {f"second.{start}": (min(PANEL_ROWS, width - start), width - start) for start in starts}
    templates: dict[str, Any] = {name: np.broadcast_to(np.float64(0), shape) for name, shape in shapes.items()}
    exact_sums.require_valid_sums(sums, templates, weight)
    counts = sums["counts"].rounded_value()
    if (counts < 0).any() or (counts != np.floor(counts)).any():
        raise UpdateError("moments: numbers of examples are negative or not integers")
    squares = np.concatenate([np.diagonal(sums[f"second.{start}"].rounded_value()) for start in starts])
    if (squares < 0).any():
        raise UpdateError("moments: the sum of squares of a feature is negative")
    norms = np.sqrt(squares) * (1 + SLACK)
    for start in starts:
        panel = np.abs(sums[f"second.{start}"].rounded_value())
        if (panel > norms[start : start + PANEL_ROWS, None] * norms[start:]).any():
            raise UpdateError("moments: the product of two features is larger than their squares allow")
    return float(counts.sum())
