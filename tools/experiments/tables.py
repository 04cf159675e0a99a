"""Results of a comparison: a table over seeds, costs up to a target, plots and a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import extras, metrics
from fedquilt.console import table, units
from fedquilt.host.disk import write_output
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun
from fedquilt.tools.report import plots, rendering

COSTS: Final = ("rounds", "bytes", "energy_j", "seconds", "real_s")
COST_NAMES: Final = {"energy_j": "joules", "real_s": "real_seconds"}
FILE_NAMES: Final = {"joules": "energy", "seconds": "board-time", "real_seconds": "real-time"}


def make_result(
    job: str, runs: Sequence[SeedRun], target: float | None, failed: Sequence[str] = (), note: str = ""
) -> dict[str, Any]:
    return {
        "job": job,
        "accuracy_on": "test set" if any(run.tested for run in runs) else "held-out shares",
        "note": note,
        "metric": find_main_metric(runs).name,
        "target": target,
        "table": make_rows(runs, target),
        "differences": compare_with_first(runs),
        "failed": list(failed),
        "runs": [msgspec.to_builtins(run) for run in runs],
    }


def make_rows(runs: Sequence[SeedRun], target: float | None) -> list[dict[str, Any]]:
    return [
        make_row(name, [run for run in runs if run.method == name and run.marks], target)
        for name in dict.fromkeys(run.method for run in runs if run.marks)
    ]


def compare_with_first(runs: Sequence[SeedRun]) -> list[dict[str, Any]]:
    """Return the 95 % interval of each method's difference to the first, paired by seed, for two or more seeds."""
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.marks and (value := run.marks[-1].value) is not None:
            values.setdefault(run.method, {})[run.seed] = value
    first, *others = values or [""]
    differences = []
    for name in others:
        paired = [values[name][seed] - values[first][seed] for seed in values[name].keys() & values[first].keys()]
        if len(paired) > 1:
            interval = confidence_interval(paired)
            differences.append({"method": name, "first": first, "seeds": len(paired), "interval": list(interval)})
    return differences


def make_row(name: str, runs: Sequence[SeedRun], target: float | None) -> dict[str, Any]:
    """Return means over runs that differ in their seeds only.

    A cost is None if it is unknown for a run, and "sd" is None for one seed.
    """
    last_points = [run.marks[-1] for run in runs]
    row: dict[str, Any] = {
        "method": name,
        "seeds": [run.seed for run in runs],
        "accuracy": _compute_mean([point.value for point in last_points]),
        "sd": _compute_deviation([point.value for point in last_points]),
        "held": _compute_mean([point.held for point in last_points]),
        "worst_decile": _compute_mean([point.worst_decile for point in last_points]),
        "best": _compute_mean([_find_best_value(run) for run in runs]),
        "in_all": {cost: _compute_mean([_get_cost(point, cost) for point in last_points]) for cost in COSTS},
    }
    if target is not None:
        reached = [point for run in runs if (point := find_first_reaching(run, target)) is not None]
        row["reached"] = len(reached)
        row["to_target"] = {cost: _compute_mean([_get_cost(point, cost) for point in reached]) for cost in COSTS}
        row["rounds_sd"] = _compute_deviation([float(point.rounds) for point in reached])
    return row


def find_first_reaching(run: SeedRun, target: float) -> EvaluationPoint | None:
    metric = find_main_metric([run])
    reaching_points = (
        point for point in run.marks if point.value is not None and metrics.reaches_target(metric, point.value, target)
    )
    return next(reaching_points, None)


def _find_best_value(run: SeedRun) -> float | None:
    values = [point.value for point in run.marks if point.value is not None]
    return metrics.best_value(find_main_metric([run]), values) if values else None


def find_main_metric(runs: Sequence[SeedRun]) -> metrics.Metric:
    return metrics.METRICS[next((point.metric for run in runs for point in run.marks), "accuracy")]


def _get_cost(point: EvaluationPoint, name: str) -> float | None:
    return float(point.down_bytes + point.up_bytes) if name == "bytes" else getattr(point, name)


def _compute_mean(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return statistics.fmean(known_values) if known_values and len(known_values) == len(values) else None


def _compute_deviation(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return statistics.stdev(known_values) if len(known_values) > 1 and len(known_values) == len(values) else None


def make_table_head(result: dict[str, Any]) -> list[str]:
    metric = metrics.METRICS[result["metric"]]
    unit = " %" if metric.share else ""
    columns = ["method", "seeds", metrics.axis_label(metric), "sd"]
    columns += [f"best{unit}", f"held-out{unit}", f"worst tenth{unit}"]
    costs = ["rounds", "bytes", "J", "board s", "real s"]
    if result["target"] is None:
        return [*columns, *costs]
    return [*columns, f"to {metrics.display_factor(metric) * result['target']:g}{unit}: seeds", *costs]


def format_table_cells(result: dict[str, Any]) -> list[list[str]]:
    rows, scale = [], metrics.display_factor(metrics.METRICS[result["metric"]])
    for row in result["table"]:
        cells = [row["method"], str(len(row["seeds"]))]
        values = [row[name] for name in ("accuracy", "sd", "best", "held", "worst_decile")]
        cells += [_format_value(value, scale, 2 if scale > 1 else 4) for value in values]
        costs = row["in_all"]
        if result["target"] is not None:
            costs = row["to_target"]
            cells.append(f"{row['reached']} of {len(row['seeds'])}")
        transferred_bytes = costs["bytes"]
        cells += [
            _format_value(costs["rounds"], 1, 1),
            "-" if transferred_bytes is None else units.format_bytes(round(transferred_bytes)),
        ]
        cells += [_format_cost(costs[name]) for name in ("energy_j", "seconds", "real_s")]
        rows.append(cells)
    return rows


def format_table(result: dict[str, Any]) -> list[str]:
    if not result["table"]:
        return ["no run has finished"]
    body = [make_table_head(result), *format_table_cells(result)]
    notes = (part for line in make_table_notes(result) for part in table.fold_line(line))
    return [*table.format_table(body, "<>"), "", *notes]


def make_table_notes(result: dict[str, Any]) -> list[str]:
    metric = metrics.METRICS[result["metric"]]
    article = "an" if metric.title[0] in "aRM" and metric.title != "macro F1" else "a"
    cost_note = (
        f"costs: of whole runs; --target A counts them up to {article} {metric.title}"
        if result["target"] is None
        else f"costs: to the first evaluation at or {'above' if metric.higher else 'below'} the target, means over the "
        "seeds that reached it"
    )
    return [
        *([result["note"]] if result["note"] else []),
        *(_format_difference(difference, metric) for difference in result["differences"]),
        f"{metric.title}: on the {result['accuracy_on']} after the last round, mean and sd over seeds; "
        "best: of any round",
        cost_note,
        "J: energy of tasks, predicted by profiles; board s: duration of rounds there; real s: on this machine",
    ]


def _format_difference(difference: Mapping[str, Any], metric: metrics.Metric) -> str:
    scale = metrics.display_factor(metric)
    low, high = (f"{scale * bound:+.{2 if scale > 1 else 4}f}" for bound in difference["interval"])
    names, unit = f"{difference['method']} minus {difference['first']}", " points" if metric.share else ""
    return f"{names}: 95 % interval [{low}, {high}]{unit} of {metric.title}, paired by {difference['seeds']} seeds"


def _format_value(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def _format_cost(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def make_plots(runs: Sequence[SeedRun], target: float | None) -> dict[str, plots.Plot]:
    """Return plots by file name: accuracy over each cost, and the final accuracy.

    Lines are means over seeds with a band of one standard deviation.
    """
    by_method = {name: [run for run in runs if run.method == name] for name in dict.fromkeys(r.method for r in runs)}
    plots_by_file = {
        f"accuracy-{FILE_NAMES.get(x, x)}.svg": plot for x, plot in make_cost_plots(by_method, target).items()
    }
    metric = find_main_metric(runs)
    factor, label = metrics.display_factor(metric), _axis_label(runs)
    ends = [
        plots.DotRow(
            name,
            [factor * run.marks[-1].value for run in method_runs if run.marks and run.marks[-1].value is not None],
        )
        for name, method_runs in by_method.items()
    ]
    max_value = 100.0 if metric.share else math.inf
    title = f"{metric.title[0].upper()}{metric.title[1:]} at the end, a dot for each seed"
    plots_by_file["accuracy-end.svg"] = plots.plot_dots(ends, title, label, max_value=max_value)
    return plots_by_file


def make_cost_plots(by_name: Mapping[str, Sequence[SeedRun]], target: float | None = None) -> dict[str, plots.Plot]:
    runs = [run for method_runs in by_name.values() for run in method_runs]
    metric = find_main_metric(runs)
    factor, max_value = metrics.display_factor(metric), 100.0 if metric.share else math.inf
    level = None if target is None else factor * target
    heading, plots_by_cost = metric.title[0].upper() + metric.title[1:], {}
    has_bands = any(len(method_runs) > 1 for method_runs in by_name.values())
    legend = ", band: standard deviation" * has_bands + ", dotted: target" * (level is not None)
    for cost, title, unit in (
        ("rounds", "by round", "rounds"),
        ("bytes", "by bytes", "B, down and up"),
        ("energy_j", "by energy", "J of the boards, predicted"),
        ("seconds", "by the boards' time", "s of the slowest board"),
        ("real_s", "by this machine's time", "s"),
    ):
        lines, largest = [], 0.0
        for name, method_runs in by_name.items():
            line = _make_mean_line(name, method_runs, cost)
            if line is not None:
                lines.append(line)
                largest = max([largest, *line.x])
        if not lines:
            continue
        is_unscaled = cost == "rounds" or (cost in ("seconds", "real_s") and largest >= 1)
        scale, prefix = (1.0, "") if is_unscaled else units.select_prefix(largest)
        scaled = [
            plots.PlotLine(mean_line.name, [x / scale for x in mean_line.x], mean_line.y, mean_line.low, mean_line.high)
            for mean_line in lines
        ]
        plots_by_cost[COST_NAMES.get(cost, cost)] = plots.plot_lines(
            scaled, f"{heading} {title}{legend}", prefix + unit, _axis_label(runs), level=level, max_value=max_value
        )
    return plots_by_cost


def _axis_label(runs: Sequence[SeedRun]) -> str:
    kind, metric = "test" if any(run.tested for run in runs) else "held-out", find_main_metric(runs)
    return f"{kind} {metric.title}{', %' * metric.share}"


def _make_mean_line(name: str, runs: Sequence[SeedRun], cost: str) -> plots.PlotLine | None:
    # Return None if a cost is unknown. The line has only numbers of rounds that all seeds have.
    by_rounds = [{point.rounds: point for point in run.marks if point.value is not None} for run in runs]
    common = sorted(set.intersection(*map(set, by_rounds))) if by_rounds else []
    x, y, low, high = [], [], [], []
    metric = find_main_metric(runs)
    factor, max_value = metrics.display_factor(metric), 1.0 if metric.share else math.inf
    for number in common:
        points = [points[number] for points in by_rounds]
        mean_cost = _compute_mean([_get_cost(point, cost) for point in points])
        value = _compute_mean([point.value for point in points])
        if mean_cost is None or value is None:
            return None
        spread = _compute_deviation([point.value for point in points]) or 0.0
        x.append(mean_cost)
        y.append(factor * value)
        low.append(factor * max(value - spread, 0.0))
        high.append(factor * min(value + spread, max_value))
    banded = len(runs) > 1
    return plots.PlotLine(name, x, y, low if banded else (), high if banded else ()) if x else None


def write_files(result: dict[str, Any], runs: Sequence[SeedRun], out: Path) -> tuple[list[str], str]:
    """Write compare.json and, with the extra `report`, the plots and compare.html into `out`.

    Returns:
        The names of the files, and the reason for a missing report, or "".
    """
    files, problem = {"compare.json": msgspec.json.format(msgspec.json.encode(result)).decode() + "\n"}, ""
    try:
        files |= _make_report(result, runs)
    except ModuleNotFoundError as error:
        problem = f"no report: {extras.missing_message(error.name or '')}"
    for name, text in files.items():
        write_output(out / name, text)
    return list(files), problem


def _make_report(result: dict[str, Any], runs: Sequence[SeedRun]) -> dict[str, str]:
    pictures = make_plots(runs, result["target"]) if result["table"] else {}
    files = {name: plots.render_file(plot) for name, plot in pictures.items()}
    params = [f"{run.method}: {msgspec.json.encode(run.params).decode()}" for run in runs]
    files["compare.html"] = rendering.render_page(
        "compare.html",
        job=result["job"],
        metric=metrics.METRICS[result["metric"]].title,
        accuracy_on=result["accuracy_on"],
        table=rendering.HtmlTable(make_table_head(result), format_table_cells(result)),
        notes=make_table_notes(result),
        plots=rendering.render_plots(*pictures.values()),
        params=list(dict.fromkeys(params)),
        failed=result["failed"],
    )
    return files


T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # for 1 to 10 degrees of freedom


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of two or more values."""
    mean = statistics.fmean(values)
    half_width = t_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean - half_width, mean + half_width


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t. From 11 degrees of freedom on, 4 digits are correct."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
