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
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from fedquilt import cost_model
from fedquilt.core import ClockError, Cost, Device, OperatingPoint, Reading, Work
from fedquilt.edge_agent.power import energy, governor

log = logging.getLogger(__name__)

ALIVE_S: Final = 1.0  # shortest interval of reading a held board, which may release clocks without keepalive


class Spent(NamedTuple):
    """Cost of a task, and its measured pace: seconds over those predicted; None: no point was held."""

    cost: Cost
    pace: float | None


class Pacer:
    """Power management of one task on one board."""

    def __init__(self, board: Device, rule: governor.Rule) -> None:
        self._board, self._rule = board, rule
        self._warned = ""
        self._clear()

    def _clear(self) -> None:
        self._ledger: energy.Ledger | None = None  # of the stretch in hand; None: no task
        self._every_s = self._sample_s = math.inf
        self._work = Work()
        self._began_s = self._since_s = self._stepped_s = 0.0
        self._told_s = 0.0  # part of the time since the beginning that is in `_costs`
        self._done = self._before = 0.0  # shares of the work: done, and done before this stretch
        self._left_s, self._pace = math.inf, 1.0
        self._held: OperatingPoint | None = None
        self._refused = False  # the board did not take the latest point
        self._celsius: float | None = None
        self._label: str | None = None
        self._costs: list[Cost] = []
        self._seen_s = self._predicted_s = 0.0  # sums over finished stretches with a held point

    # -- a task --

    def begin(self, now_s: float) -> None:
        """Start a task, whose process is about to start. Loading counts as its energy, at the board's own clocks."""
        self.stop()
        reading = self._board.read(now_s)
        self._celsius = reading.temperature_c
        self._ledger = energy.Ledger(now_s).seen(now_s, reading)
        self._began_s = self._since_s = now_s
        self._every_s = energy.SAMPLE_S if self._ledger.at_s is not None else math.inf
        self._sample_s = now_s + self._every_s
        self._watched = reading != Reading()  # a board without any sensor need not be read

    def loaded(self, work: Work, due_s: float, pace: float | None, now_s: float) -> None:
        """Choose a point once the data is loaded and the whole work known: `work.on(examples)`, due at `due_s`."""
        if self._ledger is None:
            return
        self._work, self._since_s, self._stepped_s = work, now_s, now_s
        self._left_s, self._pace = due_s - now_s, 1.0 if pace is None else pace
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
        share = self._done - self._before
        here_s = self._board_s(share, now_s)
        pace = governor.pace_of(self._work, self._held, share, here_s)
        if pace is None:
            return
        left_s = self._left_s - self._seen_s - here_s
        rest = governor.part(self._work, 1 - self._done)
        board = self._board
        faster = governor.step_up(self._rule, board.points, self._held, rest, left_s, board.idle_w, pace)
        if faster is not None and not self._rule.too_hot(self._celsius):
            self._close_stretch(self._done, now_s, now_s - self._began_s - self._told_s)
            self._hold(faster, now_s)

    def sample(self, now_s: float) -> None:
        """Read the sensors, if it is time."""
        if self._ledger is not None and now_s >= self._sample_s:
            reading = self._board.read(now_s)
            self._celsius = reading.temperature_c
            self._ledger = self._ledger.seen(now_s, reading)
            self._sample_s = now_s + self._every_s
            if self._held is not None and self._rule.too_hot(self._celsius):
                log.warning("clocks are released: the board is hotter than [governor] max_c, or tells no temperature")
                self._try(self._board.release)
            self._look(now_s, now_s - self._began_s - self._told_s)

    def due_s(self) -> float:
        """Time by which `sample` has to be called."""
        return self._sample_s

    def end(self, work: Work, wall_s: float, now_s: float) -> Spent:
        """End a successful task and return its cost. `wall_s` is measured by its process, without start and imports."""
        if self._ledger is None:
            return Spent(Cost(duration_s=wall_s), None)
        self._work = work
        self._ledger = self._ledger.seen(now_s, self._board.read(now_s))
        self._look(now_s, max(wall_s - self._told_s, 0.0))
        self._close_stretch(1.0, now_s, max(wall_s - self._told_s, 0.0))
        spent = energy.total(self._costs)
        pace = self._seen_s / self._predicted_s if self._seen_s > 0 and self._predicted_s > 0 else None
        self.stop()
        return Spent(spent, pace)

    def stop(self) -> None:
        """Return the clocks to the board, however the task ended."""
        held = self._held
        self._clear()
        if held is not None:
            self._try(self._board.release)

    # -- stretches --

    def _close_stretch(self, done: float, now_s: float, lasted_s: float) -> None:
        """Attribute the work done since the last stretch to the point that is held."""
        assert self._ledger is not None
        share = done - self._before
        here_s = self._board_s(share, now_s)
        if self._held is not None:
            self._seen_s += here_s
            self._predicted_s += cost_model.seconds(governor.part(self._work, share), self._held) or 0.0
        self._ledger = self._ledger.seen(now_s, self._board.read(now_s))
        measured = self._ledger.cost(now_s, self._board.idle_w, self._label)
        measured = msgspec.structs.replace(measured, duration_s=lasted_s)
        self._costs.append(self._board.cost(governor.part(self._work, share), measured))
        self._ledger = self._ledger.again(now_s)
        self._before, self._since_s, self._told_s = done, now_s, self._told_s + lasted_s

    def _look(self, now_s: float, lasted_s: float) -> None:
        """After the hold is lost, attribute further work to the board's own clocks."""
        if self._held is not None and not self._board.holds:
            self._close_stretch(self._done, now_s, lasted_s)
            self._held = self._label = None

    def _board_s(self, share: float, now_s: float) -> float:
        """Seconds of the board in this stretch; a simulated board predicts them, without a measured time."""
        told_s = self._board.cost(governor.part(self._work, share), Cost(duration_s=0.0)).duration_s
        return told_s or now_s - self._since_s

    # -- clocks --

    def _choose(self, now_s: float) -> None:
        board = self._board
        if board.points and not self._rule.permitted(board.points):
            log.warning(
                "the clocks are left to the board: no operating point is known to draw %g W or less (max_w)",
                self._rule.max_w,
            )
        point = governor.choose(self._rule, board.points, self._work, self._left_s, board.idle_w, self._pace)
        self._hold(None if self._rule.too_hot(self._celsius) else point, now_s)

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
