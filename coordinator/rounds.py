"""The life of a job's rounds, decided purely: no I/O, no clock, no randomness of its own.

What has happened is a sequence of facts. `apply` folds one fact into the state; `decide` says
which facts should come next, given the time and who is online. The server writes each fact to the
event log before it acts on it, so replaying the log after a crash gives the same state, and what
is open is issued again.

    SELECTING --Asked--> OPEN --Closed--> CLOSING --Committed--> SELECTING (next round) ... Ended
                          |  ^
                          +--+ Declined, Answered, Rejected, Asked (replacements), Reopened (no quorum)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from fedquilt.coordinator.cohort import sample
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import Action, BlobRef, Update

DECLINED_S = 10.0  # for others to come, when everybody who is there has declined

# -- facts ----------------------------------------------------------------------------------------


class Fact(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Something that has happened to a job, as the event log keeps it."""


class Started(Fact, frozen=True):
    """The method's first state is stored."""

    state: BlobRef


class Asked(Fact, frozen=True):
    """These devices get the round's task."""

    round: int
    attempt: int
    devices: tuple[str, ...]


class Declined(Fact, frozen=True):
    """A device refused its task, or gave it up."""

    round: int
    device: str
    code: str
    reason: str


class Answered(Fact, frozen=True):
    """A device's update is here, checked, its blobs on disk."""

    round: int
    update: Update


class Rejected(Fact, frozen=True):
    """A device's update may not be folded."""

    round: int
    device: str
    reason: str


class Closed(Fact, frozen=True):
    """No more updates are taken into this round."""

    round: int


class Reopened(Fact, frozen=True):
    """The deadline passed without a quorum; the round is tried again with what it has."""

    round: int
    attempt: int


class Committed(Fact, frozen=True):
    """The round's updates are folded; `state` is what came of it."""

    round: int
    state: BlobRef
    finished: bool
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


class Ended(Fact, frozen=True):
    """The job is over, or interrupted until it is resumed."""

    status: Literal["done", "failed", "stopped"]
    reason: str = ""


class Resumed(Fact, frozen=True):
    """A stopped or failed job goes on where it was."""


AnyFact = Started | Asked | Declined | Answered | Rejected | Closed | Reopened | Committed | Ended | Resumed

# -- state ----------------------------------------------------------------------------------------

Phase = Literal["new", "selecting", "open", "closing", "done", "failed", "stopped"]


@dataclass(frozen=True)
class Plan:
    """What does not change during a job."""

    seed: int
    rounds: int
    cohort: Cohort
    check_every: int  # 0: never


@dataclass(frozen=True)
class Rounds:
    """Where a job stands."""

    plan: Plan
    phase: Phase = "new"
    round: int = 0
    attempt: int = 0
    opened_s: float = 0.0  # when the running attempt began, on this process's clock
    state: BlobRef | None = None
    asked: frozenset[str] = frozenset()  # asked in this attempt, and not answered, declined or rejected
    answered: Mapping[str, Update] = field(default_factory=dict)  # device -> its update of this round
    declined: Mapping[str, str] = field(default_factory=dict)  # device -> why; not asked again in this attempt
    history: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # device -> rounds it contributed to
    finished: bool = False  # the method says that it is done
    checked: bool = False  # the closing evaluation has been made
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether all the work is done, and at most the closing evaluation is left."""
        return self.finished or self.round >= self.plan.rounds

    @property
    def actions(self) -> tuple[Action, ...]:
        """What a task of this round consists of."""
        every = self.plan.check_every
        if self.over:
            return ("check",)
        return ("check", "work") if every and self.round % every == 0 else ("work",)

    def deadline_left_s(self, now_s: float) -> float:
        """Seconds until the running attempt's deadline."""
        return max(self.opened_s + self.plan.cohort.deadline_s - now_s, 0.0)


def apply(state: Rounds, fact: AnyFact, now_s: float) -> Rounds:
    """The state after a fact. A fact that does not belong to the running round changes nothing."""
    match fact:
        case Started():
            return replace(state, phase="selecting", state=fact.state)
        case Resumed():
            begun = state.asked or state.answered
            return replace(
                state, phase="open" if begun else "selecting", opened_s=now_s, attempt=0, declined={}, reason=""
            )
        case Ended():
            return replace(state, phase=fact.status, reason=fact.reason)
        case Asked() if fact.round == state.round:
            opened = now_s if state.phase == "selecting" else state.opened_s
            return replace(state, phase="open", opened_s=opened, asked=state.asked | set(fact.devices))
        case Declined() if fact.round == state.round:
            declined = {**state.declined, fact.device: fact.reason}
            return replace(state, asked=state.asked - {fact.device}, declined=declined)
        case Rejected() if fact.round == state.round:
            declined = {**state.declined, fact.device: fact.reason}
            return replace(state, asked=state.asked - {fact.device}, declined=declined)
        case Answered() if fact.round == state.round:
            answered = {**state.answered, fact.update.device: fact.update}
            return replace(state, asked=state.asked - {fact.update.device}, answered=answered)
        case Closed() if fact.round == state.round:
            return replace(state, phase="closing", asked=frozenset())
        case Reopened() if fact.round == state.round:
            return replace(state, phase="open", attempt=fact.attempt, asked=frozenset(), declined={}, opened_s=now_s)
        case Committed() if fact.round == state.round:
            return _committed(state, fact, now_s)
        case _:
            return state


def _committed(state: Rounds, fact: Committed, now_s: float) -> Rounds:
    took_part = {device: (*state.history.get(device, ()), state.round) for device in state.answered}
    return replace(
        state,
        phase="selecting",
        round=state.round + 1,
        attempt=0,
        opened_s=now_s,
        state=fact.state,
        asked=frozenset(),
        answered={},
        declined={},
        history={**state.history, **took_part},
        finished=state.finished or fact.finished,
        checked=state.over,
    )


# -- decisions ------------------------------------------------------------------------------------


def decide(state: Rounds, now_s: float, online: Collection[str]) -> AnyFact | None:
    """The fact that should come next; None: nothing until something happens or `next_s`.

    `online` are the devices that could take a task of this round.
    """
    if state.phase == "selecting":
        return _select(state, online)
    if state.phase == "open":
        return _attend(state, now_s, online)
    return None


def next_s(state: Rounds) -> float:
    """When time alone will change what `decide` says."""
    return state.opened_s + _patience_s(state) if state.phase == "open" else math.inf


def wanted(state: Rounds, online: Collection[str]) -> int:
    """How many contributions close the round at once. Without a size: of all who are there and have not declined."""
    return state.plan.cohort.size or len({*online, *state.answered} - set(state.declined)) or 1


def _select(state: Rounds, online: Collection[str]) -> AnyFact | None:
    plan = state.plan
    if state.over and (state.checked or not plan.check_every):
        return Ended("done")
    if state.round == 0 and len(online) < plan.cohort.min_devices:
        return None
    free = set(online) - set(state.answered) - set(state.declined)
    want = wanted(state, online) - len(state.answered)
    count = math.ceil(want * (1 + plan.cohort.over_select))
    chosen = sample(plan.seed, state.round, free, count)
    return Asked(state.round, state.attempt, chosen) if chosen else None


def _attend(state: Rounds, now_s: float, online: Collection[str]) -> AnyFact | None:
    cohort = state.plan.cohort
    have, want = len(state.answered), wanted(state, online)
    if have >= want:
        return Closed(state.round)
    enough = have >= max(1, math.ceil(want * cohort.quorum))
    if now_s >= next_s(state):
        if enough:
            return Closed(state.round)
        if not online:
            return Reopened(state.round, state.attempt)  # a fleet that is gone for a night costs no attempt
        if state.attempt + 1 >= cohort.attempts:
            return Ended("failed", _no_quorum(state, want))
        return Reopened(state.round, state.attempt + 1)
    free = set(online) - set(state.answered) - set(state.declined) - state.asked
    missing = math.ceil((want - have) * (1 + cohort.over_select)) - len(state.asked & set(online))
    chosen = sample(state.plan.seed, state.round, free, missing) if missing > 0 else ()
    if chosen:
        return Asked(state.round, state.attempt, chosen)
    if not state.asked and enough:
        return Closed(state.round)
    return None


def _patience_s(state: Rounds) -> float:
    """How long an attempt may take; not long when all who could be asked have declined."""
    deadline_s = state.plan.cohort.deadline_s
    return min(deadline_s, DECLINED_S) if state.declined and not state.asked else deadline_s


def _no_quorum(state: Rounds, want: int) -> str:
    reasons = "; ".join(f"{device}: {reason}" for device, reason in sorted(state.declined.items())[:5])
    silent = ", ".join(sorted(state.asked)[:5])
    return (
        f"round {state.round} had {len(state.answered)} of {want} updates after {state.attempt + 1} attempts"
        + (f"; refused: {reasons}" if reasons else "")
        + (f"; silent: {silent}" if silent else "")
        + "; see to these devices and `fedquilt resume` it, or run the job anew with another "
        "[cohort] size, quorum or deadline_s"
    )
