"""Benchmark of the governor's policies: energy of FedStitch rounds on simulated boards.

The tasks run twice. First as a federation on virtual time with the coordinator's deadlines, once for each policy: all
policies must select the same blocks. Then under the paper's condition, in which each round lasts as long as under
`max`: the energy until the round's end is compared with the minimum over all points of the profile.

Tasks are scaled by SCALE, because the demo's donors are small. The scale changes no ratio. Times and powers are those
of the profiles. A board without a known idle power has no energy and is in no sum.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from fedquilt import extras
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.rounds.events import CohortSelected, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Cost, Device, OperatingPoint, Reading, Usage, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.power import governor
from fedquilt.edge_agent.power.governor import GovernorPolicy, Policy
from fedquilt.models.stitching import stitched_network
from fedquilt.tools.artefacts import export
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import agents
from tests.benches.figures import compare_at_least, compare_at_most

BOARDS: Final = ("jetson-tx2", "jetson-nano", "jetson-xavier-nx", "jetson-orin-nano")
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
SCALE: Final = 3000.0
SEARCH: Final = {"expansions": 3, "k": 2, "depth": 5, "samples": 24, "fit_samples": 48, "finalists": 2, "subrounds": 1}
PAPER_SAVED_PERCENT: Final = {"CIFAR10": 32.3, "CIFAR100": 30.4, "CINIC10": 40.1}  # of `max`; FedStitch, Fig. 8


class ScaledBoard:
    """Simulated board that counts each task as SCALE times its work, and records finished tasks."""

    adjustable = clocks_unchanged = True

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.board, self.memory_bytes = inner.board, inner.memory_bytes
        self.idle_w, self.provenance = inner.idle_w, inner.provenance
        self.points = tuple(
            msgspec.structs.replace(
                point,
                flops_per_s=None if point.flops_per_s is None else point.flops_per_s / SCALE,
                bytes_per_s=None if point.bytes_per_s is None else point.bytes_per_s / SCALE,
            )
            for point in inner.points
        )
        self.tasks: list[WorkEstimate] = []

    def read_sensors(self, now_s: float) -> Reading:
        return Reading()

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        return self._inner.pin_clocks(point)

    def unpin_clocks(self) -> None:
        self._inner.unpin_clocks()

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        """Return the cost of SCALE times the work. Record finished tasks, whose costs have a duration."""
        if measured.duration_s > 0:
            self.tasks.append(work)
        heavy = WorkEstimate(flops=work.flops * SCALE, read_bytes=work.read_bytes * SCALE)
        return self._inner.task_cost(heavy, measured)


@dataclass
class PolicyRun:
    path: Sequence[str] = ()  # blocks of the network
    rounds: dict[int, dict[str, Usage]] = field(default_factory=dict)  # by round and board
    deadlines_s: dict[int, float] = field(default_factory=dict)
    duration_s: dict[int, float] = field(default_factory=dict)  # until the round's last update
    boards: dict[str, ScaledBoard] = field(default_factory=dict)


def run_federation(policy: Policy, folder: Path, search: Mapping[str, int] = SEARCH) -> PolicyRun:
    """Run the demo's job with a smaller search on one board of each kind, and return its results.

    Raise RuntimeError if the job fails.
    """
    job, run = jobs.load_job(demo.HERE / "job.toml"), PolicyRun()
    cohort = msgspec.structs.replace(job.cohort, deadline="predicted", deadline_s=1e6)
    boards = jobs.FleetSettings(devices=len(BOARDS), boards=BOARDS, budgets=("512MB",), policy=policy)
    job = msgspec.structs.replace(job, params=dict(search), cohort=cohort, fleet=boards)
    plan = agents.FleetPlan(job, demo.HERE / "bundle", folder / policy)

    def create_device(name: str) -> Device:
        run.boards[name] = ScaledBoard(devices.create_device(name))
        return run.boards[name]

    with contextlib.redirect_stdout(io.StringIO()):
        name, status = agents.run_fleet_virtually(plan, create_board=create_device)
    if status != "done":
        raise RuntimeError(f"federation with policy {policy!r} ended with status {status!r}")
    with Store(plan.home) as store:
        run.path = [ids[-1] for ids in stitched_network.path_prefixes(export.load_result(store, name).meta["taps"])]
        for _, _, event in store.read_events(name):
            if isinstance(event, CohortSelected):
                run.deadlines_s[event.round] = cohort.deadline_s if event.deadline_s is None else event.deadline_s
            elif isinstance(event, UpdateAccepted):
                board = event.update.device.rsplit("-", 1)[0]
                run.rounds.setdefault(event.round, {})[board] = event.update.usage
                run.duration_s[event.round] = max(run.duration_s.get(event.round, 0.0), event.took_s or 0.0)
    return run


def known_idle_w(boards: Mapping[str, ScaledBoard]) -> dict[str, float]:
    return {name: board.idle_w for name, board in boards.items() if board.idle_w is not None}


def summarise_run(run: PolicyRun) -> dict[str, Any]:
    """Return energies in joules, durations, the share of tasks in time, and the used operating points."""
    idle_w = known_idle_w(run.boards)
    joules = dict.fromkeys(idle_w, 0.0)
    in_time = tasks = 0
    for number, usages in run.rounds.items():
        for board, usage in usages.items():
            limit_s = run.deadlines_s[number]
            in_time, tasks = in_time + (usage.wall_s <= limit_s), tasks + 1
            if board in idle_w:
                assert usage.energy_j is not None, "every point of a simulated board has a power"
                joules[board] += usage.energy_j + idle_w[board] * max(limit_s - usage.wall_s, 0.0)
    points = {board: sorted({str(each[board].point) for each in run.rounds.values()}) for board in run.boards}
    return {
        "joules": {board: round(value, 1) for board, value in joules.items()},
        "fleet_j": round(sum(joules.values()), 1),
        "round_s": round(sum(run.duration_s.values()) / len(run.duration_s), 1),
        "deadline_s": round(sum(run.deadlines_s.values()) / len(run.deadlines_s), 1),
        "in_time": in_time / tasks,
        "points": points,
    }


def shortest_s(board: ScaledBoard, work: WorkEstimate) -> float:
    times = [cost_model.work_seconds(work, point) for point in board.points]
    return min(time for time in times if time is not None)


def energy_until(board: ScaledBoard, point: OperatingPoint, work: WorkEstimate, round_s: float) -> float:
    seconds = cost_model.work_seconds(work, point)
    assert seconds is not None
    assert point.busy_w is not None
    assert board.idle_w is not None
    return point.busy_w * seconds + board.idle_w * max(round_s - seconds, 0.0)


def minimum_energy(board: ScaledBoard, work: WorkEstimate, round_s: float) -> float:
    """Return the least energy in joules until the round ends, of all points that finish the task in time."""
    in_time_points = [
        p for p in board.points if p.busy_w is not None and (cost_model.work_seconds(work, p) or 1e9) <= round_s
    ]
    return min(energy_until(board, point, work, round_s) for point in in_time_points)


def replay_tasks(boards: Mapping[str, ScaledBoard]) -> dict[str, Any]:
    """Return the energy of each policy and board over all rounds, savings and the excess over the minimum.

    Each round waits for the slowest board. Only boards with a known idle power have an energy.
    """
    measured_boards = {name: boards[name] for name in known_idle_w(boards)}
    rows: dict[str, dict[str, float]] = {name: dict.fromkeys((*POLICIES, "cheapest"), 0.0) for name in measured_boards}
    is_always_slowest = dict.fromkeys(boards, True)
    count = min(len(board.tasks) for board in boards.values())
    total_s = 0.0
    for index in range(count):
        round_s = max(shortest_s(board, board.tasks[index]) for board in boards.values())
        total_s += round_s
        for name, board in boards.items():
            work = board.tasks[index]
            is_always_slowest[name] = is_always_slowest[name] and shortest_s(board, work) >= round_s
            if name not in measured_boards:
                continue
            rows[name]["cheapest"] += minimum_energy(board, work, round_s)
            for policy in POLICIES:
                point = governor.choose_operating_point(
                    GovernorPolicy(policy), board.points, work, round_s, board.idle_w
                )
                rows[name][policy] += energy_until(board, point or board.points[0], work, round_s)
    rows["fleet"] = {key: sum(row[key] for row in rows.values()) for key in (*POLICIES, "cheapest")}
    return {
        "rounds": count,
        "round_s": round(total_s / count, 1),
        "joules": {name: {key: round(value, 1) for key, value in row.items()} for name, row in rows.items()},
        "saved_percent": {
            name: {policy: round(100 * (1 - row[policy] / row["max"]), 1) for policy in POLICIES if policy != "max"}
            for name, row in rows.items()
        },
        "above_cheapest_percent": {n: round(100 * (row["energy"] / row["cheapest"] - 1), 2) for n, row in rows.items()},
        "no_time_to_spare": [name for name, is_slowest in is_always_slowest.items() if is_slowest],
    }


def measure() -> dict[str, Any]:
    """Run the demo's federation under each policy, and return its energies, deadlines and judged figures."""
    extras.load_optional("onnxruntime")  # boards without it would wait for others
    with tempfile.TemporaryDirectory() as folder:
        runs = {policy: run_federation(policy, Path(folder)) for policy in POLICIES}
    boards = runs["max"].boards
    replayed, summaries = replay_tasks(boards), {policy: summarise_run(run) for policy, run in runs.items()}
    different_paths = sum(run.path != runs["max"].path for run in runs.values())
    result = {
        "bench": "energy",
        "boards": {
            n: {"provenance": b.provenance, "idle_w": b.idle_w, "points": len(b.points)} for n, b in boards.items()
        },
        "blocks": list(runs["max"].path),
        "federation": summaries,
        "at_the_round_time_of_max": replayed,
        "paper_saved_percent": PAPER_SAVED_PERCENT,
        "figures": {
            "policies_that_chose_other_blocks": compare_at_most(different_paths, 0, "of 4"),
            "energy_saved_against_max": compare_at_least(replayed["saved_percent"]["fleet"]["energy"], 0.0, "%"),
            "energy_above_the_cheapest_there_is": compare_at_most(
                replayed["above_cheapest_percent"]["fleet"], 2.0, "%"
            ),
            "tasks_in_time_under_energy": compare_at_least(100 * summaries["energy"]["in_time"], 95.0, "%"),
        },
    }
    return {**result, "lines": _format_lines(result)}


def _format_lines(result: dict[str, Any]) -> list[str]:
    replayed, boards = result["at_the_round_time_of_max"], result["boards"]
    text = [f"blocks selected under every policy: {' > '.join(result['blocks'])}", ""]
    text.append(
        f"{replayed['rounds']} rounds of {replayed['round_s']} s, as long as under `max`; joules with idle power"
    )
    text.append(f"{'':18} {'max':>9} {'board':>9} {'paper':>9} {'energy':>9} {'cheapest':>9} {'saved':>7}  profile")
    for name, row in replayed["joules"].items():
        numbers = " ".join(f"{row[key]:9.0f}" for key in ("max", "board", "paper", "energy", "cheapest"))
        saved = replayed["saved_percent"][name]["energy"]
        text.append(
            f"{name:18} {numbers} {saved:6.1f}%  {boards[name]['provenance'] if name in boards else ''}".rstrip()
        )
    for name in (name for name in boards if name not in replayed["joules"]):
        text.append(f"{name:18} has no idle power in its profile, so its energy is unknown and not in the sum")
    figures = ", ".join(f"{name} {percent} %" for name, percent in result["paper_saved_percent"].items())
    text.append(f"the paper's savings, compared with the highest clocks on real TX2 boards: {figures}")
    if replayed["no_time_to_spare"]:
        text.append(f"Every round waits for {', '.join(replayed['no_time_to_spare'])}, which cannot save energy.")
    text += ["", "federation with the coordinator's deadlines; joules until each deadline, with idle power"]
    text.append(f"{'policy':18} {'joules':>9} {'of max':>7} {'round s':>9} {'deadline':>9} {'in time':>8}")
    for policy, summary in result["federation"].items():
        share = 100 * summary["fleet_j"] / result["federation"]["max"]["fleet_j"]
        numbers = f"{summary['fleet_j']:9.0f} {share:6.1f}% {summary['round_s']:9.1f} {summary['deadline_s']:9.1f}"
        text.append(f"{policy:18} {numbers} {100 * summary['in_time']:7.0f}%")
    return text
