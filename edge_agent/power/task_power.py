"""Power management of one task: chooses a point, pins the clocks, reads sensors and unpins.

The agent reports the task's progress. Nothing else in the agent changes clocks.

    start_task --start_work--> pinned --report_progress--> stepped up if late --end_task--> TaskCost, unpinned
                                                                             --stop--> unpinned
                                  +--the board unpins by itself--> continues at its own clocks

A task may run at several points in turn. Each of these segments has its share of the work and its own energy account.
Time is the device's: on a simulated device that runs in real time on a faster host, the seconds of its profile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fedquilt.core import ClockError, Cost, Device, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.devices.sensors.meters import MOST_W
from fedquilt.edge_agent.power import energy, governor
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, TaskSegment, highest_clocks, learn_segment

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
        self._ledger: energy.EnergyAccount | None = None  # of the stretch in hand; None: no task
        self._held_ledger: energy.EnergyAccount | None = None  # since the point is held; None: none is
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
        self._ledger = energy.EnergyAccount(now_s, most_w=_max_plausible_w(self._board.points)).with_reading(
            now_s, reading
        )
        self._began_s = self._since_s = now_s
        self._every_s = energy.SAMPLE_S if self._ledger.at_s is not None else math.inf
        self._sample_s = now_s + self._every_s
        self._watched = reading != Reading()  # a board without any sensor need not be read

    def start_work(self, work: WorkEstimate, due_s: float, learned: LearnedModel, now_s: float) -> None:
        """Choose an operating point, once the data is loaded and the whole work is known.

        Args:
            work: Work of the task on this device's examples, `work.on(examples)`.
            due_s: Deadline of the task.
            learned: Learned costs of the task's engine and workload.
            now_s: Present time.
        """
        if self._ledger is None:
            return
        self._work, self._since_s, self._stepped_s = work, now_s, now_s
        self._left_s, self._learned = due_s - now_s, learned
        if self._board.adjustable:
            self._choose_and_pin_point(now_s)
            if self._held is None and self._refused:
                self._choose_and_pin_point(now_s)  # the owner may have changed the mode since the points were read

    def report_progress(self, fraction: float, now_s: float) -> None:
        """Record the share of work done, and pin a faster point if the task would miss its deadline."""
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
        """Read the sensors if due."""
        if self._ledger is not None and now_s >= self._sample_s:
            self._read_sensors(now_s)
            self._sample_s = now_s + self._every_s
            self._close_if_unpinned(now_s, now_s - self._began_s - self._told_s)

    def next_sample_s(self) -> float:
        """Return the time by which `read_due_sensors` must be called."""
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
        spent = TaskCost(energy.total_cost(self._costs), learned)
        self.stop()
        return spent

    def stop(self) -> None:
        """Unpin the clocks and forget the task, however it ended."""
        held = self._held
        self._reset()
        if held is not None:
            self._call_board(self._board.unpin_clocks)

    # -- stretches --

    def _close_segment(self, done: float, now_s: float, lasted_s: float) -> None:
        """Record the cost of the present segment, learn from the segment and start the next."""
        assert self._ledger is not None
        self._read_sensors(now_s)
        share = done - self._before
        measured = self._ledger.cost_until(now_s, self._board.idle_w, self._label)
        told = self._board.task_cost(self._work.scale(share), msgspec.structs.replace(measured, duration_s=lasted_s))
        self._costs.append(told)
        if self._held is not None:
            seen = self._current_segment(share, self._mean_power_w(measured, told, now_s), now_s)
            self._spent_s += seen.seconds
            if self._board.holds:  # after a loss of control, the clocks of the segment are unknown
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
        if self._held is not None and not self._board.holds:
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
        """Return the result of a call, or None after a ClockError, which is logged unless repeated."""
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
