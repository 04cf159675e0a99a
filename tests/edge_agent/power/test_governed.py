"""The governor on simulated physics that is not its model, of two forms.

A board's profile is recorded at twelve points with noise. Then the board runs tasks of one kind with deadlines between
tight and ample, under the agent's power management on virtual time. The optimum is the cheapest point in time by the
physics.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pytest
from board_physics import BoardPhysics, Engine, TablePhysics

from fedquilt.core import Cost, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.power import governor, learned_model
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.power.task_power import TaskPowerManager
from fedquilt.profiles import BoardProfile
from fedquilt.tools.boards import record
from fedquilt.tools.boards.record import measurement

NOISE: Final = 0.05  # of each time and power that is measured, log-normal
SIZES_S: Final = (20.0, 60.0)  # of a task at the fastest point
ALLOWED: Final = (1.15, 3.0)  # deadlines over that time
STEP_S: Final = 0.5  # of virtual time
REPORTED: Final = 0.025  # share of a task after which its process reports progress
TRAINING: Final = 10  # tasks before what is judged
FIRST: Final = 2  # first tasks, which may be late because their duration is unknown
SEEDS, NIGHTLY_SEEDS, TASKS = range(4), range(8), 20

Physics = BoardPhysics | TablePhysics
LAWS: Final[Mapping[str, Physics]] = {"voltage floor": BoardPhysics(), "voltage tables": TablePhysics()}


@dataclass(frozen=True)
class Case:
    """A kind of task on a board."""

    name: str
    law: Physics
    recorded: Engine  # what `record` measured with
    engine: Engine  # what tasks run on
    bytes_per_flop: float


def cases(law: Physics) -> list[Case]:
    return [
        Case("GPU, as recorded", law, "cuda", "cuda", 0.0005),
        Case("GPU, waits for memory", law, "cuda", "cuda", 0.1),
        Case("CPU, as recorded", law, "cpu", "cpu", 0.05),
        Case("GPU, CPU recorded", law, "cpu", "cuda", 0.05),
    ]


@dataclass(frozen=True)
class Job:
    """A task: its work, time limit, and factors of its time and power."""

    work: WorkEstimate
    left_s: float
    slow: float = 1.0
    draw: float = 1.0


@dataclass
class Outcome:
    """What the tasks of a case took under the governor, and the best that could be."""

    joules: float = 0.0  # of judged tasks until their deadlines, idle included
    optimum: float = 0.0
    late: int = 0  # judged tasks that are late and would not have been at the fastest point
    time_errors: list[float] = field(default_factory=list)  # mean relative errors of the estimates after TRAINING tasks
    power_errors: list[float] = field(default_factory=list)


def record_profile(law: Physics, engine: Engine, roll: random.Random) -> BoardProfile:
    """Record a profile with noise, at the points that `fedquilt board record` selects."""
    arithmetic, traffic = WorkEstimate(flops=1e11, read_bytes=1e7), WorkEstimate(read_bytes=1e10)

    def noisy(value: float) -> float:
        return value * roll.lognormvariate(0.0, NOISE)

    done = []
    for point in measurement.select_points(measurement.candidate_points(law.clock_lists())):
        clocks = measurement.clocks_by_axis(point)
        seen = msgspec.structs.replace(
            point,
            flops_per_s=noisy(arithmetic.flops / law.seconds(arithmetic, engine, clocks)),
            bytes_per_s=noisy(traffic.read_bytes / law.seconds(traffic, engine, clocks)),
            busy_w=noisy(law.watts(arithmetic, engine, clocks)),
        )
        done.append(measurement.PointMeasurement(seen, 10, 1.0))
    recording = measurement.BoardMeasurements(law.idle_w, tuple(done), (), "a simulated meter", 1.0)
    facts = record.BoardFacts("simulated", 8 << 30, "Simulated physics, not a board.")
    return record.build_profile(recording, facts, law.clock_lists()).board


class MeteredBoard:
    """Simulated board with a power meter. Its time passes only in `advance`."""

    board, memory_bytes, provenance, adjustable, clocks_unchanged = "simulated", 8 << 30, "measured", True, True

    def __init__(self, case: Case, known: BoardProfile) -> None:
        self.case, self.points = case, known.operating_points()
        self.idle_w: float | None = case.law.idle_w
        self.pinned: OperatingPoint | None = None
        self.job: Job | None = None
        self._counted_j = 0.0

    def clocks(self) -> Mapping[str, float | None]:
        if self.pinned is not None:
            return measurement.clocks_by_axis(self.pinned)
        return self.case.law.governor_clocks(self.job.work, self.case.engine) if self.job else {}

    def seconds(self) -> float:
        """The seconds of the whole task at the clocks of now."""
        assert self.job is not None
        return self.case.law.seconds(self.job.work, self.case.engine, self.clocks()) * self.job.slow

    def advance(self, seconds: float) -> None:
        job, law = self.job, self.case.law
        watts = law.idle_w if job is None else law.watts(job.work, self.case.engine, self.clocks()) * job.draw
        self._counted_j += watts * seconds

    def read_sensors(self, now_s: float) -> Reading:
        return Reading(energy_j=self._counted_j, energy_source="simulated")

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        self.pinned = point
        return point

    def unpin_clocks(self) -> None:
        self.pinned = None

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return measured


def create_jobs(case: Case, seed: int) -> list[Job]:
    roll = random.Random(f"tasks {case.name} {seed}")
    unit = WorkEstimate(flops=1e9, read_bytes=1e9 * case.bytes_per_flop)
    unit_s, found = case.law.seconds(unit, case.engine, case.law.highest_clocks()), []
    for _ in range(TASKS):
        fast_s = roll.uniform(*SIZES_S)
        work = WorkEstimate(flops=unit.flops * fast_s / unit_s, read_bytes=unit.read_bytes * fast_s / unit_s)
        factors = (roll.lognormvariate(0.0, NOISE), roll.lognormvariate(0.0, NOISE))
        found.append(Job(work, fast_s * roll.uniform(*ALLOWED), *factors))
    return found


def time_and_energy(case: Case, job: Job, clocks: Mapping[str, float | None]) -> tuple[float, float]:
    """A task's seconds at fixed clocks, and its joules until the deadline."""
    seconds = case.law.seconds(job.work, case.engine, clocks) * job.slow
    watts = case.law.watts(job.work, case.engine, clocks) * job.draw
    return seconds, watts * seconds + case.law.idle_w * max(job.left_s - seconds, 0.0)


def optimal_energy(case: Case, points: Sequence[OperatingPoint], job: Job) -> float:
    """A task's joules at the best point in time. Errors of the task are unknown beforehand."""

    def rank(point: OperatingPoint) -> tuple[bool, float]:
        seconds, joules = time_and_energy(case, Job(job.work, job.left_s), measurement.clocks_by_axis(point))
        return seconds > job.left_s, joules

    return time_and_energy(case, job, measurement.clocks_by_axis(min(points, key=rank)))[1]


def run_job(
    board: MeteredBoard, pacer: TaskPowerManager, state: LearnedModel, now_s: float
) -> tuple[float, LearnedModel]:
    """Run the board's job under the governor. Return its seconds and what is known afterwards."""
    job = board.job
    assert job is not None
    began_s, done, reported = now_s, 0.0, 0.0
    pacer.start_task(now_s)
    pacer.start_work(job.work, now_s + job.left_s, state, now_s)
    while done < 1.0:
        left_s = (1.0 - done) * board.seconds()
        step_s = min(STEP_S, left_s)
        done = 1.0 if step_s == left_s else done + step_s / board.seconds()
        board.advance(step_s)
        now_s += step_s
        pacer.read_due_sensors(now_s)
        if done < 1.0 and done >= reported + REPORTED:
            reported = done
            pacer.report_progress(done, now_s)
    return now_s - began_s, pacer.end_task(job.work, now_s - began_s, now_s).learned_model


def mean_errors(
    case: Case, points: Sequence[OperatingPoint], state: LearnedModel, work: WorkEstimate
) -> tuple[float, float]:
    """Mean relative errors of the estimated time and power, over the points that a deadline permits."""
    fast_s = case.law.seconds(work, case.engine, case.law.highest_clocks())
    time, power = [], []
    for point, each in zip(points, learned_model.estimate_points(state, points, work), strict=True):
        clocks = measurement.clocks_by_axis(point)
        true_s = case.law.seconds(work, case.engine, clocks)
        if each is None or each.watts is None or true_s > ALLOWED[1] * fast_s:
            continue
        time.append(abs(each.seconds / true_s - 1))
        power.append(abs(each.watts / case.law.watts(work, case.engine, clocks) - 1))
    return math.fsum(time) / len(time), math.fsum(power) / len(power)


def run_case(case: Case, seeds: range) -> Outcome:
    outcome = Outcome()
    for seed in seeds:
        known = record_profile(case.law, case.recorded, random.Random(f"record {case.name} {seed}"))
        board, state, now_s = MeteredBoard(case, known), LearnedModel(), 0.0
        pacer = TaskPowerManager(board, governor.GovernorPolicy("energy"))
        for number, job in enumerate(create_jobs(case, seed)):
            if number == TRAINING:
                time_error, power_error = mean_errors(case, board.points, state, job.work)
                outcome.time_errors.append(time_error)
                outcome.power_errors.append(power_error)
            before_j, board.job = board.read_sensors(now_s).energy_j or 0.0, job
            took_s, state = run_job(board, pacer, state, now_s)
            board.job = None
            rest_s = max(job.left_s - took_s, 0.0)
            board.advance(rest_s)
            now_s += took_s + rest_s
            if number >= TRAINING:
                outcome.joules += (board.read_sensors(now_s).energy_j or 0.0) - before_j
                outcome.optimum += optimal_energy(case, board.points, job)
            possible = time_and_energy(case, job, case.law.highest_clocks())[0] <= job.left_s
            outcome.late += number >= FIRST and took_s > job.left_s and possible
    return outcome


def runs(seeds: range, **marks: Any) -> list[Any]:
    return [pytest.param((LAWS[name], seeds), id=f"{name}, {len(seeds)} boards", **marks) for name in LAWS]


@pytest.fixture(scope="module", params=[*runs(SEEDS), *runs(NIGHTLY_SEEDS, marks=pytest.mark.nightly)])
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    """Twenty tasks of each kind, on several boards."""
    law, seeds = request.param
    return [run_case(case, seeds) for case in cases(law)]


def test_after_ten_tasks_it_is_near_the_optimum_and_knows_time_and_power(outcomes: list[Outcome]) -> None:
    """Twelve recorded points, errors of 5 %: joules within 3 % of trying every point, time 10 %, power 6 %."""
    boards = sum(len(each.time_errors) for each in outcomes)
    assert sum(each.joules for each in outcomes) <= 1.03 * sum(each.optimum for each in outcomes)
    assert sum(math.fsum(each.time_errors) for each in outcomes) / boards <= 0.10
    assert sum(math.fsum(each.power_errors) for each in outcomes) / boards <= 0.06
    assert all(each.joules <= 1.06 * each.optimum for each in outcomes)


def test_no_more_than_one_task_in_fifty_is_late(outcomes: list[Outcome]) -> None:
    assert all(each.late <= 0.02 * len(each.time_errors) * (TASKS - FIRST) for each in outcomes)
