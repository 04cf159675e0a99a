"""Events of a run as text, for `fedquilt run` and `fedquilt logs`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedquilt import metrics
from fedquilt.console import table, units
from fedquilt.coordinator.rounds import events, privacy, selection
from fedquilt.coordinator.rounds.job_state import JobState
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

FINAL_EVALUATION: Final = "final evaluation"
FINAL_STATISTICS: Final = "statistics for the final evaluation"
CANCEL_TEXTS: Final = {
    "deadline": "no update within [cohort] deadline_s",
    "staleness": "the state of its task is older than [cohort] staleness.max",
}
HIDDEN_METRICS: Final = ("macro_precision", "macro_recall", "micro_precision", "micro_recall", "micro_f1")
"""Metrics that a line does not show."""


def format_status(summary: RunSummary, state: JobState) -> list[str]:
    """Return the three lines of the status block: the round, the costs so far, and the devices."""
    round_text = f"round {state.completed_rounds + 1} of {state.constants.rounds}"
    if state.is_work_done:
        round_text = FINAL_STATISTICS if state.is_evaluation_round else FINAL_EVALUATION
    usage, cohort = state.usage, len(state.pending_devices) + len(state.accepted_updates)
    energy_parts = [f"{run_summary.format_joules(usage.joules)}{summary.total.energy_word}"] if usage.metered else []
    devices = [f"{len(state.accepted_updates)} of {cohort} devices answered" if cohort else "no device selected yet"]
    if state.is_buffered:
        age = describe_staleness(summary.running.max_staleness, "up to ")
        devices = [f"{len(state.accepted_updates)} of {state.cohort_size} updates{age}"]
    devices += [f"{len(state.pending_devices)} at work"] if state.pending_devices else []
    devices += [f"declined: {selection.format_by_reason(state.decline_reasons, 3)}"] if state.decline_reasons else []
    costs = [*energy_parts, f"{units.format_bytes(usage.bytes)} so far"]
    costs += filter(None, [privacy.describe_spent_budget(state)])
    return [round_text, ", ".join(costs), ", ".join(devices)]


def is_evaluation_due(state: JobState) -> bool:
    """Return whether an evaluation of the present state by devices is due, by `check_every` or at the end."""
    interval = 0 if state.constants.check_beside else state.constants.check_every
    return bool(interval) and (state.is_work_done or state.completed_rounds % interval == 0)


def format_score(scores: PersonalScores | None) -> str:
    if scores is None:
        return ""
    priors_text = "" if scores.with_priors is None else f", with class priors {100 * scores.with_priors:.1f} %"
    return format_metric(scores.metric, scores.weighted) + priors_text


def format_metric(name: str, value: float) -> str:
    metric = metrics.METRICS[name]
    return f"{metric.title} {metrics.format_value(metric, value, 1)}"


def describe_best_round(summary: RunSummary, command: str) -> list[str]:
    """Return a line on the best held-out evaluation with the command that exports it, or [] if the last is the best."""
    evaluated = [(point.rounds, point.personal) for point in progress_points(summary) if point.personal is not None]
    if not evaluated:
        return []
    sign = 1 if metrics.METRICS[evaluated[-1][1].metric].higher else -1
    rounds, best = max(evaluated, key=lambda point: sign * point[1].weighted)
    best_text, last_text = (format_metric(each.metric, each.weighted) for each in (best, evaluated[-1][1]))
    return [] if best_text == last_text else [f"best held-out {best_text} after round {rounds}: `{command}`"]


def format_round_name(number: int, final: int | None) -> str:
    """Return "round N", counted from 1, or "final evaluation" for the number `final`."""
    return FINAL_EVALUATION if number == final else f"round {number + 1}"


def format_round(summary: RoundSummary, rounds: int, score: str, width: int) -> str:
    """Return the line of a committed round. Parts that exceed `width` columns are left out."""
    cost, loss = summary.cost, summary.train_loss
    device_count = f"{cost.tasks} device{'s' * (cost.tasks != 1)}"
    parts = [
        score or ("" if loss is None else f"loss {_format_number(loss)}"),
        f"{cost.tasks} of {summary.selected} devices" if 0 < cost.tasks < summary.selected else "",
        describe_staleness(summary.max_staleness, "up to ").removeprefix(", "),
        _format_energy(cost),
        units.format_bytes(cost.down_bytes + cost.up_bytes) if cost.tasks else "",
        device_count if 0 < cost.tasks >= summary.selected else "",
    ]
    line, separator = f"round {summary.rounds_before + 1} of {rounds}", ": "
    for part in filter(None, parts):
        if len(line) + len(separator) + len(part) <= width:
            line, separator = line + separator + part, ", "
    return line


def format_event(previous_summary: RunSummary, event: events.AnyEvent, new_summary: RunSummary) -> list[str]:
    """Return an event as lines. Those of a committed round include its devices and costs."""
    is_final = is_of_final_evaluation(new_summary.state, event)
    if isinstance(event, events.RoundCommitted):
        return _describe_commit(
            event, is_final, list(previous_summary.state.accepted_updates.values()), len(previous_summary.selected)
        )
    # the summary contains all earlier events
    if isinstance(event, events.RoundRetried) and previous_summary.state.phase != "new":
        name = FINAL_EVALUATION if is_final else f"round {event.round + 1}"
        return [f"{name}: {_describe_retry(event, previous_summary.state)}"]
    lines = format_single_event(event, is_final)
    missing = sorted(previous_summary.state.pending_devices - new_summary.state.pending_devices)
    if isinstance(event, events.RoundClosed) and missing:
        lines = [f"{lines[0]}; no update from {wait_reasons.format_names(missing)}"]
    return lines


def format_single_event(event: events.AnyEvent, is_final_evaluation: bool = False) -> list[str]:
    """Return an event as lines, without devices and costs. A final evaluation has no round number."""
    if isinstance(event, events.RoundCommitted):
        return _describe_commit(event, is_final_evaluation, (), 0)
    return _describe_event(
        event, FINAL_EVALUATION if is_final_evaluation else f"round {getattr(event, 'round', -1) + 1}"
    )


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_format_number(value)}" for name, value in sorted(metrics.items()))


def _describe_event(event: events.AnyEvent, name: str) -> list[str]:
    match event:
        case events.NoteRecorded():
            return [event.text]
        case events.JobStarted():
            return ["started"]
        case events.ModeChosen(mode=mode, reason=reason):
            return [f"{mode} rounds: {reason}"]
        case events.PrivacyPlanned():
            limit = f"{event.contributions} {'update' if event.contributions == 1 else 'updates'}"
            noise = f"the noise on their sum is {event.noise_multiplier:g} times [privacy] clip"
            return [f"privacy: at most {limit} of each of {event.devices} devices count, and {noise}"]
        case events.EligibilityRecorded():
            ineligible_parts = [
                f"{', '.join(devices)}: {selection.reason_text(c)}" for c, devices in event.ineligible.items()
            ]
            eligible_parts = [f"eligible: {', '.join(event.eligible)}"] if event.eligible else []
            return [f"{name}: {'; '.join([*eligible_parts, *ineligible_parts]) or 'new energy costs of devices'}"]
        case events.CohortSelected():
            attempt_text = f", attempt {event.attempt + 1}" if event.attempt else ""
            deadline_text = f"; deadline {event.deadline_s:.0f} s" if event.deadline_s is not None else ""
            changed_epochs = ", ".join(f"{device} {epochs}" for device, epochs in sorted(event.epochs.items()))
            epoch_lines = [f"{name}: epochs for least energy: {changed_epochs}"] if changed_epochs else []
            return [
                f"{name}{attempt_text}: cohort {', '.join(event.devices)}{deadline_text}",
                *epoch_lines,
                *event.coverage,
            ]
        case events.TaskDeclined():
            return [f"{name}: {event.device} declined ({event.code}): {event.reason}"]
        case events.TasksCancelled():
            return [f"{name}: {', '.join(event.devices)} cancelled: {CANCEL_TEXTS[event.reason]}"]
        case events.UpdateAccepted():
            notes = [event.update.note] if event.update.note else []
            usage = format_usage(event.update.usage)
            sender = _describe_sender(event.update) + describe_version(event)
            return [f"{name}: update from {sender}: {usage}", *notes]
        case events.UpdateRejected():
            return [f"{name}: update from {event.device} rejected: {event.reason}"]
        case events.UpdateLost():
            return [f"{name}: update from {event.device} lost, requested again: {event.reason}"]
        case events.UpdatesAggregated():
            count = f"{len(event.devices)} {'update' if len(event.devices) == 1 else 'updates'}"
            return [f"{name}: partial aggregate of {count} stored ({event.sum.size / 1e6:.0f} MB), updates deleted"]
        case events.RoundClosed():
            return [f"{name}: closed to further updates"]
        case events.DeadlineExtended():
            return [f"{name}: no quorum by the deadline; the round stays open until there is one"]
        case events.RoundRetried():
            return [f"{name}: no quorum; starting another attempt"]
        case events.AttemptResumed(passed_s=passed_s):
            return [f"{name}: coordinator restarted; {passed_s:.0f} s of the deadline have elapsed"]
        case events.JobEnded():
            return format_end(event.status, event.reason)
        case events.JobResumed():
            return ["resumed"]
        case _:
            raise AssertionError(event)


def format_end(status: str, reason: str) -> list[str]:
    prefix = "job failed" if status == "failed" else status
    return f"{prefix}: {reason}".splitlines() if reason else [prefix]


def _describe_retry(event: events.RoundRetried, previous_state: JobState) -> str:
    """Return why an attempt had no quorum and what follows, as text that follows the round's name."""
    silent_devices = sorted(previous_state.pending_devices)
    declining_devices = previous_state.decline_reasons.keys() - previous_state.devices_without_work
    update_count = len(previous_state.accepted_updates)
    parts = [f"{update_count} {'update' if update_count == 1 else 'updates'}"]
    if rejected := sorted(declining_devices & previous_state.cohort):  # a decline removes the device from the cohort
        parts.append(f"update of {wait_reasons.format_names(rejected)} rejected")
    if declined := sorted(declining_devices - previous_state.cohort):
        parts.append(f"{wait_reasons.format_names(declined)} declined")
    if previous_state.devices_without_work:
        parts.append(f"no task for {wait_reasons.format_names(sorted(previous_state.devices_without_work))}")
    if silent_devices:
        parts.append(f"nothing from {wait_reasons.format_names(silent_devices)}")
    reason = (
        " by the deadline"
        if silent_devices or not previous_state.decline_reasons
        else ", and no other device can be selected"
    )
    next_step = "starting another attempt"
    if event.attempt == previous_state.attempt:
        next_step = "repeating the attempt, as devices are offline or working for other jobs"
    return f"no quorum{reason} ({', '.join(parts)}); {next_step}"


def _describe_commit(
    event: events.RoundCommitted, is_final_evaluation: bool, updates: Sequence[Update], selected: int
) -> list[str]:
    # devices evaluate the state of the previous round
    staleness = max((event.round - update.round for update in updates), default=0)
    counts = [f"{len(updates)} of {selected} devices{describe_staleness(staleness, 'up to ')}"] if selected else []
    counts += filter(None, [_format_energy(run_summary.sum_costs(updates))])
    evaluation_parts = describe_evaluation(event.evaluation)
    if is_final_evaluation:
        lines = [f"{FINAL_EVALUATION}: {', '.join([*evaluation_parts, *counts]) or 'done'}"]
    else:
        action = "statistics for the evaluation gathered" if event.is_evaluation_round else "updates aggregated"
        parts = [f"{action} ({', '.join(counts)})" if counts else action]
        parts += [_format_metrics(event.metrics)] if event.metrics and not event.notes else []
        if evaluation_parts:
            timing = "at the start" if not event.round else f"after round {event.round}"
            parts.append(f"{timing}: {', '.join(evaluation_parts)}")
        parts += [] if event.spent_epsilon is None else [f"epsilon {event.spent_epsilon:.3g} spent"]
        lines = [f"round {event.round + 1}: {'; '.join(parts)}"]
    return [*lines, *event.notes, *event.warnings]


def describe_staleness(commits: int, bound: str = "") -> str:
    """Return the age of an update as text: ", up to 3 commits old" with `bound` "up to ", or "" for 0."""
    return f", {bound}{commits} commit{'s' * (commits > 1)} old" if commits else ""


def describe_version(event: events.UpdateAccepted) -> str:
    """Return how old an update is and the round of its task, or "" if the task is of the running round."""
    return f"{age} (task of round {event.update.round + 1})" if (age := describe_staleness(event.staleness)) else ""


def describe_evaluation(sums: EvaluationSums | None) -> list[str]:
    if sums is None or not sums.examples:
        return []
    main_text, *other_texts = metrics.describe_metrics(sums, 1, skip=HIDDEN_METRICS)
    device_summary = metrics.summarise_over_devices(sums)
    if device_summary is not None and device_summary.devices > 1:
        main = metrics.MAIN_METRICS[sums.task]
        lines = (
            metrics.format_value(main, value, 1)
            for value in (device_summary.worst_decile, device_summary.gap, device_summary.deviation)
        )
        names = f"worst tenth of {device_summary.devices} devices", "gap to the best tenth", "spread"
        other_texts.insert(0, ", ".join(map(" ".join, zip(names, lines, strict=True))))
    if sums.correct_with_priors is not None:
        other_texts.insert(0, f"with the devices' class priors {100 * sums.correct_with_priors / sums.examples:.1f} %")
    return [f"{main_text} on {sums.examples} held-out examples", *other_texts]


def _format_energy(cost: CostLedger) -> str:
    if cost.energy_j is None:
        return ""
    coverage = "" if cost.metered == cost.tasks else f" of {cost.metered} with a meter"
    return f"{run_summary.format_joules(cost.energy_j)}{cost.energy_word}{coverage}"


def _describe_sender(update: Update) -> str:
    sender = update.device
    if update.site_devices:
        sender += f" of {len(update.site_devices)} {'board' if len(update.site_devices) == 1 else 'boards'}"
    if update.devices_usage is not None:
        transfers = update.devices_usage
        sender += (
            f" (transferred {units.format_bytes(transfers.down_bytes)} down and "
            f"{units.format_bytes(transfers.up_bytes)} up)"
        )
    return sender


def format_usage(usage: Usage) -> str:
    scale, prefix = units.select_prefix(usage.wall_s) if usage.wall_s < 0.1 else (1.0, "")
    parts = [f"{usage.wall_s / scale:.2f} {prefix}s"]
    if usage.energy_j is not None:
        net_j = None if usage.idle_j is None else usage.energy_j - usage.idle_j
        source = run_summary.describe_source([str(usage.energy_source)])
        parts.append(run_summary.format_energy(usage.energy_j, net_j, usage.energy_error_j) + source)
    if usage.peak_bytes is not None:
        parts.append(f"peak {units.format_bytes(usage.peak_bytes)}")
    parts.append(f"{units.format_bytes(usage.down_bytes)} down, {units.format_bytes(usage.up_bytes)} up")
    return ", ".join(parts)


def format_energy_summary(summary: RunSummary) -> list[str]:
    """Return two lines on the energy of a run and its source, or [] if nothing was measured."""
    total = summary.total
    if total.energy_j is None or total.task_j is None:
        return []
    parts, rounds = [f"{run_summary.format_number(total.task_j)} J per task"], len(summary.round_costs())
    if rounds:
        parts.append(f"{run_summary.format_number(total.energy_j / rounds)} J per round")
    if total.example_j is not None:
        parts.append(f"{run_summary.format_number(total.example_j)} J per example")
    points = progress_points(summary)
    if (point_j := energy_per_point_j(points)) is not None:
        metric = next(point.personal.metric for point in points if point.personal is not None)
        parts.append(f"{run_summary.format_number(point_j)} J per point of {metrics.METRICS[metric].title}")
    energy = run_summary.format_energy(total.energy_j, total.net_j, total.energy_error_j)
    tasks = f"{total.metered} task{'s' * (total.metered != 1)}"
    coverage = "" if total.metered == total.tasks else f" of {total.tasks}; the others were not metered"
    return [
        f"energy: {energy} for {tasks}{coverage}: {', '.join(parts)}",
        f"energy{total.energy_word or ' measured'} by: {total.energy_source}",
    ]


def summarise_run(
    row: StoredJob | UnreadableRow,
    store: Store,
    bytes_by_run: Mapping[str, int] = {},
    changes: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return the values of a run for `fedquilt ls`. "problem" is why it is unreadable, or None."""
    summary = None
    problem = row.reason if isinstance(row, UnreadableRow) else None
    if isinstance(row, StoredJob):
        try:
            summary = summarise_events(row.job, store.read_events(row.id))
        except JobError as error:
            problem = str(error)
    cost = CostLedger() if summary is None else summary.total
    results: dict[str, str] = {}
    if isinstance(row, StoredJob) and summary is not None:
        results = scores.describe_results(summary, scores.read_scores(store.home, row))
    return {
        "run": row.id,
        "status": store.current_status(row) if isinstance(row, StoredJob) else row.status,
        "waits": wait_reasons.describe_wait(row, store) if isinstance(row, StoredJob) and not problem else None,
        "changed": changes.get(row.id, ""),
        "submitter": row.submitter if isinstance(row, StoredJob) else None,
        "method": row.job.method if isinstance(row, StoredJob) else None,
        "of": row.job.rounds if isinstance(row, StoredJob) else None,
        "rounds": None if summary is None else summary.completed_rounds,
        "held_out": results.get("held_out"),
        "test": results.get("test"),
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created)),
        "epsilon": None if summary is None else summary.spent_epsilon,
        "problem": problem,
        "energy_j": cost.energy_j,
        "net_j": cost.net_j,
        "energy_error_j": cost.energy_error_j,
        "task_j": cost.task_j,
        "example_j": cost.example_j,
        "point_j": None if summary is None else energy_per_point_j(progress_points(summary)),
        "round_j": [] if summary is None else [each.energy_j for each in summary.round_costs().values()],
        "bytes": bytes_by_run.get(row.id, 0),
        "tasks": cost.tasks,
        "metered": cost.metered,
    }


# colour by status
STATUS_COLOURS: Final = {
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
    "held": "yellow",
    UNAPPROVED: "yellow",
}


def format_runs(rows: Sequence[dict[str, Any]], width: int | None = None) -> list[str]:
    readable = [row for row in rows if row["problem"] is None]
    result_names = ["held_out", "test"] if any(row["test"] for row in readable) else ["held_out"]
    has_privacy = any(row["epsilon"] is not None for row in readable)
    has_changes = any(row["changed"] for row in readable)
    cells = [
        [
            row["run"],
            row["status"],
            f"{row['rounds']}/{row['of']}",
            *((row[name] or "-").removeprefix("accuracy ") for name in result_names),
            *(["-" if row["epsilon"] is None else f"{row['epsilon']:.3g}"] if has_privacy else []),
            units.format_bytes(row["bytes"]),
            *([row["changed"]] if has_changes else []),
        ]
        for row in readable
    ]
    problem_lines = [
        "{run}  {status}  cannot be read: {problem}".format(**row) for row in rows if row["problem"] is not None
    ]
    titles = [*(name.replace("_", "-") for name in result_names), *(["epsilon"] if has_privacy else [])]
    head = [["run", "status", "rounds", *titles, "disk", *(["changed"] if has_changes else [])]] if readable else []
    wait_lines = [f"{row['run']} waits for {row['waits']}" for row in readable if row["waits"]]
    alignment = f"<<{'>' * (2 + len(titles))}{'~' * has_changes}"
    return [
        *table.format_table([*head, *cells], alignment, width, STATUS_COLOURS),
        *problem_lines,
        *wait_lines,
    ]


def _format_number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
