"""Linear head over several taps of frozen networks, in closed form from sums over devices.

A tap is a place in a network whose pooled maps are features. The features of all taps side by side are a vector z of d
numbers for each example. The sums of all devices (`fedquilt.models.stitching.algebra.class_moments`) determine for any
subset of taps, without another task for a device:

- the ridge penalty, by generalised cross-validation (Golub, Heath and Wahba, Technometrics 1979),
- the criterion of that penalty, also of all leading taps at once (`prefix_gcv_criteria`),
- the head: a linear discriminant that gives every class the same weight, whatever its number of examples.

Features are standardised with the pooled variance of all examples. A penalty of 1 adds as much variance to each feature
as it has. Requires numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedquilt.core import Tensors
from fedquilt.models.stitching.algebra.class_moments import ClassMoments

STRENGTHS = tuple(float(ridge) for ridge in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # ridges of a head
ABSENT_BIAS = -1e30  # bias of a class without examples: finite, and below every score
MAX_DIRECT_SIZE = 128  # larger triangular matrices are inverted by halves
CONSTANT_TOLERANCE = 1e-5  # a standard deviation below this share of the mean is rounding


@dataclass(frozen=True)
class StandardisedSums:
    """Sums of standardised features, with mean 0 and variance 1, and 0 for constant features.

    Attributes:
        n: Number of examples.
        shares: (labels,) share of each class.
        means: (labels, d) standardised means of the classes, zeros for a class without examples.
        correlation: (d, d) correlations of the features.
        spread: Variance of the one-hot labels.
        mean: (d,) means of the original features.
        inverse: (d,) 1 / standard deviation of the original features, 0 for constant features.
    """

    n: float
    shares: np.ndarray
    means: np.ndarray
    correlation: np.ndarray
    spread: float
    mean: np.ndarray
    inverse: np.ndarray

    @property
    def cross(self) -> np.ndarray:
        """Covariances (d, labels) of the standardised features and the one-hot labels."""
        return np.asarray((self.means * self.shares[:, None]).T)

    def restrict_to(self, columns: np.ndarray) -> StandardisedSums:
        return replace(
            self,
            means=self.means[:, columns],
            correlation=self.correlation[np.ix_(columns, columns)],
            mean=self.mean[columns],
            inverse=self.inverse[columns],
        )


@dataclass(frozen=True)
class RidgePenalty:
    """Ridge penalty, and its cross-validation criterion, where a smaller value is better."""

    ridge: float
    criterion: float


@dataclass(frozen=True)
class LinearHead:
    """Linear head in float64: scores are weights @ z + bias, for original features z."""

    weights: np.ndarray  # (labels, d)
    bias: np.ndarray  # (labels,)


def standardise_sums(sums: ClassMoments) -> StandardisedSums:
    n, mean = sums.n, sums.mean
    deviation = np.sqrt(np.maximum(np.diagonal(sums.scatter), 0.0) / n)
    varies = deviation > np.maximum(CONSTANT_TOLERANCE * np.abs(mean), np.finfo(np.float64).tiny)
    inverse = np.where(varies, 1 / np.where(varies, deviation, 1.0), 0.0)
    has_examples = sums.counts > 0
    means = np.zeros_like(sums.totals)
    means[has_examples] = (sums.totals[has_examples] / sums.counts[has_examples, None] - mean) * inverse
    correlation = sums.scatter * (inverse / n)
    correlation *= inverse[:, None]
    shares = sums.counts / n
    return StandardisedSums(n, shares, means, correlation, float(1 - shares @ shares), mean, inverse)


def best_penalty(sums: StandardisedSums, ridges: Sequence[float] = STRENGTHS) -> RidgePenalty:
    """Return the ridge penalty with the smallest criterion, the strongest of several equally good ones.

    The cross-validation criterion is (rss / n) / (1 - df / n)^2, infinite if no degrees of freedom are left.
    """
    values, vectors = np.linalg.eigh(sums.correlation)
    values = np.maximum(values, 0.0)
    squares = ((vectors.T @ sums.cross) ** 2).sum(axis=1)
    penalties = []
    for ridge in ridges:
        shrinkage = 1 / (values + ridge)
        rss = sums.spread - 2 * float(squares @ shrinkage) + float((squares * values) @ shrinkage**2)
        penalties.append(RidgePenalty(ridge, _gcv(rss, float(values @ shrinkage) + 1, sums.n)))
    return min(penalties, key=lambda penalty: (penalty.criterion, -penalty.ridge))


def search_penalty(sums: StandardisedSums, start: RidgePenalty, ridges: Sequence[float] = STRENGTHS) -> RidgePenalty:
    """Search ascending `ridges` from `start` for a penalty with a locally smallest criterion.

    A Cholesky factor solves each penalty, much faster than the eigenvectors of `best_penalty`. Stronger penalties are
    tried first, because more features need stronger penalties. Raise ValueError if `start` is not in `ridges`.
    """
    best = start
    index = ridges.index(start.ridge)
    for step in (1, -1):
        while 0 <= index + step < len(ridges):
            ridge = ridges[index + step]
            penalty = RidgePenalty(ridge, prefix_gcv_criteria(sums, ridge, [len(sums.mean)])[0])
            if not penalty.criterion < best.criterion:
                break
            best, index = penalty, index + step
        if best is not start:
            break
    return best


def prefix_gcv_criteria(sums: StandardisedSums, ridge: float, ends: Sequence[int]) -> list[float]:
    """Return the cross-validation criterion of a ridge on the first `end` features, for each of `ends`.

    Leading blocks of a Cholesky factor and of its inverse belong to leading blocks of the matrix. So one factor
    determines all criteria.
    """
    regularised = sums.correlation.copy()
    regularised[np.diag_indices(len(regularised))] += ridge
    inverse = _invert_triangular(np.linalg.cholesky(regularised))
    projected = inverse @ sums.cross
    traces = np.cumsum(np.einsum("ij,ij->i", inverse, inverse))
    explained = np.cumsum(np.einsum("ij,ij->i", projected, projected))
    criteria = []
    for end in ends:
        weights = inverse[:end, :end].T @ projected[:end]
        rss = sums.spread - float(explained[end - 1]) - ridge * float(np.vdot(weights, weights))
        criteria.append(_gcv(rss, end - ridge * float(traces[end - 1]) + 1, sums.n))
    return criteria


def _invert_triangular(lower: np.ndarray) -> np.ndarray:
    # numpy has no inverse that exploits the zeros.
    size = len(lower)
    if size <= MAX_DIRECT_SIZE:
        return np.linalg.inv(lower)
    cut = size // 2
    inverse = np.zeros_like(lower)
    inverse[:cut, :cut] = _invert_triangular(lower[:cut, :cut])
    inverse[cut:, cut:] = _invert_triangular(lower[cut:, cut:])
    inverse[cut:, :cut] = -inverse[cut:, cut:] @ (lower[cut:, :cut] @ inverse[:cut, :cut])
    return inverse


def _gcv(rss: float, freedom: float, n: float) -> float:
    residual_share = 1 - freedom / n
    return max(rss, 0.0) / residual_share**2 if residual_share > 1e-9 else np.inf


def fit_discriminant(sums: StandardisedSums, ridge: float) -> LinearHead:
    """Fit a discriminant for equally frequent classes, with a ridge on the covariance within classes.

    A class without examples gets weights of 0 and the bias ABSENT_BIAS, so that it never wins.
    """
    classes = np.flatnonzero(sums.shares > 0)
    means = sums.means[classes]
    within_classes = sums.correlation - (means * sums.shares[classes, None]).T @ means
    within_classes[np.diag_indices(len(within_classes))] += ridge
    centre = means.mean(axis=0)
    directions = np.linalg.solve(within_classes, (means - centre).T).T
    weights, bias = np.zeros_like(sums.means), np.full(len(sums.means), ABSENT_BIAS)
    weights[classes] = directions * sums.inverse
    bias[classes] = -0.5 * ((means + centre) * directions).sum(axis=1) - weights[classes] @ sums.mean
    return LinearHead(weights, bias)


def export_head(head: Tensors) -> dict[str, np.ndarray]:
    """Return a head in which ABSENT_BIAS, which keeps job states finite, is replaced by -inf."""
    weights, bias = (head[part].astype(np.float32) for part in ("weights", "bias"))
    is_absent = bias <= np.float32(ABSENT_BIAS)
    weights[is_absent], bias[is_absent] = 0.0, -np.inf
    return {**head, "weights": weights, "bias": bias}
