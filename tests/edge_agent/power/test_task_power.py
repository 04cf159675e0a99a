"""Power management of one task, on a board with a meter that fails and clocks that somebody else moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedquilt.core import ClockError, Cost, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel
from fedquilt.edge_agent.power.task_power import TaskCost, TaskPowerManager

SLOW = OperatingPoint(name="slow", cpu_hz=1e9, flops_per_s=2.5, busy_w=4.0)
FAST = OperatingPoint(name="fast", cpu_hz=2e9, flops_per_s=5.0, busy_w=16.0)
WORK = WorkEstimate(flops=100.0)  # 40 or 20 s

Meter = Callable[[float], Reading]


def healthy(now_s: float) -> Reading:
    """About 5 W, never twice the same."""
    return Reading(power_w=5.0 + 0.01 * (now_s % 1.0), energy_source="plug")


class Board:
    """Takes all clocks; `meter` says what its sensors do."""

    board, memory_bytes, provenance, adjustable = "hand-made", 8 << 30, "measured", True
    points: tuple[OperatingPoint, ...] = (SLOW, FAST)
    idle_w: float | None = 1.0

    def __init__(self, meter: Meter = healthy) -> None:
        self.meter, self.clocks, self.clocks_unchanged, self.refuses = meter, ["own"], False, ""

    def read_sensors(self, now_s: float) -> Reading:
        return self.meter(now_s)

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        if self.refuses:
            raise ClockError(self.refuses)
        self.clocks.append(point.name)
        self.clocks_unchanged = True
        return point

    def unpin_clocks(self) -> None:
        self.clocks.append("own")
        self.clocks_unchanged = False

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return measured


def worked(board: Board, seconds: float = 60.0, lost_s: float | None = None) -> TaskCost:
    """A task that takes this long, with all the time there is; from `lost_s` on the clocks are somebody else's."""
    pacer = TaskPowerManager(board, GovernorPolicy())
    pacer.start_task(0.0)
    pacer.start_work(WORK, 1000.0, LearnedModel(), 0.0)
    for tenth in range(1, int(10 * seconds)):
        if lost_s is not None and tenth == int(10 * lost_s):
            board.clocks_unchanged = False
        pacer.read_due_sensors(tenth / 10)
        pacer.report_progress(tenth / (10 * seconds), tenth / 10)
    return pacer.end_task(WORK, seconds, seconds)


def test_a_task_teaches_time_and_power_of_the_point_it_ran_at() -> None:
    """60 s instead of 40, and 5 W instead of 4."""
    board = Board()
    spent = worked(board)
    assert board.clocks == ["own", "slow", "own"]
    assert spent.cost.energy_j == pytest.approx(300.0, rel=0.01)
    assert spent.learned_model.time is not None
    assert spent.learned_model.power is not None
    assert (spent.learned_model.time.reference_point, spent.learned_model.time.ratio) == (SLOW, pytest.approx(1.5))
    assert spent.learned_model.power.ratio == pytest.approx(5.0 / 4.0, rel=0.01)
    assert spent.learned_model.power.reference_clocks == {"cpu_hz": 2e9}
    assert spent.learned_model.latest == LatestTask(work=WORK, time_left_s=1000.0)  # as `doctor` asks for it


FAILS: dict[str, Meter] = {
    "dies": lambda now_s: healthy(now_s) if now_s < 20.0 else Reading(),
    "freezes": lambda now_s: healthy(min(now_s, 20.55)),
    "jumps": lambda now_s: Reading(energy_j=5.0 * now_s + (1e6 if now_s > 20.0 else 0.0), energy_source="rapl"),
    "falls": lambda now_s: Reading(energy_j=5.0 * now_s + (1e6 if now_s < 20.0 else 0.0), energy_source="rapl"),
    "tells nonsense": lambda now_s: Reading(power_w=5.0 if now_s < 20.0 else -3.0, energy_source="plug"),
    "was never there": lambda now_s: Reading(temperature_c=40.0),
}


@pytest.mark.parametrize("fails", FAILS)
def test_a_meter_that_fails_on_the_way_teaches_no_power_and_reports_no_joules(fails: str) -> None:
    spent = worked(Board(FAILS[fails]))
    assert spent.cost.energy_j is None
    assert spent.cost.idle_j == 60.0
    assert spent.learned_model.power is None
    assert spent.learned_model.time is not None


def test_a_stretch_whose_clocks_somebody_else_moved_teaches_nothing() -> None:
    board = Board()
    spent = worked(board, lost_s=30.0)
    assert spent.learned_model == LearnedModel()
    assert spent.cost.point == "slow, then unpinned"
    assert board.clocks == ["own", "slow"]


def test_clocks_that_are_refused_teach_nothing() -> None:
    board = Board()
    board.refuses = "too hot"
    assert worked(board).learned_model == LearnedModel()
    assert board.clocks == ["own"]


def test_without_idle_power_the_idle_joules_are_unknown() -> None:
    board = Board()
    board.idle_w = None
    spent = worked(board)
    assert spent.cost.idle_j is None
    assert spent.cost.energy_j == pytest.approx(300.0, rel=0.01)


def test_a_profile_with_holes_leaves_the_clocks_alone() -> None:
    board = Board()
    board.points = tuple(OperatingPoint(name=each.name, cpu_hz=each.cpu_hz) for each in (SLOW, FAST))
    assert worked(board).learned_model == LearnedModel()
    assert board.clocks == ["own"]


def test_a_task_that_is_stepped_up_teaches_both_points() -> None:
    board = Board()
    pacer = TaskPowerManager(board, GovernorPolicy())
    pacer.start_task(0.0)
    pacer.start_work(WORK, 60.0, LearnedModel(), 0.0)
    done, now_s = 0.0, 0.0
    while done < 1.0:
        now_s = round(now_s + 0.1, 3)
        done += 0.1 / (160.0 if board.clocks[-1] == "slow" else 40.0)
        pacer.read_due_sensors(now_s)
        if done < 1.0:
            pacer.report_progress(done, now_s)
    spent = pacer.end_task(WORK, now_s, now_s)
    assert board.clocks == ["own", "slow", "fast", "own"]
    assert spent.cost.point == "slow, then fast"
    assert spent.learned_model.time is not None
    assert spent.learned_model.time.count == 2
