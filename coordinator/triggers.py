"""Jobs that start by drift of model runners, decided from their reports and the time.

A job with a [trigger] is queued as an armed run. When the trigger fires, the armed run starts another run of the same
job without a trigger, and both logs record the reason. Only one such run exists at a time, at least `pause` after the
one before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from fedquilt.console import units
from fedquilt.coordinator.rounds.eligibility import DeviceSnapshot
from fedquilt.coordinator.rounds.events import NoteRecorded
from fedquilt.coordinator.settings import DriftTrigger, JobSettings
from fedquilt.coordinator.storage.store import ARMED, UNENDED, StartCause, Store, StoredJob
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
    """Yield the report of each online device with telemetry, and the labels of the device."""
    for device, each in sorted(fleet.items()):
        if each.online and (news := each.telemetry) is not None:
            yield RunnerReport(device, news.drift, news.accuracy), each.profile.labels if each.profile else ()


def select_reports(job: JobSettings, boards: Iterable[tuple[RunnerReport, Collection[str]]]) -> list[RunnerReport]:
    """Return the reports with drift or accuracy from devices that match [cohort] select."""
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
    """Return why a job starts now, or "" if its trigger does not fire.

    Args:
        job: The job with a trigger.
        boards: The reports of its devices.
        now: The time in wall-clock seconds.
        last: The time of the latest start by the trigger, or None before the first.
    """
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
    """Return how many of `count` reporting devices must be beyond a limit, at least one."""
    return max(1, math.ceil(trigger.share * count - 1e-9))


def describe_trigger_wait(job: JobSettings, boards: Sequence[RunnerReport], now: float, last: float | None) -> str:
    """Return what a job with a trigger waits for, to follow "waits for".

    The text names the end of the pause, or the limits and how many devices are beyond them.
    """
    trigger = job.trigger
    assert trigger is not None
    if last is not None and abs(now - last) < trigger.pause_s:
        return f"the end of its pause, in {units.format_duration(trigger.pause_s - abs(now - last))}"
    least = minimum_devices_to_fire(trigger, len(boards))
    found = len(reports_beyond_limit(trigger, boards))
    return f"{_format_limits(trigger)}: {found} of {len(boards)} boards that tell are beyond, at least {least} needed"


def last_start_time(store: Store, run: str) -> float | None:
    """Return the wall-clock seconds of the latest start by an armed run, or None.

    Raises:
        JobError: If the log of the armed run cannot be read.
    """
    return max((at for _, at, fact in store.read_events(run) if isinstance(fact, NoteRecorded)), default=None)


def start_triggered_runs(
    store: Store, rows: Sequence[StoredJob], fleet: Mapping[str, DeviceSnapshot], now: float
) -> list[StoredJob]:
    """Start a run for every trigger that fires. Return the new runs that need no approval.

    Args:
        store: The home.
        rows: The runs of the home.
        fleet: The properties of all devices.
        now: The time in wall-clock seconds.

    Raises:
        StoreError: If the home cannot be written.
    """
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
