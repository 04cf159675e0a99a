"""Evaluation of the governor on simulated boards with physics unlike its own model.

A board's profile is recorded at twelve points with noise. Then the board runs tasks of one kind with deadlines between
tight and ample, under the agent's power management on virtual time. Each policy runs the same tasks. The optimum is the
cheapest point in time by the physics.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from fedquilt.core import Cost, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent.power import governor, learned_model
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.power.task_power import TaskPowerManager
from fedquilt.profiles import BoardProfile
from fedquilt.tools.boards.record import measurement, profile_recording
from fedquilt.tools.lab.bench.physics import BoardPhysics, Engine
from fedquilt.tools.lab.bench.table_physics import TablePhysics
from fedquilt.tools.report.thresholds import compare_at_most

NOISE: Final = 0.05  # of each time and power that is measured, log-normal
SIZES_S: Final = (20.0, 60.0)  # of a task at the fastest point
ALLOWED: Final = (1.15, 3.0)  # deadlines over that time
STEP_S: Final = 0.5  # of virtual time
TOLD: Final = 0.025  # share of a task after which its process tells how far it is
TRAINING: Final = 10  # tasks before what is judged
FIRST: Final = 2  # first tasks, which may be late because their duration is unknown
POLICIES: Final[tuple[governor.Policy, ...]] = ("max", "paper", "board", "energy")
SEEDS, TASKS = tuple(range(20)), 20


class PhysicsLaw(Protocol):
    idle_w: float

    def highest_clocks(self) -> dict[str, float]:
        """Return the highest clocks by axis, in hertz."""
        ...

    def seconds(self, work: WorkEstimate, engine: Engine, clocks: Mapping[str, float | None]) -> float: ...

    def watts(self, work: WorkEstimate, engine: Engine, clocks: Mapping[str, float | None]) -> float: ...

    def governor_clocks(self, work: WorkEstimate, engine: Engine) -> dict[str, float | None]:
        """Return the clocks selected by the board's own governors for the work."""
        ...

    def clock_lists(self) -> dict[str, tuple[float, ...]]:
        """Return the frequencies by axis, ascending, in hertz."""
        ...


@dataclass(frozen=True)
class GovernorCase:
    """A kind of task on a board."""

    name: str
    law: PhysicsLaw
    recorded: Engine  # what `record` measured with
    engine: Engine  # what tasks run on
    bytes_per_flop: float


@dataclass(frozen=True)
class GovernorJob:
    """A task: its work, time limit, and factors of its time and power."""

    work: WorkEstimate
    left_s: float
    slow: float
    draw: float


@dataclass
class ResultCounts:
    """Energy and lateness of the tasks of a case under one policy."""

    joules: list[float] = field(default_factory=list)  # of each task until its deadline, idle included
    late: list[bool] = field(default_factory=list)  # and would not have been at the fastest point
    known: list[LearnedModel] = field(default_factory=list)  # before each task


def record_profile(law: PhysicsLaw, engine: Engine, roll: random.Random) -> BoardProfile:
    """Record a profile with noise, at the points that `fedquilt board record` selects."""
    arithmetic, traffic = WorkEstimate(flops=1e11, read_bytes=1e7), WorkEstimate(read_bytes=1e10)

    def add_noise(value: float) -> float:
        return value * roll.lognormvariate(0.0, NOISE)

    done = []
    for point in measurement.select_points(measurement.candidate_points(law.clock_lists())):
        clocks = measurement.clocks_by_axis(point)
        seen = msgspec.structs.replace(
            point,
            flops_per_s=add_noise(arithmetic.flops / law.seconds(arithmetic, engine, clocks)),
            bytes_per_s=add_noise(traffic.read_bytes / law.seconds(traffic, engine, clocks)),
            busy_w=add_noise(law.watts(arithmetic, engine, clocks)),
        )
        done.append(measurement.PointMeasurement(seen, 10, 1.0))
    recording = measurement.BoardMeasurements(law.idle_w, tuple(done), (), "a simulated meter", 1.0)
    facts = profile_recording.BoardFacts("simulated", 8 << 30, "Simulated physics, not a board.")
    return profile_recording.build_profile(recording, facts, law.clock_lists()).board


class SimulatedBoard:
    """Simulated board with a power meter. Its time passes only in `advance`."""

    board, memory_bytes, provenance, adjustable, holds = "simulated", 8 << 30, "measured", True, True

    def __init__(self, case: GovernorCase, known: BoardProfile) -> None:
        self.case, self.points = case, known.operating_points()
        self.idle_w: float | None = case.law.idle_w
        self.held: OperatingPoint | None = None
        self._job: GovernorJob | None = None
        self._counted_j = 0.0

    def set_job(self, job: GovernorJob | None) -> None:
        self._job = job

    def current_clocks(self) -> dict[str, float | None]:
        if self.held is not None:
            return measurement.clocks_by_axis(self.held)
        return self.case.law.governor_clocks(self._job.work, self.case.engine) if self._job else {}

    def advance(self, seconds: float) -> float:
        """Advance time and return the share of the task done meanwhile."""
        if self._job is None:
            self._counted_j += self.case.law.idle_w * seconds
            return 0.0
        law, work, engine, clocks = self.case.law, self._job.work, self.case.engine, self.current_clocks()
        self._counted_j += law.watts(work, engine, clocks) * self._job.draw * seconds
        return seconds / (law.seconds(work, engine, clocks) * self._job.slow)

    def read_sensors(self, now_s: float) -> Reading:
        return Reading(energy_j=self._counted_j, energy_source="simulated")

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        self.held = point
        return point

    def unpin_clocks(self) -> None:
        self.held = None

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return measured


def create_jobs(case: GovernorCase, seed: int, count: int) -> list[GovernorJob]:
    """Create the tasks of a case, the same for every policy."""
    roll = random.Random(f"tasks {case.name} {seed}")
    unit = WorkEstimate(flops=1e9, read_bytes=1e9 * case.bytes_per_flop)
    unit_s, found = case.law.seconds(unit, case.engine, case.law.highest_clocks()), []
    for _ in range(count):
        fast_s = roll.uniform(*SIZES_S)
        work = WorkEstimate(flops=unit.flops * fast_s / unit_s, read_bytes=unit.read_bytes * fast_s / unit_s)
        factors = (roll.lognormvariate(0.0, NOISE), roll.lognormvariate(0.0, NOISE))
        found.append(GovernorJob(work, fast_s * roll.uniform(*ALLOWED), *factors))
    return found


def time_and_energy(case: GovernorCase, job: GovernorJob, clocks: Mapping[str, float | None]) -> tuple[float, float]:
    """Return a task's seconds at fixed clocks, and its joules until the deadline."""
    seconds = case.law.seconds(job.work, case.engine, clocks) * job.slow
    watts = case.law.watts(job.work, case.engine, clocks) * job.draw
    return seconds, watts * seconds + case.law.idle_w * max(job.left_s - seconds, 0.0)


def optimal_energy(case: GovernorCase, points: Sequence[OperatingPoint], job: GovernorJob) -> float:
    """Return a task's joules at the best point in time. Errors of the task are unknown beforehand."""

    def rank_point(point: OperatingPoint) -> tuple[bool, float]:
        clocks, plain = measurement.clocks_by_axis(point), GovernorJob(job.work, job.left_s, 1.0, 1.0)
        seconds, joules = time_and_energy(case, plain, clocks)
        return seconds > job.left_s, joules

    return time_and_energy(case, job, measurement.clocks_by_axis(min(points, key=rank_point)))[1]


def run_policy(case: GovernorCase, policy: governor.Policy, seed: int, count: int, known: BoardProfile) -> ResultCounts:
    board, tally, state, now_s = SimulatedBoard(case, known), ResultCounts(), LearnedModel(), 0.0
    pacer = TaskPowerManager(board, governor.GovernorPolicy(policy))
    for job in create_jobs(case, seed, count):
        tally.known.append(state)
        began_s, before_j, done, told = now_s, board.read_sensors(now_s).energy_j or 0.0, 0.0, 0.0
        pacer.start_task(now_s)
        board.set_job(job)
        pacer.start_work(job.work, now_s + job.left_s, state, now_s)
        while done < 1.0:
            left_s = (1.0 - done) * case.law.seconds(job.work, case.engine, board.current_clocks()) * job.slow
            step_s = min(STEP_S, left_s)
            done = 1.0 if step_s == left_s else done + board.advance(step_s)
            if done == 1.0:
                board.advance(step_s)
            now_s += step_s
            pacer.read_due_sensors(now_s)
            if done < 1.0 and done >= told + TOLD:
                told = done
                pacer.report_progress(done, now_s)
        state = pacer.end_task(job.work, now_s - began_s, now_s).learned
        board.set_job(None)
        took_s = now_s - began_s
        rest_s = max(job.left_s - took_s, 0.0)
        tally.joules.append((board.read_sensors(now_s).energy_j or 0.0) - before_j + case.law.idle_w * rest_s)
        possible = time_and_energy(case, job, case.law.highest_clocks())[0] <= job.left_s
        tally.late.append(took_s > job.left_s and possible)
        board.advance(rest_s)
        now_s += rest_s
    return tally


def run_fixed_clocks(case: GovernorCase, policy: governor.Policy, seed: int, count: int) -> ResultCounts:
    """Run the tasks at the highest clocks (`max`), or at those of the board's own governors."""
    tally, top = ResultCounts(), case.law.highest_clocks()
    for job in create_jobs(case, seed, count):
        clocks = top if policy == "max" else case.law.governor_clocks(job.work, case.engine)
        seconds, joules = time_and_energy(case, job, clocks)
        tally.joules.append(joules)
        tally.late.append(seconds > job.left_s >= time_and_energy(case, job, top)[0])
    return tally


def estimation_errors(
    case: GovernorCase, points: Sequence[OperatingPoint], state: LearnedModel, work: WorkEstimate
) -> tuple[float, float]:
    """Return the mean relative errors of estimated time and power."""
    found = learned_model.estimate_points(state, points, work)
    fast_s = case.law.seconds(work, case.engine, case.law.highest_clocks())
    time, power = [], []
    for point, each in zip(points, found, strict=True):
        clocks = measurement.clocks_by_axis(point)
        true_s = case.law.seconds(work, case.engine, clocks)
        if each is None or each.watts is None or true_s > ALLOWED[1] * fast_s:
            continue
        time.append(abs(each.seconds / true_s - 1))
        power.append(abs(each.watts / case.law.watts(work, case.engine, clocks) - 1))
    return math.fsum(time) / len(time), math.fsum(power) / len(power)


LAWS: Final[Mapping[str, PhysicsLaw]] = {"voltage floor": BoardPhysics(), "voltage tables": TablePhysics()}


def evaluate_case(
    case: GovernorCase, seeds: Sequence[int] = SEEDS, count: int = TASKS, policies: Sequence[governor.Policy] = POLICIES
) -> dict[str, Any]:
    """Run a case under all policies. Return energy above the optimum, late tasks and errors."""
    joules = dict.fromkeys((*policies, "optimum"), 0.0)
    late = dict.fromkeys(policies, 0)
    time, power, first = [], [], 0
    for seed in seeds:
        known = record_profile(case.law, case.recorded, random.Random(f"record {case.name} {seed}"))
        points, tasks = known.operating_points(), create_jobs(case, seed, count)
        joules["optimum"] += math.fsum(optimal_energy(case, points, job) for job in tasks[TRAINING:])
        for policy in policies:
            still = policy in ("max", "board")
            tally = (
                run_fixed_clocks(case, policy, seed, count) if still else run_policy(case, policy, seed, count, known)
            )
            joules[policy] += math.fsum(tally.joules[TRAINING:])
            late[policy] += sum(tally.late[FIRST:])
            if policy == "energy":
                first += sum(tally.late[:FIRST])
                each = estimation_errors(case, points, tally.known[TRAINING], tasks[TRAINING].work)
                time.append(each[0])
                power.append(each[1])
    judged = len(seeds) * (count - FIRST)
    return {
        "case": case.name,
        "tasks": len(seeds) * count,
        "joules": {name: round(value, 1) for name, value in joules.items()},
        "above_optimum_percent": {name: round(100 * (joules[name] / joules["optimum"] - 1), 2) for name in policies},
        "late_percent": {name: round(100 * late[name] / judged, 2) for name in policies},
        "late_of_the_first": first,
        "time_error_percent": round(100 * statistics.fmean(time), 2),
        "power_error_percent": round(100 * statistics.fmean(power), 2),
        "power_errors_percent": [round(100 * each, 2) for each in power],  # by seed
    }


def create_cases(board: PhysicsLaw) -> list[GovernorCase]:
    return [
        GovernorCase("GPU, as recorded", board, "cuda", "cuda", 0.0005),
        GovernorCase("GPU, waits for memory", board, "cuda", "cuda", 0.1),
        GovernorCase("CPU, as recorded", board, "cpu", "cpu", 0.05),
        GovernorCase("GPU, CPU recorded", board, "cpu", "cuda", 0.05),
    ]


def aggregate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate the rows of one physics, in per cent.

    `power_error_sure` is the standard error of the mean error of power over seeds, or None for one seed.
    """
    ours, least = (math.fsum(row["joules"][name] for row in rows) for name in ("energy", "optimum"))
    seeds = [statistics.fmean(each) for each in zip(*(row["power_errors_percent"] for row in rows), strict=True)]
    return {
        "above_optimum": round(100 * (ours / least - 1), 2),
        "late": max(row["late_percent"]["energy"] for row in rows),
        "time_error": round(math.fsum(row["time_error_percent"] for row in rows) / len(rows), 2),
        "power_error": round(math.fsum(row["power_error_percent"] for row in rows) / len(rows), 2),
        "power_error_sure": round(statistics.stdev(seeds) / math.sqrt(len(seeds)), 2) if len(seeds) > 1 else None,
    }


def evaluate_laws(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    rows = {name: [evaluate_case(case, seeds) for case in create_cases(law)] for name, law in LAWS.items()}
    return {name: {"rows": each, "whole": aggregate_rows(each)} for name, each in rows.items()}


def build_figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    bars = {"joules above the optimum": "above_optimum", "tasks late": "late", "time off": "time_error"}
    most = {"above_optimum": 3.0, "late": 2.0, "time_error": 10.0, "power_error": 6.0}
    return {
        f"{name}, {law}": compare_at_most(each["whole"][key], most[key], "%")
        for law, each in found.items()
        for name, key in {**bars, "power off": "power_error"}.items()
    }


def format_rows(law: str, found: Mapping[str, Any]) -> list[str]:
    rows, sure = found["rows"], found["whole"]["power_error_sure"]
    first = rows[0]
    text = [
        f"physics that is not the governor's model, {law}: {first['tasks']} tasks of each kind, 12 points recorded,",
        f"errors of {100 * NOISE:.0f} %; standard error of power off, all kinds together: {sure} %",
        f"joules above the optimum's from task {TRAINING + 1} on, and late tasks from task {FIRST + 1} on, %:",
        f"{'':24} {'max':>7} {'paper':>7} {'board':>7} {'ours':>7}   {'late: paper':>11} {'board':>6} {'ours':>6}"
        f"   {'time off':>8} {'power off':>9}",
    ]
    for row in rows:
        above, late = row["above_optimum_percent"], row["late_percent"]
        numbers = " ".join(f"{above[policy]:7.1f}" for policy in POLICIES)
        text.append(
            f"{row['case']:24} {numbers}   {late['paper']:11.1f} {late['board']:6.1f} {late['energy']:6.1f}"
            f"   {row['time_error_percent']:8.1f} {row['power_error_percent']:9.1f}"
        )
    return text
