"""Trade-off between duration and energy of a job's rounds.

The boards are those of the job's [fleet] with the examples of its [data], and follow their profiles. The plans are
for a round in which all devices take part and have taken part before, so times include the usual reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import methods
from fedquilt.console import progress, table
from fedquilt.coordinator.rounds import deadline, energy_scheduling
from fedquilt.coordinator.rounds.deadline import RECENT, DeviceWorkload, TaskDuration
from fedquilt.coordinator.rounds.energy_scheduling import DeviceForecast, EnergyPlan, EpochChoice
from fedquilt.coordinator.settings import JobSettings, create_initial_state
from fedquilt.coordinator.updates import tasks
from fedquilt.core import Device, DeviceView, JobError
from fedquilt.edge_agent import devices as boards
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.settings import parse_size
from fedquilt.host import disk
from fedquilt.tools.experiments import single_run
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import agents
from fedquilt.tools.simulation.simulated_job import choose_job_engine

ROWS: Final = 8  # of the front, that are printed


@dataclass(frozen=True)
class EnergyFront:
    moved: Sequence[EnergyPlan]  # the front, the shortest plan first
    even: Sequence[EnergyPlan]  # the front of plans in which every board trains for the job's epochs
    chosen: EnergyPlan  # by the bounds in [cohort]
    predicted: EnergyPlan | None  # the round as `deadline = "predicted"` has it; None: it predicts nothing
    kinds: Mapping[str, str]  # device -> board
    epochs: int  # of the job; 0: its method has the same of each board
    dark: Sequence[str] = ()  # boards whose idle power is not known: joules are without their waiting


def compute_fronts(job: JobSettings, folder: Path) -> EnergyFront:
    asks, known = predict_work(job, folder)
    problem = deadline.energy_problem(job.cohort, known, asks)
    chosen = problem and deadline.plan_energy(job.cohort, *problem)
    if not problem or not chosen:
        raise JobError(
            f"{job.method} on {', '.join(dict.fromkeys(job.fleet.boards))}: time or joules of a task are not known; "
            "name boards in [fleet] whose profiles have operating points with speed and busy_w"
        )
    own, passes = problem
    alike = {
        device: board._replace(
            choices=tuple(choice for choice in board.choices if choice.epochs == (asks[device].epochs or 1))
        )
        for device, board in own.items()
    }
    kinds = {device: ask.profile.board for device, ask in asks.items() if ask.profile}
    limit_s = deadline.decide_by_prediction(job.cohort, known, asks).seconds
    return EnergyFront(
        energy_scheduling.pareto_front(own, passes),
        energy_scheduling.pareto_front(alike, passes),
        chosen,
        None if limit_s is None else _plan_for_deadline(alike, limit_s),
        kinds,
        max(ask.epochs for ask in asks.values()),
        sorted({ask.profile.board for ask in asks.values() if ask.profile and ask.profile.idle_w is None}),
    )


def predict_work(
    job: JobSettings, folder: Path, make: Callable[[str], Device] | None = None
) -> tuple[dict[str, DeviceWorkload], dict[str, tuple[TaskDuration, ...]]]:
    """Return the predicted work of each device, and predicted times of its last rounds."""
    method, fleet = methods.load(job.method), job.fleet
    state = create_initial_state(job, agents.FleetPlan(job, folder, Path()).validate_and_load_bundle(), method)
    engine = choose_job_engine(job, method)
    asks: dict[str, DeviceWorkload] = {}
    known: dict[str, tuple[TaskDuration, ...]] = {}
    for index, member in enumerate(single_run.load_devices(job, folder)[0]):
        board = (make or boards.create_device)(fleet.boards[index % len(fleet.boards)])
        budget = parse_size(fleet.budgets[index % len(fleet.budgets)])
        profile = messages.profile_message(
            member.device, board, state_machine.Capabilities(budget, (engine,), (job.method,))
        )
        order = method.send(state, DeviceView(member.device, profile))
        if order is None or not len(member.train):
            continue
        uneven = method.traits.unequal_epochs
        ask = tasks.predict_workload(order, ("work",), engine, tasks.HELD, uneven)._replace(profile=profile)
        took_s = ask.predict_duration_s(len(member.train))
        if took_s is not None:
            took = TaskDuration(0, took_s, ask.work_amount, took_s, took_s, len(member.train))
            known[member.device] = (took,) * RECENT
        asks[member.device] = ask
    return asks, known


def _plan_for_deadline(own: Mapping[str, DeviceForecast], limit_s: float) -> EnergyPlan:
    # each board takes its cheapest choice that meets the deadline, or else its fastest
    picked: dict[str, EpochChoice] = {}
    for device, board in own.items():
        in_time = [choice for choice in board.choices if choice.seconds <= limit_s]
        picked[device] = min(in_time or board.choices, key=lambda each: each.joules if in_time else each.seconds)
    end_s = max(choice.seconds for choice in picked.values())
    joules = sum(choice.joules + own[device].idle_w * end_s for device, choice in picked.items())
    return EnergyPlan(end_s, joules, {device: choice.epochs for device, choice in picked.items()})


def print_fronts(job: JobSettings, folder: Path, out: Path | None, format: str) -> int:
    """Print the energy plans of a job, and draw them into `out` if given. Return 0."""
    found = compute_fronts(job, folder)
    if out is not None:
        disk.write_output(out, plots.render_file(plot_fronts(found)))
    if format == "json":
        plans = {
            "front": [each._asdict() for each in found.moved],
            "front_even": [each._asdict() for each in found.even],
            "chosen": found.chosen._asdict(),
            "predicted": found.predicted and found.predicted._asdict(),
            "boards": dict(found.kinds),
            "idle_power_unknown": list(found.dark),
        }
        progress.LINE.print_to_stdout(msgspec.json.encode(plans).decode())
    else:
        progress.LINE.print_to_stdout(*format_fronts(found, job), *([f"drawn in {out}"] if out is not None else []))
    return 0


def format_fronts(found: EnergyFront, job: JobSettings) -> list[str]:
    last = len(found.moved) - 1
    places = sorted({round(step * last / max(ROWS - 1, 1)) for step in range(ROWS)})
    named = {"": [found.moved[at] for at in places], "chosen": [found.chosen]}
    named |= {"even": [found.even[-1]] if found.epochs and found.even else []}
    named |= {"predicted": [found.predicted] if found.predicted else []}
    rows = [["", "s a round", "J a round", "epochs"]]
    for name, plans in named.items():
        rows += [
            [name, plots.format_number(plan.seconds), plots.format_number(plan.joules), _format_epochs(found, plan)]
            for plan in plans
        ]
    if not found.epochs:
        rows = [row[:3] for row in rows]
    text = table.format_table(rows, "<>>~" if found.epochs else "<>>")
    told = [f"{len(found.kinds)} boards; joules of all of them until the end of the round, idle included", *text]
    told += [f"without the waiting of {each}, whose idle power nobody knows" for each in found.dark]
    told.append('chosen: by deadline = "energy" and its bounds in [cohort]')
    for name, bound, reached in (
        ("joules_per_round", job.cohort.joules_per_round, found.chosen.joules),
        ("deadline_s", job.cohort.deadline_s, found.chosen.seconds),
    ):
        if bound is not None and reached > bound * (1 + 1e-9):
            told.append(f"no plan keeps {name} = {plots.format_number(bound)}: chosen is the one that comes nearest")
            break
    told += ['predicted: by deadline = "predicted"'] if found.predicted else []
    if found.epochs:
        told.append(f"even: the cheapest plan with {found.epochs} epochs on every board")
    else:
        told.append(f"{job.method}: each device trains as the job says; only the round time is chosen")
    return told


def _format_epochs(found: EnergyFront, plan: EnergyPlan) -> str:
    # such as "jetson-nano 1, jetson-orin-nano 6-8"
    by_kind: dict[str, list[int]] = {}
    for device, epochs in sorted(plan.epochs.items()):
        by_kind.setdefault(found.kinds[device], []).append(epochs)
    spans = {kind: (min(each), max(each)) for kind, each in by_kind.items()}
    return ", ".join(f"{kind} {low}" + (f"-{high}" if high > low else "") for kind, (low, high) in spans.items())


def plot_fronts(found: EnergyFront) -> plots.Plot:
    fronts = {"front": found.moved, "the same epochs on every board": found.even if found.epochs else ()}
    drawn = [
        plots.PlotLine(name, [plan.seconds for plan in plans], [plan.joules for plan in plans])
        for name, plans in fronts.items()
        if plans
    ]
    drawn += [
        plots.PlotLine(name, [plan.seconds], [plan.joules])
        for name, plan in (("chosen", found.chosen), ("predicted", found.predicted))
        if plan is not None
    ]
    return plots.plot_lines(drawn, "Joules of a round by its time", "seconds", "joules")
