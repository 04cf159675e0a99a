"""Decisions of a job: its next event, and the events and actions that follow from an input. Pure.

`decide_event` returns the next event from the state, the time and the online devices. The eligibility of devices is
recorded before a selection (`EligibilityRecorded`). So the selection depends on the log alone, and the log explains why
a device was not selected.

`decide_response` maps one input to events and actions. Events are written to the log before any action is taken. An
accepted update is the result of three inputs:

    `UpdateAnnounced`  a device has announced the update: its blobs are fetched
    `UpdateReceived`   the blobs are complete: the update is validated
    `UpdateValidated`  the update is accepted or rejected, and acknowledged

An update that must not count (of another device, a closed round or an ended job) is rejected at once. After a crash,
the server sends all open tasks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, TypeAlias

import msgspec
from msgspec import field
from msgspec.structs import replace

from fedquilt.coordinator.device_columns import ELIGIBLE, CostColumn, DeviceSet, LabelColumn
from fedquilt.coordinator.rounds import deadline, failed_rounds
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    AttemptResumed,
    CohortSelected,
    DeadlineExtended,
    EligibilityRecorded,
    JobEnded,
    RoundClosed,
    RoundRetried,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobState, describe_unmetered_tasks
from fedquilt.coordinator.rounds.selection import DECLINE_REASONS, DISK_FULL, LastingDecline, select_cohort
from fedquilt.core import Update
from fedquilt.wire import Claim

MIN_REMAINING_SHARE = 0.1  # least share of the deadline that remains of an attempt after the first restart
UNKNOWN_ELAPSED_SHARE = 0.01  # share of the deadline that a restart costs if the wall clock was set
# deadline of a site's round, times `deadline_s`. The parent allows a ninth more (tools/operations/site.py).
SITE_DEADLINE_FACTOR = 1.05
ALL_DECLINED_WAIT_S = 10.0  # wait for other devices after all those present have declined


def decide_event(
    state: JobState,
    now_s: float,
    online_devices: Collection[str],
    workload_of: Callable[[str], DeviceWorkload] = lambda device: DeviceWorkload(),
    busy_devices: AbstractSet[str] = frozenset(),
    max_devices: float = math.inf,
    unreachable_devices: AbstractSet[str] = frozenset(),
) -> AnyEvent | None:
    """Return the next event, or None to wait for input or until `next_decision_s`.

    Args:
        state: The job state.
        now_s: The time of the coordinator's clock, in seconds.
        online_devices: The devices that can take a task of this round, or have one.
        workload_of: The function that returns the workload of a device's task.
        busy_devices: The devices in `online_devices` that are reserved for other jobs now.
        max_devices: The largest number of devices that may be selected now.
        unreachable_devices: The devices of the round that are offline or silent. The round does not wait for them.
    """
    online_devices = DeviceSet.from_devices(online_devices)
    if state.phase == "selecting":
        return _decide_selection_or_end(state, online_devices, workload_of, busy_devices, max_devices)
    if state.phase == "open":
        return _decide_open_round(
            state, now_s, online_devices, workload_of, busy_devices, max_devices, unreachable_devices
        )
    return None


def to_process_clock(state: JobState, now_s: float, uses_wall_clock: bool) -> JobState:
    """Return a loaded state on this process's clock.

    Without `uses_wall_clock`, the attempt has its whole deadline again.
    """
    opened_s = state.opened_s if uses_wall_clock else now_s
    return replace(state, opened_s=opened_s, round_started_s=now_s, selected_s=dict.fromkeys(state.selected_s, now_s))


def restart_event(state: JobState, now_s: float) -> AttemptResumed | None:
    """Return the event of a coordinator restart, or None if no attempt is running.

    The wall-clock time since the previous restart counts as elapsed. If that time is negative or exceeds the limit, a
    hundredth of the limit counts instead. At least a tenth of the limit remains at the first restart, a twentieth at
    the second, and so on, so that an attempt ends even if coordinators are killed again and again.
    """
    if state.phase != "open":
        return None
    elapsed_s = now_s - (state.opened_s + state.passed_s)
    return AttemptResumed(state.round, capped_elapsed_s(state.passed_s, elapsed_s, state.deadline_s, state.restarts))


def capped_elapsed_s(elapsed_s: float, new_elapsed_s: float, limit_s: float, restarts: int) -> float:
    """Return the seconds that count as elapsed at a restart: at most 90 % of the limit, then 95 %, and so on.

    If `new_elapsed_s` is not positive or reaches the limit, the wall clock was set, and 1 % of the limit counts
    instead.

    Args:
        elapsed_s: The seconds that had elapsed at the previous restart.
        new_elapsed_s: The wall-clock seconds since then.
        limit_s: The time limit.
        restarts: The number of earlier restarts.
    """
    elapsed_s += new_elapsed_s if 0 < new_elapsed_s < limit_s else UNKNOWN_ELAPSED_SHARE * limit_s
    return min(elapsed_s, (1 - MIN_REMAINING_SHARE * 0.5**restarts) * limit_s)


def eligibility_event(
    state: JobState, labels: LabelColumn, costs: CostColumn = CostColumn()
) -> EligibilityRecorded | None:
    """Return the event that records changes of eligibility, or None. Devices known only from the log are offline."""
    devices_by_label: dict[str, list[str]] = {}
    for device, label in sorted(labels.changed_values(state.eligibility, default="offline").items()):
        devices_by_label.setdefault(label, []).append(device)
    eligible_devices = tuple(devices_by_label.pop(ELIGIBLE, ()))
    ineligible_devices = {code: tuple(devices) for code, devices in sorted(devices_by_label.items())}
    changed_costs = costs.changed_values(state.costs, devices=labels.devices_with(ELIGIBLE)) if costs else {}
    event = EligibilityRecorded(state.round, eligible_devices, ineligible_devices, dict(sorted(changed_costs.items())))
    return event if eligible_devices or ineligible_devices or changed_costs else None


def devices_to_skip(
    state: JobState,
    devices: Collection[str],
    workload_of: Callable[[str], DeviceWorkload],
    agent_start_key_of: Callable[[str], str] = lambda device: "",
) -> dict[str, str]:
    """Return the devices expected to decline again, with the code of the last decline of each.

    `selection.DECLINE_REASONS` defines how long each code excludes a device. If the other devices are too few for the
    round, a device that declined in an earlier round is selected again, because the round could never end otherwise.
    """
    if not state.lasting_declines:
        return {}
    skipped = {
        device: decline.code
        for device, decline in state.lasting_declines.items()
        if device in devices
        and decline.would_recur(
            state.round,
            state.task_actions,
            agent_start_key_of(device),
            MemoryShortage.from_workload(workload_of(device)),
        )
    }
    other_count = len(devices) - len(skipped)
    must_wait = not other_count and state.phase == "selecting"
    if must_wait or not other_count < minimum_devices_to_start(state) <= len(devices):
        return skipped
    return {device: code for device, code in skipped.items() if state.lasting_declines[device].round == state.round}


def next_decision_s(state: JobState) -> float:
    """Return the time at which `decide_event` may change its result without input."""
    if state.phase != "open":
        return math.inf
    limit_s = ALL_DECLINED_WAIT_S if have_all_declined(state) else math.inf
    return state.opened_s + min(state.deadline_s, limit_s)


def delay_attempt(state: JobState, lost_s: float) -> JobState:
    """Return the state with the attempt delayed by `lost_s`. With infinity the attempt never ends."""
    return replace(state, opened_s=state.opened_s + lost_s) if lost_s else state


def site_deadline_s(state: JobState) -> float:
    """Return the time at which a site stops waiting for devices, or infinity outside sites."""
    return state.opened_s + SITE_DEADLINE_FACTOR * state.deadline_s if state.parent_order else math.inf


def can_skip_decision(state: JobState, now_s: float, unreachable_devices: AbstractSet[str] = frozenset()) -> bool:
    """Return whether the next update cannot lead to a decision, because the round needs more updates."""
    return (
        state.phase == "open"
        and not state.pending_devices <= unreachable_devices
        and not (state.is_deadline_extended or has_full_cohort(state))
        and not any(
            device in state.pending_devices for device in state.lasting_declines
        )  # an update clears the device's decline
        and now_s < next_decision_s(state)
    )


def has_full_cohort(state: JobState) -> bool:
    return bool(state.cohort_size) and len(state.accepted_updates) >= state.cohort_size


def is_round_idle(
    state: JobState, usable_devices: Collection[str], busy_devices: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether the running round is unfinished and no device works on a task of the round."""
    return state.phase in ("selecting", "open") and not any(
        device in usable_devices and device not in busy_devices for device in state.pending_devices
    )


def updates_to_close(
    state: JobState, online_devices: Collection[str], unreachable_devices: AbstractSet[str] = frozenset()
) -> int:
    """Return the number of updates that closes the round at once: the cohort size, or all counted devices.

    Devices count if they are online, selected or expected in this attempt, and have not declined or become unreachable.
    The result is at least `minimum_updates`. The round waits until its deadline for devices leased to other jobs.
    """
    if size := state.cohort_size:
        return size
    present_devices = {*online_devices, *state.accepted_updates, *state.pending_devices, *state.expected_devices} - set(
        state.decline_reasons
    )
    return max(len(present_devices - (unreachable_devices - state.accepted_updates.keys())), minimum_updates(state))


def quorum(state: JobState, wanted_updates: int) -> int:
    """Return how many updates are enough at the deadline. Evaluation rounds use the normal cohort size."""
    if state.is_evaluation_round:
        wanted_updates = min(wanted_updates, state.constants.cohort.size or wanted_updates)
    return max(minimum_updates(state), math.ceil(wanted_updates * state.constants.cohort.quorum))


def minimum_updates(state: JobState) -> int:
    """Return the fewest updates to commit a round, and the fewest devices to start the round.

    Without `min_devices`, the number is 1 if a cohort size is set. Otherwise the number is half of the devices in the
    log, or the quorum if smaller, so that a restarted coordinator does not mistake the first online device for the
    whole fleet.
    """
    cohort = state.constants.cohort
    if cohort.min_devices:
        return min(cohort.min_devices, cohort.size or cohort.min_devices)
    return 1 if cohort.size else max(1, math.ceil(min(cohort.quorum, 0.5) * len(state.cohort)))


def minimum_devices_to_start(state: JobState) -> int:
    cohort = state.constants.cohort
    return max(cohort.min_devices, cohort.start_devices if state.round == 0 else 0, minimum_updates(state))


def _decide_selection_or_end(
    state: JobState,
    online_devices: DeviceSet,
    workload_of: Callable[[str], DeviceWorkload],
    busy_devices: AbstractSet[str],
    max_devices: float,
) -> AnyEvent | None:
    constants = state.constants
    if not state.is_evaluation_round:
        if state.is_work_done and (
            state.is_final_evaluation_done or not constants.check_every or constants.check_beside
        ):
            return JobEnded("done", describe_unmetered_tasks(constants.stop, state.usage) or "")
        if state.reached_limit is not None:
            return JobEnded("done", state.reached_limit)
    if len(online_devices) < minimum_devices_to_start(state):
        return None
    free_devices = online_devices - (state.accepted_updates.keys() | state.decline_reasons.keys() | busy_devices)
    missing_count = updates_to_close(state, online_devices) - len(state.accepted_updates)
    count = math.ceil(missing_count * (1 + constants.cohort.over_select))
    cohort = _select_devices(state, free_devices, min(count, max_devices))
    if not cohort:
        return None
    workloads = {device: workload_of(device) for device in cohort}
    deadline_decision = deadline.decide_deadline(constants.cohort, state.durations, workloads)
    workloads.update(
        {device: workloads[device].with_epochs(epochs) for device, epochs in deadline_decision.epochs.items()}
    )
    return CohortSelected(
        state.round,
        state.attempt,
        cohort,
        _positive_work_amounts(workloads),
        deadline_decision.seconds,
        epochs=dict(deadline_decision.epochs),
    )


def _select_devices(state: JobState, free_devices: DeviceSet, max_devices: float) -> tuple[str, ...]:
    """Select up to `max_devices` free devices, with those silent in earlier attempts last."""
    max_count = int(min(max_devices, len(free_devices)))
    if silent_devices := [device for device in state.silent_devices if device in free_devices]:
        responsive_devices = _select_devices(
            replace(state, silent_devices=()), free_devices - silent_devices, max_count
        )
        return tuple(sorted((*responsive_devices, *silent_devices[: max(max_count - len(responsive_devices), 0)])))
    return select_cohort(
        state.constants.seed,
        state.round,
        free_devices,
        max_count,
        costs=state.costs,
        last_selected_rounds=state.last_selected_rounds,
        turns=state.constants.cohort.turns,
    )


def _positive_work_amounts(workloads: Mapping[str, DeviceWorkload]) -> dict[str, float]:
    amounts = {device: deadline.work_amount(workload.work) for device, workload in workloads.items()}
    return {device: amount for device, amount in amounts.items() if amount > 0}


def _decide_open_round(
    state: JobState,
    now_s: float,
    online_devices: DeviceSet,
    workload_of: Callable[[str], DeviceWorkload],
    busy_devices: AbstractSet[str],
    max_devices: float,
    unreachable_devices: AbstractSet[str],
) -> AnyEvent | None:
    cohort_settings = state.constants.cohort
    update_count, wanted_updates = (
        len(state.accepted_updates),
        updates_to_close(state, online_devices, unreachable_devices),
    )
    if update_count >= wanted_updates:
        return RoundClosed(state.round)
    has_quorum = update_count >= quorum(state, wanted_updates)
    # after a restart, a selected device may be leased to another job
    working_devices = state.pending_devices - busy_devices
    missing_count = math.ceil((wanted_updates - update_count) * (1 + cohort_settings.over_select)) - sum(
        device in online_devices for device in working_devices
    )
    disconnected_devices = (
        frozenset()
        if state.cohort_size
        else state.expected_devices.difference(
            online_devices, state.accepted_updates, state.decline_reasons, state.pending_devices
        )
    )
    new_devices: tuple[str, ...] = ()
    is_waiting_for_devices = False
    if missing_count > 0:
        available_devices = online_devices - (
            state.accepted_updates.keys() | state.decline_reasons.keys() | working_devices
        )
        new_devices = _select_devices(state, available_devices - busy_devices, min(missing_count, max_devices))

        is_waiting_for_devices = (
            max_devices < 1 or bool(disconnected_devices) or not available_devices.isdisjoint(busy_devices)
        )
    if has_quorum and state.is_deadline_extended:
        return RoundClosed(state.round)
    if now_s >= next_decision_s(state) and not (
        new_devices and have_all_declined(state) and now_s < state.opened_s + state.deadline_s
    ):
        if has_quorum:
            return RoundClosed(state.round)
        if state.deadline_s < state.max_deadline_s and not have_all_declined(state):
            return DeadlineExtended(state.round)
        failures = _recurring_failures(state, online_devices)
        if _is_quorum_impossible(
            state, failures, {*online_devices, *disconnected_devices}, quorum(state, wanted_updates)
        ):
            return failed_rounds.quorum_failure_event(state, quorum(state, wanted_updates), failures)
        failures = {device: decline for device, decline in failures.items() if decline.code != DISK_FULL}
        if (
            len({*online_devices, *state.accepted_updates, *failures}) < minimum_updates(state)
            or not (online_devices or failures)
            or is_waiting_for_devices
        ):
            return RoundRetried(state.round, state.attempt)  # an offline fleet costs no attempt
        if state.attempt + 1 >= cohort_settings.attempts:
            return failed_rounds.quorum_failure_event(state, quorum(state, wanted_updates), failures)
        return RoundRetried(state.round, state.attempt + 1)
    if new_devices:
        return CohortSelected(
            state.round,
            state.attempt,
            new_devices,
            _positive_work_amounts({device: workload_of(device) for device in new_devices}),
        )
    # a device without work counts like an update, once no other device can be selected instead
    if (
        state.pending_devices <= unreachable_devices
        and not is_waiting_for_devices
        and (
            has_quorum
            or (
                state.devices_without_work
                and update_count + len(state.devices_without_work) >= quorum(state, wanted_updates)
            )
        )
    ):
        return RoundClosed(state.round)
    return None


def have_all_declined(state: JobState) -> bool:
    return bool(state.decline_reasons) and not state.pending_devices


def _recurring_failures(state: JobState, online_devices: Collection[str]) -> dict[str, LastingDecline]:
    """Return the declines that would recur, of devices that are not online and have no update."""
    failures = {
        device: decline for device, decline in state.lasting_declines.items() if DECLINE_REASONS[decline.code].recurs
    }
    return {
        device: decline
        for device, decline in failures.items()
        if device not in online_devices and device not in state.accepted_updates
    }


def _is_quorum_impossible(
    state: JobState, failures: Mapping[str, LastingDecline], present_devices: Collection[str], quorum: int
) -> bool:
    # silent devices may answer in a later attempt, and so may devices with a full disk unless no others are left
    possible_devices = {*present_devices, *state.selected_s, *state.accepted_updates}.difference(failures)
    if possible_devices:
        possible_devices |= {device for device, decline in failures.items() if decline.code == DISK_FULL}
    return len(possible_devices) < quorum <= len(possible_devices | failures.keys())


REMOVED = "removed from the fleet by request"
FLOODED = "sent more than can be answered: it is set aside, and nothing of it is read for a while"
UNFINISHED = ("queued", "running", "stopping", "stopped", "damaged")


class DeviceChange(msgspec.Struct, frozen=True):
    """Change of a device's status, after which the device may lack its task."""

    device: str
    kind: Literal["online", "silent", "returned", "removed", "flooding"]


class ClaimReceived(msgspec.Struct, frozen=True):
    device: str
    claim: Claim
    workload: DeviceWorkload = field(default_factory=DeviceWorkload)  # cost of the task, for a device that declines
    agent_start_key: str = ""  # `DeviceRegistry.agent_start_key`


class UpdateAnnounced(msgspec.Struct, frozen=True):
    """Announcement of an update by a device. `status` is that of the update's job in the store, or "" if unknown."""

    device: str
    update: Update
    status: str = "running"
    is_counted: bool = False  # whether the log of an inactive job contains the update
    manifest_problem: str = ""  # why the manifest does not fit the round, or ""


class UpdateReceived(msgspec.Struct, frozen=True):
    """End of the transfer of an update's blobs, with an error if a blob could not be fetched."""

    device: str
    error: str | None = None


class UpdateValidated(msgspec.Struct, frozen=True):
    """Result of validating an update. `valid_part` is the valid part, or None if rejected for `reason`."""

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


class DiscardUpdate(msgspec.Struct, frozen=True):
    update: Update


class RenewTask(msgspec.Struct, frozen=True):
    """Action that resends a task with an epoch above that under which the device completed the round."""

    device: str
    epoch: int


Action: TypeAlias = (
    SendTask | CancelTask | SlowResends | FetchUpdate | ValidateUpdate | AckUpdate | DiscardUpdate | RenewTask
)
ArrivingUpdate: TypeAlias = Update | None  # update of the input's device whose blobs are being fetched


class Decision(msgspec.Struct, frozen=True):
    """Events to log and actions to take, in this order. `arriving_update` is the update being fetched afterwards."""

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
                return Decision(arriving_update, (), (ValidateUpdate(device, arriving_update),))
            return Decision(None)  # the device announces the update again
        case DeviceChange(device, "flooding"):
            return _exclude_device(state, arriving_update, device, "flooding", FLOODED)
        case DeviceChange(device, "removed"):
            return _exclude_device(state, arriving_update, device, "removed", REMOVED)
        case DeviceChange(device):
            is_open = state is not None and state.phase == "open"  # a message before may have stopped the job
            return Decision(
                arriving_update, (), (SendTask(device),) if is_open and _is_update_expected(state, device) else ()
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
    if claim.job != job or claim.round != state.round:
        return Decision(arriving_update)
    if claim.code == "counted":
        return Decision(arriving_update, (), (RenewTask(device, claim.epoch),))
    if claim.accepted:
        return Decision(arriving_update, (), (SlowResends(device),))
    if claim.code == "cleared":  # another client has deleted the retained task
        return Decision(arriving_update, (), (SendTask(device),))
    if claim.attempt != state.attempt:
        return Decision(arriving_update)
    decline_event = state.decline_event(device, claim.code, claim.reason, input.workload, input.agent_start_key)
    return Decision(None, (decline_event,), (CancelTask(device),))


def _decide_on_announcement(
    job: str, state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateAnnounced
) -> Decision:
    device, update = input.device, input.update
    if update.device != device:
        return _reject_unexpected_update(state, arriving_update, input, f"it names another device, {update.device}")
    if state is None or update.job != job:
        if input.is_counted:  # the acknowledgement was lost
            return Decision(arriving_update, (), (AckUpdate(device, update, True),))
        if input.status in UNFINISHED:
            return Decision(arriving_update)  # the device announces the update again when the job continues
        return _reject_unexpected_update(state, arriving_update, input, f"no job {update.job} is under way here")
    if update.round in state.history.get(device, ()) or (
        device in state.accepted_updates and update.round == state.round
    ):
        return Decision(arriving_update, (), (AckUpdate(device, update, True),))
    if update.round == state.round and state.phase == "selecting":  # this log is an older copy
        return Decision(arriving_update)  # the device announces the update again after its selection
    if update.round != state.round or not _is_update_expected(state, device):
        return _reject_unexpected_update(
            state, arriving_update, input, f"round {update.round + 1} is closed or did not ask for this"
        )
    if state.state is not None and update.state != state.state.sha256:
        reason = f"it was computed from the state {update.state[:12] or '(none)'}, and this round began with another"
        return _reject_unexpected_update(state, arriving_update, input, reason)
    if (site := state.sites_by_device.get(device)) is not None:
        return _reject_update(device, update, _duplicate_device_text(device, site))
    if input.manifest_problem:
        return _reject_update(device, update, input.manifest_problem)
    transfer_action = FetchUpdate(device, update) if update.bundles else ValidateUpdate(device, update)
    return Decision(update, (), (SlowResends(device), transfer_action))


def _decide_on_validation(
    state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateValidated, now_s: float
) -> Decision:
    device, update = input.device, input.update
    if state is None or arriving_update != update:
        return Decision(arriving_update)
    if input.valid_part is None:
        return _reject_update(device, update, input.reason)
    for board in input.valid_part.site_devices:
        if board in state.accepted_updates or board in state.sites_by_device:
            return _reject_update(
                device, update, f"{device}: {_duplicate_device_text(board, state.sites_by_device.get(board, 'itself'))}"
            )
        if board in state.last_selected_rounds:
            return _reject_update(
                device, update, f"{device}: {board} is a device of this coordinator, and speaks for itself"
            )
    event = state.acceptance_event(input.valid_part, now_s, input.workload)
    superseded = () if input.valid_part == update else (DiscardUpdate(update),)
    actions = (AckUpdate(device, update, True), CancelTask(device), *superseded)
    return Decision(None, (event,), actions)


def _reject_update(device: str, update: Update, reason: str) -> Decision:
    actions = (AckUpdate(device, update, False, reason), CancelTask(device), DiscardUpdate(update))
    return Decision(None, (UpdateRejected(update.round, device, reason),), actions)


def _duplicate_device_text(board: str, submitter: str) -> str:
    return (
        f"{board} counts in this round already, by {submitter}: a board belongs to one coordinator, and its "
        f"name to one board"
    )


def _reject_unexpected_update(
    state: JobState | None, arriving_update: ArrivingUpdate, input: UpdateAnnounced, reason: str
) -> Decision:
    ack = AckUpdate(input.device, input.update, False, reason)
    cancellation = () if _is_update_expected(state, input.device) else (CancelTask(input.device),)
    return Decision(arriving_update, (), (ack, *cancellation))


def _is_update_expected(state: JobState | None, device: str) -> bool:
    return state is not None and device in state.pending_devices
