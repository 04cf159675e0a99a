"""Ridge regression across devices, from moments that add up.

A junction between two blocks is y = W x + b, fitted by ridge regression. The fit needs only the count, the means and
the centred second moments of its rows. Moments merge exactly (Chan et al., 1979), so that the coordinator's solution
equals the fit on the pooled rows of all devices. FedStitch (arXiv 2409.07202) does not define where its Eq. 3 is
solved. The matrix of Eq. 3 is singular if there are fewer rows than channels.

Requires numpy only.

Privacy: the moments of one device with fewer rows than channels nearly reveal the span of its activations. Only
sums over several devices should be stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import Tensors, UpdateError

RIDGE = 1e-4  # lambda as a share of the mean variance of a channel
ROWS = 1 << 14  # rows processed at a time
BLOCK = 256  # rows or columns of a matrix updated at a time, so that no second matrix is needed


@dataclass(frozen=True)
class RegressionMoments:
    """Moments of n rows x (p,) and y (q,), float64. Uncentred moments have zero means."""

    n: float
    mean_x: np.ndarray  # (p,)
    mean_y: np.ndarray  # (q,)
    xx: np.ndarray  # (p, p) sum of (x - mean_x)(x - mean_x)'
    xy: np.ndarray  # (p, q) sum of (x - mean_x)(y - mean_y)'
    yy: float  # sum of |y - mean_y|^2

    @property
    def nbytes(self) -> int:
        return self.xx.nbytes + self.xy.nbytes


def merge_moments(parts: Sequence[RegressionMoments]) -> RegressionMoments:
    """Return the moments of the rows of all parts. A single part is returned itself, not a copy."""
    first, *others = parts
    if not others:
        return first
    n, mean_x, mean_y, yy = first.n, first.mean_x, first.mean_y, first.yy
    xx, xy = first.xx.copy(), first.xy.copy()
    for part in others:
        total = n + part.n
        dx, dy = part.mean_x - mean_x, part.mean_y - mean_y
        share = n * part.n / total
        _add_part_and_outer(xx, part.xx, share, dx, dx)
        _add_part_and_outer(xy, part.xy, share, dx, dy)
        yy += part.yy + share * float(dy @ dy)
        mean_x, mean_y, n = mean_x + dx * (part.n / total), mean_y + dy * (part.n / total), total
    return RegressionMoments(n, mean_x, mean_y, xx, xy, yy)


def add_rows(sums: RegressionMoments | None, x: np.ndarray, y: np.ndarray, centred: bool = True) -> RegressionMoments:
    """Return `sums` with more rows x (n, p) and y (n, q), added in place. Use only the result afterwards."""
    p, q = x.shape[1], y.shape[1]
    sums = sums or RegressionMoments(0.0, np.zeros(p), np.zeros(q), np.zeros((p, p)), np.zeros((p, q)), 0.0)
    x, y = x.astype(np.float64), y.astype(np.float64)
    mean_x, mean_y = x.mean(axis=0) * centred, y.mean(axis=0) * centred
    x -= mean_x
    y -= mean_y
    total = sums.n + len(x)
    dx, dy, share = mean_x - sums.mean_x, mean_y - sums.mean_y, sums.n * len(x) / total
    for start in range(0, p, BLOCK):
        rows = slice(start, start + BLOCK)
        sums.xx[rows] += x[:, rows].T @ x + share * np.outer(dx[rows], dx)
        sums.xy[rows] += x[:, rows].T @ y + share * np.outer(dx[rows], dy)
    yy = sums.yy + float(np.vdot(y, y)) + share * float(dy @ dy)
    part = len(x) / total
    return RegressionMoments(total, sums.mean_x + dx * part, sums.mean_y + dy * part, sums.xx, sums.xy, yy)


def add_maps(sums: RegressionMoments | None, x: np.ndarray, y: np.ndarray, centred: bool = True) -> RegressionMoments:
    """Add a row for each position in maps x (n, p, ...) and y (n, q, ...), as `add_rows` does."""
    for a, b in _iterate_chunks(x, y):
        sums = add_rows(sums, a, b, centred)
    assert sums is not None, "no maps"
    return sums


def solve_ridge(sums: RegressionMoments, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray]:
    """Return W (q, p) and b (q,), float64, that minimise the sum of |W x + b - y|^2 plus lam |W|^2.

    lam = ridge * trace(xx) / p is relative to the variance of x, so that dead and duplicate channels are harmless. With
    ridge = 0 the solution has the minimum norm and uses only eigenvalues larger than rounding errors.
    """
    p = len(sums.mean_x)
    if ridge > 0:
        lam = ridge * np.trace(sums.xx) / p
        inner = sums.xx.copy()
        inner[np.diag_indices(p)] += lam
        w = np.linalg.solve(inner, sums.xy).T if lam > 0 else np.zeros_like(sums.xy.T)
    else:
        values, vectors = np.linalg.eigh(sums.xx)
        keep = values > max(p, sums.n) * np.finfo(np.float64).eps * values[-1]
        v = vectors[:, keep]
        w = ((v / values[keep]) @ (v.T @ sums.xy)).T
    return w, sums.mean_y - w @ sums.mean_x


def fit_bytes(channels: int, positions: int) -> int:
    """Return the peak bytes of a `RidgeFit` on `positions` rows, for targets of at most BLOCK columns."""
    side = min(channels, positions)
    return 24 * side * side + 12 * positions * channels + 8 * BLOCK * (3 * positions + 2 * channels)


def moments_bytes(channels: int) -> int:
    """Return the bytes of the moments of `channels` channels and of their packed copy."""
    return 16 * channels * channels


class RidgeFit:
    """Ridge regression on rows (n, p) in memory, with one inverse for any number of targets.

    The cheaper of two equivalent forms is used: with fewer rows than channels the dual form inverts an n x n matrix
    instead of a p x p matrix. With ridge = 0 the pseudo-inverse comes from a singular value decomposition with a
    cut-off at max(n, p) * eps. `centred` fits a bias.
    """

    def __init__(self, x: np.ndarray, ridge: float = RIDGE, centred: bool = True) -> None:
        n, p = x.shape
        x = x.astype(np.float64)
        self._centred, self._primal = centred, n >= p
        self._mean = x.mean(axis=0) * centred
        x -= self._mean
        self._x: np.ndarray | None = None
        if ridge > 0:
            inner = x.T @ x if self._primal else x @ x.T
            lam = ridge * np.trace(inner) / p
            inner[np.diag_indices(len(inner))] += lam
            self._inverse = np.linalg.inv(inner) if lam > 0 else np.zeros_like(inner)
            self._x = x
        else:
            self._inverse = np.linalg.pinv(x, rcond=max(x.shape) * np.finfo(np.float64).eps)

    def solve_weights(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights (q, p) and the bias (q,), float64, for targets y (n, q)."""
        mean = y.mean(axis=0, dtype=np.float64) * self._centred
        y = y - mean
        if self._x is None:
            solution = self._inverse @ y
        elif self._primal:
            solution = self._inverse @ (self._x.T @ y)
        else:
            solution = self._x.T @ (self._inverse @ y)
        return solution.T, mean - solution.T @ self._mean


# -- on the wire ----------------------------------------------------------------------------------


def pack_moments(sums: RegressionMoments, exact: bool) -> dict[str, np.ndarray]:
    """Pack moments for sending: half of the symmetric matrix, in float32 unless `exact`.

    The rounding of centred moments to float32 is smaller than the effect of a ridge. Without a ridge small eigenvalues
    matter.
    """
    kind = np.float64 if exact else np.float32
    return {
        "n": np.array([sums.n]),
        "mean_x": sums.mean_x,
        "mean_y": sums.mean_y,
        "xx": pack_upper(sums.xx, kind),
        "xy": sums.xy.astype(kind),
        "yy": np.array([sums.yy]),
    }


def read_sent_moments(sent_tensors: Tensors, p: int, q: int) -> RegressionMoments:
    """Unpack a device's moments of p inputs and q outputs, or raise UpdateError if they are invalid."""
    shapes = {"n": (1,), "mean_x": (p,), "mean_y": (q,), "xx": (p * (p + 1) // 2,), "xy": (p, q), "yy": (1,)}
    if missing := sorted(shapes.keys() - sent_tensors.keys()):
        raise UpdateError(f"moments: {', '.join(missing)} missing: update the agent")
    kind = np.dtype(np.float64 if sent_tensors["xx"].dtype == np.float64 else np.float32)  # as `pack_moments`
    double = np.dtype(np.float64)
    require_tensors(
        sent_tensors,
        {name: TensorSpec(shape, kind if name in ("xx", "xy") else double) for name, shape in shapes.items()},
    )
    xx = unpack_symmetric(sent_tensors["xx"], p)
    n, yy = float(sent_tensors["n"][0]), float(sent_tensors["yy"][0])
    if n <= 0 or yy < 0 or (np.diagonal(xx) < 0).any():
        raise UpdateError("moments: the number of rows is not positive, or a variance is negative")
    mean_x, mean_y, xy = (sent_tensors[name].astype(np.float64) for name in ("mean_x", "mean_y", "xy"))
    return RegressionMoments(n, mean_x, mean_y, xx, xy, yy)


def require_tensors(sent_tensors: Tensors, specs: Mapping[str, TensorSpec]) -> None:
    try:
        tensors.require_addable(sent_tensors, specs)
    except UpdateError as error:
        raise UpdateError(f"moments: {error}") from None


def require_weight(rows: float, weight: float, positions: int = 1) -> None:
    """Raise UpdateError unless an update's weight is its number of examples, each with `positions` rows."""
    if rows != positions * weight:
        raise UpdateError(f"moments: computed on {rows / positions:g} examples, but the update's weight is {weight:g}")


def pack_upper(matrix: np.ndarray, kind: type) -> np.ndarray:
    """Return the entries on and above the diagonal, row by row, as a vector of `packed_size` entries."""
    packed: np.ndarray = np.empty(packed_size(*matrix.shape), kind)
    for row, entries in _packed_rows(*matrix.shape):
        packed[entries] = matrix[row, row:]
    return packed


def unpack_upper(packed: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Return the matrix (rows, width) of packed rows in float64, with zeros under the diagonal."""
    matrix = np.zeros((rows, width))
    for row, entries in _packed_rows(rows, width):
        matrix[row, row:] = packed[entries]
    return matrix


def unpack_symmetric(packed: np.ndarray, width: int) -> np.ndarray:
    matrix = np.empty((width, width))
    for row, entries in _packed_rows(width, width):
        matrix[row, row:] = matrix[row:, row] = packed[entries]
    return matrix


def packed_size(rows: int, width: int) -> int:
    return rows * width - rows * (rows - 1) // 2


def _packed_rows(rows: int, width: int) -> Iterator[tuple[int, slice]]:
    start = 0
    for row in range(rows):
        yield row, slice(start, start + width - row)
        start += width - row


def _add_part_and_outer(total: np.ndarray, part: np.ndarray, share: float, dx: np.ndarray, dy: np.ndarray) -> None:
    # total += part + share * dx dy', by blocks of rows.
    for first in range(0, len(total), BLOCK):
        rows = slice(first, first + BLOCK)
        step = np.outer(dx[rows], dy)
        step *= share
        step += part[rows]
        total[rows] += step


def _maps_as_rows(maps: np.ndarray) -> np.ndarray:
    # Each channel is contiguous in memory, which speeds up sums over rows.
    return np.moveaxis(maps, 1, 0).reshape(maps.shape[1], -1).T


def _iterate_chunks(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    examples = max(1, ROWS // prod(x.shape[2:]))
    for start in range(0, len(x), examples):
        yield _maps_as_rows(x[start : start + examples]), _maps_as_rows(y[start : start + examples])
