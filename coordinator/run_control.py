"""Starts and stops of runs and rollouts, by users and by triggers on the drift of model runners.

A job with a [trigger] is queued as an armed run. When the trigger fires, the armed run starts another run of the same
job without a trigger, and both logs record the reason. Only one such run exists at a time, at least `pause` after the
one before.
"""

from __future__ import annotations

import functools
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
    """Drift (0 to 1) and accuracy that a model runner last reported, or None if unknown."""

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
    """Return the reports with drift or accuracy of devices that match the job's [cohort] select."""
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
    """Return why a job's trigger fires now, or "". During the pause after `last_start` it never fires."""
    trigger = job.trigger
    if trigger is None or (last_start is not None and abs(now - last_start) < trigger.pause_s):
        return ""
    exceeding = reports_beyond_limit(trigger, reports)
    if len(exceeding) < minimum_devices_to_fire(trigger, len(reports)):
        return ""
    examples = ", ".join(_format_report(device) for device in exceeding[:MAX_NAMED_DEVICES])
    more = f" and {len(exceeding) - MAX_NAMED_DEVICES} more" if len(exceeding) > MAX_NAMED_DEVICES else ""
    return (
        f"[trigger]: {len(exceeding)} of {len(reports)} reporting devices have {_format_limits(trigger)}: "
        f"{examples}{more}"
    )


def minimum_devices_to_fire(trigger: DriftTrigger, count: int) -> int:
    return max(1, math.ceil(trigger.share * count - 1e-9))


def describe_trigger_wait(
    job: JobSettings, reports: Sequence[RunnerReport], now: float, last_start: float | None
) -> str:
    """Return text to follow "waits for": the limits of an armed run, or the end of its pause."""
    trigger = job.trigger
    assert trigger is not None
    if last_start is not None and abs(now - last_start) < trigger.pause_s:
        return f"the end of its pause, in {units.format_duration(trigger.pause_s - abs(now - last_start))}"
    min_devices = minimum_devices_to_fire(trigger, len(reports))
    exceeding_count = len(reports_beyond_limit(trigger, reports))
    counts = f"{exceeding_count} of {len(reports)} reporting devices, at least {min_devices} needed"
    return f"{_format_limits(trigger)}: {counts}"


def last_start_time(store: Store, run: str) -> float | None:
    """Return the wall-clock seconds of the latest start by an armed run, or None."""
    return max((time_s for _, time_s, event in store.read_events(run) if isinstance(event, NoteRecorded)), default=None)


def start_triggered_runs(
    store: Store, rows: Sequence[StoredJob], fleet: Mapping[str, DeviceSnapshot], now: float
) -> list[StoredJob]:
    """Start a run for each trigger that fires. Return these runs, even those that await approval.

    A trigger does not fire while its earlier run has not ended.
    """
    started = []
    for row in rows:
        if row.status != ARMED or row.job.trigger is None:
            continue
        untriggered = replace(row.job, trigger=None)
        is_same_job = [(other.job, other.bundle) == (untriggered, row.bundle) for other in rows]
        if any(is_same and other.status in UNENDED for is_same, other in zip(is_same_job, rows, strict=True)):
            continue
        try:
            last_start = last_start_time(store, row.id)
        except JobError as error:
            _warn_of_unknown_start(row.id, str(error))
            continue
        reason = trigger_reason(row.job, select_reports(row.job, online_reports(fleet)), now, last_start)
        if reason:
            id = store.add_job(untriggered, row.bundle, cause=StartCause(row, reason, row.job.trigger.approve))
            log.warning("%s starts, by %s", id, reason, extra=log_ids(run=id))
            started.append(store.find_job(id))
    return started


@functools.lru_cache(maxsize=256)
def _warn_of_unknown_start(id: str, problem: str) -> None:
    """Log that an armed run does not start, once, because triggers are checked every second."""
    log.warning("%s: the trigger is ignored because its last start is unknown: %s", id, problem)


def _format_report(report: RunnerReport) -> str:
    parts = [f"drift {report.drift:.2f}"] if report.drift is not None else []
    parts += [f"accuracy {report.accuracy:.2f}"] if report.accuracy is not None else []
    return f"{report.device} ({', '.join(parts)})"


def _format_limits(trigger: DriftTrigger) -> str:
    min_accuracy = trigger.accuracy_below
    accuracy_text = "" if min_accuracy is None else f" or accuracy below {min_accuracy:g}"
    return f"drift above {trigger.drift_above:g}{accuracy_text}"


def stop_run(store: Store, run: str) -> str:
    """Stop a run, or request this from its coordinator. Return a message, or raise JobError if it ended."""
    row = store.find_job(run)
    if row.status not in UNENDED:
        raise JobError(f"{row.id} is already {row.status}")
    if store.is_served():
        store.set_status(row.id, "stopping")
        return f"{row.id} stops within about a second, when the coordinator reads its store"
    return (
        f"{row.id} is {store.end_inactive_job(row.id, JobEnded('stopped', 'by request'))}; no coordinator was running"
    )


def require_resumable(store: Store, run: str) -> StoredJob:
    """Return a run, or raise JobError if it is completed or the run of a simulation."""
    row = store.find_job(run)
    if row.status == "done":
        export = f"fedquilt model export {row.id} --home {store.home} --out FILE"
        raise JobError(f"{row.id} is done, and cannot be resumed: `{export}` writes its result")
    if row.origin != "run":
        raise JobError(f"{row.id} is the run of a simulation: {store.describe_resume(row)}")
    return row


def resume_run(store: Store, run: str) -> StoredJob:
    """Set a run to "running", or to armed if it has a trigger. Return the row from before the change.

    Raise JobError for a completed run and for the run of a simulation.
    """
    row = require_resumable(store, run)
    store.set_status(row.id, ARMED if row.job.trigger is not None else "running")
    return row


def approve_run(store: Store, run: str) -> str:
    """Queue a run that a [trigger] started and that waits for approval. Return a message."""
    row = store.find_job(run)
    if row.status != UNAPPROVED:
        raise JobError(f"{row.id} is {row.status}: only runs with status {UNAPPROVED} can be approved")
    store.append_event(row.id, NoteRecorded(f"approved by {current_user()}"))
    store.set_status(row.id, "queued")
    return f"{row.id} starts when the coordinator next reads its store"


def remove_devices(store: Store, devices: Sequence[str], *, force: bool = False) -> str:
    """Queue devices for removal and return a message. Raise JobError for unknown or working devices."""
    with TelemetryStore(store.home, writes=True) as telemetry_store:
        statuses = {status.device: status for status in telemetry_store.load_statuses()}
        for device in devices:
            if device not in statuses:
                raise JobError(
                    f"device {device!r} is unknown in {store.home}: `fedquilt devices` lists the known devices"
                )
            if (task := statuses[device].doing) is not None and not force and store.is_served():
                raise JobError(
                    f"{device} is working on {task.job}, round {task.round + 1}: wait until the task has ended, or "
                    "cancel the task with --force"
                )
        telemetry_store.request_removal(devices)
    return (
        f"{', '.join(devices)}: removed {_describe_when(store)}. A device whose agent still runs returns within "
        "10 minutes. Certificates stay valid: to revoke one, `fedquilt identity revoke NAME`"
    )


def queue_rollout(store: Store, plan: RolloutPlan, payload: bytes | None) -> str:
    """Store a rollout, with the `payload` of its release if any, for the coordinator. Return its id."""
    plan.require_valid()
    if payload is None:
        return store.rollouts.add_rollout(plan)
    ref = store.blob_store.store_bytes(payload)
    with store.open_transaction():
        store.blob_store.store_bytes(payload, ref)  # again if a coordinator has collected garbage since
        return store.rollouts.add_rollout(replace(plan, blob=ref))


def revert_rollout(store: Store, rollout: str = "") -> str:
    """Request that a rollout's devices return to their previous release. Return a message for the user.

    Raise JobError if the rollout has been reverted, or if a later rollout has replaced its release on some device.
    """
    stored = store.rollouts.find_rollout(rollout)
    state = stored.state
    if state.is_reverted:
        raise JobError(
            f"{state.id} is already {state.status}: its devices have returned to their previous release, or will"
        )
    rollouts = [stored_rollout.state for stored_rollout in store.rollouts.readable_rollouts()]
    for later in itertools.dropwhile(lambda stored_rollout: stored_rollout.id != state.id, rollouts):
        is_replaced = later.plan.kind == state.plan.kind and not later.offered.keys().isdisjoint(state.offered)
        if later.id == state.id or later.is_reverted or not is_replaced:
            continue
        raise JobError(
            f"{state.id} cannot be reverted: devices have the later {later.id} of {later.plan.name}, and store one "
            "earlier release only. Roll out the earlier release again"
        )
    store.rollouts.request_revert(state.id)
    effect = "is aborted" if state.is_under_way else "is rolled back"
    return f"{state.id} of {state.plan.name} {effect} {_describe_when(store)}: devices return to their previous release"


def _describe_when(store: Store) -> str:
    if store.is_served():
        return "within about a second, when the coordinator reads its store"
    return f"as soon as a coordinator runs for {store.home}"
