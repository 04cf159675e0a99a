"""Events of a run as text, for `fedquilt run` and `fedquilt logs`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedquilt import metrics
from fedquilt.console import table, units
from fedquilt.coordinator.rounds import events, failed_rounds, selection
from fedquilt.coordinator.storage.rows import UnreadableRow
from fedquilt.coordinator.storage.store import UNAPPROVED, Store, StoredJob
from fedquilt.coordinator.views import run_summary, scores, wait_reasons
from fedquilt.coordinator.views.run_summary import (
    CostLedger,
    PersonalScores,
    RoundSummary,
    RunSummary,
    energy_per_point_j,
    is_of_final_evaluation,
    progress_points,
    summarise_events,
)
from fedquilt.core import EvaluationSums, JobError, Update, Usage

FINAL: Final = "final evaluation"  # instead of a round's number
SETTLING: Final = "statistics for the final evaluation"  # likewise
UNTOLD: Final = ("macro_precision", "macro_recall", "micro_precision", "micro_recall", "micro_f1")
"""Metrics that a line does not show."""


def format_status(summary: RunSummary, state: events.JobState) -> list[str]:
    what = f"round {state.completed_rounds + 1} of {state.constants.rounds}"
    if state.is_work_done:
        what = SETTLING if state.is_evaluation_round else FINAL
    spent, cohort = state.usage, len(state.pending_devices) + len(state.accepted_updates)
    taken = [f"{run_summary.format_joules(spent.joules)}{summary.total.energy_word}"] if spent.metered else []
    devices = [f"{len(state.accepted_updates)} of {cohort} devices answered" if cohort else "no device selected yet"]
    devices += [f"{len(state.pending_devices)} at work"] if state.pending_devices else []
    devices += (
        [f"declined: {failed_rounds.format_by_reason(state.decline_reasons, 3)}"] if state.decline_reasons else []
    )
    return [what, ", ".join([*taken, f"{units.format_bytes(spent.bytes)} so far"]), ", ".join(devices)]


def is_evaluation_due(state: events.JobState) -> bool:
    """Return whether devices must evaluate the present state: at every `check_every` rounds and at the end."""
    every = 0 if state.constants.check_beside else state.constants.check_every
    return bool(every) and (state.is_work_done or state.completed_rounds % every == 0)


def format_score(found: PersonalScores | None) -> str:
    if found is None:
        return ""
    priors = "" if found.with_priors is None else f", with class priors {100 * found.with_priors:.1f} %"
    return format_metric(found.metric, found.weighted) + priors


def format_metric(name: str, value: float) -> str:
    metric = metrics.KNOWN[name]
    return f"{metric.title} {metrics.format_value(metric, value, 1)}"


def format_round_name(number: int, final: int | None) -> str:
    """Return "round N", counted from 1, or "final evaluation" for the number `final`."""
    return FINAL if number == final else f"round {number + 1}"


def format_round(one: RoundSummary, rounds: int, score: str, width: int) -> str:
    """Return the line of a committed round of work, without the parts for which `width` has no room."""
    cost, loss = one.cost, one.train_loss
    all_there = f"{cost.tasks} device{'s' * (cost.tasks != 1)}"
    parts = [
        score or ("" if loss is None else f"loss {_format_number(loss)}"),
        f"{cost.tasks} of {one.selected} devices" if 0 < cost.tasks < one.selected else "",
        _format_energy(cost),
        units.format_bytes(cost.down_bytes + cost.up_bytes) if cost.tasks else "",
        all_there if 0 < cost.tasks >= one.selected else "",
    ]
    line, separator = f"round {one.rounds_before + 1} of {rounds}", ": "
    for part in filter(None, parts):
        if len(line) + len(separator) + len(part) <= width:
            line, separator = line + separator + part, ", "
    return line


def format_event(before: RunSummary, fact: events.AnyEvent, after: RunSummary) -> list[str]:
    """Return an event as text, with the devices and costs of a committed round."""
    last = is_of_final_evaluation(after.state, fact)
    if isinstance(fact, events.RoundCommitted):
        return _describe_commit(fact, last, list(before.state.accepted_updates.values()), len(before.selected))
    if isinstance(fact, events.RoundRetried) and before.state.phase != "new":  # else earlier events are not known
        return [f"{FINAL if last else f'round {fact.round + 1}'}: {_describe_retry(fact, before.state)}"]
    return format_single_event(fact, last)


def format_single_event(fact: events.AnyEvent, is_final_evaluation: bool = False) -> list[str]:
    """Return an event as text, without devices and costs. With `is_final_evaluation`, name the final evaluation."""
    if isinstance(fact, events.RoundCommitted):
        return _describe_commit(fact, is_final_evaluation, (), 0)
    return _describe_event(fact, FINAL if is_final_evaluation else f"round {getattr(fact, 'round', -1) + 1}")


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_format_number(value)}" for name, value in sorted(metrics.items()))


def _describe_event(fact: events.AnyEvent, name: str) -> list[str]:
    match fact:
        case events.NoteRecorded():
            return [fact.text]
        case events.JobStarted():
            return ["started"]
        case events.EligibilityRecorded():
            changes = [f"{', '.join(devices)}: {selection.reason_text(c)}" for c, devices in fact.ineligible.items()]
            can = [f"eligible: {', '.join(fact.eligible)}"] if fact.eligible else []
            return [f"{name}: {'; '.join([*can, *changes]) or 'the devices have new estimates of energy'}"]
        case events.CohortSelected():
            again = f", attempt {fact.attempt + 1}" if fact.attempt else ""
            limit = f"; deadline {fact.deadline_s:.0f} s, chosen for it" if fact.deadline_s is not None else ""
            moved = ", ".join(f"{device} {epochs}" for device, epochs in sorted(fact.epochs.items()))
            work = [f"{name}: epochs, as planned for energy: {moved}"] if moved else []
            return [f"{name}{again}: cohort {', '.join(fact.devices)}{limit}", *work, *fact.coverage]
        case events.TaskDeclined():
            return [f"{name}: {fact.device} declined ({fact.code}): {fact.reason}"]
        case events.UpdateAccepted():
            note = [fact.update.note] if fact.update.note else []
            usage = format_usage(fact.update.usage)
            return [f"{name}: update from {_describe_sender(fact.update)}: {usage}", *note]
        case events.UpdateRejected():
            return [f"{name}: update from {fact.device} refused: {fact.reason}"]
        case events.UpdateLost():
            return [f"{name}: update from {fact.device} is lost here, and asked for again: {fact.reason}"]
        case events.UpdatesAggregated():
            count = f"{len(fact.devices)} {'update' if len(fact.devices) == 1 else 'updates'}"
            return [f"{name}: sum of {count} stored, {fact.sum.size / 1e6:.0f} MB; they are dropped"]
        case events.RoundClosed():
            return [f"{name}: closed to further updates"]
        case events.DeadlineExtended():
            return [f"{name}: no quorum by the deadline; the round stays open until there is one"]
        case events.RoundRetried():
            return [f"{name}: no quorum; starting another attempt"]
        case events.AttemptResumed(passed_s=passed_s):
            return [f"{name}: the coordinator has restarted; {passed_s:.0f} s of the time limit count"]
        case events.JobEnded():
            return format_end(fact.status, fact.reason)
        case events.JobResumed():
            return ["resumed"]
        case _:
            raise AssertionError(fact)


def format_end(status: str, reason: str) -> list[str]:
    said = "job failed" if status == "failed" else status
    return f"{said}: {reason}".splitlines() if reason else [said]


def _describe_retry(fact: events.RoundRetried, before: events.JobState) -> str:
    silent, turned = sorted(before.pending_devices), before.decline_reasons.keys() - before.devices_without_work
    parts = [f"{len(before.accepted_updates)} {'update' if len(before.accepted_updates) == 1 else 'updates'}"]
    if refused := sorted(turned & before.cohort):  # a board that declines leaves the roll
        parts.append(f"what {wait_reasons.format_names(refused)} sent was refused")
    if declined := sorted(turned - before.cohort):
        parts.append(f"{wait_reasons.format_names(declined)} declined")
    if before.devices_without_work:
        parts.append(f"nothing to do for {wait_reasons.format_names(sorted(before.devices_without_work))}")
    if silent:
        parts.append(f"nothing from {wait_reasons.format_names(silent)}")
    why = " by the deadline" if silent or not before.decline_reasons else ", and no other board to ask"
    again = "starting another attempt"
    if fact.attempt == before.attempt:
        again = "beginning the attempt anew, as boards that it needs are away or at other jobs' tasks"
    return f"no quorum{why} ({', '.join(parts)}); {again}"


def _describe_commit(
    fact: events.RoundCommitted, is_final_evaluation: bool, updates: Sequence[Update], selected: int
) -> list[str]:
    """Return the lines of a commit: updates, energy, metrics, the method's notes, the coordinator's warnings."""
    # devices evaluate the state that they receive, which is that of the round before
    counts = [f"{len(updates)} of {selected} devices"] if selected else []
    counts += filter(None, [_format_energy(run_summary.sum_costs(updates))])
    checked = describe_evaluation(fact.evaluation)
    if is_final_evaluation:
        told = [f"{FINAL}: {', '.join([*checked, *counts]) or 'done'}"]
    else:
        word = "statistics for the evaluation gathered" if fact.is_evaluation_round else "updates aggregated"
        parts = [f"{word} ({', '.join(counts)})" if counts else word]
        parts += [_format_metrics(fact.metrics)] if fact.metrics and not fact.notes else []
        if checked:
            when = "at the start" if not fact.round else f"after round {fact.round}"
            parts.append(f"{when}: {', '.join(checked)}")
        told = [f"round {fact.round + 1}: {'; '.join(parts)}"]
    return [*told, *fact.notes, *fact.warnings]


def describe_evaluation(sums: EvaluationSums | None) -> list[str]:
    if sums is None or not sums.examples:
        return []
    first, *others = metrics.describe_metrics(sums, 1, skip=UNTOLD)
    over = metrics.summarise_over_devices(sums)
    if over is not None and over.devices > 1:
        main = metrics.MAIN[sums.task]
        told = (metrics.format_value(main, value, 1) for value in (over.worst_decile, over.gap, over.deviation))
        words = f"worst tenth of {over.devices} devices", "gap to the best tenth", "spread"
        others.insert(0, ", ".join(map(" ".join, zip(words, told, strict=True))))
    if sums.right_with_priors is not None:
        others.insert(0, f"with the devices' class priors {100 * sums.right_with_priors / sums.examples:.1f} %")
    return [f"{first} on {sums.examples} held-out examples", *others]


def _format_energy(taken: CostLedger) -> str:
    if taken.energy_j is None:
        return ""
    some = "" if taken.metered == taken.tasks else f" of {taken.metered} with a meter"
    return f"{run_summary.format_joules(taken.energy_j)}{taken.energy_word}{some}"


def _describe_sender(update: Update) -> str:
    said = update.device
    if update.boards:
        said += f" of {len(update.boards)} {'board' if len(update.boards) == 1 else 'boards'}"
    if update.below is not None:
        below = update.below
        said += (
            f" ({units.format_bytes(below.down_bytes)} down and {units.format_bytes(below.up_bytes)} up to them "
            "and from them)"
        )
    return said


def format_usage(usage: Usage) -> str:
    scale, prefix = units.select_prefix(usage.wall_s) if usage.wall_s < 0.1 else (1.0, "")
    parts = [f"{usage.wall_s / scale:.2f} {prefix}s"]
    if usage.energy_j is not None:
        net_j = None if usage.idle_j is None else usage.energy_j - usage.idle_j
        word = run_summary.describe_source([str(usage.energy_source)])
        parts.append(run_summary.format_energy(usage.energy_j, net_j, usage.energy_error_j) + word)
    if usage.peak_bytes is not None:
        parts.append(f"peak {units.format_bytes(usage.peak_bytes)}")
    parts.append(f"{units.format_bytes(usage.down_bytes)} down, {units.format_bytes(usage.up_bytes)} up")
    return ", ".join(parts)


def format_energy_summary(summary: RunSummary) -> list[str]:
    whole = summary.total
    if whole.energy_j is None or whole.task_j is None:
        return []
    parts, rounds = [f"{run_summary.format_number(whole.task_j)} J per task"], len(summary.round_costs())
    if rounds:
        parts.append(f"{run_summary.format_number(whole.energy_j / rounds)} J per round")
    if whole.example_j is not None:
        parts.append(f"{run_summary.format_number(whole.example_j)} J per example")
    points = progress_points(summary)
    if (point_j := energy_per_point_j(points)) is not None:
        metric = next(point.personal.metric for point in points if point.personal is not None)
        parts.append(f"{run_summary.format_number(point_j)} J per point of {metrics.KNOWN[metric].title}")
    took = run_summary.format_energy(whole.energy_j, whole.net_j, whole.energy_error_j)
    tasks = f"{whole.metered} task{'s' * (whole.metered != 1)}"
    some = "" if whole.metered == whole.tasks else f" of {whole.tasks}; the others were not metered"
    return [
        f"energy: {took} for {tasks}{some}: {', '.join(parts)}",
        f"energy{whole.energy_word or ' measured'} by: {whole.energy_source}",
    ]


def summarise_run(row: StoredJob | UnreadableRow, store: Store, own: Mapping[str, int] = {}) -> dict[str, Any]:
    """Return the values for a line of `fedquilt ls`. The value of "problem" is why the run cannot be read, or None."""
    summary = None
    problem = row.reason if isinstance(row, UnreadableRow) else None
    if isinstance(row, StoredJob):
        try:
            summary = summarise_events(row.job, store.read_events(row.id))
        except JobError as error:
            problem = str(error)
    taken = CostLedger() if summary is None else summary.total
    held = None if summary is None else summary.last_scores
    tested = scores.read_scores(store.home, row).scores if isinstance(row, StoredJob) else ()
    value = format_metric(tested[-1].metric, tested[-1].value) if tested else ""
    if held is not None and not tested:
        value = format_metric(held.metric, held.weighted)
    return {
        "run": row.id,
        "status": store.current_status(row) if isinstance(row, StoredJob) else row.status,
        "waits": wait_reasons.describe_wait(row, store) if isinstance(row, StoredJob) and not problem else None,
        "submitter": row.submitter if isinstance(row, StoredJob) else None,
        "method": row.job.method if isinstance(row, StoredJob) else None,
        "of": row.job.rounds if isinstance(row, StoredJob) else None,
        "rounds": None if summary is None else summary.completed_rounds,
        "result": value or None,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created)),
        "problem": problem,
        "energy_j": taken.energy_j,
        "net_j": taken.net_j,
        "energy_error_j": taken.energy_error_j,
        "task_j": taken.task_j,
        "example_j": taken.example_j,
        "point_j": None if summary is None else energy_per_point_j(progress_points(summary)),
        "round_j": [] if summary is None else [each.energy_j for each in summary.round_costs().values()],
        "bytes": own.get(row.id, 0),
        "tasks": taken.tasks,
        "metered": taken.metered,
    }


STATUS: Final = {
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
    "held": "yellow",
    UNAPPROVED: "yellow",
}  # colour by status


def format_runs(rows: Sequence[dict[str, Any]], wide: int | None = None) -> list[str]:
    fine = [row for row in rows if row["problem"] is None]
    cells = [
        [
            row["run"],
            row["status"],
            f"{row['rounds']}/{row['of']}",
            (row["result"] or "-").removeprefix("accuracy "),
            units.format_bytes(row["bytes"]),
            row["began"][5:16],
        ]
        for row in fine
    ]
    odd = ["{run}  {status}  cannot be read: {problem}".format(**row) for row in rows if row["problem"] is not None]
    head = [["run", "status", "rounds", "result", "disk", "began"]] if fine else []
    waits = [f"{row['run']} waits for {row['waits']}" for row in fine if row["waits"]]
    return [*table.format_table([*head, *cells], "<<>>><", wide, STATUS), *odd, *waits]


def _format_number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
