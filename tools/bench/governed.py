"""The governor on boards whose physics is not its model: a profile is recorded, then tasks are worked for.

The board is recorded as `fedquilt record` does it, at twelve points, with NOISE on all that is measured. Then it works
for tasks of one kind, of unequal size, with deadlines between tight and ample, under the agent's own power management
on virtual time. Each task's time and power have errors of their own, of which nobody is told. The same tasks are worked
for under each policy, and at the point that is cheapest in time by the physics (the optimum: every point is tried).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from fedquilt.core import Cost, OperatingPoint, Reading, Work
from fedquilt.edge_agent.power import governor, learned
from fedquilt.edge_agent.power.learned import Learned
from fedquilt.edge_agent.power.task_power import Pacer
from fedquilt.profiles import Board
from fedquilt.tools.bench.physics import Engine, Physics
from fedquilt.tools.bench.physics_tables import Tabled
from fedquilt.tools.board import measure, record
from fedquilt.tools.report.figures import figure

NOISE: Final = 0.05  # of each time and power that is measured, log-normal
SIZES_S: Final = (20.0, 60.0)  # of a task at the fastest point
ALLOWED: Final = (1.15, 3.0)  # deadlines over that time
STEP_S: Final = 0.5  # of virtual time
TOLD: Final = 0.025  # share of a task after which its process tells how far it is
TRAINING: Final = 10  # tasks before what is judged
FIRST: Final = 2  # tasks that may be late in any case: nobody knows yet what they are
POLICIES: Final[tuple[governor.Policy, ...]] = ("max", "paper", "board", "energy")
SEEDS, TASKS = tuple(range(20)), 20


class Law(Protocol):
    """Physics that judges the governor."""

    idle_w: float

    def top(self) -> dict[str, float]:
        """Highest clocks by axis, in hertz."""
        ...

    def seconds(self, work: Work, engine: Engine, clocks: Mapping[str, float | None]) -> float:
        """Time of the work."""
        ...

    def watts(self, work: Work, engine: Engine, clocks: Mapping[str, float | None]) -> float:
        """Mean power of the board during the work."""
        ...

    def own_clocks(self, work: Work, engine: Engine) -> dict[str, float | None]:
        """Clocks at which the board's own governor works for it."""
        ...

    def lists(self) -> dict[str, tuple[float, ...]]:
        """Frequencies by axis, rising, in hertz."""
        ...


@dataclass(frozen=True)
class Case:
    """A kind of task on a board."""

    name: str
    law: Law
    recorded: Engine  # what `record` measured with
    engine: Engine  # what tasks run on
    bytes_per_flop: float


@dataclass(frozen=True)
class Job:
    """One task: its work, the seconds allowed, and the factors of its time and power."""

    work: Work
    left_s: float
    slow: float
    draw: float


@dataclass
class Tally:
    """Outcome of the tasks of a case under one policy."""

    joules: list[float] = field(default_factory=list)  # of each task until its deadline, idle included
    late: list[bool] = field(default_factory=list)  # and would not have been at the fastest point
    known: list[Learned] = field(default_factory=list)  # before each task


def profile(law: Law, engine: Engine, roll: random.Random) -> Board:
    """Record the board: arithmetic and traffic at the points that `fedquilt record` chooses."""
    arithmetic, traffic = Work(flops=1e11, read_bytes=1e7), Work(read_bytes=1e10)

    def measured(value: float) -> float:
        return value * roll.lognormvariate(0.0, NOISE)

    done = []
    for point in measure.chosen(measure.candidates(law.lists())):
        clocks = measure.clocks_of(point)
        seen = msgspec.structs.replace(
            point,
            flops_per_s=measured(arithmetic.flops / law.seconds(arithmetic, engine, clocks)),
            bytes_per_s=measured(traffic.read_bytes / law.seconds(traffic, engine, clocks)),
            busy_w=measured(law.watts(arithmetic, engine, clocks)),
        )
        done.append(measure.Measured(seen, 10, 1.0))
    recording = measure.Recording(law.idle_w, tuple(done), (), "a simulated meter", 1.0)
    facts = record.Facts("simulated", 8 << 30, "Simulated physics, not a board.")
    return record.profile(recording, facts, law.lists()).board


class Simulated:
    """Board of a law, with a meter; it stands still unless `pass_` lets time pass."""

    board, memory_bytes, provenance, adjustable, holds = "simulated", 8 << 30, "measured", True, True

    def __init__(self, case: Case, known: Board) -> None:
        self.case, self.points = case, known.operating_points()
        self.idle_w: float | None = case.law.idle_w
        self.held: OperatingPoint | None = None
        self._job: Job | None = None
        self._counted_j = 0.0

    def load(self, job: Job | None) -> None:
        """Begin a task, or end it."""
        self._job = job

    def clocks(self) -> dict[str, float | None]:
        """Present clocks."""
        if self.held is not None:
            return measure.clocks_of(self.held)
        return self.case.law.own_clocks(self._job.work, self.case.engine) if self._job else {}

    def pass_(self, seconds: float) -> float:
        """Let time pass; returns the share of the task that was done in it."""
        if self._job is None:
            self._counted_j += self.case.law.idle_w * seconds
            return 0.0
        law, work, engine, clocks = self.case.law, self._job.work, self.case.engine, self.clocks()
        self._counted_j += law.watts(work, engine, clocks) * self._job.draw * seconds
        return seconds / (law.seconds(work, engine, clocks) * self._job.slow)

    def read(self, now_s: float) -> Reading:
        """Joules of the whole board."""
        return Reading(energy_j=self._counted_j, energy_source="simulated")

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold a point."""
        self.held = point
        return point

    def release(self) -> None:
        """Release the clocks."""
        self.held = None

    def cost(self, work: Work, measured: Cost) -> Cost:
        """The measured cost."""
        return measured


def jobs(case: Case, seed: int, count: int) -> list[Job]:
    """Tasks of a case, the same for every policy."""
    roll = random.Random(f"tasks {case.name} {seed}")
    unit = Work(flops=1e9, read_bytes=1e9 * case.bytes_per_flop)
    unit_s, found = case.law.seconds(unit, case.engine, case.law.top()), []
    for _ in range(count):
        fast_s = roll.uniform(*SIZES_S)
        work = Work(flops=unit.flops * fast_s / unit_s, read_bytes=unit.read_bytes * fast_s / unit_s)
        factors = (roll.lognormvariate(0.0, NOISE), roll.lognormvariate(0.0, NOISE))
        found.append(Job(work, fast_s * roll.uniform(*ALLOWED), *factors))
    return found


def spent(case: Case, job: Job, clocks: Mapping[str, float | None]) -> tuple[float, float]:
    """Seconds of a task that stays at its clocks, and joules until its deadline."""
    seconds = case.law.seconds(job.work, case.engine, clocks) * job.slow
    watts = case.law.watts(job.work, case.engine, clocks) * job.draw
    return seconds, watts * seconds + case.law.idle_w * max(job.left_s - seconds, 0.0)


def optimum(case: Case, points: Sequence[OperatingPoint], job: Job) -> float:
    """Fewest joules of a task in time, at the point that the physics names; the errors of this task nobody knows."""

    def told(point: OperatingPoint) -> tuple[bool, float]:
        clocks, plain = measure.clocks_of(point), Job(job.work, job.left_s, 1.0, 1.0)
        seconds, joules = spent(case, plain, clocks)
        return seconds > job.left_s, joules

    return spent(case, job, measure.clocks_of(min(points, key=told)))[1]


def play(case: Case, policy: governor.Policy, seed: int, count: int, known: Board) -> Tally:
    """Work for the tasks of a case under a policy."""
    board, tally, state, now_s = Simulated(case, known), Tally(), Learned(), 0.0
    pacer = Pacer(board, governor.Rule(policy))
    for job in jobs(case, seed, count):
        tally.known.append(state)
        began_s, before_j, done, told = now_s, board.read(now_s).energy_j or 0.0, 0.0, 0.0
        pacer.begin(now_s)
        board.load(job)
        pacer.loaded(job.work, now_s + job.left_s, state, now_s)
        while done < 1.0:
            left_s = (1.0 - done) * case.law.seconds(job.work, case.engine, board.clocks()) * job.slow
            step_s = min(STEP_S, left_s)
            done = 1.0 if step_s == left_s else done + board.pass_(step_s)
            if done == 1.0:
                board.pass_(step_s)
            now_s += step_s
            pacer.sample(now_s)
            if done < 1.0 and done >= told + TOLD:
                told = done
                pacer.progress(done, now_s)
        state = pacer.end(job.work, now_s - began_s, now_s).learned
        board.load(None)
        took_s = now_s - began_s
        rest_s = max(job.left_s - took_s, 0.0)
        tally.joules.append((board.read(now_s).energy_j or 0.0) - before_j + case.law.idle_w * rest_s)
        possible = spent(case, job, case.law.top())[0] <= job.left_s
        tally.late.append(took_s > job.left_s and possible)
        board.pass_(rest_s)
        now_s += rest_s
    return tally


def stand(case: Case, policy: governor.Policy, seed: int, count: int) -> Tally:
    """The same tasks at clocks that do not depend on what is known: the highest, or those of the board's governors."""
    tally, top = Tally(), case.law.top()
    for job in jobs(case, seed, count):
        clocks = top if policy == "max" else case.law.own_clocks(job.work, case.engine)
        seconds, joules = spent(case, job, clocks)
        tally.joules.append(joules)
        tally.late.append(seconds > job.left_s >= spent(case, job, top)[0])
    return tally


def errors(case: Case, points: Sequence[OperatingPoint], state: Learned, work: Work) -> tuple[float, float]:
    """Mean relative errors of time and power, over the points that some deadline of ALLOWED lets a task run at."""
    found = learned.estimates(state, points, work)
    fast_s = case.law.seconds(work, case.engine, case.law.top())
    time, power = [], []
    for point, each in zip(points, found, strict=True):
        clocks = measure.clocks_of(point)
        true_s = case.law.seconds(work, case.engine, clocks)
        if each is None or each.watts is None or true_s > ALLOWED[1] * fast_s:
            continue
        time.append(abs(each.seconds / true_s - 1))
        power.append(abs(each.watts / case.law.watts(work, case.engine, clocks) - 1))
    return math.fsum(time) / len(time), math.fsum(power) / len(power)


LAWS: Final[Mapping[str, Law]] = {"voltage floor": Physics(), "voltage tables": Tabled()}


def judge(
    case: Case, seeds: Sequence[int] = SEEDS, count: int = TASKS, policies: Sequence[governor.Policy] = POLICIES
) -> dict[str, Any]:
    """One row of the table: joules over the optimum's, per cent, of the tasks after TRAINING; late tasks; errors."""
    joules = dict.fromkeys((*policies, "optimum"), 0.0)
    late = dict.fromkeys(policies, 0)
    time, power, first = [], [], 0
    for seed in seeds:
        known = profile(case.law, case.recorded, random.Random(f"record {case.name} {seed}"))
        points, tasks = known.operating_points(), jobs(case, seed, count)
        joules["optimum"] += math.fsum(optimum(case, points, job) for job in tasks[TRAINING:])
        for policy in policies:
            still = policy in ("max", "board")
            tally = stand(case, policy, seed, count) if still else play(case, policy, seed, count, known)
            joules[policy] += math.fsum(tally.joules[TRAINING:])
            late[policy] += sum(tally.late[FIRST:])
            if policy == "energy":
                first += sum(tally.late[:FIRST])
                each = errors(case, points, tally.known[TRAINING], tasks[TRAINING].work)
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


def cases(board: Law) -> list[Case]:
    """Kinds of tasks: like what was recorded, waiting for memory, on the CPU, and on a GPU that was not recorded."""
    return [
        Case("GPU, as recorded", board, "cuda", "cuda", 0.0005),
        Case("GPU, waits for memory", board, "cuda", "cuda", 0.1),
        Case("CPU, as recorded", board, "cpu", "cpu", 0.05),
        Case("GPU, CPU recorded", board, "cpu", "cuda", 0.05),
    ]


def whole(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All kinds of tasks together, per cent: joules of `energy` above the optimum's, most late tasks, mean errors.

    `power_error_sure` is the standard error of the mean error of power, over seeds; None: of one seed nobody knows.
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


def on_every_law(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """All kinds of tasks on every physics: rows, and what they come to together."""
    rows = {name: [judge(case, seeds) for case in cases(law)] for name, law in LAWS.items()}
    return {name: {"rows": each, "whole": whole(each)} for name, each in rows.items()}


def figures(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bars of each physics, none of which is the governor's own model."""
    bars = {"joules above the optimum": "above_optimum", "tasks late": "late", "time off": "time_error"}
    most = {"above_optimum": 3.0, "late": 2.0, "time_error": 10.0, "power_error": 6.0}
    return {
        f"{name}, {law}": figure(each["whole"][key], most[key], "%")
        for law, each in found.items()
        for name, key in {**bars, "power off": "power_error"}.items()
    }


def lines(law: str, found: Mapping[str, Any]) -> list[str]:
    """The rows of one physics for people."""
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
