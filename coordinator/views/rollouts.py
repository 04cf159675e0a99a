"""Rollouts for people: one line each, one in detail, and what happens as sentences."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedquilt import columns, labels, units
from fedquilt.coordinator.boards import Board
from fedquilt.coordinator.boards_store import BoardStore
from fedquilt.coordinator.rollout_log import Kept, RolloutLog
from fedquilt.coordinator.rollouts import (
    Aborted,
    AnyFact,
    Begun,
    Done,
    Heard,
    Offered,
    Passed,
    Plan,
    Restarted,
    RolledBack,
    Rollout,
    Seen,
    concerned,
    format_left_out,
)
from fedquilt.coordinator.rollouts import waits as hold_up
from fedquilt.coordinator.store_rows import served

HEAD: Final = ("rollout", "brings", "status", "step", "boards", "begun")
ORDER: Final = ("committed", "soaking", "checking", "fetching", "waiting", "refused", "returned", "lost", "")
SHOWN: Final = 200  # boards of one rollout
NAMED: Final = 5  # boards that it waits for


def row(kept: Kept) -> dict[str, Any]:
    """A rollout in short, for programs; times in wall-clock seconds."""
    state, plan = kept.state, kept.state.plan
    counts = state.counts()
    return {
        "rollout": state.id,
        "kind": plan.kind,
        "name": plan.name,
        "status": state.status,
        "step": state.step,
        "shares": list(plan.shares),
        "select": list(plan.select),
        "offered": len(state.offered),
        "counts": {phase or "silent": counts[phase] for phase in ORDER if phase in counts},
        "reason": state.reason,
        "created": kept.created,
        "at": kept.at,
        "submitter": kept.submitter,
        "wish": kept.wish,
    }


def detail(kept: Kept) -> dict[str, Any]:
    """A rollout with its boards, those first that did not commit it."""
    state = kept.state
    boards = [
        {
            "device": device,
            "step": state.offered[device],
            "phase": (standing := state.standing(device)) or "silent",
            "reason": _said(standing, heard := state.heard.get(device)),
            "metrics": dict(heard.metrics) if heard is not None else {},
        }
        for device in state.offered
    ]
    boards.sort(key=lambda each: (each["phase"] == "committed", each["step"], each["device"]))
    return {**row(kept), "limits": dict(_limits(state.plan)), "boards": boards}


class Sight(NamedTuple):
    """Surroundings of a home's rollouts."""

    home: Path
    served: bool  # by a coordinator, without which nothing goes on
    every: Sequence[Rollout]  # all rollouts, in the order in which they were queued
    boards: Mapping[str, Board]  # as the coordinator knew them last
    now: float  # wall-clock seconds


def sight(home: Path, log: RolloutLog) -> Sight:
    """Surroundings of a home's rollouts at this moment.

    Raises:
        StoreError: the home, or what is kept of boards, cannot be read.
    """
    with BoardStore(home) as store:
        boards = {board.device: board for board in store.boards()}
    return Sight(home, served(home), [kept.state for kept in log.all()], boards, time.time())


def held(kept: Kept, log: RolloutLog, around: Sight) -> str:
    """`waits` of a rollout, whose facts are read only if it may wait.

    Raises:
        StoreError: they cannot be read.
    """
    if not kept.state.under_way:
        return ""
    return waits(kept.state, log.facts(kept.state.id), around)


def waits(state: Rollout, facts: Sequence[tuple[int, float, AnyFact]], around: Sight) -> str:
    """Boards or events that a rollout waits for, as a sentence's end; "": for nothing.

    Args:
        state: of the rollout.
        facts: its facts, with their wall-clock times.
        around: what is known beside it.
    """
    if not state.under_way:
        return ""
    if not around.served:
        return f"a coordinator: nobody serves {around.home}, `fedquilt serve --home {around.home}` does"
    told_s: dict[str, float] = {}
    for _, at, fact in facts:
        for device in fact.devices if isinstance(fact, Offered) else (fact.device,) if isinstance(fact, Heard) else ():
            told_s[device] = at
    seen = {}
    for device in {*around.boards, *state.offered}:
        board = around.boards.get(device, Board(device))
        since_s = max(told_s.get(device, 0.0), 0.0 if board.online else board.since or 0.0)
        has = board.labels if device in around.boards else None
        seen[device] = Seen(board.online, since_s, has, device not in state.without)
    fleet = concerned(state, around.every, seen)
    if state.open:
        names = hold_up(state, fleet, around.now)
        said = [f"{name} ({state.phase(name) or ('silent' if seen[name].online else 'offline')})" for name in names]
        more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
        return ", ".join(said[:NAMED]) + more
    if not fleet:
        return unchosen(state.plan, around) or "boards: a later rollout has all that it selects"
    if not any(board.online for board in fleet.values()):
        return f"a board to come online: {len(fleet)} are selected, and none is"
    return ""


def unchosen(plan: Plan, around: Sight) -> str:
    """Sentence's end for a plan whose selection names no known board; "": it names some."""
    if any(labels.selects(plan.select, board.labels) for board in around.boards.values()):
        return ""
    if not around.boards:
        return f"a board: no coordinator of {around.home} has heard of one"
    chosen = " ".join(plan.select)
    known = f"of the {len(around.boards)} boards that are known, none" if len(around.boards) > 1 else "the only board"
    isnt = "is" if len(around.boards) > 1 else "is not"
    return f"a board: {known} {isnt} selected by {chosen}; `fedquilt devices --home {around.home}` shows their labels"


def _said(standing: str, heard: Heard | None) -> str:
    """Reason for a board's standing: its own words, or that it fell silent; "": none."""
    if heard is None:
        return ""
    if standing == "lost":
        return f"it came no further than {heard.phase} and fell silent: it counts as failed"
    return heard.reason


def lines(known: Sequence[Kept], now: float) -> list[str]:
    """Rollouts as a table, the latest first."""
    rows = [HEAD]
    for kept in reversed(known):
        state = kept.state
        rows.append(
            (
                state.id,
                state.plan.name,
                state.status,
                step(state),
                _counted(state),
                f"{units.duration(now - kept.created)} ago",
            )
        )
    return columns.table(rows, "<<<<<<", 10**6)


def told(kept: Kept, facts: Sequence[tuple[int, float, AnyFact]], around: Sight) -> list[str]:
    """One rollout: what it is, for whom it waits, how it went, and every board that did not commit it."""
    state, plan = kept.state, kept.state.plan
    asked = "; ".join(f"{name} {value}" for name, value in _limits(plan)) or "none"
    found = [
        f"{state.id}: {plan.kind} {plan.name}, {state.status}{f': {state.reason}' if state.reason else ''}",
        f"{step(state)}; {_counted(state)}; for {' '.join(plan.select) or 'all boards'}; queued by "
        f"{kept.submitter or '?'} {units.duration(around.now - kept.created)} ago",
        f"limits: {asked}; soak {units.duration(plan.soak_s)}{f'; window {plan.window}' if plan.window else ''}",
    ]
    if held := waits(state, facts, around):
        found.append(f"it waits for {held}")
    found.append("")
    for _, at, fact in facts:
        if not isinstance(fact, Heard):
            found.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}  {sentence(state, fact)}")
    boards = [each for each in detail(kept)["boards"] if each["phase"] != "committed"]
    if boards:
        rows = [("board", "step", "phase", "why")]
        rows += [(each["device"], str(each["step"]), each["phase"], each["reason"]) for each in boards[:SHOWN]]
        found += ["", *columns.table(rows, "<><~")]
    if len(boards) > SHOWN:
        found.append(f"... and {len(boards) - SHOWN} more: --format json has them all")
    return found


def sentence(state: Rollout, fact: AnyFact) -> str:
    """A fact of a rollout as a sentence; `state` is the rollout at that moment or later."""
    match fact:
        case Begun(without=unable):
            out = f"; left out: {format_left_out(unable, SHOWN)}" if unable else ""
            return f"begun: {state.plan.kind} {state.plan.name}{out}"
        case Offered(number, devices):
            return f"{_name(state.plan, number)}: offered to {_boards(len(devices))}"
        case Heard(device, phase=phase, reason=reason):
            return f"{device} {phase}{f': {reason}' if reason else ''}"
        case Restarted():
            return "a coordinator goes on with it"
        case Passed(number, silent):
            without = f", without {_boards(len(silent))} that said nothing" if silent else ""
            return f"{_name(state.plan, number)} passed{without}"
        case Done():
            return "done: boards that come later get it too" if state.plan.to_all else "done"
        case Aborted(reason):
            return f"aborted: {reason}; boards that have it return to what they ran before"
        case RolledBack():
            return "rolled back: boards return to what they ran before"


def step(state: Rollout) -> str:
    """Which step runs, or ended last."""
    number = min(state.step, len(state.plan.phases))
    return _name(state.plan, number)


def _name(plan: Plan, number: int) -> str:
    share = f"{100 * plan.shares[number]:g} %"
    return f"canary {share}" if number == 0 else f"phase {share}"


def _boards(count: int) -> str:
    return f"{count} board{'' if count == 1 else 's'}"


def _counted(state: Rollout) -> str:
    counts = state.counts()
    parts = [f"{counts[phase]} {phase or 'silent'}" for phase in ORDER if phase in counts]
    return ", ".join(parts) or "none yet"


def _limits(plan: Plan) -> list[tuple[str, str]]:
    limits, found = plan.limits, []
    if limits.min_gain is not None:
        found.append(("least gain", f"{100 * limits.min_gain:+g} points"))
    if limits.max_latency_s is not None:
        found.append(("latency", f"{1000 * limits.max_latency_s:g} ms"))
    if limits.max_energy_j is not None:
        found.append(("energy", f"{limits.max_energy_j:g} J"))
    if limits.max_peak_bytes is not None:
        found.append(("peak memory", units.size(limits.max_peak_bytes)))
    return found
