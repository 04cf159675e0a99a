"""Rollouts as text, tables and dictionaries."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fedquilt.console import table, units
from fedquilt.coordinator.fleet.device_status import DeviceStatus, TelemetryStore
from fedquilt.coordinator.rounds import rollout
from fedquilt.coordinator.storage.rollout_log import RolloutLog, StoredRollout
from fedquilt.coordinator.storage.rows import is_served
from fedquilt.formats import labels

HEAD: Final = ("rollout", "brings", "status", "step", "boards", "begun")
ORDER: Final = ("committed", "soaking", "checking", "fetching", "waiting", "refused", "returned", "lost", "")
SHOWN: Final = 200  # boards of one rollout
NAMED: Final = 5  # boards that it waits for


def summarise_rollout(kept: StoredRollout) -> dict[str, Any]:
    state, plan = kept.state, kept.state.plan
    counts = state.count_outcomes()
    return {
        "rollout": state.id,
        "kind": plan.kind,
        "name": plan.name,
        "status": state.status,
        "step": state.step,
        "shares": list(plan.cumulative_shares),
        "select": list(plan.select),
        "offered": len(state.offered),
        "counts": {phase or "silent": counts[phase] for phase in ORDER if phase in counts},
        "reason": state.reason,
        "created": kept.created,
        "at": kept.at,
        "submitter": kept.submitter,
        "revert_requested": kept.revert_requested,
    }


def summarise_rollout_and_devices(kept: StoredRollout) -> dict[str, Any]:
    state = kept.state
    boards = [
        {
            "device": device,
            "step": state.offered[device],
            "phase": (standing := state.device_outcome(device)) or "silent",
            "reason": _outcome_reason(standing, heard := state.reports.get(device)),
            "metrics": dict(heard.metrics) if heard is not None else {},
        }
        for device in state.offered
    ]
    boards.sort(key=lambda each: (each["phase"] == "committed", each["step"], each["device"]))
    return {**summarise_rollout(kept), "limits": dict(_list_limits(state.plan)), "boards": boards}


class RolloutContext(NamedTuple):
    home: Path
    served: bool  # by a coordinator, without which nothing goes on
    every: Sequence[rollout.Rollout]  # all rollouts, in the order in which they were queued
    boards: Mapping[str, DeviceStatus]  # as the coordinator knew them last
    now: float  # wall-clock seconds


def load_context(home: Path, log: RolloutLog) -> RolloutContext:
    with TelemetryStore(home) as store:
        boards = {board.device: board for board in store.load_statuses()}
    return RolloutContext(home, is_served(home), [kept.state for kept in log.readable_rollouts()], boards, time.time())


def load_rollout_wait(kept: StoredRollout, log: RolloutLog, around: RolloutContext) -> str:
    """Return `describe_rollout_wait` of a rollout. Events are read only for a rollout under way."""
    if not kept.state.is_under_way:
        return ""
    return describe_rollout_wait(kept.state, log.read_events(kept.state.id), around)


def describe_rollout_wait(
    state: rollout.Rollout, facts: Sequence[tuple[int, float, rollout.AnyRolloutEvent]], around: RolloutContext
) -> str:
    """Return what a rollout waits for, to follow "waits for", or "" if it does not wait."""
    if not state.is_under_way:
        return ""
    if not around.served:
        return f"a coordinator: nobody serves {around.home}, `fedquilt serve --home {around.home}` does"
    told_s: dict[str, float] = {}
    for _, at, fact in facts:
        for device in (
            fact.devices
            if isinstance(fact, rollout.ReleaseOffered)
            else (fact.device,)
            if isinstance(fact, rollout.StatusReported)
            else ()
        ):
            told_s[device] = at
    seen = {}
    for device in {*around.boards, *state.offered}:
        board = around.boards.get(device, DeviceStatus(device))
        since_s = max(told_s.get(device, 0.0), 0.0 if board.online else board.since or 0.0)
        has = board.labels if device in around.boards else None
        seen[device] = rollout.RolloutDevice(board.online, since_s, has, device not in state.incompatible_devices)
    fleet = rollout.select_rollout_devices(state, around.every, seen)
    if state.is_step_open:
        names = rollout.find_blocking_devices(state, fleet, around.now)
        said = [
            f"{name} ({state.device_phase(name) or ('silent' if seen[name].online else 'offline')})" for name in names
        ]
        more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
        return ", ".join(said[:NAMED]) + more
    if not fleet:
        return describe_unmatched_labels(state.plan, around) or "boards: a later rollout has all that it selects"
    if not any(board.online for board in fleet.values()):
        return f"a board to come online: {len(fleet)} are selected, and none is"
    return ""


def describe_unmatched_labels(plan: rollout.RolloutPlan, around: RolloutContext) -> str:
    """Return why no device has the labels of a rollout, to follow "waits for", or "" if a device has them."""
    if any(labels.is_selected(plan.select, board.labels) for board in around.boards.values()):
        return ""
    if not around.boards:
        return f"a board: no coordinator of {around.home} has heard of one"
    chosen = " ".join(plan.select)
    known = f"of the {len(around.boards)} boards that are known, none" if len(around.boards) > 1 else "the only board"
    isnt = "is" if len(around.boards) > 1 else "is not"
    return f"a board: {known} {isnt} selected by {chosen}; `fedquilt devices --home {around.home}` shows their labels"


def _outcome_reason(standing: str, heard: rollout.StatusReported | None) -> str:
    if heard is None:
        return ""
    if standing == "lost":
        return f"it came no further than {heard.phase} and fell silent: it counts as failed"
    return heard.reason


def format_rollouts(known: Sequence[StoredRollout], now: float) -> list[str]:
    rows = [HEAD]
    for kept in reversed(known):
        state = kept.state
        rows.append(
            (
                state.id,
                state.plan.name,
                state.status,
                format_step(state),
                _format_outcomes(state),
                f"{units.format_duration(now - kept.created)} ago",
            )
        )
    return table.format_table(rows, "<<<<<<", 10**6)


def format_rollout(
    kept: StoredRollout, facts: Sequence[tuple[int, float, rollout.AnyRolloutEvent]], around: RolloutContext
) -> list[str]:
    state, plan = kept.state, kept.state.plan
    asked = "; ".join(f"{name} {value}" for name, value in _list_limits(plan)) or "none"
    found = [
        f"{state.id}: {plan.kind} {plan.name}, {state.status}{f': {state.reason}' if state.reason else ''}",
        f"{format_step(state)}; {_format_outcomes(state)}; for {' '.join(plan.select) or 'all boards'}; queued by "
        f"{kept.submitter or '?'} {units.format_duration(around.now - kept.created)} ago",
        f"limits: {asked}; soak {units.format_duration(plan.soak_s)}{f'; window {plan.window}' if plan.window else ''}",
    ]
    if held := describe_rollout_wait(state, facts, around):
        found.append(f"it waits for {held}")
    found.append("")
    for _, at, fact in facts:
        if not isinstance(fact, rollout.StatusReported):
            found.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}  {format_event(state, fact)}")
    boards = [each for each in summarise_rollout_and_devices(kept)["boards"] if each["phase"] != "committed"]
    if boards:
        rows = [("board", "step", "phase", "why")]
        rows += [(each["device"], str(each["step"]), each["phase"], each["reason"]) for each in boards[:SHOWN]]
        found += ["", *table.format_table(rows, "<><~")]
    if len(boards) > SHOWN:
        found.append(f"... and {len(boards) - SHOWN} more: --format json has them all")
    return found


def format_event(state: rollout.Rollout, fact: rollout.AnyRolloutEvent) -> str:
    match fact:
        case rollout.RolloutStarted(incompatible_devices=unable):
            out = f"; left out: {rollout.format_incompatible_devices(unable, SHOWN)}" if unable else ""
            return f"begun: {state.plan.kind} {state.plan.name}{out}"
        case rollout.ReleaseOffered(number, devices):
            return f"{_format_step_name(state.plan, number)}: offered to {_format_device_count(len(devices))}"
        case rollout.StatusReported(device, phase=phase, reason=reason):
            return f"{device} {phase}{f': {reason}' if reason else ''}"
        case rollout.RolloutResumed():
            return "a coordinator goes on with it"
        case rollout.PhasePassed(number, silent):
            without = f", without {_format_device_count(len(silent))} that said nothing" if silent else ""
            return f"{_format_step_name(state.plan, number)} passed{without}"
        case rollout.RolloutCompleted():
            return "done: boards that come later get it too" if state.plan.includes_all_devices else "done"
        case rollout.RolloutReverted(reason=reason):
            what = f"aborted: {reason}; boards that have it" if state.status == "aborted" else "rolled back: boards"
            return f"{what} return to what they ran before"


def format_step(state: rollout.Rollout) -> str:
    number = min(state.step, len(state.plan.phases))
    return _format_step_name(state.plan, number)


def _format_step_name(plan: rollout.RolloutPlan, number: int) -> str:
    share = f"{100 * plan.cumulative_shares[number]:g} %"
    return f"canary {share}" if number == 0 else f"phase {share}"


def _format_device_count(count: int) -> str:
    return f"{count} board{'' if count == 1 else 's'}"


def _format_outcomes(state: rollout.Rollout) -> str:
    counts = state.count_outcomes()
    parts = [f"{counts[phase]} {phase or 'silent'}" for phase in ORDER if phase in counts]
    return ", ".join(parts) or "none yet"


def _list_limits(plan: rollout.RolloutPlan) -> list[tuple[str, str]]:
    limits, found = plan.limits, []
    if limits.min_gain is not None:
        found.append(("least gain", f"{100 * limits.min_gain:+g} points"))
    if limits.max_latency_s is not None:
        found.append(("latency", f"{1000 * limits.max_latency_s:g} ms"))
    if limits.max_energy_j is not None:
        found.append(("energy", f"{limits.max_energy_j:g} J"))
    if limits.max_peak_bytes is not None:
        found.append(("peak memory", units.format_bytes(limits.max_peak_bytes)))
    return found
