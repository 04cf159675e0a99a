"""Moments of many devices, summed bit-identically in any order and grouping.

Devices' moments (`fedquilt.models.stitching.algebra.class_moments`) are kept as received while they are smaller than
their sum. Then they are added (`fedquilt.arrays.exact_sums`): counts, sums of features over each class, and second
moments z z' about zero, each rounded once from the device's factor and mean. The bits of such a product depend on the
processor, as other products do.

Second moments are one exact sum for each PANEL rows of the matrix, from the diagonal on, so that a device's product is
added panel by panel and is never whole in memory. Requires numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import ExactSum
from fedquilt.core import DeviceUpdate, UpdateError
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.class_moments import ClassMoments, DeviceMoments

PANEL: Final = 128  # rows of second moments in one sum
TOGETHER: Final = 8  # devices whose factors are unpacked at a time, so that a panel stays in the processor's cache
SLACK: Final = 1e-9  # by which rounding may have a product of two features exceed what their squares allow, as a share


@dataclass(frozen=True)
class ExactMomentSums:
    """Moments of the devices of one round, either as `sums` or as separate `parts`.

    Attributes:
        sums: Exact sums "counts" (labels,), "totals" (labels, d) and "second.I" (rows, d - I), from row I on.
        parts: Moments as received, by device.
        devices: Number 1 for each device.
        short: Number of devices with memory for only some of the requested examples.
    """

    sums: Mapping[str, ExactSum] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    short: int = 0

    def add_update(self, update: DeviceUpdate) -> ExactMomentSums:
        given = {name: np.asarray(update.bundles["moments"][name]) for name in class_moments.WANTED}
        return self.merge_with(
            ExactMomentSums(
                parts={update.device: given},
                devices={update.device: 1},
                short=int(update.metrics.get("short", 0.0) > 0),
            )
        )

    def merge_with(self, other: ExactMomentSums) -> ExactMomentSums:
        """Merge the moments of other devices, in place. Called by `fedquilt.arrays.exact_sums.join`."""
        found = ExactMomentSums(
            exact_sums.merge_accumulators(self.sums, other.sums),
            exact_sums.merge_accumulators(self.parts, other.parts),
            exact_sums.merge_accumulators(self.devices, other.devices),
            self.short + other.short,
        )
        held = sum(tensors.total_bytes([part]) for part in found.parts.values())
        width = max((len(part["mean"]) for part in found.parts.values()), default=0)
        return found.sum_parts() if found.sums or held > sum_bytes(width) else found

    def total_sums(self, before: ClassMoments | None = None) -> ClassMoments:
        """Return the sums of all devices, one at least, about the mean of all examples.

        The mean is subtracted at the end: second moments lose (mean / deviation)^2 of float64's 16 digits.

        Args:
            before: Sums of earlier devices to merge with, or None.
        """
        parts = [class_moments.unpack_tensors(part) for part in self.parts.values()]
        small = _add_counts(dict(self.sums), parts)
        counts, totals = small["counts"].rounded_value(), small["totals"].rounded_value()
        n, features, width = counts.sum(), totals.sum(axis=0), totals.shape[1]
        scatter, factors = np.empty((width, width)), [_rows_about_zero(part) for part in parts]
        if before is not None:
            apart, share = features / n - before.mean, n * before.n / (n + before.n)
            counts, totals = counts + before.counts, totals + before.totals
        for start in range(0, width, PANEL):
            rows = slice(start, start + PANEL)
            panel = _add_panel(self.sums.get(f"second.{start}"), factors, start).rounded_value()
            panel -= np.outer(features[rows], features[start:] / n)
            if before is not None:
                panel += before.scatter[rows, start:]
                panel += np.outer(share * apart[rows], apart[start:])
            square = np.triu(panel[:, : len(panel)])
            panel[:, : len(panel)] = square + np.triu(square, 1).T
            scatter[rows, start:], scatter[start:, rows] = panel, panel.T
        return ClassMoments(counts, totals, scatter)

    def sum_parts(self) -> ExactMomentSums:
        sums, parts = dict(self.sums), list(self.parts.values())
        for first in range(0, len(parts), TOGETHER):
            some = [class_moments.unpack_tensors(part) for part in parts[first : first + TOGETHER]]
            factors, sums = [_rows_about_zero(part) for part in some], _add_counts(sums, some)
            for start in range(0, factors[0].shape[1], PANEL):
                sums[f"second.{start}"] = _add_panel(sums.get(f"second.{start}"), factors, start)
        return replace(self, sums=sums, parts={})


def sum_bytes(width: int) -> int:
    """Return the memory of the second moments' sums of `width` features."""
    return 6 * width * width


def validate_update_moments(update: DeviceUpdate, labels: int, width: int, exact: bool = False) -> None:
    """Validate the moments of one device before they are added.

    Raises:
        UpdateError: If the moments have the wrong form, or another number of examples than the update's weight.
    """
    part = class_moments.from_tensors(update.bundles.get("moments", {}), labels, width, exact)
    class_moments.require_weight(part, update.weight)


def validate_site_moments(total: ExactMomentSums, labels: int, width: int, weight: float, exact: bool = False) -> None:
    """Validate the moments of a site's devices before they are merged.

    Args:
        total: Moments that the site sent.
        labels: Number of labels of the job.
        width: Number of features d.
        weight: Weight of the update.
        exact: Whether the values are float64.

    Raises:
        UpdateError: If names, shapes, devices or numbers of examples are wrong, or if the values cannot be moments.
    """
    if not 0 <= total.short <= len(total.devices) or set(total.devices.values()) != {1}:
        raise UpdateError("moments: of no devices, or of one twice")
    if total.parts.keys() != (set() if total.sums else total.devices.keys()):
        raise UpdateError("moments: of other devices than are named beside them")
    parts = [class_moments.from_tensors(part, labels, width, exact) for part in total.parts.values()]
    n = sum(part.n for part in parts)
    if total.sums:
        n = _validate_sums(total.sums, labels, width, weight)
    if n != weight:
        raise UpdateError(f"moments: of {n:g} examples, in an update that weighs {weight:g}")


def _add_counts(sums: dict[str, ExactSum], parts: Sequence[DeviceMoments]) -> dict[str, ExactSum]:
    for part in parts:
        counts = part.counts.astype(np.float64)
        sums |= exact_sums.add_arrays(sums, {"counts": counts, "totals": counts[:, None] * part.means})
    return sums


def _rows_about_zero(part: DeviceMoments) -> np.ndarray:
    # R with R'R = the second moments about zero.
    return np.concatenate([part.factor, np.sqrt(part.n) * part.mean[None]])


def _add_panel(total: ExactSum | None, factors: Sequence[np.ndarray], start: int) -> ExactSum:
    for factor in factors:
        total = exact_sums.add_to_sum(total, factor[:, start : start + PANEL].T @ factor[:, start:])
    assert total is not None
    return total


def _validate_sums(sums: Mapping[str, ExactSum], labels: int, width: int, weight: float) -> float:
    shapes: dict[str, tuple[int, ...]] = {"counts": (labels,), "totals": (labels, width)}
    starts = range(0, width, PANEL)
    shapes |= {f"second.{start}": (min(PANEL, width - start), width - start) for start in starts}
    like: dict[str, Any] = {name: np.broadcast_to(np.float64(0), shape) for name, shape in shapes.items()}
    exact_sums.require_valid_sums(sums, like, weight)
    counts = sums["counts"].rounded_value()
    if (counts < 0).any() or (counts != np.floor(counts)).any():
        raise UpdateError("moments: counts of examples that are negative, or not whole")
    squares = np.concatenate([np.diagonal(sums[f"second.{start}"].rounded_value()) for start in starts])
    if (squares < 0).any():
        raise UpdateError("moments: a negative square of a feature")
    most = np.sqrt(squares) * (1 + SLACK)
    for start in starts:
        panel = np.abs(sums[f"second.{start}"].rounded_value())
        if (panel > most[start : start + PANEL, None] * most[start:]).any():
            raise UpdateError("moments: a product of two features that is larger than their squares allow")
    return float(counts.sum())
