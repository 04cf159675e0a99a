"""Code of fedstitch.toml: costs of our runs and of the paper's schedule, and the memory of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import JobError
from fedquilt.tools.experiments.papers import cells, claims, fedstitch_runs
from fedquilt.tools.experiments.papers.cells import Cell
from fedquilt.tools.experiments.papers.fedstitch_runs import alone, searched, trained, unfolded
from fedquilt.tools.experiments.papers.grid import Grid
from fedquilt.tools.report import plots
from fedquilt.tools.report.figures import compare_at_least

__all__ = ["alone", "lines", "picture", "searched", "trained", "unfolded", "whole"]  # named by fedstitch.toml

PAPER: Final = {"speed-up": 8.12, "memory": 79.5, "energy": 89.41}  # the paper's largest savings: times as fast, %, %
PAPER_BATCH: Final = 128  # batch size for the memory of tasks, and hence for who takes part
WIDTHS: Final = (7, 13, 7, 8, 9, 9, 6, 13, 11, 9, 10)  # of columns, in characters
OURS: Final = "FedStitch"


def whole(
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


def _measure_peaks(cell: Cell, say: Callable[[str], None]) -> dict[str, list[int | None]]:
    given, folder = cell.case.settings, Path(cell.case.folder)
    if "epochs" in given.params:
        given = msgspec.structs.replace(given, params={**given.params, "epochs": 1, "batch": PAPER_BATCH})
    budgets = given.fleet.budgets
    known = {budget: fedstitch_runs.measure_peak_bytes(folder, given, budget) for budget in dict.fromkeys(budgets)}
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
        plots.Line(
            name,
            *zip(*((s, 100 * accuracy) for s, accuracy in _compute_accuracy_curve(result["runs"][name])), strict=True),
        )
        for name in rows
    ]
    memory = [
        plots.Bar(name, [None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6]) for name, row in rows.items()
    ]
    energy = [
        plots.Bar(name, [row["energy_j"] if row["planned"] is None else row["planned"]["energy_j"]])
        for name, row in rows.items()
    ]
    return plots.render_file(
        plots.plot_lines(
            curves, "Accuracy by the boards' time, as run here", "s of the slowest board", "test accuracy, %"
        ),
        plots.plot_bars(memory, "Memory of a task's process, mean of devices", "MB"),
        plots.plot_bars(energy, "Joules of whole jobs, training by the paper's schedule", "J"),
    )
