"""One linear head over several taps of frozen networks, in closed form from sums over devices. numpy only.

A tap is a place in a network whose pooled maps are features; the features of all taps side by side are a vector z of
d numbers for each example. The sums of all devices (`fedquilt.models.stitching.class_moments`) determine for any subset
of taps, without another task for a device:

- the strength of the ridge, by generalised cross-validation (Golub, Heath and Wahba, Technometrics 1979);
- the criterion of that ridge, by which taps are chosen (`forward`);
- the head: a linear discriminant that gives every class the same weight, whatever its number of examples.

Features are standardised with the pooled variance of all examples. A strength of 1 adds as much variance to each
feature as it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.models.stitching.class_moments import Sums

STRENGTHS = tuple(float(each) for each in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # tried for a head
GAIN = 1e-3  # share by which a further tap has to lower the criterion
FROM = 14  # number of best single taps from which sets are chosen
WIDEST = 3072  # most features of a set: the time for solving grows with their cube
NEVER = -1e30  # bias of a class without examples: finite, and below every other score
CONSTANT = 1e-5  # a standard deviation below this share of the mean counts as rounding


@dataclass(frozen=True)
class Standard:
    """Sums with every feature at mean 0 and variance 1. A feature that does not vary is 0 for all examples.

    Attributes:
        n: number of examples.
        shares: (labels,) share of each class.
        means: (labels, d) standardised means of the classes; zeros for a class without examples.
        correlation: (d, d) correlations of the features.
        spread: variance of the one-hot labels.
        mean: (d,) means of the original features.
        inverse: (d,) 1 / standard deviation of the original features; 0: the feature does not vary.
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

    def of(self, columns: np.ndarray) -> Standard:
        """Restrict the sums to some features, by their indices."""
        return Standard(
            self.n,
            self.shares,
            self.means[:, columns],
            self.correlation[np.ix_(columns, columns)],
            self.spread,
            self.mean[columns],
            self.inverse[columns],
        )


@dataclass(frozen=True)
class Strength:
    """The best strength of a ridge, and its criterion, of which less is better."""

    ridge: float
    criterion: float


@dataclass(frozen=True)
class Head:
    """A linear head: scores are weights @ z + bias, for original features z; float64."""

    weights: np.ndarray  # (labels, d)
    bias: np.ndarray  # (labels,)


def standardised(sums: Sums) -> Standard:
    """Standardise sums: every feature at mean 0 and variance 1."""
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
    return Standard(n, shares, means, correlation, float(1 - shares @ shares), mean, inverse)


def strength(given: Standard, tried: Sequence[float] = STRENGTHS) -> Strength:
    """The ridge with the least generalised cross-validation criterion, for a regression of one-hot labels on features.

    The criterion is (rss / n) / (1 - df / n)^2, infinite if no degrees of freedom are left.
    """
    values, vectors = np.linalg.eigh(given.correlation)
    values = np.maximum(values, 0.0)
    squares = ((vectors.T @ given.cross) ** 2).sum(axis=1)
    found = []
    for ridge in tried:
        kept = 1 / (values + ridge)
        rss = given.spread - 2 * float(squares @ kept) + float((squares * values) @ kept**2)
        found.append(Strength(ridge, _criterion(rss, float(values @ kept) + 1, given.n)))
    return min(found, key=lambda each: (each.criterion, -each.ridge))


def discriminant(given: Standard, ridge: float) -> Head:
    """A linear discriminant for equally frequent classes, with a ridge on the variance within classes.

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
    return Head(weights, bias)


# -- which taps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Places of the taps' features in z, from the `widths` of the taps in order."""

    widths: tuple[int, ...]

    def columns(self, taps: Sequence[int]) -> np.ndarray:
        """Indices of the features of some taps, in the order of `taps`."""
        starts = np.concatenate([[0], np.cumsum(self.widths)])
        return np.concatenate([np.arange(starts[tap], starts[tap + 1]) for tap in taps])

    def width(self, taps: Sequence[int]) -> int:
        """Number of features of some taps together."""
        return sum(self.widths[tap] for tap in taps)


@dataclass(frozen=True)
class Joined:
    """Chosen taps in the order in which they were added, with the criterion of the set after each."""

    ridge: float
    taps: tuple[int, ...]
    criteria: tuple[float, ...]


def forward(
    given: Standard, layout: Layout, start: int, among: Sequence[int], ridge: float, widest: int = WIDEST
) -> Joined:
    """Choose taps greedily: add the one that lowers the criterion most, as long as one lowers it by the share GAIN.

    The gain of a tap follows from the block of the matrix that it shares with the taps taken (a Schur complement), so
    that no set is solved from scratch.

    Args:
        given: standardised sums of all taps.
        layout: where each tap's features lie in them.
        start: the first tap.
        among: the taps to choose from; `start` may be among them.
        ridge: strength, the same for all sets.
        widest: limit on the features of the set.
    """
    left = [tap for tap in among if tap != start]
    own = layout.columns([start])
    rest = layout.columns(left) if left else np.empty(0, np.int64)
    inverse = np.linalg.inv(given.correlation[np.ix_(own, own)] + ridge * np.eye(len(own)))
    solved = inverse @ given.correlation[np.ix_(own, rest)]  # regression of the features left on those taken
    weights, trace = inverse @ given.cross[own], float(np.trace(inverse))
    taken, criteria = [start], [_reckoned(given, own, weights, trace, ridge)]
    while left:
        places = _places(layout, left)
        known = [
            (_joins(given, own, rest[at], solved[:, at], weights, trace, ridge), tap)
            for tap, at in zip(left, places, strict=True)
            if layout.width([*taken, tap]) <= widest
        ]
        if not known:
            break
        best, tap = min(known)
        if not best < criteria[-1] * (1 - GAIN):
            break
        at = places[left.index(tap)]
        columns, before = rest[at], solved[:, at]
        mine = _complement(given, own, columns, before, ridge)
        step = mine @ (given.cross[columns] - before.T @ given.cross[own])
        weights = np.concatenate([weights - before @ step, step])
        trace += float(np.trace(mine)) + float(((before @ mine) * before).sum())
        others = np.setdiff1d(np.arange(len(rest)), at)
        between = given.correlation[np.ix_(columns, rest[others])]
        share = mine @ (between - given.correlation[np.ix_(columns, own)] @ solved[:, others])
        solved = np.concatenate([solved[:, others] - before @ share, share])
        own, rest = np.concatenate([own, columns]), rest[others]
        taken.append(tap)
        left.remove(tap)
        criteria.append(best)
    return Joined(ridge, tuple(taken), tuple(criteria))


def _joins(
    given: Standard,
    own: np.ndarray,
    columns: np.ndarray,
    before: np.ndarray,
    weights: np.ndarray,
    trace: float,
    ridge: float,
) -> float:
    """Criterion of the features `own` and `columns` together."""
    mine = _complement(given, own, columns, before, ridge)
    step = mine @ (given.cross[columns] - before.T @ given.cross[own])
    more = float(np.trace(mine)) + float(((before @ mine) * before).sum())
    both = np.concatenate([weights - before @ step, step])
    return _reckoned(given, np.concatenate([own, columns]), both, trace + more, ridge)


def _complement(given: Standard, own: np.ndarray, columns: np.ndarray, before: np.ndarray, ridge: float) -> np.ndarray:
    """Inverse of the Schur complement of `own` in the matrix of `own` and `columns`, ridge included."""
    inner = given.correlation[np.ix_(columns, columns)] - given.correlation[np.ix_(columns, own)] @ before
    inner[np.diag_indices(len(inner))] += ridge
    return np.linalg.inv(inner)


def _reckoned(given: Standard, columns: np.ndarray, weights: np.ndarray, trace: float, ridge: float) -> float:
    """Criterion of a ridge, from its weights (d, labels) and the trace of its inverse."""
    rss = given.spread - float(np.vdot(given.cross[columns], weights)) - ridge * float(np.vdot(weights, weights))
    return _criterion(rss, len(columns) - ridge * trace + 1, given.n)


def _criterion(rss: float, freedom: float, n: float) -> float:
    left = 1 - freedom / n
    return max(rss, 0.0) / left**2 if left > 1e-9 else np.inf


def _places(layout: Layout, taps: Sequence[int]) -> list[np.ndarray]:
    """Indices of each tap's features when only the features of `taps` lie side by side."""
    ends = np.cumsum([layout.widths[tap] for tap in taps])
    return [np.arange(end - layout.widths[tap], end) for tap, end in zip(taps, ends, strict=True)]
