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
from fedquilt.coordinator.views import event_messages, run_summary
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
    "refused": "its update was refused",
    "drawn": "eligible, not drawn",
    **REASONS,
}
COLOURED: Final = {
    **{code: MEANINGS[code] for code in ("answered", "asked", "declined", "refused")},
    "barred": "not eligible: offline, busy, hot, ...",
    "drawn": MEANINGS["drawn"],
}
T = TypeVar("T")
MOST_DEVICES = 40  # bars in one plot
MOST_ROUNDS = 40  # likewise
MOST_CLASSES = 30  # of a confusion matrix
TIME_PARTS = ("task", "down, start and up", "waiting")
SWITCHED = 5  # rounds of which the timeline is drawn
MOST_LINES = 1000  # of the log


@dataclass(frozen=True)
class DeviceMatrix:
    keys: Sequence[tuple[str, str]]  # colours that occur, by their class, with their meaning
    heads: Sequence[tuple[str, int]]  # a round's number, and how many columns it stands over
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]  # device, and class and tooltip of each round
    notes: Sequence[str]


def make_device_matrix(parts: Mapping[int, Mapping[str, DeviceOutcome]], final: int | None) -> DeviceMatrix:
    """Return the outcomes of devices in the latest rounds. `final` is the number of the final evaluation."""
    numbers = sorted(parts)[-MATRIX_ROUNDS:]
    known = sorted({name for number in numbers for name in parts[number]})
    names = known[:MATRIX_DEVICES]

    def make_cell(number: int, name: str) -> tuple[str, str]:
        part = parts[number].get(name)
        if part is None:
            return "", ""
        place = event_messages.format_round_name(number, final)
        return (part.code if part.code in COLOURED else "barred"), f"{place}, {name}: {part.text}"

    rows = [(name, [make_cell(number, name) for number in numbers]) for name in names]
    seen = {code for _, cells in rows for code, _ in cells}
    step = max(1, -(-len(numbers) // 12), 2 if max(numbers, default=0) > 9 and len(numbers) > 1 else 1)
    heads = [
        ("final" if numbers[i] == final else str(numbers[i] + 1), len(numbers[i : i + step]))
        for i in range(0, len(numbers), step)
    ]
    codes = Counter(part.code for devices in parts.values() for part in devices.values())
    told = ", ".join(f"{MEANINGS.get(code, code)}: {count}" for code, count in codes.most_common())
    hidden = [f"{len(known) - len(names)} more devices"] if len(known) > len(names) else []
    hidden += [f"{len(parts) - len(numbers)} earlier rounds"] if len(parts) > len(numbers) else []
    notes = [f"Over all rounds and devices: {told}."]
    notes += [f"{' and '.join(hidden)} are not shown.".capitalize()] if hidden else []
    return DeviceMatrix([(code, text) for code, text in COLOURED.items() if code in seen], heads, rows, notes)


def make_tiles(found: RunData) -> list[tuple[str, str]]:
    whole, tiles, title = found.summary.total, [], _find_main_metric(found).title
    if found.scores:
        tiles.append((_format_value(found.scores[-1].metric, found.scores[-1].value), f"{title} on the test set"))
    if found.held:
        last = found.held[-1]
        tiles.append((_format_value(last.metric, last.weighted), f"{title} on held-out shares"))
        tiles.append((_format_value(last.metric, last.worst_decile), "worst tenth of the devices"))
    done = found.points[-1] if found.points else None
    tiles.append((str(done.rounds if done else 0), "rounds"))
    tiles.append((str(len(found.summary.device_costs())), "devices"))
    if done is not None:
        virtual = found.row.has_virtual_time
        tiles.append((format_duration(done.clock_s), "virtual time" if virtual else "by the coordinator's clock"))
        tiles.append((format_duration(done.real_s), "by this machine's clock"))
    tiles.append((units.format_bytes(whole.down_bytes + whole.up_bytes), "down and up"))
    if whole.energy_j is not None:
        some = "" if whole.metered == whole.tasks else f", {whole.metered} of {whole.tasks} tasks"
        tiles.append((f"{run_summary.format_number(whole.energy_j)} J", f"of the boards{some}{_say_predicted(found)}"))
    return tiles


def make_accuracy_section(found: RunData) -> PageSection:
    if not found.held and not found.scores:
        how = f"fedquilt model evaluate {found.row.id} --home {found.home}"
        return PageSection([f"Not measured: the job has [check] every = 0. `{how}` measures it on the test set."])
    notes, table = _summarise_held_out(found)
    over = make_accuracy_plots(found)
    if not over:
        told = [
            f"After {score.rounds} rounds: {_format_value(score.metric, score.value)} of {score.examples} examples of "
            "the test set."
            for score in found.scores
        ]
        return PageSection(told, (), notes, table)
    return PageSection((), (), notes, table, _render_switch(over))


def make_accuracy_plots(found: RunData) -> dict[str, plots.Plot]:
    """Return plots of the main metric over rounds, seconds, bytes and joules, or none of fewer than two evaluations."""
    if len({*(score.rounds for score in found.held), *(score.rounds for score in found.scores)}) < 2:
        return {}
    at = {point.rounds: point for point in found.points}
    axes = {"rounds": ("rounds", "by round", {point.rounds: float(point.rounds) for point in found.points})}
    clock = "virtual time" if found.row.has_virtual_time else "coordinator's clock"
    for key, title, label, taken in (
        ("seconds", "by time", clock, {r: point.clock_s for r, point in at.items()}),
        (
            "board seconds",
            "by the boards' time",
            "slowest board of each round",
            _drop_unknown({r: p.boards_s for r, p in at.items()}),
        ),
    ):
        if any(taken.values()):
            scale, name = _choose_time_unit(max(taken.values()))
            axes[key] = (f"{label}, {name}", title, {r: value / scale for r, value in taken.items()})
    moved = {r: float(p.down_bytes + p.up_bytes) for r, p in at.items()}
    scale, prefix = units.select_prefix(max(moved.values(), default=0.0))
    axes["bytes"] = (f"{prefix}B, down and up", "by bytes", {r: value / scale for r, value in moved.items()})
    joules = _drop_unknown({r: p.energy_j for r, p in at.items()})
    if any(joules.values()):
        scale, prefix = units.select_prefix(max(joules.values()))
        label = f"{prefix}J of the boards, gross{_say_predicted(found)}"
        axes["joules"] = (label, "by energy", {r: v / scale for r, v in joules.items()})
    metric = _find_main_metric(found)
    heading = _format_metric_heading(metric)
    unit, most = (", %", 100.0) if metric.share else ("", math.inf)
    return {
        name: plots.plot_lines(
            _make_accuracy_lines(found, places), f"{heading} {title}", label, metric.title + unit, most=most
        )
        for name, (label, title, places) in axes.items()
    }


def _render_switch(found: Mapping[str, plots.Plot]) -> list[tuple[str, Any]]:
    return list(zip(found, render_plots(*found.values()), strict=True))


def _say_predicted(found: RunData) -> str:
    word = found.summary.total.energy_word.strip()
    return f", {word} by profile" if word else ""


def make_confusion_section(found: RunData) -> PageSection | None:
    """Return the confusion matrix of the last score on the test set, or else on the held-out shares."""
    sums, where = found.scores[-1].evaluation if found.scores else None, "the test set"
    if sums is None:
        held = (fact.evaluation for _, fact in reversed(found.facts) if isinstance(fact, RoundCommitted))
        sums, where = next((each for each in held if each is not None), None), "the held-out shares"
    rows = None if sums is None else evaluation.confusion_matrix(sums)
    if rows is None or not any(map(any, rows)):
        return None
    given = found.row.job.labels or found.row.job.data.get("labels") or ()
    names = list(given) if len(given) == len(rows) else [str(number) for number in range(len(rows))]
    note = f"Examples of {where} in the last evaluation: a row for each true class, a column for each predicted class."
    if len(rows) > MOST_CLASSES:
        return PageSection([f"{note} `fedquilt model evaluate --format json` has the {len(rows)} classes."])
    return PageSection([note], render_plots(plots.plot_matrix(rows, names, "Confusion matrix")))


def make_timeline_section(found: RunData) -> PageSection | None:
    """Return bars of what each device did in a round, for a few rounds."""
    took = {fact.round: fact.took_s for _, fact in found.facts if isinstance(fact, RoundCommitted)}
    began: dict[int, float] = {}
    asked: dict[tuple[int, str], float] = {}
    timed: dict[int, dict[str, tuple[float, float, float]]] = {}  # round -> device -> before, answered after, task
    for at, fact in found.facts:
        if isinstance(fact, CohortSelected) and not found.row.has_virtual_time:  # events have this machine's clock
            began.setdefault(fact.round, at)
            asked |= {(fact.round, device): at for device in fact.devices}
        elif isinstance(fact, UpdateAccepted) and fact.took_s is not None and fact.round in took:
            device = fact.update.device
            before_s = asked.get((fact.round, device), at) - began.get(fact.round, at)
            before_s = min(max(before_s, 0.0), max(took[fact.round] - fact.took_s, 0.0))
            timed.setdefault(fact.round, {})[device] = before_s, fact.took_s, fact.update.usage.wall_s
    if not timed:
        return None
    over: dict[str, plots.Plot] = {}
    for number in _select_evenly_spaced(sorted(timed), SWITCHED):
        ends = sorted(timed[number].items(), key=lambda each: each[1][1])[:MOST_DEVICES]
        lasted_s = max(took[number], *(answered_s for _, (_, answered_s, _) in ends))
        scale, prefix = units.select_prefix(lasted_s) if lasted_s < 1 else (1.0, "")
        bars = []
        for name, (before_s, answered_s, wall_s) in ends:
            rest_s = max(answered_s - wall_s, 0.0), max(lasted_s - before_s - answered_s, 0.0)
            bars.append(plots.PlotBar(name, [each / scale for each in (before_s, wall_s, *rest_s)]))
        name = _format_round_name(found, number)
        clock = "virtual time" if found.row.has_virtual_time else "since the round began"
        title = f"Devices in {'the ' * (number == found.summary.final_evaluation_round)}{name}"
        over[name] = plots.plot_bars(bars, title, f"{prefix}s, {clock}", ("before it was asked", *TIME_PARTS))
    return PageSection(["The fastest device comes first."], switch=_render_switch(over))


def _make_accuracy_lines(found: RunData, places: Mapping[int, float]) -> list[plots.PlotLine]:
    kinds: dict[str, dict[int, float]] = {
        "test set": {score.rounds: score.value for score in found.scores},
        "held-out shares": {score.rounds: score.weighted for score in found.held},
        "worst tenth": {score.rounds: score.worst_decile for score in found.held},
    }
    lines, scale = [], metrics.display_factor(_find_main_metric(found))
    for name, values in kinds.items():
        known = sorted(number for number in values if number in places)
        if known:
            lines.append(plots.PlotLine(name, [places[n] for n in known], [scale * values[n] for n in known]))
    return lines


def _summarise_held_out(found: RunData) -> tuple[list[str], HtmlTable | None]:
    if not found.held:
        return [], None
    rows = [
        [
            str(own.rounds),
            *(
                _format_value(own.metric, value)
                for value in (own.weighted, own.mean, own.worst_decile, own.gap, own.deviation)
            ),
            str(own.count),
            *([] if own.with_priors is None else [_format_value(own.metric, own.with_priors)]),
        ]
        for own in (found.held if len(found.held) <= 6 else (*found.held[:2], *found.held[-4:]))
    ]
    last = found.held[-1]
    head = [
        "after rounds",
        "weighted by examples",
        "mean of devices",
        "worst tenth",
        "gap to the best tenth",
        "spread",
        "devices",
        *([] if last.with_priors is None else ["with class priors"]),
    ]
    note = f"Held-out shares: the devices' own examples that are not trained on; {last.count} devices reported."
    return [note], HtmlTable(head, rows)


def make_time_section(found: RunData) -> PageSection | None:
    splits = [each.time_breakdown for each in found.summary.committed_rounds() if each.time_breakdown is not None]
    if not splits:
        return None
    chosen = _select_evenly_spaced(splits, MOST_ROUNDS)
    lasted_s = sum(split.lasted_s for split in splits)
    scale, prefix = units.select_prefix(max(split.lasted_s for split in splits)) if lasted_s < 100 else (1.0, "")
    bars = [
        plots.PlotBar(
            _format_round_name(found, split.round),
            (split.compute_s / scale, split.transfer_s / scale, split.wait_s / scale),
        )
        for split in chosen
    ]
    shares = {
        name: 100 * sum(getattr(split, f"{name}_s") for split in splits) / lasted_s if lasted_s else 0.0
        for name in ("compute", "transfer", "wait")
    }
    some = "" if len(chosen) == len(splits) else f" {len(chosen)} of {len(splits)} rounds are drawn."
    note = (
        f"Of a round, a device that answers spends on average {shares['compute']:.0f} % at its task, "
        f"{shares['transfer']:.0f} % fetching, starting and sending, {shares['wait']:.0f} % waiting for other "
        f"devices and for the round to begin.{some}"
    )
    points = found.points
    clocks = []
    if points:
        last = points[-1]
        virtual = found.row.has_virtual_time
        told = (
            f"{'Virtual time was' if virtual else 'The coordinator counted'} {format_duration(last.clock_s)}, by this "
            f"machine's clock the run took {format_duration(last.real_s)}"
        )
        if last.boards_s is not None:
            told += f"; the slowest boards of all rounds report {format_duration(last.boards_s)} together"
        clocks.append(
            f"{told}. Simulated boards report what their profiles predict; what their tasks really took here counts as "
            "fetching and sending."
        )
    plot = plots.plot_bars(bars, "Time per round, mean over its devices", f"{prefix}s", TIME_PARTS)
    return PageSection([note], render_plots(plot), clocks)


def make_device_section(found: RunData) -> PageSection | None:
    known = found.summary.device_costs()
    if not known:
        return None
    own = {name: score.value for name, score in found.summary.scores.items()}
    rows = [
        [
            name,
            *_format_device_cells(of),
            *([_format_value(_find_main_metric(found).name, own[name]) if name in own else "-"] if own else []),
        ]
        for name, of in known.items()
    ]
    head = ["device", "tasks", "refused", "s per task", "J", "J above idle", "peak memory", "down", "up"]
    head += [f"last {_find_main_metric(found).title}"] if own else []
    shown = dict(sorted(known.items(), key=lambda each: -(each[1].energy_j or 0.0))[:MOST_DEVICES])
    notes = [] if len(shown) == len(known) else [f"Drawn: {len(shown)} of {len(known)} devices."]
    figures = []
    if own:
        metric, scores = _find_main_metric(found), {name: own[name] for name in known if name in own}
        factor = metrics.display_factor(metric)
        worst = sorted(scores, key=scores.__getitem__, reverse=not metric.higher)[:MOST_DEVICES]
        rows_of = [plots.PlotBar(name, [factor * scores[name]]) for name in worst]
        if len(worst) < len(scores):
            notes.append(
                f"{_format_metric_heading(metric)}: the worst {len(worst)} of {len(scores)} devices are drawn."
            )
        label = f"{metric.title}{', %' * metric.share}, last held-out share"
        figures.append(plots.plot_bars(rows_of, f"{_format_metric_heading(metric)} of each device", label))
    if any(of.energy_j is not None for of in shown.values()):
        scale, prefix = units.select_prefix(max(of.energy_j or 0.0 for of in shown.values()))
        joules = [
            plots.PlotBar(name, [each and each / scale for each in _split_energy(of)]) for name, of in shown.items()
        ]
        kinds = ("idle", "above idle", "idle part unknown")
        used = 3 if any(bar.parts[2] is not None for bar in joules) else 2
        joules = [plots.PlotBar(bar.name, bar.parts[:used]) for bar in joules]
        figures.append(
            plots.plot_bars(joules, "Energy of each device", f"{prefix}J{_say_predicted(found)}", kinds[:used])
        )
    if any(of.peak_bytes is not None for of in shown.values()):
        peaks = [plots.PlotBar(name, _split_memory_mb(of)) for name, of in shown.items()]
        figures.append(plots.plot_bars(peaks, "Highest memory of a task", "MB", ("runtime", "task")))
    sources = sorted({of.energy_source for of in known.values() if of.energy_source})
    word = found.summary.total.energy_word.strip() or "measured"
    notes += [f"Energy {word} by: {'; '.join(sources)}."] if sources else []
    return PageSection((), render_plots(*figures), notes, HtmlTable(head, rows))


def _format_device_cells(of: CostLedger) -> list[str]:
    return [
        str(of.tasks),
        str(of.declined),
        f"{of.wall_s / of.tasks:.3g}" if of.tasks else "-",
        "-" if of.energy_j is None else run_summary.format_number(of.energy_j),
        "-" if of.net_j is None else run_summary.format_number(of.net_j),
        "-" if of.peak_bytes is None else units.format_bytes(of.peak_bytes),
        units.format_bytes(of.down_bytes),
        units.format_bytes(of.up_bytes),
    ]


def _split_energy(of: CostLedger) -> tuple[float | None, float | None, float | None]:
    if of.energy_j is None or of.net_j is None:
        return (None, None, of.energy_j)
    return (of.energy_j - of.net_j, of.net_j, None)


def _split_memory_mb(of: CostLedger) -> tuple[float | None, float | None]:
    if of.peak_bytes is None:
        return (None, None)
    base = min(of.base_bytes or 0, of.peak_bytes)
    return (base / 1e6, (of.peak_bytes - base) / 1e6)


def make_bytes_section(found: RunData) -> PageSection | None:
    per_round = found.summary.round_costs()
    if not per_round:
        return None
    scale, prefix = units.select_prefix(max(of.down_bytes + of.up_bytes for of in per_round.values()))
    chosen = _select_evenly_spaced(list(per_round.items()), MOST_ROUNDS)
    bars = [
        plots.PlotBar(_format_round_name(found, n), (of.down_bytes / scale, of.up_bytes / scale)) for n, of in chosen
    ]
    whole = found.summary.total
    down, up = units.format_bytes(whole.down_bytes), units.format_bytes(whole.up_bytes)
    note = f"In all {down} down and {up} up: tensors and models, without the protocol's own messages."
    return PageSection(
        [note], render_plots(plots.plot_bars(bars, "Bytes per round, all devices", f"{prefix}B", ("down", "up")))
    )


def make_reason_table(found: RunData) -> HtmlTable:
    """Return the most frequent reasons why devices contributed nothing, at most 20."""
    counted = Counter(
        (name, part.text if part.code == "declined" else MEANINGS.get(part.code, part.code))
        for devices in found.parts.values()
        for name, part in devices.items()
        if part.code not in ("answered", "drawn", "asked")
    )
    rows = [[name, text, str(count)] for (name, text), count in counted.most_common(20)]
    return HtmlTable(["device", "why not", "rounds"], rows, ["why not"])


class LogText(NamedTuple):
    brief: list[str]  # without each answer; empty: nothing has happened yet
    whole: list[str]
    energy: list[str]


def format_log(found: RunData) -> LogText:
    brief, whole, after = [], [], RunSummary.from_job(found.row.job)
    for at, fact in found.facts:
        before, after = after, after.with_event(fact, at)
        first, *more = event_messages.format_event(before, fact, after)
        lines = [f"{at - found.facts[0][0]:9.1f} s  {first}", *(f"{'':13}{line}" for line in more)]
        whole += lines
        if not isinstance(fact, EligibilityRecorded | CohortSelected | UpdateAccepted | RoundClosed):
            brief += lines
    cut = [f"... {len(whole) - MOST_LINES} more lines: fedquilt logs {found.row.id}"]
    detail = whole if len(whole) <= MOST_LINES else [*whole[:MOST_LINES], *cut]
    told = brief if len(brief) <= MOST_LINES else [*brief[:MOST_LINES], *cut]
    return LogText(told, detail, event_messages.format_energy_summary(after))


def format_job(job: Any) -> str:
    """Return a job as TOML, without default values."""
    import tomli_w

    return tomli_w.dumps(_list_changed_fields(job))


def _list_changed_fields(table: Any) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(table):
        value = getattr(table, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and value is not None:
            inner = (
                _list_changed_fields(value)
                if isinstance(value, msgspec.Struct)
                else _drop_none(msgspec.to_builtins(value))
            )
            found[field.encode_name] = inner
    return found


def _drop_none(value: Any) -> Any:
    # TOML has no null
    if isinstance(value, dict):
        return {key: _drop_none(each) for key, each in value.items() if each is not None}
    return [_drop_none(each) for each in value] if isinstance(value, list) else value


def _select_evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _format_round_name(found: RunData, number: int) -> str:
    return event_messages.format_round_name(number, found.summary.final_evaluation_round)


def _find_main_metric(found: RunData) -> metrics.Metric:
    told = [*(score.metric for score in found.scores), *(score.metric for score in found.held)]
    return metrics.KNOWN[told[0] if told else "accuracy"]


def _format_metric_heading(metric: metrics.Metric) -> str:
    return metric.title[0].upper() + metric.title[1:]


def _format_value(metric: str, value: float) -> str:
    return metrics.format_value(metrics.KNOWN[metric], value, 1)


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
