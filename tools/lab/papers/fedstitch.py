"""Code of fedstitch.toml: costs of our runs and of the paper's schedule, and the memory of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.coordinator.rounds import cohort_selection
from fedquilt.coordinator.settings import EvaluationSettings, JobSettings
from fedquilt.core import EvaluationSums, Examples, Fit, Hooks, JobError, ModelError, Tensors, Trainer
from fedquilt.data import images
from fedquilt.edge_agent.settings import parse_size
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.artefacts import batchnorm
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.lab.papers import cells, claims
from fedquilt.tools.lab.papers.cells import ExecutionOptions, GridCell, run_with_options
from fedquilt.tools.lab.papers.grid import Grid
from fedquilt.tools.report import plots
from fedquilt.tools.report.thresholds import compare_at_least
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.run import run_rounds as play_all
from fedquilt.tools.simulation.scratch_folders import ScratchFolder
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, SimulatedRound, Simulation
from fedquilt.tools.simulation.task_process import TaskProcess
from fedquilt.tools.simulation.workers.backend import WorkBackend

EPOCHS: Final = 10  # epochs in each of the paper's rounds
SEARCHERS: Final = 2  # number of devices that search alone


def restore_batchnorm(job: Mapping[str, Any], seen: Examples) -> Tensors:
    """Return a donor's weights. Folded batch normalisation is restored with statistics of `seen`."""
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network({"name": job["model"]["name"]}, job["model"]["weights"])
    if batchnorm.is_folded(model):
        given = images.prepare_images(seen.x, msgspec.convert(job["input"], images.ImageInput))
        batchnorm.restore_statistics(model, torch.from_numpy(given))
    return {name: value.numpy() for name, value in model.state_dict().items()}


def run_search(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    return run_with_options(job, folder, how, workers=1, together=True)


def run_single_devices(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    """Run FedStitch on SEARCHERS devices, each alone. Their runs are in `figures` under "alone"."""
    every = [member.device for member in single_run.load_devices(job, folder)[0]]
    names = cohort_selection.select_cohort(job.seed, 0, every, SEARCHERS)
    runs = [
        run_with_options(
            job, folder, how, workers=1, pick=lambda members, name=name: [m for m in members if m.device == name]
        )
        for name in names
    ]
    return msgspec.structs.replace(runs[-1], figures={"alone": [msgspec.to_builtins(run) for run in runs]})


def run_training(job: JobSettings, folder: Path, how: ExecutionOptions) -> SeedRun:
    """Run a training method. The costs of the paper's schedule are in `figures` under "planned"."""
    run = run_with_options(job, folder, how, workers=1)
    rounds = int(how.row.paper["rounds"][0])
    planned = msgspec.structs.replace(job, rounds=rounds, params={**job.params, "epochs": EPOCHS})
    return msgspec.structs.replace(run, figures={"planned": measure_schedule(planned, folder)})


def measure_schedule(given: JobSettings, folder: Path) -> dict[str, float]:
    """Return simulated seconds and joules of a whole job, run without training.

    The cost of a task on a simulated board depends on its work and the number of examples, never on values.
    Selection, declines and bytes are therefore as in a real run, while the weights stay unchanged.

    Raises:
        JobError: If the run has failed.
        ModelError: If a board's profile has no power, so that its energy is unknown.
    """
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    unchecked = msgspec.structs.replace(given, check=EvaluationSettings())
    rounds: list[SimulatedRound] = []

    def observe(simulation: Simulation, hands: WorkBackend) -> None:
        rounds[:] = simulation.rounds

    members, engine = single_run.load_devices(given, folder)[0], FrozenEngine(TorchEngine(ROOM_BYTES))
    for _ in iterate_states(unchecked, folder, members, engine=engine, observe=observe):
        pass
    joules = [round.energy_j for round in rounds if round.energy_j is not None]
    if len(joules) < len(rounds):
        raise ModelError("a simulated board does not tell what it spends: the schedule's joules are not known")
    return {
        "rounds": given.rounds,
        "seconds": sum(round.duration_s for round in rounds),
        "energy_j": sum(joules),
    }


class FrozenEngine:
    """Engine that trains without any step and evaluates the first example only."""

    def __init__(self, engine: Trainer) -> None:
        self.name, self._engine = engine.name, engine

    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        return dict(start), {"loss": 0.0, "steps": 0.0}

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        return self._engine.evaluate(network, model, Examples(examples.x[:1], examples.y[:1]), hooks=hooks)


def measure_peak_bytes(folder: Path, given: JobSettings, budget: str) -> int | None:
    """Return the peak memory of a task process in one round of training or a whole search.

    The device is alone in its job and has the first share of the examples. The result is None if it declines because
    the budget is too small.

    Raises:
        ModelError: If a task failed, or the kernel reports no peaks.
    """
    alone = msgspec.structs.replace(
        given,
        cohort=msgspec.structs.replace(given.cohort, size=0, attempts=1),
        check=EvaluationSettings(),
        fleet=msgspec.structs.replace(given.fleet, budgets=(budget,)),
    )
    member, engine = single_run.load_devices(given, folder)[0][0], methods.load(given.method).engines[0]
    peaks: list[int] = []
    with ScratchFolder() as scratch:
        own = scratch / "own.npz"
        np.savez(own, x_train=member.train.x, y_train=member.train.y)
        data = {"path": str(own)}
        with (
            TaskProcess(given.method, engine, parse_size(budget), data, Path, scratch) as process,
            Simulation(alone, folder, {member.device: 0}, scratch / "home", engine=engine) as simulation,
        ):

            def run_requests(asked: Sequence[tuple[Simulation, WorkRequest]]) -> list[WorkResult]:
                outcomes = [process.run_request(order) for _, order in asked]
                for outcome in outcomes:
                    if outcome.code != "ok":
                        raise ModelError(f"a task of {given.method} in {budget}: {outcome.reason}")
                    if outcome.peak_bytes is None:
                        raise ModelError("this kernel does not tell what a process has held at most")
                    peaks.append(outcome.peak_bytes)
                return outcomes

            for each in play_all([simulation], run_requests):
                if "epochs" in given.params and each.rounds:
                    break
    return max(peaks, default=None)


__all__ = [
    "lines",
    "picture",
    "restore_batchnorm",
    "run_search",
    "run_single_devices",
    "run_table",
    "run_training",
]  # named by fedstitch.toml
PAPER: Final = {"speed-up": 8.12, "memory": 79.5, "energy": 89.41}  # the paper's largest savings: times as fast, %, %
PAPER_BATCH: Final = 128  # batch size for the memory of tasks, and hence for who takes part
WIDTHS: Final = (7, 13, 7, 8, 9, 9, 6, 13, 11, 9, 10)  # of columns, in characters
OURS: Final = "FedStitch"


def run_table(
    table: str, grid: Grid, seeds: Sequence[int], rounds: int | None, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a table and return its result. Claims are judged with the default number of rounds only.

    Raises:
        JobError: If FedStitch, the reference of all comparisons, is not among the rows, or a run has failed.
    """
    if OURS not in grid.rows:
        raise JobError(f"{table} compares every row with {OURS}: name {OURS} in --rows too")
    todo = cells.make_cells(grid, "fedstitch", table, seeds, rounds, [""], out)
    found = cells.run_all([cell.case for cell in todo], out, say)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in grid.rows}
    for cell in todo:
        run = msgspec.to_builtins(found[cell.case])
        figures = run.pop("figures")
        runs[cell.row] += [{**each, **figures} for each in figures.pop("alone", [run])]
    peaks = {cell.row: _measure_peaks(cell, say) for cell in todo[: len(grid.rows)] if cell.row != "Local"}
    peaks["Local"] = peaks[OURS]
    rows = {
        name: _summarise_row(runs[name], peaks[name], runs[OURS], row.paper.get("test"))
        for name, row in grid.rows.items()
    }
    fleet = {"devices": grid.job["fleet"]["devices"], "asked": grid.job["cohort"]["size"]}
    figures = _judge_claims(rows, runs) if rounds is None else {}
    return {"table": table, "seeds": list(seeds), **fleet, "rows": rows, "runs": runs, "figures": figures}


def _measure_peaks(cell: GridCell, say: Callable[[str], None]) -> dict[str, list[int | None]]:
    given, folder = cell.case.settings, Path(cell.case.folder)
    if "epochs" in given.params:
        given = msgspec.structs.replace(given, params={**given.params, "epochs": 1, "batch": PAPER_BATCH})
    budgets = given.fleet.budgets
    known = {budget: measure_peak_bytes(folder, given, budget) for budget in dict.fromkeys(budgets)}
    told = ", ".join(f"{'-' if peak is None else f'{peak / 1e6:.0f}'} MB of {b}" for b, peak in known.items())
    say(f"memory, {cell.row}: {told}")
    return {budget: [known[budget]] * budgets.count(budget) for budget in known}


# -- results --------------------------------------------------------------------------------------


def _summarise_row(
    runs: Sequence[Mapping[str, Any]],
    peaks: Mapping[str, Sequence[int | None]],
    ours: Sequence[Mapping[str, Any]],
    paper: Sequence[float] | None,
) -> dict[str, Any]:
    # "to_equal" is the time in seconds until the mean accuracy reaches that of FedStitch, or None for never
    last = [run["marks"][-1] for run in runs]
    devices = [peak for each in peaks.values() for peak in each]
    known = [peak for peak in devices if peak is not None]
    goal = statistics.fmean(each["marks"][-1]["test"] for each in ours)
    planned = [run["planned"] for run in runs if "planned" in run]
    accuracies = [mark["test"] for mark in last]
    return {
        "accuracy": statistics.fmean(accuracies),
        "sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "takes_part": len(known) / len(devices),
        "rounds": statistics.fmean(mark["rounds"] for mark in last),
        "seconds": statistics.fmean(mark["seconds"] for mark in last),
        "energy_j": statistics.fmean(mark["energy_j"] for mark in last),
        "real_s": statistics.fmean(mark["real_s"] for mark in last),
        "down_bytes": statistics.fmean(mark["down_bytes"] for mark in last),
        "up_bytes": statistics.fmean(mark["up_bytes"] for mark in last),
        "peak_bytes": statistics.fmean(known) if known else None,
        "most_bytes": max(known, default=None),
        "peaks": {budget: each[0] for budget, each in peaks.items()},
        "to_equal": next((seconds for seconds, accuracy in _compute_accuracy_curve(runs) if accuracy >= goal), None),
        "planned": {key: statistics.fmean(each[key] for each in planned) for key in ("seconds", "energy_j")}
        if planned
        else None,
        "paper": paper and paper[0],
    }


def _compute_accuracy_curve(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    count = min(len(run["marks"]) for run in runs)
    marks = [[run["marks"][index] for run in runs] for index in range(count)]
    return [
        (statistics.fmean(mark["seconds"] for mark in each), statistics.fmean(mark["test"] for mark in each))
        for each in marks
    ]


def compute_savings(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return per training method the speed-up of FedStitch, and its savings of memory and energy in %."""
    ours = rows[OURS]
    return {
        name: {
            "speed-up": row["planned"]["seconds"] / ours["seconds"],
            "memory": 100 * (1 - ours["peak_bytes"] / row["peak_bytes"]),
            "most": 100 * (1 - ours["most_bytes"] / row["most_bytes"]),
            "energy": 100 * (1 - ours["energy_j"] / row["planned"]["energy_j"]),
        }
        for name, row in rows.items()
        if row["planned"] is not None and row["peak_bytes"] is not None
    }


def _judge_claims(
    rows: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    # each claim is about the method over which FedStitch gains least. Memory is measured with one seed
    found, ours = compute_savings(rows), rows[OURS]["seconds"]
    if not found:
        return {}
    equal = [rows[name]["to_equal"] / ours for name in found if rows[name]["to_equal"] is not None]

    def find_least(what: str) -> float:
        return min(each[what] for each in found.values())

    def find_least_by_seed(what: str, ratio: Callable[[float, float], float]) -> list[float]:
        mine = average_by_seed(runs[OURS], lambda run: run["marks"][-1][what])
        plans = [average_by_seed(runs[name], lambda run: run["planned"][what]) for name in found]
        each = [[ratio(plan[seed], mine[seed]) for seed in mine] for plan in plans]
        return min(each, key=statistics.fmean)

    faster = find_least_by_seed("seconds", lambda planned, mine: planned / mine)
    saved = find_least_by_seed("energy_j", lambda planned, mine: 100 * (1 - mine / planned))
    return {
        "speed-up over the paper's schedule, least": claims.judge_claim(faster, "times", at_least=1.0),
        "energy saved of the paper's schedule, least": claims.judge_claim(saved, "%", at_least=1.0),
        "memory saved, mean of devices, least": compare_at_least(find_least("memory"), 1.0, "%"),
        "memory saved, largest of devices, least": compare_at_least(find_least("most"), 1.0, "%"),
        **({"speed-up to equal accuracy, least": compare_at_least(min(equal), 1.0, "times")} if equal else {}),
    }


def average_by_seed(runs: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
    seeds = dict.fromkeys(run["seed"] for run in runs)
    return {seed: statistics.fmean(value(run) for run in runs if run["seed"] == seed) for seed in seeds}


def judge_lead(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any]:
    mine, theirs = (average_by_seed(runs[each], lambda run: 100 * run["marks"][-1]["test"]) for each in (OURS, name))
    return claims.judge_claim([mine[seed] - theirs[seed] for seed in mine], "points", at_least=0.0)


def lines(result: Mapping[str, Any]) -> list[str]:
    rows, seeds = result["rows"], ", ".join(map(str, result["seeds"]))
    found = [
        f"{result['table']}: CIFAR-10, {result['devices']} devices, {result['asked']} in a round; seeds {seeds}",
        _format_row(
            "", "takes", "accuracy", "paper", "board", "to", "", "real", "peak MB", "MB down", "paper", "schedule"
        ),
        _format_row("", "part %", "%", "%", "s", "equal s", "J", "s", "mean / most", "/ up", "s", "J"),
    ]
    for name, row in rows.items():
        spread = f"{100 * row['accuracy']:.1f}" + (f" ± {100 * row['sd']:.1f}" if row["sd"] is not None else "")
        paper = "-" if row["paper"] is None else f"{row['paper']:.1f}"
        held = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} / {row['most_bytes'] / 1e6:.0f}"
        equal = "" if name == OURS else "never" if row["to_equal"] is None else f"{row['to_equal']:.2f}"
        sent = f"{row['down_bytes'] / 1e6:.0f} / {row['up_bytes'] / 1e6:.0f}"
        planned = (
            ["", ""] if row["planned"] is None else [f"{row['planned'][key]:.0f}" for key in ("seconds", "energy_j")]
        )
        run = [f"{row['seconds']:.2f}", equal, f"{row['energy_j']:.1f}", f"{row['real_s']:.0f}"]
        found.append(_format_row(name, f"{100 * row['takes_part']:.0f}", spread, paper, *run, held, sent, *planned))
    found.append("FedStitch beside the paper's schedule of each: times as fast, % of memory (mean), % of joules saved")
    for name, each in compute_savings(rows).items():
        found.append(f"  {name:20} {each['speed-up']:8.1f} {each['memory']:8.1f} {each['energy']:8.1f}")
    found.append(f"  {'the paper, at most':20} {PAPER['speed-up']:8.2f} {PAPER['memory']:8.1f} {PAPER['energy']:8.2f}")
    found.append("FedStitch's accuracy over that of others, by seed")
    found += [f"  {name:20} {claims.format_claim(judge_lead(result['runs'], name))}" for name in rows if name != OURS]
    return [*found, *claims.format_figures(result)]


def _format_row(name: str, *cells: str) -> str:
    return f"{name:20}" + "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def picture(result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    curves = [
        plots.PlotLine(
            name,
            *zip(*((s, 100 * accuracy) for s, accuracy in _compute_accuracy_curve(result["runs"][name])), strict=True),
        )
        for name in rows
    ]
    memory = [
        plots.PlotBar(name, [None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6])
        for name, row in rows.items()
    ]
    energy = [
        plots.PlotBar(name, [row["energy_j"] if row["planned"] is None else row["planned"]["energy_j"]])
        for name, row in rows.items()
    ]
    return plots.render_file(
        plots.plot_lines(
            curves, "Accuracy by the boards' time, as run here", "s of the slowest board", "test accuracy, %"
        ),
        plots.plot_bars(memory, "Memory of a task's process, mean of devices", "MB"),
        plots.plot_bars(energy, "Joules of whole jobs, training by the paper's schedule", "J"),
    )
