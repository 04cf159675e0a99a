"""Descriptions of what a run waits for: devices, broker, disk, approval or trigger."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, Literal, NamedTuple

from fedquilt import methods
from fedquilt.console import units
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.fleet.device_status import DeviceStatus, TelemetrySample, TelemetryStore
from fedquilt.coordinator.rounds import decisions, selection
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.storage.store import ARMED, UNAPPROVED, Store, StoredJob
from fedquilt.coordinator.views import devices
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.core import FedquiltError, JobError

LONG_LOST_S: Final = 600.0  # offline time after which the wait names the command that removes a device


class WaitReason(NamedTuple):
    text: str  # to follow "waits for"
    key: Hashable  # changes if more than the elapsed time changes
    # waits for more devices, for packages on devices, for unreachable devices, or for devices at work
    kind: Literal["boards", "plugins", "lost", "working"]


def other_runs_by_device(store: Store, run: str) -> dict[str, str]:
    """Return by device the id of the other running run for which the device has a task."""
    run_by_device = dict[str, str]()
    for row in store.readable_jobs():
        if row.id != run and row.status == "running":
            with contextlib.suppress(JobError):  # a damaged log
                run_by_device |= dict.fromkeys(
                    summarise_events(row.job, store.read_events(row.id)).state.pending_devices, row.id
                )
    return run_by_device


def describe_wait(row: StoredJob, store: Store) -> str | None:
    """Return what a run waits for, as text to follow "waits for", or None if it does not wait."""
    if row.status == UNAPPROVED:
        return f"its owner: `fedquilt resume {row.id} --home {store.home}`"
    if row.status == ARMED:
        reports = (
            (run_control.RunnerReport(b.device, reading.drift, reading.accuracy), b.labels)
            for b, reading in _online_devices(store)
        )
        return run_control.describe_trigger_wait(
            row.job,
            run_control.select_reports(row.job, reports),
            time.time(),
            run_control.last_start_time(store, row.id),
        )
    status = store.current_status(row)
    if status == "held" and (suspension := store.suspensions.current_suspension(row.id)) is not None:
        return str(suspension)
    if status != "running":
        return None
    if row.origin == "run" and (outage := devices.describe_outage(store.home, time.time())):
        return f"{outage}: the states of devices are from before"
    state = summarise_events(row.job, store.read_events(row.id)).state
    if state.phase not in ("selecting", "open"):
        return None
    wait = find_round_wait(row, state, load_device_statuses(store.home), other_runs_by_device(store, row.id).keys())
    return None if wait is None else wait.text


def load_device_statuses(home: Path) -> dict[str, DeviceStatus]:
    with TelemetryStore(home) as store:
        return {status.device: status for status in store.load_statuses()}


def find_round_wait(
    row: StoredJob, state: JobState, statuses: Mapping[str, DeviceStatus], busy_devices: AbstractSet[str] = frozenset()
) -> WaitReason | None:
    try:
        engines = settings.list_engines(row.job, methods.load(row.job.method))
    except FedquiltError:  # a method of a package that is not installed here
        engines = (f"an engine of {row.job.method}",)
    return find_wait(
        state,
        engines,
        eligible_online_devices(state),
        busy_devices,
        statuses.get,
        time.time(),
        decisions.next_decision_s(state),
    )


def eligible_online_devices(state: JobState) -> set[str]:
    """Return the devices that were online and able to run the job at the latest `EligibilityRecorded`."""
    return {
        *state.eligible,
        *(name for name, code in state.ineligibility_reasons.items() if code in selection.ONLINE_REASONS),
    }


def _online_devices(store: Store) -> Iterator[tuple[DeviceStatus, TelemetrySample]]:
    for device_row in devices.load_devices(store.home):
        if device_row.board.online:
            yield device_row.board, device_row.reading


def find_wait(
    state: JobState,
    engines: Sequence[str],
    usable_devices: Collection[str],
    busy_devices: AbstractSet[str] = frozenset(),
    status_of: Callable[[str], DeviceStatus | None] = lambda device: None,
    now: float = 0.0,
    deadline: float = 0.0,
) -> WaitReason | None:
    """Return why the running round waits, or None if all its devices are at work.

    Return None as well if no round is running. Before the first update, return None unless a selected device is
    offline, silent, or at work for another job.

    Args:
        state: The job state.
        engines: The names of the engines that can run the job.
        usable_devices: The online devices with one of these engines.
        busy_devices: The devices leased to other jobs.
        status_of: The function that returns the status of a device, or None.
        now: The time in wall-clock seconds.
        deadline: The round's deadline in wall-clock seconds, not after `now` if unknown.
    """
    if state.phase not in ("selecting", "open"):
        return None
    if state.pending_devices:
        return _find_selected_wait(state, usable_devices, busy_devices, status_of, now, deadline)
    devices_without_plugins = [
        device for device, code in state.ineligibility_reasons.items() if selection.reason_key(code) == "plugin"
    ]
    usable_devices = set(usable_devices).difference(devices_without_plugins)
    ineligibility_codes = [
        code
        for device, code in state.ineligibility_reasons.items()
        if device in usable_devices and code != selection.BUSY
    ]
    ineligible_text = "".join(
        f", {ineligibility_codes.count(code)} not eligible ({code})" for code in sorted(set(ineligibility_codes))
    )
    declined_text = f", {len(state.decline_reasons)} of them declined" if state.decline_reasons else ""
    busy_text = (
        f", {count} of them working for other jobs" if (count := len(busy_devices & set(usable_devices))) else ""
    )
    devices_text = (
        f"devices that run {' or '.join(engines)}: {len(usable_devices)} "
        f"online{busy_text}{ineligible_text}{declined_text}"
    )
    if state.phase == "selecting":
        min_devices = decisions.minimum_devices_to_start(state)
        missing_count = min_devices - len(usable_devices)
        if missing_count <= 0 and not ineligibility_codes and not busy_text:
            return None
        text = (
            f"{devices_text}, at least {min_devices} needed{_describe_missing_plugins(state, devices_without_plugins)}"
        )
        return WaitReason(text, text, "plugins" if 0 < missing_count <= len(devices_without_plugins) else "boards")
    if decisions.have_all_declined(state):  # the attempt ends within seconds
        text = f"other devices: {format_names(sorted(state.decline_reasons))} declined"
        return WaitReason(f"{text}{_format_deadline(deadline, now)}", text, "lost")
    want = decisions.updates_to_close(state, usable_devices - state.ineligibility_reasons.keys())
    quorum = decisions.quorum(state, want)
    text = f"{devices_text}, {len(state.accepted_updates)} of {want} updates received, a quorum is {quorum}"
    kind: Literal["boards", "plugins"] = (
        "plugins" if 0 < quorum - len(state.accepted_updates) <= len(devices_without_plugins) else "boards"
    )
    return WaitReason(
        f"{text}{_format_deadline(deadline, now)}{_describe_missing_plugins(state, devices_without_plugins)}",
        text,
        kind,
    )


def _describe_missing_plugins(state: JobState, devices: Sequence[str]) -> str:
    devices_by_code = dict[str, list[str]]()
    for device in sorted(devices):
        devices_by_code.setdefault(state.eligibility[device], []).append(device)
    return "".join(
        f"; not {format_names(names)}, {'each of which' if len(names) > 1 else 'which'} {selection.reason_text(code)}"
        for code, names in sorted(devices_by_code.items())
    )


def _find_selected_wait(
    state: JobState,
    usable_devices: Collection[str],
    busy_devices: AbstractSet[str],
    status_of: Callable[[str], DeviceStatus | None],
    now: float,
    deadline: float,
) -> WaitReason | None:
    lost_by_reason, working = dict[str, list[str]](), list[str]()  # by reason
    for device in sorted(state.pending_devices):
        if (reason := _lost_reason(device, usable_devices, busy_devices, status_of(device), now)) is None:
            working.append(device)
        else:
            lost_by_reason.setdefault(reason, []).append(device)
    if not lost_by_reason and not state.accepted_updates:
        return None
    parts = [f"{format_names(devices)}, {reason}" for reason, devices in lost_by_reason.items()]
    exception_text = ""
    if (
        working
        and lost_by_reason
        and _can_close_without(
            state, usable_devices, status_of, [device for each in lost_by_reason.values() for device in each]
        )
    ):
        parts, exception_text = [], f", not for {'; '.join(parts)}"
    if working and (state.accepted_updates or exception_text):
        start_time = min(state.selected_s.get(device, state.opened_s) for device in working)
        parts.append(
            f"{format_names(working)}, at work for {units.format_duration(now - start_time)}"
            if start_time
            else f"{format_names(working)}, at work"
        )
    groups = [(reason.partition(" ")[0], *devices) for reason, devices in lost_by_reason.items()]
    key = tuple(groups or working)
    long_lost = [device for device in sorted(state.pending_devices) if _is_lost_for_long(status_of(device), now)]
    hint = f"; `fedquilt devices --remove {' '.join(long_lost[:5])}` if it does not return" if long_lost else ""
    return WaitReason(
        f"{'; '.join(parts)}{_format_deadline(deadline, now)}{exception_text}{hint}",
        key,
        "lost" if lost_by_reason else "working",
    )


def _is_lost_for_long(status: DeviceStatus | None, now: float) -> bool:
    return status is not None and not status.online and status.since is not None and now - status.since >= LONG_LOST_S


def _can_close_without(
    state: JobState,
    usable_devices: Collection[str],
    status_of: Callable[[str], DeviceStatus | None],
    lost: Collection[str],
) -> bool:
    if any((status := status_of(device)) is None or status.online for device in lost):
        return False
    lost_devices = frozenset(lost)
    return len(state.accepted_updates) + len(state.pending_devices - lost_devices) >= decisions.quorum(
        state, decisions.updates_to_close(state, usable_devices, lost_devices)
    )


def _format_deadline(deadline: float, now: float) -> str:
    left_s = deadline - now
    return f", until {units.format_time_of_day(deadline, now)} ({left_s:.0f} s)" if 0 < left_s < math.inf else ""


def _lost_reason(
    device: str,
    usable_devices: Collection[str],
    busy_devices: AbstractSet[str],
    status_of: DeviceStatus | None,
    now: float,
) -> str | None:
    if device in busy_devices:
        return "working for other jobs"
    if status_of is None:
        return None if device in usable_devices else "offline"
    if not status_of.online:
        since = "" if status_of.since is None else f" since {units.format_time_of_day(status_of.since, now)}"
        return f"{'silent' if status_of.silent else 'offline'}{since}"
    if status_of.quiet and status_of.seen is not None:
        return f"last message {units.format_duration(now - status_of.seen)} ago"
    return None


def describe_busy_devices(
    state: JobState, usable_devices: Collection[str], busy_devices: Mapping[str, str]
) -> str | None:
    """Return which runs use the devices that the round waits for, or None if the wait has another cause."""
    if state.pending_devices:
        busy_pending = state.pending_devices & busy_devices.keys()
        missing_count = len(state.pending_devices - busy_devices.keys())
    else:
        ineligible = {device for device, code in state.ineligibility_reasons.items() if code != selection.BUSY}
        usable = frozenset(usable_devices) - ineligible - state.decline_reasons.keys() - state.accepted_updates.keys()
        min_devices = decisions.minimum_devices_to_start(state)
        if state.phase == "open":
            min_devices = decisions.quorum(
                state, decisions.updates_to_close(state, set(usable_devices) - ineligible)
            ) - len(state.accepted_updates)
        busy_pending, missing_count = usable & busy_devices.keys(), min_devices - len(usable)
    if not busy_pending or missing_count > 0:
        return None
    runs = sorted({busy_devices[device] for device in busy_pending})
    devices_by_run = {run: sorted(device for device in busy_pending if busy_devices[device] == run) for run in runs}
    tasks_text = "; ".join(f"{format_names(devices)} working for {run}" for run, devices in devices_by_run.items())
    return f"continues when they are free: {tasks_text}"


def format_names(names: Sequence[str], max_names: int = 5) -> str:
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")
