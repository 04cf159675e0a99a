"""Seconds and joules of a job's rounds against each other, as `[cohort] deadline = "energy"` plans them.

Boards are those of the job's [fleet] with the examples of its [data], and take what their profiles predict. The plans
are those of a round in which all take part and each has answered some rounds before, so times have the reserve that
they would have then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import columns, disk, methods, progress
from fedquilt.coordinator import deadline, energy_plan, tasks
from fedquilt.coordinator.deadline import RECENT, Ask, Took
from fedquilt.coordinator.energy_plan import Board, Choice, Plan
from fedquilt.coordinator.preflight import first_state
from fedquilt.coordinator.settings import Cohort, Job
from fedquilt.core import Device, DeviceView, JobError
from fedquilt.edge_agent import devices as boards
from fedquilt.edge_agent import events, messages
from fedquilt.edge_agent.settings import size_bytes
from fedquilt.tools.experiments import single_run
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import agents
from fedquilt.tools.simulation.simulated_job import engine_of

ROWS: Final = 8  # of the front, that are printed


@dataclass(frozen=True)
class Front:
    """Plans of one job's rounds."""

    moved: Sequence[Plan]  # the front, the shortest plan first
    even: Sequence[Plan]  # the front of plans in which every board trains for the job's epochs
    chosen: Plan  # by the bounds in [cohort]
    predicted: Plan | None  # the round as `deadline = "predicted"` has it; None: it predicts nothing
    kinds: Mapping[str, str]  # device -> board
    epochs: int  # of the job; 0: its method has the same of each board
    dark: Sequence[str] = ()  # boards whose idle power is not known: joules are without their waiting


def of_job(job: Job, folder: Path) -> Front:
    """Compute the fronts of a job with its bundle.

    Raises:
        JobError: no plan is possible, or as for a simulated run of the job.
        DataError: the data cannot be read.
    """
    asks, known = asked(job, folder)
    problem = deadline.energy_problem(job.cohort, known, asks)
    chosen = problem and deadline.energy_planned(job.cohort, *problem)
    if not problem or not chosen:
        raise JobError(
            f"{job.method} on {', '.join(dict.fromkeys(job.fleet.boards))}: time or joules of a task are not known; "
            "name boards in [fleet] whose profiles have operating points with speed and busy_w"
        )
    own, passes = problem
    alike = {device: _only(board, asks[device].epochs or 1) for device, board in own.items()}
    kinds = {device: ask.profile.board for device, ask in asks.items() if ask.profile}
    limit_s = deadline.predicted(job.cohort, known, asks).seconds
    return Front(
        energy_plan.front(own, passes),
        energy_plan.front(alike, passes),
        chosen,
        None if limit_s is None else _within(alike, limit_s),
        kinds,
        max(ask.epochs for ask in asks.values()),
        sorted({ask.profile.board for ask in asks.values() if ask.profile and ask.profile.idle_w is None}),
    )


def asked(
    job: Job, folder: Path, make: Callable[[str], Device] | None = None
) -> tuple[dict[str, Ask], dict[str, tuple[Took, ...]]]:
    """Work of each device of the job's fleet, and its last rounds, as if they had been as its profile predicts.

    Args:
        job: with its fleet and data.
        folder: its bundle.
        make: makes the board of a name in [fleet]; None: as its profile says.
    """
    method, fleet = methods.load(job.method), job.fleet
    state = first_state(job, agents.Plan(job, folder, Path()).require(), method)
    engine = engine_of(job, method)
    asks: dict[str, Ask] = {}
    known: dict[str, tuple[Took, ...]] = {}
    for index, member in enumerate(single_run.shares(job, folder)[0]):
        board = (make or boards.make)(fleet.boards[index % len(fleet.boards)])
        budget = size_bytes(fleet.budgets[index % len(fleet.budgets)])
        profile = messages.profile(member.device, board, events.Means(budget, (engine,), (job.method,)))
        order = method.send(state, DeviceView(member.device, profile))
        if order is None or not len(member.train):
            continue
        ask = tasks.ask_of(order, ("work",), engine, tasks.HELD, method.uneven)._replace(profile=profile)
        took_s = ask.expected_s(len(member.train))
        if took_s is not None:
            took = Took(0, took_s, ask.amount, took_s, took_s, len(member.train))
            known[member.device] = (took,) * RECENT
        asks[member.device] = ask
    return asks, known


def _only(board: Board, epochs: int) -> Board:
    return board._replace(choices=tuple(choice for choice in board.choices if choice.epochs == epochs))


def _within(own: Mapping[str, Board], limit_s: float) -> Plan:
    """The round as boards make it that know nothing but its deadline: each is at its cheapest until then."""
    picked: dict[str, Choice] = {}
    for device, board in own.items():
        in_time = [choice for choice in board.choices if choice.seconds <= limit_s]
        picked[device] = min(in_time or board.choices, key=lambda each: each.joules if in_time else each.seconds)
    end_s = max(choice.seconds for choice in picked.values())
    joules = sum(choice.joules + own[device].idle_w * end_s for device, choice in picked.items())
    return Plan(end_s, joules, {device: choice.epochs for device, choice in picked.items()})


# -- for people and programs ----------------------------------------------------------------------


def main(job: Job, folder: Path, out: Path | None, format: str) -> int:
    """The verb `fedquilt front`."""
    found = of_job(job, folder)
    if out is not None:
        disk.write(out, plots.alone(plot(found)))
    if format == "json":
        progress.LINE.aside(msgspec.json.encode(table(found)).decode())
    else:
        progress.LINE.aside(*lines(found, job), *([f"drawn in {out}"] if out is not None else []))
    return 0


def table(found: Front) -> dict[str, Any]:
    """For programs: every plan with seconds, joules and each device's epochs."""
    return {
        "front": [each._asdict() for each in found.moved],
        "front_even": [each._asdict() for each in found.even],
        "chosen": found.chosen._asdict(),
        "predicted": found.predicted and found.predicted._asdict(),
        "boards": dict(found.kinds),
        "idle_power_unknown": list(found.dark),
    }


def lines(found: Front, job: Job) -> list[str]:
    """For people: plans from the shortest to the cheapest, and what `chosen` and `predicted` come to."""
    last = len(found.moved) - 1
    places = sorted({round(step * last / max(ROWS - 1, 1)) for step in range(ROWS)})
    named = {"": [found.moved[at] for at in places], "chosen": [found.chosen]}
    named |= {"even": [found.even[-1]] if found.epochs and found.even else []}
    named |= {"predicted": [found.predicted] if found.predicted else []}
    rows = [["", "s a round", "J a round", "epochs"]]
    for name, plans in named.items():
        rows += [[name, plots.short(plan.seconds), plots.short(plan.joules), _epochs(found, plan)] for plan in plans]
    if not found.epochs:
        rows = [row[:3] for row in rows]
    text = columns.table(rows, "<>>~" if found.epochs else "<>>")
    told = [f"{len(found.kinds)} boards; joules of all of them until the end of the round, idle included", *text]
    told += [f"without the waiting of {each}, whose idle power nobody knows" for each in found.dark]
    told.append(f'chosen: by deadline = "energy" and its bounds in [cohort]{_missed(found.chosen, job.cohort)}')
    told += ['predicted: by deadline = "predicted"'] if found.predicted else []
    if found.epochs:
        told.append(f"even: the cheapest plan with {found.epochs} epochs on every board")
    else:
        told.append(f"{job.method}: every board trains as much as the job says; only a round's time is chosen")
    return told


def _missed(plan: Plan, cohort: Cohort) -> str:
    """Line that names the bound of [cohort] that no plan keeps; "": the chosen plan keeps all bounds."""
    for name, bound, reached in (
        ("joules_per_round", cohort.joules_per_round, plan.joules),
        ("seconds_per_round", cohort.seconds_per_round, plan.seconds),
        ("deadline_s", cohort.deadline_s, plan.seconds),
    ):
        if bound is not None and reached > bound * (1 + 1e-9):
            return f"\nno plan keeps {name} = {plots.short(bound)}: chosen is the one that comes nearest"
    return ""


def _epochs(found: Front, plan: Plan) -> str:
    """Epochs of each kind of board: "jetson-nano 1, jetson-orin-nano 6-8"."""
    by_kind: dict[str, list[int]] = {}
    for device, epochs in sorted(plan.epochs.items()):
        by_kind.setdefault(found.kinds[device], []).append(epochs)
    spans = {kind: (min(each), max(each)) for kind, each in by_kind.items()}
    return ", ".join(f"{kind} {low}" + (f"-{high}" if high > low else "") for kind, (low, high) in spans.items())


def plot(found: Front) -> plots.Plot:
    """Joules of a round over its seconds."""
    fronts = {"front": found.moved, "the same epochs on every board": found.even if found.epochs else ()}
    drawn = [plots.Line(name, *_path(plans)) for name, plans in fronts.items() if plans]
    drawn += [
        plots.Line(name, [plan.seconds], [plan.joules])
        for name, plan in (("chosen", found.chosen), ("predicted", found.predicted))
        if plan is not None
    ]
    return plots.lines(drawn, "Joules of a round by its time", "seconds", "joules")


def _path(plans: Sequence[Plan]) -> tuple[list[float], list[float]]:
    return [plan.seconds for plan in plans], [plan.joules for plan in plans]
