"""Outcome of each device in each round, computed from the event log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Final

from fedquilt.coordinator import device_columns, settings
from fedquilt.coordinator.fleet.device_status import CurrentTask
from fedquilt.coordinator.rounds import events, selection
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages, wait_reasons
from fedquilt.coordinator.views.devices import load_devices
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.core import JobError
from fedquilt.formats import toml


@dataclasses.dataclass(frozen=True)
class DeviceOutcome:
    code: str  # answered, asked, declined, refused, drawn ("not drawn"), or a key of `eligibility.REASONS`
    text: str
    place: int | None = None  # of "not drawn": position in the order of selection, from 1
    of: int | None = None  # number of eligible devices
    wanted: int | None = None  # number of devices selected


def load_outcomes(store: Store, run: str) -> RoundOutcomes:
    """Return the outcomes of a run, found by its id or its job's name."""
    row = store.find_job(run)
    told = RoundOutcomes(events.JobConstants.from_job(row.job))
    for _, at_s, fact in store.read_events(row.id):
        told.apply_event(fact, at_s)
    if store.current_status(row) == "running":
        _mark_queued_uploads(
            told.found,
            row.id,
            {each.board.device: doing for each in load_devices(store.home) if (doing := each.board.doing)},
        )
    return told


def warn_of_weights(store: Store, job: JobSettings, facts: Iterable[events.AnyEvent]) -> str | None:
    """Return a warning if one device of a job can outweigh the others, or None.

    There is no warning for a home without certificates and limits.toml, where every client of the broker can act as any
    device.
    """
    bounded = job.cohort.max_examples is not None or job.method == "robust"
    if bounded or not (store.was_authenticated() or (store.home / settings.LIMITS_FILE).exists()):
        return None
    devices, by_examples = set[str](), False
    for fact in facts:
        match fact:
            case events.EligibilityRecorded(eligible=found) | events.CohortSelected(devices=found):
                devices.update(found)
            case events.UpdateAccepted(update=update):
                by_examples = by_examples or update.weight != 1.0
    if not by_examples or len(devices) > device_columns.MIN_DEVICES_FOR_MEDIAN:
        return None
    return (
        f"one device can outweigh the others: of {len(devices)} devices no median bounds the weight by examples. Set "
        "[cohort] max_examples to the most examples that a device has"
    )


def _mark_queued_uploads(
    found: Mapping[int, dict[str, DeviceOutcome]], run: str, doing: Mapping[str, CurrentTask]
) -> None:
    others = sum(each.step == "sending" for each in doing.values())
    first = (
        f"{others} {'other is' if others == 1 else 'others are'} being sent or read" if others else "others are read"
    )
    said = (
        f"selected; its update waits for its turn to be sent: {first}, and more do not fit (waiting_mb of limits.toml)"
    )
    for device, each in doing.items():
        part = found.get(each.round, {}).get(device)
        if (each.job, each.step) == (run, "waiting") and part is not None and part.code == "asked":
            found[each.round][device] = DeviceOutcome("asked", said)


def outcomes_by_round(
    facts: Iterable[events.AnyEvent], plan: events.JobConstants
) -> dict[int, dict[str, DeviceOutcome]]:
    told = RoundOutcomes(plan)
    for fact in facts:
        told.apply_event(fact)
    return told.found


class RoundOutcomes:
    """Outcomes of a run's devices, updated event by event."""

    def __init__(self, plan: events.JobConstants) -> None:
        self.summary = RunSummary(events.JobState(plan))  # after the last event
        # The result of `outcomes_by_round`. A caller that follows a run may delete earlier rounds.
        self.found = dict[int, dict[str, DeviceOutcome]]()

    def apply_event(self, fact: events.AnyEvent, at_s: float = 0.0) -> None:
        state, found = self.summary.state, self.found
        match fact:
            case events.CohortSelected():
                _set_outcomes(found, fact.round, _selection_outcomes(state, fact), anew=fact.devices)
            case events.TaskDeclined():
                found[fact.round][fact.device] = DeviceOutcome("declined", f"declined ({fact.code}): {fact.reason}")
            case events.UpdateRejected():
                found[fact.round][fact.device] = DeviceOutcome("refused", f"update refused: {fact.reason}")
            case events.UpdateAccepted():
                found[fact.round][fact.update.device] = DeviceOutcome("answered", "update received")
                through = DeviceOutcome("answered", f"update received, of the site {fact.update.device}")
                found[fact.round].update(dict.fromkeys(fact.update.boards, through))
            case events.RoundRetried():
                late = DeviceOutcome(
                    "asked", "selected; no update by the deadline: another attempt at the round asks it last"
                )
                again = dict.fromkeys(state.pending_devices, late)
                found.setdefault(fact.round, {}).update(again)
            case events.RoundCommitted():
                silent = [device for device, part in found.get(fact.round, {}).items() if part.code == "asked"]
                late = DeviceOutcome("asked", "selected; no update before the round closed")
                found.setdefault(fact.round, {}).update(dict.fromkeys(silent, late))
            case events.JobEnded(status=status) if state.phase not in _UNTIL_THE_END:  # else it has not gone on since
                silent = [device for device, part in found.get(state.round, {}).items() if part.code == "asked"]
                if silent:
                    found[state.round].update(
                        dict.fromkeys(silent, DeviceOutcome("asked", f"selected; {_UNTIL_THE_END[status]}"))
                    )
            case _:
                pass
        self.summary = self.summary.with_event(fact, at_s)
        state = self.summary.state
        # in case that nobody can be asked
        if isinstance(fact, events.EligibilityRecorded) and state.phase == "selecting":
            barred = {
                device: DeviceOutcome(selection.reason_key(code), selection.reason_text(code))
                for device, code in state.ineligibility_reasons.items()
            }
            _set_outcomes(found, fact.round, barred)


ASKED: Final = ("answered", "asked", "declined", "refused")  # codes of those who have been asked in the round

_UNTIL_THE_END: Final = {
    "failed": "no update by the deadline",
    "stopped": "no update before the run was stopped",
    "done": "no update before the run ended",
}


def _set_outcomes(
    found: dict[int, dict[str, DeviceOutcome]], round: int, told: Mapping[str, DeviceOutcome], anew: Iterable[str] = ()
) -> None:
    """Set the outcomes of a round, but keep those of selected devices that are not in `anew`."""
    known, again = found.setdefault(round, {}), set(anew)
    for device, part in told.items():
        if device in again or device not in known or known[device].code not in ASKED:
            known[device] = part


def _selection_outcomes(state: events.JobState, fact: events.CohortSelected) -> Mapping[str, DeviceOutcome]:
    settled = {*state.pending_devices, *state.accepted_updates, *state.decline_reasons}
    free = state.eligible - settled
    wanted = len(fact.devices)
    silent = [device for device in state.silent_devices if device in free]
    fresh = free.difference(silent)
    drawn = selection.rank_devices(
        state.constants.seed,
        fact.round,
        fresh,
        wanted,
        costs=state.costs,
        last_selected_rounds=state.last_selected_rounds,
        turns=state.constants.cohort.turns,
    )
    order = [*drawn, *silent]
    told = {
        device: DeviceOutcome(selection.reason_key(code), selection.reason_text(code))
        for device, code in state.ineligibility_reasons.items()
        if device not in settled
    }
    for number, device in enumerate(order, 1):
        text = f"not drawn: place {number} of {len(order)}, {wanted} selected"
        told[device] = DeviceOutcome("drawn", text, number, len(order), wanted)
    return {**told, **dict.fromkeys(fact.devices, DeviceOutcome("asked", "selected"))}


def format_outcomes(told: RoundOutcomes, round: int | None = None, device: str | None = None) -> list[str]:
    """Return outcomes as text: by rounds with the same outcomes, or of one device."""
    chosen = filter_outcomes(told.found, round, device)
    last = None if told.summary.final is None else told.summary.final + 1
    shown = []
    for (final, lines), group in groupby(chosen, lambda n: (n == last, _format_devices(chosen[n], device))):
        numbers = list(group)
        name = f"rounds {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"round {numbers[0]}"
        name = event_messages.FINAL if final else name
        shown += [f"{name}: {lines[0]}"] if device is not None else [f"{name}:", *lines]
    return shown


def _format_devices(devices: Mapping[str, DeviceOutcome], device: str | None) -> list[str]:
    if device is not None:
        return [devices[device].text]
    groups: dict[str, list[str]] = {}
    for name, part in sorted(devices.items(), key=lambda each: (each[1].place or 0, each[0])):
        text = part.text
        if part.code == "drawn":
            text = f"not drawn, by place ({part.wanted} of {part.of} selected)"
        groups.setdefault(text, []).append(name)
    return [f"  {text}: {wait_reasons.format_names(members, 12)}" for text, members in groups.items()]


def filter_outcomes(
    found: Mapping[int, Mapping[str, DeviceOutcome]], round: int | None, device: str | None
) -> dict[int, dict[str, DeviceOutcome]]:
    """Return the outcomes by round number from 1, of one round and one device or, with None, of all."""
    by_number = {number + 1: dict(parts) for number, parts in sorted(found.items())}
    if round is not None and round not in by_number:
        so_far = f"{min(by_number)} to {max(by_number)}" if by_number else "none"
        raise JobError(f"there has been no round {round}; rounds so far: {so_far}")
    chosen = {number: parts for number, parts in by_number.items() if round in (None, number)}
    if device is None:
        return chosen
    known = {name for parts in found.values() for name in parts}
    if device not in known:
        raise JobError(f"the run has no device {device!r}{toml.describe_choices(device, sorted(known), 'it knows')}")
    unheard = DeviceOutcome("unknown", "not known by then")
    return {number: {device: parts.get(device, unheard)} for number, parts in chosen.items()}
