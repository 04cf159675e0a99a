"""Power management of one task: chooses a point with `governor`, holds the board there, reads its sensors, releases.

The agent reports the task's progress; nothing else in the agent touches clocks.

    begin --loaded--> held at a point --progress--> stepped up, perhaps --end--> Spent, and released
                                                                        --stop--> released
                                 +--the board releases by itself--> continues at its own clocks

A task may be run at several points one after another; each of these stretches has its share of the work
and a ledger of its own. Time is the board's: on a simulated board that runs in real time on a faster host,
the seconds that its profile tells.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fedquilt.core import ClockError, Cost, Device, OperatingPoint, Reading, Work
from fedquilt.edge_agent.devices.sensors.meters import MOST_W
from fedquilt.edge_agent.power import energy, governor
from fedquilt.edge_agent.power.learned import Latest, Learned, Seen, highest, taught

log = logging.getLogger(__name__)

COARSE: Final = 0.25  # error of a stretch's joules, relative, above which its power teaches nothing
PEAK: Final = 4.0  # times the most that the profile knows of, above which a meter is not believed
ALIVE_S: Final = 1.0  # shortest interval of reading a held board, which may release clocks without keepalive


class Spent(NamedTuple):
    """Cost of a task, and what the board knows of its kind of work afterwards."""

    cost: Cost
    learned: Learned


class Pacer:
    """Power management of one task on one board."""

    def __init__(self, board: Device, rule: governor.Rule) -> None:
        self._board, self.rule = board, rule
        self._warned = ""
        self._clear()

    def _clear(self) -> None:
        self._ledger: energy.Ledger | None = None  # of the stretch in hand; None: no task
        self._held_ledger: energy.Ledger | None = None  # since the point is held; None: none is
        self._every_s = self._sample_s = math.inf
        self._work = Work()
        self._began_s = self._since_s = self._stepped_s = 0.0
        self._told_s = 0.0  # part of the time since the beginning that is in `_costs`
        self._done = self._before = 0.0  # shares of the work: done, and done before this stretch
        self._left_s, self._learned = math.inf, Learned()
        self._top: Mapping[str, float] = {}  # highest clocks of the board when the point in hand was held
        self._held: OperatingPoint | None = None
        self._refused = False  # the board did not take the latest point
        self._celsius: float | None = None
        self._label: str | None = None
        self._costs: list[Cost] = []
        self._spent_s = 0.0  # sum over finished stretches with a held point

    # -- a task --

    def begin(self, now_s: float) -> None:
        """Start a task, whose process is about to start. Loading counts as its energy, at the board's own clocks."""
        self.stop()
        reading = self._board.read(now_s)
        self._celsius = reading.temperature_c
        self._ledger = energy.Ledger(now_s, most_w=_most_w(self._board.points)).seen(now_s, reading)
        self._began_s = self._since_s = now_s
        self._every_s = energy.SAMPLE_S if self._ledger.at_s is not None else math.inf
        self._sample_s = now_s + self._every_s
        self._watched = reading != Reading()  # a board without any sensor need not be read

    def loaded(self, work: Work, due_s: float, learned: Learned, now_s: float) -> None:
        """Choose a point once the data is loaded and the whole work known.

        Args:
            work: of the task on this device's examples, `work.on(examples)`.
            due_s: the task's deadline.
            learned: of its engine and workload on this board.
            now_s: present time.
        """
        if self._ledger is None:
            return
        self._work, self._since_s, self._stepped_s = work, now_s, now_s
        self._left_s, self._learned = due_s - now_s, learned
        if self._board.adjustable:
            self._choose(now_s)
            if self._held is None and self._refused:
                self._choose(now_s)  # the owner may have changed the mode since the points were read

    def progress(self, fraction: float, now_s: float) -> None:
        """Account for the share done; step up if the rest would come too late."""
        if self._ledger is None or not self._done <= fraction <= 1:
            return
        self._done = fraction
        if self._held is None or now_s < self._stepped_s + governor.STEP_S:
            return
        seen = self._seen(self._done - self._before, None, now_s)
        left_s = self._left_s - self._spent_s - seen.seconds
        rest, board = self._work.part(1 - self._done), self._board
        faster = governor.step_up(self.rule, board.points, seen, rest, left_s, board.idle_w, self._learned)
        if faster is not None and not self.rule.too_hot(self._celsius):
            self._close_stretch(self._done, now_s, now_s - self._began_s - self._told_s)
            self._hold(faster, now_s)

    def sample(self, now_s: float) -> None:
        """Read the sensors, if it is time."""
        if self._ledger is not None and now_s >= self._sample_s:
            self._celsius = self._read(now_s).temperature_c
            self._sample_s = now_s + self._every_s
            if self._held is not None and self.rule.too_hot(self._celsius):
                log.warning("clocks are released: the board is hotter than [governor] max_c, or tells no temperature")
                self._try(self._board.release)
            self._look(now_s, now_s - self._began_s - self._told_s)

    def due_s(self) -> float:
        """Time by which `sample` has to be called."""
        return self._sample_s

    def end(self, work: Work, wall_s: float, now_s: float) -> Spent:
        """End a successful task and return its cost. `wall_s` is measured by its process, without start and imports."""
        if self._ledger is None:
            return Spent(Cost(duration_s=wall_s), Learned())
        self._work = work
        self._read(now_s)
        self._look(now_s, max(wall_s - self._told_s, 0.0))
        self._close_stretch(1.0, now_s, max(wall_s - self._told_s, 0.0))
        learned = self._learned
        if learned.time is not None and math.isfinite(self._left_s):
            learned = msgspec.structs.replace(learned, latest=Latest(work=work, left_s=self._left_s))
        spent = Spent(energy.total(self._costs), learned)
        self.stop()
        return spent

    def stop(self) -> None:
        """Return the clocks to the board, however the task ended."""
        held = self._held
        self._clear()
        if held is not None:
            self._try(self._board.release)

    # -- stretches --

    def _close_stretch(self, done: float, now_s: float, lasted_s: float) -> None:
        """Attribute the work done since the last stretch to the point that is held; `lasted_s` is its time as told."""
        assert self._ledger is not None
        self._read(now_s)
        share = done - self._before
        measured = self._ledger.cost(now_s, self._board.idle_w, self._label)
        told = self._board.cost(self._work.part(share), msgspec.structs.replace(measured, duration_s=lasted_s))
        self._costs.append(told)
        if self._held is not None:
            seen = self._seen(share, self._watts(measured, told, now_s), now_s)
            self._spent_s += seen.seconds
            if self._board.holds:  # else nobody knows since when it ran at other clocks
                self._learned = taught(self._learned, seen)
        self._ledger = self._ledger.again(now_s)
        self._before, self._since_s, self._told_s = done, now_s, self._told_s + lasted_s

    def _seen(self, share: float, watts: float | None, now_s: float) -> Seen:
        """Present stretch, with a share of the work, at the point held."""
        assert self._held is not None
        work, seconds = self._work.part(share), self._board_s(share, now_s)
        return Seen(self._held, work, seconds, watts, self._top)

    def _watts(self, measured: Cost, told: Cost, now_s: float) -> float | None:
        """Mean power since the point is held; None: no meter, or one that is too coarse for so short a time."""
        if measured.energy_j is None:  # of a simulated board, its profile's power
            return told.energy_j / told.duration_s if told.energy_j and told.duration_s > 0 else None
        cost = Cost(duration_s=0.0) if self._held_ledger is None else self._held_ledger.cost(now_s, None)
        if not cost.energy_j or cost.energy_error_j is None or cost.energy_error_j > COARSE * cost.energy_j:
            return None
        return cost.energy_j / cost.duration_s

    def _look(self, now_s: float, lasted_s: float) -> None:
        """After the hold is lost, attribute further work to the board's own clocks."""
        if self._held is not None and not self._board.holds:
            self._close_stretch(self._done, now_s, lasted_s)
            self._held = self._label = None

    def _board_s(self, share: float, now_s: float) -> float:
        """Seconds of the board in this stretch; a simulated board predicts them, without a measured time."""
        told_s = self._board.cost(self._work.part(share), Cost(duration_s=0.0)).duration_s
        return told_s or now_s - self._since_s

    def _read(self, now_s: float) -> Reading:
        """Reading of the sensors, entered into the ledgers."""
        reading = self._board.read(now_s)
        if self._ledger is not None:
            self._ledger = self._ledger.seen(now_s, reading)
        if self._held_ledger is not None:
            self._held_ledger = self._held_ledger.seen(now_s, reading)
        return reading

    # -- clocks --

    def _choose(self, now_s: float) -> None:
        board = self._board
        if board.points and not self.rule.permitted(board.points):
            log.warning(
                "the clocks are left to the board: no operating point is known to draw %g W or less (max_w)",
                self.rule.max_w,
            )
        point = governor.choose(self.rule, board.points, self._work, self._left_s, board.idle_w, self._learned)
        self._hold(None if self.rule.too_hot(self._celsius) else point, now_s)

    def _hold(self, point: OperatingPoint | None, now_s: float) -> None:
        if point is None:
            return
        taken = self._try(lambda: self._board.hold(point))
        self._refused = taken is None
        if taken is None:  # continue at the board's own clocks
            if self._held is not None:
                self._try(self._board.release)
            self._held = self._label = None
            return
        self._held, self._label, self._stepped_s = point, taken.name, now_s
        self._top = highest(self._board.points)
        self._held_ledger = None if self._ledger is None else self._ledger.again(now_s)
        if self._watched:
            self._every_s = min(self._every_s, ALIVE_S)
            self._sample_s = min(self._sample_s, now_s + self._every_s)

    def _try(self, call: Callable[[], OperatingPoint | None]) -> OperatingPoint | None:
        """Result of a call to the board; None if it refuses, which is logged once for each reason."""
        try:
            return call()
        except ClockError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("the clocks are left to the board: %s", error)
            return None


def _most_w(points: Sequence[OperatingPoint]) -> float:
    """Power above which a meter of this board cannot be right."""
    known = [point.busy_w for point in points if point.busy_w]
    return PEAK * max(known) if known else MOST_W
