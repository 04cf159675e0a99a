"""Power and energy of one task: chooses a point, pins the clocks, reads sensors, unpins and accounts the energy.

The agent reports the task's progress. Nothing else in the agent changes clocks.

    start_task --start_work--> pinned --report_progress--> stepped up if late --end_task--> TaskCost, unpinned
                                                                             --stop--> unpinned
                                  +--the board unpins by itself--> continues at its own clocks

A task may run at several points in turn. Each of these segments has its share of the work and its own energy account.
Time is the device's: on a simulated device that runs in real time on a faster host, the seconds of its profile.

An `EnergyAccount` computes the energy from sensor readings. Two successive readings with a counter (`Reading.energy_j`,
such as RAPL or a power monitor) give a difference. Otherwise, two readings with a power (`Reading.power_w`, such as
INA3221 rails) give a trapezoid. Counters have priority, because they miss nothing between readings. Ignored are
readings without a value, from the past, or from another meter than that of the segment's first reading, which covers
another part of the board.

The error bound, `energy_error_j`, has three parts:
  - for trapezoids, half the difference between the rectangles of the left and of the right powers in each interval: the
    whole error of a power that only rose or only fell between two readings,
  - for a counter, the largest increment of one interval, by which it may lag at either end,
  - unwatched time in full: a gap of more than GAP_S between two powers, and the time before the first and after the
    last reading, both at the nearest power.
Energy is unknown if the meter has failed during the task: silent for more than LOST_S, constant for much longer than
before, or with impossible values, which are skipped until values are possible again.

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
from fedquilt.edge_agent.devices.meters import MOST_W
from fedquilt.edge_agent.power import governor
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, TaskSegment, highest_clocks, learn_segment

SAMPLE_S = 0.1  # interval between sensor readings while a task runs
LOST_S = 5.0  # longest gap between readings of a task, after which its energy is unknown
STILL_S, STILL_TIMES = 10.0, 20.0  # a frozen meter: longer than this at one value, and so many times longer than before
NEVER_S = 60.0  # likewise of a meter that has never moved, as a coarse one on an idle board
LET_GO = "let go"  # suffix of a point's name: from there on the board's clocks were its own
GAP_S = 1.0  # powers further apart leave the time between them unknown


class EnergyAccount(msgspec.Struct, frozen=True):
    began_s: float
    at_s: float | None = None  # of the last usable reading
    last: Reading = Reading()
    first_s: float = 0.0  # of the first
    intervals: int = 0
    energy_j: float = 0.0  # from the first to the last
    error_j: float = 0.0
    most_j: float = 0.0  # largest gain of a counter in one interval
    first_w: float | None = None  # power assumed before the first reading
    last_w: float | None = None  # power assumed after the last reading
    counted: bool = False  # some of it is from a counter
    most_w: float = MOST_W  # no more is believed
    silent_s: float = 0.0  # longest time between two usable readings
    still_s: float = 0.0  # time since which the meter tells the same value
    stood_s: float = 0.0  # longest time for which it has told one value and then another

    def with_reading(self, now_s: float, reading: Reading) -> EnergyAccount:
        """Return the sums with one more reading. An unusable reading changes nothing."""
        if not _is_usable(reading, self.most_w) or (self.at_s is not None and now_s <= self.at_s):
            return self
        if self.at_s is None:
            power = _finite_or_none(reading.power_w)
            first = replace(self, at_s=now_s, last=reading, first_s=now_s, first_w=power, last_w=power, still_s=now_s)
            return replace(first, silent_s=max(self.silent_s, now_s - self.began_s))
        added = _interval_energy(self.last, reading, now_s - self.at_s)
        if added is None or added[0] > self.most_w * (now_s - self.at_s):
            return self  # the counter fell or jumped, or only one of both has it: wait for one that fits
        energy, error, first_w, last_w, counted = added
        moved = _meter_value(reading) != _meter_value(self.last)
        return replace(
            self,
            at_s=now_s,
            last=reading,
            intervals=self.intervals + 1,
            energy_j=self.energy_j + energy,
            error_j=self.error_j + error,
            most_j=max(self.most_j, energy if counted else 0.0),
            first_w=first_w if self.first_w is None else self.first_w,
            last_w=last_w,
            counted=self.counted or counted,
            silent_s=max(self.silent_s, now_s - self.at_s),
            still_s=now_s if moved else self.still_s,
            stood_s=max(self.stood_s, now_s - self.still_s) if moved else self.stood_s,
        )

    def next_segment(self, now_s: float) -> EnergyAccount:
        """Start a new segment now, with the last reading of this segment if it is recent."""
        fresh = EnergyAccount(now_s, most_w=self.most_w, stood_s=self.stood_s)
        if self.at_s is None or self.at_s < now_s:
            return fresh
        return replace(fresh.with_reading(now_s, self.last), still_s=self.still_s)

    def cost_until(self, now_s: float, idle_w: float | None, point: str | None = None) -> Cost:
        """Return the cost from `began_s` to now. Energy is None without a working meter."""
        duration_s = max(now_s - self.began_s, 0.0)
        idle_j = None if idle_w is None else idle_w * duration_s
        if self.at_s is None or self.first_w is None or self.last_w is None or self._has_meter_failed(now_s):
            return Cost(duration_s=duration_s, idle_j=idle_j, point=point)
        held_j = self.first_w * max(self.first_s - self.began_s, 0.0) + self.last_w * max(now_s - self.at_s, 0.0)
        return Cost(
            duration_s=duration_s,
            energy_j=self.energy_j + held_j,
            idle_j=idle_j,
            energy_error_j=self.error_j + self.most_j + held_j,
            energy_source=self._describe_source(),
            point=point,
        )

    def _has_meter_failed(self, now_s: float) -> bool:
        at_s = now_s if self.at_s is None else self.at_s
        limit_s = max(STILL_S, STILL_TIMES * self.stood_s) if self.stood_s else NEVER_S
        return max(self.silent_s, now_s - at_s) > LOST_S or at_s - self.still_s > limit_s

    def _describe_source(self) -> str:
        sensor = self.last.energy_source or "a sensor without a name"
        if self.counted:
            return f"{sensor}, counter"[:200]
        span_s = (self.at_s or 0.0) - self.first_s
        rate = f"{self.intervals / span_s:.2g} Hz" if span_s > 0 else "one reading"
        return f"{sensor[:160]}, {rate}, trapezoids"


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Return the sum of a task's segments. A value unknown in any segment is unknown in the sum."""
    if len(costs) == 1 and len(costs[0].energy_source or "") <= 200 and len(costs[0].point or "") <= 200:
        return costs[0]

    def sum_known(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) > 0 else None

    points = [point for point, before in zip(costs, [None, *costs], strict=False) if _has_point_changed(point, before)]
    names = [cost.point or LET_GO for cost in points] if any(cost.point for cost in points) else []
    sources = list(dict.fromkeys(cost.energy_source for cost in costs if cost.energy_source is not None))
    return Cost(
        duration_s=sum(cost.duration_s for cost in costs),
        energy_j=sum_known([cost.energy_j for cost in costs]),
        idle_j=sum_known([cost.idle_j for cost in costs]),
        energy_error_j=sum_known([cost.energy_error_j for cost in costs]),
        energy_source="; ".join(sources)[:200] or None,
        point=", then ".join(names)[:200] or None,
    )


def _has_point_changed(cost: Cost, before: Cost | None) -> bool:
    return before is None or cost.point != before.point


def _is_usable(reading: Reading, most_w: float) -> bool:
    if reading.power_w is None and reading.energy_j is None:  # as of every board without a meter
        return False
    power_w = _finite_or_none(reading.power_w)
    if power_w is not None and not 0 <= power_w <= most_w:
        return False
    return _finite_or_none(reading.energy_j) is not None or power_w is not None


def _meter_value(reading: Reading) -> float | None:
    counter = _finite_or_none(reading.energy_j)
    return _finite_or_none(reading.power_w) if counter is None else counter


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _interval_energy(before: Reading, after: Reading, dt_s: float) -> tuple[float, float, float, float, bool] | None:
    """Return energy between two readings, error bound, both powers, and whether a counter measured.

    None if they are of different meters, or do not both have a counter or a power.
    """
    if None not in (before.energy_source, after.energy_source) and before.energy_source != after.energy_source:
        return None
    counters = _finite_or_none(before.energy_j), _finite_or_none(after.energy_j)
    if counters[0] is not None and counters[1] is not None and counters[1] >= counters[0]:
        gained = counters[1] - counters[0]
        return gained, 0.0, gained / dt_s, gained / dt_s, True
    powers = _finite_or_none(before.power_w), _finite_or_none(after.power_w)
    if powers[0] is None or powers[1] is None:
        return None
    energy = (powers[0] + powers[1]) / 2 * dt_s
    error = energy if dt_s > GAP_S else abs(powers[1] - powers[0]) / 2 * dt_s
    return energy, error, powers[0], powers[1], False


log = logging.getLogger(__name__)

COARSE: Final = 0.25  # error of a stretch's joules, relative, above which its power teaches nothing
PEAK: Final = 4.0  # times the most that the profile knows of, above which a meter is not believed
ALIVE_S: Final = 1.0  # shortest interval of reading a held board, which may release clocks without keepalive


class TaskCost(NamedTuple):
    cost: Cost
    learned: LearnedModel


class TaskPowerManager:
    def __init__(self, board: Device, rule: governor.GovernorPolicy) -> None:
        self._board, self.rule = board, rule
        self._warned = ""
        self._reset()

    def _reset(self) -> None:
        self._ledger: EnergyAccount | None = None  # of the stretch in hand; None: no task
        self._held_ledger: EnergyAccount | None = None  # since the point is held; None: none is
        self._every_s = self._sample_s = math.inf
        self._work = WorkEstimate()
        self._began_s = self._since_s = self._stepped_s = 0.0
        self._told_s = 0.0  # part of the time since the beginning that is in `_costs`
        self._done = self._before = 0.0  # shares of the work: done, and done before this stretch
        self._left_s, self._learned = math.inf, LearnedModel()
        self._top: Mapping[str, float] = {}  # highest clocks of the board when the point in hand was held
        self._held: OperatingPoint | None = None
        self._refused = False  # the board did not take the latest point
        self._label: str | None = None
        self._costs: list[Cost] = []
        self._spent_s = 0.0  # sum over finished stretches with a held point

    # -- a task --

    def start_task(self, now_s: float) -> None:
        """Start measuring a task before its process starts. Loading runs at the board's own clocks."""
        self.stop()
        reading = self._board.read_sensors(now_s)
        self._ledger = EnergyAccount(now_s, most_w=_max_plausible_w(self._board.points)).with_reading(now_s, reading)
        self._began_s = self._since_s = now_s
        self._every_s = SAMPLE_S if self._ledger.at_s is not None else math.inf
        self._sample_s = now_s + self._every_s
        self._watched = reading != Reading()  # a board without any sensor need not be read

    def start_work(self, work: WorkEstimate, due_s: float, learned: LearnedModel, now_s: float) -> None:
        """Choose an operating point, once the data is loaded and the whole work is known."""
        if self._ledger is None:
            return
        self._work, self._since_s, self._stepped_s = work, now_s, now_s
        self._left_s, self._learned = due_s - now_s, learned
        if self._board.adjustable:
            self._choose_and_pin_point(now_s)
            if self._held is None and self._refused:
                self._choose_and_pin_point(now_s)  # the owner may have changed the mode since the points were read

    def report_progress(self, fraction: float, now_s: float) -> None:
        if self._ledger is None or not self._done <= fraction <= 1:
            return
        self._done = fraction
        if self._held is None or now_s < self._stepped_s + governor.STEP_S:
            return
        seen = self._current_segment(self._done - self._before, None, now_s)
        left_s = self._left_s - self._spent_s - seen.seconds
        rest, board = self._work.scale(1 - self._done), self._board
        faster = governor.choose_faster_point(self.rule, board.points, seen, rest, left_s, board.idle_w, self._learned)
        if faster is not None:
            self._close_segment(self._done, now_s, now_s - self._began_s - self._told_s)
            self._pin_point(faster, now_s)

    def read_due_sensors(self, now_s: float) -> None:
        if self._ledger is not None and now_s >= self._sample_s:
            self._read_sensors(now_s)
            self._sample_s = now_s + self._every_s
            self._close_if_unpinned(now_s, now_s - self._began_s - self._told_s)

    def next_sample_s(self) -> float:
        return self._sample_s

    def end_task(self, work: WorkEstimate, wall_s: float, now_s: float) -> TaskCost:
        """Return the cost of a completed task and unpin. `wall_s` excludes process start and imports."""
        if self._ledger is None:
            return TaskCost(Cost(duration_s=wall_s), LearnedModel())
        self._work = work
        self._read_sensors(now_s)
        self._close_if_unpinned(now_s, max(wall_s - self._told_s, 0.0))
        self._close_segment(1.0, now_s, max(wall_s - self._told_s, 0.0))
        learned = self._learned
        if learned.time is not None and math.isfinite(self._left_s):
            learned = msgspec.structs.replace(learned, latest=LatestTask(work=work, left_s=self._left_s))
        spent = TaskCost(total_cost(self._costs), learned)
        self.stop()
        return spent

    def stop(self) -> None:
        held = self._held
        self._reset()
        if held is not None:
            self._call_board(self._board.unpin_clocks)

    # -- stretches --

    def _close_segment(self, done: float, now_s: float, lasted_s: float) -> None:
        assert self._ledger is not None
        self._read_sensors(now_s)
        share = done - self._before
        measured = self._ledger.cost_until(now_s, self._board.idle_w, self._label)
        told = self._board.task_cost(self._work.scale(share), msgspec.structs.replace(measured, duration_s=lasted_s))
        self._costs.append(told)
        if self._held is not None:
            seen = self._current_segment(share, self._mean_power_w(measured, told, now_s), now_s)
            self._spent_s += seen.seconds
            if self._board.clocks_unchanged:  # after a loss of control, the clocks of the segment are unknown
                self._learned = learn_segment(self._learned, seen)
        self._ledger = self._ledger.next_segment(now_s)
        self._before, self._since_s, self._told_s = done, now_s, self._told_s + lasted_s

    def _current_segment(self, share: float, watts: float | None, now_s: float) -> TaskSegment:
        assert self._held is not None
        work, seconds = self._work.scale(share), self._segment_s(share, now_s)
        return TaskSegment(self._held, work, seconds, watts, self._top)

    def _mean_power_w(self, measured: Cost, told: Cost, now_s: float) -> float | None:
        """Return the measured mean power, that of a simulated device's profile, or None if too uncertain."""
        if measured.energy_j is None:  # of a simulated board, its profile's power
            return told.energy_j / told.duration_s if told.energy_j and told.duration_s > 0 else None
        cost = Cost(duration_s=0.0) if self._held_ledger is None else self._held_ledger.cost_until(now_s, None)
        if not cost.energy_j or cost.energy_error_j is None or cost.energy_error_j > COARSE * cost.energy_j:
            return None
        return cost.energy_j / cost.duration_s

    def _close_if_unpinned(self, now_s: float, lasted_s: float) -> None:
        if self._held is not None and not self._board.clocks_unchanged:
            self._close_segment(self._done, now_s, lasted_s)
            self._held = self._label = None

    def _segment_s(self, share: float, now_s: float) -> float:
        """Return the duration of the present segment, predicted on a simulated device and else by the clock."""
        told_s = self._board.task_cost(self._work.scale(share), Cost(duration_s=0.0)).duration_s
        return told_s or now_s - self._since_s

    def _read_sensors(self, now_s: float) -> Reading:
        reading = self._board.read_sensors(now_s)
        if self._ledger is not None:
            self._ledger = self._ledger.with_reading(now_s, reading)
        if self._held_ledger is not None:
            self._held_ledger = self._held_ledger.with_reading(now_s, reading)
        return reading

    # -- clocks --

    def _choose_and_pin_point(self, now_s: float) -> None:
        board = self._board
        if board.points and not self.rule.points_within_max_w(board.points):
            log.warning(
                "the clocks are left to the board: no operating point is known to draw %g W or less (max_w)",
                self.rule.max_w,
            )
        point = governor.choose_operating_point(
            self.rule, board.points, self._work, self._left_s, board.idle_w, self._learned
        )
        self._pin_point(point, now_s)

    def _pin_point(self, point: OperatingPoint | None, now_s: float) -> None:
        """Pin a point, or unpin the clocks if the board refuses the point. None changes nothing."""
        if point is None:
            return
        taken = self._call_board(lambda: self._board.pin_clocks(point))
        self._refused = taken is None
        if taken is None:  # continue at the board's own clocks
            if self._held is not None:
                self._call_board(self._board.unpin_clocks)
            self._held = self._label = None
            return
        self._held, self._label, self._stepped_s = point, taken.name, now_s
        self._top = highest_clocks(self._board.points)
        self._held_ledger = None if self._ledger is None else self._ledger.next_segment(now_s)
        if self._watched:
            self._every_s = min(self._every_s, ALIVE_S)
            self._sample_s = min(self._sample_s, now_s + self._every_s)

    def _call_board(self, call: Callable[[], OperatingPoint | None]) -> OperatingPoint | None:
        try:
            return call()
        except ClockError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("the clocks are left to the board: %s", error)
            return None


def _max_plausible_w(points: Sequence[OperatingPoint]) -> float:
    known = [point.busy_w for point in points if point.busy_w]
    return PEAK * max(known) if known else MOST_W
