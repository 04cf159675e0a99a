"""Rollouts: what a rollout is to do, its facts, the state that they add up to, and which fact comes next. Pure.

A rollout offers a release to a few boards first, the canary, and to the next share of the fleet once those before
have answered. The log of its facts is its whole state, as with jobs: after a crash it goes on where the log ends. What
a board is to have follows from the state alone (`release`), so that nothing else has to be remembered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from fedquilt import labels, onnx_format, wire
from fedquilt.coordinator.rollout_plan import Plan as Plan
from fedquilt.coordinator.rounds import passed_at_restart
from fedquilt.core import Count, JobError, Label, Name, Profile, Sentence, derived, shorten_error
from fedquilt.core.messages import UPGRADES

Status: TypeAlias = Literal["queued", "running", "done", "aborted", "rolled back"]

SETTLED: Final = frozenset({"committed", "refused", "returned"})
FAILED: Final = frozenset({"refused", "returned"})
SWAPPED: Final = frozenset({"checking", "soaking"})  # a board that falls silent in these may have failed by the release
MEASURED: Final = frozenset({"accuracy", "accuracy_before", "latency_s", "energy_j", "peak_bytes"})  # and kept
UNABLE: Final = "no launcher started the agent"
LONGEST_S: Final = 86400.0  # a board that is there and waits, checks or soaks for longer holds nobody up any more

# -- facts ----------------------------------------------------------------------------------------


class Fact(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """An event of a rollout, as its log stores it."""


class Begun(Fact, frozen=True):
    """A coordinator has taken the rollout up; its releases have this serial."""

    serial: Count
    without: dict[Name, Sentence] = {}  # devices that it selects and that cannot take its release -> why


class Offered(Fact, frozen=True):
    """Boards are offered the release, as part of a step: 0 is the canary."""

    step: int
    devices: tuple[Name, ...]


class Heard(Fact, frozen=True):
    """A board has said how far it is."""

    device: Name
    serial: Count
    phase: wire.Phase
    reason: Sentence = ""
    metrics: dict[Label, float] = {}


class Restarted(Fact, frozen=True):
    """A coordinator has taken the rollout up while a step runs: how much of its limits of time has passed."""

    silent_s: float  # of the time for which a step waits for a board that is offline or has said nothing
    present_s: float  # of the time for which a step waits for a board that is there and has not ended


class Passed(Fact, frozen=True):
    """The boards of a step have answered well enough; `silent`: those that were not waited for any longer."""

    step: int
    silent: tuple[Name, ...] = ()


class Done(Fact, frozen=True):
    """All steps have passed. Boards that were away, and new ones, still get it."""


class Aborted(Fact, frozen=True):
    """The rollout goes no further; releases of this serial return boards to what they ran before."""

    reason: Sentence
    serial: Count


class RolledBack(Fact, frozen=True):
    """A rollout that was done is taken back; releases of this serial return boards to what they ran before."""

    serial: Count


AnyFact: TypeAlias = Begun | Offered | Heard | Restarted | Passed | Done | Aborted | RolledBack

ALLOWED: Final[Mapping[type[Fact], tuple[Status, ...]]] = {
    Begun: ("queued",),
    Offered: ("running", "done"),
    Heard: ("running", "done", "aborted", "rolled back"),
    Restarted: ("running",),
    Passed: ("running",),
    Done: ("running",),
    Aborted: ("queued", "running"),
    RolledBack: ("done",),
}
"""Fact -> states of a rollout in which it may happen."""


# -- state ----------------------------------------------------------------------------------------


class Rollout(msgspec.Struct, frozen=True):
    """One rollout as its facts have it."""

    id: str
    plan: Plan
    status: Status = "queued"
    serial: int = 0  # of its releases
    back: int = 0  # of the releases that take it back; 0: there are none
    step: int = 0  # the one that runs, or comes next; the canary's is 0
    offered: Mapping[str, int] = {}  # device -> the step in which it was offered
    heard: Mapping[str, Heard] = {}  # device -> what it said last of it
    reason: str = ""  # why it was aborted
    without: Mapping[str, str] = {}  # devices that were left out at its start, as they cannot take its release -> why
    silent: frozenset[str] = frozenset()  # without whom a step has passed, and who have said nothing since
    silent_s: float = 0.0  # as of the latest `Restarted` of the step that runs
    present_s: float = 0.0
    restarts: int = 0  # of coordinators while the step runs

    @property
    def under_way(self) -> bool:
        """Whether the rollout has not come to its end."""
        return self.status in ("queued", "running")

    @property
    def open(self) -> bool:
        """Whether boards have been offered the step that runs."""
        return self.status == "running" and self.step in self.offered.values()

    @property
    def over(self) -> bool:
        """Whether the rollout was aborted or rolled back."""
        return self.back > 0

    def phase(self, device: str) -> str:
        """How far a board is with the latest release of the rollout; "": it has said nothing of that."""
        told = self.heard.get(device)
        if told is None:
            return ""
        ended = self.over and told.phase in FAILED  # it has nothing to return from
        return told.phase if ended or told.serial == (self.back or self.serial) else ""

    def standing(self, device: str) -> str:
        """`phase`, or "lost" for a board that fell silent while it checked or soaked and is not waited for any more."""
        phase = self.phase(device)
        return "lost" if phase in SWAPPED and device in self.silent else phase

    def counts(self) -> dict[str, int]:
        """`standing` -> number of the boards that were offered it; "" stands for those that have said nothing."""
        found: dict[str, int] = {}
        for device in self.offered:
            standing = self.standing(device)
            found[standing] = found.get(standing, 0) + 1
        return found


def apply(state: Rollout, fact: AnyFact) -> Rollout:
    """The state after a fact.

    Raises:
        JobError: it cannot happen in this state: the log was not written by these rules.
    """
    if state.status not in ALLOWED[type(fact)]:
        raise JobError(f"{type(fact).__name__} cannot follow in {state.id}, which is {state.status}")
    match fact:
        case Begun(serial, without):
            return replace(state, status="running", serial=serial, without=without)
        case Offered(step, devices):
            offered = {**state.offered, **dict.fromkeys(devices, step)}
            return replace(state, offered=offered, silent_s=0.0, present_s=0.0, restarts=0)
        case Heard(device):
            return replace(state, heard={**state.heard, device: fact}, silent=state.silent - {device})
        case Restarted(silent_s, present_s):
            return replace(state, silent_s=silent_s, present_s=present_s, restarts=state.restarts + 1)
        case Passed(step, silent):
            return replace(state, step=step + 1, silent=state.silent.union(silent))
        case Done():
            return replace(state, status="done")
        case Aborted(reason, serial):
            return replace(state, status="aborted", reason=reason, back=serial)
        case RolledBack(serial):
            return replace(state, status="rolled back", back=serial)


def told(state: Rollout, device: str, message: wire.Installed) -> Heard | None:
    """The fact that a board's message is to this rollout; None: it is none, or known."""
    if device not in state.offered or message.kind != state.plan.kind:
        return None
    now = state.back or state.serial
    metrics = {name: value for name, value in message.metrics.items() if name in MEASURED and math.isfinite(value)}
    fact = Heard(device, message.serial, message.phase, message.reason, metrics)
    if message.rollout != state.id or message.serial > now:
        if message.serial <= now:
            return None  # of an earlier one: it has not read this one's release yet
        later = (
            f"it has release {message.serial} of {message.rollout}, and this is {now}: deploy anew, as its later one"
        )
        fact = Heard(device, now, "refused", later)
    elif message.serial not in (state.serial, now):
        return None
    return None if state.heard.get(device) == fact else fact


def release(state: Rollout, device: str) -> wire.Release | None:
    """What a board is to be sent because of this rollout; None: nothing.

    A board is to return if it has not said that it refused the release or has returned already, as one that has said
    nothing may have it. A board that does not run this rollout's release has nothing to return from, and says so.
    """
    plan, before = state.plan, state.heard.get(device)
    if device not in state.offered:
        return None
    if not state.over:
        return wire.Release(
            rollout=state.id,
            kind=plan.kind,
            serial=state.serial,
            blob=plan.blob,
            name=plan.name,
            limits=plan.limits,
            input_shape=plan.input_shape,
            soak_s=plan.soak_s,
            window=plan.window,
            force=plan.force,
            settings=plan.settings,
        )
    if before is not None and before.serial == state.serial and before.phase in FAILED:
        return None
    return wire.Release(
        rollout=state.id, kind=plan.kind, serial=state.back, name=plan.name, back=True, force=plan.force
    )


# -- which fact comes next ------------------------------------------------------------------------


class Seen(NamedTuple):
    """A board as it is now."""

    online: bool
    since_s: float  # when it was last there, or last said how far it is, whichever is later
    labels: Collection[str] | None = None  # None: it has not said what it is
    able: bool = True  # to take the rollout's release at all

    def chosen(self, select: Sequence[str]) -> bool:
        """Whether a selection by labels names it."""
        return self.labels is not None and labels.selects(select, self.labels)


def concerned(state: Rollout, every: Sequence[Rollout], boards: Mapping[str, Seen]) -> dict[str, Seen]:
    """The boards that a rollout selects, or has offered its release to, and that no later one has or will have.

    Args:
        state: of the rollout.
        every: all rollouts, in the order in which they were queued.
        boards: all boards; those that the rollout was offered to are among them.
    """
    at = next(place for place, each in enumerate(every) if each.id == state.id)
    later = [each for each in every[at + 1 :] if each.plan.kind == state.plan.kind]
    goes_on = [each for each in later if not each.over and (each.status != "done" or each.plan.to_all)]
    coming = [each.plan.select for each in goes_on]
    return {
        device: seen
        for device, seen in boards.items()
        if not any(device in each.offered for each in later)
        and (
            device in state.offered
            or (seen.able and seen.chosen(state.plan.select) and not any(seen.chosen(select) for select in coming))
        )
    }


def hindrance(plan: Plan, profile: Profile) -> str:
    """Why a device that says so cannot take a release, so that it is offered none and does not count; "": it can."""
    if plan.kind == "agent":
        return UNABLE if UPGRADES in profile.versions else ""
    return "" if plan.versions is None else onnx_format.unsupported_versions(plan.versions, profile.versions)


def left_out(plan: Plan, profiles: Mapping[str, Profile]) -> dict[str, str]:
    """Devices that a plan selects and that cannot take its release -> why."""
    chosen = {name: profile for name, profile in profiles.items() if labels.selects(plan.select, profile.labels)}
    reasons = {name: hindrance(plan, profile) for name, profile in sorted(chosen.items())}
    return {name: reason for name, reason in reasons.items() if reason}


def format_left_out(without: Mapping[str, str], most: int) -> str:
    """Devices that were left out as text, those of one reason together, at most so many of each."""
    said = []
    for reason in dict.fromkeys(without.values()):
        names = [name for name in without if without[name] == reason]
        more = f" and {len(names) - most} more" if len(names) > most else ""
        said.append(f"{', '.join(names[:most])}{more} ({reason})")
    return "; ".join(said)


def decide_rollout(
    state: Rollout, fleet: Mapping[str, Seen], now_s: float, serial: int, without: Mapping[str, str] | None = None
) -> AnyFact | None:
    """Return the next event of a rollout, or None to wait.

    Args:
        state: of the rollout.
        fleet: the boards that it selects and that no later rollout has.
        now_s: seconds of the coordinator's clock.
        serial: that a release may have which is made now: greater than any before.
        without: devices that it selects and that cannot take its release -> why.
    """
    if state.status == "queued":
        return Begun(serial, dict(without or {}))
    if state.status == "done":
        late = _late(state, fleet)
        return Offered(len(state.plan.phases), late) if late else None
    if state.status != "running":
        return None
    if state.step == len(state.plan.shares):
        return Done()
    if state.without and not state.offered and not fleet:
        why = f"no selected device can take the release: {format_left_out(state.without, 1)}; select other devices"
        return Aborted(shorten_error(why), serial)
    failed, answered = _failed(state), [device for device in state.offered if state.phase(device) in SETTLED]
    most = state.plan.abort_above
    canary = sum(step == 0 for step in state.offered.values())
    if len(failed) > most * max(len(answered), canary):
        return Aborted(_abort_reason(state, failed, len(answered)), serial)
    if not state.open:
        if devices := chosen(state, fleet):
            return Offered(state.step, devices)
        return Passed(state.step) if state.step and fleet else None  # all that are there have it already
    if waits(state, fleet, now_s):
        return None
    pending = [device for device in state.offered if state.phase(device) not in SETTLED]
    lost = [device for device in pending if state.phase(device) in SWAPPED]
    if len(failed) + len(lost) > most * (len(answered) + len(lost)):
        return Aborted(_abort_reason(state, [*failed, *lost], len(answered) + len(lost)), serial)
    return Passed(state.step, tuple(sorted(each for each in pending if state.offered[each] == state.step)))


def chosen(state: Rollout, fleet: Mapping[str, Seen]) -> tuple[str, ...]:
    """Boards that the next step offers the release to: drawn by the rollout's id, the same after every restart.

    Of those that are there, so many that not more than the step's share of them have it, but one at least. The step of
    all boards takes those that are away as well.
    """
    share = state.plan.shares[state.step]
    if share >= 1.0:
        return tuple(sorted(fleet.keys() - state.offered.keys()))
    there = [device for device, seen in fleet.items() if seen.online]
    count = max(1, int(share * len(there) + 1e-9)) - sum(device in fleet for device in state.offered)
    draw = derived("rollout", state.id)
    able = sorted((each for each in there if each not in state.offered), key=lambda each: (draw(each), each))
    if count <= 0 and state.step and able:
        count = 1  # a small fleet: every step goes further than the one before
    return tuple(sorted(able[: max(count, 0)]))


def waits(state: Rollout, fleet: Mapping[str, Seen], now_s: float) -> tuple[str, ...]:
    """Boards that hold up the step that runs: all that were offered it until one of them has answered."""
    if not state.open:
        return ()
    pending = [device for device in state.offered if state.phase(device) not in SETTLED]
    nobody = len(pending) == len(state.offered)
    return tuple(sorted(each for each in pending if nobody or _holds(state, each, fleet.get(each), now_s)))


def _holds(state: Rollout, device: str, seen: Seen | None, now_s: float) -> bool:
    # nobody has heard of it since the start of the coordinator, or it has other labels now, or a step passed without it
    if seen is None or device in state.silent:
        return False
    return now_s < seen.since_s + _limit_s(state, _talks(state, device, seen.online))


def _limit_s(state: Rollout, talks: bool) -> float:
    return LONGEST_S + state.plan.soak_s if talks else state.plan.patience_s


def _talks(state: Rollout, device: str, online: bool) -> bool:
    return online and state.phase(device) != ""


def waited_s(state: Rollout, device: str, online: bool) -> float:
    """Return for how long earlier coordinators have waited for a device in the step that runs."""
    return state.present_s if _talks(state, device, online) else state.silent_s


def restarted(state: Rollout, since_s: float) -> Restarted | None:
    """Return the event that a coordinator has taken the rollout up, or None if no step runs.

    Args:
        state: State of the rollout.
        since_s: Seconds since its latest event by the wall clock.
    """
    if not state.open:
        return None
    limits = (state.silent_s, _limit_s(state, False)), (state.present_s, _limit_s(state, True))
    return Restarted(*(passed_at_restart(passed_s, since_s, limit_s, state.restarts) for passed_s, limit_s in limits))


def _late(state: Rollout, fleet: Mapping[str, Seen]) -> tuple[str, ...]:
    """Boards that have come since a rollout to all boards was done."""
    if not state.plan.to_all:
        return ()
    return tuple(sorted(each for each, seen in fleet.items() if seen.online and each not in state.offered))


def _failed(state: Rollout) -> list[str]:
    return [device for device in state.offered if state.phase(device) in FAILED]


def _abort_reason(state: Rollout, failed: Collection[str], answered: int) -> str:
    """Return why a rollout is aborted, with the reason of one failed device as an example."""
    first = min(failed)
    phase = state.phase(first)
    said = state.heard[first].reason if first in state.heard else ""
    example = f"{first} {'fell silent' if phase in SWAPPED else phase}{f': {said}' if said else ''}"
    share = f"more than {100 * state.plan.abort_above:g} %"
    return shorten_error(f"{len(failed)} of {answered} boards failed, {share} ({example})")
