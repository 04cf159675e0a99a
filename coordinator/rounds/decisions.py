"""Decisions of a job, as a pure function: which event comes next.

`decide_event` returns the next event from the state, the time and the online devices. The eligibility of devices is
recorded before a selection (`EligibilityRecorded`). So the selection depends on the log alone, and the log explains why
a device was not selected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from fedquilt.coordinator.device_columns import ELIGIBLE, CostColumn, DeviceSet, LabelColumn
from fedquilt.coordinator.rounds import buffering, deadline, privacy
from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    AttemptResumed,
    CohortSelected,
    DeadlineExtended,
    EligibilityRecorded,
    JobEnded,
    ModeChosen,
    RoundClosed,
    RoundRetried,
    TasksCancelled,
)
from fedquilt.coordinator.rounds.job_limits import describe_unmetered_tasks
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.rounds.selection import (
    DECLINE_REASONS,
    DISK_FULL,
    REMOVED,
    UPDATE,
    LastingDecline,
    format_by_reason,
    select_cohort,
)

MIN_REMAINING_SHARE = 0.1  # least share of the deadline that remains of an attempt after the first restart
UNKNOWN_ELAPSED_SHARE = 0.01  # share of the deadline that a restart costs if the wall clock was set
# deadline of a site's round, times `deadline_s`. The parent allows a ninth more (tools/operations/site.py).
SITE_DEADLINE_FACTOR = 1.05
ALL_DECLINED_WAIT_S = 10.0  # wait for other devices after all those present have declined
MODE_WAIT_S = 30.0  # wait for as many devices as are at work in buffered mode, before mode = "auto" is decided


def decide_event(
    state: JobState,
    now_s: float,
    online_devices: Collection[str],
    workload_of: Callable[[str], DeviceWorkload] = lambda device: DeviceWorkload(),
    busy_devices: AbstractSet[str] = frozenset(),
    max_devices: float = math.inf,
    unreachable_devices: AbstractSet[str] = frozenset(),
    held_devices: AbstractSet[str] = frozenset(),
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
        held_devices: The devices in `online_devices` that are not selected now (`devices_to_hold`).
    """
    online_devices = DeviceSet.from_devices(online_devices)
    if state.phase == "selecting":
        return _decide_selecting_phase(
            state, now_s, online_devices, workload_of, busy_devices, max_devices, held_devices
        )
    if state.phase == "open":
        return _decide_open_round(
            state, now_s, online_devices, workload_of, busy_devices, max_devices, unreachable_devices, held_devices
        )
    return None


def to_process_clock(state: JobState, now_s: float, uses_wall_clock: bool) -> JobState:
    """Return the state of a loaded snapshot with its times on this process's clock.

    With `uses_wall_clock`, the start of the running attempt is kept. Otherwise the attempt starts now.
    """
    opened_s = state.opened_s if uses_wall_clock else now_s
    return replace(state, opened_s=opened_s, round_started_s=now_s, selected_s=dict.fromkeys(state.selected_s, now_s))


def restart_event(state: JobState, now_s: float) -> AttemptResumed | None:
    """Return the event of a coordinator restart, or None if no attempt is running.

    The wall-clock time since the previous restart counts as elapsed. If that time is negative or exceeds the deadline,
    the clock was set, and a hundredth of the deadline counts instead. At least a tenth of the deadline remains at the
    first restart, a twentieth at the second, and so on, so that an attempt ends even if coordinators are killed
    repeatedly.
    """
    if state.phase != "open":
        return None
    elapsed_s = now_s - (state.opened_s + state.passed_s)
    return AttemptResumed(state.round, capped_elapsed_s(state.passed_s, elapsed_s, state.deadline_s, state.restarts))


def capped_elapsed_s(elapsed_s: float, new_elapsed_s: float, limit_s: float, restarts: int) -> float:
    """Return the elapsed seconds that count at a restart, so that some of the limit remains.

    At most 90 % of the limit count at the first restart, 95 % at the second, and so on. If `new_elapsed_s` is not
    positive or reaches the limit, the wall clock was set, and 1 % of the limit counts instead.

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
    """Return the event with changes of eligibility and costs, or None without changes.

    Devices that have an entry in the log but no label are offline. A removed device stays removed until it is online.
    """
    devices_by_label: dict[str, list[str]] = {}
    for device, label in sorted(labels.changed_values(state.eligibility, default="offline").items()):
        if label != "offline" or state.eligibility.get(device) != REMOVED:
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


def devices_to_hold(
    state: JobState, free_devices: DeviceSet, working_devices: Collection[str], now_s: float
) -> dict[str, str]:
    """Return the devices that buffered mode does not select now, each with the code of the reason.

    No device is held if otherwise no device would work.
    """
    if not state.is_buffered:
        return {}
    end_times_s = {device: _expected_end_s(state, device, now_s) for device in working_devices}
    held_devices = dict.fromkeys(
        buffering.unneeded_devices(free_devices, state.durations, end_times_s, state.remaining_updates, now_s),
        "unneeded",
    )
    held_devices |= {
        device: "outdated"
        for device, backoff in state.backoffs.items()
        if device in free_devices and state.round < backoff.until_round
    }
    if state.constants.cohort.fair == "contributions":
        devices_ahead = buffering.devices_ahead(state.latest_selections, working_devices)
        held_devices |= {device: "ahead" for device in devices_ahead if device in free_devices}
    other_devices = free_devices - (state.accepted_updates.keys() | state.decline_reasons.keys() | held_devices.keys())
    return held_devices if working_devices or other_devices else {}


def _expected_end_s(state: JobState, device: str, now_s: float) -> float:
    """Return when a running task ends by the device's last duration, or infinity if unknown or already past."""
    if device not in state.durations:
        return math.inf
    end_s = state.selected_s.get(device, now_s) + state.durations[device][-1].seconds
    return end_s if end_s > now_s else math.inf


def next_decision_s(state: JobState) -> float:
    """Return the time at which `decide_event` may change its result without input."""
    if state.phase == "selecting" and is_mode_open(state):
        return state.round_started_s + MODE_WAIT_S
    if state.phase != "open":
        return math.inf
    task_deadlines_s = map(state.task_deadline_s, state.pending_devices) if state.is_buffered else ()
    return min(_attempt_end_s(state), *task_deadlines_s, math.inf)


def is_mode_open(state: JobState) -> bool:
    return state.constants.cohort.mode == "auto" and state.chosen_mode is None


def _attempt_end_s(state: JobState) -> float:
    limit_s = ALL_DECLINED_WAIT_S if have_all_declined(state) else math.inf
    return state.opened_s + min(state.deadline_s, limit_s)


def delay_attempt(state: JobState, lost_s: float) -> JobState:
    """Return the state with the attempt's start `lost_s` later. With infinity the attempt never ends."""
    if not lost_s:
        return state
    selected_s = {device: time_s + lost_s for device, time_s in state.selected_s.items()}
    return replace(state, opened_s=state.opened_s + lost_s, selected_s=selected_s)


def site_deadline_s(state: JobState) -> float:
    """Return the time at which a site stops waiting for devices, or infinity outside sites."""
    return state.opened_s + SITE_DEADLINE_FACTOR * state.deadline_s if state.parent_order else math.inf


def can_skip_decision(state: JobState, now_s: float, unreachable_devices: AbstractSet[str] = frozenset()) -> bool:
    """Return whether the next update cannot lead to a decision, because the round needs more updates."""
    return (
        state.phase == "open"
        and not state.is_buffered  # another device takes the place of each one that is done
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
    """Return how many updates close the round at once: the cohort size or, if 0, one per counted device.

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
    """Return how many updates suffice at the deadline.

    An evaluation needs a cohort, not all devices. A round of all devices does not need those that were silent for a
    whole attempt already, so that one hung device does not fail the job.
    """
    if not state.cohort_size:
        wanted_updates -= len(state.pending_devices.intersection(state.silent_devices))
    if state.is_evaluation_round:
        wanted_updates = min(wanted_updates, state.training_size or wanted_updates)
    return max(minimum_updates(state), math.ceil(wanted_updates * state.constants.cohort.quorum))


def minimum_updates(state: JobState) -> int:
    """Return the fewest updates to commit a round, and the fewest devices to start the round.

    Without `min_devices`, the number is 1 if a cohort size is set. Otherwise the number is half of the last cohort, or
    the quorum if smaller, so that a restarted coordinator does not mistake the first online device for the whole fleet.
    """
    cohort, size = state.constants.cohort, state.training_size
    if cohort.min_devices:
        return min(cohort.min_devices, size or cohort.min_devices)
    return 1 if size else max(1, math.ceil(min(cohort.quorum, 0.5) * len(state.cohort)))


def minimum_devices_to_start(state: JobState) -> int:
    cohort = state.constants.cohort
    return max(cohort.min_devices, cohort.start_devices if state.round == 0 else 0, minimum_updates(state))


def _decide_selecting_phase(
    state: JobState,
    now_s: float,
    online_devices: DeviceSet,
    workload_of: Callable[[str], DeviceWorkload],
    busy_devices: AbstractSet[str],
    max_devices: float,
    held_devices: AbstractSet[str],
) -> AnyEvent | None:
    constants = state.constants
    if not state.is_evaluation_round:
        if state.is_work_done and (
            state.is_final_evaluation_done or not constants.check_every or constants.check_beside
        ):
            notes = describe_unmetered_tasks(constants.stop, state.usage), privacy.describe_spent_budget(state)
            return JobEnded("done", "; ".join(filter(None, notes)))
        if state.reached_limit is not None:
            return JobEnded("done", state.reached_limit)
    if is_mode_open(state) and online_devices:
        wanted_count = max(constants.cohort.size, constants.cohort.concurrency)
        is_waiting = len(online_devices) < wanted_count and now_s < next_decision_s(state)
        if is_waiting or len(online_devices) < minimum_devices_to_start(state):
            return None
        choice = buffering.choose_mode(constants.cohort, {device: workload_of(device) for device in online_devices})
        return ModeChosen(state.round, choice.mode, choice.reason)
    if outdated_devices := _devices_with_outdated_tasks(state):
        return TasksCancelled(state.round, outdated_devices, "staleness")
    if privacy.is_budget_spent(
        state, online_devices, max(minimum_devices_to_start(state), quorum(state, state.cohort_size))
    ):
        return JobEnded("done", f"privacy budget spent: {privacy.describe_spent_budget(state)}")
    if len(online_devices) < minimum_devices_to_start(state):
        return None
    if constants.privacy is not None and state.privacy_plan is None:
        return privacy.plan_noise(state, len(online_devices))
    working_devices = state.pending_devices - busy_devices
    free_devices = online_devices - (
        state.accepted_updates.keys() | state.decline_reasons.keys() | busy_devices | working_devices | held_devices
    )
    count = _missing_device_count(state, updates_to_close(state, online_devices), online_devices, working_devices)
    cohort = _select_devices(state, free_devices, min(max(count, 0), max_devices))
    if not cohort and not working_devices:
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


def _devices_with_outdated_tasks(state: JobState) -> tuple[str, ...]:
    oldest_round = state.round - state.constants.cohort.staleness.max
    return tuple(sorted(device for device in state.pending_devices if state.task_version(device).round < oldest_round))


def _missing_device_count(
    state: JobState, wanted_updates: int, online_devices: DeviceSet, working_devices: AbstractSet[str]
) -> int:
    """Return how many devices to select to reach the wanted updates or, if buffered, the concurrency."""
    cohort = state.constants.cohort
    if state.is_buffered:
        count = cohort.concurrency or len(online_devices)
    else:
        count = math.ceil((wanted_updates - len(state.accepted_updates)) * (1 + cohort.over_select))
    return count - sum(device in online_devices for device in working_devices)


def _select_devices(state: JobState, free_devices: DeviceSet, max_devices: float) -> tuple[str, ...]:
    """Select up to `max_devices` free devices. Devices silent in earlier attempts come last."""
    max_count = int(min(max_devices, len(free_devices)))
    if silent_devices := [device for device in state.silent_devices if device in free_devices]:
        responsive_devices = _select_devices(
            replace(state, silent_devices=()), free_devices - silent_devices, max_count
        )
        return tuple(sorted((*responsive_devices, *silent_devices[: max(max_count - len(responsive_devices), 0)])))
    return select_cohort(state.draw, free_devices, max_count)


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
    held_devices: AbstractSet[str],
) -> AnyEvent | None:
    """Return the event that ends or extends the round or selects more devices, or None to wait."""
    cohort_settings = state.constants.cohort
    update_count = len(state.accepted_updates)
    wanted_updates = updates_to_close(state, online_devices, unreachable_devices)
    if update_count >= wanted_updates:
        return RoundClosed(state.round)
    if state.is_buffered and (
        late_devices := sorted(device for device in state.pending_devices if now_s >= state.task_deadline_s(device))
    ):
        return TasksCancelled(state.round, tuple(late_devices), "deadline")
    has_quorum = update_count >= quorum(state, wanted_updates)
    # after a restart, a selected device may be leased to another job
    working_devices = state.pending_devices - busy_devices
    missing_count = _missing_device_count(state, wanted_updates, online_devices, working_devices)
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
            state.accepted_updates.keys() | state.decline_reasons.keys() | working_devices | held_devices
        )
        new_devices = _select_devices(state, available_devices - busy_devices, min(missing_count, max_devices))
        is_waiting_for_devices = (
            max_devices < 1 or bool(disconnected_devices) or not available_devices.isdisjoint(busy_devices)
        )
    if has_quorum and state.is_deadline_extended:
        return RoundClosed(state.round)
    if now_s >= _attempt_end_s(state) and not (
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
            return _quorum_failure_event(state, quorum(state, wanted_updates), failures)
        failures = {device: decline for device, decline in failures.items() if decline.code != DISK_FULL}
        if (
            len({*online_devices, *state.accepted_updates, *failures}) < minimum_updates(state)
            or not (online_devices or failures)
            or is_waiting_for_devices
        ):
            return RoundRetried(state.round, state.attempt)  # an offline fleet costs no attempt
        if state.attempt + 1 >= cohort_settings.attempts:
            return _quorum_failure_event(state, quorum(state, wanted_updates), failures)
        return RoundRetried(state.round, state.attempt + 1)
    if new_devices:
        workloads = {device: workload_of(device) for device in new_devices}
        limit_s = None
        if state.is_buffered:
            limit_s = deadline.decide_deadline(cohort_settings, state.durations, workloads).seconds
        return CohortSelected(
            state.round, state.attempt, new_devices, _positive_work_amounts(workloads), deadline_s=limit_s
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


def _quorum_failure_event(state: JobState, quorum: int, recurring_failures: Mapping[str, LastingDecline]) -> JobEnded:
    round_declines = {
        device: decline for device, decline in state.lasting_declines.items() if decline.round == state.round
    }
    declines = {
        device: (decline.code, decline.reason) for device, decline in {**recurring_failures, **round_declines}.items()
    }
    selected_devices = {
        *state.selected_s,
        *state.accepted_updates,
        *state.decline_reasons,
        *declines,
    } - state.devices_without_work
    if declines and len(declines) + len(state.accepted_updates) >= len(selected_devices):
        codes = [code for code, _ in Counter(code for code, _ in declines.values()).most_common()]
        causes = "; ".join(_format_declines(state.round, code, declines, len(selected_devices)) for code in codes)
        return JobEnded("failed", f"{causes}.\nFix: {DECLINE_REASONS[codes[0]].fix}.", codes[0])
    other_declines = {
        device: ("", reason) for device, reason in state.decline_reasons.items() if device not in declines
    }
    return JobEnded("failed", _describe_failed_round(state, quorum, declines | other_declines))


def _format_declines(round: int, code: str, declines: Mapping[str, tuple[str, str]], selected_count: int) -> str:
    reasons = [reason for _, (decline_code, reason) in sorted(declines.items()) if decline_code == code]
    reason, count = Counter(reasons).most_common(1)[0]
    example = (
        "" if count == len(reasons) else f"{min(d for d, decline in declines.items() if decline == (code, reason))}: "
    )
    devices = f"{len(reasons)} of {selected_count} {'device' if selected_count == 1 else 'devices'}"
    details = f" ({example}{reason})" if reason else ""
    return f"{DECLINE_REASONS[code].cause} in round {round + 1} on {devices}{details}"


def _describe_failed_round(state: JobState, quorum: int, reasons: Mapping[str, tuple[str, str]]) -> str:
    selected_devices = state.selected_s.keys() | state.accepted_updates.keys() | reasons.keys()
    rejected = {device for device, (code, _) in reasons.items() if code == UPDATE} | (
        state.decline_reasons.keys() & state.cohort
    )
    declined = reasons.keys() - rejected - state.devices_without_work
    missing = sorted(selected_devices - state.accepted_updates.keys() - reasons.keys())
    counts = [
        f"{len(state.accepted_updates)} submitted an update",
        *([f"{len(declined)} declined"] if declined else []),
        *([f"{len(rejected)} submitted an invalid update"] if rejected else []),
        *([f"{len(state.devices_without_work)} had no task"] if state.devices_without_work else []),
        *([f"{len(missing)} submitted nothing in time"] if missing else []),
    ]
    reasons_text = format_by_reason({device: reason for device, (_, reason) in reasons.items()})
    return (
        f"round {state.round + 1} selected {len(selected_devices)} "
        f"{'device' if len(selected_devices) == 1 else 'devices'} in {state.attempt + 1} "
        f"{'attempt' if not state.attempt else 'attempts'}: {', '.join(counts)}, and {quorum} "
        f"{'update is' if quorum == 1 else 'updates are'} needed"
        + (f"; reasons: {reasons_text}" if reasons_text else "")
        + (f"; no update from {', '.join(missing[:5])}" if missing else "")
        + ".\nFix: check these devices and `fedquilt resume` the run (with simulated devices: repeat the command), or "
        "start the job again with a longer [cohort] deadline_s, if the devices were at work, or another size or quorum."
    )
