"""Power and energy of one task: choice of the point, clock control, sensor readings and accounting.

The agent reports the task's progress. Nothing else in the agent changes clocks.

    start_task --start_work--> pinned --report_progress--> stepped up if late --end_task--> TaskCost, unpinned
                                                                             --stop--> unpinned
                                  +--the board unpins by itself--> continues at the board's own clocks

A task may run at several points in turn. Each of these segments has its share of the work and its own energy account.
Time is the device's: on a simulated device that runs in real time on a faster host, the seconds of its profile.

An `EnergyAccount` computes the energy from sensor readings. Two successive readings with a counter (`Reading.energy_j`,
such as RAPL or a power monitor) give a difference. Otherwise, two readings with a power (`Reading.power_w`, such as
INA3221 rails) give a trapezoid. Counters have priority, because they miss nothing between readings. Readings are
ignored if they have no value, are from the past, or are from another meter than the segment's first reading.

The error bound, `energy_error_j`, has three parts:
  - for trapezoids, half the difference between the rectangles of the left and of the right powers in each interval: the
    whole error of a power that only rose or only fell between two readings,
  - for a counter, the largest increment of one interval, by which it may lag at either end,
  - the whole energy of unmeasured time: a gap of more than MAX_POWER_GAP_S between two powers, and the time before the
    first and after the last reading, both at the nearest power.
Energy is unknown if the meter has failed during the task: silent for more than MAX_READING_GAP_S, constant for much
longer than before, or with impossible values, which are skipped until values are possible again.

The bound lacks the error of the sensor (some per cent for an INA3221's shunt), which no board reports.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from fedquilt.core import ClockError, Cost, Device, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.devices.meters import MAX_PLAUSIBLE_W
from fedquilt.edge_agent.power import governor
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, TaskSegment, highest_clocks, learn_segment

SAMPLE_S = 0.1  # interval between sensor readings while a task runs
MAX_READING_GAP_S = 5.0  # longest gap between readings of a task, after which its energy is unknown
FROZEN_S = 10.0  # a meter counts as failed if its value is constant for longer than this
FROZEN_FACTOR = 20.0  # and for this many times the longest constant interval before
NEVER_CHANGED_S = 60.0  # the same limit if the value has never changed, as that of a coarse meter on an idle board
UNPINNED_NAME = "unpinned"  # name of a segment at the board's own clocks
MAX_POWER_GAP_S = 1.0  # longest interval between two powers of which the energy is known


class EnergyAccount(msgspec.Struct, frozen=True):
    started_s: float
    last_reading_s: float | None = None  # time of the last usable reading
    last_reading: Reading = Reading()
    first_reading_s: float = 0.0  # time of the first usable reading
    interval_count: int = 0
    energy_j: float = 0.0  # from the first to the last reading
    error_j: float = 0.0
    max_increment_j: float = 0.0  # largest gain of a counter in one interval
    first_w: float | None = None  # power assumed before the first reading
    last_w: float | None = None  # power assumed after the last reading
    has_counter: bool = False  # a counter measured part of the energy
    max_w: float = MAX_PLAUSIBLE_W  # readings above are ignored
    longest_gap_s: float = 0.0  # longest time between two usable readings
    unchanged_since_s: float = 0.0  # time of the latest change of the meter's value
    longest_unchanged_s: float = 0.0  # longest interval between two changes

    def with_reading(self, now_s: float, reading: Reading) -> EnergyAccount:
        """Return the sums with one more reading. An unusable reading changes nothing."""
        if not _is_usable(reading, self.max_w) or (self.last_reading_s is not None and now_s <= self.last_reading_s):
            return self
        if self.last_reading_s is None:
            power = _finite_or_none(reading.power_w)
            initial = replace(
                self,
                last_reading_s=now_s,
                last_reading=reading,
                first_reading_s=now_s,
                first_w=power,
                last_w=power,
                unchanged_since_s=now_s,
            )
            return replace(initial, longest_gap_s=max(self.longest_gap_s, now_s - self.started_s))
        interval = _interval_energy(self.last_reading, reading, now_s - self.last_reading_s)
        if interval is None or interval[0] > self.max_w * (now_s - self.last_reading_s):
            return self  # the counter fell or jumped, or only one reading has a counter: wait for the next reading
        energy, error, first_w, last_w, from_counter = interval
        has_changed = _meter_value(reading) != _meter_value(self.last_reading)
        longest_unchanged_s = self.longest_unchanged_s
        if has_changed:
            longest_unchanged_s = max(longest_unchanged_s, now_s - self.unchanged_since_s)
        return replace(
            self,
            last_reading_s=now_s,
            last_reading=reading,
            interval_count=self.interval_count + 1,
            energy_j=self.energy_j + energy,
            error_j=self.error_j + error,
            max_increment_j=max(self.max_increment_j, energy if from_counter else 0.0),
            first_w=first_w if self.first_w is None else self.first_w,
            last_w=last_w,
            has_counter=self.has_counter or from_counter,
            longest_gap_s=max(self.longest_gap_s, now_s - self.last_reading_s),
            unchanged_since_s=now_s if has_changed else self.unchanged_since_s,
            longest_unchanged_s=longest_unchanged_s,
        )

    def next_segment(self, now_s: float) -> EnergyAccount:
        """Return the account of a new segment that starts now. The last reading is kept if it is recent."""
        account = EnergyAccount(now_s, max_w=self.max_w, longest_unchanged_s=self.longest_unchanged_s)
        if self.last_reading_s is None or self.last_reading_s < now_s:
            return account
        return replace(account.with_reading(now_s, self.last_reading), unchanged_since_s=self.unchanged_since_s)

    def cost_until(self, now_s: float, idle_w: float | None, point: str | None = None) -> Cost:
        """Return the cost from `started_s` to now. Energy is None without a working meter."""
        duration_s = max(now_s - self.started_s, 0.0)
        idle_j = None if idle_w is None else idle_w * duration_s
        if self.last_reading_s is None or self.first_w is None or self.last_w is None or self._has_meter_failed(now_s):
            return Cost(duration_s=duration_s, idle_j=idle_j, point=point)
        before_j = self.first_w * max(self.first_reading_s - self.started_s, 0.0)
        unwatched_j = before_j + self.last_w * max(now_s - self.last_reading_s, 0.0)
        return Cost(
            duration_s=duration_s,
            energy_j=self.energy_j + unwatched_j,
            idle_j=idle_j,
            energy_error_j=self.error_j + self.max_increment_j + unwatched_j,
            energy_source=self._describe_source(),
            point=point,
        )

    def _has_meter_failed(self, now_s: float) -> bool:
        last_reading_s = now_s if self.last_reading_s is None else self.last_reading_s
        limit_s = (
            max(FROZEN_S, FROZEN_FACTOR * self.longest_unchanged_s) if self.longest_unchanged_s else NEVER_CHANGED_S
        )
        return (
            max(self.longest_gap_s, now_s - last_reading_s) > MAX_READING_GAP_S
            or last_reading_s - self.unchanged_since_s > limit_s
        )

    def _describe_source(self) -> str:
        sensor = self.last_reading.energy_source or "a sensor without a name"
        if self.has_counter:
            return f"{sensor}, counter"[:200]
        span_s = (self.last_reading_s or 0.0) - self.first_reading_s
        rate = f"{self.interval_count / span_s:.2g} Hz" if span_s > 0 else "one reading"
        return f"{sensor[:160]}, {rate}, trapezoids"


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Return the sum of a task's segments. A value unknown in any segment is unknown in the sum."""
    if len(costs) == 1 and len(costs[0].energy_source or "") <= 200 and len(costs[0].point or "") <= 200:
        return costs[0]

    def sum_known(values: Sequence[float | None]) -> float | None:
        known_values = [value for value in values if value is not None]
        return sum(known_values) if len(known_values) == len(values) > 0 else None

    point_changes = [
        point for point, previous in zip(costs, [None, *costs], strict=False) if _has_point_changed(point, previous)
    ]
    names = [cost.point or UNPINNED_NAME for cost in point_changes] if any(cost.point for cost in point_changes) else []
    sources = list(dict.fromkeys(cost.energy_source for cost in costs if cost.energy_source is not None))
    return Cost(
        duration_s=sum(cost.duration_s for cost in costs),
        energy_j=sum_known([cost.energy_j for cost in costs]),
        idle_j=sum_known([cost.idle_j for cost in costs]),
        energy_error_j=sum_known([cost.energy_error_j for cost in costs]),
        energy_source="; ".join(sources)[:200] or None,
        point=", then ".join(names)[:200] or None,
    )


def _has_point_changed(cost: Cost, previous: Cost | None) -> bool:
    return previous is None or cost.point != previous.point


def _is_usable(reading: Reading, max_w: float) -> bool:
    if reading.power_w is None and reading.energy_j is None:  # no meter
        return False
    power_w = _finite_or_none(reading.power_w)
    if power_w is not None and not 0 <= power_w <= max_w:
        return False
    return _finite_or_none(reading.energy_j) is not None or power_w is not None


def _meter_value(reading: Reading) -> float | None:
    counter = _finite_or_none(reading.energy_j)
    return _finite_or_none(reading.power_w) if counter is None else counter


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _interval_energy(
    previous: Reading, current: Reading, dt_s: float
) -> tuple[float, float, float, float, bool] | None:
    """Return energy, error bound, first and last power, and whether a counter measured the energy.

    The result is None if the readings are of different meters, or do not both have a counter or a power.
    """
    if None not in (previous.energy_source, current.energy_source) and previous.energy_source != current.energy_source:
        return None
    counters = _finite_or_none(previous.energy_j), _finite_or_none(current.energy_j)
    if counters[0] is not None and counters[1] is not None and counters[1] >= counters[0]:
        gained = counters[1] - counters[0]
        return gained, 0.0, gained / dt_s, gained / dt_s, True
    powers = _finite_or_none(previous.power_w), _finite_or_none(current.power_w)
    if powers[0] is None or powers[1] is None:
        return None
    energy = (powers[0] + powers[1]) / 2 * dt_s
    error = energy if dt_s > MAX_POWER_GAP_S else abs(powers[1] - powers[0]) / 2 * dt_s
    return energy, error, powers[0], powers[1], False


log = logging.getLogger(__name__)

MAX_RELATIVE_ERROR: Final = 0.25  # limit for learning the power of a segment
PLAUSIBLE_POWER_FACTOR: Final = 4.0  # limit of plausible readings, times the highest power in the profile
PINNED_SAMPLE_S: Final = 1.0  # longest interval between readings with pinned clocks: each reading sends a keepalive


class TaskCost(NamedTuple):
    cost: Cost
    learned_model: LearnedModel


class TaskPowerManager:
    def __init__(self, board: Device, governor_policy: governor.GovernorPolicy) -> None:
        self._board, self.governor_policy = board, governor_policy
        self._last_warning = ""
        self._reset()

    def _reset(self) -> None:
        self._account: EnergyAccount | None = None  # account of the present segment, or None without a task
        self._pinned_account: EnergyAccount | None = None  # since the clocks were pinned, or None
        self._sample_interval_s = self._next_sample_s = math.inf
        self._work = WorkEstimate()
        self._started_s = self._segment_started_s = self._point_changed_s = 0.0
        self._accounted_s = 0.0  # part of the task's time that is in `_costs`
        self._fraction_done = self._fraction_accounted = 0.0  # shares of the work
        self._time_left_s, self._learned_model = math.inf, LearnedModel()
        self._highest_clocks: Mapping[str, float] = {}  # highest clocks of the board when they were pinned
        self._pinned_point: OperatingPoint | None = None
        self._was_refused = False  # the board refused the latest point
        self._point_name: str | None = None
        self._costs: list[Cost] = []
        self._pinned_s = 0.0  # sum over finished segments with pinned clocks

    # -- a task --

    def start_task(self, now_s: float) -> None:
        """Start measuring a task before its process starts. Data is loaded at the board's own clocks."""
        self.stop()
        reading = self._board.read_sensors(now_s)
        self._account = EnergyAccount(now_s, max_w=_max_plausible_w(self._board.points)).with_reading(now_s, reading)
        self._started_s = self._segment_started_s = now_s
        self._sample_interval_s = SAMPLE_S if self._account.last_reading_s is not None else math.inf
        self._next_sample_s = now_s + self._sample_interval_s
        self._has_sensors = reading != Reading()  # a board without any sensor need not be read

    def start_work(self, work: WorkEstimate, deadline_s: float, learned_model: LearnedModel, now_s: float) -> None:
        """Choose and pin an operating point. Call when the data is loaded and the whole work is known."""
        if self._account is None:
            return
        self._work, self._segment_started_s, self._point_changed_s = work, now_s, now_s
        self._time_left_s, self._learned_model = deadline_s - now_s, learned_model
        if self._board.adjustable:
            self._choose_and_pin_point(now_s)
            if self._pinned_point is None and self._was_refused:
                self._choose_and_pin_point(now_s)  # the owner may have changed the mode since the points were read

    def report_progress(self, fraction: float, now_s: float) -> None:
        """Record the completed fraction of the work. Pin a faster point if the task would miss its deadline."""
        if self._account is None or not self._fraction_done <= fraction <= 1:
            return
        self._fraction_done = fraction
        if self._pinned_point is None or now_s < self._point_changed_s + governor.STEP_S:
            return
        segment = self._current_segment(self._fraction_done - self._fraction_accounted, None, now_s)
        time_left_s = self._time_left_s - self._pinned_s - segment.seconds
        remaining_work, board = self._work.scale(1 - self._fraction_done), self._board
        faster = governor.choose_faster_point(
            self.governor_policy, board.points, segment, remaining_work, time_left_s, board.idle_w, self._learned_model
        )
        if faster is not None:
            self._close_segment(self._fraction_done, now_s, now_s - self._started_s - self._accounted_s)
            self._pin_point(faster, now_s)

    def read_due_sensors(self, now_s: float) -> None:
        """Read the sensors if a reading is due. End the segment if the board has unpinned its clocks."""
        if self._account is not None and now_s >= self._next_sample_s:
            self._read_sensors(now_s)
            self._next_sample_s = now_s + self._sample_interval_s
            self._close_if_unpinned(now_s, now_s - self._started_s - self._accounted_s)

    def next_sample_s(self) -> float:
        return self._next_sample_s

    def end_task(self, work: WorkEstimate, wall_s: float, now_s: float) -> TaskCost:
        """Return the cost of a completed task, and unpin the clocks. `wall_s` excludes the process start."""
        if self._account is None:
            return TaskCost(Cost(duration_s=wall_s), LearnedModel())
        self._work = work
        self._read_sensors(now_s)
        self._close_if_unpinned(now_s, max(wall_s - self._accounted_s, 0.0))
        self._close_segment(1.0, now_s, max(wall_s - self._accounted_s, 0.0))
        learned_model = self._learned_model
        if learned_model.time is not None and math.isfinite(self._time_left_s):
            learned_model = msgspec.structs.replace(
                learned_model, latest=LatestTask(work=work, time_left_s=self._time_left_s)
            )
        task_cost = TaskCost(total_cost(self._costs), learned_model)
        self.stop()
        return task_cost

    def stop(self) -> None:
        pinned_point = self._pinned_point
        self._reset()
        if pinned_point is not None:
            self._call_board(self._board.unpin_clocks)

    # -- segments --

    def _close_segment(self, fraction_done: float, now_s: float, duration_s: float) -> None:
        assert self._account is not None
        self._read_sensors(now_s)
        share = fraction_done - self._fraction_accounted
        measured = self._account.cost_until(now_s, self._board.idle_w, self._point_name)
        cost = self._board.task_cost(self._work.scale(share), msgspec.structs.replace(measured, duration_s=duration_s))
        self._costs.append(cost)
        if self._pinned_point is not None:
            segment = self._current_segment(share, self._mean_power_w(measured, cost, now_s), now_s)
            self._pinned_s += segment.seconds
            if self._board.clocks_unchanged:  # after a loss of control, the clocks of the segment are unknown
                self._learned_model = learn_segment(self._learned_model, segment)
        self._account = self._account.next_segment(now_s)
        self._fraction_accounted, self._segment_started_s = fraction_done, now_s
        self._accounted_s += duration_s

    def _current_segment(self, share: float, power_w: float | None, now_s: float) -> TaskSegment:
        assert self._pinned_point is not None
        work, seconds = self._work.scale(share), self._segment_s(share, now_s)
        return TaskSegment(self._pinned_point, work, seconds, power_w, self._highest_clocks)

    def _mean_power_w(self, measured: Cost, predicted: Cost, now_s: float) -> float | None:
        """Return the measured mean power, or None if too uncertain. Simulated devices use their profile's."""
        if measured.energy_j is None:  # a simulated device has its profile's power
            return (
                predicted.energy_j / predicted.duration_s if predicted.energy_j and predicted.duration_s > 0 else None
            )
        cost = Cost(duration_s=0.0) if self._pinned_account is None else self._pinned_account.cost_until(now_s, None)
        if not cost.energy_j or cost.energy_error_j is None or cost.energy_error_j > MAX_RELATIVE_ERROR * cost.energy_j:
            return None
        return cost.energy_j / cost.duration_s

    def _close_if_unpinned(self, now_s: float, duration_s: float) -> None:
        if self._pinned_point is not None and not self._board.clocks_unchanged:
            self._close_segment(self._fraction_done, now_s, duration_s)
            self._pinned_point = self._point_name = None

    def _segment_s(self, share: float, now_s: float) -> float:
        """Return the duration of the present segment: predicted on a simulated device, measured on others."""
        predicted_s = self._board.task_cost(self._work.scale(share), Cost(duration_s=0.0)).duration_s
        return predicted_s or now_s - self._segment_started_s

    def _read_sensors(self, now_s: float) -> Reading:
        reading = self._board.read_sensors(now_s)
        if self._account is not None:
            self._account = self._account.with_reading(now_s, reading)
        if self._pinned_account is not None:
            self._pinned_account = self._pinned_account.with_reading(now_s, reading)
        return reading

    # -- clocks --

    def _choose_and_pin_point(self, now_s: float) -> None:
        board = self._board
        if board.points and not self.governor_policy.points_within_max_w(board.points):
            log.warning(
                "no operating point has a known power of at most %g W (max_w): using the device's default clocks",
                self.governor_policy.max_w,
            )
        point = governor.choose_operating_point(
            self.governor_policy, board.points, self._work, self._time_left_s, board.idle_w, self._learned_model
        )
        self._pin_point(point, now_s)

    def _pin_point(self, point: OperatingPoint | None, now_s: float) -> None:
        """Pin a point, or unpin the clocks if the board refuses the point. None changes nothing."""
        if point is None:
            return
        pinned_point = self._call_board(lambda: self._board.pin_clocks(point))
        self._was_refused = pinned_point is None
        if pinned_point is None:  # continue at the board's own clocks
            if self._pinned_point is not None:
                self._call_board(self._board.unpin_clocks)
            self._pinned_point = self._point_name = None
            return
        self._pinned_point, self._point_name, self._point_changed_s = point, pinned_point.name, now_s
        self._highest_clocks = highest_clocks(self._board.points)
        self._pinned_account = None if self._account is None else self._account.next_segment(now_s)
        if self._has_sensors:
            self._sample_interval_s = min(self._sample_interval_s, PINNED_SAMPLE_S)
            self._next_sample_s = min(self._next_sample_s, now_s + self._sample_interval_s)

    def _call_board(self, call: Callable[[], OperatingPoint | None]) -> OperatingPoint | None:
        try:
            return call()
        except ClockError as error:
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                log.warning("clock control failed, using the device's default clocks: %s", error)
            return None


def _max_plausible_w(points: Sequence[OperatingPoint]) -> float:
    powers_w = [point.busy_w for point in points if point.busy_w]
    return PLAUSIBLE_POWER_FACTOR * max(powers_w) if powers_w else MAX_PLAUSIBLE_W
