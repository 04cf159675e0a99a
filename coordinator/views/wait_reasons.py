"""Descriptions of why a run waits: for devices, broker, disk, approval or trigger."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal, NamedTuple

from fedquilt import methods
from fedquilt.console import units
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.fleet.device_status import DeviceStatus, TelemetrySample, TelemetryStore
from fedquilt.coordinator.rounds import decisions, selection
from fedquilt.coordinator.rounds.events import JobState
from fedquilt.coordinator.storage.store import ARMED, UNAPPROVED, Store, StoredJob
from fedquilt.coordinator.views import devices
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.core import FedquiltError, JobError


class WaitReason(NamedTuple):
    text: str  # as a sentence's end
    key: Hashable  # stays the same while only time passes
    # more devices; plug-ins on devices; devices that are offline or silent; devices at work
    kind: Literal["boards", "plugins", "lost", "working"]


def devices_of_other_runs(store: Store, run: str) -> dict[str, str]:
    found = dict[str, str]()
    for row in store.readable_jobs():
        if row.id != run and row.status == "running":
            with contextlib.suppress(JobError):  # a damaged log says nothing
                found |= dict.fromkeys(
                    summarise_events(row.job, store.read_events(row.id)).state.pending_devices, row.id
                )
    return found


def describe_wait(row: StoredJob, store: Store) -> str | None:
    """Return what a run waits for: approval, trigger, disk, broker or devices, or None."""
    if row.status == UNAPPROVED:
        return f"its owner: `fedquilt resume {row.id} --home {store.home}`"
    if row.status == ARMED:
        told = ((run_control.RunnerReport(b.device, r.drift, r.accuracy), b.labels) for b, r in _online_devices(store))
        return run_control.describe_trigger_wait(
            row.job, run_control.select_reports(row.job, told), time.time(), run_control.last_start_time(store, row.id)
        )
    standing = store.current_status(row)
    if standing == "held" and (hold := store.holds.current_suspension(row.id)) is not None:
        return str(hold)
    if standing != "running":
        return None
    if row.origin == "run" and (away := devices.describe_outage(store.home, time.time())):
        return f"{away}: what is known of boards is as of then"
    state = summarise_events(row.job, store.read_events(row.id)).state
    if state.phase not in ("selecting", "open"):
        return None
    wait = find_round_wait(row, state, load_device_statuses(store.home), devices_of_other_runs(store, row.id).keys())
    return None if wait is None else wait.text


def load_device_statuses(home: Path) -> dict[str, DeviceStatus]:
    with TelemetryStore(home) as store:
        return {each.device: each for each in store.load_statuses()}


def find_round_wait(
    row: StoredJob, state: JobState, boards: Mapping[str, DeviceStatus], busy: AbstractSet[str] = frozenset()
) -> WaitReason | None:
    try:
        engines = settings.list_engines(row.job, methods.load(row.job.method))
    except FedquiltError:  # a method of a package that is not installed here
        engines = (f"what {row.job.method} needs",)
    return find_wait(
        state, engines, eligible_online_devices(state), busy, boards.get, time.time(), decisions.next_decision_s(state)
    )


def eligible_online_devices(state: JobState) -> set[str]:
    """Return the devices that were online and able to run the job at the latest `EligibilityRecorded`."""
    return {
        *state.eligible,
        *(name for name, code in state.ineligibility_reasons.items() if code in selection.ONLINE_REASONS),
    }


def _online_devices(store: Store) -> Iterator[tuple[DeviceStatus, TelemetrySample]]:
    for each in devices.load_devices(store.home):
        if each.board.online:
            yield each.board, each.reading


def find_wait(
    state: JobState,
    engines: Sequence[str],
    able: Collection[str],
    busy: AbstractSet[str] = frozenset(),
    board: Callable[[str], DeviceStatus | None] = lambda device: None,
    now: float = 0.0,
    until: float = 0.0,
) -> WaitReason | None:
    """Return why the running round waits, or None if all its devices are at work.

    Return None as well if no round is running. Before the first update, return None unless a selected device is
    offline, silent, or at work for another job.

    Args:
        state: The job state.
        engines: The names of the engines that can run the job.
        able: The online devices with one of these engines.
        busy: The devices leased to other jobs.
        board: The function that returns the status of a device, or None.
        now: The time in wall-clock seconds.
        until: The round's deadline in wall-clock seconds, not after `now` if unknown.
    """
    if state.phase not in ("selecting", "open"):
        return None
    if state.pending_devices:
        return _find_selected_wait(state, able, busy, board, now, until)
    lacking = [device for device, code in state.ineligibility_reasons.items() if selection.reason_key(code) == "plugin"]
    able = set(able).difference(lacking)
    barred = [code for device, code in state.ineligibility_reasons.items() if device in able and code != selection.BUSY]
    alone = "".join(f", {barred.count(code)} not eligible ({code})" for code in sorted(set(barred)))
    declined = f", {len(state.decline_reasons)} of them declined" if state.decline_reasons else ""
    taken = f", {count} of them at other jobs' tasks" if (count := len(busy & set(able))) else ""
    there = f"devices that run {' or '.join(engines)}: {len(able)} online{taken}{alone}{declined}"
    if state.phase == "selecting":
        needed = decisions.minimum_devices_to_start(state)
        least = needed - len(able)
        if least <= 0 and not barred and not taken:
            return None
        text = f"{there}, at least {needed} needed{_describe_missing_plugins(state, lacking)}"
        return WaitReason(text, text, "plugins" if 0 < least <= len(lacking) else "boards")
    if decisions.have_all_declined(state):  # the round ends within seconds: nobody could start a device until then
        text = f"other devices: {format_names(sorted(state.decline_reasons))} declined"
        return WaitReason(f"{text}{_format_deadline(until, now)}", text, "lost")
    want = decisions.updates_to_close(state, able - state.ineligibility_reasons.keys())
    quorum = decisions.quorum(state, want)
    text = f"{there}, {len(state.accepted_updates)} of {want} updates received, a quorum is {quorum}"
    kind: Literal["boards", "plugins"] = (
        "plugins" if 0 < quorum - len(state.accepted_updates) <= len(lacking) else "boards"
    )
    return WaitReason(f"{text}{_format_deadline(until, now)}{_describe_missing_plugins(state, lacking)}", text, kind)


def _describe_missing_plugins(state: JobState, devices: Sequence[str]) -> str:
    by_code = dict[str, list[str]]()
    for device in sorted(devices):
        by_code.setdefault(state.eligibility[device], []).append(device)
    return "".join(
        f"; not {format_names(found)}, {'each of which' if len(found) > 1 else 'which'} {selection.reason_text(code)}"
        for code, found in sorted(by_code.items())
    )


def _find_selected_wait(
    state: JobState,
    able: Collection[str],
    busy: AbstractSet[str],
    board: Callable[[str], DeviceStatus | None],
    now: float,
    until: float,
) -> WaitReason | None:
    lost, work = dict[str, list[str]](), list[str]()  # by what keeps them
    for device in sorted(state.pending_devices):
        if (why := _lost_reason(device, able, busy, board(device), now)) is None:
            work.append(device)
        else:
            lost.setdefault(why, []).append(device)
    if not lost and not state.accepted_updates:
        return None
    parts = [f"{format_names(devices)}, {why}" for why, devices in lost.items()]
    rest = ""
    if work and lost and _can_close_without(state, able, board, [device for each in lost.values() for device in each]):
        parts, rest = [], f", not for {'; '.join(parts)}"
    if work and (state.accepted_updates or rest):
        since = min(state.selected_s.get(device, state.opened_s) for device in work)
        parts.append(
            f"{format_names(work)}, at work for {units.format_duration(now - since)}"
            if since
            else f"{format_names(work)}, at work"
        )
    groups = [(why.partition(" ")[0], *devices) for why, devices in lost.items()]
    key = tuple(groups or work)
    return WaitReason(f"{'; '.join(parts)}{_format_deadline(until, now)}{rest}", key, "lost" if lost else "working")


def _can_close_without(
    state: JobState, able: Collection[str], board: Callable[[str], DeviceStatus | None], lost: Collection[str]
) -> bool:
    """Return whether all lost devices are offline and the other selected ones reach the quorum."""
    if any((known := board(device)) is None or known.online for device in lost):
        return False
    gone = frozenset(lost)
    return len(state.accepted_updates) + len(state.pending_devices - gone) >= decisions.quorum(
        state, decisions.updates_to_close(state, able, gone)
    )


def _format_deadline(until: float, now: float) -> str:
    left_s = until - now
    return f", until {units.format_time_of_day(until, now)} ({left_s:.0f} s)" if 0 < left_s < math.inf else ""


def _lost_reason(
    device: str, able: Collection[str], busy: AbstractSet[str], board: DeviceStatus | None, now: float
) -> str | None:
    """Return why a selected device cannot work on its task now, or None if it can."""
    if device in busy:
        return "at other jobs' tasks"
    if board is None:
        return None if device in able else "offline"
    if not board.online:
        since = "" if board.since is None else f" since {units.format_time_of_day(board.since, now)}"
        return f"{'silent' if board.silent else 'offline'}{since}"
    if board.quiet and board.seen is not None:
        return f"last heard {units.format_duration(now - board.seen)} ago"
    return None


def describe_busy_devices(state: JobState, able: Collection[str], busy: Mapping[str, str]) -> str | None:
    """Return which runs occupy the devices that alone the running round waits for, or None."""
    if state.pending_devices:
        found, lacking = state.pending_devices & busy.keys(), len(state.pending_devices - busy.keys())
    else:
        passed = {device for device, code in state.ineligibility_reasons.items() if code != selection.BUSY}
        fit = frozenset(able) - passed - state.decline_reasons.keys() - state.accepted_updates.keys()
        least = decisions.minimum_devices_to_start(state)
        if state.phase == "open":
            least = decisions.quorum(state, decisions.updates_to_close(state, set(able) - passed)) - len(
                state.accepted_updates
            )
        found, lacking = fit & busy.keys(), least - len(fit)
    if not found or lacking > 0:
        return None
    runs = sorted({busy[device] for device in found})
    of = {run: sorted(device for device in found if busy[device] == run) for run in runs}
    told = "; ".join(f"{format_names(devices)} at a task of {run}" for run, devices in of.items())
    return f"it goes on when they are free: {told}"


def format_names(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
