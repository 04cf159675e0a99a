"""What a device's message means for the running round, decided purely: no I/O, no clock, no randomness.

`heard` takes one event and says which facts follow from it and what is to be done, in order; facts are written
before anything is done. An update goes

    Offered --> fetched --Arrived--> examined --Examined--> Answered or Rejected, and acknowledged

and what it must not count for (another device, a closed round, a job that is over) is turned down at the door.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import field

from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import AnyFact, Rejected, Rounds
from fedquilt.core import Update
from fedquilt.wire import Claim

FLOODED = "sent more than can be answered: it is set aside, and nothing of it is read for a while"
UNFINISHED = ("queued", "running", "stopping", "stopped")

# -- events ---------------------------------------------------------------------------------------


class Appeared(msgspec.Struct, frozen=True):
    """A device has come online or started anew, or its task has gone unclaimed: it may not have its task."""

    device: str


class Flooded(msgspec.Struct, frozen=True):
    """A device has gone on sending more than can be answered: nothing of it is read for a while."""

    device: str


class Claimed(msgspec.Struct, frozen=True):
    """A device has told whether it takes a task."""

    device: str
    claim: Claim
    ask: Ask = field(default_factory=Ask)  # what the task asks of it, where it declines


class Offered(msgspec.Struct, frozen=True):
    """A device has told what a task has come to. `status`: of the update's job, as the store has it; "": unknown."""

    device: str
    update: Update
    status: str = "running"
    unfit: str = ""  # why it cannot be folded, as its manifest tells


class Arrived(msgspec.Struct, frozen=True):
    """The blobs of a device's update are all here, or one could not be had."""

    device: str
    error: str | None = None


class Examined(msgspec.Struct, frozen=True):
    """An update was read: `taken` is what is kept of it; None: it may not be folded, for this reason."""

    device: str
    update: Update
    taken: Update | None
    reason: str = ""
    ask: Ask = field(default_factory=Ask)
    odd: str = ""  # what its device claims and cannot be, which is not in `taken`


Event: TypeAlias = Appeared | Flooded | Claimed | Offered | Arrived | Examined

# -- actions --------------------------------------------------------------------------------------


class Issue(msgspec.Struct, frozen=True):
    """Send a device its task of the running round, for the first time or again."""

    device: str


class Withdraw(msgspec.Struct, frozen=True):
    """Take back a device's task, and stop fetching what it has offered."""

    device: str


class Patience(msgspec.Struct, frozen=True):
    """A device is at its task: repeat it rarely."""

    device: str


class Fetch(msgspec.Struct, frozen=True):
    """Bring an update's blobs here, in place of what was being fetched from the device before."""

    device: str
    update: Update


class Examine(msgspec.Struct, frozen=True):
    """Read an update whose blobs are here; `Examined` follows."""

    device: str
    update: Update


class Answer(msgspec.Struct, frozen=True):
    """Tell a device that its update has been counted, or refused for good."""

    device: str
    update: Update
    accepted: bool
    reason: str = ""


class Discard(msgspec.Struct, frozen=True):
    """Drop the blobs of an update of which nothing else is made."""

    update: Update


Action: TypeAlias = Issue | Withdraw | Patience | Fetch | Examine | Answer | Discard
Arriving: TypeAlias = Mapping[str, Update]  # device -> its update whose blobs are on their way


class Step(msgspec.Struct, frozen=True):
    """What follows from an event."""

    arriving: Arriving
    facts: tuple[AnyFact, ...] = ()
    actions: tuple[Action, ...] = ()


def heard(job: str, state: Rounds | None, arriving: Arriving, event: Event, now_s: float) -> Step:
    """What an event means for the job's running round.

    Args:
        job: the job's id; "" with `state` None: no job is under way.
        arriving: of devices that are asked.
    """
    match event:
        case Appeared(device):
            open = state is not None and state.phase == "open"  # not of a job that was stopped in the same turn
            return Step(arriving, (), (Issue(device),) if open and _asked(state, device) else ())
        case Flooded(device):
            return _flooded(state, arriving, device)
        case Claimed():
            return _claimed(job, state, arriving, event)
        case Offered():
            return _offered(job, state, arriving, event)
        case Arrived(device, error):
            update = arriving.get(device)
            if update is None:
                return Step(arriving)
            if error is None:
                return Step(arriving, (), (Examine(device, update),))
            return Step(_without(arriving, device))  # the device offers it again
        case Examined():
            return _examined(state, arriving, event, now_s)


def _flooded(state: Rounds | None, arriving: Arriving, device: str) -> Step:
    if state is None or not _asked(state, device):
        return Step(arriving)
    return Step(_without(arriving, device), (Rejected(state.round, device, FLOODED),), (Withdraw(device),))


def _claimed(job: str, state: Rounds | None, arriving: Arriving, event: Claimed) -> Step:
    device, claim = event.device, event.claim
    if state is None or not _asked(state, device):
        return Step(arriving, (), (Withdraw(device),))  # an old task that the broker has kept
    if claim.job != job or claim.round != state.round:
        return Step(arriving)
    if claim.accepted:
        return Step(arriving, (), (Patience(device),))
    if claim.code == "cleared":  # not by the coordinator: the device is still asked
        return Step(arriving, (), (Issue(device),))
    if claim.attempt != state.attempt:
        return Step(arriving)
    declined = state.declined_by(device, claim.code, claim.reason, event.ask)
    return Step(_without(arriving, device), (declined,), (Withdraw(device),))


def _offered(job: str, state: Rounds | None, arriving: Arriving, event: Offered) -> Step:
    device, update = event.device, event.update
    if update.device != device:
        return _turned_down(state, arriving, event, f"it names another device, {update.device}")
    if state is None or update.job != job:
        if event.status in UNFINISHED:
            return Step(arriving)  # its device keeps it, and offers it again when the job goes on
        return _turned_down(state, arriving, event, f"no job {update.job} is under way here")
    if update.round in state.history.get(device, ()) or (device in state.answered and update.round == state.round):
        return Step(arriving, (), (Answer(device, update, True),))
    if update.round != state.round or not _asked(state, device):
        return _turned_down(state, arriving, event, f"round {update.round} is closed or did not ask for this")
    if event.unfit:
        return _refused(arriving, device, update, event.unfit)
    bring = Fetch(device, update) if update.bundles else Examine(device, update)
    return Step({**arriving, device: update}, (), (Patience(device), bring))


def _examined(state: Rounds | None, arriving: Arriving, event: Examined, now_s: float) -> Step:
    device, update = event.device, event.update
    if state is None or arriving.get(device) is not update:
        return Step(arriving)
    if event.taken is None:
        return _refused(arriving, device, update, event.reason)
    fact = state.answered_by(event.taken, now_s, event.ask)
    superseded = () if event.taken is update else (Discard(update),)
    actions = (Answer(device, update, True), Withdraw(device), *superseded)
    return Step(_without(arriving, device), (fact,), actions)


def _refused(arriving: Arriving, device: str, update: Update, reason: str) -> Step:
    """Refuse an update of the running round for what it holds."""
    actions = (Answer(device, update, False, reason), Withdraw(device), Discard(update))
    return Step(_without(arriving, device), (Rejected(update.round, device, reason),), actions)


def _turned_down(state: Rounds | None, arriving: Arriving, event: Offered, reason: str) -> Step:
    """Refuse an update that nobody waits for, and take back the task that led to it."""
    answer = Answer(event.device, event.update, False, reason)
    idle = () if _asked(state, event.device) else (Withdraw(event.device),)
    return Step(arriving, (), (answer, *idle))


def _asked(state: Rounds | None, device: str) -> bool:
    return state is not None and device in state.asked


def _without(arriving: Arriving, device: str) -> Arriving:
    if device not in arriving:
        return arriving
    rest = dict(arriving)
    del rest[device]
    return rest
