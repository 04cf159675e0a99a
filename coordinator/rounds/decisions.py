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
from fedquilt.coordinator.rounds import deadline, events, failed_rounds
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    AttemptResumed,
    CohortSelected,
    DeadlineExtended,
    EligibilityRecorded,
    JobEnded,
    JobState,
    RoundClosed,
    RoundRetried,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.selection import FULL, REFUSALS, LastingDecline, select_cohort
from fedquilt.core import Update
from fedquilt.wire import Claim

LEFT = 0.1  # share of its deadline that an attempt has at the least, once another process takes it up
UNKNOWN = 0.01  # share of it that counts at a restart where the wall clock does not show how long it took
LATE = 1.05  # times the deadline, at which a site's round ends. Its task has a ninth more (tools/operations/site.py).
DECLINED_S = 10.0  # wait for other devices after all those present have declined


def decide_event(
    state: JobState,
    now_s: float,
    online: Collection[str],
    ask: Callable[[str], DeviceWorkload] = lambda device: DeviceWorkload(),
    busy: AbstractSet[str] = frozenset(),
    most: float = math.inf,
    gone: AbstractSet[str] = frozenset(),
) -> AnyEvent | None:
    """Return the next event, or None to wait for input or until `next_decision_s`.

    Args:
        state: The job state.
        now_s: The time of the coordinator's clock, in seconds.
        online: The devices that can take a task of this round, or have one.
        ask: The function that returns the workload of a device's task.
        busy: The devices in `online` that must be left to other jobs now.
        most: The number of devices that may be selected now.
        gone: The devices of the round that are offline or silent, so that the round does not wait for them.
    """
    online = DeviceSet.from_devices(online)
    if state.phase == "selecting":
        return _decide_selection_or_end(state, online, ask, busy, most)
    if state.phase == "open":
        return _decide_open_round(state, now_s, online, ask, busy, most, gone)
    return None


def to_process_clock(state: JobState, now_s: float, by_wall: bool) -> JobState:
    """Return a loaded state on this process's clock. Without `by_wall`, the attempt has its whole deadline again."""
    opened_s = state.opened_s if by_wall else now_s
    return replace(state, opened_s=opened_s, began_s=now_s, asked_s=dict.fromkeys(state.asked_s, now_s))


def restart_event(state: JobState, now_s: float) -> AttemptResumed | None:
    """Return the event of a coordinator restart, or None if no attempt is running.

    The wall-clock time since the previous restart counts as elapsed. If that time is negative or exceeds the limit, a
    hundredth of the limit counts instead. At least a tenth of the limit remains at the first restart, a twentieth at
    the second, and so on, so that an attempt ends even if coordinators are killed again and again.
    """
    if state.phase != "open":
        return None
    since_s = now_s - (state.opened_s + state.passed_s)
    return AttemptResumed(state.round, capped_elapsed_s(state.passed_s, since_s, state.deadline_s, state.restarts))


def capped_elapsed_s(passed_s: float, since_s: float, limit_s: float, restarts: int) -> float:
    """Return the seconds that count as elapsed at a restart: at most 90 % of the limit, then 95 %, and so on.

    If `since_s` is not positive or reaches the limit, the wall clock was set, and 1 % of the limit counts instead.

    Args:
        passed_s: The seconds that had elapsed at the previous restart.
        since_s: The wall-clock seconds since then.
        limit_s: The time limit.
        restarts: The number of earlier restarts.
    """
    passed_s += since_s if 0 < since_s < limit_s else UNKNOWN * limit_s
    return min(passed_s, (1 - LEFT * 0.5**restarts) * limit_s)


def eligibility_event(
    state: JobState, labels: LabelColumn, costs: CostColumn = CostColumn()
) -> EligibilityRecorded | None:
    """Return the event that records changes of eligibility, if any. Unknown devices of the log are offline."""
    changed: dict[str, list[str]] = {}
    for device, label in sorted(labels.changed_values(state.labels, lost="offline").items()):
        changed.setdefault(label, []).append(device)
    eligible = tuple(changed.pop(ELIGIBLE, ()))
    passed = {code: tuple(devices) for code, devices in sorted(changed.items())}
    paid = costs.changed_values(state.costs, among=labels.devices_with(ELIGIBLE)) if costs else {}
    fact = EligibilityRecorded(state.round, eligible, passed, dict(sorted(paid.items())))
    return fact if eligible or passed or paid else None


def devices_to_skip(
    state: JobState,
    devices: Collection[str],
    ask: Callable[[str], DeviceWorkload],
    start: Callable[[str], str] = lambda device: "",
) -> dict[str, str]:
    """Return the devices expected to decline again, with the code of the last decline of each.

    `eligibility.REFUSALS` defines how long each code excludes a device. If the other devices are too few for the round,
    a device that declined in an earlier round is selected once more, because the round could never end otherwise.
    """
    if not state.refused:
        return {}
    found = {
        device: refused.code
        for device, refused in state.refused.items()
        if device in devices
        and refused.would_recur(
            state.round, state.task_actions, start(device), MemoryShortage.from_workload(ask(device))
        )
    }
    others = len(devices) - len(found)
    waits = not others and state.phase == "selecting"
    if waits or not others < minimum_devices_to_start(state) <= len(devices):
        return found
    return {device: code for device, code in found.items() if state.refused[device].round == state.round}


def next_decision_s(state: JobState) -> float:
    """Return the time at which `decide_event` may change its result without input."""
    if state.phase != "open":
        return math.inf
    limit_s = DECLINED_S if have_all_declined(state) else math.inf
    return state.opened_s + min(state.deadline_s, limit_s)


def delay_attempt(state: JobState, lost_s: float) -> JobState:
    """Return the state with the attempt delayed by `lost_s`. With infinity the attempt never ends."""
    return replace(state, opened_s=state.opened_s + lost_s) if lost_s else state


def site_deadline_s(state: JobState) -> float:
    """Return the time at which a site stops waiting for devices, or infinity outside sites."""
    return state.opened_s + LATE * state.deadline_s if state.ordered else math.inf


def can_skip_decision(state: JobState, now_s: float, gone: AbstractSet[str] = frozenset()) -> bool:
    """Return whether further updates change no decision, as neither all nor enough have arrived."""
    return (
        state.phase == "open"
        and not state.asked <= gone
        and not (state.extended or has_full_cohort(state))
        and not any(device in state.asked for device in state.refused)  # an answer takes a refusal back
        and now_s < next_decision_s(state)
    )


def has_full_cohort(state: JobState) -> bool:
    return bool(state.cohort_size) and len(state.answered) >= state.cohort_size


def is_round_idle(state: JobState, able: Collection[str], busy: AbstractSet[str] = frozenset()) -> bool:
    """Return whether the running round is unfinished and no device works on a task of the round."""
    return state.phase in ("selecting", "open") and not any(
        device in able and device not in busy for device in state.asked
    )


def updates_to_close(state: JobState, online: Collection[str], gone: AbstractSet[str] = frozenset()) -> int:
    """Return the number of updates that closes the round at once: the cohort size, or all counted devices.

    Counted are devices that are online, selected or due in this attempt, without those that have declined or are gone,
    but at least `minimum_updates`. The round waits until its deadline for devices that are at work or leased elsewhere.
    """
    if size := state.cohort_size:
        return size
    present = {*online, *state.answered, *state.asked, *state.due} - set(state.declined)
    return max(len(present - (gone - state.answered.keys())), minimum_updates(state))


def quorum(state: JobState, want: int) -> int:
    """Return how many updates are enough at the deadline. Settling rounds use the usual cohort size."""
    if state.settling:
        want = min(want, state.plan.cohort.size or want)
    return max(minimum_updates(state), math.ceil(want * state.plan.cohort.quorum))


def minimum_updates(state: JobState) -> int:
    """Return the fewest updates to commit a round, and the fewest devices to start the round.

    Without `min_devices`, the number is 1 if a cohort size is set. Otherwise the number is half of the devices in the
    log, or the quorum if smaller, so that a restarted coordinator does not mistake the first online device for the
    whole fleet.
    """
    cohort = state.plan.cohort
    if cohort.min_devices:
        return min(cohort.min_devices, cohort.size or cohort.min_devices)
    return 1 if cohort.size else max(1, math.ceil(min(cohort.quorum, 0.5) * len(state.roll)))


def minimum_devices_to_start(state: JobState) -> int:
    cohort = state.plan.cohort
    return max(cohort.min_devices, cohort.start_devices if state.round == 0 else 0, minimum_updates(state))


def _decide_selection_or_end(
    state: JobState, online: DeviceSet, ask: Callable[[str], DeviceWorkload], busy: AbstractSet[str], most: float
) -> AnyEvent | None:
    plan = state.plan
    if not state.settling:
        if state.is_work_done and (state.checked or not plan.check_every or plan.check_beside):
            return JobEnded("done", events.describe_unmetered_tasks(plan.stop, state.spent) or "")
        if state.reached_limit is not None:
            return JobEnded("done", state.reached_limit)
    if len(online) < minimum_devices_to_start(state):
        return None
    free = online - (state.answered.keys() | state.declined.keys() | busy)
    want = updates_to_close(state, online) - len(state.answered)
    count = math.ceil(want * (1 + plan.cohort.over_select))
    chosen = _select_devices(state, free, min(count, most))
    if not chosen:
        return None
    asks = {device: ask(device) for device in chosen}
    allowed = deadline.decide_deadline(plan.cohort, state.took, asks)
    asks.update({device: asks[device].with_epochs(epochs) for device, epochs in allowed.epochs.items()})
    return CohortSelected(
        state.round, state.attempt, chosen, _positive_work_amounts(asks), allowed.seconds, epochs=dict(allowed.epochs)
    )


def _select_devices(state: JobState, free: DeviceSet, most: float) -> tuple[str, ...]:
    """Select up to `most` free devices, with those silent in earlier attempts last."""
    count = int(min(most, len(free)))
    if tried := [device for device in state.silent if device in free]:
        fresh = _select_devices(replace(state, silent=()), free - tried, count)
        return tuple(sorted((*fresh, *tried[: max(count - len(fresh), 0)])))
    return select_cohort(
        state.plan.seed, state.round, free, count, costs=state.costs, since=state.since, turns=state.plan.cohort.turns
    )


def _positive_work_amounts(asks: Mapping[str, DeviceWorkload]) -> dict[str, float]:
    amounts = {device: deadline.work_amount(ask.work) for device, ask in asks.items()}
    return {device: amount for device, amount in amounts.items() if amount > 0}


def _decide_open_round(
    state: JobState,
    now_s: float,
    online: DeviceSet,
    ask: Callable[[str], DeviceWorkload],
    busy: AbstractSet[str],
    most: float,
    gone: AbstractSet[str],
) -> AnyEvent | None:
    cohort = state.plan.cohort
    have, want = len(state.answered), updates_to_close(state, online, gone)
    if have >= want:
        return RoundClosed(state.round)
    enough = have >= quorum(state, want)
    at_work = state.asked - busy  # after a restart or a pause, another job may have a device that was asked
    missing = math.ceil((want - have) * (1 + cohort.over_select)) - sum(device in online for device in at_work)
    apart = (
        frozenset() if state.cohort_size else state.due.difference(online, state.answered, state.declined, state.asked)
    )
    chosen: tuple[str, ...] = ()
    waits = False
    if missing > 0:
        left = online - (state.answered.keys() | state.declined.keys() | at_work)
        chosen = _select_devices(state, left - busy, min(missing, most))
        waits = most < 1 or bool(apart) or not left.isdisjoint(busy)  # others have boards that it needs
    if enough and state.extended:
        return RoundClosed(state.round)
    if now_s >= next_decision_s(state) and not (
        chosen and have_all_declined(state) and now_s < state.opened_s + state.deadline_s
    ):
        if enough:
            return RoundClosed(state.round)
        if state.deadline_s < state.max_deadline_s and not have_all_declined(state):
            return DeadlineExtended(state.round)
        failed = _recurring_failures(state, online)
        if _is_quorum_impossible(state, failed, {*online, *apart}, quorum(state, want)):
            return failed_rounds.quorum_failure_event(state, quorum(state, want), failed)
        failed = {device: kept for device, kept in failed.items() if kept.code != FULL}
        if len({*online, *state.answered, *failed}) < minimum_updates(state) or not (online or failed) or waits:
            return RoundRetried(state.round, state.attempt)  # a fleet that is offline for a night costs no attempt
        if state.attempt + 1 >= cohort.attempts:
            return failed_rounds.quorum_failure_event(state, quorum(state, want), failed)
        return RoundRetried(state.round, state.attempt + 1)
    if chosen:
        return CohortSelected(
            state.round, state.attempt, chosen, _positive_work_amounts({device: ask(device) for device in chosen})
        )
    # a device that the method has no task for counts as answered once no other can be asked instead
    if state.asked <= gone and not waits and (enough or (state.idle and have + len(state.idle) >= quorum(state, want))):
        return RoundClosed(state.round)
    return None


def have_all_declined(state: JobState) -> bool:
    return bool(state.declined) and not state.asked


def _recurring_failures(state: JobState, online: Collection[str]) -> dict[str, LastingDecline]:
    """Return the declines that would recur, of devices that are not online and have no update."""
    found = {device: kept for device, kept in state.refused.items() if REFUSALS[kept.code].recurs}
    return {device: kept for device, kept in found.items() if device not in online and device not in state.answered}


def _is_quorum_impossible(
    state: JobState, failed: Mapping[str, LastingDecline], present: Collection[str], enough: int
) -> bool:
    # silent devices may still answer in another attempt, and so may devices with a full disk unless no others are left
    possible = {*present, *state.asked_s, *state.answered}.difference(failed)
    if possible:
        possible |= {device for device, kept in failed.items() if kept.code == FULL}
    return len(possible) < enough <= len(possible | failed.keys())


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
    ask: DeviceWorkload = field(default_factory=DeviceWorkload)  # cost of the task, for a device that declines
    start: str = ""  # of its agent, as of `DeviceRegistry.agent_start_key`


class UpdateAnnounced(msgspec.Struct, frozen=True):
    """Announcement of an update by a device. `status` is that of the update's job in the store, or "" if unknown."""

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
    """Result of validating an update. `taken` is the valid part, or None if rejected for `reason`."""

    device: str
    update: Update
    taken: Update | None
    reason: str = ""
    ask: DeviceWorkload = field(default_factory=DeviceWorkload)
    odd: str = ""  # what its device claims and cannot be, which is not in `taken`


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
Arriving: TypeAlias = Update | None  # of the event's device: its update while its blobs are fetched


class Decision(msgspec.Struct, frozen=True):
    """Events to log and actions to take, in this order. `arriving` is the update being fetched afterwards."""

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
        case DeviceChange(device, "flooding"):
            return _exclude_device(state, arriving, device, "flooding", FLOODED)
        case DeviceChange(device, "removed"):
            return _exclude_device(state, arriving, device, "removed", REMOVED)
        case DeviceChange(device):  # is online
            open = state is not None and state.phase == "open"  # a job stopped in the same turn is not open
            return Decision(arriving, (), (SendTask(device),) if open and _is_update_expected(state, device) else ())


def _exclude_device(state: JobState | None, arriving: Arriving, device: str, code: str, reason: str) -> Decision:
    if state is None or not _is_update_expected(state, device):
        return Decision(arriving)
    return Decision(None, (UpdateRejected(state.round, device, reason, code),), (CancelTask(device),))


def _decide_on_claim(job: str, state: JobState | None, arriving: Arriving, event: ClaimReceived) -> Decision:
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
    device, update = event.device, event.update
    if state is None or arriving != update:
        return Decision(arriving)
    if event.taken is None:
        return _reject_update(device, update, event.reason)
    for board in event.taken.site_devices:
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
    answer = AckUpdate(event.device, event.update, False, reason)
    idle = () if _is_update_expected(state, event.device) else (CancelTask(event.device),)
    return Decision(arriving, (), (answer, *idle))


def _is_update_expected(state: JobState | None, device: str) -> bool:
    return state is not None and device in state.asked
