"""Drift of the examples that a model receives, compared with its first examples.

Each example is described by a few features: mean and deviation of each channel, the difference of neighbouring
values, the class, its confidence and the entropy of the scores. In place of the last three, other tasks have the
outputs. The first examples form the reference, with ten bins
of equal count per feature. Later examples are counted in these bins with decaying weights. No example is stored, and
once the reference exists, no feature of a single example either.

Drift is the largest Jensen-Shannon distance of any feature (J. Lin, IEEE Trans. Inf. Theory 37(1), 1991, base 2, so 0
to 1). Two samples of n and m examples of the same distribution differ too: the divergence, the square of the distance,
is (1/n + 1/m) / (8 ln 2) times a chi-squared variable of one degree less than there are bins (after I. Grosse et al.,
Phys. Rev. E 65, 041905, 2002). A distance that chance exceeds more than once in a million counts as 0. From a larger
one the expected distance is subtracted. Examples that resemble their predecessor, such as camera frames, count as n (1
- r) / (1 + r) examples, with the correlation r of neighbours in the reference.
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

from fedquilt.core import TaskKind

REFERENCE_SIZE: Final = 500
MIN_EXAMPLES: Final = 50  # fewer examples give no drift
BINS: Final = 10
MIN_CLASS_COUNT: Final = 5  # rarer classes share one bin
ALPHA: Final = 1e-6  # probability of drift between samples of the same distribution
MAX_CHANNELS: Final = 16  # further channels have no features
MAX_CORRELATION: Final = 0.98


class ReferenceDistribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: tuple[str, ...]  # names of the features
    edges: tuple[tuple[float, ...], ...]  # ascending edges of each feature, up to BINS - 1
    counts: tuple[tuple[float, ...], ...]  # counts of each feature below, at and between the edges
    weights: tuple[Annotated[float, Meta(gt=0, le=1)], ...]  # effective weight of an example, for each feature
    classes: tuple[int, ...]  # classes with a bin each, in order; the last bin contains all other classes
    class_counts: tuple[float, ...]
    class_weight: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @property
    def is_consistent(self) -> bool:
        """Whether features, bins and counts match in number. In a damaged file they may not."""
        has_all_features = len(self.names) == len(self.edges) == len(self.counts) == len(self.weights)
        has_all_bins = all(
            len(counts) == 2 * len(limits) + 1 for limits, counts in zip(self.edges, self.counts, strict=False)
        )
        has_counts = all(sum(counts) > 0 and min(counts) >= 0 for counts in (*self.counts, self.class_counts))
        return has_all_features and has_all_bins and has_counts and len(self.class_counts) == len(self.classes) + 1


def compute_features(
    prepared: np.ndarray, outputs: np.ndarray, task: TaskKind = "classes"
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of features and their values (n, features), from inputs and outputs (n, outputs)."""
    features: dict[str, np.ndarray] = {}
    x = prepared.astype(np.float64)
    if x.ndim == 4:  # images (n, channels, height, width)
        for channel in range(min(x.shape[1], MAX_CHANNELS)):
            features[f"mean {channel}"] = x[:, channel].mean(axis=(1, 2))
            features[f"deviation {channel}"] = x[:, channel].std(axis=(1, 2))
        if x.shape[3] > 1:
            features["grain"] = np.abs(np.diff(x, axis=3)).mean(axis=(1, 2, 3))
    elif x.ndim == 3:  # series (n, steps, channels)
        for channel in range(min(x.shape[2], MAX_CHANNELS)):
            features[f"mean {channel}"] = x[:, :, channel].mean(axis=1)
            features[f"deviation {channel}"] = x[:, :, channel].std(axis=1)
    else:
        flat = x.reshape(len(x), -1)
        if flat.shape[1] <= MAX_CHANNELS:
            features |= {f"value {column}": flat[:, column] for column in range(flat.shape[1])}
        else:
            features |= {"mean": flat.mean(axis=1), "deviation": flat.std(axis=1)}
            features["grain"] = np.abs(np.diff(flat, axis=1)).mean(axis=1)
    features |= _class_features(outputs) if task == "classes" else _output_features(outputs)
    return tuple(features), np.stack(list(features.values()), axis=1)


def _class_features(scores: np.ndarray) -> dict[str, np.ndarray]:
    odds = np.exp(scores - scores.max(axis=1, keepdims=True).astype(np.float64))
    shares = odds / odds.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(axis=1)
    return {"confidence": shares.max(axis=1), "entropy": entropy}


def _output_features(outputs: np.ndarray) -> dict[str, np.ndarray]:
    return {f"output {index}": outputs[:, index] for index in range(min(outputs.shape[1], MAX_CHANNELS))}


def make_reference(names: Sequence[str], values: np.ndarray, classes: np.ndarray) -> ReferenceDistribution:
    edges = tuple(
        tuple(float(edge) for edge in np.unique(np.quantile(column, np.arange(1, BINS) / BINS))) for column in values.T
    )
    counts = []
    for column, limits in zip(values.T, edges, strict=True):
        bin_counts = Counter(find_bin(limits, value) for value in column)
        counts.append(tuple(float(bin_counts[bin]) for bin in range(2 * len(limits) + 1)))
    class_counts = Counter(int(class_number) for class_number in classes)
    frequent_classes = tuple(sorted(number for number, count in class_counts.items() if count >= MIN_CLASS_COUNT))
    rare_count = float(len(classes) - sum(class_counts[number] for number in frequent_classes))
    one_hot = (
        np.stack([classes == number for number in frequent_classes], axis=1)
        if frequent_classes
        else np.zeros((len(classes), 1))
    )
    return ReferenceDistribution(
        tuple(names),
        edges,
        tuple(counts),
        tuple(_estimate_effective_weight(column[:, None]) for column in values.T),
        frequent_classes,
        (*(float(class_counts[number]) for number in frequent_classes), rare_count),
        _estimate_effective_weight(one_hot.astype(np.float64)),
    )


def find_bin(edges: Sequence[float], value: float) -> int:
    """Return the number of a value's bin. Each edge has a bin of its own, with an odd number."""
    return bisect_left(edges, value) + bisect_right(edges, value)


def _estimate_effective_weight(columns: np.ndarray) -> float:
    # (1 - r) / (1 + r) with the correlation r of neighbouring examples
    centred = columns - columns.mean(axis=0)
    total_variance = float((centred**2).sum())
    if total_variance <= 0:
        return 1.0
    correlation = min(max(float((centred[1:] * centred[:-1]).sum()) / total_variance, 0.0), MAX_CORRELATION)
    return 1.0 if correlation < 2 / math.sqrt(len(columns)) else (1 - correlation) / (1 + correlation)


class DriftCounts:
    """Feature histograms of one model's examples.

    Args:
        reference: Reference of the model, or None to build one from the first `size` examples.
        size: Number of examples of the reference, and effective number of compared examples.
    """

    def __init__(self, reference: ReferenceDistribution | None = None, size: int = REFERENCE_SIZE) -> None:
        self.reference, self._size = reference, size
        self._decay = 1 - 2 / (size + 1)  # makes the counts worth `size` equally weighted examples
        self._first_examples: list[tuple[np.ndarray, int]] = []
        self._names: tuple[str, ...] = ()
        self._counts: list[list[float]] = []
        self._classes: list[float] = []
        self._weight_sum = self._squared_weight_sum = 0.0
        if reference is not None:
            self._reset_counts(reference)

    def _reset_counts(self, reference: ReferenceDistribution) -> None:
        self._counts = [[0.0] * len(counts) for counts in reference.counts]
        self._classes = [0.0] * len(reference.class_counts)

    def add_examples(self, names: tuple[str, ...], values: np.ndarray, classes: Sequence[int]) -> None:
        """Count n examples with feature values (n, features) and predicted classes.

        Without a reference of these features, the first `size` examples become the reference.
        """
        if self.reference is not None and self.reference.names != names:
            self.reference = None  # of another version of fedquilt
        for row, number in zip(values, classes, strict=True):
            if self.reference is None:
                self._first_examples.append((row, number))
                if len(self._first_examples) >= self._size:
                    rows, class_numbers = zip(*self._first_examples, strict=True)
                    self.reference = make_reference(names, np.stack(rows), np.array(class_numbers))
                    self._first_examples.clear()
                    self._reset_counts(self.reference)
            else:
                self._add_to_decayed_counts(self.reference, row.tolist(), number)

    def _add_to_decayed_counts(self, reference: ReferenceDistribution, row: Sequence[float], class_number: int) -> None:
        decay = self._decay
        self._weight_sum = self._weight_sum * decay + 1
        self._squared_weight_sum = self._squared_weight_sum * decay * decay + 1
        for counts in (*self._counts, self._classes):
            for index, count in enumerate(counts):
                if count:
                    counts[index] = count * decay
        for counts, edges, value in zip(self._counts, reference.edges, row, strict=True):
            counts[find_bin(edges, value)] += 1
        position = bisect_left(reference.classes, class_number)
        has_bin = position < len(reference.classes) and reference.classes[position] == class_number
        self._classes[position if has_bin else len(reference.classes)] += 1

    @property
    def effective_sample(self) -> float:
        """Effective sample size: the square of the sum of the weights / the sum of their squares."""
        return self._weight_sum**2 / self._squared_weight_sum if self._squared_weight_sum else 0.0

    def compute_distances(self) -> dict[str, float]:
        """Return the distance (0 to 1) of each feature, or {} before enough examples were counted."""
        reference = self.reference
        if reference is None or self.effective_sample < min(MIN_EXAMPLES, self._size):
            return {}
        alpha = ALPHA / (len(reference.names) + 1)
        distances = {
            name: compute_excess_distance(reference_counts, counts, weight, self.effective_sample, alpha)
            for name, reference_counts, counts, weight in zip(
                reference.names, reference.counts, self._counts, reference.weights, strict=True
            )
        }
        distances["class"] = compute_excess_distance(
            reference.class_counts, self._classes, reference.class_weight, self.effective_sample, alpha
        )
        return distances

    def compute_score(self) -> float | None:
        """Return the largest distance, or None before enough examples were counted."""
        return max(self.compute_distances().values(), default=None)


def compute_excess_distance(
    reference: Sequence[float], counts: Sequence[float], weight: float, sample_size: float, alpha: float = ALPHA
) -> float:
    """Return the Jensen-Shannon distance (0 to 1) of two histograms in excess of chance.

    Args:
        reference: Counts of the reference.
        counts: Counts in the same bins.
        weight: Effective weight of an example.
        sample_size: Number of examples that `counts` is worth.
        alpha: Probability of a distance above 0 without drift.
    """
    p, q = np.asarray(reference, np.float64), np.asarray(counts, np.float64)
    is_used = (p + q) > 0
    bins = int(is_used.sum())
    if bins < 2:
        return 0.0
    unit = (1 / (p.sum() * weight) + 1 / (sample_size * weight)) / (8 * math.log(2))
    p, q = p[is_used] / p.sum(), q[is_used] / q.sum()
    mean = (p + q) / 2
    divergence = float(sum((part[part > 0] * np.log2(part[part > 0] / mean[part > 0])).sum() for part in (p, q)) / 2)
    if divergence <= chi_squared_quantile(bins - 1, alpha) * unit:
        return 0.0
    expected = (bins - 1) * unit
    return math.sqrt(min(max((divergence - expected) / (1 - expected), 0.0), 1.0)) if expected < 1 else 0.0


def chi_squared_quantile(degrees: int, alpha: float) -> float:
    """Return the value that chi-squared exceeds with probability alpha, approximately.

    The approximation is by E. B. Wilson and M. M. Hilferty, PNAS 17, 1931.
    """
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + NormalDist().inv_cdf(1 - alpha) * math.sqrt(variance)) ** 3
