"""Benchmark of energy-planned rounds against other deadline rules, on a simulated fleet.

Every rule runs the same job through the coordinator's own rounds on virtual time, with the boards' own governor, and
each seed draws the same partition, boards and first weights for all rules. Joules are those of all boards of a round's
cohort from its opening to its end, waiting at idle power included. Each rule trains for the same number of epochs of
the whole cohort in a round; what it comes to is told as accuracy on images that no device has.

The network is small; so that a round is not over before a message would be through, a board's arithmetic and memory
traffic take SCALE times as long. That changes no ratio of boards or points.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import profiles
from fedquilt.console import progress
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import energy_scheduling
from fedquilt.coordinator.rounds.events import AnyEvent, CohortSelected, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, OperatingPoint, evaluation
from fedquilt.costs import cost_model
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice, SimulationTraits
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import energy_front
from fedquilt.tools.experiments.tables import confidence_interval
from fedquilt.tools.lab import demo
from fedquilt.tools.report.thresholds import compare_at_most
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation import run as simulation
from fedquilt.tools.simulation.agents import FleetPlan
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import make_local_backend

BOARDS: Final = ("jetson-nano", "jetson-tx2", "jetson-orin-nano", "jetson-orin-nx")  # idle powers are known: _idle_w
DEVICES, ROUNDS, EPOCHS = 8, 30, 4
SEEDS: Final = (0, 1, 2)
SCALE: Final = 4e5
NOISE, SPREAD = 0.1, 0.25  # as in `deadlines`
RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "predicted": {"deadline": "predicted"},
    "paper": {"deadline": "paper"},
    "energy, even": {"deadline": "energy", "most_work": 1.0},  # every board for as many epochs
    "energy": {"deadline": "energy"},
}
CASES: Final = {"fednova": tuple(RULES), "fedprox": ("predicted", "energy")}  # costs of the others are the same
LONGER: Final = 1.5  # times as many rounds where work is moved, to see when it is as accurate
LAST: Final = 5  # rounds whose accuracies are averaged: that of a single one scatters


@dataclass(frozen=True)
class PlannedRound:
    seconds: float  # from the round before to its end
    joules: float  # of all boards until then, waiting included
    accuracy: float  # after it, on images that no device has: 0..1


@dataclass(frozen=True)
class PlannedRunResult:
    """What a run came to."""

    rounds: Sequence[PlannedRound]
    in_time: float  # share of the tasks

    def accuracy(self, rounds: int) -> float:
        """Mean accuracy of the last rounds of so many."""
        return statistics.fmean(each.accuracy for each in self.rounds[max(rounds - LAST, 0) : rounds])

    def until(self, accuracy: float) -> tuple[float, float] | None:
        for count in range(1, len(self.rounds) + 1):
            if count >= min(LAST, len(self.rounds)) and self.accuracy(count) >= accuracy:
                done = self.rounds[:count]
                return sum(each.joules for each in done), sum(each.seconds for each in done)
        return None


def job_of(method: str, rule: Mapping[str, Any], seed: int, rounds: int) -> settings.JobSettings:
    boards = [f"{BOARDS[i % len(BOARDS)]}?noise={NOISE}&spread={SPREAD}&seed={100 * seed + i}" for i in range(DEVICES)]
    return settings.parse_job(
        {
            "name": "planned",
            "method": method,
            "rounds": rounds,
            "seed": seed,
            "engine": "numpy",
            "params": {"epochs": EPOCHS, "batch": 16, "lr": 0.05},
            "cohort": {"deadline_s": 3600.0, **rule},
            "fleet": {"devices": DEVICES, "boards": boards, "policy": "energy"},
            "data": {"path": str(demo.HERE / "digits.npz"), "partition": "dirichlet", "alpha": 0.5},
            "model": {"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10},
        }
    )


def make(board: str) -> SimulatedDevice:
    name, _, traits = board.partition("?")
    return SimulatedDevice(
        profiles.load_board_profile(name), traits=SimulationTraits.parse(traits), points=_slow_points(name)
    )


@cache
def _slow_points(name: str) -> tuple[OperatingPoint, ...]:
    return tuple(
        msgspec.structs.replace(
            point,
            flops_per_s=point.flops_per_s / SCALE if point.flops_per_s else None,
            bytes_per_s=point.bytes_per_s / SCALE if point.bytes_per_s else None,
        )
        for point in profiles.load_board_profile(name).operating_points()
    )


def play(job: settings.JobSettings, folder: Path, home: Path) -> PlannedRunResult:
    shares, test = FleetPlan(job, folder, home).load_devices()
    members = [DeviceData(f"d{index}", share.train, share.held) for index, share in enumerate(shares)]
    hands, held = make_local_backend(members, together=True, test=test)
    accuracies: dict[int, float] = {}
    with Simulation(job, folder, held, home, make=make) as simulated:
        for each in simulation.run_rounds([simulated], hands):
            if each.completed_rounds and each.completed_rounds not in accuracies:
                tested = hands.evaluate_test_set(each)
                assert tested is not None
                accuracies[each.completed_rounds] = evaluation.main_metric_value(tested)
        if simulated.status != "done":
            raise JobError(f"{simulated.run} has {simulated.final_status}: {simulated.reason}")
        run = simulated.run
    with Store(home) as store:
        return _make_result(job, [fact for _, _, fact in store.read_events(run)], accuracies)


def _make_result(
    job: settings.JobSettings, facts: Sequence[AnyEvent], accuracies: Mapping[int, float]
) -> PlannedRunResult:
    idle_w = {f"d{index}": _idle_w(make(board)) for index, board in enumerate(job.fleet.boards)}
    rounds: list[PlannedRound] = []
    answers: list[UpdateAccepted] = []
    limit_s, in_time, tasks = 0.0, 0, 0
    for fact in facts:
        if isinstance(fact, CohortSelected):
            limit_s = job.cohort.deadline_s if fact.deadline_s is None else fact.deadline_s
        elif isinstance(fact, UpdateAccepted):
            answers.append(fact)
            in_time, tasks = in_time + ((fact.took_s or 0.0) <= limit_s), tasks + 1
        elif isinstance(fact, RoundCommitted):
            usages = {answer.update.device: answer.update.usage for answer in answers}
            joules = sum(
                (usage.energy_j or 0.0) + idle_w[device] * max(fact.took_s - usage.wall_s, 0.0)
                for device, usage in usages.items()
            )
            rounds.append(PlannedRound(fact.took_s, joules, accuracies[len(rounds) + 1]))
            answers = []
    return PlannedRunResult(rounds, in_time / tasks)


def _idle_w(board: SimulatedDevice) -> float:
    assert board.idle_w is not None, (
        f"{board.board} waits at an unknown power: its joules until a round's end have none"
    )
    return board.idle_w


def limit(job: settings.JobSettings, folder: Path) -> energy_scheduling.EnergyPlan | None:
    asks, known = energy_front.predict_work(job, folder, make)
    own, passes = {}, 0
    for (device, ask), name in zip(asks.items(), job.fleet.boards, strict=True):
        board, examples = make(name), known[device][-1].examples
        found = []
        for epochs in range(1, int(ask.epochs * job.cohort.most_work) + 1):
            work = ask.with_epochs(epochs).work.total_for_examples(examples)
            for point in board.points:
                told_s = cost_model.work_seconds(work, point)
                if told_s is not None and point.busy_w is not None:
                    took_s = told_s * board.factor
                    found.append(
                        energy_scheduling.EpochChoice(took_s, (point.busy_w - _idle_w(board)) * took_s, epochs)
                    )
        own[device] = energy_scheduling.DeviceForecast(tuple(found), examples, _idle_w(board))
        passes += ask.epochs * examples
    return energy_scheduling.plan_least_energy(own, passes)


def measure(seeds: Sequence[int] = SEEDS, rounds: int = ROUNDS) -> dict[str, Any]:
    table, shares = [], {}
    for method, rules in CASES.items():
        runs: dict[str, list[PlannedRunResult]] = {rule: [] for rule in rules}
        limits: list[energy_scheduling.EnergyPlan] = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as place:
                for rule in rules:
                    longer = math.ceil(LONGER * rounds) if rule == "energy" else rounds
                    job, home = job_of(method, RULES[rule], seed, longer), Path(place)
                    if not (home / "bundle").exists():
                        prepare.prepare_and_check(job, home / "bundle")
                    runs[rule].append(play(job, home / "bundle", home / rule.replace(" ", "-")))
                    progress.LINE.print_to_stdout(f"{method}, {rule}, seed {seed}: done")
                if (best := limit(job_of(method, RULES["energy"], seed, rounds), home / "bundle")) is not None:
                    limits.append(best)
        table += [_make_row(method, rule, found, runs["predicted"], rounds) for rule, found in runs.items()]
        row, base = table[-1], table[-len(runs)]
        shares[f"joules a round, energy over predicted, {method}"] = compare_at_most(
            row["joules"] / base["joules"], 0.85, "x"
        )
        shares[f"seconds a round, energy over predicted, {method}"] = compare_at_most(
            row["seconds"] / base["seconds"], 1, "x"
        )
        reached = row["joules_to_accuracy"], row["seconds_to_accuracy"]
        for name, share, most in zip(("joules", "seconds"), reached, (0.85, 1), strict=True):
            shares[f"{name} to predicted's accuracy, {method}"] = compare_at_most(
                math.inf if share is None else share, most, "x"
            )
        row["limit_joules"] = round(statistics.fmean(each.joules for each in limits), 1)
        row["limit_seconds"] = round(statistics.fmean(each.seconds for each in limits), 1)
    return {
        "boards": {name: make(name).provenance for name in BOARDS},
        "devices": DEVICES,
        "rounds": rounds,
        "seeds": list(seeds),
        "epochs": EPOCHS,
        "table": table,
        "figures": shares,
    }


def _make_row(
    method: str, rule: str, found: Sequence[PlannedRunResult], base: Sequence[PlannedRunResult], rounds: int
) -> dict[str, Any]:
    pairs = list(zip(found, base, strict=True))
    points = [100 * (each.accuracy(rounds) - other.accuracy(rounds)) for each, other in pairs]
    shares = []
    for each, other in pairs:
        own, theirs = each.until(other.accuracy(rounds)), other.rounds[:rounds]
        if own is not None:
            whole = sum(one.joules for one in theirs), sum(one.seconds for one in theirs)
            shares.append((own[0] / whole[0], own[1] / whole[1]))
    sure = len(shares) == len(pairs)
    return {
        "method": method,
        "deadline": rule,
        "joules": round(statistics.fmean(one.joules for each in found for one in each.rounds[:rounds]), 1),
        "seconds": round(statistics.fmean(one.seconds for each in found for one in each.rounds[:rounds]), 1),
        "accuracy": round(100 * statistics.fmean(each.accuracy(rounds) for each in found), 2),
        "points": [round(value, 2) for value in (statistics.fmean(points), *_interval(points))],
        "in_time_percent": round(100 * statistics.fmean(each.in_time for each in found), 1),
        "joules_to_accuracy": round(statistics.fmean(share for share, _ in shares), 3) if sure else None,
        "seconds_to_accuracy": round(statistics.fmean(share for _, share in shares), 3) if sure else None,
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    return confidence_interval(values) if len(values) > 1 else (-math.inf, math.inf)


def lines(result: dict[str, Any]) -> list[str]:
    told = [
        f"training {result['rounds']} rounds of {result['epochs']} epochs on {result['devices']} boards "
        f"({', '.join(result['boards'])}), real digits,",
        f"seeds {', '.join(map(str, result['seeds']))}; joules of all boards until the round's end, waiting included",
        f"    {'method':8} {'deadline':16} {'J/round':>8} {'s/round':>8} {'accuracy':>8} {'points [95 %]':>22} "
        f"{'in time':>8} {'J, s to it':>12}",
    ]
    for row in result["table"]:
        mean, low, high = row["points"]
        to = row["joules_to_accuracy"], row["seconds_to_accuracy"]
        told.append(
            f"    {row['method']:8} {row['deadline']:16} {row['joules']:8.0f} {row['seconds']:8.1f} "
            f"{row['accuracy']:8.2f} {f'{mean:+.2f} [{low:.2f}, {high:.2f}]':>22} {row['in_time_percent']:7.1f}% "
            + (f"{to[0]:5.2f}x {to[1]:4.2f}x" if None not in to else f"{'never':>12}")
        )
        if "limit_joules" in row:
            told.append(f"    {'':8} {'limit':16} {row['limit_joules']:8.0f} {row['limit_seconds']:8.1f}")
    told.append("    points: accuracy above predicted's, of the same seeds; J, s to it: to predicted's accuracy,")
    told.append("    as shares of predicted's; limit: knowing every board's factor, without reserve or noise")
    return told
