"""Short constructors of events, and the job states that follow from events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.events import (
    PHASES,
    TRANSITIONS,
    AnyEvent,
    CohortSelected,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.core import BlobRef, Update, Usage, WorkEstimate

BLOB = BlobRef(sha256="a" * 64, size=1)


def update(device: str, round: int = 0) -> Update:
    return Update(job="j-1", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())


def workload_of(flops: float) -> DeviceWorkload:
    return DeviceWorkload(WorkEstimate(flops=flops))


def started_state(rounds: int = 2, check_every: int = 0, **cohort: float | str) -> JobState:
    plan = JobConstants(0, rounds, msgspec.convert({"deadline_s": 10.0, **cohort}, CohortSettings), check_every)
    return apply_event(JobState(plan), JobStarted(BLOB), 0.0)


def apply_events(state: JobState, *events: AnyEvent, now_s: float = 0.0) -> JobState:
    for event in events:
        state = apply_event(state, event, now_s)
    return state


def summarise_events(events: Iterable[AnyEvent | tuple[float, AnyEvent]], rounds: int = 100) -> RunSummary:
    """Return the summary of events, after insertion of the missing starts and ends of rounds."""
    summary = RunSummary(JobState(JobConstants(0, rounds, CohortSettings(), 0)))
    for entry in events:
        time_s, event = entry if isinstance(entry, tuple) else (0.0, entry)
        while type(event).__name__ not in ALLOWED[summary.state.phase] or summary.state.round < getattr(
            event, "round", 0
        ):
            number = summary.state.round
            step: dict[str, AnyEvent] = {
                "new": JobStarted(BLOB),
                "selecting": CohortSelected(number, 0, ("a",)),
                "open": RoundClosed(number),
                "closing": committed(number),
            }
            summary = summary.with_event(step[summary.state.phase], time_s)
        summary = summary.with_event(event, time_s)
    return summary


ALLOWED = {phase: [name for name, moves in TRANSITIONS.items() if phase in moves] for phase in PHASES}


def committed(round: int, finished: bool = False) -> RoundCommitted:
    return RoundCommitted(round, BLOB, finished, {})


def whole_round(*devices: str, round: int = 0, selected: str = "") -> list[AnyEvent]:
    """Return the events of a round with updates of these devices."""
    answers = [UpdateAccepted(round, update(device, round)) for device in devices]
    return [CohortSelected(round, 0, tuple(selected) or devices), *answers, RoundClosed(round), committed(round)]
