"""Sections of a run's page as values for its template. Sections without content are None or empty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fedquilt import metrics
from fedquilt.console import units
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.selection import REASONS
from fedquilt.coordinator.views import event_messages, run_summary, scores
from fedquilt.coordinator.views.round_outcomes import DeviceOutcome
from fedquilt.coordinator.views.run_summary import CostLedger, RunSummary
from fedquilt.core import evaluation
from fedquilt.tools.report import plots
from fedquilt.tools.report.rendering import HtmlTable, PageSection, render_plots
from fedquilt.tools.report.run_data import RunData

MATRIX_DEVICES, MATRIX_ROUNDS = 60, 120
MEANINGS: Final = {
    "answered": "update received",
    "asked": "selected, no update in time",
    "declined": "declined",
    "refused": "update rejected",
    "drawn": "eligible, not drawn",
    **REASONS,
}
COLOURED_OUTCOMES: Final = {
    **{code: MEANINGS[code] for code in ("answered", "asked", "declined", "refused")},
    "barred": "not eligible: offline, busy, hot, ...",
    "drawn": MEANINGS["drawn"],
}
T = TypeVar("T")
MAX_BARS = 40  # bars in one plot
MAX_ROUNDS = 40  # likewise
MAX_CLASSES = 30  # classes of a confusion matrix
TIME_PARTS = ("task", "down, start and up", "waiting")
TIMELINE_ROUNDS = 5  # rounds of which the timeline is drawn
MAX_LOG_LINES = 1000


@dataclass(frozen=True)
class DeviceMatrix:
    keys: Sequence[tuple[str, str]]  # CSS class of each colour that occurs, and its meaning
    heads: Sequence[tuple[str, int]]  # number of a round, and its colspan
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]  # device, and the CSS class and tooltip of each round
    notes: Sequence[str]


def make_device_matrix(parts: Mapping[int, Mapping[str, DeviceOutcome]], final: int | None) -> DeviceMatrix:
    """Return the devices' outcomes in the latest rounds. `final` is the round of the final evaluation."""
    numbers = sorted(parts)[-MATRIX_ROUNDS:]
    device_names = sorted({name for number in numbers for name in parts[number]})
    names = device_names[:MATRIX_DEVICES]

    def make_cell(number: int, name: str) -> tuple[str, str]:
        part = parts[number].get(name)
        if part is None:
            return "", ""
        round_name = event_messages.format_round_name(number, final)
        return (part.code if part.code in COLOURED_OUTCOMES else "barred"), f"{round_name}, {name}: {part.text}"

    rows = [(name, [make_cell(number, name) for number in numbers]) for name in names]
    occurring_codes = {code for _, cells in rows for code, _ in cells}
    step = max(1, -(-len(numbers) // 12), 2 if max(numbers, default=0) > 9 and len(numbers) > 1 else 1)
    heads = [
        ("final" if numbers[i] == final else str(numbers[i] + 1), len(numbers[i : i + step]))
        for i in range(0, len(numbers), step)
    ]
    codes = Counter(part.code for devices in parts.values() for part in devices.values())
    summary = ", ".join(f"{MEANINGS.get(code, code)}: {count}" for code, count in codes.most_common())
    hidden = [f"{len(device_names) - len(names)} more devices"] if len(device_names) > len(names) else []
    hidden += [f"{len(parts) - len(numbers)} earlier rounds"] if len(parts) > len(numbers) else []
    notes = [f"Over all rounds and devices: {summary}."]
    notes += [f"{' and '.join(hidden)} are not shown.".capitalize()] if hidden else []
    return DeviceMatrix(
        [(code, text) for code, text in COLOURED_OUTCOMES.items() if code in occurring_codes], heads, rows, notes
    )


def make_tiles(run: RunData) -> list[tuple[str, str]]:
    total, tiles, title = run.summary.total, [], _find_main_metric(run).title
    if run.scores:
        tiles.append((_format_value(run.scores[-1].metric, run.scores[-1].value), f"test {title}"))
    if run.held_out_scores:
        last_score = run.held_out_scores[-1]
        tiles.append((_format_value(last_score.metric, last_score.weighted), f"held-out {title}"))
        tiles.append((_format_value(last_score.metric, last_score.worst_decile), "worst tenth of the devices"))
    last_point = run.points[-1] if run.points else None
    tiles.append((str(last_point.rounds if last_point else 0), "rounds"))
    tiles.append((str(len(run.summary.device_costs())), "devices"))
    if last_point is not None:
        virtual = run.row.has_virtual_time
        tiles.append((format_duration(last_point.clock_s), "virtual time" if virtual else "by the coordinator's clock"))
        tiles.append((format_duration(last_point.real_s), "by this machine's clock"))
    tiles.append((units.format_bytes(total.down_bytes + total.up_bytes), "down and up"))
    if run.row.job.privacy is not None:
        tiles.append((f"{run.summary.state.spent_epsilon:.3g}", f"of epsilon {run.row.job.privacy.epsilon:g} spent"))
    if total.energy_j is not None:
        coverage = "" if total.metered == total.tasks else f", {total.metered} of {total.tasks} tasks"
        tiles.append(
            (f"{run_summary.format_number(total.energy_j)} J", f"of the boards{coverage}{_format_energy_source(run)}")
        )
    return tiles


def make_accuracy_section(run: RunData) -> PageSection:
    if not run.held_out_scores and not run.scores:
        command = f"fedquilt model evaluate {run.row.id} --home {run.home}"
        return PageSection([f"Not measured: the job has [check] every = 0. `{command}` measures it on the test set."])
    notes, table = _summarise_held_out(run)
    plots_by_axis = make_accuracy_plots(run)
    if not plots_by_axis:
        sentences = [
            f"After {score.rounds} rounds: {_format_value(score.metric, score.value)} of {score.examples} examples of "
            "the test set."
            for score in run.scores
        ]
        return PageSection(sentences, (), notes, table)
    return PageSection((), (), notes, table, _render_switch(plots_by_axis))


def make_accuracy_plots(run: RunData) -> dict[str, plots.Plot]:
    """Return plots of the main metric over rounds and each cost, or {} before two evaluations."""
    if len({*(score.rounds for score in run.held_out_scores), *(score.rounds for score in run.scores)}) < 2:
        return {}
    points = {point.rounds: point for point in run.points}
    axes = {"rounds": ("rounds", "by round", {point.rounds: float(point.rounds) for point in run.points})}
    clock = "virtual time" if run.row.has_virtual_time else "coordinator's clock"
    for key, title, label, seconds in (
        ("seconds", "by time", clock, {r: point.clock_s for r, point in points.items()}),
        (
            "board seconds",
            "by the boards' time",
            "slowest board of each round",
            _drop_unknown({r: p.boards_s for r, p in points.items()}),
        ),
    ):
        if any(seconds.values()):
            scale, name = _choose_time_unit(max(seconds.values()))
            axes[key] = (f"{label}, {name}", title, {r: value / scale for r, value in seconds.items()})
    transferred_bytes = {r: float(p.down_bytes + p.up_bytes) for r, p in points.items()}
    scale, prefix = units.select_prefix(max(transferred_bytes.values(), default=0.0))
    axes["bytes"] = (f"{prefix}B, down and up", "by bytes", {r: v / scale for r, v in transferred_bytes.items()})
    joules = _drop_unknown({r: p.energy_j for r, p in points.items()})
    if any(joules.values()):
        scale, prefix = units.select_prefix(max(joules.values()))
        label = f"{prefix}J of the boards, gross{_format_energy_source(run)}"
        axes["joules"] = (label, "by energy", {r: v / scale for r, v in joules.items()})
    metric = _find_main_metric(run)
    heading = _format_metric_heading(metric)
    unit, max_value = (", %", 100.0) if metric.share else ("", math.inf)
    return {
        name: plots.plot_lines(
            _make_accuracy_lines(run, x_by_rounds),
            f"{heading} {title}",
            label,
            metric.title + unit,
            max_value=max_value,
        )
        for name, (label, title, x_by_rounds) in axes.items()
    }


def _render_switch(plots_by_name: Mapping[str, plots.Plot]) -> list[tuple[str, Any]]:
    return list(zip(plots_by_name, render_plots(*plots_by_name.values()), strict=True))


def _format_energy_source(run: RunData) -> str:
    source = run.summary.total.energy_word.strip()
    return f", {source} by profile" if source else ""


def make_confusion_section(run: RunData) -> PageSection | None:
    """Return the confusion matrix of the last score on the test set, or else on the held-out shares."""
    sums = run.scores[-1].evaluation if run.scores else None
    examples_of = "the test set"
    if sums is None:
        held_out_sums = (event.evaluation for _, event in reversed(run.events) if isinstance(event, RoundCommitted))
        sums = next((evaluation_sums for evaluation_sums in held_out_sums if evaluation_sums is not None), None)
        examples_of = "the held-out shares"
    rows = None if sums is None else evaluation.confusion_matrix(sums)
    if rows is None or not any(map(any, rows)):
        return None
    names = scores.class_names(run.row.job, len(rows))
    note = (
        f"Examples of {examples_of} in the last evaluation: a row for each true class, a column for each predicted "
        "class."
    )
    if len(rows) > MAX_CLASSES:
        return PageSection([f"{note} `fedquilt model evaluate --format json` has the {len(rows)} classes."])
    return PageSection([note], render_plots(plots.plot_matrix(rows, names, "Confusion matrix")))


def make_timeline_section(run: RunData) -> PageSection | None:
    """Return bars of each device's waiting, task and transfer times, for a few rounds."""
    durations_s = {event.round: event.took_s for _, event in run.events if isinstance(event, RoundCommitted)}
    started_s: dict[int, float] = {}
    selected_s: dict[tuple[int, str], float] = {}
    # round -> device -> seconds before its selection, until its update, and in its task
    times_by_round: dict[int, dict[str, tuple[float, float, float]]] = {}
    for time_s, event in run.events:
        if isinstance(event, CohortSelected) and not run.row.has_virtual_time:  # events have this machine's clock
            started_s.setdefault(event.round, time_s)
            selected_s |= {(event.round, device): time_s for device in event.devices}
        elif isinstance(event, UpdateAccepted) and event.took_s is not None and event.round in durations_s:
            device = event.update.device
            before_s = selected_s.get((event.round, device), time_s) - started_s.get(event.round, time_s)
            before_s = min(max(before_s, 0.0), max(durations_s[event.round] - event.took_s, 0.0))
            times_by_round.setdefault(event.round, {})[device] = before_s, event.took_s, event.update.usage.wall_s
    if not times_by_round:
        return None
    plots_by_round: dict[str, plots.Plot] = {}
    for number in _select_evenly_spaced(sorted(times_by_round), TIMELINE_ROUNDS):
        ends = sorted(times_by_round[number].items(), key=lambda part: part[1][1])[:MAX_BARS]
        lasted_s = max(durations_s[number], *(answered_s for _, (_, answered_s, _) in ends))
        name = _format_round_name(run, number)
        clock = "virtual time" if run.row.has_virtual_time else "since the round began"
        title = f"Devices in {'the ' * (number == run.summary.final_evaluation_round)}{name}"
        plots_by_round[name] = _plot_timeline(ends, lasted_s, title, clock)
    return PageSection(["The fastest device comes first."], switch=_render_switch(plots_by_round))


def _plot_timeline(
    ends: Sequence[tuple[str, tuple[float, float, float]]], lasted_s: float, title: str, clock: str
) -> plots.Plot:
    scale, prefix = units.select_prefix(lasted_s) if lasted_s < 1 else (1.0, "")
    # without a second selection, parts have the colours of the plot of all rounds
    first = 0 if any(before_s for _, (before_s, _, _) in ends) else 1
    bars = []
    for name, (before_s, answered_s, wall_s) in ends:
        times_s = (before_s, wall_s, max(answered_s - wall_s, 0.0), max(lasted_s - before_s - answered_s, 0.0))
        bars.append(plots.PlotBar(name, [time_s / scale for time_s in times_s[first:]]))
    return plots.plot_bars(bars, title, f"{prefix}s, {clock}", ("before selection", *TIME_PARTS)[first:])


def _make_accuracy_lines(run: RunData, x_by_rounds: Mapping[int, float]) -> list[plots.PlotLine]:
    kinds: dict[str, dict[int, float]] = {
        "test": {score.rounds: score.value for score in run.scores},
        "held-out": {score.rounds: score.weighted for score in run.held_out_scores},
        "worst tenth": {score.rounds: score.worst_decile for score in run.held_out_scores},
    }
    lines, scale = [], metrics.display_factor(_find_main_metric(run))
    for name, values in kinds.items():
        rounds = sorted(number for number in values if number in x_by_rounds)
        if rounds:
            lines.append(plots.PlotLine(name, [x_by_rounds[n] for n in rounds], [scale * values[n] for n in rounds]))
    return lines


def _summarise_held_out(run: RunData) -> tuple[list[str], HtmlTable | None]:
    if not run.held_out_scores:
        return [], None
    scores_to_show = run.held_out_scores
    if len(scores_to_show) > 6:
        scores_to_show = (*scores_to_show[:2], *scores_to_show[-4:])
    rows = [
        [
            str(score.rounds),
            *(
                _format_value(score.metric, value)
                for value in (score.weighted, score.mean, score.worst_decile, score.gap, score.deviation)
            ),
            str(score.count),
            *([] if score.with_priors is None else [_format_value(score.metric, score.with_priors)]),
        ]
        for score in scores_to_show
    ]
    last_score = run.held_out_scores[-1]
    head = [
        "after rounds",
        "weighted by examples",
        "mean of devices",
        "worst tenth",
        "gap to the best tenth",
        "spread",
        "devices",
        *([] if last_score.with_priors is None else ["with class priors"]),
    ]
    note = f"Held-out shares: the devices' own examples that are not trained on; {last_score.count} devices reported."
    return [note], HtmlTable(head, rows)


def make_time_section(run: RunData) -> PageSection | None:
    splits = [round.time_breakdown for round in run.summary.committed_rounds() if round.time_breakdown is not None]
    if not splits:
        return None
    splits_to_draw = _select_evenly_spaced(splits, MAX_ROUNDS)
    lasted_s = sum(split.lasted_s for split in splits)
    scale, prefix = units.select_prefix(max(split.lasted_s for split in splits)) if lasted_s < 100 else (1.0, "")
    bars = [
        plots.PlotBar(
            _format_round_name(run, split.round),
            (split.compute_s / scale, split.transfer_s / scale, split.wait_s / scale),
        )
        for split in splits_to_draw
    ]
    shares = {
        name: 100 * sum(getattr(split, f"{name}_s") for split in splits) / lasted_s if lasted_s else 0.0
        for name in ("compute", "transfer", "wait")
    }
    selection_note = (
        "" if len(splits_to_draw) == len(splits) else f" {len(splits_to_draw)} of {len(splits)} rounds are drawn."
    )
    note = (
        f"In a round, a device with an update spends on average {shares['compute']:.0f} % of the time on its task, "
        f"{shares['transfer']:.0f} % on transfers and the start, and {shares['wait']:.0f} % waiting for the start and "
        f"for other devices.{selection_note}"
    )
    points = run.points
    clocks = []
    if points:
        last_point = points[-1]
        virtual = run.row.has_virtual_time
        clock_text = (
            f"{'Virtual time was' if virtual else 'The coordinator counted'} {format_duration(last_point.clock_s)}, "
            f"by this machine's clock the run took {format_duration(last_point.real_s)}"
        )
        if last_point.boards_s is not None:
            clock_text += f"; the slowest boards of all rounds report {format_duration(last_point.boards_s)} together"
        clocks.append(
            f"{clock_text}. Simulated boards report the times that their profiles predict. The real time of their "
            "tasks counts as transfers."
        )
    plot = plots.plot_bars(bars, "Time per round, mean over its devices", f"{prefix}s", TIME_PARTS)
    return PageSection([note], render_plots(plot), clocks)


def make_device_section(run: RunData) -> PageSection | None:
    costs = run.summary.device_costs()
    if not costs:
        return None
    held_out_values = {name: score.value for name, score in run.summary.scores.items()}
    is_buffered = run.summary.state.is_buffered
    rows = [
        [
            name,
            *_format_device_cells(cost),
            *(run_summary.format_contribution(cost, run.summary.total) if is_buffered else []),
            *(_format_held_out_cells(run, name) if held_out_values else []),
        ]
        for name, cost in costs.items()
    ]
    head = ["device", "tasks", "refused", "s per task", "J", "J above idle", "peak memory", "down", "up"]
    head += ["share of updates", "commits old, mean"] if is_buffered else []
    head += ["held out", f"last {_find_main_metric(run).title}"] if held_out_values else []
    drawn = dict(sorted(costs.items(), key=lambda item: -(item[1].energy_j or 0.0))[:MAX_BARS])
    notes = [] if len(drawn) == len(costs) else [f"Drawn: {len(drawn)} of {len(costs)} devices."]
    figures = []
    if held_out_values:
        metric = _find_main_metric(run)
        scores = {name: held_out_values[name] for name in costs if name in held_out_values}
        factor = metrics.display_factor(metric)
        worst = sorted(scores, key=scores.__getitem__, reverse=not metric.higher)[:MAX_BARS]
        rows_of = [plots.PlotBar(name, [factor * scores[name]]) for name in worst]
        if len(worst) < len(scores):
            notes.append(
                f"{_format_metric_heading(metric)}: the worst {len(worst)} of {len(scores)} devices are drawn."
            )
        label = f"{metric.title}{', %' * metric.share}, last held-out share"
        figures.append(plots.plot_bars(rows_of, f"{_format_metric_heading(metric)} of each device", label))
    if any(cost.energy_j is not None for cost in drawn.values()):
        scale, prefix = units.select_prefix(max(cost.energy_j or 0.0 for cost in drawn.values()))
        joules = [
            plots.PlotBar(name, [item and item / scale for item in _split_energy(cost)]) for name, cost in drawn.items()
        ]
        kinds = ("idle", "above idle", "idle part unknown")
        part_count = 3 if any(bar.parts[2] is not None for bar in joules) else 2
        joules = [plots.PlotBar(bar.name, bar.parts[:part_count]) for bar in joules]
        figures.append(
            plots.plot_bars(
                joules, "Energy of each device", f"{prefix}J{_format_energy_source(run)}", kinds[:part_count]
            )
        )
    if any(cost.peak_bytes is not None for cost in drawn.values()):
        peaks = [plots.PlotBar(name, _split_memory_mb(cost)) for name, cost in drawn.items()]
        figures.append(plots.plot_bars(peaks, "Highest memory of a task", "MB", ("runtime", "task")))
    sources = sorted({cost.energy_source for cost in costs.values() if cost.energy_source})
    energy_source = run.summary.total.energy_word.strip() or "measured"
    notes += [f"Energy {energy_source} by: {'; '.join(sources)}."] if sources else []
    return PageSection((), render_plots(*figures), notes, HtmlTable(head, rows))


def _format_held_out_cells(run: RunData, device: str) -> list[str]:
    score = run.summary.scores.get(device)
    return (
        ["-", "-"] if score is None else [str(score.examples), _format_value(_find_main_metric(run).name, score.value)]
    )


def _format_device_cells(cost: CostLedger) -> list[str]:
    return [
        str(cost.tasks),
        str(cost.declined),
        f"{cost.wall_s / cost.tasks:.3g}" if cost.tasks else "-",
        "-" if cost.energy_j is None else run_summary.format_number(cost.energy_j),
        "-" if cost.net_j is None else run_summary.format_number(cost.net_j),
        "-" if cost.peak_bytes is None else units.format_bytes(cost.peak_bytes),
        units.format_bytes(cost.down_bytes),
        units.format_bytes(cost.up_bytes),
    ]


def _split_energy(cost: CostLedger) -> tuple[float | None, float | None, float | None]:
    if cost.energy_j is None or cost.net_j is None:
        return (None, None, cost.energy_j)
    return (cost.energy_j - cost.net_j, cost.net_j, None)


def _split_memory_mb(cost: CostLedger) -> tuple[float | None, float | None]:
    if cost.peak_bytes is None:
        return (None, None)
    base = min(cost.base_bytes or 0, cost.peak_bytes)
    return (base / 1e6, (cost.peak_bytes - base) / 1e6)


def make_bytes_section(run: RunData) -> PageSection | None:
    per_round = run.summary.round_costs()
    if not per_round:
        return None
    scale, prefix = units.select_prefix(max(cost.down_bytes + cost.up_bytes for cost in per_round.values()))
    rounds_to_draw = _select_evenly_spaced(list(per_round.items()), MAX_ROUNDS)
    bars = [
        plots.PlotBar(_format_round_name(run, n), (cost.down_bytes / scale, cost.up_bytes / scale))
        for n, cost in rounds_to_draw
    ]
    total = run.summary.total
    down, up = units.format_bytes(total.down_bytes), units.format_bytes(total.up_bytes)
    note = f"In all {down} down and {up} up: tensors and models, without the protocol's own messages."
    return PageSection(
        [note], render_plots(plots.plot_bars(bars, "Bytes per round, all devices", f"{prefix}B", ("down", "up")))
    )


def make_reason_table(run: RunData) -> HtmlTable:
    """Return the 20 most frequent reasons for which devices contributed no update."""
    reason_counts = Counter(
        (name, part.text if part.code == "declined" else MEANINGS.get(part.code, part.code))
        for devices in run.parts.values()
        for name, part in devices.items()
        if part.code not in ("answered", "drawn", "asked")
    )
    rows = [[name, text, str(count)] for (name, text), count in reason_counts.most_common(20)]
    return HtmlTable(["device", "why not", "rounds"], rows, ["why not"])


class LogText(NamedTuple):
    brief: list[str]  # without single updates, or empty before the first event
    full: list[str]
    energy: list[str]


def format_log(run: RunData) -> LogText:
    brief, all_lines, summary = [], [], RunSummary.from_job(run.row.job)
    for time_s, event in run.events:
        previous_summary, summary = summary, summary.with_event(event, time_s)
        first_line, *other_lines = event_messages.format_event(previous_summary, event, summary)
        lines = [f"{time_s - run.events[0][0]:9.1f} s  {first_line}", *(f"{'':13}{line}" for line in other_lines)]
        all_lines += lines
        if not isinstance(event, EligibilityRecorded | CohortSelected | UpdateAccepted | RoundClosed):
            brief += lines
    cut = [f"... {len(all_lines) - MAX_LOG_LINES} more lines: fedquilt logs {run.row.id}"]
    detail = all_lines if len(all_lines) <= MAX_LOG_LINES else [*all_lines[:MAX_LOG_LINES], *cut]
    brief_lines = brief if len(brief) <= MAX_LOG_LINES else [*brief[:MAX_LOG_LINES], *cut]
    return LogText(brief_lines, detail, event_messages.format_energy_summary(summary))


def format_job(job: Any) -> str:
    import tomli_w

    return tomli_w.dumps(_list_changed_fields(job))


def _list_changed_fields(table: Any) -> dict[str, Any]:
    changed = {}
    for field in msgspec.structs.fields(table):
        value = getattr(table, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and value is not None:
            inner = (
                _list_changed_fields(value)
                if isinstance(value, msgspec.Struct)
                else _drop_none(msgspec.to_builtins(value))
            )
            changed[field.encode_name] = inner
    return changed


def _drop_none(value: Any) -> Any:
    # TOML has no null
    if isinstance(value, dict):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value] if isinstance(value, list) else value


def _select_evenly_spaced(items: Sequence[T], limit: int) -> list[T]:
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _format_round_name(run: RunData, number: int) -> str:
    return event_messages.format_round_name(number, run.summary.final_evaluation_round)


def _find_main_metric(run: RunData) -> metrics.Metric:
    metric_names = [*(score.metric for score in run.scores), *(score.metric for score in run.held_out_scores)]
    return metrics.METRICS[metric_names[0] if metric_names else "accuracy"]


def _format_metric_heading(metric: metrics.Metric) -> str:
    return metric.title[0].upper() + metric.title[1:]


def _format_value(metric: str, value: float) -> str:
    return metrics.format_value(metrics.METRICS[metric], value, 1)


def format_duration(value: float) -> str:
    scale, name = _choose_time_unit(value)
    return f"{value / scale:.3g} {name}" if value / scale < 100 else f"{value / scale:.0f} {name}"


def _choose_time_unit(largest: float) -> tuple[float, str]:
    if 0 < largest < 1:
        scale, prefix = units.select_prefix(largest)
        return scale, f"{prefix}s"
    return next(((s, n) for s, n in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")) if largest >= 3 * s), (1.0, "s"))


def _drop_unknown(values: Mapping[int, float | None]) -> dict[int, float]:
    return {number: value for number, value in values.items() if value is not None}
