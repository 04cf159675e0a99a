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

from fedquilt.core import Tensors
from fedquilt.models.stitching.class_moments import Sums

STRENGTHS = tuple(float(each) for each in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # tried for a head
GAIN = 1e-3  # a further tap has to lower the criterion by this share
FROM = 14  # best single taps that are joined
WIDEST = 3072  # features that are joined at most: the time that solving takes grows with their cube
NEVER = -1e30  # bias of a class without examples: finite, and below every score
HALVED = 128  # a triangular matrix is inverted by halves down to this size
CONSTANT = 1e-5  # a standard deviation below this share of the mean is rounding


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


def strength_from(given: Standard, start: Strength, tried: Sequence[float] = STRENGTHS) -> Strength:
    """A ridge whose criterion neither the next weaker nor the next stronger one betters, downhill from `start`.

    Each ridge on the way is solved by Cholesky's factor, a small part of what the eigenvectors for `strength` take: for
    sets of many features, where a good start is known. Stronger ones are tried first, as more features want them.

    Args:
        given: sums of the set.
        start: one of those tried, with the criterion that it comes to.
        tried: ridges, ascending.
    """
    best, place = start, tried.index(start.ridge)
    for step in (1, -1):
        while 0 <= place + step < len(tried):
            found = Strength(tried[place + step], _solved_criterion(given, tried[place + step]))
            if not found.criterion < best.criterion:
                break
            best, place = found, place + step
        if best is not start:
            break
    return best


def strength_at(given: Standard, ridge: float) -> Strength:
    """One ridge with its criterion."""
    return Strength(ridge, _solved_criterion(given, ridge))


def _solved_criterion(given: Standard, ridge: float) -> float:
    """The criterion of one ridge."""
    both = given.correlation.copy()
    both[np.diag_indices(len(both))] += ridge
    inverse = _triangular_inverse(np.linalg.cholesky(both))
    half = inverse @ given.cross
    weights = inverse.T @ half
    explained, squares = float(np.vdot(half, half)), float(np.vdot(weights, weights))
    return _reckoned(given, len(both), explained, squares, float(np.vdot(inverse, inverse)), ridge)


def _triangular_inverse(lower: np.ndarray) -> np.ndarray:
    """The inverse of a lower triangular matrix, by halves: numpy has none of its own that leaves the zeros out."""
    size = len(lower)
    if size <= HALVED:
        return np.linalg.inv(lower)
    cut = size // 2
    found = np.zeros_like(lower)
    found[:cut, :cut] = _triangular_inverse(lower[:cut, :cut])
    found[cut:, cut:] = _triangular_inverse(lower[cut:, cut:])
    found[cut:, :cut] = -found[cut:, cut:] @ (lower[cut:, :cut] @ found[:cut, :cut])
    return found


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


def handed_out(head: Tensors) -> dict[str, np.ndarray]:
    """A head as it is handed out: a class whose bias is NEVER scores -inf, so that it wins in no runtime.

    States hold NEVER instead, because what they hold has to be finite.

    Args:
        head: "weights" (labels, d), "bias" (labels,), and other tensors, which are returned as they are.
    """
    weights, bias = (head[part].astype(np.float32) for part in ("weights", "bias"))
    never = bias <= np.float32(NEVER)
    weights[never], bias[never] = 0.0, -np.inf
    return {**head, "weights": weights, "bias": bias}


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


@dataclass(frozen=True)
class _Taken:
    """A set of taps whose ridge is solved."""

    columns: np.ndarray  # (d,)
    weights: np.ndarray  # (d, labels)
    trace: float  # of the inverse of the set's block of the correlation, with the ridge on its diagonal
    explained: float  # sum over features and labels of cross * weights


@dataclass(frozen=True)
class _Open:
    """A tap that may still join: what it and the set taken say of each other."""

    tap: int
    columns: np.ndarray  # (c,)
    solved: np.ndarray  # (d, c) its features regressed on those taken
    left: np.ndarray  # (c, c) what that leaves of its block of the correlation, with the ridge on the diagonal
    square: np.ndarray  # (c, c) solved' solved
    cross: np.ndarray  # (c, labels) what the set leaves of its covariance with the labels


def forward(
    given: Standard, layout: Layout, start: int, among: Sequence[int], ridge: float, widest: int = WIDEST
) -> Joined:
    """Choose taps greedily: add the one that lowers the criterion most, as long as one lowers it by the share GAIN.

    What a tap would add follows from the block of the matrix that it shares with those taken (a Schur complement). That
    is brought up to date whenever a tap joins, so that no set is solved anew and each pair of taps is looked at once.

    Args:
        given: sums of all taps.
        layout: the taps' places.
        start: the first tap.
        among: the taps to choose from; `start` may be among them.
        ridge: strength, the same for all sets.
        widest: limit on the features of the set.
    """
    nothing, labels = np.empty(0, np.int64), given.cross.shape[1]
    so_far = _Taken(nothing, np.empty((0, labels)), 0.0, 0.0)
    first, *others = (_begun(given, layout, tap, ridge) for tap in dict.fromkeys([start, *among]))
    taken, criteria, best = [first.tap], [_joins(given, so_far, first, ridge)], first
    while True:
        so_far, others = _with(given, so_far, best, others, layout.width(taken), widest)
        known = [(_joins(given, so_far, each, ridge), each.tap, place) for place, each in enumerate(others)]
        if not known or not min(known)[0] < criteria[-1] * (1 - GAIN):
            return Joined(ridge, tuple(taken), tuple(criteria))
        criterion, tap, place = min(known)
        best = others.pop(place)
        taken.append(tap)
        criteria.append(criterion)


def _begun(given: Standard, layout: Layout, tap: int, ridge: float) -> _Open:
    """A tap beside the empty set."""
    columns = layout.columns([tap])
    block = given.correlation[np.ix_(columns, columns)]
    block[np.diag_indices(len(block))] += ridge
    return _Open(tap, columns, np.empty((0, len(columns))), block, np.zeros_like(block), given.cross[columns])


def _joins(given: Standard, so_far: _Taken, tap: _Open, ridge: float) -> float:
    """The criterion of the set taken and a tap together."""
    inverse = np.linalg.inv(tap.left)
    step = inverse @ tap.cross
    weights = so_far.weights - tap.solved @ step
    trace = so_far.trace + float(np.trace(inverse)) + float(np.vdot(inverse, tap.square))
    explained = so_far.explained + float(np.vdot(tap.cross, step))
    squares = float(np.vdot(weights, weights)) + float(np.vdot(step, step))
    return _reckoned(given, len(so_far.columns) + len(step), explained, squares, trace, ridge)


def _with(
    given: Standard, so_far: _Taken, tap: _Open, others: Sequence[_Open], width: int, widest: int
) -> tuple[_Taken, list[_Open]]:
    """The set taken once a tap has joined it, and the others beside that, but for those too wide to follow.

    Args:
        given: sums of all taps.
        so_far: the set before.
        tap: which joins it.
        others: still to choose from.
        width: features of the set with the tap.
        widest: features of a set at most.
    """
    inverse = np.linalg.inv(tap.left)
    step = inverse @ tap.cross
    after = _Taken(
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
        found.append(_Open(each.tap, each.columns, solved, left, square, cross))
    return after, found


def _reckoned(given: Standard, width: int, explained: float, squares: float, trace: float, ridge: float) -> float:
    """The criterion of a ridge on so many features.

    Args:
        given: sums.
        width: features.
        explained: sum over features and labels of cross * weights.
        squares: sum of squared weights.
        trace: of the inverse of the correlation with the ridge on its diagonal.
        ridge: the strength.
    """
    rss = given.spread - explained - ridge * squares
    return _criterion(rss, width - ridge * trace + 1, given.n)


def _criterion(rss: float, freedom: float, n: float) -> float:
    left = 1 - freedom / n
    return max(rss, 0.0) / left**2 if left > 1e-9 else np.inf
