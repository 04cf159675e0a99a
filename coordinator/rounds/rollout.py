"""Rollouts of releases: events, state and pure decisions.

A rollout offers its release to a few devices first, the canary, and to the next share of the fleet once the devices
before have committed. The event log is the whole state, so that a rollout continues after a crash. The release of a
device follows from the state alone (`release_for_device`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fedquilt import wire
from fedquilt.coordinator.rounds.decisions import capped_elapsed_s
from fedquilt.core import Count, JobError, Name, Profile, Seconds, Sentence, ShortText, seed_deriver, shorten_error
from fedquilt.core.messages import UPGRADES
from fedquilt.formats import labels

_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class RolloutPlan(wire.ReleaseContent, frozen=True, omit_defaults=True):
    select: tuple[str, ...] = ()  # label conditions, as in [cohort] select
    canary: Share = 0.05  # share of the online devices
    phases: tuple[Share, ...] = (0.25, 1.0)  # cumulative; 1.0 includes devices that appear later
    abort_above: Share = 0.1  # share of failed devices above which the rollout is aborted
    patience_s: Seconds = 600.0  # time for which a silent device delays the next phase

    @property
    def cumulative_shares(self) -> tuple[float, ...]:
        return (self.canary, *self.phases)

    @property
    def includes_all_devices(self) -> bool:
        return self.phases[-1] >= 1.0

    def require_valid(self) -> None:
        labels.require_valid_selection(self.select)
        if not self.canary:
            raise JobError("the canary is 0 % of the devices: set a larger first share, as in --phases 5% 100%")
        if not self.phases:
            raise JobError(
                f"--phases has one share, {100 * self.canary:g} %: the first is the canary, so add a later one, as in "
                "--phases 5% 100%"
            )
        if any(
            next_share <= previous_share
            for previous_share, next_share in zip(self.cumulative_shares, self.cumulative_shares[1:], strict=False)
        ):
            shares = ", ".join(f"{100 * share:g} %" for share in self.cumulative_shares)
            raise JobError(
                f"phases {shares} do not grow: each phase needs a larger share of the fleet than the previous one"
            )
        if self.window and not _WINDOW.fullmatch(self.window):
            raise JobError(f"window {self.window[:40]!r} is invalid: write 02:00-05:00, in the devices' local time")
        if self.window and self.window[:5] == self.window[6:]:
            raise JobError(f"window {self.window} is empty: set different times")


Status: TypeAlias = Literal["queued", "running", "done", "aborted", "rolled back"]
SETTLED: Final = frozenset({"committed", "refused", "returned"})
FAILED: Final = frozenset({"refused", "returned"})
# phases in which the device runs the release, so that the release may be why the device falls silent
SWAPPED: Final = frozenset({"checking", "soaking"})
# metrics stored from reports
REPORTED_METRICS: Final = frozenset({"accuracy", "accuracy_before", "latency_s", "energy_j", "peak_bytes"})
NO_LAUNCHER: Final = (
    "its agent was not started by the launcher: let its service start "
    "`python -m fedquilt.edge_agent.upgrade.launcher FOLDER agent agent.toml`"
)
NO_RUNTIME: Final = "ONNX Runtime, which checks models, is missing: install the extra `onnx` on the device"
MAX_REPORTING_S: Final = 86400.0  # longest time for which a connected device delays a step


class RolloutEvent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True): ...


class RolloutStarted(RolloutEvent, frozen=True):
    serial: Count
    incompatible_devices: dict[Name, Sentence] = {}  # selected device that cannot run the release -> reason


class ReleaseOffered(RolloutEvent, frozen=True):
    """Offer of the release to the devices of a step. Step 0 is the canary."""

    step: int
    devices: tuple[Name, ...]


class StatusReported(RolloutEvent, frozen=True):
    device: Name
    serial: Count
    phase: wire.ReleasePhase
    reason: Sentence = ""
    metrics: dict[ShortText, float] = {}


class RolloutResumed(RolloutEvent, frozen=True):
    """Restart of the coordinator during a step, with the time limits used up so far."""

    silent_s: float  # elapsed part of the wait for devices that are offline or silent
    present_s: float  # elapsed part of the wait for connected devices


class PhasePassed(RolloutEvent, frozen=True):
    """Success of a step. The `silent` devices have not reported an outcome."""

    step: int
    silent: tuple[Name, ...] = ()


class RolloutCompleted(RolloutEvent, frozen=True):
    """Success of all steps. If the last phase is 100 %, devices that connect later get the release too."""


class RolloutReverted(RolloutEvent, frozen=True):
    """Abort of a running rollout, or rollback of a completed one, by releases numbered `serial`."""

    serial: Count
    reason: Sentence = ""


AnyRolloutEvent: TypeAlias = (
    RolloutStarted | ReleaseOffered | StatusReported | RolloutResumed | PhasePassed | RolloutCompleted | RolloutReverted
)
ALLOWED: Final[Mapping[type[RolloutEvent], tuple[Status, ...]]] = {
    RolloutStarted: ("queued",),
    ReleaseOffered: ("running", "done"),
    StatusReported: ("running", "done", "aborted", "rolled back"),
    RolloutResumed: ("running",),
    PhasePassed: ("running",),
    RolloutCompleted: ("running",),
    RolloutReverted: ("queued", "running", "done"),
}
"""Event class -> statuses of a rollout in which the event may happen."""


class Rollout(msgspec.Struct, frozen=True):
    id: str
    plan: RolloutPlan
    status: Status = "queued"
    serial: int = 0  # serial number of the release
    revert_serial: int = 0  # serial number of the rollback, or 0 before one
    step: int = 0  # running or next step, where 0 is the canary
    offered: Mapping[str, int] = {}  # device -> step of the offer
    reports: Mapping[str, StatusReported] = {}  # device -> latest report
    reason: str = ""  # reason of an abort
    # device that was left out at the start, because it cannot run the release -> reason
    incompatible_devices: Mapping[str, str] = {}
    silent_devices: frozenset[str] = frozenset()  # devices without a report since a step passed without them
    silent_s: float = 0.0  # from the latest `RolloutResumed` of the running step
    present_s: float = 0.0
    restarts: int = 0  # restarts of the coordinator during the step

    @property
    def is_under_way(self) -> bool:
        return self.status in ("queued", "running")

    @property
    def is_step_open(self) -> bool:
        return self.status == "running" and self.step in self.offered.values()

    @property
    def is_reverted(self) -> bool:
        return self.revert_serial > 0

    @property
    def latest_serial(self) -> int:
        """Serial number of the rollback or, before one, of the release."""
        return self.revert_serial or self.serial

    def device_phase(self, device: str) -> str:
        """Return a device's phase in the latest release of the rollout, or "" before its first report."""
        report = self.reports.get(device)
        if report is None:
            return ""
        has_failed = self.is_reverted and report.phase in FAILED
        return report.phase if has_failed or report.serial == self.latest_serial else ""

    def device_outcome(self, device: str) -> str:
        """Return the phase of a device, or "lost" if the device fell silent while checking or soaking."""
        phase = self.device_phase(device)
        return "lost" if phase in SWAPPED and device in self.silent_devices else phase

    def count_outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for device in self.offered:
            outcome = self.device_outcome(device)
            counts[outcome] = counts.get(outcome, 0) + 1
        return counts


def apply_rollout_event(state: Rollout, event: AnyRolloutEvent) -> Rollout:
    """Return the rollout after an event. Raise JobError if the event is not allowed in this status."""
    if state.status not in ALLOWED[type(event)]:
        raise JobError(
            f"event log of {state.id}: {type(event).__name__} is not allowed while the rollout is {state.status}"
        )
    match event:
        case RolloutStarted(serial, incompatible_devices):
            return replace(state, status="running", serial=serial, incompatible_devices=incompatible_devices)
        case ReleaseOffered(step, devices):
            offered = {**state.offered, **dict.fromkeys(devices, step)}
            step = max(state.step, step)
            return replace(state, step=step, offered=offered, silent_s=0.0, present_s=0.0, restarts=0)
        case StatusReported(device):
            return replace(
                state, reports={**state.reports, device: event}, silent_devices=state.silent_devices - {device}
            )
        case RolloutResumed(silent_s, present_s):
            return replace(state, silent_s=silent_s, present_s=present_s, restarts=state.restarts + 1)
        case PhasePassed(step, silent):
            return replace(state, step=step + 1, silent_devices=state.silent_devices.union(silent))
        case RolloutCompleted():
            return replace(state, status="done", step=len(state.plan.cumulative_shares))
        case RolloutReverted(serial, reason):
            status: Status = "rolled back" if state.status == "done" else "aborted"
            return replace(state, status=status, reason=reason, revert_serial=serial)


def event_from_report(state: Rollout, device: str, message: wire.ReleaseStatus) -> StatusReported | None:
    """Return the event for a device's report, or None if the report is unrelated or repeated."""
    if device not in state.offered or message.kind != state.plan.kind:
        return None
    latest_serial = state.latest_serial
    metrics = {
        name: value for name, value in message.metrics.items() if name in REPORTED_METRICS and math.isfinite(value)
    }
    event = StatusReported(device, message.serial, message.phase, message.reason, metrics)
    if message.rollout != state.id or message.serial > latest_serial:
        if message.serial <= latest_serial:
            return None  # a report on an earlier release
        reason = (
            f"the device has the later release {message.serial} of {message.rollout}, this is {latest_serial}: start "
            "this rollout again"
        )
        event = StatusReported(device, latest_serial, "refused", reason)
    elif message.serial not in (state.serial, latest_serial):
        return None
    return None if state.reports.get(device) == event else event


def release_for_device(state: Rollout, device: str) -> wire.DesiredRelease | None:
    """Return the release to send to a device, or None if there is none.

    After an abort or rollback, every device returns to its previous release, except devices that refused the release or
    have returned already. A device that never ran the release has nothing to do then.
    """
    plan, report = state.plan, state.reports.get(device)
    if device not in state.offered:
        return None
    if not state.is_reverted:
        content = {name: getattr(plan, name) for name in wire.ReleaseContent.__struct_fields__}
        return wire.DesiredRelease(rollout=state.id, serial=state.serial, **content)
    if report is not None and report.serial == state.serial and report.phase in FAILED:
        return None
    return wire.DesiredRelease(
        rollout=state.id, kind=plan.kind, serial=state.revert_serial, name=plan.name, is_rollback=True, force=plan.force
    )


def find_device_owner(rollouts: Sequence[Rollout]) -> Rollout:
    """Return the rollout whose release or rollback a device gets.

    The rollouts are of one kind and in queueing order. The latest owns the device. After its rollback, an earlier one
    owns the device once that is rolled back later.
    """
    reverted = list(itertools.takewhile(lambda state: state.is_reverted, reversed(rollouts)))
    return max(reverted, key=lambda state: state.latest_serial, default=rollouts[-1])


class RolloutDevice(NamedTuple):
    online: bool
    last_contact_s: float  # time of the latest contact or report
    labels: Collection[str] | None = None  # None before its profile has arrived
    is_compatible: bool = True  # whether the device can run the release

    def matches_selection(self, select: Sequence[str]) -> bool:
        return self.labels is not None and labels.is_selected(select, self.labels)


def select_rollout_devices(
    state: Rollout, rollouts: Sequence[Rollout], devices: Mapping[str, RolloutDevice]
) -> dict[str, RolloutDevice]:
    """Return the devices of a rollout, without those that a later rollout of the same kind has taken over.

    Devices belong to a rollout if they have been offered its release, or are compatible and match its selection.
    """
    position = next(index for index, other in enumerate(rollouts) if other.id == state.id)
    later_rollouts = [other for other in rollouts[position + 1 :] if other.plan.kind == state.plan.kind]
    active_rollouts = [
        other
        for other in later_rollouts
        if not other.is_reverted and (other.status != "done" or other.plan.includes_all_devices)
    ]
    later_selections = [other.plan.select for other in active_rollouts]
    return {
        device: rollout_device
        for device, rollout_device in devices.items()
        if not any(device in other.offered for other in later_rollouts)
        and (
            device in state.offered
            or (
                rollout_device.is_compatible
                and rollout_device.matches_selection(state.plan.select)
                and not any(rollout_device.matches_selection(select) for select in later_selections)
            )
        )
    }


def incompatibility_reason(plan: RolloutPlan, profile: Profile) -> str:
    """Return why a device cannot run the release of a plan, or "" if the device can."""
    if plan.kind == "agent":
        return NO_LAUNCHER if UPGRADES in profile.versions else ""
    return NO_RUNTIME if plan.kind == "model" and "onnx" not in profile.engines else ""


def incompatible_devices(plan: RolloutPlan, profiles: Mapping[str, Profile]) -> dict[str, str]:
    selected = {name: profile for name, profile in profiles.items() if labels.is_selected(plan.select, profile.labels)}
    reasons = {name: incompatibility_reason(plan, profile) for name, profile in sorted(selected.items())}
    return {name: reason for name, reason in reasons.items() if reason}


def format_incompatible_devices(reasons: Mapping[str, str], names_per_reason: int) -> str:
    """Return text as "a, b and 6 more (reason)" for each reason, with `names_per_reason` names at most."""
    parts = []
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name in reasons if reasons[name] == reason]
        more = f" and {len(names) - names_per_reason} more" if len(names) > names_per_reason else ""
        parts.append(f"{', '.join(names[:names_per_reason])}{more} ({reason})")
    return "; ".join(parts)


def decide_rollout_event(
    state: Rollout,
    fleet: Mapping[str, RolloutDevice],
    now_s: float,
    serial: int,
    incompatible_devices: Mapping[str, str] | None = None,
) -> AnyRolloutEvent | None:
    """Return the next event of a rollout, or None to wait.

    Args:
        state: The rollout.
        fleet: The devices of the rollout.
        now_s: The time of the coordinator's clock, in seconds.
        serial: The number for a new release, greater than any before.
        incompatible_devices: The selected devices that cannot run the release, with the reason of each.
    """
    if state.status == "queued":
        return RolloutStarted(serial, dict(incompatible_devices or {}))
    if state.status == "done":
        new_devices = [
            device for device, fleet_device in fleet.items() if fleet_device.online and device not in state.offered
        ]
        is_included = new_devices and state.plan.includes_all_devices
        return ReleaseOffered(len(state.plan.phases), tuple(sorted(new_devices))) if is_included else None
    if state.status != "running":
        return None
    if state.step == len(state.plan.cumulative_shares):
        return RolloutCompleted()
    if state.incompatible_devices and not state.offered and not fleet:
        reason = (
            "no selected device can run the release: "
            f"{format_incompatible_devices(state.incompatible_devices, 1)}. Select other devices"
        )
        return RolloutReverted(serial, shorten_error(reason))
    failed = [device for device in state.offered if state.device_phase(device) in FAILED]
    settled = [device for device in state.offered if state.device_phase(device) in SETTLED]
    max_failed_share = state.plan.abort_above
    canary = sum(step == 0 for step in state.offered.values())
    if len(failed) > max_failed_share * max(len(settled), canary):
        return RolloutReverted(serial, _abort_reason(state, failed, len(settled)))
    if not state.is_step_open:
        # the canary waits for a device, and phases that would reach no further device are left out
        for step in range(state.step, len(state.plan.cumulative_shares)) if state.step else (0,):
            if devices := select_step_devices(replace(state, step=step), fleet):
                return ReleaseOffered(step, devices)
        return RolloutCompleted() if state.step and fleet else None
    if find_blocking_devices(state, fleet, now_s):
        return None
    pending = [device for device in state.offered if state.device_phase(device) not in SETTLED]
    silent = [device for device in pending if state.device_phase(device) in SWAPPED]
    if len(failed) + len(silent) > max_failed_share * (len(settled) + len(silent)):
        return RolloutReverted(serial, _abort_reason(state, [*failed, *silent], len(settled) + len(silent)))
    return PhasePassed(state.step, tuple(sorted(device for device in pending if state.offered[device] == state.step)))


def select_step_devices(state: Rollout, fleet: Mapping[str, RolloutDevice]) -> tuple[str, ...]:
    """Return the devices that the next step of a rollout adds, sorted by id.

    Devices are drawn by the rollout's id, so that a restart does not change the selection. A step covers its share of
    the online devices, at least one more than the step before. The step for all devices includes offline devices.
    """
    share = state.plan.cumulative_shares[state.step]
    if share >= 1.0:
        return tuple(sorted(fleet.keys() - state.offered.keys()))
    online_devices = [device for device, rollout_device in fleet.items() if rollout_device.online]
    count = max(1, int(share * len(online_devices) + 1e-9)) - sum(device in fleet for device in state.offered)
    draw = seed_deriver("rollout", state.id)
    candidates = sorted(
        (device for device in online_devices if device not in state.offered),
        key=lambda device: (draw(device), device),
    )
    if count <= 0 and state.step and candidates:
        count = 1  # in a small fleet, every step still adds a device
    return tuple(sorted(candidates[: max(count, 0)]))


def find_blocking_devices(state: Rollout, fleet: Mapping[str, RolloutDevice], now_s: float) -> tuple[str, ...]:
    """Return the pending devices that delay the open step, or () if no step is open.

    Until the first device has ended, all pending devices delay the step. Afterwards, each device delays the step for a
    limited time.
    """
    if not state.is_step_open:
        return ()
    pending = [device for device in state.offered if state.device_phase(device) not in SETTLED]
    has_no_result = len(pending) == len(state.offered)
    return tuple(
        sorted(
            device for device in pending if has_no_result or _delays_next_step(state, device, fleet.get(device), now_s)
        )
    )


def _delays_next_step(state: Rollout, device: str, rollout_device: RolloutDevice | None, now_s: float) -> bool:
    # a device that is unknown since the restart, has other labels now or was left behind by a step delays nothing
    if rollout_device is None or device in state.silent_devices:
        return False
    return now_s < rollout_device.last_contact_s + _wait_limit_s(
        state, _is_reporting(state, device, rollout_device.online)
    )


def _wait_limit_s(state: Rollout, is_reporting: bool) -> float:
    return MAX_REPORTING_S + state.plan.soak_s if is_reporting else state.plan.patience_s


def _is_reporting(state: Rollout, device: str, online: bool) -> bool:
    return online and state.device_phase(device) != ""


def earlier_wait_s(state: Rollout, device: str, online: bool) -> float:
    """Return the seconds that a step waited for a device before the restart of the coordinator."""
    return state.present_s if _is_reporting(state, device, online) else state.silent_s


def rollout_restart_event(state: Rollout, since_s: float) -> RolloutResumed | None:
    if not state.is_step_open:
        return None
    limits = (state.silent_s, _wait_limit_s(state, False)), (state.present_s, _wait_limit_s(state, True))
    return RolloutResumed(
        *(capped_elapsed_s(passed_s, since_s, limit_s, state.restarts) for passed_s, limit_s in limits)
    )


def _abort_reason(state: Rollout, failed: Collection[str], answered: int) -> str:
    device = min(failed)
    phase = state.device_phase(device)
    report_reason = state.reports[device].reason if device in state.reports else ""
    example = f"{device} {'fell silent' if phase in SWAPPED else phase}{f': {report_reason}' if report_reason else ''}"
    share = f"more than {100 * state.plan.abort_above:g} %"
    return shorten_error(f"{len(failed)} of {answered} devices failed, {share} ({example})")
