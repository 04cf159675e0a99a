"""Fit of the clock model to measurements, with its errors. Imports numpy.

No coefficient is negative, because work cannot take longer or use less power at a higher clock. The few columns allow
an exact solution of non-negative least squares, by a search of all subsets of the columns. Rows are weighted by
1 / measured, so that errors are relative. The reported error is that of leave-one-out cross-validation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from fedquilt.profiles import clock_model as laws

EXPONENTS: Final = (1.0, 1.5, 2.0, 2.5, 3.0)  # k of `fedquilt.profiles.clock_model`
BETTER: Final = 1e-9  # relative decrease of the squared error that justifies a larger subset
TINY_DESIGN: Final = 1e-6  # ridge that keeps the determinant of the first few rows above 0


class MeasuredPoint(NamedTuple):
    clocks: laws.Clocks
    value: float  # seconds per unit, or watts


@dataclass(frozen=True)
class RelativeErrors:
    """Relative errors of a fit, (model - measured) / measured, in the order of the measurements."""

    fitted: tuple[float, ...]
    left_out: tuple[float | None, ...]  # by a fit without the point, or None if the others do not vary all clocks

    @property
    def median(self) -> float | None:
        absolute_errors = [abs(error) for error in self.left_out if error is not None]
        return float(np.median(absolute_errors)) if absolute_errors else None

    @property
    def worst(self) -> float | None:
        return max((abs(error) for error in self.left_out if error is not None), default=None)


def fit_time_law(
    measurements: Sequence[MeasuredPoint], top: Mapping[str, float]
) -> tuple[laws.InverseTimeLaw, RelativeErrors]:
    """Return the time law a + b / f_cpu + c / f_gpu + d / f_emc that fits best, with its errors."""
    axes = _find_varying_axes(measurements, top)
    x = _time_law_rows(measurements, axes, top)  # (n, 1 + axes)
    coefficients, errors = _fit_non_negative_with_errors(x, _target_values(measurements))
    return laws.InverseTimeLaw(
        coefficients[0], {axis: value for axis, value in zip(axes, coefficients[1:], strict=True) if value}
    ), errors


def fit_power_model(
    measurements: Sequence[MeasuredPoint], top: Mapping[str, float], floor_w: float = 0.0
) -> tuple[laws.PowerModel, RelativeErrors]:
    """Return the power model that fits best, with its errors. `base` is at least `floor_w`."""
    axes = _find_varying_axes(measurements, top)
    values = _target_values(measurements)
    best: tuple[float, laws.PowerModel, RelativeErrors] | None = None
    for exponent in EXPONENTS:
        x = _power_model_rows(measurements, axes, top, exponent)
        coefficients, errors = _fit_non_negative_with_errors(x, values, floor_w)
        axis_coefficients = {axis: value for axis, value in zip(axes, coefficients[1:], strict=True) if value}
        rating = float(np.sum(np.square(errors.fitted)))
        if best is None or rating < best[0] * (1 - BETTER):
            best = rating, laws.PowerModel(coefficients[0], axis_coefficients, exponent), errors
    assert best is not None
    return best[1], best[2]


def select_points_to_measure(candidates: Sequence[laws.Clocks], count: int, top: Mapping[str, float]) -> list[int]:
    """Return indices of candidates to measure, the most informative first.

    The first point is the fastest. The second is in the middle, to measure the curvature of the power. Each further
    point maximises the determinant of X'X (greedy D-optimal design), where X contains the scaled rows of the time
    model. Most of these points are corners of the grid. Of several equal candidates the first is selected.
    """
    if not candidates or count < 1:
        return []
    candidate_points = [MeasuredPoint(clocks, 1.0) for clocks in candidates]
    axes = _find_varying_axes(candidate_points, top)
    x = _time_law_rows(candidate_points, axes, top)
    x[:, 1:] = (x[:, 1:] - x[:, 1:].mean(0)) / np.maximum(np.ptp(x[:, 1:], axis=0), 1e-300)
    speed = np.array([[laws.clock_of_axis(clocks, top, axis) / top[axis] for axis in axes] for clocks in candidates])
    selected = [int(np.argmax(speed.sum(1)))] if axes else [0]
    middle = np.square(speed - (speed.min(0) + speed.max(0)) / 2).sum(1) if axes else np.zeros(len(x))
    middle[selected[0]] = np.inf
    if count > 1 and len(candidates) > 1:
        selected.append(int(np.argmin(middle)))
    while len(selected) < min(count, len(candidates)):
        information = x[selected].T @ x[selected] + TINY_DESIGN * np.eye(x.shape[1])
        gain = np.einsum("ni,ij,nj->n", x, np.linalg.inv(information), x)  # det grows by 1 + gain
        gain[selected] = -1.0
        selected.append(int(np.argmax(np.round(gain, 9))))
    return selected


def _find_varying_axes(measurements: Sequence[MeasuredPoint], top: Mapping[str, float]) -> list[str]:
    if not measurements:
        raise ValueError("no measurements to fit")
    return [
        axis
        for axis in laws.AXES
        if axis in top and len({laws.clock_of_axis(point.clocks, top, axis) for point in measurements}) > 1
    ]


def _target_values(measurements: Sequence[MeasuredPoint]) -> np.ndarray:
    return np.array([point.value for point in measurements], float)  # (n,)


def _time_law_rows(measurements: Sequence[MeasuredPoint], axes: Sequence[str], top: Mapping[str, float]) -> np.ndarray:
    return np.array(
        [[1.0, *(1 / laws.clock_of_axis(point.clocks, top, axis) for axis in axes)] for point in measurements]
    )


def _power_model_rows(
    measurements: Sequence[MeasuredPoint], axes: Sequence[str], top: Mapping[str, float], exponent: float
) -> np.ndarray:
    return np.array(
        [[1.0, *(laws.power_ratio(axis, point.clocks, top, exponent) for axis in axes)] for point in measurements]
    )


def _fit_non_negative_with_errors(
    x: np.ndarray, y: np.ndarray, min_first_coefficient: float = 0.0
) -> tuple[list[float], RelativeErrors]:
    coefficients = _solve_non_negative(x, y, min_first_coefficient)
    left_out: list[float | None] = []
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        if others.sum() < x.shape[1] or np.linalg.matrix_rank(x[others] / x.max(0)) < x.shape[1]:
            left_out.append(None)  # the other points do not vary all clocks
        else:
            left_out.append(float(x[i] @ _solve_non_negative(x[others], y[others], min_first_coefficient) / y[i] - 1))
    return [float(value) for value in coefficients], RelativeErrors(
        tuple(float(e) for e in x @ coefficients / y - 1), tuple(left_out)
    )


def fit_unit_costs(counts: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return non-negative costs (units,) for which counts (n, units) @ costs is closest to values (n,).

    The sum of squared relative errors is minimised.
    """
    coefficients = _solve_non_negative(np.array(counts, float), np.array(values, float), 0.0)
    return [float(value) for value in coefficients]


def _solve_non_negative(x: np.ndarray, y: np.ndarray, floor: float) -> np.ndarray:
    if (odd := ~(np.isfinite(y) & (y > 0))).any():
        index = int(odd.argmax())
        raise ValueError(f"measurement {index} is {y[index]:g}, not above 0: measure again, or leave the point out")
    rows = x / y[:, None]
    aim = 1.0 - floor * rows[:, 0]  # remainder for the coefficients above their minimum
    scale = np.maximum(np.abs(rows).max(0), 1e-300)
    best, smallest_error = np.zeros(x.shape[1]), float(aim @ aim)
    for size in range(1, x.shape[1] + 1):
        for columns in itertools.combinations(range(x.shape[1]), size):
            part = rows[:, columns] / scale[list(columns)]
            solved = np.linalg.lstsq(part, aim, rcond=None)[0]
            error = float(np.square(part @ solved - aim).sum())
            if (solved >= 0).all() and error < smallest_error * (1 - BETTER) - 1e-24:
                smallest_error = error
                best = np.zeros(x.shape[1])
                best[list(columns)] = solved / scale[list(columns)]
    best[0] += floor
    return best
