"""Facts of a job in few words, and the rounds that they lead to."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.events import (
    PHASES,
    TRANSITIONS,
    AnyEvent,
    CohortSelected,
    JobConstants,
    JobStarted,
    JobState,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    apply_event,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.views.run_summary import RunSummary
from fedquilt.core import BlobRef, Update, Usage, WorkEstimate

BLOB = BlobRef(sha256="a" * 64, size=1)


def update(device: str, round: int = 0) -> Update:
    return Update(job="j-1", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())


def asking(flops: float) -> DeviceWorkload:
    return DeviceWorkload(WorkEstimate(flops=flops))


def begun(rounds: int = 2, check_every: int = 0, **cohort: float | str) -> JobState:
    plan = JobConstants(0, rounds, msgspec.convert({"deadline_s": 10.0, **cohort}, CohortSettings), check_every)
    return apply_event(JobState(plan), JobStarted(BLOB), 0.0)


def after(state: JobState, *facts: AnyEvent, now_s: float = 0.0) -> JobState:
    for fact in facts:
        state = apply_event(state, fact, now_s)
    return state


def summarised(facts: Iterable[AnyEvent | tuple[float, AnyEvent]], rounds: int = 100) -> RunSummary:
    """Return the summary of events, with the starts and ends of rounds that such a log must have between them."""
    found = RunSummary(JobState(JobConstants(0, rounds, CohortSettings(), 0)))
    for each in facts:
        at, fact = each if isinstance(each, tuple) else (0.0, each)
        while type(fact).__name__ not in ALLOWED[found.state.phase] or found.state.round < getattr(fact, "round", 0):
            number = found.state.round
            step: dict[str, AnyEvent] = {
                "new": JobStarted(BLOB),
                "selecting": CohortSelected(number, 0, ("a",)),
                "open": RoundClosed(number),
                "closing": committed(number),
            }
            found = found.with_event(step[found.state.phase], at)
        found = found.with_event(fact, at)
    return found


ALLOWED = {phase: [name for name, moves in TRANSITIONS.items() if phase in moves] for phase in PHASES}


def committed(round: int, finished: bool = False) -> RoundCommitted:
    return RoundCommitted(round, BLOB, finished, {})


def whole_round(*devices: str, round: int = 0, asked: str = "") -> list[AnyEvent]:
    """The facts of a round in which these devices answered."""
    answers = [UpdateAccepted(round, update(device, round)) for device in devices]
    return [CohortSelected(round, 0, tuple(asked) or devices), *answers, RoundClosed(round), committed(round)]
