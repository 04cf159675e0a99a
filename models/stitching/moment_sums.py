"""Moments of many devices, added up so that the bits depend on neither order nor grouping. numpy only.

A device's moments (`fedquilt.models.stitching.class_moments`) are kept as they were sent for as long as those of all
devices are smaller than their sum. Then they are added up (`fedquilt.exact`): counts, sums of features over each class,
and second moments z z' about zero, each of which is rounded once from the device's factor and mean. The bits of such a
product depend on the processor, as other products do.

Second moments are one exact sum for each PANEL rows of the matrix, from the diagonal on: so a device's product is made
and added panel by panel, and is never whole in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from fedquilt import exact, tensors
from fedquilt.core import Contribution, UpdateError
from fedquilt.exact import Total
from fedquilt.models.stitching import class_moments
from fedquilt.models.stitching.class_moments import Part, Sums

PANEL: Final = 128  # rows of second moments in one sum
TOGETHER: Final = 8  # devices whose factors are unpacked at a time, so that a panel stays in the processor's cache
SLACK: Final = 1e-9  # by which rounding may have a product of two features exceed what their squares allow, as a share


@dataclass(frozen=True)
class Gathering:
    """Moments of the devices of one round: a round's accumulator. Either `sums` or `parts` is empty.

    Attributes:
        sums: exact sums: "counts" (labels,), "totals" (labels, d), "second.I" (rows, d - I), from row I on.
        parts: device -> its moments as they were sent.
        devices: device -> 1.
        short: number of devices whose memory held some of the wanted examples only.
    """

    sums: Mapping[str, Total] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    short: int = 0

    def plus(self, update: Contribution) -> Gathering:
        """Add the moments of one device's update, which was checked (`checked`), in place."""
        given = {name: np.asarray(update.bundles["moments"][name]) for name in class_moments.WANTED}
        return self.merged(
            Gathering(
                parts={update.device: given},
                devices={update.device: 1},
                short=int(update.metrics.get("short", 0.0) > 0),
            )
        )

    def merged(self, other: Gathering) -> Gathering:
        """Merge the moments of other devices, in place."""
        found = Gathering(
            exact.join(self.sums, other.sums),
            exact.join(self.parts, other.parts),
            exact.join(self.devices, other.devices),
            self.short + other.short,
        )
        held = sum(tensors.total_bytes([part]) for part in found.parts.values())
        width = max((len(part["mean"]) for part in found.parts.values()), default=0)
        return found.added() if found.sums or held > sum_bytes(width) else found

    def value(self, before: Sums | None = None) -> Sums:
        """Sums of all devices, one at least, about the mean of all examples.

        The mean is taken off at the end: second moments lose (mean / deviation)^2 of float64's 16 digits.

        Args:
            before: sums of further devices, which are merged with these.
        """
        parts = [class_moments.unpacked(part) for part in self.parts.values()]
        small = _small(dict(self.sums), parts)
        counts, totals = small["counts"].value(), small["totals"].value()
        n, features, width = counts.sum(), totals.sum(axis=0), totals.shape[1]
        scatter, factors = np.empty((width, width)), [_about_zero(part) for part in parts]
        if before is not None:
            apart, share = features / n - before.mean, n * before.n / (n + before.n)
            counts, totals = counts + before.counts, totals + before.totals
        for start in range(0, width, PANEL):
            rows = slice(start, start + PANEL)
            panel = _panel(self.sums.get(f"second.{start}"), factors, start).value()
            panel -= np.outer(features[rows], features[start:] / n)
            if before is not None:
                panel += before.scatter[rows, start:]
                panel += np.outer(share * apart[rows], apart[start:])
            square = np.triu(panel[:, : len(panel)])
            panel[:, : len(panel)] = square + np.triu(square, 1).T
            scatter[rows, start:], scatter[start:, rows] = panel, panel.T
        return Sums(counts, totals, scatter)

    def added(self) -> Gathering:
        """The same as sums alone, in place of those that it has."""
        sums, parts = dict(self.sums), list(self.parts.values())
        for first in range(0, len(parts), TOGETHER):
            some = [class_moments.unpacked(part) for part in parts[first : first + TOGETHER]]
            factors, sums = [_about_zero(part) for part in some], _small(sums, some)
            for start in range(0, factors[0].shape[1], PANEL):
                sums[f"second.{start}"] = _panel(sums.get(f"second.{start}"), factors, start)
        return replace(self, sums=sums, parts={})


def sum_bytes(width: int) -> int:
    """Bytes of sums of `width` features, but for the small ones: 12 for each entry of half the second moments."""
    return 6 * width * width


def checked(update: Contribution, labels: int, width: int, exact: bool = False) -> None:
    """Check the moments of one device before they are added; arguments as of `class_moments.from_tensors`.

    Raises:
        UpdateError: they are not what was asked for, or of another number of examples than the update weighs.
    """
    part = class_moments.from_tensors(update.bundles.get("moments", {}), labels, width, exact)
    class_moments.require_weight(part, update.weight)


def require(total: Gathering, labels: int, width: int, weight: float, exact: bool = False) -> None:
    """Check the moments of a site's boards before they are merged.

    Args:
        total: as the site sent it.
        labels: number of labels of the job.
        width: number of features d.
        weight: of the update that they came in.
        exact: as of `class_moments.from_tensors`.

    Raises:
        UpdateError: they have other names or shapes, count other devices or examples, or cannot be moments.
    """
    if not 0 <= total.short <= len(total.devices) or set(total.devices.values()) != {1}:
        raise UpdateError("moments: of no devices, or of one twice")
    if total.parts.keys() != (set() if total.sums else total.devices.keys()):
        raise UpdateError("moments: of other devices than are named beside them")
    parts = [class_moments.from_tensors(part, labels, width, exact) for part in total.parts.values()]
    n = sum(part.n for part in parts)
    if total.sums:
        n = _require_sums(total.sums, labels, width, weight)
    if n != weight:
        raise UpdateError(f"moments: of {n:g} examples, in an update that weighs {weight:g}")


def _small(sums: dict[str, Total], parts: Sequence[Part]) -> dict[str, Total]:
    """Sums, in place, with counts and totals of these parts."""
    for part in parts:
        counts = part.counts.astype(np.float64)
        sums |= exact.plus(sums, {"counts": counts, "totals": counts[:, None] * part.means})
    return sums


def _about_zero(part: Part) -> np.ndarray:
    """Rows (rows + 1, d) whose product with themselves is the part's second moments about zero."""
    return np.concatenate([part.factor, np.sqrt(part.n) * part.mean[None]])


def _panel(total: Total | None, factors: Sequence[np.ndarray], start: int) -> Total:
    """Sum of the second moments from one row on, in place, with these of further devices."""
    for factor in factors:
        total = exact.add(total, factor[:, start : start + PANEL].T @ factor[:, start:])
    assert total is not None
    return total


def _require_sums(sums: Mapping[str, Total], labels: int, width: int, weight: float) -> float:
    """Check exact sums that came from elsewhere; returns their number of examples."""
    shapes: dict[str, tuple[int, ...]] = {"counts": (labels,), "totals": (labels, width)}
    starts = range(0, width, PANEL)
    shapes |= {f"second.{start}": (min(PANEL, width - start), width - start) for start in starts}
    like: dict[str, Any] = {name: np.broadcast_to(np.float64(0), shape) for name, shape in shapes.items()}
    exact.require(sums, like, weight)
    counts = sums["counts"].value()
    if (counts < 0).any() or (counts != np.floor(counts)).any():
        raise UpdateError("moments: counts of examples that are negative, or not whole")
    squares = np.concatenate([np.diagonal(sums[f"second.{start}"].value()) for start in starts])
    if (squares < 0).any():
        raise UpdateError("moments: a negative square of a feature")
    most = np.sqrt(squares) * (1 + SLACK)
    for start in starts:
        panel = np.abs(sums[f"second.{start}"].value())
        if (panel > most[start : start + PANEL, None] * most[start:]).any():
            raise UpdateError("moments: a product of two features that is larger than their squares allow")
    return float(counts.sum())
