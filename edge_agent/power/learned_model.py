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

Each column of the time is scaled so that it alone would explain the first measurement, and each of the power to be as
large at the highest clocks. Weights begin at (1, 0, 0, ...), the profile times one factor, with a Gaussian prior: a few
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
TIME: Final = (0.6, 0.4, 0.4, 0.4, 0.1)  # prior spread of each weight: profile, cpu, gpu, emc, constant
POWER: Final = (0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)  # profile, cpu^3, gpu^3, speed * (cpu^2, gpu^2, 1), constant
NOISE: Final = 0.05  # relative error of one measurement
KEPT: Final = 0.98  # weight of a task after the next one: about fifty count
EXACT: Final = 1e-6  # a profile that is so near leaves nothing to learn: simulated boards without noise
ODD: Final = 0.5  # least relative error at which a measurement is taken for another regime ...
SURE: Final = 4.0  # ... and this many times the spread that was expected
YOUNG: Final = 4  # measurements before which nothing is unlike all before, and the scale is still looked for
MOST: Final = 1000.0  # beyond this factor from the profile, either way, the cause is not the clocks
SWEEPS: Final = 100  # most rounds of the solver, which stops earlier
SOLVED: Final = 1e-6  # change of a weight at which the solver stops

Numbers = Annotated[tuple[float, ...], Meta(max_length=64)]


class CostLaw(WireMessage, frozen=True):
    """Measurements of one quantity, as the normal equations of its weights."""

    at: OperatingPoint  # point of the first measurement: the columns' unit
    top: dict[ShortText, Amount]  # highest clocks of the board then, by axis
    ratio: Amount  # measured there, over the profile's
    rows: Numbers  # information, n * n, without the prior
    aims: Numbers  # right-hand sides, n
    count: Count
    odd: bool = False  # the latest measurement was unlike all before, and was left out


class LatestTask(WireMessage, frozen=True):
    work: WorkEstimate  # of the whole task
    left_s: float  # until its deadline, once its data was loaded


class LearnedModel(WireMessage, frozen=True):
    """Learned time and power of one engine and workload. Laws are None while the profile holds."""

    time: CostLaw | None = None
    power: CostLaw | None = None
    latest: LatestTask | None = None  # for who examines the board: nothing is chosen by it

    @property
    def is_valid(self) -> bool:
        laws = ((self.time, len(TIME)), (self.power, len(POWER)))
        return all(law is None or (len(law.rows), len(law.aims)) == (size * size, size) for law, size in laws)


class TaskSegment(NamedTuple):
    point: OperatingPoint
    work: WorkEstimate  # done in the stretch
    seconds: float
    watts: float | None  # mean of the whole board; None: no meter, or none that can be trusted
    top: Mapping[str, float] = MappingProxyType({})  # highest clocks of the board, by axis; those of `point` if missing


class CostEstimate(NamedTuple):
    """Estimated time and power at one point, with relative standard deviations."""

    seconds: float
    seconds_spread: float
    watts: float | None  # None without a power in the profile
    watts_spread: float


def estimate_points(
    learned: LearnedModel, points: Sequence[OperatingPoint], work: WorkEstimate
) -> list[CostEstimate | None]:
    seconds_at, power = _time_predictor(_fit_law(learned.time, TIME), work), _fit_law(learned.power, POWER)
    there_s = None if power is None else seconds_at(power.law.at)[0]
    found: list[CostEstimate | None] = []
    for point in points:
        seconds, spread = seconds_at(point)
        if not seconds:
            found.append(None)
            continue
        watts: tuple[float | None, float] = (point.busy_w, 0.0)
        if power is not None and point.busy_w is not None:
            watts = power.evaluate(_power_columns(power.law, point, seconds, there_s))
        found.append(CostEstimate(seconds, spread, *watts))
    return found


@cache_last_call
def learn_segment(learned: LearnedModel, seen: TaskSegment, *, at_once: bool = False) -> LearnedModel:
    """Return the learned costs after one more segment. Impossible values change nothing.

    A segment unlike all earlier ones is left out. A second one in a row resets the law, because the work now runs
    elsewhere, for example on the CPU for lack of a GPU.
    """
    told_s = cost_model.work_seconds(seen.work, seen.point)
    if told_s is None or not 0 < seen.seconds < math.inf:
        return learned
    point, watts = seen.point, seen.watts
    time = _add_measurement(
        learned.time, TIME, seen, (told_s, seen.seconds), at_once, lambda law: _time_columns(law, seen.work)(point)
    )
    anew = learned.time is not None and time is not None and time.count < learned.time.count
    power = None if anew else learned.power
    if watts is not None and 0 < watts < math.inf and point.busy_w and not (time and time.odd):
        seconds_at = _time_predictor(_fit_law(time, TIME), seen.work)
        here_s = seconds_at(point)[0]

        def power_columns(law: CostLaw) -> list[float]:
            return _power_columns(law, point, here_s, seconds_at(law.at)[0])

        power = _add_measurement(power, POWER, seen, (point.busy_w, watts), at_once, power_columns)
    return LearnedModel(time=time, power=power, latest=learned.latest)


# -- columns --------------------------------------------------------------------------------------


def _time_columns(law: CostLaw, work: WorkEstimate) -> Callable[[OperatingPoint], list[float] | None]:
    """Return a function from a point to its columns of the time law, or to None without a predicted time."""
    there_s, unit = cost_model.work_seconds(work, law.at), clocks_by_axis(law.at)
    if there_s is None:
        return lambda point: None
    unit_s = law.ratio * there_s

    def columns_at(point: OperatingPoint) -> list[float] | None:
        here_s = cost_model.work_seconds(work, point)
        if here_s is None:
            return None
        clocks = [unit_s / share if share else 0.0 for share in _relative_clocks(unit, point, AXES)]
        return [law.ratio * here_s, *clocks, unit_s]

    return columns_at


def _power_columns(law: CostLaw, point: OperatingPoint, here_s: float | None, there_s: float | None) -> list[float]:
    speed = there_s / here_s if here_s and there_s else 1.0
    unit_w = law.ratio * (law.at.busy_w or 0.0)
    here, there = _relative_clocks(law.top, point, AXES), _relative_clocks(law.top, law.at, AXES)
    cubes = [unit_w * share**3 for share in here[:2]]
    used = [unit_w * speed * first * share**2 for share, first in zip(here[:2], there[:2], strict=True)]
    return [law.ratio * (point.busy_w or 0.0), *cubes, *used, unit_w * speed * there[2], unit_w]


def clocks_by_axis(point: OperatingPoint) -> dict[str, float]:
    """Return the clocks of a point in hertz, by axis, without unpinned clocks."""
    return {axis: hz for axis in AXES if (hz := getattr(point, axis))}


@cache_last_call
def highest_clocks(points: Sequence[OperatingPoint]) -> dict[str, float]:
    known = {axis: [hz for point in points if (hz := getattr(point, axis))] for axis in AXES}
    return {axis: max(values) for axis, values in known.items() if values}


def _relative_clocks(unit: Mapping[str, float], point: OperatingPoint, axes: Sequence[str]) -> list[float]:
    """Return clocks relative to a unit: 1 for a clock left to the board, 0 if the unit has none."""
    known = clocks_by_axis(point)
    return [known.get(axis, unit[axis]) / unit[axis] if axis in unit else 0.0 for axis in axes]


def _time_predictor(time: _LawFit | None, work: WorkEstimate) -> Callable[[OperatingPoint], tuple[float | None, float]]:
    """Return a function from a point to its seconds, or None, and their relative standard deviation."""
    columns = None if time is None else _time_columns(time.law, work)

    def seconds_at(point: OperatingPoint) -> tuple[float | None, float]:
        row = None if columns is None else columns(point)
        return (cost_model.work_seconds(work, point), 0.0) if time is None or row is None else time.evaluate(row)

    return seconds_at


# -- fitting --------------------------------------------------------------------------------------


class _LawFit(NamedTuple):
    """Weights of a law, with the covariance of their errors, n by n."""

    law: CostLaw
    weights: list[float]
    covariance: list[list[float]]

    def evaluate(self, columns: Sequence[float]) -> tuple[float, float]:
        value = sum(weight * x for weight, x in zip(self.weights, columns, strict=True))
        square = sum(x * sum(map(mul, row, columns)) for x, row in zip(columns, self.covariance, strict=True))
        return value, math.sqrt(max(square, 0.0)) / value


def _fit_law(law: CostLaw | None, spreads: Sequence[float]) -> _LawFit | None:
    """Return the non-negative weights of a law and their covariance, or None without a law."""
    if law is None:
        return None
    n = len(spreads)
    prior = [1 / spread**2 for spread in spreads]
    matrix = [[law.rows[n * i + j] + (prior[i] if i == j else 0.0) for j in range(n)] for i in range(n)]
    aims = [aim + (prior[0] if i == 0 else 0.0) for i, aim in enumerate(law.aims)]
    covariance = _invert_positive_definite(matrix)
    weights = [max(0.0, sum(map(mul, row, aims))) for row in covariance]
    for _ in range(SWEEPS):
        moved = 0.0
        for i, row in enumerate(matrix):
            better = max(0.0, weights[i] + (aims[i] - sum(map(mul, row, weights))) / row[i])
            moved, weights[i] = max(moved, abs(better - weights[i])), better
        if moved < SOLVED:
            break
    return _LawFit(law, weights, covariance)


def _invert_positive_definite(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    n = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for k in range(n):
            if k != i and (factor := rows[k][i]):
                rows[k] = [value - factor * other for value, other in zip(rows[k], rows[i], strict=True)]
    return [row[n:] for row in rows]


def _add_measurement(
    law: CostLaw | None,
    spreads: Sequence[float],
    seen: TaskSegment,
    values: tuple[float, float],
    at_once: bool,
    columns: Callable[[CostLaw], list[float] | None],
) -> CostLaw | None:
    """Return the law after a measurement. An outlier is left out, and a second one in a row resets the law."""
    told, measured = values
    if law is None and abs(measured / told - 1) < EXACT:
        return None
    fit = _fit_law(law, spreads)
    if fit is not None:
        row = columns(fit.law)
        if row is None:
            return law
        value, spread = fit.evaluate(row)
        if abs(measured / value - 1) > max(ODD, SURE * math.hypot(spread, NOISE)):
            if fit.law.count < YOUNG:
                law = _scale_law(fit.law, measured / value)
            elif fit.law.odd or at_once:
                law = None
            else:
                return replace(fit.law, odd=True)
    n = len(spreads)
    if law is None:
        ratio = min(max(measured / told, 1 / MOST), MOST)
        rates = {name: each for name, each in seen.point.rates.items() if name == seen.work.workload}
        top = {**clocks_by_axis(seen.point), **seen.top}
        law = CostLaw(
            at=replace(seen.point, rates=rates), top=top, ratio=ratio, rows=(0.0,) * (n * n), aims=(0.0,) * n, count=0
        )
    row = columns(law)
    if row is None:
        return law
    share = [x / measured for x in row]
    known = min(seen.work.task_share, 1.0)  # stretches of one task have one error in common
    weight, kept = known / NOISE**2, 1 - (1 - KEPT) * known
    rows = tuple(kept * law.rows[n * i + j] + weight * share[i] * share[j] for i in range(n) for j in range(n))
    aims = tuple(kept * aim + weight * x for aim, x in zip(law.aims, share, strict=True))
    return replace(law, rows=rows, aims=aims, count=law.count + 1, odd=False)


def _scale_law(law: CostLaw, factor: float) -> CostLaw:
    rows, aims = tuple(value * factor**2 for value in law.rows), tuple(value * factor for value in law.aims)
    return replace(law, ratio=law.ratio * factor, rows=rows, aims=aims)
