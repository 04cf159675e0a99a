"""Effect of a device's message on the running round: pure decisions, no I/O, no clock, no randomness.

`decide_step` maps one event to the facts that follow and the actions to take, in order; facts are written to the log
before any action. An update passes through

    Offered --> fetched --Arrived--> examined --Examined--> Answered or Rejected, and acknowledged

and one that must not count (of another device, a closed round, an ended job) is refused at once.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import field

from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import AnyFact, Rejected, Rounds
from fedquilt.core import Update
from fedquilt.wire import Claim

REMOVED = "removed from the fleet by request"
FLOODED = "sent more than can be answered: it is set aside, and nothing of it is read for a while"
UNFINISHED = ("queued", "running", "stopping", "stopped", "damaged")

# -- events ---------------------------------------------------------------------------------------


class Appeared(msgspec.Struct, frozen=True):
    """A device came online or restarted, or its task is unclaimed: it may lack its task."""

    device: str


class Silent(msgspec.Struct, frozen=True):
    """A device has not answered requests for its presence, although its broker reports it online."""

    device: str


class Returned(msgspec.Struct, frozen=True):
    """A silent device has sent a message."""

    device: str


class Removed(msgspec.Struct, frozen=True):
    """A device is removed from the fleet by request."""

    device: str


class Flooded(msgspec.Struct, frozen=True):
    """A device has gone on sending more than can be answered: nothing of it is read for a while."""

    device: str


class Claimed(msgspec.Struct, frozen=True):
    """A device accepted or declined a task."""

    device: str
    claim: Claim
    ask: Ask = field(default_factory=Ask)  # cost of the task, for a device that declines
    start: str = ""  # of its agent, as of `Registry.agent_start_key`


class Offered(msgspec.Struct, frozen=True):
    """A device announced its update. `status`: of the update's job in the store; "": unknown."""

    device: str
    update: Update
    status: str = "running"
    counted: bool = False  # whether the log of another job than the running one says so
    unfit: str = ""  # why it cannot be folded, as its manifest tells


class Arrived(msgspec.Struct, frozen=True):
    """All blobs of a device's update are here, or one could not be fetched."""

    device: str
    error: str | None = None


class Examined(msgspec.Struct, frozen=True):
    """Result of reading an update: `taken` is the part kept; None: it may not be folded, for `reason`."""

    device: str
    update: Update
    taken: Update | None
    reason: str = ""
    ask: Ask = field(default_factory=Ask)
    odd: str = ""  # what its device claims and cannot be, which is not in `taken`


Event: TypeAlias = Appeared | Flooded | Removed | Claimed | Offered | Arrived | Examined

# -- actions --------------------------------------------------------------------------------------


class Issue(msgspec.Struct, frozen=True):
    """Send a device its task of the running round, for the first time or again."""

    device: str


class Withdraw(msgspec.Struct, frozen=True):
    """Withdraw a device's task, and stop fetching its update."""

    device: str


class Patience(msgspec.Struct, frozen=True):
    """Resend a device's task rarely: it is working on it."""

    device: str


class Fetch(msgspec.Struct, frozen=True):
    """Fetch an update's blobs, instead of any others of this device."""

    device: str
    update: Update


class Examine(msgspec.Struct, frozen=True):
    """Read an update whose blobs have arrived; `Examined` follows."""

    device: str
    update: Update


class Answer(msgspec.Struct, frozen=True):
    """Inform a device that its update was counted, or refused for good."""

    device: str
    update: Update
    accepted: bool
    reason: str = ""


class Discard(msgspec.Struct, frozen=True):
    """Drop the blobs of an update that has no other use."""

    update: Update


class Renew(msgspec.Struct, frozen=True):
    """Send a device its task with a later epoch than this one, as it has counted the round with a coordinator of it."""

    device: str
    epoch: int


Action: TypeAlias = Issue | Withdraw | Patience | Fetch | Examine | Answer | Discard | Renew
Arriving: TypeAlias = Update | None  # of the event's device: its update while its blobs are fetched


class Step(msgspec.Struct, frozen=True):
    """Consequences of an event: facts to write and actions to take."""

    arriving: Arriving
    facts: tuple[AnyFact, ...] = ()
    actions: tuple[Action, ...] = ()


def decide_step(job: str, state: Rounds | None, arriving: Arriving, event: Event, now_s: float) -> Step:
    """Decide the events and actions that follow from a device's message in the job's running round.

    Args:
        job: the job's id; "" with `state` None: no job is running.
        state: the job's rounds; None: no job is running.
        arriving: update that is being fetched from the event's device, if it is asked.
        event: message of a device, or its result.
        now_s: seconds of the coordinator's clock.
    """
    match event:  # the most frequent first
        case Examined():
            return _step_after_examination(state, arriving, event, now_s)
        case Offered():
            return _offered(job, state, arriving, event)
        case Claimed():
            return _claimed(job, state, arriving, event)
        case Arrived(device, error):
            if arriving is None:
                return Step(None)
            if error is None:
                return Step(arriving, (), (Examine(device, arriving),))
            return Step(None)  # the device will offer it again
        case Appeared(device):
            open = state is not None and state.phase == "open"  # a job stopped in the same turn is not open
            return Step(arriving, (), (Issue(device),) if open and _asked(state, device) else ())
        case Flooded(device):
            return _drop_device(state, arriving, device, "flooding", FLOODED)
        case Removed(device):
            return _drop_device(state, arriving, device, "removed", REMOVED)


def _drop_device(state: Rounds | None, arriving: Arriving, device: str, code: str, reason: str) -> Step:
    """Reject and withdraw the task of a device that the round has asked."""
    if state is None or not _asked(state, device):
        return Step(arriving)
    return Step(None, (Rejected(state.round, device, reason, code),), (Withdraw(device),))


def _claimed(job: str, state: Rounds | None, arriving: Arriving, event: Claimed) -> Step:
    device, claim = event.device, event.claim
    if state is None or not _asked(state, device):
        return Step(arriving, (), (Withdraw(device),))  # an old task retained by the broker
    if claim.job != job or claim.round != state.round:
        return Step(arriving)
    if claim.code == "counted":
        return Step(arriving, (), (Renew(device, claim.epoch),))
    if claim.accepted:
        return Step(arriving, (), (Patience(device),))
    if claim.code == "cleared":  # cleared by another than the coordinator: the device is still asked
        return Step(arriving, (), (Issue(device),))
    if claim.attempt != state.attempt:
        return Step(arriving)
    declined = state.declined_by(device, claim.code, claim.reason, event.ask, event.start)
    return Step(None, (declined,), (Withdraw(device),))


def _offered(job: str, state: Rounds | None, arriving: Arriving, event: Offered) -> Step:
    device, update = event.device, event.update
    if update.device != device:
        return _turned_down(state, arriving, event, f"it names another device, {update.device}")
    if state is None or update.job != job:
        if event.counted:  # its answer was lost, and the job has ended since or waits
            return Step(arriving, (), (Answer(device, update, True),))
        if event.status in UNFINISHED:
            return Step(arriving)  # its device keeps it and offers it again when the job continues
        return _turned_down(state, arriving, event, f"no job {update.job} is under way here")
    if update.round in state.history.get(device, ()) or (device in state.answered and update.round == state.round):
        return Step(arriving, (), (Answer(device, update, True),))
    if update.round == state.round and state.phase == "selecting":  # this log is an older copy of the one that asked
        return Step(arriving)  # its device keeps it and offers it again when the round has asked for it
    if update.round != state.round or not _asked(state, device):
        return _turned_down(state, arriving, event, f"round {update.round} is closed or did not ask for this")
    if update.state and state.state is not None and update.state != state.state.sha256:
        reason = f"it was computed from the state {update.state[:12]}, and this round began with another"
        return _turned_down(state, arriving, event, reason)
    if (site := state.through.get(device)) is not None:
        return _refused(device, update, _twice(device, site))
    if event.unfit:
        return _refused(device, update, event.unfit)
    bring = Fetch(device, update) if update.bundles else Examine(device, update)
    return Step(update, (), (Patience(device), bring))


def _step_after_examination(state: Rounds | None, arriving: Arriving, event: Examined, now_s: float) -> Step:
    """Accept or refuse an update after its examination, if it is still the one expected."""
    device, update = event.device, event.update
    if state is None or arriving != update:
        return Step(arriving)
    if event.taken is None:
        return _refused(device, update, event.reason)
    for board in event.taken.boards:
        if board in state.answered or board in state.through:
            return _refused(device, update, f"{device}: {_twice(board, state.through.get(board, 'itself'))}")
        if board in state.since:
            return _refused(device, update, f"{device}: {board} is a device of this coordinator, and speaks for itself")
    fact = state.answered_by(event.taken, now_s, event.ask)
    superseded = () if event.taken == update else (Discard(update),)
    actions = (Answer(device, update, True), Withdraw(device), *superseded)
    return Step(None, (fact,), actions)


def _refused(device: str, update: Update, reason: str) -> Step:
    """Refuse an update of the running round because of its content."""
    actions = (Answer(device, update, False, reason), Withdraw(device), Discard(update))
    return Step(None, (Rejected(update.round, device, reason),), actions)


def _twice(board: str, by: str) -> str:
    return (
        f"{board} counts in this round already, by {by}: a board belongs to one coordinator, and its name to one board"
    )


def _turned_down(state: Rounds | None, arriving: Arriving, event: Offered, reason: str) -> Step:
    """Refuse an update that is not expected, and withdraw the task that led to it."""
    answer = Answer(event.device, event.update, False, reason)
    idle = () if _asked(state, event.device) else (Withdraw(event.device),)
    return Step(arriving, (), (answer, *idle))


def _asked(state: Rounds | None, device: str) -> bool:
    return state is not None and device in state.asked
