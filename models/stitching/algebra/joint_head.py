"""Linear head over several taps of frozen networks, in closed form from sums over devices.

A tap is a place in a network whose pooled maps are features. The features of all taps side by side are a vector z of d
numbers for each example. The sums of all devices (`fedquilt.models.stitching.algebra.class_moments`) determine for any
subset of taps, without another task for a device:

- the ridge penalty, by generalised cross-validation (Golub, Heath and Wahba, Technometrics 1979),
- the criterion of that penalty, which selects taps (`select_taps`),
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

STRENGTHS = tuple(float(each) for each in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # tried for a head
GAIN = 1e-3  # a further tap has to lower the criterion by this share
FROM = 14  # best single taps that are joined
WIDEST = 3072  # features that are joined at most: the time that solving takes grows with their cube
NEVER = -1e30  # bias of a class without examples: finite, and below every score
HALVED = 128  # a triangular matrix is inverted by halves down to this size
CONSTANT = 1e-5  # a standard deviation below this share of the mean is rounding


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
        """Covariance (d, labels) of standardised features and one-hot labels."""
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
    """Ridge penalty, and its cross-validation criterion, less is better."""

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
    varies = deviation > np.maximum(CONSTANT * np.abs(mean), np.finfo(np.float64).tiny)
    inverse = np.where(varies, 1 / np.where(varies, deviation, 1.0), 0.0)
    present = sums.counts > 0
    means = np.zeros_like(sums.totals)
    means[present] = (sums.totals[present] / sums.counts[present, None] - mean) * inverse
    correlation = sums.scatter * (inverse / n)
    correlation *= inverse[:, None]
    shares = sums.counts / n
    return StandardisedSums(n, shares, means, correlation, float(1 - shares @ shares), mean, inverse)


def best_penalty(given: StandardisedSums, tried: Sequence[float] = STRENGTHS) -> RidgePenalty:
    """Return the ridge penalty with the least generalised cross-validation criterion. Ties go to the strongest.

    The criterion is (rss / n) / (1 - df / n)^2, infinite if no degrees of freedom are left.
    """
    values, vectors = np.linalg.eigh(given.correlation)
    values = np.maximum(values, 0.0)
    squares = ((vectors.T @ given.cross) ** 2).sum(axis=1)
    found = []
    for ridge in tried:
        kept = 1 / (values + ridge)
        rss = given.spread - 2 * float(squares @ kept) + float((squares * values) @ kept**2)
        found.append(RidgePenalty(ridge, _gcv(rss, float(values @ kept) + 1, given.n)))
    return min(found, key=lambda each: (each.criterion, -each.ridge))


def search_penalty(given: StandardisedSums, start: RidgePenalty, tried: Sequence[float] = STRENGTHS) -> RidgePenalty:
    """Return a local optimum of the ridge penalty, downhill from `start`.

    Each penalty is solved by Cholesky's factor, a small part of the time that the eigenvectors of `best_penalty` take.
    This suits sets of many features with a good start. Stronger penalties are tried first, because more features need
    them.

    Args:
        given: Sums of the set.
        start: One of `tried`, with its criterion.
        tried: Penalties, ascending.
    """
    best, place = start, tried.index(start.ridge)
    for step in (1, -1):
        while 0 <= place + step < len(tried):
            found = RidgePenalty(tried[place + step], _penalty_criterion(given, tried[place + step]))
            if not found.criterion < best.criterion:
                break
            best, place = found, place + step
        if best is not start:
            break
    return best


def evaluate_penalty(given: StandardisedSums, ridge: float) -> RidgePenalty:
    return RidgePenalty(ridge, _penalty_criterion(given, ridge))


def _penalty_criterion(given: StandardisedSums, ridge: float) -> float:
    both = given.correlation.copy()
    both[np.diag_indices(len(both))] += ridge
    inverse = _invert_triangular(np.linalg.cholesky(both))
    half = inverse @ given.cross
    weights = inverse.T @ half
    explained, squares = float(np.vdot(half, half)), float(np.vdot(weights, weights))
    return _criterion_from_sums(given, len(both), explained, squares, float(np.vdot(inverse, inverse)), ridge)


def _invert_triangular(lower: np.ndarray) -> np.ndarray:
    # numpy has no inverse that exploits the zeros.
    size = len(lower)
    if size <= HALVED:
        return np.linalg.inv(lower)
    cut = size // 2
    found = np.zeros_like(lower)
    found[:cut, :cut] = _invert_triangular(lower[:cut, :cut])
    found[cut:, cut:] = _invert_triangular(lower[cut:, cut:])
    found[cut:, :cut] = -found[cut:, cut:] @ (lower[cut:, :cut] @ found[:cut, :cut])
    return found


def fit_discriminant(given: StandardisedSums, ridge: float) -> LinearHead:
    """Fit a linear discriminant for equally frequent classes, with a ridge within classes.

    A class without examples gets weights of 0 and the bias NEVER, so that it never wins.
    """
    present = np.flatnonzero(given.shares > 0)
    means = given.means[present]
    within = given.correlation - (means * given.shares[present, None]).T @ means
    within[np.diag_indices(len(within))] += ridge
    centre = means.mean(axis=0)
    found = np.linalg.solve(within, (means - centre).T).T
    weights, bias = np.zeros_like(given.means), np.full(len(given.means), NEVER)
    weights[present] = found * given.inverse
    bias[present] = -0.5 * ((means + centre) * found).sum(axis=1) - weights[present] @ given.mean
    return LinearHead(weights, bias)


def export_head(head: Tensors) -> dict[str, np.ndarray]:
    """Return a head in which a class with the bias NEVER scores -inf.

    States contain NEVER instead, because their values must be finite.

    Args:
        head: "weights" (labels, d), "bias" (labels,), and other tensors, which are returned unchanged.
    """
    weights, bias = (head[part].astype(np.float32) for part in ("weights", "bias"))
    never = bias <= np.float32(NEVER)
    weights[never], bias[never] = 0.0, -np.inf
    return {**head, "weights": weights, "bias": bias}


# -- which taps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TapLayout:
    """Places of the taps' features in z, from the `widths` of the taps in order."""

    widths: tuple[int, ...]

    def feature_columns(self, taps: Sequence[int]) -> np.ndarray:
        starts = np.concatenate([[0], np.cumsum(self.widths)])
        return np.concatenate([np.arange(starts[tap], starts[tap + 1]) for tap in taps])

    def total_width(self, taps: Sequence[int]) -> int:
        return sum(self.widths[tap] for tap in taps)


@dataclass(frozen=True)
class SelectedTaps:
    """Selected taps in order of selection, with the criterion after each step."""

    ridge: float
    taps: tuple[int, ...]
    criteria: tuple[float, ...]


@dataclass(frozen=True)
class _SolvedTaps:
    """A set of taps whose ridge is solved."""

    columns: np.ndarray  # (d,)
    weights: np.ndarray  # (d, labels)
    trace: float  # of the inverse of the set's block of the correlation, with the ridge on its diagonal
    explained: float  # sum over features and labels of cross * weights


@dataclass(frozen=True)
class _OpenTap:
    """Candidate tap with its regression on the selected taps."""

    tap: int
    columns: np.ndarray  # (c,)
    solved: np.ndarray  # (d, c) its features regressed on those taken
    left: np.ndarray  # (c, c) what that leaves of its block of the correlation, with the ridge on the diagonal
    square: np.ndarray  # (c, c) solved' solved
    cross: np.ndarray  # (c, labels) what the set leaves of its covariance with the labels


def select_taps(
    given: StandardisedSums, layout: TapLayout, start: int, among: Sequence[int], ridge: float, widest: int = WIDEST
) -> SelectedTaps:
    """Select taps greedily, from `start`, until no tap lowers the criterion by the share GAIN.

    The gain of a tap follows from the block of the matrix that it shares with the selected taps (a Schur complement).
    The block is updated whenever a tap is selected, so that each pair of taps is visited once.

    Args:
        given: Sums of all taps.
        layout: Columns of each tap's features.
        start: First tap.
        among: Taps to select from.
        ridge: Penalty, the same for all sets.
        widest: Limit on the number of features of the set.
    """
    nothing, labels = np.empty(0, np.int64), given.cross.shape[1]
    so_far = _SolvedTaps(nothing, np.empty((0, labels)), 0.0, 0.0)
    first, *others = (_build_candidate_tap(given, layout, tap, ridge) for tap in dict.fromkeys([start, *among]))
    taken, criteria, best = [first.tap], [_criterion_with_tap(given, so_far, first, ridge)], first
    while True:
        so_far, others = _select_tap_and_update(given, so_far, best, others, layout.total_width(taken), widest)
        known = [
            (_criterion_with_tap(given, so_far, each, ridge), each.tap, place) for place, each in enumerate(others)
        ]
        if not known or not min(known)[0] < criteria[-1] * (1 - GAIN):
            return SelectedTaps(ridge, tuple(taken), tuple(criteria))
        criterion, tap, place = min(known)
        best = others.pop(place)
        taken.append(tap)
        criteria.append(criterion)


def _build_candidate_tap(given: StandardisedSums, layout: TapLayout, tap: int, ridge: float) -> _OpenTap:
    columns = layout.feature_columns([tap])
    block = given.correlation[np.ix_(columns, columns)]
    block[np.diag_indices(len(block))] += ridge
    return _OpenTap(tap, columns, np.empty((0, len(columns))), block, np.zeros_like(block), given.cross[columns])


def _criterion_with_tap(given: StandardisedSums, so_far: _SolvedTaps, tap: _OpenTap, ridge: float) -> float:
    inverse = np.linalg.inv(tap.left)
    step = inverse @ tap.cross
    weights = so_far.weights - tap.solved @ step
    trace = so_far.trace + float(np.trace(inverse)) + float(np.vdot(inverse, tap.square))
    explained = so_far.explained + float(np.vdot(tap.cross, step))
    squares = float(np.vdot(weights, weights)) + float(np.vdot(step, step))
    return _criterion_from_sums(given, len(so_far.columns) + len(step), explained, squares, trace, ridge)


def _select_tap_and_update(
    given: StandardisedSums, so_far: _SolvedTaps, tap: _OpenTap, others: Sequence[_OpenTap], width: int, widest: int
) -> tuple[_SolvedTaps, list[_OpenTap]]:
    """Return the set with the selected tap, and the other taps that still fit, regressed on this set."""
    # Returns the set with the tap, and the open taps that are not too wide.
    inverse = np.linalg.inv(tap.left)
    step = inverse @ tap.cross
    after = _SolvedTaps(
        np.concatenate([so_far.columns, tap.columns]),
        np.concatenate([so_far.weights - tap.solved @ step, step]),
        so_far.trace + float(np.trace(inverse)) + float(np.vdot(inverse, tap.square)),
        so_far.explained + float(np.vdot(tap.cross, step)),
    )
    found = []
    for each in others:
        if width + len(each.columns) > widest:
            continue
        between = given.correlation[np.ix_(tap.columns, each.columns)]
        between -= tap.solved.T @ given.correlation[np.ix_(so_far.columns, each.columns)]
        share = inverse @ between
        both = share.T @ (tap.solved.T @ each.solved)
        square = each.square - both - both.T + share.T @ (tap.square @ share + share)
        solved = np.concatenate([each.solved - tap.solved @ share, share])
        left, cross = each.left - between.T @ share, each.cross - between.T @ step
        found.append(_OpenTap(each.tap, each.columns, solved, left, square, cross))
    return after, found


def _criterion_from_sums(
    given: StandardisedSums, width: int, explained: float, squares: float, trace: float, ridge: float
) -> float:
    rss = given.spread - explained - ridge * squares
    return _gcv(rss, width - ridge * trace + 1, given.n)


def _gcv(rss: float, freedom: float, n: float) -> float:
    left = 1 - freedom / n
    return max(rss, 0.0) / left**2 if left > 1e-9 else np.inf
