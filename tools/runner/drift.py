"""How far the examples that a model sees have moved from those that it began with: counts of a few numbers of each.

Of every example a few numbers are taken: mean and deviation of each channel, how much neighbouring values differ, the
class, its confidence and the entropy of the answer. The first ones make the reference: the limits of ten bins that hold
as many of them each. What comes later is counted in these bins, and what lies further back weighs less. No example is
kept, and neither is a number of a single one once the reference is made.

Drift is the Jensen-Shannon distance of the two distributions (J. Lin, IEEE Trans. Inf. Theory 37(1), 1991; base 2, so
0 to 1), the largest of all numbers'. Two samples of n and m examples of the same distribution differ too: the
divergence, the distance's square, is then (1/n + 1/m) / (8 ln 2) times a chi-squared of one degree less than there are
bins (after I. Grosse et al., Phys. Rev. E 65, 041905, 2002). A distance that this explains, at one in a million, is 0;
of a larger one the expected part of it is taken off. Examples that resemble the one before, as frames of a camera do,
count as fewer: n (1 - r) / (1 + r) of them, r being the correlation of neighbours in the reference.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

SIZE: Final = 500  # examples of the reference, and of what is compared with it
LEAST: Final = 50  # examples before a comparison
BINS: Final = 10
FEW: Final = 5  # a class that the reference has less often shares a bin with others
ALPHA: Final = 1e-6  # share of comparisons of the same distribution that may show drift
CHANNELS_MOST: Final = 16  # channels with numbers of their own
CORRELATED: Final = 0.98  # largest correlation of neighbours that is believed


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution of the examples that a model began with."""

    names: tuple[str, ...]  # of the numbers
    edges: tuple[tuple[float, ...], ...]  # of each: ascending, up to BINS - 1
    counts: tuple[tuple[float, ...], ...]  # of each: below, at and between its edges
    weights: tuple[Annotated[float, Meta(gt=0, le=1)], ...]  # of each: what an example counts for
    classes: tuple[int, ...]  # with a bin of their own, in order; the last bin has all others
    class_counts: tuple[float, ...]
    class_weight: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @property
    def whole(self) -> bool:
        """Whether its parts fit each other, as they may not in a damaged file."""
        numbers = len(self.names) == len(self.edges) == len(self.counts) == len(self.weights)
        bins = all(len(found) == 2 * len(limits) + 1 for limits, found in zip(self.edges, self.counts, strict=False))
        counted = all(sum(found) > 0 and min(found) >= 0 for found in (*self.counts, self.class_counts))
        return numbers and bins and counted and len(self.class_counts) == len(self.classes) + 1


def numbers(prepared: np.ndarray, scores: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """The numbers of some examples, and their names.

    Args:
        prepared: network inputs, (n, ...).
        scores: outputs, (n, labels).

    Returns:
        names (k,) and values (n, k) float64.
    """
    found: dict[str, np.ndarray] = {}
    x = prepared.astype(np.float64)
    if x.ndim == 4:  # images (n, channels, height, width)
        for channel in range(min(x.shape[1], CHANNELS_MOST)):
            found[f"mean {channel}"] = x[:, channel].mean(axis=(1, 2))
            found[f"deviation {channel}"] = x[:, channel].std(axis=(1, 2))
        if x.shape[3] > 1:
            found["grain"] = np.abs(np.diff(x, axis=3)).mean(axis=(1, 2, 3))
    elif x.ndim == 3:  # series (n, steps, channels)
        for channel in range(min(x.shape[2], CHANNELS_MOST)):
            found[f"mean {channel}"] = x[:, :, channel].mean(axis=1)
            found[f"deviation {channel}"] = x[:, :, channel].std(axis=1)
    else:
        flat = x.reshape(len(x), -1)
        if flat.shape[1] <= CHANNELS_MOST:
            found |= {f"value {column}": flat[:, column] for column in range(flat.shape[1])}
        else:
            found |= {"mean": flat.mean(axis=1), "deviation": flat.std(axis=1)}
            found["grain"] = np.abs(np.diff(flat, axis=1)).mean(axis=1)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True).astype(np.float64))
    shares = odds / odds.sum(axis=1, keepdims=True)
    found["confidence"] = shares.max(axis=1)
    found["entropy"] = -(shares * np.log(np.maximum(shares, 1e-300))).sum(axis=1)
    return tuple(found), np.stack(list(found.values()), axis=1)


def reference(names: Sequence[str], values: np.ndarray, classes: np.ndarray) -> Reference:
    """The distribution of some examples, in the order in which they came.

    Args:
        names: of the numbers, (k,).
        values: (n, k).
        classes: (n,).
    """
    edges = tuple(
        tuple(float(edge) for edge in np.unique(np.quantile(column, np.arange(1, BINS) / BINS))) for column in values.T
    )
    counts = []
    for column, limits in zip(values.T, edges, strict=True):
        found = Counter(place(limits, value) for value in column)
        counts.append(tuple(float(found[bin]) for bin in range(2 * len(limits) + 1)))
    told = Counter(int(each) for each in classes)
    own = tuple(sorted(number for number, count in told.items() if count >= FEW))
    rest = float(len(classes) - sum(told[number] for number in own))
    hot = np.stack([classes == number for number in own], axis=1) if own else np.zeros((len(classes), 1))
    return Reference(
        tuple(names),
        edges,
        tuple(counts),
        tuple(_weight(column[:, None]) for column in values.T),
        own,
        (*(float(told[number]) for number in own), rest),
        _weight(hot.astype(np.float64)),
    )


def place(edges: Sequence[float], value: float) -> int:
    """The bin of a value: even numbers are between two edges, odd ones at an edge, where many values are equal."""
    return bisect_left(edges, value) + bisect_right(edges, value)


def _weight(columns: np.ndarray) -> float:
    """What an example counts for, by how much it resembles the one before."""
    centred = columns - columns.mean(axis=0)
    whole = float((centred**2).sum())
    if whole <= 0:
        return 1.0
    alike = min(max(float((centred[1:] * centred[:-1]).sum()) / whole, 0.0), CORRELATED)
    return 1.0 if alike < 2 / math.sqrt(len(columns)) else (1 - alike) / (1 + alike)


class Drift:
    """Counts of the examples of one model.

    Args:
        known: its reference, if it has one already; else the first `size` examples make one.
        size: examples of the reference, and about as many of those behind weigh in the comparison.
    """

    def __init__(self, known: Reference | None = None, size: int = SIZE) -> None:
        self.reference, self._size = known, size
        self._keep = 1 - 2 / (size + 1)  # factor of all counts at each example: they weigh as `size` of equal weight
        self._first: list[tuple[np.ndarray, int]] = []
        self._names: tuple[str, ...] = ()
        self._counts: list[list[float]] = []
        self._classes: list[float] = []
        self._sum = self._squares = 0.0  # of the weights of the examples counted
        if known is not None:
            self._clear(known)

    def _clear(self, known: Reference) -> None:
        self._counts = [[0.0] * len(each) for each in known.counts]
        self._classes = [0.0] * len(known.class_counts)

    def add(self, names: tuple[str, ...], values: np.ndarray, classes: Sequence[int]) -> None:
        """Count examples: their numbers (n, k) and classes (n,)."""
        if self.reference is not None and self.reference.names != names:  # made by another version
            self.reference = None
        for row, number in zip(values, classes, strict=True):
            if self.reference is None:
                self._first.append((row, number))
                if len(self._first) >= self._size:
                    rows, numbers_ = zip(*self._first, strict=True)
                    self.reference = reference(names, np.stack(rows), np.array(numbers_))
                    self._first.clear()
                    self._clear(self.reference)
            else:
                self._count(self.reference, row.tolist(), number)

    def _count(self, known: Reference, row: Sequence[float], number: int) -> None:
        keep = self._keep
        self._sum, self._squares = self._sum * keep + 1, self._squares * keep * keep + 1
        for counts in (*self._counts, self._classes):
            for index, count in enumerate(counts):
                if count:
                    counts[index] = count * keep
        for counts, edges, value in zip(self._counts, known.edges, row, strict=True):
            counts[place(edges, value)] += 1
        found = bisect_left(known.classes, number)
        mine = found < len(known.classes) and known.classes[found] == number
        self._classes[found if mine else len(known.classes)] += 1

    @property
    def sample(self) -> float:
        """Number of examples of equal weight that what is compared is worth."""
        return self._sum**2 / self._squares if self._squares else 0.0

    def distances(self) -> dict[str, float]:
        """Name of a number -> its distance from the reference, 0 to 1; {}: too few examples have been seen."""
        known = self.reference
        if known is None or self.sample < min(LEAST, self._size):
            return {}
        alpha = ALPHA / (len(known.names) + 1)
        found = {
            name: distance(before, now, weight, self.sample, alpha)
            for name, before, now, weight in zip(known.names, known.counts, self._counts, known.weights, strict=True)
        }
        found["class"] = distance(known.class_counts, self._classes, known.class_weight, self.sample, alpha)
        return found

    def score(self) -> float | None:
        """The largest of the distances; None: too few examples have been seen."""
        return max(self.distances().values(), default=None)


def distance(
    before: Sequence[float], now: Sequence[float], weight: float, sample: float, alpha: float = ALPHA
) -> float:
    """Jensen-Shannon distance of two counts, as far as chance does not explain it: 0 to 1.

    Args:
        before: counts of the reference.
        now: counts in the same bins.
        weight: what an example counts for.
        sample: number of examples that `now` is worth.
        alpha: probability with which chance alone leads to a distance above 0.
    """
    p, q = np.asarray(before, np.float64), np.asarray(now, np.float64)
    used = (p + q) > 0
    bins = int(used.sum())
    if bins < 2:
        return 0.0
    unit = (1 / (p.sum() * weight) + 1 / (sample * weight)) / (8 * math.log(2))
    p, q = p[used] / p.sum(), q[used] / q.sum()
    mean = (p + q) / 2
    found = float(sum((each[each > 0] * np.log2(each[each > 0] / mean[each > 0])).sum() for each in (p, q)) / 2)
    if found <= chi_squared(bins - 1, alpha) * unit:
        return 0.0
    expected = (bins - 1) * unit
    return math.sqrt(min(max((found - expected) / (1 - expected), 0.0), 1.0)) if expected < 1 else 0.0


def chi_squared(degrees: int, alpha: float) -> float:
    """Value that chi-squared exceeds with probability alpha (E. B. Wilson, M. M. Hilferty, PNAS 17, 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + NormalDist().inv_cdf(1 - alpha) * math.sqrt(part)) ** 3
