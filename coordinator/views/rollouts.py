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
MAX_LISTED_DEVICES: Final = 200
MAX_NAMED_DEVICES: Final = 5  # devices named in a wait reason


def summarise_rollout(stored: StoredRollout) -> dict[str, Any]:
    state, plan = stored.state, stored.state.plan
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
        "created": stored.created,
        "at": stored.last_event_time,
        "submitter": stored.submitter,
        "revert_requested": stored.revert_requested,
    }


def summarise_rollout_and_devices(stored: StoredRollout) -> dict[str, Any]:
    state = stored.state
    devices = [
        {
            "device": device,
            "step": state.offered[device],
            "phase": (outcome := state.device_outcome(device)) or "silent",
            "reason": _outcome_reason(outcome, report := state.reports.get(device)),
            "metrics": dict(report.metrics) if report is not None else {},
        }
        for device in state.offered
    ]
    devices.sort(key=lambda device_row: (device_row["phase"] == "committed", device_row["step"], device_row["device"]))
    return {**summarise_rollout(stored), "limits": dict(_list_limits(state.plan)), "boards": devices}


class RolloutContext(NamedTuple):
    home: Path
    is_served: bool  # whether a coordinator runs
    rollouts: Sequence[rollout.Rollout]  # all rollouts, in queueing order
    statuses: Mapping[str, DeviceStatus]  # latest stored statuses
    now: float  # wall-clock seconds


def load_context(home: Path, log: RolloutLog) -> RolloutContext:
    with TelemetryStore(home) as store:
        statuses = {board.device: board for board in store.load_statuses()}
    return RolloutContext(
        home, is_served(home), [stored.state for stored in log.readable_rollouts()], statuses, time.time()
    )


def load_rollout_wait(stored: StoredRollout, log: RolloutLog, context: RolloutContext) -> str:
    """Return `describe_rollout_wait` of a rollout. Events are read only for a rollout under way."""
    if not stored.state.is_under_way:
        return ""
    return describe_rollout_wait(stored.state, log.read_events(stored.state.id), context)


def describe_rollout_wait(
    state: rollout.Rollout, events: Sequence[tuple[int, float, rollout.AnyRolloutEvent]], context: RolloutContext
) -> str:
    """Return what a rollout waits for, as text to follow "waits for", or "" if it does not wait."""
    if not state.is_under_way:
        return ""
    if not context.is_served:
        return f"a coordinator: start one with `fedquilt serve --home {context.home}`"
    report_times: dict[str, float] = {}
    for _, time_s, event in events:
        if isinstance(event, rollout.ReleaseOffered):
            report_times.update(dict.fromkeys(event.devices, time_s))
        elif isinstance(event, rollout.StatusReported):
            report_times[event.device] = time_s
    rollout_devices = {}
    for device in {*context.statuses, *state.offered}:
        status = context.statuses.get(device, DeviceStatus(device))
        last_contact_s = max(report_times.get(device, 0.0), 0.0 if status.online else status.since or 0.0)
        device_labels = status.labels if device in context.statuses else None
        rollout_devices[device] = rollout.RolloutDevice(
            status.online, last_contact_s, device_labels, device not in state.incompatible_devices
        )
    fleet = rollout.select_rollout_devices(state, context.rollouts, rollout_devices)
    if state.is_step_open:
        names = rollout.find_blocking_devices(state, fleet, context.now)
        blocking = [
            f"{name} ({state.device_phase(name) or ('silent' if rollout_devices[name].online else 'offline')})"
            for name in names
        ]
        more = f" and {len(blocking) - MAX_NAMED_DEVICES} more" if len(blocking) > MAX_NAMED_DEVICES else ""
        return ", ".join(blocking[:MAX_NAMED_DEVICES]) + more
    if not fleet:
        return describe_unmatched_labels(state.plan, context) or "devices: a later rollout includes all that it selects"
    if not any(status.online for status in fleet.values()):
        return f"a device to come online: {len(fleet)} are selected, all offline"
    return ""


def describe_unmatched_labels(plan: rollout.RolloutPlan, context: RolloutContext) -> str:
    """Return text to follow "waits for" if no device has the labels of the rollout, or else ""."""
    if any(labels.is_selected(plan.select, status.labels) for status in context.statuses.values()):
        return ""
    if not context.statuses:
        return f"a device: none has connected to a coordinator of {context.home} yet"
    selection = " ".join(plan.select)
    return (
        f"a device with labels {selection}: {_format_device_count(len(context.statuses))} known, none with these; "
        f"`fedquilt devices --home {context.home}` shows their labels"
    )


def _outcome_reason(outcome: str, report: rollout.StatusReported | None) -> str:
    if report is None:
        return ""
    if outcome == "lost":
        return f"silent since phase {report.phase}: counts as failed"
    return report.reason


def format_rollouts(rollouts: Sequence[StoredRollout], now: float) -> list[str]:
    rows = [HEAD]
    for stored in reversed(rollouts):
        state = stored.state
        rows.append(
            (
                state.id,
                state.plan.name,
                state.status,
                format_step(state),
                _format_outcomes(state),
                f"{units.format_duration(now - stored.created)} ago",
            )
        )
    return table.format_table(rows, "<<<<<<", 10**6)


def format_rollout(
    stored: StoredRollout, events: Sequence[tuple[int, float, rollout.AnyRolloutEvent]], context: RolloutContext
) -> list[str]:
    state, plan = stored.state, stored.state.plan
    limits_text = "; ".join(f"{name} {value}" for name, value in _list_limits(plan)) or "none"
    lines = [
        f"{state.id}: {plan.kind} {plan.name}, {state.status}{f': {state.reason}' if state.reason else ''}",
        f"{format_step(state)}; {_format_outcomes(state)}; for {' '.join(plan.select) or 'all boards'}; queued by "
        f"{stored.submitter or '?'} {units.format_duration(context.now - stored.created)} ago",
        (
            f"limits: {limits_text}; soak "
            f"{units.format_duration(plan.soak_s)}{f'; window {plan.window}' if plan.window else ''}"
        ),
    ]
    if wait := describe_rollout_wait(state, events, context):
        lines.append(f"it waits for {wait}")
    lines.append("")
    for _, time_s, event in events:
        if not isinstance(event, rollout.StatusReported):
            lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time_s))}  {format_event(state, event)}")
    unfinished = [
        device_row
        for device_row in summarise_rollout_and_devices(stored)["boards"]
        if device_row["phase"] != "committed"
    ]
    if unfinished:
        rows = [("board", "step", "phase", "why")]
        rows += [
            (device_row["device"], str(device_row["step"]), device_row["phase"], device_row["reason"])
            for device_row in unfinished[:MAX_LISTED_DEVICES]
        ]
        lines += ["", *table.format_table(rows, "<><~")]
    if len(unfinished) > MAX_LISTED_DEVICES:
        lines.append(f"... and {len(unfinished) - MAX_LISTED_DEVICES} more: --format json has them all")
    return lines


def format_event(state: rollout.Rollout, event: rollout.AnyRolloutEvent) -> str:
    match event:
        case rollout.RolloutStarted(incompatible_devices=incompatible_devices):
            left_out_text = (
                f"; left out: {rollout.format_incompatible_devices(incompatible_devices, MAX_LISTED_DEVICES)}"
                if incompatible_devices
                else ""
            )
            return f"started: {state.plan.kind} {state.plan.name}{left_out_text}"
        case rollout.ReleaseOffered(number, devices):
            return f"{_format_step_name(state.plan, number)}: offered to {_format_device_count(len(devices))}"
        case rollout.StatusReported(device, phase=phase, reason=reason):
            return f"{device} {phase}{f': {reason}' if reason else ''}"
        case rollout.RolloutResumed():
            return "continued after a restart of the coordinator"
        case rollout.PhasePassed(number, silent):
            silent_text = f", without {_format_device_count(len(silent))} that did not report" if silent else ""
            return f"{_format_step_name(state.plan, number)} passed{silent_text}"
        case rollout.RolloutCompleted():
            return (
                "done: devices that connect later receive the release too"
                if state.plan.includes_all_devices
                else "done"
            )
        case rollout.RolloutReverted(reason=reason):
            action = f"aborted: {reason}; devices" if state.status == "aborted" else "rolled back: devices"
            return f"{action} return to their previous release"


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
    limits, descriptions = plan.limits, []
    if limits.min_gain is not None:
        descriptions.append(("least gain", f"{100 * limits.min_gain:+g} points"))
    if limits.max_latency_s is not None:
        descriptions.append(("latency", f"{1000 * limits.max_latency_s:g} ms"))
    if limits.max_energy_j is not None:
        descriptions.append(("energy", f"{limits.max_energy_j:g} J"))
    if limits.max_peak_bytes is not None:
        descriptions.append(("peak memory", units.format_bytes(limits.max_peak_bytes)))
    return descriptions
