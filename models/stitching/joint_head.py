"""One linear head over several taps of frozen networks, in closed form from sums over devices. numpy only.

A tap is a place whose pooled maps are features; the taps' features side by side are a vector z of d numbers for each
example. A device sends a `Part`: how many examples it has of each class, their mean z, and a factor R of its centred
second moments (R'R = sum of (z - mean)(z - mean)'), which has min(examples, d) rows. `merge` adds parts exactly.

From the sums of all devices follows, for any subset of taps, without asking a device again:
- the strength of a ridge by generalised cross-validation (Golub, Heath and Wahba, Technometrics 1979);
- the criterion of that ridge, which taps are chosen by (`forward`);
- the head itself: a linear discriminant that gives every class the same weight, however many examples it has.

Features are standardised with the pooled variance of all examples. Strengths are relative: 1 adds to each feature as
much variance as it has.

Privacy: the factor of a device with few examples spans what its activations span. Parts should not outlive the round
in which they came; only their sum over devices is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedquilt import tensors
from fedquilt.core import Tensors, UpdateError
from fedquilt.tensors import Shaped

STRENGTHS = tuple(float(each) for each in np.round(10.0 ** np.arange(-4, 3.01, 0.25), 8))  # tried for a head
GAIN = 1e-3  # a further tap has to lower the criterion by this share
FROM = 14  # best single taps that are joined
WIDEST = 3072  # features that are joined at most: the time that solving takes grows with their cube
NEVER = -1e30  # bias of a class without examples: finite, and below every score
CONSTANT = 1e-5  # a standard deviation below this share of the mean is rounding
LARGEST = 1e9  # a feature or a factor beyond this is no pooled map
NEGATIVE = 1e-3  # share of the largest eigenvalue that may be missing to a positive semi-definite matrix


@dataclass(frozen=True)
class Part:
    """What one device's examples come to.

    Attributes:
        counts: (labels,) examples of each class, int64.
        means: (labels, d) mean features of each class, float64; zeros where there are no examples.
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
        """(d,) of all the device's examples."""
        return np.asarray(self.counts @ self.means / self.n)


@dataclass(frozen=True)
class Sums:
    """What any number of devices' examples come to, float64.

    Attributes:
        counts: (labels,) examples of each class.
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
        """(d,) of all examples."""
        return np.asarray(self.totals.sum(axis=0) / self.n)


# -- on a device ----------------------------------------------------------------------------------


def factor_bytes(rows: int, width: int) -> int:
    """Memory that `part` takes for so many examples and features: float32 features, and three float64 copies."""
    return 32 * rows * width


def part(z: np.ndarray, y: np.ndarray, labels: int) -> Part:
    """A device's part from features z (n, d) and classes y (n,), n >= 1. No matrix is larger than z."""
    z = z.astype(np.float64)
    counts = np.bincount(y, minlength=labels).astype(np.int64)
    means = np.zeros((labels, z.shape[1]))
    for label in np.flatnonzero(counts):
        means[label] = z[y == label].mean(axis=0)
    z -= z.mean(axis=0)
    return Part(counts, means, np.asarray(np.linalg.qr(z, mode="r")))


def to_tensors(given: Part, exact: bool = False) -> dict[str, np.ndarray]:
    """A part as it is sent: the mean; how far the means of the classes that are there lie from it; the factor.

    What is centred is sent as float32, which loses nothing even where the mean is large, unless the sums are to be
    `exact`.
    """
    kind = np.float64 if exact else np.float32
    rows, width = given.factor.shape
    mean = given.mean
    packed = np.empty(_size(rows, width), kind)
    for row, place in _upper(rows, width):
        packed[place] = given.factor[row, row:]
    return {
        "counts": given.counts,
        "mean": mean,
        "means": (given.means[given.counts > 0] - mean).astype(kind),
        "factor": packed,
        "rows": np.array([rows], np.int64),
    }


# -- on the coordinator ---------------------------------------------------------------------------


def from_tensors(given: Tensors, labels: int, width: int, exact: bool = False) -> Part:
    """The part that a device has sent; `exact` as in `to_tensors`.

    Raises:
        UpdateError: tensors of other shapes; counts, means or a factor that no examples can have.
    """
    wanted = ("counts", "mean", "means", "factor", "rows")
    if missing := sorted(set(wanted) - given.keys()):
        raise UpdateError(f"moments: {', '.join(missing)} missing: update the agent")
    _require({"counts": given["counts"], "rows": given["rows"]}, {"counts": (labels,), "rows": (1,)}, np.int64)
    counts, rows = given["counts"], int(given["rows"][0])
    if not counts.any():
        raise UpdateError("moments: counts of examples that are all 0")
    if not 1 <= rows <= min(int(counts.sum()), width):
        raise UpdateError(f"moments: a factor of {rows} rows from {counts.sum()} examples of {width} features")
    present = counts > 0
    shapes = {"means": (int(present.sum()), width), "factor": (_size(rows, width),)}
    _require({name: given[name] for name in shapes}, shapes, np.float64 if exact else np.float32)
    _require({"mean": given["mean"]}, {"mean": (width,)}, np.float64)
    for name in ("mean", *shapes):
        if np.abs(given[name]).max(initial=0.0) > LARGEST:
            raise UpdateError(f"moments: {name} beyond {LARGEST:g}, which no pooled maps reach")
    means = np.zeros((labels, width))
    means[present] = given["mean"] + given["means"]
    factor = np.zeros((rows, width))
    for row, place in _upper(rows, width):
        factor[row, row:] = given["factor"][place]
    found = Part(counts.astype(np.int64), means, factor)
    _require_possible(found)
    return found


def merge(sums: Sequence[Sums], parts: Sequence[Part]) -> Sums:
    """The sums of all examples together: what one device would have that has them all.

    Second moments are taken about the common mean, to which all others are shifted: nothing large cancels.
    """
    counts = sum(each.counts for each in sums) + sum(each.counts.astype(np.float64) for each in parts)
    totals = sum(each.totals for each in sums) + sum(each.counts[:, None] * each.means for each in parts)
    counts, totals = np.asarray(counts), np.asarray(totals)
    mean, rows = totals.sum(axis=0) / counts.sum(), [each.factor for each in parts]
    every: list[Sums | Part] = [*sums, *parts]
    rows += [np.sqrt(each.n) * (each.mean - mean)[None] for each in every]
    stacked = np.concatenate(rows)
    scatter = stacked.T @ stacked
    for one in sums:
        scatter += one.scatter
    return Sums(counts, totals, scatter)


@dataclass(frozen=True)
class Pending:
    """Parts of one round as they come: merged whenever they have more rows than the sums would."""

    sums: Sums | None = None
    parts: tuple[Part, ...] = ()

    def plus(self, part: Part) -> Pending:
        parts = (*self.parts, part)
        if sum(len(each.factor) for each in parts) > part.means.shape[1]:
            return Pending(merge([self.sums] if self.sums else [], parts))
        return replace(self, parts=parts)

    def with_stored(self, before: Sums | None) -> Sums:
        """The sums of these parts and of all that came in earlier rounds."""
        return merge([each for each in (before, self.sums) if each], self.parts)


def halved(matrix: np.ndarray) -> np.ndarray:
    """The upper half of a symmetric matrix (d, d) as one row, as it is stored."""
    half = np.empty(_size(*matrix.shape), matrix.dtype)
    for row, place in _upper(*matrix.shape):
        half[place] = matrix[row, row:]
    return half


def whole(half: np.ndarray, width: int) -> np.ndarray:
    """The symmetric matrix (width, width) that `halved` took apart."""
    matrix = np.empty((width, width), half.dtype)
    for row, place in _upper(width, width):
        matrix[row, row:] = matrix[row:, row] = half[place]
    return matrix


# -- heads ----------------------------------------------------------------------------------------


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
    """Sums as `Standard`."""
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
    """Greedy choice of taps: the one that lowers the criterion most joins, as long as one lowers it by GAIN.

    What a tap would add follows from the block of the matrix that it shares with those taken (a Schur complement), so
    that no set is solved anew.

    Args:
        start: the first tap.
        among: the others to choose from.
        ridge: the strength, the same throughout.
        widest: features of the set at most.
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


# -- checks and packing ---------------------------------------------------------------------------


def _require_possible(given: Part) -> None:
    """Refuse class means that lie further apart than the factor says examples do.

    What is left of the second moments within classes is then not positive semi-definite. Both are of few rows, so the
    eigenvalues are those of a matrix of rows + classes, never of d x d.
    """
    apart = np.sqrt(given.counts)[:, None] * (given.means - given.mean)
    apart = apart[given.counts > 0]
    both = np.concatenate([given.factor, apart])
    values, vectors = np.linalg.eigh(both @ both.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    signs = np.concatenate([np.ones(len(given.factor)), -np.ones(len(apart))])
    inner = np.linalg.eigvalsh(root.T @ (signs[:, None] * root))
    if inner[0] < -NEGATIVE * max(float(values[-1]), np.finfo(np.float64).tiny):
        raise UpdateError(
            "moments: class means that differ by more than the second moments allow: within classes these are not "
            "positive semi-definite"
        )


def _require(given: Tensors, shapes: dict[str, tuple[int, ...]], kind: type) -> None:
    try:
        tensors.require_same(given, {name: Shaped(shape, np.dtype(kind)) for name, shape in shapes.items()})
    except UpdateError as error:
        raise UpdateError(f"moments: {error}") from None


def _size(rows: int, width: int) -> int:
    """Numbers in an upper trapezoid."""
    return rows * width - rows * (rows - 1) // 2


def _upper(rows: int, width: int) -> Iterator[tuple[int, slice]]:
    """Each row of an upper trapezoid, and where its part from the diagonal on lies among the numbers that are sent."""
    start = 0
    for row in range(rows):
        yield row, slice(start, start + width - row)
        start += width - row
