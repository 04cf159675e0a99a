"""End of a job whose round cannot reach its quorum, with cause and fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedquilt.coordinator.rounds.events import JobEnded, JobState
from fedquilt.coordinator.rounds.selection import REFUSALS, UPDATE, LastingDecline


def quorum_failure_event(state: JobState, enough: int, failed: Mapping[str, LastingDecline]) -> JobEnded:
    of_round = {device: kept for device, kept in state.refused.items() if kept.round == state.round}
    refused = {device: (kept.code, kept.reason) for device, kept in {**failed, **of_round}.items()}
    asked = {*state.asked_s, *state.answered, *state.declined, *refused} - state.idle
    if refused and len(refused) + len(state.answered) >= len(asked):
        codes = [code for code, _ in Counter(code for code, _ in refused.values()).most_common()]
        causes = "; ".join(_summarise_refusals(state.round, code, refused, len(asked)) for code in codes)
        return JobEnded("failed", f"{causes}.\nFix: {REFUSALS[codes[0]].fix}.", codes[0])
    passing = {device: ("", reason) for device, reason in state.declined.items() if device not in refused}
    return JobEnded("failed", _describe_failed_round(state, enough, refused | passing))


def _summarise_refusals(round: int, code: str, refused: Mapping[str, tuple[str, str]], asked: int) -> str:
    reasons = [reason for _, (found, reason) in sorted(refused.items()) if found == code]
    reason, count = Counter(reasons).most_common(1)[0]
    example = "" if count == len(reasons) else f"{min(d for d, each in refused.items() if each == (code, reason))}: "
    devices = f"{len(reasons)} of {asked} {'device' if asked == 1 else 'devices'}"
    return f"{REFUSALS[code].cause} in round {round + 1} on {devices}" + (f" ({example}{reason})" if reason else "")


def format_by_reason(declined: Mapping[str, str], most: int = 5) -> str:
    """Return up to `most` reasons as text, each after its devices: "a, b and 6 more: too big"."""
    devices: dict[str, list[str]] = {}
    for device, reason in sorted(declined.items()):
        devices.setdefault(reason, []).append(device)
    more = {reason: f" and {len(names) - most} more" for reason, names in devices.items() if len(names) > most}
    told = list(devices.items())[:most]
    said = [f"{', '.join(names[:most])}{more.get(reason, '')}: {reason}" for reason, names in told]
    others = len(devices) - most
    return "; ".join([*said, *([f"{others} more reason{'s' * (others > 1)}"] if others > 0 else [])])


def _describe_failed_round(state: JobState, enough: int, reasons: Mapping[str, tuple[str, str]]) -> str:
    asked = state.asked_s.keys() | state.answered.keys() | reasons.keys()
    rejected = {device for device, (code, _) in reasons.items() if code == UPDATE} | (
        state.declined.keys() & state.roll
    )
    declined = reasons.keys() - rejected - state.idle
    silent = sorted(asked - state.answered.keys() - reasons.keys())
    counts = [
        f"{len(state.answered)} answered",
        *([f"{len(declined)} declined"] if declined else []),
        *([f"{len(rejected)} sent what was rejected"] if rejected else []),
        *([f"{len(state.idle)} had nothing to do"] if state.idle else []),
        *([f"{len(silent)} stayed silent"] if silent else []),
    ]
    refused = format_by_reason({device: reason for device, (_, reason) in reasons.items()})
    return (
        f"round {state.round + 1} asked {len(asked)} {'device' if len(asked) == 1 else 'devices'} in "
        f"{state.attempt + 1} {'attempt' if not state.attempt else 'attempts'}: {', '.join(counts)}, "
        f"and {enough} {'update is' if enough == 1 else 'updates are'} needed"
        + (f"; refused: {refused}" if refused else "")
        + (f"; silent: {', '.join(silent[:5])}" if silent else "")
        + ".\nFix: see to these devices and `fedquilt resume` the run (a simulated fleet: the same command again), or "
        "run the job anew with another [cohort] size, quorum or deadline_s."
    )
