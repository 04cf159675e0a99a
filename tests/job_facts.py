"""Facts of a job in few words, and the rounds that they lead to."""

from __future__ import annotations

import msgspec

from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import Answered, AnyFact, Asked, Closed, Committed, Rounds, Started, apply_event
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import BlobRef, Update, Usage, Work

BLOB = BlobRef(sha256="a" * 64, size=1)


def update(device: str, round: int = 0) -> Update:
    return Update(job="j-1", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())


def asking(flops: float) -> Ask:
    return Ask(Work(flops=flops))


def begun(rounds: int = 2, check_every: int = 0, **cohort: float | str) -> Rounds:
    plan = Plan(0, rounds, msgspec.convert({"deadline_s": 10.0, **cohort}, Cohort), check_every)
    return apply_event(Rounds(plan), Started(BLOB), 0.0)


def after(state: Rounds, *facts: AnyFact, now_s: float = 0.0) -> Rounds:
    for fact in facts:
        state = apply_event(state, fact, now_s)
    return state


def committed(round: int, finished: bool = False) -> Committed:
    return Committed(round, BLOB, finished, {})


def whole_round(*devices: str, round: int = 0, asked: str = "") -> list[AnyFact]:
    """The facts of a round in which these devices answered."""
    answers = [Answered(round, update(device, round)) for device in devices]
    return [Asked(round, 0, tuple(asked) or devices), *answers, Closed(round), committed(round)]
