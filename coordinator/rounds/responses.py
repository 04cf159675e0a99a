"""Responses of a job to inputs: a pure function returns the events and actions that follow.

Events are written to the log before any action is taken. An accepted update is the result of three inputs:

    `UpdateAnnounced`  a device has announced the update: its blobs are fetched
    `UpdateReceived`   the blobs are complete: the update is validated
    `UpdateValidated`  the update is accepted or rejected, and acknowledged

An update that must not count (of another device, a closed round or an ended job) is rejected at once. After a crash,
the server sends all open tasks again.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import field

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.events import ENDED_PHASES, AnyEvent, Phase, UpdateRejected
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.core import Update
from fedquilt.wire import Claim

REMOVED = "removed from the fleet by request"
FLOODED = "sent too many messages: the coordinator ignores this device for a while"
# phases in which updates wait for the next round, in buffered mode
BETWEEN_ROUNDS: Final[tuple[Phase, ...]] = ("closing", "selecting")
UNFINISHED = ("queued", "running", "stopping", "stopped", "damaged")


class DeviceChange(msgspec.Struct, frozen=True):
    device: str
    kind: Literal["online", "silent", "returned", "removed", "flooding"]


class ClaimReceived(msgspec.Struct, frozen=True):
    device: str
    claim: Claim
    workload: DeviceWorkload = field(default_factory=DeviceWorkload)  # cost of the task, for a device that declines
    agent_start_key: str = ""  # `DeviceRegistry.agent_start_key`


class UpdateAnnounced(msgspec.Struct, frozen=True):
    """Announcement of an update by a device. `status` is the stored status of the job, or "" if unknown."""

    device: str
    update: Update
    status: str = "running"
    is_counted: bool = False  # whether the log of an inactive job contains the update
    manifest_problem: str = ""  # why the manifest does not fit the round, or ""


class UpdateReceived(msgspec.Struct, frozen=True):
    device: str
    error: str | None = None


class UpdateValidated(msgspec.Struct, frozen=True):
    """Result of validating an update: the update to accept in `valid_part`, or None and the `reason`."""

    device: str
    update: Update
    valid_part: Update | None
    reason: str = ""
    workload: DeviceWorkload = field(default_factory=DeviceWorkload)
    implausible_claims: str = ""  # sentence on claims removed from `valid_part`, or ""


Input: TypeAlias = DeviceChange | ClaimReceived | UpdateAnnounced | UpdateReceived | UpdateValidated


class SendTask(msgspec.Struct, frozen=True):
    device: str


class CancelTask(msgspec.Struct, frozen=True):
    device: str


class SlowResends(msgspec.Struct, frozen=True):
    device: str


class FetchUpdate(msgspec.Struct, frozen=True):
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
    is_late: bool = False  # whether the update was not expected, whatever its content


class DiscardUpdate(msgspec.Struct, frozen=True):
    update: Update


class RenewTask(msgspec.Struct, frozen=True):
    """Action that resends a task whose round the device has completed, with an epoch above `epoch`."""

    device: str
    epoch: int


Action: TypeAlias = (
    SendTask | CancelTask | SlowResends | FetchUpdate | ValidateUpdate | AckUpdate | DiscardUpdate | RenewTask
)
ArrivingUpdate: TypeAlias = Update | None  # update of the input's device whose blobs are being fetched


class Decision(msgspec.Struct, frozen=True):
    """Events to log, then actions to take. `arriving_update` is the update that is then being fetched."""

    arriving_update: ArrivingUpdate
    events: tuple[AnyEvent, ...] = ()
    actions: tuple[Action, ...] = ()


def decide_response(
    job: str, state: JobState | None, arriving_update: ArrivingUpdate, input: Input, now_s: float
) -> Decision:
    """Decide which events to log and which actions to take after an input.

    Args:
        job: Id of the active job, or "" if no job is active.
        state: State of the active job, or None if no job is active.
        arriving_update: Update that is being fetched from the device, or None.
        input: Message of a device, or the result of an earlier action.
        now_s: Time of the coordinator's clock in seconds.
    """
    match input:  # the most frequent first
        case UpdateValidated():
            return _decide_on_validation(state, arriving_update, input, now_s)
        case UpdateAnnounced():
            return _decide_on_announcement(job, state, arriving_update, input)
        case ClaimReceived():
            return _decide_on_claim(job, state, arriving_update, input)
        case UpdateReceived(device, error):
            if arriving_update is None:
                return Decision(None)
            if error is None:
                is_held = state is not None and state.phase in BETWEEN_ROUNDS
                return Decision(arriving_update, (), () if is_held else (ValidateUpdate(device, arriving_update),))
            return Decision(None)  # the device announces the update again
        case DeviceChange(device, "flooding"):
            return _exclude_device(state, arriving_update, device, "flooding", FLOODED)
        case DeviceChange(device, "removed"):
            return _exclude_device(state, arriving_update, device, "removed", REMOVED)
        case DeviceChange(device):
            # a message before may have stopped the job
            is_active = state is not None and state.phase not in ENDED_PHASES
            return Decision(
                arriving_update, (), (SendTask(device),) if is_active and _is_update_expected(state, device) else ()
            )


def _exclude_device(
    state: JobState | None, arriving_update: ArrivingUpdate, device: str, code: str, reason: str
) -> Decision:
    if state is None or not _is_update_expected(state, device):
        return Decision(arriving_update)
    return Decision(None, (UpdateRejected(state.round, device, reason, code),), (CancelTask(device),))


def _decide_on_claim(
    job: str, state: JobState | None, arriving_update: ArrivingUpdate, input: ClaimReceived
) -> Decision:
    device, claim = input.device, input.claim
    if state is None or not _is_update_expected(state, device):
        return Decision(arriving_update, (), (CancelTask(device),))  # an old task retained by the broker
    version = state.task_version(device)
    if claim.job != job or claim.round != version.round:
        return Decision(arriving_update)
    if claim.code == "counted":
        return Decision(arriving_update, (), (RenewTask(device, claim.epoch),))
    if claim.accepted:
        return Decision(arriving_update, (), (SlowResends(device),))
    if claim.code == "cleared":  # another client has deleted the retained task
        return Decision(arriving_update, (), (SendTask(device),))
    if claim.attempt != version.attempt:
        return Decision(arriving_update)
    decline_event = state.decline_event(device, claim.code, claim.reason, input.workload, input.agent_start_key)
    return Decision(None, (decline_event,), (CancelTask(device),))


def _decide_on_announcement(
    job: str, state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateAnnounced
) -> Decision:
    device, update = input.device, input.update
    if update.device != device:
        return _reject_unexpected_update(
            state, arriving_update, input, f"the update names another device, {update.device}"
        )
    if state is None or update.job != job:
        if input.is_counted:  # the acknowledgement was lost
            return Decision(arriving_update, (), (AckUpdate(device, update, True),))
        if input.status in UNFINISHED:
            return Decision(arriving_update)  # the device announces the update again when the job continues
        return _reject_unexpected_update(
            state, arriving_update, input, f"job {update.job} is not active on this coordinator"
        )
    version, accepted_update = state.task_version(device), state.accepted_updates.get(device)
    if update.round in state.history.get(device, ()) or (
        accepted_update is not None and update.round == accepted_update.round
    ):
        return Decision(arriving_update, (), (AckUpdate(device, update, True),))
    if update.round == state.round and state.phase == "selecting":  # this log is an older copy
        return Decision(arriving_update)  # the device announces the update again after its selection
    if update.round != version.round or not _is_update_expected(state, device):
        return _reject_unexpected_update(
            state, arriving_update, input, f"round {update.round + 1} is closed, or this device was not selected for it"
        )
    if version.state is not None and update.state != version.state.sha256:
        reason = f"the update started from state {update.state[:12] or '(none)'}, and its round has another state"
        return _reject_unexpected_update(state, arriving_update, input, reason)
    if (site := state.sites_by_device.get(device)) is not None:
        return _reject_update(state, device, update, _duplicate_device_text(device, site))
    if input.manifest_problem:
        return _reject_update(state, device, update, input.manifest_problem)
    transfer_action = FetchUpdate(device, update) if update.bundles else ValidateUpdate(device, update)
    is_held = state.phase in BETWEEN_ROUNDS and not update.bundles
    return Decision(update, (), (SlowResends(device),) if is_held else (SlowResends(device), transfer_action))


def _decide_on_validation(
    state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateValidated, now_s: float
) -> Decision:
    device, update = input.device, input.update
    if state is None or arriving_update != update or state.phase in BETWEEN_ROUNDS:
        return Decision(arriving_update)
    if input.valid_part is None:
        return _reject_update(state, device, update, input.reason)
    for board in input.valid_part.site_devices:
        if board in state.accepted_updates or board in state.sites_by_device:
            return _reject_update(
                state,
                device,
                update,
                f"{device}: {_duplicate_device_text(board, state.sites_by_device.get(board, 'itself'))}",
            )
        if board in state.last_selected_rounds:
            return _reject_update(
                state,
                device,
                update,
                f"site {device}: its device {board} is also connected to this coordinator directly",
            )
    event = state.acceptance_event(input.valid_part, now_s, input.workload)
    superseded = () if input.valid_part == update else (DiscardUpdate(update),)
    actions = (AckUpdate(device, update, True), CancelTask(device), *superseded)
    return Decision(None, (event,), actions)


def _reject_update(state: JobState, device: str, update: Update, reason: str) -> Decision:
    actions = (AckUpdate(device, update, False, reason), CancelTask(device), DiscardUpdate(update))
    return Decision(None, (UpdateRejected(state.round, device, reason),), actions)


def _duplicate_device_text(board: str, submitter: str) -> str:
    return (
        f"an update of {board} is already in this round, submitted by {submitter}: a device belongs to one "
        "coordinator, and each device needs its own name"
    )


def _reject_unexpected_update(
    state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateAnnounced, reason: str
) -> Decision:
    ack = AckUpdate(input.device, input.update, False, reason, is_late=input.device == input.update.device)
    cancellation = () if _is_update_expected(state, input.device) else (CancelTask(input.device),)
    return Decision(arriving_update, (), (ack, *cancellation))


def _is_update_expected(state: JobState | None, device: str) -> bool:
    return state is not None and device in state.pending_devices
