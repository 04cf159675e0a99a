"""End of a job whose round cannot reach its quorum, with cause and fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedquilt.coordinator.rounds.events import JobEnded
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.rounds.selection import DECLINE_REASONS, UPDATE, LastingDecline


def quorum_failure_event(state: JobState, quorum: int, recurring_failures: Mapping[str, LastingDecline]) -> JobEnded:
    round_declines = {
        device: decline for device, decline in state.lasting_declines.items() if decline.round == state.round
    }
    declines = {
        device: (decline.code, decline.reason) for device, decline in {**recurring_failures, **round_declines}.items()
    }
    selected_devices = {
        *state.selected_s,
        *state.accepted_updates,
        *state.decline_reasons,
        *declines,
    } - state.devices_without_work
    if declines and len(declines) + len(state.accepted_updates) >= len(selected_devices):
        codes = [code for code, _ in Counter(code for code, _ in declines.values()).most_common()]
        causes = "; ".join(_summarise_refusals(state.round, code, declines, len(selected_devices)) for code in codes)
        return JobEnded("failed", f"{causes}.\nFix: {DECLINE_REASONS[codes[0]].fix}.", codes[0])
    other_declines = {
        device: ("", reason) for device, reason in state.decline_reasons.items() if device not in declines
    }
    return JobEnded("failed", _describe_failed_round(state, quorum, declines | other_declines))


def _summarise_refusals(round: int, code: str, declines: Mapping[str, tuple[str, str]], selected_count: int) -> str:
    reasons = [reason for _, (decline_code, reason) in sorted(declines.items()) if decline_code == code]
    reason, count = Counter(reasons).most_common(1)[0]
    example = (
        "" if count == len(reasons) else f"{min(d for d, decline in declines.items() if decline == (code, reason))}: "
    )
    devices = f"{len(reasons)} of {selected_count} {'device' if selected_count == 1 else 'devices'}"
    return f"{DECLINE_REASONS[code].cause} in round {round + 1} on {devices}" + (
        f" ({example}{reason})" if reason else ""
    )


def format_by_reason(reasons_by_device: Mapping[str, str], max_shown: int = 5) -> str:
    """Return up to `max_shown` reasons as text, each after its devices: "a, b and 6 more: too big"."""
    devices: dict[str, list[str]] = {}
    for device, reason in sorted(reasons_by_device.items()):
        devices.setdefault(reason, []).append(device)
    suffixes = {
        reason: f" and {len(names) - max_shown} more" for reason, names in devices.items() if len(names) > max_shown
    }
    shown_reasons = list(devices.items())[:max_shown]
    parts = [f"{', '.join(names[:max_shown])}{suffixes.get(reason, '')}: {reason}" for reason, names in shown_reasons]
    hidden_count = len(devices) - max_shown
    return "; ".join([*parts, *([f"{hidden_count} more reason{'s' * (hidden_count > 1)}"] if hidden_count > 0 else [])])


def _describe_failed_round(state: JobState, quorum: int, reasons: Mapping[str, tuple[str, str]]) -> str:
    selected_devices = state.selected_s.keys() | state.accepted_updates.keys() | reasons.keys()
    rejected = {device for device, (code, _) in reasons.items() if code == UPDATE} | (
        state.decline_reasons.keys() & state.cohort
    )
    declined = reasons.keys() - rejected - state.devices_without_work
    silent = sorted(selected_devices - state.accepted_updates.keys() - reasons.keys())
    counts = [
        f"{len(state.accepted_updates)} answered",
        *([f"{len(declined)} declined"] if declined else []),
        *([f"{len(rejected)} sent what was rejected"] if rejected else []),
        *([f"{len(state.devices_without_work)} had nothing to do"] if state.devices_without_work else []),
        *([f"{len(silent)} stayed silent"] if silent else []),
    ]
    refused = format_by_reason({device: reason for device, (_, reason) in reasons.items()})
    return (
        f"round {state.round + 1} asked {len(selected_devices)} "
        f"{'device' if len(selected_devices) == 1 else 'devices'} in {state.attempt + 1} "
        f"{'attempt' if not state.attempt else 'attempts'}: {', '.join(counts)}, and {quorum} "
        f"{'update is' if quorum == 1 else 'updates are'} needed"
        + (f"; refused: {refused}" if refused else "")
        + (f"; silent: {', '.join(silent[:5])}" if silent else "")
        + ".\nFix: see to these devices and `fedquilt resume` the run (a simulated fleet: the same command again), or "
        "run the job anew with another [cohort] size, quorum or deadline_s."
    )
