"""Jobs that boards' drift starts: the decision is pure, of what runners tell and of the clock.

A job with a [trigger] is queued as a run that is armed. Whenever its trigger fires, it starts another run of the same
job without a trigger; the logs of both have the reason. One at a time, and no more often than `pause` allows: when the
last one was is in the log of the armed run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from fedquilt import labels, units
from fedquilt.coordinator.eligibility import Seen
from fedquilt.coordinator.facts import Noted
from fedquilt.coordinator.settings import Job, Trigger
from fedquilt.coordinator.store import ARMED, UNENDED, Cause, Row, Store
from fedquilt.core import JobError
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

NAMED: Final = 5  # boards that a reason names


class Told(NamedTuple):
    """What the runner of one board tells."""

    device: str
    drift: float | None
    accuracy: float | None


def seen(fleet: Mapping[str, Seen]) -> Iterator[tuple[Told, tuple[str, ...]]]:
    """What boards that are online tell, with their labels."""
    for device, each in sorted(fleet.items()):
        if each.online and (news := each.telemetry) is not None:
            yield Told(device, news.drift, news.accuracy), each.profile.labels if each.profile else ()


def told(job: Job, boards: Iterable[tuple[Told, Collection[str]]]) -> list[Told]:
    """Boards that [cohort] select names and that tell of drift or accuracy.

    Args:
        job: with a trigger.
        boards: what each tells, with its labels.
    """
    found = [each for each, has in boards if labels.selects(job.cohort.select, has)]
    return [each for each in found if each.drift is not None or each.accuracy is not None]


def beyond(trigger: Trigger, boards: Iterable[Told]) -> list[Told]:
    """Boards that are beyond a limit of the trigger, the worst first."""
    least = trigger.accuracy_below
    found = [
        each
        for each in boards
        if (each.drift is not None and each.drift > trigger.drift_above)
        or (least is not None and each.accuracy is not None and each.accuracy < least)
    ]
    return sorted(found, key=lambda each: (-(each.drift or 0.0), each.device))


def fired(job: Job, boards: Sequence[Told], now: float, last: float | None = None) -> str:
    """Why a job is to be started now, in a sentence; "": it is not.

    Args:
        job: with a trigger.
        boards: what they tell.
        now: wall-clock seconds.
        last: when the trigger started a run last; None: never.
    """
    trigger = job.trigger
    if trigger is None or (last is not None and abs(now - last) < trigger.pause_s):
        return ""
    found = beyond(trigger, boards)
    if len(found) < needed(trigger, len(boards)):
        return ""
    some = ", ".join(_named(each) for each in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"[trigger]: {len(found)} of {len(boards)} boards that tell are beyond {_limits(trigger)}: {some}{more}"


def needed(trigger: Trigger, count: int) -> int:
    """Boards that have to be beyond a limit, of so many that tell; at least one."""
    return max(1, math.ceil(trigger.share * count - 1e-9))


def waits(job: Job, boards: Sequence[Told], now: float, last: float | None) -> str:
    """What an armed run waits for, in words."""
    trigger = job.trigger
    assert trigger is not None
    if last is not None and abs(now - last) < trigger.pause_s:
        return f"the end of its pause, in {units.duration(trigger.pause_s - abs(now - last))}"
    least = needed(trigger, len(boards))
    found = len(beyond(trigger, boards))
    return f"{_limits(trigger)}: {found} of {len(boards)} boards that tell are beyond, at least {least} needed"


def last_start(store: Store, run: str) -> float | None:
    """Wall-clock seconds at which an armed run last started another; None: never.

    Raises:
        JobError: its log cannot be read.
    """
    return max((at for _, at, fact in store.facts(run) if isinstance(fact, Noted)), default=None)


def start(store: Store, rows: Sequence[Row], fleet: Mapping[str, Seen], now: float) -> list[Row]:
    """Start runs of armed jobs whose triggers fire; returns those that need no approval.

    Args:
        store: of the home.
        rows: its runs.
        fleet: views of all devices.
        now: wall-clock seconds.

    Raises:
        StoreError: the home cannot be written.
    """
    found = []
    for row in rows:
        if row.status != ARMED or row.job.trigger is None:
            continue
        bare = replace(row.job, trigger=None)
        if any((each.job, each.bundle) == (bare, row.bundle) and each.status in UNENDED for each in rows):
            continue
        try:
            why = fired(row.job, told(row.job, seen(fleet)), now, last_start(store, row.id))
        except JobError:  # its log is damaged, as `ls` says: when it started a run last is not known
            continue
        if why:
            id = store.add(bare, row.bundle, by=Cause(row, why, row.job.trigger.approve))
            log.warning("%s is started by %s", id, why, extra=about(run=id))
            found.append(store.job(id))
    return found


def _named(board: Told) -> str:
    parts = [f"drift {board.drift:.2f}"] if board.drift is not None else []
    parts += [f"accuracy {board.accuracy:.2f}"] if board.accuracy is not None else []
    return f"{board.device} ({', '.join(parts)})"


def _limits(trigger: Trigger) -> str:
    least = trigger.accuracy_below
    return f"drift {trigger.drift_above:g}" + (f" or accuracy {least:g}" if least is not None else "")
