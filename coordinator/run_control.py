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

MAX_NAMED_DEVICES: Final = 5  # devices named in a reason


class RunnerReport(NamedTuple):
    device: str
    drift: float | None
    accuracy: float | None


def online_reports(fleet: Mapping[str, DeviceSnapshot]) -> Iterator[tuple[RunnerReport, tuple[str, ...]]]:
    for device, snapshot in sorted(fleet.items()):
        if snapshot.online and (telemetry := snapshot.telemetry) is not None:
            yield (
                RunnerReport(device, telemetry.drift, telemetry.accuracy),
                snapshot.profile.labels if snapshot.profile else (),
            )


def select_reports(
    job: JobSettings, labelled_reports: Iterable[tuple[RunnerReport, Collection[str]]]
) -> list[RunnerReport]:
    selected = [
        report for report, device_labels in labelled_reports if labels.is_selected(job.cohort.select, device_labels)
    ]
    return [report for report in selected if report.drift is not None or report.accuracy is not None]


def reports_beyond_limit(trigger: DriftTrigger, reports: Iterable[RunnerReport]) -> list[RunnerReport]:
    """Return the reports with drift above or accuracy below the limit, the highest drift first."""
    min_accuracy = trigger.accuracy_below
    exceeding = [
        report
        for report in reports
        if (report.drift is not None and report.drift > trigger.drift_above)
        or (min_accuracy is not None and report.accuracy is not None and report.accuracy < min_accuracy)
    ]
    return sorted(exceeding, key=lambda report: (-(report.drift or 0.0), report.device))


def trigger_reason(
    job: JobSettings, reports: Sequence[RunnerReport], now: float, last_start: float | None = None
) -> str:
    """Return why a job starts now, or "" if its trigger does not fire."""
    trigger = job.trigger
    if trigger is None or (last_start is not None and abs(now - last_start) < trigger.pause_s):
        return ""
    exceeding = reports_beyond_limit(trigger, reports)
    if len(exceeding) < minimum_devices_to_fire(trigger, len(reports)):
        return ""
    examples = ", ".join(_format_report(device) for device in exceeding[:MAX_NAMED_DEVICES])
    more = f" and {len(exceeding) - MAX_NAMED_DEVICES} more" if len(exceeding) > MAX_NAMED_DEVICES else ""
    return (
        f"[trigger]: {len(exceeding)} of {len(reports)} boards that tell are beyond "
        f"{_format_limits(trigger)}: {examples}{more}"
    )


def minimum_devices_to_fire(trigger: DriftTrigger, count: int) -> int:
    return max(1, math.ceil(trigger.share * count - 1e-9))


def describe_trigger_wait(
    job: JobSettings, reports: Sequence[RunnerReport], now: float, last_start: float | None
) -> str:
    """Return the end of the pause or the limits for which a job waits, to follow "waits for"."""
    trigger = job.trigger
    assert trigger is not None
    if last_start is not None and abs(now - last_start) < trigger.pause_s:
        return f"the end of its pause, in {units.format_duration(trigger.pause_s - abs(now - last_start))}"
    min_devices = minimum_devices_to_fire(trigger, len(reports))
    exceeding_count = len(reports_beyond_limit(trigger, reports))
    return (
        f"{_format_limits(trigger)}: {exceeding_count} of {len(reports)} boards that tell are beyond, at "
        f"least {min_devices} needed"
    )


def last_start_time(store: Store, run: str) -> float | None:
    """Return the wall-clock seconds of the latest start by an armed run, or None."""
    return max((time_s for _, time_s, event in store.read_events(run) if isinstance(event, NoteRecorded)), default=None)


def start_triggered_runs(
    store: Store, rows: Sequence[StoredJob], fleet: Mapping[str, DeviceSnapshot], now: float
) -> list[StoredJob]:
    """Start a run for every trigger that fires. Return the new runs that need no approval."""
    started = []
    for row in rows:
        if row.status != ARMED or row.job.trigger is None:
            continue
        untriggered = replace(row.job, trigger=None)
        if any(
            (other_row.job, other_row.bundle) == (untriggered, row.bundle) and other_row.status in UNENDED
            for other_row in rows
        ):
            continue
        try:
            reason = trigger_reason(
                row.job, select_reports(row.job, online_reports(fleet)), now, last_start_time(store, row.id)
            )
        except JobError:  # a damaged log, so the time of the latest start is unknown
            continue
        if reason:
            id = store.add_job(untriggered, row.bundle, cause=StartCause(row, reason, row.job.trigger.approve))
            log.warning("%s is started by %s", id, reason, extra=log_ids(run=id))
            started.append(store.find_job(id))
    return started


def _format_report(report: RunnerReport) -> str:
    parts = [f"drift {report.drift:.2f}"] if report.drift is not None else []
    parts += [f"accuracy {report.accuracy:.2f}"] if report.accuracy is not None else []
    return f"{report.device} ({', '.join(parts)})"


def _format_limits(trigger: DriftTrigger) -> str:
    min_accuracy = trigger.accuracy_below
    return f"drift {trigger.drift_above:g}" + (f" or accuracy {min_accuracy:g}" if min_accuracy is not None else "")


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
    with TelemetryStore(store.home, writes=True) as telemetry_store:
        statuses = {status.device: status for status in telemetry_store.load_statuses()}
        for device in devices:
            if device not in statuses:
                raise JobError(
                    f"no coordinator of {store.home} knows a device {device!r}: `fedquilt devices` lists them"
                )
            if (task := statuses[device].doing) is not None and not force and store.is_served():
                raise JobError(
                    f"{device} has a task of {task.job}, round {task.round + 1}: wait until it has answered, or take "
                    "the task back with --force"
                )
        telemetry_store.request_removal(devices)
    return (
        f"{', '.join(devices)}: removed {_describe_when(store)}. An agent that still runs brings its device "
        "back with its next "
        "message. A certificate is not revoked by this: `fedquilt identity revoke NAME`"
    )


def queue_rollout(store: Store, plan: RolloutPlan, payload: bytes | None) -> str:
    plan.require_valid()
    if payload is None:
        return store.rollouts.add_rollout(plan)
    ref = store.blob_store.store_bytes(payload)
    with store.open_transaction():
        store.blob_store.store_bytes(payload, ref)  # again if a coordinator has collected garbage since
        return store.rollouts.add_rollout(replace(plan, blob=ref))


def revert_rollout(store: Store, rollout: str = "") -> str:
    """Request that devices return from a rollout, under way or completed. Return a message for the user."""
    stored = store.rollouts.find_rollout(rollout)
    state = stored.state
    if state.is_reverted:
        raise JobError(f"{state.id} is {state.status}: boards have returned from it, or return when they come")
    rollouts = [stored_rollout.state for stored_rollout in store.rollouts.readable_rollouts()]
    for later in itertools.dropwhile(lambda stored_rollout: stored_rollout.id != state.id, rollouts):
        if later.id == state.id or later.plan.kind != state.plan.kind or later.offered.keys().isdisjoint(state.offered):
            continue
        raise JobError(
            f"boards {'were offered' if later.is_reverted else 'have'} {later.id} of {later.plan.name} since, "
            f"and keep one former state alone: roll out again what they ran before {state.id}"
        )
    store.rollouts.request_revert(state.id)
    effect = "is ended" if state.is_under_way else "is taken back"
    return f"{state.id} of {state.plan.name} {effect} {_describe_when(store)}: boards return to what they ran before"


def _describe_when(store: Store) -> str:
    if store.is_served():
        return "at the coordinator's next look at its store (within a second or so)"
    return f"as soon as a coordinator serves {store.home}"
