"""One linear head over several taps of frozen networks, in closed form from sums over devices. numpy only.

A tap is a place whose pooled maps are features; the taps' features side by side are a vector z of d numbers for each
example. From the sums of all devices (`fedquilt.models.stitching.class_moments`) follows, for any subset of taps,
without asking a device again:
- the strength of a ridge by generalised cross-validation (Golub, Heath and Wahba, Technometrics 1979);
- the criterion of that ridge, which taps are chosen by (`forward`);
- the head itself: a linear discriminant that gives every class the same weight, however many examples it has.

Features are standardised with the pooled variance of all examples. Strengths are relative: 1 adds to each feature as
much variance as it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.models.stitching.class_moments import Sums

STRENGTHS = tuple(float(each) for each in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # tried for a head
GAIN = 1e-3  # a further tap has to lower the criterion by this share
FROM = 14  # best single taps that are joined
WIDEST = 3072  # features that are joined at most: the time that solving takes grows with their cube
NEVER = -1e30  # bias of a class without examples: finite, and below every score
CONSTANT = 1e-5  # a standard deviation below this share of the mean is rounding


@dataclass(frozen=True)
class Standard:
    """Sums with every feature at mean 0 and variance 1. Features that do not vary are 0 throughout.

    Attributes:
        n: examples.
        shares: (labels,) of the examples.
        means: (labels, d) of the classes; zeros where there are no examples.
        correlation: (d, d).
        spread: variance of the labels as one-hot vectors.
        mean: (d,) of the features as they come.
        inverse: (d,) 1 / standard deviation of the features as they come; 0: does not vary.
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
        """(d, labels) covariance of features and one-hot labels."""
        return np.asarray((self.means * self.shares[:, None]).T)

    def of(self, columns: np.ndarray) -> Standard:
        """Of some features only."""
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
    """How strong a ridge is best, and the criterion that it comes to: less is better."""

    ridge: float
    criterion: float


@dataclass(frozen=True)
class Head:
    """Scores are weights @ z + bias, of features as they come; float64."""

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
    """The ridge with the least generalised cross-validation criterion, of one-hot labels on features.

    The criterion is (rss / n) / (1 - df / n)^2, infinite where there are no degrees of freedom left.
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
    """The linear discriminant that takes all classes for equally frequent, with a ridge on the variance within classes.

    A class without examples has no direction, and a bias that never wins: NEVER.
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
    """Where each tap's features lie among all: `widths` of the taps, in order."""

    widths: tuple[int, ...]

    def columns(self, taps: Sequence[int]) -> np.ndarray:
        """The features of some taps, in their order."""
        starts = np.concatenate([[0], np.cumsum(self.widths)])
        return np.concatenate([np.arange(starts[tap], starts[tap + 1]) for tap in taps])

    def width(self, taps: Sequence[int]) -> int:
        """Number of features of some taps together."""
        return sum(self.widths[tap] for tap in taps)


@dataclass(frozen=True)
class Joined:
    """Taps in the order in which they were taken, each with the criterion that it brought the set to."""

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
    solved = inverse @ given.correlation[np.ix_(own, rest)]  # of the features taken, for those that are left
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
    """The criterion of the features `own` and `columns` together."""
    mine = _complement(given, own, columns, before, ridge)
    step = mine @ (given.cross[columns] - before.T @ given.cross[own])
    more = float(np.trace(mine)) + float(((before @ mine) * before).sum())
    both = np.concatenate([weights - before @ step, step])
    return _reckoned(given, np.concatenate([own, columns]), both, trace + more, ridge)


def _complement(given: Standard, own: np.ndarray, columns: np.ndarray, before: np.ndarray, ridge: float) -> np.ndarray:
    """The inverse of what `own` leaves of the block of `columns`."""
    inner = given.correlation[np.ix_(columns, columns)] - given.correlation[np.ix_(columns, own)] @ before
    inner[np.diag_indices(len(inner))] += ridge
    return np.linalg.inv(inner)


def _reckoned(given: Standard, columns: np.ndarray, weights: np.ndarray, trace: float, ridge: float) -> float:
    """The criterion of a ridge whose weights (d, labels) and trace of the inverse are known."""
    rss = given.spread - float(np.vdot(given.cross[columns], weights)) - ridge * float(np.vdot(weights, weights))
    return _criterion(rss, len(columns) - ridge * trace + 1, given.n)


def _criterion(rss: float, freedom: float, n: float) -> float:
    left = 1 - freedom / n
    return max(rss, 0.0) / left**2 if left > 1e-9 else np.inf


def _places(layout: Layout, taps: Sequence[int]) -> list[np.ndarray]:
    """Where each of some taps lies among the features of all of them."""
    ends = np.cumsum([layout.widths[tap] for tap in taps])
    return [np.arange(end - layout.widths[tap], end) for tap, end in zip(taps, ends, strict=True)]
