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
from fedquilt.coordinator.rounds.deadline import KEPT_DURATIONS, DeviceWorkload, TaskDuration
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

MAX_ROWS: Final = 8  # plans of the front that are printed


@dataclass(frozen=True)
class EnergyFront:
    front: Sequence[EnergyPlan]  # the front, the shortest plan first
    even_front: Sequence[EnergyPlan]  # the front of plans in which every board trains for the job's epochs
    chosen_plan: EnergyPlan  # by the bounds in [cohort]
    predicted_plan: EnergyPlan | None  # the plan by `deadline = "predicted"`, or None without a prediction
    kinds: Mapping[str, str]  # device -> board
    epochs: int  # epochs of the job, or 0 if the method does not allow different epochs
    boards_without_idle_power: Sequence[str] = ()  # joules are without the waiting of these boards


def compute_fronts(job: JobSettings, folder: Path) -> EnergyFront:
    """Return the energy plans of a job, or raise JobError if times or joules on its boards are unknown."""
    workloads, durations = predict_work(job, folder)
    problem = deadline.energy_problem(job.cohort, durations, workloads)
    chosen_plan = problem and deadline.plan_energy(job.cohort, *problem)
    if not problem or not chosen_plan:
        raise JobError(
            f"{job.method} on {', '.join(dict.fromkeys(job.fleet.boards))}: the time or joules of a task are unknown: "
            "name boards in [fleet] whose profiles have operating points with speed and busy_w"
        )
    forecasts, passes = problem
    even_forecasts = {
        device: board._replace(
            choices=tuple(choice for choice in board.choices if choice.epochs == (workloads[device].epochs or 1))
        )
        for device, board in forecasts.items()
    }
    kinds = {device: workload.profile.board for device, workload in workloads.items() if workload.profile}
    limit_s = deadline.decide_by_prediction(job.cohort, durations, workloads).seconds
    return EnergyFront(
        energy_scheduling.pareto_front(forecasts, passes),
        energy_scheduling.pareto_front(even_forecasts, passes),
        chosen_plan,
        None if limit_s is None else _plan_for_deadline(even_forecasts, limit_s),
        kinds,
        max(workload.epochs for workload in workloads.values()),
        sorted(
            {
                workload.profile.board
                for workload in workloads.values()
                if workload.profile and workload.profile.idle_w is None
            }
        ),
    )


def predict_work(
    job: JobSettings, folder: Path, create_device: Callable[[str], Device] | None = None
) -> tuple[dict[str, DeviceWorkload], dict[str, tuple[TaskDuration, ...]]]:
    """Return each device's workload and, if its speed is known, a history of predicted durations."""
    method, fleet = methods.load(job.method), job.fleet
    state = create_initial_state(job, agents.FleetPlan(job, folder, Path()).validate_and_load_bundle(), method)
    engine = choose_job_engine(job, method)
    workloads: dict[str, DeviceWorkload] = {}
    durations: dict[str, tuple[TaskDuration, ...]] = {}
    for index, member in enumerate(single_run.load_devices(job, folder)[0]):
        board = (create_device or boards.create_device)(fleet.boards[index % len(fleet.boards)])
        budget = parse_size(fleet.budgets[index % len(fleet.budgets)])
        profile = messages.profile_message(
            member.device, board, state_machine.Capabilities(budget, (engine,), (job.method,))
        )
        spec = method.send(state, DeviceView(member.device, profile))
        if spec is None or not len(member.train):
            continue
        uneven = method.traits.unequal_epochs
        workload = tasks.predict_workload(spec, ("work",), engine, tasks.DEFAULT_HELD_OUT_SHARE, uneven)._replace(
            profile=profile
        )
        duration_s = workload.predict_duration_s(len(member.train))
        if duration_s is not None:
            duration = TaskDuration(0, duration_s, workload.work_amount, duration_s, duration_s, len(member.train))
            durations[member.device] = (duration,) * KEPT_DURATIONS
        workloads[member.device] = workload
    return workloads, durations


def _plan_for_deadline(forecasts: Mapping[str, DeviceForecast], limit_s: float) -> EnergyPlan:
    # Each board takes its cheapest choice that meets the deadline, or else its fastest choice.
    choices: dict[str, EpochChoice] = {}
    for device, board in forecasts.items():
        in_time = [choice for choice in board.choices if choice.seconds <= limit_s]
        choices[device] = min(in_time or board.choices, key=lambda option: option.joules if in_time else option.seconds)
    end_s = max(choice.seconds for choice in choices.values())
    joules = sum(choice.joules + forecasts[device].idle_w * end_s for device, choice in choices.items())
    return EnergyPlan(end_s, joules, {device: choice.epochs for device, choice in choices.items()})


def print_fronts(job: JobSettings, folder: Path, out: Path | None, format: str) -> int:
    fronts = compute_fronts(job, folder)
    if out is not None:
        disk.write_output(out, plots.render_file(plot_fronts(fronts)))
    if format == "json":
        plans = {
            "front": [plan._asdict() for plan in fronts.front],
            "front_even": [plan._asdict() for plan in fronts.even_front],
            "chosen": fronts.chosen_plan._asdict(),
            "predicted": fronts.predicted_plan and fronts.predicted_plan._asdict(),
            "boards": dict(fronts.kinds),
            "idle_power_unknown": list(fronts.boards_without_idle_power),
        }
        progress.LINE.print_to_stdout(msgspec.json.encode(plans).decode())
    else:
        progress.LINE.print_to_stdout(*format_fronts(fronts, job), *([f"drawn in {out}"] if out is not None else []))
    return 0


def format_fronts(fronts: EnergyFront, job: JobSettings) -> list[str]:
    last_index = len(fronts.front) - 1
    indices = sorted({round(step * last_index / max(MAX_ROWS - 1, 1)) for step in range(MAX_ROWS)})
    plans_by_name = {"": [fronts.front[index] for index in indices], "chosen": [fronts.chosen_plan]}
    plans_by_name |= {"even": [fronts.even_front[-1]] if fronts.epochs and fronts.even_front else []}
    plans_by_name |= {"predicted": [fronts.predicted_plan] if fronts.predicted_plan else []}
    rows = [["", "s a round", "J a round", "epochs"]]
    for name, plans in plans_by_name.items():
        rows += [
            [name, plots.format_number(plan.seconds), plots.format_number(plan.joules), _format_epochs(fronts, plan)]
            for plan in plans
        ]
    if not fronts.epochs:
        rows = [row[:3] for row in rows]
    text = table.format_table(rows, "<>>~" if fronts.epochs else "<>>")
    lines = [f"{len(fronts.kinds)} boards; joules of all of them until the end of the round, idle included", *text]
    lines += [f"without the idle energy of {board} (unknown)" for board in fronts.boards_without_idle_power]
    lines.append('chosen: by deadline = "energy" and its bounds in [cohort]')
    for name, bound, value in (
        ("joules_per_round", job.cohort.joules_per_round, fronts.chosen_plan.joules),
        ("deadline_s", job.cohort.deadline_s, fronts.chosen_plan.seconds),
    ):
        if bound is not None and value > bound * (1 + 1e-9):
            lines.append(f"no plan keeps {name} = {plots.format_number(bound)}: the chosen plan exceeds it least")
            break
    lines += ['predicted: by deadline = "predicted"'] if fronts.predicted_plan else []
    if fronts.epochs:
        lines.append(f"even: the cheapest plan with {fronts.epochs} epochs on every board")
    else:
        lines.append(f"{job.method}: every device trains for the job's epochs; only the round time is chosen")
    return lines


def _format_epochs(fronts: EnergyFront, plan: EnergyPlan) -> str:
    # such as "jetson-nano 1, jetson-orin-nano 6-8"
    by_kind: dict[str, list[int]] = {}
    for device, epochs in sorted(plan.epochs.items()):
        by_kind.setdefault(fronts.kinds[device], []).append(epochs)
    spans = {kind: (min(epochs_of_kind), max(epochs_of_kind)) for kind, epochs_of_kind in by_kind.items()}
    return ", ".join(f"{kind} {low}" + (f"-{high}" if high > low else "") for kind, (low, high) in spans.items())


def plot_fronts(energy_front: EnergyFront) -> plots.Plot:
    fronts = {
        "front": energy_front.front,
        "the same epochs on every board": energy_front.even_front if energy_front.epochs else (),
    }
    lines = [
        plots.PlotLine(name, [plan.seconds for plan in plans], [plan.joules for plan in plans])
        for name, plans in fronts.items()
        if plans
    ]
    lines += [
        plots.PlotLine(name, [plan.seconds], [plan.joules])
        for name, plan in (("chosen", energy_front.chosen_plan), ("predicted", energy_front.predicted_plan))
        if plan is not None
    ]
    return plots.plot_lines(lines, "Joules of a round by its time", "seconds", "joules")
