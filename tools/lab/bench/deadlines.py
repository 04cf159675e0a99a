"""Benchmark of the rules for deadlines: tasks in time, and waiting of updates.

Rounds are decided by the coordinator's own code on virtual time, and clocks by the boards' own governor;
boards are simulated from their profiles. A board's times differ from its profile's by a factor of its own,
which nobody is told, and by 10 % from task to task. Ten of forty boards of unequal speed are asked in a
round, and rounds take unequal work. A round goes on until all have answered, so no rule saves time by leaving
work behind; "waiting" is from a device's answer to the end of its round, over all tasks. Joules are those of
the round's boards until its end, waiting at idle power included. There is nothing to move
between boards, as tasks are all alike; `planned_rounds` trains with methods where there is.

Rules under one governor are compared by waiting. Between governors waiting is no cost of its own: one that slows a
board down until the deadline leaves little time to wait, and can still take more joules and longer rounds. So the
coordinator's rule with our governor is judged by joules and seconds a round, beside the paper's rule and governor.
Joules are those of the boards whose idle power is known: what the others draw while they wait nobody knows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgspec

from fedquilt.coordinator.rounds import next_event
from fedquilt.coordinator.rounds.deadline import POLICIES, DeviceWorkload
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobConstants,
    JobStarted,
    JobState,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    apply_event,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import BlobRef, Cost, OperatingPoint, Profile, Update, Usage, WorkEstimate
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.power import governor
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, highest_clocks, learn_segment
from fedquilt.tools.lab.bench import planned_rounds
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures

BOARDS: Final = ("jetson-nano", "jetson-tx2", "jetson-xavier-nx", "jetson-orin-nano")
DEVICES, ASKED, ROUNDS, SEEDS = 40, 10, 30, (0, 1, 2)
NOISE: Final = 0.1  # of a task's time, log-normal
SPREAD: Final = 0.25  # of a board's own factor, likewise
LONGEST_S: Final = 60.0  # a middling round's work at the fastest point of the slowest board, as its profile says
LOOKED: Final = 0.2  # of a task's work, after which the governor looks whether it will be late
NOTHING: Final = Cost(duration_s=0.0)
FETCH_S: Final = (1.0, 3.0)  # what a task takes besides
GOVERNORS: Final = tuple(policy for policy in get_args(governor.Policy) if policy != "board")
STATE: Final = BlobRef(sha256="0" * 64, size=0)


class GovernedBoard:
    """A simulated board and its governor."""

    def __init__(self, name: str, seed: int, policy: governor.Policy) -> None:
        self.device = SimulatedDevice.from_name(f"{name}?noise={NOISE}&spread={SPREAD}&seed={seed}")
        self.profile = Profile(
            device=f"{name}-{seed}",
            board=name,
            memory_bytes=self.device.memory_bytes,
            budget_bytes=self.device.memory_bytes,
            engines=("numpy",),
            versions={},
            points=self.device.points,
        )
        self._rule = governor.GovernorPolicy(policy)
        self._learned = LearnedModel()

    def work(self, work: WorkEstimate, left_s: float) -> Cost:
        """Carry out a task, with so much time until its deadline."""
        points, idle_w = self.device.points, self.device.idle_w
        point = governor.choose_point(self._rule, points, work, left_s, idle_w, self._learned)
        held = self.device.pin_clocks(point or points[0])
        begun, rest = work.scale(LOOKED), work.scale(1 - LOOKED)
        first = self._observe_task(held, begun)
        faster = governor.choose_faster_point(
            self._rule, points, first, rest, left_s - first.seconds, idle_w, self._learned
        )
        if faster is not None:
            held = self.device.pin_clocks(faster)
        second = self._observe_task(held, rest)
        joules = sum(each.seconds * (each.point.busy_w or 0.0) for each in (first, second))
        took = Cost(duration_s=first.seconds + second.seconds, energy_j=joules, point=held.name)
        self.device.task_cost(work, took)  # now it is over
        self._learned = learn_segment(learn_segment(self._learned, first), second)
        return took

    def _observe_task(self, held: OperatingPoint, work: WorkEstimate) -> TaskSegment:
        return TaskSegment(
            held, work, self.device.task_cost(work, NOTHING).duration_s, held.busy_w, highest_clocks(self.device.points)
        )


@dataclass
class DeadlineTally:
    """Result of a job."""

    tasks: int = 0
    in_time: int = 0
    waiting_s: float = 0.0
    joules: float = 0.0  # of all tasks, and of waiting for them and after them
    lasted_s: float = 0.0
    allowed_s: float = 0.0  # deadlines, over rounds


@dataclass
class DeadlineRound:
    began_s: float = 0.0
    limit_s: float = 0.0
    came_s: list[float] = field(default_factory=list)


def works(seed: int, count: int) -> list[WorkEstimate]:
    devices = [SimulatedDevice.from_name(name) for name in BOARDS]
    slowest = min(max(point.flops_per_s or 0.0 for point in device.points) for device in devices)
    roll = random.Random(f"work {seed}")
    return [WorkEstimate(flops=slowest * LONGEST_S * roll.uniform(0.5, 1.5)) for _ in range(count)]


def play(rule: str, policy: governor.Policy, seed: int, count: int = ROUNDS) -> DeadlineTally:
    every = works(seed, count)
    boards = {
        f"{name}-{index:02d}": GovernedBoard(name, 1000 * seed + index, policy)
        for index, name in enumerate(BOARDS * (DEVICES // len(BOARDS)))
    }
    roll, tally, current = random.Random(f"fetch {seed}"), DeadlineTally(), DeadlineRound()
    plan = JobConstants(seed, count, msgspec.convert({"size": ASKED, "deadline": rule}, CohortSettings), 0)
    state = apply_event(JobState(plan), JobStarted(STATE), 0.0)
    now_s = 0.0
    under_way: dict[str, tuple[float, Cost]] = {}  # device -> when it will answer, what its task takes

    def ask(device: str) -> DeviceWorkload:
        return DeviceWorkload(every[state.round], boards[device].profile)

    while state.phase != "done":
        fact: AnyEvent | None = next_event.decide_event(state, now_s, boards, ask)
        if state.phase == "closing":
            fact = RoundCommitted(state.round, STATE, False, {})
        if fact is None:
            device = min(under_way, key=lambda each: under_way[each][0])
            at_s, cost = under_way[device]
            now_s = min(at_s, max(next_event.next_decision_s(state), now_s))
            if now_s < at_s:
                continue
            del under_way[device]
            fact = state.acceptance_event(_make_update(device, state.round, cost), now_s, ask(device))
        began = state.phase == "selecting"
        state = apply_event(state, fact, now_s)
        match fact:
            case CohortSelected():
                if began:
                    current = DeadlineRound(now_s, now_s + state.deadline_s)
                    tally.allowed_s += state.deadline_s
                for device in sorted(set(fact.devices) - under_way.keys()):  # a task that is asked again goes on
                    fetch_s = roll.uniform(*FETCH_S)
                    cost = boards[device].work(every[fact.round], state.deadline_s - fetch_s)
                    under_way[device] = (now_s + fetch_s + cost.duration_s, cost)
            case UpdateAccepted():
                current.came_s.append(now_s)
            case RoundClosed():
                tally.tasks += len(current.came_s)
                tally.in_time += sum(at_s <= current.limit_s for at_s in current.came_s)
                tally.waiting_s += sum(now_s - at_s for at_s in current.came_s)
                for device, update in state.answered.items():
                    idle_w, idle_s = boards[device].device.idle_w, now_s - current.began_s - update.usage.wall_s
                    if idle_w is not None:
                        tally.joules += (update.usage.energy_j or 0.0) + idle_w * idle_s
                tally.lasted_s += now_s - current.began_s
            case _:
                pass
    return tally


def _make_update(device: str, round: int, cost: Cost) -> Update:
    return Update(
        job="bench",
        round=round,
        attempt=0,
        device=device,
        weight=1.0,
        bundles={},
        metrics={},
        usage=Usage(wall_s=cost.duration_s, energy_j=cost.energy_j, point=cost.point),
    )


def measure(seeds: Sequence[int] = SEEDS, count: int = ROUNDS) -> dict[str, Any]:
    table = [
        {"governor": policy, "deadline": rule, **_make_row([play(rule, policy, seed, count) for seed in seeds], count)}
        for policy in GOVERNORS
        for rule in POLICIES
    ]
    of = {(row["governor"], row["deadline"]): row for row in table}
    figures = {}
    for policy in GOVERNORS:
        hits = of[policy, "predicted"]["in_time_percent"]
        figures[f"tasks in time, predicted, governor {policy}"] = compare_at_least(hits, 95, "%")
    waits = {key: row["waiting_s"] for key, row in of.items()}
    waited = waits["paper", "predicted"] / waits["paper", "paper"]
    figures["waiting, predicted over paper, governor paper"] = compare_at_most(waited, 1, "x")
    ours = _ratios_to(of["energy", "predicted"], of["paper", "paper"])
    for name, unit in (("joules", "joules a round"), ("round_s", "seconds a round")):
        figures[f"{unit}, predicted and energy over paper's both"] = compare_at_most(ours[name], 1, "x")
    same = {policy: round(waits[policy, "predicted"] / waits[policy, "paper"], 3) for policy in GOVERNORS}
    training = planned_rounds.measure(seeds, count)
    return {
        "bench": "deadlines",
        "boards": {name: SimulatedDevice.from_name(name).provenance for name in BOARDS},
        "devices": DEVICES,
        "asked": ASKED,
        "rounds": count,
        "seeds": list(seeds),
        "noise": NOISE,
        "slack": CohortSettings().slack,
        "table": table,
        "waiting_predicted_over_paper": same,
        "predicted_and_energy_over_paper": ours,
        "training": training,
        "figures": {**figures, **training["figures"]},
    }


def _ratios_to(row: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {name: round(row[name] / other[name], 3) for name in ("waiting_s", "joules", "round_s")}


def _make_row(tallies: Sequence[DeadlineTally], count: int) -> dict[str, float]:
    tasks = sum(tally.tasks for tally in tallies)
    count *= len(tallies)
    return {
        "tasks": tasks,
        "in_time_percent": round(100 * sum(tally.in_time for tally in tallies) / tasks, 2),
        "waiting_s": round(sum(tally.waiting_s for tally in tallies), 1),
        "waiting_a_task_s": round(sum(tally.waiting_s for tally in tallies) / tasks, 1),
        "joules": round(sum(tally.joules for tally in tallies) / count, 1),
        "round_s": round(sum(tally.lasted_s for tally in tallies) / count, 1),
        "deadline_s": round(sum(tally.allowed_s for tally in tallies) / count, 1),
    }


def lines(result: dict[str, Any]) -> list[str]:
    told = [
        f"{result['rounds']} rounds of {result['asked']} of {result['devices']} simulated boards, seeds "
        f"{', '.join(map(str, result['seeds']))}; times vary by {100 * result['noise']:.0f} %",
        f"    {'governor':9} {'deadline':10} {'in time %':>9} {'waiting s/task':>15} {'J/round':>8} {'round s':>8} "
        f"{'deadline s':>11}",
    ]
    for row in result["table"]:
        told.append(
            f"    {row['governor']:9} {row['deadline']:10} {row['in_time_percent']:9.2f} "
            f"{row['waiting_a_task_s']:15.1f} {row['joules']:8.0f} {row['round_s']:8.1f} {row['deadline_s']:11.1f}"
        )
    ratios = ", ".join(f"{value:.2f} x {policy}" for policy, value in result["waiting_predicted_over_paper"].items())
    told.append(f"    waiting, predicted over paper, by governor: {ratios}")
    waited = result["predicted_and_energy_over_paper"]["waiting_s"]
    told += [
        f"    waiting, deadline predicted and governor energy over paper's both: {waited:.2f} x. This is not judged:",
        "    the paper's boards slow down until the deadline, ours end early and wait at idle power, part of J/round",
    ]
    rests = ", ".join(f"{name} {kind}" for name, kind in result["boards"].items())
    if dark := [name for name in result["boards"] if SimulatedDevice.from_name(name).idle_w is None]:
        told.append(f"    J/round without {', '.join(dark)}, of whose idle power nothing is known")
    told += ["", *planned_rounds.lines(result["training"]), ""]
    return [*told, *format_figures(result), f"    numbers of the profiles: {rests}"]
