"""What a run waits for, in sentences: boards, its broker, the disk, its owner or its trigger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from fedquilt import methods
from fedquilt.coordinator import eligibility, rounds, triggers
from fedquilt.coordinator.boards import Board, Reading
from fedquilt.coordinator.facts import AnyFact, Rounds, apply
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.store import ARMED, UNAPPROVED, Row, Store
from fedquilt.coordinator.views import devices
from fedquilt.core import JobError


def elsewhere(store: Store, run: str) -> dict[str, str]:
    """Devices that other running jobs of a store have asked and not heard, by their logs, with the run of each."""
    found = dict[str, str]()
    for row in store.jobs():
        if row.id != run and row.status == "running":
            with contextlib.suppress(JobError):  # a damaged log says nothing
                found |= dict.fromkeys(replayed(row, [fact for _, _, fact in store.facts(row.id)]).asked, row.id)
    return found


def replayed(row: Row, facts: Iterable[AnyFact]) -> Rounds:
    """State of a run after these facts."""
    state = Rounds(Plan.of(row.job))
    for fact in facts:
        state = apply(state, fact, 0.0)
    return state


def of(row: Row, store: Store) -> str | None:
    """Sentence on what a running, held, armed or unapproved job waits for; None: it does not wait, or does not run."""
    if row.status == UNAPPROVED:
        return f"its owner: `fedquilt approve {row.id} --home {store.home}`"
    if row.status == ARMED:
        known = ((triggers.Told(b.device, r.drift, r.accuracy), b.labels) for b, r in _online(store))
        return triggers.waits(row.job, triggers.told(row.job, known), time.time(), triggers.last_start(store, row.id))
    standing = store.standing(row)
    if standing == "held" and (hold := store.holds.of(row.id)) is not None:
        return str(hold)
    if standing != "running":
        return None
    if row.origin == "run" and (away := devices.away(store.home, time.time())):
        return f"{away}: what is known of boards is as of then"
    state = replayed(row, [fact for _, _, fact in store.facts(row.id)])
    if state.phase not in ("selecting", "open") or state.asked:
        return None
    engines = (row.job.engine,) if row.job.engine else methods.load(row.job.method).engines
    able = {*state.eligible, *(name for name, code in state.passed.items() if code in eligibility.ABLE)}
    return waiting(state, engines, able, elsewhere(store, row.id).keys())


def _online(store: Store) -> Iterator[tuple[Board, Reading]]:
    """Boards that are online as their coordinator last knew them, with their latest readings."""
    for each in devices.look(store.home):
        if each.board.online:
            yield each.board, each.reading


def waiting(
    state: Rounds, engines: Sequence[str], able: Collection[str], busy: AbstractSet[str] = frozenset()
) -> str | None:
    """Sentence on what the running round waits for; None: a device is at work, or nothing runs.

    Args:
        state: of the run.
        engines: names of those that can run the job.
        able: devices that are online and have one of the engines.
        busy: devices that other jobs have.
    """
    if not rounds.idle(state, able, busy):
        return None
    if state.asked:
        absent = {"offline": state.asked - busy, "at other jobs' tasks": state.asked & busy}
        return "; ".join(f"{names(sorted(devices))}: {where}" for where, devices in absent.items() if devices)
    barred = [code for device, code in state.passed.items() if device in able and code != eligibility.BUSY]
    alone = "".join(f", {barred.count(code)} not eligible ({code})" for code in sorted(set(barred)))
    declined = f", {len(state.declined)} of them declined" if state.declined else ""
    taken = f", {count} of them at other jobs' tasks" if (count := len(busy & set(able))) else ""
    there = f"devices that run {' or '.join(engines)}: {len(able)} online{taken}{alone}{declined}"
    if state.phase == "selecting":
        return f"{there}, at least {rounds.needed(state)} needed"
    want = rounds.wanted(state, set(able) - state.passed.keys())
    least = rounds.quorum(state, want)
    return f"{there}, {len(state.answered)} of {want} updates received, a quorum is {least}"


def taken(state: Rounds, able: Collection[str], busy: Mapping[str, str]) -> str | None:
    """What the boards are busy with that the running round waits for; None: it waits for other boards than these.

    Args:
        state: of a run that waits.
        able: as of `waiting`.
        busy: devices that other jobs have, with the run of each.
    """
    if state.asked:
        found, lacking = state.asked & busy.keys(), len(state.asked - busy.keys())
    else:
        passed = {device for device, code in state.passed.items() if code != eligibility.BUSY}
        fit = frozenset(able) - passed - state.declined.keys() - state.answered.keys()
        least = rounds.needed(state)
        if state.phase == "open":
            least = rounds.quorum(state, rounds.wanted(state, set(able) - passed)) - len(state.answered)
        found, lacking = fit & busy.keys(), least - len(fit)
    if not found or lacking > 0:
        return None
    runs = sorted({busy[device] for device in found})
    of = {run: sorted(device for device in found if busy[device] == run) for run in runs}
    told = "; ".join(f"{names(devices)} at a task of {run}" for run, devices in of.items())
    return f"it goes on when they are free: {told}"


def names(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
