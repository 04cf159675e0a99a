"""Starts and stops of runs and rollouts: requests of users, and triggers by the drift of model runners.

A job with a [trigger] is queued as an armed run. When the trigger fires, the armed run starts another run of the same
job without a trigger, and both logs record the reason. Only one such run exists at a time, at least `pause` after the
one before.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from fedquilt.console import units
from fedquilt.coordinator.fleet.device_status import TelemetryStore
from fedquilt.coordinator.rounds.events import JobEnded, NoteRecorded
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.coordinator.rounds.selection import DeviceSnapshot
from fedquilt.coordinator.settings import DriftTrigger, JobSettings
from fedquilt.coordinator.storage.rows import current_user
from fedquilt.coordinator.storage.store import ARMED, UNAPPROVED, UNENDED, StartCause, Store, StoredJob
from fedquilt.core import JobError
from fedquilt.formats import labels
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

NAMED: Final = 5  # boards that a reason names


class RunnerReport(NamedTuple):
    device: str
    drift: float | None
    accuracy: float | None


def online_reports(fleet: Mapping[str, DeviceSnapshot]) -> Iterator[tuple[RunnerReport, tuple[str, ...]]]:
    for device, each in sorted(fleet.items()):
        if each.online and (news := each.telemetry) is not None:
            yield RunnerReport(device, news.drift, news.accuracy), each.profile.labels if each.profile else ()


def select_reports(job: JobSettings, boards: Iterable[tuple[RunnerReport, Collection[str]]]) -> list[RunnerReport]:
    found = [each for each, has in boards if labels.is_selected(job.cohort.select, has)]
    return [each for each in found if each.drift is not None or each.accuracy is not None]


def reports_beyond_limit(trigger: DriftTrigger, boards: Iterable[RunnerReport]) -> list[RunnerReport]:
    """Return the reports with drift above or accuracy below the limit, the highest drift first."""
    least = trigger.accuracy_below
    found = [
        each
        for each in boards
        if (each.drift is not None and each.drift > trigger.drift_above)
        or (least is not None and each.accuracy is not None and each.accuracy < least)
    ]
    return sorted(found, key=lambda each: (-(each.drift or 0.0), each.device))


def trigger_reason(job: JobSettings, boards: Sequence[RunnerReport], now: float, last: float | None = None) -> str:
    """Return why a job starts now, or "" if its trigger does not fire."""
    trigger = job.trigger
    if trigger is None or (last is not None and abs(now - last) < trigger.pause_s):
        return ""
    found = reports_beyond_limit(trigger, boards)
    if len(found) < minimum_devices_to_fire(trigger, len(boards)):
        return ""
    some = ", ".join(_format_report(each) for each in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (
        f"[trigger]: {len(found)} of {len(boards)} boards that tell are beyond {_format_limits(trigger)}: {some}{more}"
    )


def minimum_devices_to_fire(trigger: DriftTrigger, count: int) -> int:
    return max(1, math.ceil(trigger.share * count - 1e-9))


def describe_trigger_wait(job: JobSettings, boards: Sequence[RunnerReport], now: float, last: float | None) -> str:
    """Return the end of the pause or the limits for which a job waits, to follow "waits for"."""
    trigger = job.trigger
    assert trigger is not None
    if last is not None and abs(now - last) < trigger.pause_s:
        return f"the end of its pause, in {units.format_duration(trigger.pause_s - abs(now - last))}"
    least = minimum_devices_to_fire(trigger, len(boards))
    found = len(reports_beyond_limit(trigger, boards))
    return f"{_format_limits(trigger)}: {found} of {len(boards)} boards that tell are beyond, at least {least} needed"


def last_start_time(store: Store, run: str) -> float | None:
    """Return the wall-clock seconds of the latest start by an armed run, or None."""
    return max((at for _, at, fact in store.read_events(run) if isinstance(fact, NoteRecorded)), default=None)


def start_triggered_runs(
    store: Store, rows: Sequence[StoredJob], fleet: Mapping[str, DeviceSnapshot], now: float
) -> list[StoredJob]:
    """Start a run for every trigger that fires. Return the new runs that need no approval."""
    found = []
    for row in rows:
        if row.status != ARMED or row.job.trigger is None:
            continue
        bare = replace(row.job, trigger=None)
        if any((each.job, each.bundle) == (bare, row.bundle) and each.status in UNENDED for each in rows):
            continue
        try:
            why = trigger_reason(
                row.job, select_reports(row.job, online_reports(fleet)), now, last_start_time(store, row.id)
            )
        except JobError:  # its log is damaged, as `ls` says: when it started a run last is not known
            continue
        if why:
            id = store.add_job(bare, row.bundle, by=StartCause(row, why, row.job.trigger.approve))
            log.warning("%s is started by %s", id, why, extra=log_ids(run=id))
            found.append(store.find_job(id))
    return found


def _format_report(board: RunnerReport) -> str:
    parts = [f"drift {board.drift:.2f}"] if board.drift is not None else []
    parts += [f"accuracy {board.accuracy:.2f}"] if board.accuracy is not None else []
    return f"{board.device} ({', '.join(parts)})"


def _format_limits(trigger: DriftTrigger) -> str:
    least = trigger.accuracy_below
    return f"drift {trigger.drift_above:g}" + (f" or accuracy {least:g}" if least is not None else "")


def stop_run(store: Store, run: str) -> str:
    """Stop a run, at once or through its coordinator. Return a message for the user."""
    row = store.find_job(run)
    if row.status not in UNENDED:
        raise JobError(f"{row.id} is {row.status} already")
    if store.is_served():
        store.set_status(row.id, "stopping")
        return f"{row.id} stops at the coordinator's next look at its store (within a second or so)"
    return (
        f"{row.id} is {store.end_inactive_job(row.id, JobEnded('stopped', 'by request'))}; no coordinator was "
        "running it"
    )


def resume_run(store: Store, run: str) -> StoredJob:
    """Mark a run for its coordinator to resume, or as armed if the run has a trigger. Return its row from before."""
    row = store.find_job(run)
    if row.status == "done":
        export = f"fedquilt model export {row.id} --home {store.home} --out FILE"
        raise JobError(f"{row.id} is done; `{export}` writes its result")
    if row.origin != "run":
        raise JobError(f"{row.id} is a simulation's: {store.describe_resume(row)}")
    store.set_status(row.id, ARMED if row.job.trigger is not None else "running")
    return row


def approve_run(store: Store, run: str) -> str:
    """Queue a run that a [trigger] started and that waits for approval. Return a message."""
    row = store.find_job(run)
    if row.status != UNAPPROVED:
        raise JobError(f"{row.id} is {row.status}: only a run that is {UNAPPROVED} can be approved")
    store.append_event(row.id, NoteRecorded(f"approved by {current_user()}"))
    store.set_status(row.id, "queued")
    return f"{row.id} begins at the coordinator's next look at its store"


def remove_devices(store: Store, devices: Sequence[str], *, force: bool = False) -> str:
    """Queue devices for removal by the coordinator. Return a message for the user."""
    with TelemetryStore(store.home, writes=True) as boards:
        known = {each.device: each for each in boards.load_statuses()}
        for device in devices:
            if device not in known:
                raise JobError(
                    f"no coordinator of {store.home} knows a device {device!r}: `fedquilt devices` lists them"
                )
            if (doing := known[device].doing) is not None and not force and store.is_served():
                raise JobError(
                    f"{device} has a task of {doing.job}, round {doing.round + 1}: wait until it has answered, or take "
                    "the task back with --force"
                )
        boards.request_removal(devices)
    return (
        f"{', '.join(devices)}: removed {_describe_when(store)}. An agent that still runs brings its device "
        "back with its next "
        "message. A certificate is not revoked by this: `fedquilt identity revoke NAME`"
    )


def queue_rollout(store: Store, plan: RolloutPlan, payload: bytes | None) -> str:
    plan.require_valid()
    if payload is None:
        return store.rollouts.add_rollout(plan)
    ref = store.depot.store_bytes(payload)
    with store.open_transaction():
        store.depot.store_bytes(payload, ref)  # again if a coordinator has collected garbage since
        return store.rollouts.add_rollout(replace(plan, blob=ref))


def revert_rollout(store: Store, rollout: str = "") -> str:
    """Request that devices return from a rollout, under way or completed. Return a message for the user."""
    kept = store.rollouts.find_rollout(rollout)
    state = kept.state
    if state.is_reverted:
        raise JobError(f"{state.id} is {state.status}: boards have returned from it, or return when they come")
    known = [each.state for each in store.rollouts.readable_rollouts()]
    for later in itertools.dropwhile(lambda each: each.id != state.id, known):
        if later.id == state.id or later.plan.kind != state.plan.kind or later.offered.keys().isdisjoint(state.offered):
            continue
        raise JobError(
            f"boards {'were offered' if later.is_reverted else 'have'} {later.id} of {later.plan.name} since, "
            f"and keep one former state alone: roll out again what they ran before {state.id}"
        )
    store.rollouts.request_revert(state.id)
    how = "is ended" if state.is_under_way else "is taken back"
    return f"{state.id} of {state.plan.name} {how} {_describe_when(store)}: boards return to what they ran before"


def _describe_when(store: Store) -> str:
    if store.is_served():
        return "at the coordinator's next look at its store (within a second or so)"
    return f"as soon as a coordinator serves {store.home}"
