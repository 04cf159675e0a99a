"""Choice of the operating point of a task, by energy and deadline. Pure functions.

Points are compared by the energy of the whole board until the deadline, with t as the duration of the work,

    E(point) = busy_w * t + idle_w * (deadline - t)

and not until the end of the work. A board that finishes early waits for the end of the round and draws idle_w
meanwhile. Without that term, the fastest point would win whenever busy_w * t falls with the clock. For one deadline the
sum orders the points as (busy_w - idle_w) * t does, the energy above idle. FedStitch (arXiv 2409.07202) has the same
sum in its equation 5, and its Table II shows that no order is generally best: from 1.12 to 1.30 GHz the time falls by
12 % and the power as well, so that the fastest point is best, and from 0.85 to 1.12 GHz the power grows by 25 % and the
time falls by 17 %. The energy of each point is therefore computed.

Times and powers come from `learned_model`: first from the profile, then from tasks of this engine and workload.
Estimates for rarely used points are less certain. Whether a point meets the deadline is decided by an upper bound of
its time (`CAUTION`). Points are compared by a lower bound of their energy (`CURIOSITY`), so that unknown points are
tried if there is time (as in BoFL, Middleware 2022).

Policies:
    energy   the cheapest of the points that meet the deadline with `MARGIN` to spare
    paper    FedStitch, section IV-D: the frequency goes down while the task is early and up while it is late. This ends
             at the slowest point that meets the deadline with `MARGIN`, which is found directly. The paper gives
             neither step nor margin
    max      the fastest
    board    none: the board's own governor sets the clocks

If no point meets the deadline, each policy selects the fastest. Points without numbers in the profile are left out.
Without any point the policy is `board`. An unknown idle_w is between 0 and the smallest power of any point at work. The
selected point is then the one with the fewest joules above the cheapest in the worse of these two cases. Energy is
linear in idle_w, so that no value between them is worse.

The owner's limit has priority: a point above `max_w` is never selected. The board's own governor obeys its power mode
only.

A late task is stepped up, never down, and at most once every STEP_S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from fedquilt.core import OperatingPoint, WorkEstimate
from fedquilt.core.last_call_cache import cache_last_call
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, estimate_points, learn_segment

STEP_S: Final = 3.0  # shortest interval between changes of clocks: each takes time, and its effect has to be seen first
MARGIN: Final = 0.05  # share of the predicted time that is kept as reserve
MIN_FRACTION_DONE: Final = 0.02  # share of the work to be done at a point before its pace is meaningful
CAUTION: Final = 1.645  # standard deviations by which a point may be slower than estimated, as one in twenty is
CURIOSITY: Final = 0.6  # standard deviations by which a point counts as cheaper than estimated

Policy: TypeAlias = Literal["energy", "paper", "max", "board"]


class GovernorPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: Policy = "energy"
    max_w: Annotated[float, Meta(gt=0)] | None = None  # highest permitted power of a point, or None without a limit

    def points_within_max_w(self, points: Sequence[OperatingPoint]) -> Sequence[OperatingPoint]:
        """Return the points within `max_w`. A point of unknown power is left out if a limit is set."""
        if self.max_w is None:
            return points
        return [point for point in points if point.busy_w is not None and point.busy_w <= self.max_w]


class PointForecast(NamedTuple):
    point: OperatingPoint
    seconds: float
    max_duration_s: float  # upper bound, for a point without measurements
    watts: float | None  # None if unknown
    spread: float  # uncertainty of the joules, as a share of the joules above idle, at most 1

    def energy_above_idle_j(self, idle_w: float) -> float:
        assert self.watts is not None
        return (self.watts - idle_w) * self.seconds

    def energy_until_deadline_j(self, time_left_s: float, idle_w: float) -> float:
        return self.energy_above_idle_j(idle_w) + idle_w * max(time_left_s, self.seconds)

    def optimistic_energy_j(self, time_left_s: float, idle_w: float) -> float:
        return self.energy_until_deadline_j(time_left_s, idle_w) - CURIOSITY * self.spread * max(
            self.energy_above_idle_j(idle_w), 0.0
        )


def forecast_points(
    points: Sequence[OperatingPoint], work: WorkEstimate, learned_model: LearnedModel = LearnedModel()
) -> list[PointForecast]:
    """Return a forecast for each point whose time can be predicted, fastest first."""
    forecasts = []
    for point, estimate in zip(points, estimate_points(learned_model, points, work), strict=True):
        if estimate is not None:
            max_duration_s = estimate.seconds * (1 + CAUTION * estimate.seconds_spread)
            spread = min(math.hypot(estimate.seconds_spread, estimate.watts_spread), 1.0)
            forecasts.append(PointForecast(point, estimate.seconds, max_duration_s, estimate.watts, spread))
    return sorted(forecasts, key=lambda estimate: estimate.seconds)


@cache_last_call
def choose_operating_point(
    governor: GovernorPolicy,
    points: Sequence[OperatingPoint],
    work: WorkEstimate,
    time_left_s: float,
    idle_w: float | None = None,
    learned_model: LearnedModel = LearnedModel(),
) -> OperatingPoint | None:
    """Return the operating point to pin, or None to leave the clocks to the board.

    The fastest point is returned if none meets the deadline. The result is None for the policy "board", or if the times
    or powers that the policy needs are unknown.
    """
    forecasts = forecast_points(governor.points_within_max_w(points), work, learned_model)
    if governor.max_w is not None:
        forecasts = [
            forecast for forecast in forecasts if forecast.watts is not None and forecast.watts <= governor.max_w
        ]
    if governor.policy == "board" or not forecasts:
        return None
    if governor.policy == "max":
        return _fastest_point(forecasts)
    if governor.policy == "energy" and all(forecast.watts is None for forecast in forecasts):
        return None
    in_time = [
        forecast
        for forecast in forecasts
        if max(forecast.seconds * (1 + MARGIN), forecast.max_duration_s) <= time_left_s
    ]
    if governor.policy == "paper" and in_time:
        return in_time[-1].point
    priced = [forecast for forecast in in_time if forecast.watts is not None]
    if not priced:
        return _fastest_point(forecasts)
    if idle_w is not None:
        return min(
            priced, key=lambda forecast: (forecast.optimistic_energy_j(time_left_s, idle_w), forecast.seconds)
        ).point
    bounds_w = (0.0, min(forecast.watts for forecast in forecasts if forecast.watts is not None))
    cheapest_j = [
        min(forecast.optimistic_energy_j(time_left_s, bound_w) for forecast in priced) for bound_w in bounds_w
    ]

    def worst_excess_j(forecast: PointForecast) -> float:
        return max(
            forecast.optimistic_energy_j(time_left_s, bound_w) - j
            for bound_w, j in zip(bounds_w, cheapest_j, strict=True)
        )

    return min(priced, key=lambda forecast: (worst_excess_j(forecast), forecast.seconds)).point


def choose_faster_point(
    governor: GovernorPolicy,
    points: Sequence[OperatingPoint],
    segment: TaskSegment,
    remaining_work: WorkEstimate,
    time_left_s: float,
    idle_w: float | None = None,
    learned_model: LearnedModel = LearnedModel(),
) -> OperatingPoint | None:
    """Return a faster point for a task that would miss its deadline, or None to keep the present point.

    `segment` updates the learned costs even if it is unlike all earlier tasks, because the work may be new.
    """
    if (
        governor.policy not in ("energy", "paper")
        or segment.work.task_share < MIN_FRACTION_DONE
        or segment.seconds <= 0
    ):
        return None
    remaining_s = segment.seconds / segment.work.task_share * remaining_work.task_share
    if remaining_s <= time_left_s:
        return None
    updated_model = learn_segment(learned_model, segment, accept_outlier=True)
    other_points = [point for point in points if point.name != segment.point.name]
    forecasts = forecast_points(other_points, remaining_work, updated_model)
    faster_points = [
        forecast.point
        for forecast in forecasts
        if forecast.seconds < remaining_s or _has_higher_clocks(forecast.point, segment.point)
    ]
    return choose_operating_point(governor, faster_points, remaining_work, time_left_s, idle_w, updated_model)


def _fastest_point(forecasts: Sequence[PointForecast]) -> OperatingPoint:
    # Higher clocks never make work slower, even if a profile of other work predicts so.
    higher = [forecast for forecast in forecasts if _has_higher_clocks(forecast.point, forecasts[0].point)]
    return max(
        [forecasts[0], *higher], key=lambda forecast: (sum(_clock_values(forecast.point)), -forecast.seconds)
    ).point


def _has_higher_clocks(left: OperatingPoint, right: OperatingPoint) -> bool:
    pairs = [(a, b) for a, b in zip(_clock_values(left), _clock_values(right), strict=True) if a and b]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _clock_values(point: OperatingPoint) -> tuple[float, ...]:
    return (point.cpu_hz or 0.0, point.gpu_hz or 0.0, point.emc_hz or 0.0)
