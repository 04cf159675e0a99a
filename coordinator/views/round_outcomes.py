"""Outcome of each device in each round, computed from the event log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final

from fedquilt.console import table
from fedquilt.coordinator import device_columns, settings
from fedquilt.coordinator.fleet.device_status import CurrentTask
from fedquilt.coordinator.rounds import events, selection
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages, wait_reasons
from fedquilt.coordinator.views.devices import load_devices
from fedquilt.coordinator.views.run_summary import RunSummary, format_contribution
from fedquilt.core import JobError
from fedquilt.formats import toml


@dataclasses.dataclass(frozen=True)
class DeviceOutcome:
    # answered, asked, declined, refused (update rejected), drawn (not selected), or a key of `selection.REASONS`
    code: str
    text: str
    position: int | None = None  # position in the order of selection, from 1, of a device not drawn
    eligible_count: int | None = None  # number of eligible devices
    cohort_size: int | None = None  # number of devices selected


def load_outcomes(store: Store, run: str) -> RoundOutcomes:
    row = store.find_job(run)
    outcomes = RoundOutcomes(JobConstants.from_job(row.job))
    for _, time_s, event in store.read_events(row.id):
        outcomes.apply_event(event, time_s)
    if store.current_status(row) == "running":
        _mark_queued_uploads(
            outcomes.by_round,
            row.id,
            {each.board.device: doing for each in load_devices(store.home) if (doing := each.board.doing)},
        )
    return outcomes


def warn_of_weights(store: Store, job: JobSettings, logged_events: Iterable[events.AnyEvent]) -> str | None:
    """Return a warning if one device of a job can outweigh the others, or None.

    There is no warning for a home without certificates and limits.toml, where every client of the broker can act as any
    device.
    """
    is_bounded = job.cohort.max_examples is not None or job.method == "robust"
    if is_bounded or not (store.was_authenticated() or (store.home / settings.LIMITS_FILE).exists()):
        return None
    devices, is_weighted_by_examples = set[str](), False
    for event in logged_events:
        match event:
            case events.EligibilityRecorded(eligible=event_devices) | events.CohortSelected(devices=event_devices):
                devices.update(event_devices)
            case events.UpdateAccepted(update=update):
                is_weighted_by_examples = is_weighted_by_examples or update.weight != 1.0
    if not is_weighted_by_examples or len(devices) > device_columns.MIN_DEVICES_FOR_MEDIAN:
        return None
    return (
        f"one device can outweigh the others: of {len(devices)} devices no median bounds the weight by examples. Set "
        "[cohort] max_examples to the most examples that a device has"
    )


def _mark_queued_uploads(
    by_round: Mapping[int, dict[str, DeviceOutcome]], run: str, current_tasks: Mapping[str, CurrentTask]
) -> None:
    sending_count = sum(task.step == "sending" for task in current_tasks.values())
    queue_text = (
        f"{sending_count} {'other is' if sending_count == 1 else 'others are'} in transfer or being validated"
        if sending_count
        else "others are being validated"
    )
    text = (
        f"selected; its update waits for its transfer: {queue_text}, and there is no room for more (waiting_mb in "
        "limits.toml)"
    )
    for device, task in current_tasks.items():
        outcome = by_round.get(task.round, {}).get(device)
        if (task.job, task.step) == (run, "waiting") and outcome is not None and outcome.code == "asked":
            by_round[task.round][device] = DeviceOutcome("asked", text)


def outcomes_by_round(
    logged_events: Iterable[events.AnyEvent], constants: JobConstants
) -> dict[int, dict[str, DeviceOutcome]]:
    outcomes = RoundOutcomes(constants)
    for event in logged_events:
        outcomes.apply_event(event)
    return outcomes.by_round


class RoundOutcomes:
    def __init__(self, constants: JobConstants) -> None:
        self.summary = RunSummary(JobState(constants))  # after the last event
        # The result of `outcomes_by_round`. A caller that follows a run may delete earlier rounds.
        self.by_round = dict[int, dict[str, DeviceOutcome]]()

    def apply_event(self, event: events.AnyEvent, at_s: float = 0.0) -> None:
        state, by_round = self.summary.state, self.by_round
        match event:
            case events.CohortSelected():
                _set_outcomes(by_round, event.round, _selection_outcomes(state, event), replaced=event.devices)
            case events.TaskDeclined():
                outcome = DeviceOutcome("declined", f"declined ({event.code}): {event.reason}")
                by_round.setdefault(event.round, {})[event.device] = outcome
            case events.UpdateRejected():
                outcome = DeviceOutcome("refused", f"update refused: {event.reason}")
                by_round.setdefault(event.round, {})[event.device] = outcome
            case events.TasksCancelled():
                text = f"cancelled: {event_messages.CANCEL_TEXTS[event.reason]}"
                cancelled_outcomes = dict.fromkeys(event.devices, DeviceOutcome("asked", text))
                by_round.setdefault(event.round, {}).update(cancelled_outcomes)
            case events.UpdateAccepted():
                outcome = DeviceOutcome("answered", f"update received{event_messages.describe_version(event)}")
                by_round.setdefault(event.round, {})[event.update.device] = outcome
                site_outcome = DeviceOutcome("answered", f"update received from its site {event.update.device}")
                by_round[event.round].update(dict.fromkeys(event.update.site_devices, site_outcome))
            case events.RoundRetried():
                late_outcome = DeviceOutcome(
                    "asked", "selected; no update by the deadline: selected last in the next attempt"
                )
                late_outcomes = dict.fromkeys(state.pending_devices, late_outcome)
                by_round.setdefault(event.round, {}).update(late_outcomes)
            case events.RoundCommitted():
                silent_devices = [
                    device for device, outcome in by_round.get(event.round, {}).items() if outcome.code == "asked"
                ]
                late_outcome = DeviceOutcome("asked", "selected; no update before the round closed")
                open_outcome = DeviceOutcome("asked", "at work when the round was committed")
                by_round.setdefault(event.round, {}).update(
                    dict.fromkeys(silent_devices, late_outcome) | dict.fromkeys(state.pending_devices, open_outcome)
                )
            case events.JobEnded(status=status) if (
                state.phase not in _END_TEXTS
            ):  # not after an earlier end without a resume
                silent_devices = [
                    device for device, outcome in by_round.get(state.round, {}).items() if outcome.code == "asked"
                ]
                if silent_devices:
                    by_round[state.round].update(
                        dict.fromkeys(silent_devices, DeviceOutcome("asked", f"selected; {_END_TEXTS[status]}"))
                    )
            case _:
                pass
        self.summary = self.summary.with_event(event, at_s)
        state = self.summary.state
        # in case no device can be selected
        if isinstance(event, events.EligibilityRecorded) and state.phase == "selecting":
            ineligible = {
                device: DeviceOutcome(selection.reason_key(code), selection.reason_text(code))
                for device, code in state.ineligibility_reasons.items()
                if code != selection.REMOVED
            }
            _set_outcomes(by_round, event.round, ineligible)


SELECTED_CODES: Final = ("answered", "asked", "declined", "refused")  # codes of selected devices

_END_TEXTS: Final = {
    "failed": "no update by the deadline",
    "stopped": "no update before the run was stopped",
    "done": "no update before the run ended",
}


def _set_outcomes(
    by_round: dict[int, dict[str, DeviceOutcome]],
    round: int,
    outcomes: Mapping[str, DeviceOutcome],
    replaced: Iterable[str] = (),
) -> None:
    """Set the outcomes of a round, but keep those of selected devices that are not in `replaced`."""
    round_outcomes, replaced_devices = by_round.setdefault(round, {}), set(replaced)
    for device, outcome in outcomes.items():
        if (
            device in replaced_devices
            or device not in round_outcomes
            or round_outcomes[device].code not in SELECTED_CODES
        ):
            round_outcomes[device] = outcome


def _selection_outcomes(state: JobState, event: events.CohortSelected) -> Mapping[str, DeviceOutcome]:
    answered_devices = {*state.pending_devices, *state.accepted_updates, *state.decline_reasons}
    available_devices = state.eligible - answered_devices
    cohort_size = len(event.devices)
    silent_devices = [device for device in state.silent_devices if device in available_devices]
    ranking = selection.rank_devices(state.draw, available_devices.difference(silent_devices), cohort_size)
    full_ranking = [*ranking, *silent_devices]
    outcomes = {
        device: DeviceOutcome(selection.reason_key(code), selection.reason_text(code))
        for device, code in state.ineligibility_reasons.items()
        if device not in answered_devices and code != selection.REMOVED
    }
    for number, device in enumerate(full_ranking, 1):
        text = f"not drawn: place {number} of {len(full_ranking)}, {cohort_size} selected"
        outcomes[device] = DeviceOutcome("drawn", text, number, len(full_ranking), cohort_size)
    return {**outcomes, **dict.fromkeys(event.devices, DeviceOutcome("asked", "selected"))}


def format_outcomes(outcomes: RoundOutcomes, round: int | None = None, device: str | None = None) -> list[str]:
    """Return outcomes as lines. Raise JobError if `round` or `device` is unknown.

    Successive rounds with equal outcomes are printed once.
    """
    selected = filter_outcomes(outcomes.by_round, round, device)
    final_number = (
        None if outcomes.summary.final_evaluation_round is None else outcomes.summary.final_evaluation_round + 1
    )
    shown = []
    for (final, lines), group in groupby(selected, lambda n: (n == final_number, _format_devices(selected[n], device))):
        numbers = list(group)
        name = f"rounds {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"round {numbers[0]}"
        name = event_messages.FINAL_EVALUATION if final else name
        shown += [f"{name}: {lines[0]}"] if device is not None else [f"{name}:", *lines]
    return shown


def format_contributions(summary: RunSummary, device: str | None = None) -> list[str]:
    """Return the updates of each device as lines, in buffered mode, or [] in synchronous mode."""
    if not summary.state.is_buffered or not summary.total.tasks:
        return []
    rows = [["device", "updates", "share", "commits old, mean"]]
    for name, cost in summary.device_costs().items():
        if device in (None, name):
            rows.append([name, str(cost.tasks), *format_contribution(cost, summary.total)])
    return table.format_table(rows, "<>>>")


def _format_devices(devices: Mapping[str, DeviceOutcome], device: str | None) -> list[str]:
    if device is not None:
        return [devices[device].text]
    groups: dict[str, list[str]] = {}
    for name, outcome in sorted(devices.items(), key=lambda item: (item[1].position or 0, item[0])):
        text = outcome.text
        if outcome.code == "drawn":
            text = f"not drawn, by place ({outcome.cohort_size} of {outcome.eligible_count} selected)"
        groups.setdefault(text, []).append(name)
    return [f"  {text}: {wait_reasons.format_names(names, 12)}" for text, names in groups.items()]


def filter_outcomes(
    by_round: Mapping[int, Mapping[str, DeviceOutcome]], round: int | None, device: str | None
) -> dict[int, dict[str, DeviceOutcome]]:
    """Return outcomes by round number, from 1. Raise JobError if `round` or `device` is unknown.

    The argument `round` also counts from 1, but the keys of `by_round` from 0.
    """
    by_number = {number + 1: dict(parts) for number, parts in sorted(by_round.items())}
    if round is not None and round not in by_number:
        available = f"{min(by_number)} to {max(by_number)}" if by_number else "none so far"
        raise JobError(f"round {round} does not exist: choose from {available}")
    selected = {number: parts for number, parts in by_number.items() if round in (None, number)}
    if device is None:
        return selected
    devices = {name for parts in by_round.values() for name in parts}
    if device not in devices:
        raise JobError(f"the run has no device {device!r}{toml.describe_choices(device, sorted(devices), 'it knows')}")
    unknown = DeviceOutcome("unknown", "not known yet")
    return {number: {device: parts.get(device, unknown)} for number, parts in selected.items()}
