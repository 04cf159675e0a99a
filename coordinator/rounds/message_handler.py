"""Decisions about the inputs of a job: which events to log and which actions to take.

`decide_response` maps one input to events and actions. Events are written to the log before any action is taken. An
accepted update is the result of three inputs:

    `UpdateAnnounced`   a device has announced the update: its blobs are fetched
    `UpdateReceived`   the blobs are complete: the update is validated
    `UpdateValidated`  the update is accepted or rejected, and acknowledged

An update that must not count (of another device, a closed round or an ended job) is rejected at once. Pure: no I/O, no
clock and no randomness.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import field

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.events import AnyEvent, JobState, UpdateRejected
from fedquilt.core import Update
from fedquilt.wire import Claim

REMOVED = "removed from the fleet by request"
FLOODED = "sent more than can be answered: it is set aside, and nothing of it is read for a while"
UNFINISHED = ("queued", "running", "stopping", "stopped", "damaged")

# -- events ---------------------------------------------------------------------------------------


class DeviceOnline(msgspec.Struct, frozen=True):
    """Device that came online, restarted or did not claim its task, and may lack the task."""

    device: str


class DeviceSilent(msgspec.Struct, frozen=True):
    device: str


class DeviceReturned(msgspec.Struct, frozen=True):
    device: str


class DeviceRemoved(msgspec.Struct, frozen=True):
    device: str


class RateLimitExceeded(msgspec.Struct, frozen=True):
    device: str


class ClaimReceived(msgspec.Struct, frozen=True):
    device: str
    claim: Claim
    ask: DeviceWorkload = field(default_factory=DeviceWorkload)  # cost of the task, for a device that declines
    start: str = ""  # of its agent, as of `DeviceRegistry.agent_start_key`


class UpdateAnnounced(msgspec.Struct, frozen=True):
    """Announcement of an update by a device.

    `status` is that of the update's job in the store, or "" if unknown.
    """

    device: str
    update: Update
    status: str = "running"
    counted: bool = False  # whether the log of another job than the running one says so
    unfit: str = ""  # why it cannot be folded, as its manifest tells


class UpdateReceived(msgspec.Struct, frozen=True):
    """End of the transfer of an update's blobs, with an error if a blob could not be fetched."""

    device: str
    error: str | None = None


class UpdateValidated(msgspec.Struct, frozen=True):
    """Result of validating an update.

    `taken` is the valid part, or None if rejected for `reason`.
    """

    device: str
    update: Update
    taken: Update | None
    reason: str = ""
    ask: DeviceWorkload = field(default_factory=DeviceWorkload)
    odd: str = ""  # what its device claims and cannot be, which is not in `taken`


Input: TypeAlias = (
    DeviceOnline
    | RateLimitExceeded
    | DeviceRemoved
    | ClaimReceived
    | UpdateAnnounced
    | UpdateReceived
    | UpdateValidated
)

# -- actions --------------------------------------------------------------------------------------


class SendTask(msgspec.Struct, frozen=True):
    device: str


class CancelTask(msgspec.Struct, frozen=True):
    """Action that cancels a device's task and the transfer of its update."""

    device: str


class SlowResends(msgspec.Struct, frozen=True):
    device: str


class FetchUpdate(msgspec.Struct, frozen=True):
    """Action that fetches an update's blobs and cancels other transfers from the device."""

    device: str
    update: Update


class ValidateUpdate(msgspec.Struct, frozen=True):
    device: str
    update: Update


class AckUpdate(msgspec.Struct, frozen=True):
    device: str
    update: Update
    accepted: bool
    reason: str = ""


class DiscardUpdate(msgspec.Struct, frozen=True):
    update: Update


class RenewTask(msgspec.Struct, frozen=True):
    """Action that resends a task with an epoch above `epoch`.

    The device completed the round under a coordinator of that epoch.
    """

    device: str
    epoch: int


Action: TypeAlias = (
    SendTask | CancelTask | SlowResends | FetchUpdate | ValidateUpdate | AckUpdate | DiscardUpdate | RenewTask
)
Arriving: TypeAlias = Update | None  # of the event's device: its update while its blobs are fetched


class Decision(msgspec.Struct, frozen=True):
    """Events to log and actions to take, in this order.

    `arriving` is the update being fetched afterwards.
    """

    arriving: Arriving
    facts: tuple[AnyEvent, ...] = ()
    actions: tuple[Action, ...] = ()


def decide_response(job: str, state: JobState | None, arriving: Arriving, event: Input, now_s: float) -> Decision:
    """Decide which events to log and which actions to take after an input.

    Args:
        job: Id of the active job, or "" if no job is active.
        state: State of the active job, or None if no job is active.
        arriving: Update that is being fetched from the device, or None.
        event: Message of a device, or the result of an earlier action.
        now_s: Time of the coordinator's clock in seconds.
    """
    match event:  # the most frequent first
        case UpdateValidated():
            return _decide_on_validation(state, arriving, event, now_s)
        case UpdateAnnounced():
            return _decide_on_announcement(job, state, arriving, event)
        case ClaimReceived():
            return _decide_on_claim(job, state, arriving, event)
        case UpdateReceived(device, error):
            if arriving is None:
                return Decision(None)
            if error is None:
                return Decision(arriving, (), (ValidateUpdate(device, arriving),))
            return Decision(None)  # the device will offer it again
        case DeviceOnline(device):
            open = state is not None and state.phase == "open"  # a job stopped in the same turn is not open
            return Decision(arriving, (), (SendTask(device),) if open and _is_update_expected(state, device) else ())
        case RateLimitExceeded(device):
            return _exclude_device(state, arriving, device, "flooding", FLOODED)
        case DeviceRemoved(device):
            return _exclude_device(state, arriving, device, "removed", REMOVED)


def _exclude_device(state: JobState | None, arriving: Arriving, device: str, code: str, reason: str) -> Decision:
    """Log a rejection and cancel the device's task, or do nothing if no update is expected."""
    if state is None or not _is_update_expected(state, device):
        return Decision(arriving)
    return Decision(None, (UpdateRejected(state.round, device, reason, code),), (CancelTask(device),))


def _decide_on_claim(job: str, state: JobState | None, arriving: Arriving, event: ClaimReceived) -> Decision:
    """Keep, decline or renew the claimed task of the running round. Cancel a task that is not expected."""
    device, claim = event.device, event.claim
    if state is None or not _is_update_expected(state, device):
        return Decision(arriving, (), (CancelTask(device),))  # an old task retained by the broker
    if claim.job != job or claim.round != state.round:
        return Decision(arriving)
    if claim.code == "counted":
        return Decision(arriving, (), (RenewTask(device, claim.epoch),))
    if claim.accepted:
        return Decision(arriving, (), (SlowResends(device),))
    if claim.code == "cleared":  # cleared by another than the coordinator: the device is still asked
        return Decision(arriving, (), (SendTask(device),))
    if claim.attempt != state.attempt:
        return Decision(arriving)
    declined = state.decline_event(device, claim.code, claim.reason, event.ask, event.start)
    return Decision(None, (declined,), (CancelTask(device),))


def _decide_on_announcement(job: str, state: JobState | None, arriving: Arriving, event: UpdateAnnounced) -> Decision:
    """Fetch an expected update, acknowledge a counted update again, and reject or ignore any other."""
    device, update = event.device, event.update
    if update.device != device:
        return _reject_unexpected_update(state, arriving, event, f"it names another device, {update.device}")
    if state is None or update.job != job:
        if event.counted:  # its answer was lost, and the job has ended since or waits
            return Decision(arriving, (), (AckUpdate(device, update, True),))
        if event.status in UNFINISHED:
            return Decision(arriving)  # its device keeps it and offers it again when the job continues
        return _reject_unexpected_update(state, arriving, event, f"no job {update.job} is under way here")
    if update.round in state.history.get(device, ()) or (device in state.answered and update.round == state.round):
        return Decision(arriving, (), (AckUpdate(device, update, True),))
    if update.round == state.round and state.phase == "selecting":  # this log is an older copy of the one that asked
        return Decision(arriving)  # its device keeps it and offers it again when the round has asked for it
    if update.round != state.round or not _is_update_expected(state, device):
        return _reject_unexpected_update(
            state, arriving, event, f"round {update.round + 1} is closed or did not ask for this"
        )
    if state.state is not None and update.state != state.state.sha256:
        reason = f"it was computed from the state {update.state[:12] or '(none)'}, and this round began with another"
        return _reject_unexpected_update(state, arriving, event, reason)
    if (site := state.through.get(device)) is not None:
        return _reject_update(device, update, _duplicate_device_text(device, site))
    if event.unfit:
        return _reject_update(device, update, event.unfit)
    bring = FetchUpdate(device, update) if update.bundles else ValidateUpdate(device, update)
    return Decision(update, (), (SlowResends(device), bring))


def _decide_on_validation(state: JobState | None, arriving: Arriving, event: UpdateValidated, now_s: float) -> Decision:
    """Accept the valid part of an update. Reject an invalid update, or devices that count already."""
    device, update = event.device, event.update
    if state is None or arriving != update:
        return Decision(arriving)
    if event.taken is None:
        return _reject_update(device, update, event.reason)
    for board in event.taken.boards:
        if board in state.answered or board in state.through:
            return _reject_update(
                device, update, f"{device}: {_duplicate_device_text(board, state.through.get(board, 'itself'))}"
            )
        if board in state.since:
            return _reject_update(
                device, update, f"{device}: {board} is a device of this coordinator, and speaks for itself"
            )
    fact = state.acceptance_event(event.taken, now_s, event.ask)
    superseded = () if event.taken == update else (DiscardUpdate(update),)
    actions = (AckUpdate(device, update, True), CancelTask(device), *superseded)
    return Decision(None, (fact,), actions)


def _reject_update(device: str, update: Update, reason: str) -> Decision:
    actions = (AckUpdate(device, update, False, reason), CancelTask(device), DiscardUpdate(update))
    return Decision(None, (UpdateRejected(update.round, device, reason),), actions)


def _duplicate_device_text(board: str, by: str) -> str:
    return (
        f"{board} counts in this round already, by {by}: a board belongs to one coordinator, and its name to one board"
    )


def _reject_unexpected_update(
    state: JobState | None, arriving: Arriving, event: UpdateAnnounced, reason: str
) -> Decision:
    """Send a negative acknowledgement, and cancel the device's task unless its update is expected."""
    answer = AckUpdate(event.device, event.update, False, reason)
    idle = () if _is_update_expected(state, event.device) else (CancelTask(event.device),)
    return Decision(arriving, (), (answer, *idle))


def _is_update_expected(state: JobState | None, device: str) -> bool:
    return state is not None and device in state.asked
