"""Learned speed and power of one workload on this device. Pure functions.

A profile contains the time and power of recorded work at each operating point, as measured by `fedquilt board record`.
A task differs from that work: it may run on the GPU where the CPU was recorded, wait for memory or launches, and leave
units idle. Two laws are therefore learned for each engine and workload, each a sum of columns with non-negative
weights:

    seconds = the profile's + amount * (1 / f_cpu + 1 / f_gpu + 1 / f_emc + 1)
    watts   = the profile's + f_cpu^3 + f_gpu^3 + speed * (f_cpu^2 + f_gpu^2 + 1) + 1

The time is a roofline with additive parts, one for each clock and one for none. In the power, f^3 is a unit that is
always on and whose voltage follows the clock. The terms with the speed (work per second) are units that draw power only
while working. Where a voltage is at its floor, the profile's column and the constant account for the difference, as for
leakage.

Each time column is scaled to explain the first measurement alone. Power columns are scaled to equal values at the
highest clocks. Weights begin at (1, 0, 0, ...), the profile times one factor, with a Gaussian prior: a few
measurements change only the directions that they show, and the remaining prior gives the uncertainty of points that
were never used. A measurement adds one row to a matrix of fixed size, older rows count less, and errors are relative.
All in plain floats, because an agent's daemon imports no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from fedquilt.core import Amount, Count, OperatingPoint, ShortText, WireMessage, WorkEstimate
from fedquilt.core.last_call_cache import cache_last_call
from fedquilt.costs import cost_model

AXES: Final = ("cpu_hz", "gpu_hz", "emc_hz")
TIME_SPREADS: Final = (0.6, 0.4, 0.4, 0.4, 0.1)  # prior spread of each weight: profile, cpu, gpu, emc, constant
# Of profile, cpu^3, gpu^3, speed * (cpu^2, gpu^2, 1), constant.
POWER_SPREADS: Final = (0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
NOISE: Final = 0.05  # relative error of one measurement
DECAY: Final = 0.98  # factor on older measurements for each new task, so that about fifty tasks count
EXACT_TOLERANCE: Final = 1e-6  # relative error of an exact profile, as of simulated boards without noise
MIN_OUTLIER_ERROR: Final = 0.5  # smallest relative error of an outlier
OUTLIER_SPREADS: Final = 4.0  # smallest error of an outlier in expected spreads
MIN_MEASUREMENTS: Final = 4  # with fewer, an outlier changes the scale of the law
MAX_RATIO: Final = 1000.0  # limit of measured over predicted values
MAX_SWEEPS: Final = 100  # limit of the solver's iterations
SOLVER_TOLERANCE: Final = 1e-6  # change of a weight at which the solver stops

Numbers = Annotated[tuple[float, ...], Meta(max_length=64)]


class CostLaw(WireMessage, frozen=True):
    """Measurements of time or power, added up in the normal equations of a least-squares fit."""

    reference_point: OperatingPoint  # point of the first measurement, the unit of the columns
    reference_clocks: dict[ShortText, Amount]  # highest clocks of the board at the first measurement, by axis
    ratio: Amount  # first measurement over the profile's value
    information: Numbers  # matrix of the normal equations, n * n, without the prior
    targets: Numbers  # right-hand sides of the normal equations, n
    count: Count
    is_outlier_pending: bool = False  # the latest measurement was an outlier and was left out


class LatestTask(WireMessage, frozen=True):
    work: WorkEstimate  # work of the whole task
    time_left_s: float  # time until the deadline when the data was loaded


class LearnedModel(WireMessage, frozen=True):
    """Learned time and power of one engine and workload. A law is None while the profile is accurate."""

    time: CostLaw | None = None
    power: CostLaw | None = None
    latest: LatestTask | None = None  # for `fedquilt doctor`, not used to choose points

    @property
    def is_valid(self) -> bool:
        laws = ((self.time, len(TIME_SPREADS)), (self.power, len(POWER_SPREADS)))
        return all(law is None or (len(law.information), len(law.targets)) == (size * size, size) for law, size in laws)


class TaskSegment(NamedTuple):
    point: OperatingPoint
    work: WorkEstimate  # work done in the segment
    seconds: float
    watts: float | None  # mean power of the board, or None without a reliable meter
    # Highest clocks of the board by axis. Missing axes have the clock of `point`.
    highest_clocks: Mapping[str, float] = MappingProxyType({})


class CostEstimate(NamedTuple):
    """Estimated time and power at one point, with relative standard deviations."""

    seconds: float
    seconds_spread: float
    watts: float | None  # None without a power in the profile
    watts_spread: float


def estimate_points(
    learned_model: LearnedModel, points: Sequence[OperatingPoint], work: WorkEstimate
) -> list[CostEstimate | None]:
    """Return the estimated cost of the work at each point, or None for points without a predictable time."""
    seconds_at = _time_predictor(_fit_law(learned_model.time, TIME_SPREADS), work)
    power = _fit_law(learned_model.power, POWER_SPREADS)
    reference_s = None if power is None else seconds_at(power.law.reference_point)[0]
    estimates: list[CostEstimate | None] = []
    for point in points:
        seconds, spread = seconds_at(point)
        if not seconds:
            estimates.append(None)
            continue
        watts: tuple[float | None, float] = (point.busy_w, 0.0)
        if power is not None and point.busy_w is not None:
            watts = power.evaluate(_power_columns(power.law, point, seconds, reference_s))
        estimates.append(CostEstimate(seconds, spread, *watts))
    return estimates


@cache_last_call
def learn_segment(learned_model: LearnedModel, segment: TaskSegment, *, accept_outlier: bool = False) -> LearnedModel:
    """Return the learned costs after one more segment. Impossible values change nothing.

    A segment unlike all earlier ones is ignored unless `accept_outlier`. A second one in a row resets the law, because
    the work now runs on other hardware, for example on the CPU after the GPU failed.
    """
    profile_s = cost_model.work_seconds(segment.work, segment.point)
    if profile_s is None or not 0 < segment.seconds < math.inf:
        return learned_model
    point, watts = segment.point, segment.watts
    time = _add_measurement(
        learned_model.time,
        TIME_SPREADS,
        segment,
        (profile_s, segment.seconds),
        accept_outlier,
        lambda law: _time_columns(law, segment.work)(point),
    )
    is_reset = learned_model.time is not None and time is not None and time.count < learned_model.time.count
    power = None if is_reset else learned_model.power
    if watts is not None and 0 < watts < math.inf and point.busy_w and not (time and time.is_outlier_pending):
        seconds_at = _time_predictor(_fit_law(time, TIME_SPREADS), segment.work)
        point_s = seconds_at(point)[0]

        def power_columns(law: CostLaw) -> list[float]:
            return _power_columns(law, point, point_s, seconds_at(law.reference_point)[0])

        power = _add_measurement(power, POWER_SPREADS, segment, (point.busy_w, watts), accept_outlier, power_columns)
    return LearnedModel(time=time, power=power, latest=learned_model.latest)


# -- columns --------------------------------------------------------------------------------------


def _time_columns(law: CostLaw, work: WorkEstimate) -> Callable[[OperatingPoint], list[float] | None]:
    """Return a function from a point to the time law's columns, or to None for an unpredictable time."""
    reference_s, unit_clocks = cost_model.work_seconds(work, law.reference_point), clocks_by_axis(law.reference_point)
    if reference_s is None:
        return lambda point: None
    unit_s = law.ratio * reference_s

    def columns_at(point: OperatingPoint) -> list[float] | None:
        point_s = cost_model.work_seconds(work, point)
        if point_s is None:
            return None
        clocks = [unit_s / ratio if ratio else 0.0 for ratio in _relative_clocks(unit_clocks, point, AXES)]
        return [law.ratio * point_s, *clocks, unit_s]

    return columns_at


def _power_columns(
    law: CostLaw, point: OperatingPoint, point_s: float | None, reference_s: float | None
) -> list[float]:
    speed = reference_s / point_s if point_s and reference_s else 1.0
    unit_w = law.ratio * (law.reference_point.busy_w or 0.0)
    clocks = _relative_clocks(law.reference_clocks, point, AXES)
    reference_clocks = _relative_clocks(law.reference_clocks, law.reference_point, AXES)
    cubes = [unit_w * clock**3 for clock in clocks[:2]]
    active_terms = [
        unit_w * speed * reference_clock * clock**2
        for clock, reference_clock in zip(clocks[:2], reference_clocks[:2], strict=True)
    ]
    return [law.ratio * (point.busy_w or 0.0), *cubes, *active_terms, unit_w * speed * reference_clocks[2], unit_w]


def clocks_by_axis(point: OperatingPoint) -> dict[str, float]:
    """Return the clocks in hertz that a point sets, by axis."""
    return {axis: hz for axis in AXES if (hz := getattr(point, axis))}


@cache_last_call
def highest_clocks(points: Sequence[OperatingPoint]) -> dict[str, float]:
    """Return the highest clock of all points in hertz, by axis. Axes that no point sets are left out."""
    clocks = {axis: [hz for point in points if (hz := getattr(point, axis))] for axis in AXES}
    return {axis: max(values) for axis, values in clocks.items() if values}


def _relative_clocks(unit_clocks: Mapping[str, float], point: OperatingPoint, axes: Sequence[str]) -> list[float]:
    """Return each clock as a multiple of `unit_clocks`: 1 if the point sets none, 0 without a unit clock."""
    point_clocks = clocks_by_axis(point)
    return [
        point_clocks.get(axis, unit_clocks[axis]) / unit_clocks[axis] if axis in unit_clocks else 0.0 for axis in axes
    ]


def _time_predictor(time: _LawFit | None, work: WorkEstimate) -> Callable[[OperatingPoint], tuple[float | None, float]]:
    """Return a function from a point to seconds (None if unknown) and their relative standard deviation."""
    columns = None if time is None else _time_columns(time.law, work)

    def seconds_at(point: OperatingPoint) -> tuple[float | None, float]:
        row = None if columns is None else columns(point)
        return (cost_model.work_seconds(work, point), 0.0) if time is None or row is None else time.evaluate(row)

    return seconds_at


# -- fitting --------------------------------------------------------------------------------------


class _LawFit(NamedTuple):
    law: CostLaw
    weights: list[float]
    covariance: list[list[float]]

    def evaluate(self, columns: Sequence[float]) -> tuple[float, float]:
        """Return the law's value and its relative standard deviation."""
        value = sum(weight * x for weight, x in zip(self.weights, columns, strict=True))
        square = sum(x * sum(map(mul, row, columns)) for x, row in zip(columns, self.covariance, strict=True))
        return value, math.sqrt(max(square, 0.0)) / value


def _fit_law(law: CostLaw | None, spreads: Sequence[float]) -> _LawFit | None:
    if law is None:
        return None
    n = len(spreads)
    prior = [1 / spread**2 for spread in spreads]
    matrix = [[law.information[n * i + j] + (prior[i] if i == j else 0.0) for j in range(n)] for i in range(n)]
    targets = [target + (prior[0] if i == 0 else 0.0) for i, target in enumerate(law.targets)]
    covariance = _invert_positive_definite(matrix)
    weights = [max(0.0, sum(map(mul, row, targets))) for row in covariance]
    for _ in range(MAX_SWEEPS):
        max_change = 0.0
        for i, row in enumerate(matrix):
            better = max(0.0, weights[i] + (targets[i] - sum(map(mul, row, weights))) / row[i])
            max_change, weights[i] = max(max_change, abs(better - weights[i])), better
        if max_change < SOLVER_TOLERANCE:
            break
    return _LawFit(law, weights, covariance)


def _invert_positive_definite(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    n = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for k in range(n):
            if k != i and (factor := rows[k][i]):
                rows[k] = [value - factor * pivot_value for value, pivot_value in zip(rows[k], rows[i], strict=True)]
    return [row[n:] for row in rows]


def _add_measurement(
    law: CostLaw | None,
    spreads: Sequence[float],
    segment: TaskSegment,
    values: tuple[float, float],
    accept_outlier: bool,
    columns: Callable[[CostLaw], list[float] | None],
) -> CostLaw | None:
    """Return the law after a measurement, or None while the profile predicts exactly.

    `values` are the profile's prediction and the measured value. An outlier is ignored. A second outlier in a row,
    or the first with `accept_outlier`, resets the law.
    """
    predicted, measured = values
    if law is None and abs(measured / predicted - 1) < EXACT_TOLERANCE:
        return None
    fit = _fit_law(law, spreads)
    if fit is not None:
        row = columns(fit.law)
        if row is None:
            return law
        value, spread = fit.evaluate(row)
        if abs(measured / value - 1) > max(MIN_OUTLIER_ERROR, OUTLIER_SPREADS * math.hypot(spread, NOISE)):
            if fit.law.count < MIN_MEASUREMENTS:
                law = _scale_law(fit.law, measured / value)
            elif fit.law.is_outlier_pending or accept_outlier:
                law = None
            else:
                return replace(fit.law, is_outlier_pending=True)
    n = len(spreads)
    if law is None:
        ratio = min(max(measured / predicted, 1 / MAX_RATIO), MAX_RATIO)
        rates = {name: rate for name, rate in segment.point.rates.items() if name == segment.work.workload}
        reference_clocks = {**clocks_by_axis(segment.point), **segment.highest_clocks}
        law = CostLaw(
            reference_point=replace(segment.point, rates=rates),
            reference_clocks=reference_clocks,
            ratio=ratio,
            information=(0.0,) * (n * n),
            targets=(0.0,) * n,
            count=0,
        )
    row = columns(law)
    if row is None:
        return law
    scaled_row = [x / measured for x in row]
    task_fraction = min(segment.work.task_share, 1.0)  # segments of one task share one error
    weight, decay = task_fraction / NOISE**2, 1 - (1 - DECAY) * task_fraction
    information = tuple(
        decay * law.information[n * i + j] + weight * scaled_row[i] * scaled_row[j] for i in range(n) for j in range(n)
    )
    targets = tuple(decay * target + weight * x for target, x in zip(law.targets, scaled_row, strict=True))
    return replace(law, information=information, targets=targets, count=law.count + 1, is_outlier_pending=False)


def _scale_law(law: CostLaw, factor: float) -> CostLaw:
    information = tuple(value * factor**2 for value in law.information)
    targets = tuple(value * factor for value in law.targets)
    return replace(law, ratio=law.ratio * factor, information=information, targets=targets)
