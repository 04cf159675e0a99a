"""The model's coefficients from measurements, and how far it is off. Imports numpy.

Coefficients are not negative, as more clock cannot take longer or draw less. Non-negative least squares is
exact here by trying every subset of the few columns. Rows are weighted by 1 / measured, so that errors are
relative. The error that is told is that of points the fit has not seen: each is left out in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from fedquilt.profiles import model as laws

EXPONENTS: Final = (1.0, 1.5, 2.0, 2.5, 3.0)  # k of `fedquilt.profiles.model`
BETTER: Final = 1e-9  # how much smaller the squared error of a larger subset must be
TINY_DESIGN: Final = 1e-6  # keeps the determinant of the first few rows above 0


class Seen(NamedTuple):
    """One point: its clocks, and what was measured there."""

    clocks: laws.Clocks
    value: float  # seconds per unit, or watts


@dataclass(frozen=True)
class Errors:
    """Relative errors, signed as (model - measured) / measured, in the order of what was seen."""

    fitted: tuple[float, ...]
    left_out: tuple[float | None, ...]  # of each point, by the fit of all the others; None: too few are left

    @property
    def median(self) -> float | None:
        """Of the sizes of `left_out`; None: nothing could be left out."""
        known = [abs(error) for error in self.left_out if error is not None]
        return float(np.median(known)) if known else None

    @property
    def worst(self) -> float | None:
        """Largest relative error at a point left out of the fit; None: no point was."""
        return max((abs(error) for error in self.left_out if error is not None), default=None)


def inverse(seen: Sequence[Seen], top: Mapping[str, float]) -> tuple[laws.Inverse, Errors]:
    """The time a + b / f_cpu + c / f_gpu + d / f_emc that fits best.

    Raises:
        ValueError: nothing was seen.
    """
    axes = _varying(seen, top)
    x = _inverse_rows(seen, axes, top)  # (n, 1 + axes)
    found, errors = _fit(x, _values(seen))
    return laws.Inverse(found[0], {axis: value for axis, value in zip(axes, found[1:], strict=True) if value}), errors


def draw(seen: Sequence[Seen], top: Mapping[str, float], floor_w: float = 0.0) -> tuple[laws.Draw, Errors]:
    """The power base + sum of w * r^k that fits best, over `EXPONENTS` too; `base` is no less than `floor_w`.

    Raises:
        ValueError: nothing was seen.
    """
    axes = _varying(seen, top)
    values = _values(seen)
    best: tuple[float, laws.Draw, Errors] | None = None
    for exponent in EXPONENTS:
        x = _draw_rows(seen, axes, top, exponent)
        found, errors = _fit(x, values, floor_w)
        known = {axis: value for axis, value in zip(axes, found[1:], strict=True) if value}
        rating = float(np.sum(np.square(errors.fitted)))
        if best is None or rating < best[0] * (1 - BETTER):
            best = rating, laws.Draw(found[0], known, exponent), errors
    assert best is not None
    return best[1], best[2]


def design(candidates: Sequence[laws.Clocks], count: int, top: Mapping[str, float]) -> list[int]:
    """Which points to measure, most telling first: places in `candidates`.

    D-optimal by greed: the fastest first, then the one in the middle, which shows whether power bends, then
    whichever makes the determinant of X'X largest, X being the rows of the time model, scaled to the range
    of each column. These are mostly the corners. Deterministic: of equals, the first.
    """
    if not candidates or count < 1:
        return []
    seen = [Seen(clocks, 1.0) for clocks in candidates]
    axes = _varying(seen, top)
    x = _inverse_rows(seen, axes, top)
    x[:, 1:] = (x[:, 1:] - x[:, 1:].mean(0)) / np.maximum(np.ptp(x[:, 1:], axis=0), 1e-300)
    speed = np.array([[laws.at(clocks, top, axis) / top[axis] for axis in axes] for clocks in candidates])
    order = [int(np.argmax(speed.sum(1)))] if axes else [0]
    middle = np.square(speed - (speed.min(0) + speed.max(0)) / 2).sum(1) if axes else np.zeros(len(x))
    middle[order[0]] = np.inf
    if count > 1 and len(candidates) > 1:
        order.append(int(np.argmin(middle)))
    while len(order) < min(count, len(candidates)):
        information = x[order].T @ x[order] + TINY_DESIGN * np.eye(x.shape[1])
        gain = np.einsum("ni,ij,nj->n", x, np.linalg.inv(information), x)  # det grows by 1 + gain
        gain[order] = -1.0
        order.append(int(np.argmax(np.round(gain, 9))))
    return order


def _varying(seen: Sequence[Seen], top: Mapping[str, float]) -> list[str]:
    """Axes along which the points differ; of the others nothing can be told."""
    if not seen:
        raise ValueError("there is nothing to fit")
    return [axis for axis in laws.AXES if axis in top and len({laws.at(each.clocks, top, axis) for each in seen}) > 1]


def _values(seen: Sequence[Seen]) -> np.ndarray:
    return np.array([each.value for each in seen], float)  # (n,)


def _inverse_rows(seen: Sequence[Seen], axes: Sequence[str], top: Mapping[str, float]) -> np.ndarray:
    return np.array([[1.0, *(1 / laws.at(each.clocks, top, axis) for axis in axes)] for each in seen])


def _draw_rows(seen: Sequence[Seen], axes: Sequence[str], top: Mapping[str, float], exponent: float) -> np.ndarray:
    return np.array([[1.0, *(laws.ratio(axis, each.clocks, top, exponent) for axis in axes)] for each in seen])


def _fit(x: np.ndarray, y: np.ndarray, floor: float = 0.0) -> tuple[list[float], Errors]:
    """Coefficients of x, (n, p), for y, (n,): none negative, the first no less than `floor`."""
    found = _non_negative(x, y, floor)
    left_out: list[float | None] = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        if rest.sum() < x.shape[1] or np.linalg.matrix_rank(x[rest] / x.max(0)) < x.shape[1]:
            left_out.append(None)  # what was left out is all that told of some clock
        else:
            left_out.append(float(x[i] @ _non_negative(x[rest], y[rest], floor) / y[i] - 1))
    return [float(value) for value in found], Errors(tuple(float(e) for e in x @ found / y - 1), tuple(left_out))


def positive(counts: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Cost of one of each count, none negative, whose sums are nearest the values in relative terms.

    Args:
        counts: a row for each value.
        values: all above 0.
    """
    found = _non_negative(np.array(counts, float), np.array(values, float), 0.0)
    return [float(value) for value in found]


def _non_negative(x: np.ndarray, y: np.ndarray, floor: float) -> np.ndarray:
    """Least squares of relative errors over coefficients >= 0, by every subset of columns, small ones first."""
    rows = x / y[:, None]
    aim = 1.0 - floor * rows[:, 0]  # what is left for the coefficients above their lowest
    scale = np.maximum(np.abs(rows).max(0), 1e-300)
    best, least = np.zeros(x.shape[1]), float(aim @ aim)
    for size in range(1, x.shape[1] + 1):
        for columns in itertools.combinations(range(x.shape[1]), size):
            part = rows[:, columns] / scale[list(columns)]
            solved = np.linalg.lstsq(part, aim, rcond=None)[0]
            error = float(np.square(part @ solved - aim).sum())
            if (solved >= 0).all() and error < least * (1 - BETTER) - 1e-24:
                least = error
                best = np.zeros(x.shape[1])
                best[list(columns)] = solved / scale[list(columns)]
    best[0] += floor
    return best
