"""State machine of a release on a device: pure decisions from a state and an event.

    wanted: waiting -> fetching -> waiting -> checking -> waiting -+-> swapping -> soaking -+-> committed
            (gate)                 (gate)                 (gate)   |                        +-> returning -> returned
                                                                   +-> refused

`ReleaseRecord` is on disk before the actions that follow are carried out, so that the process after a kill continues at
the recorded step. After a kill, the steps before the activation are repeated: the blob is on disk already, and a second
check changes nothing. An activation is recorded in advance, together with the release in use until then, and so is a
roll-back. "committed" is recorded after the kind has confirmed the release, because a version of the agent is on trial
until then.

For a release with the same or a smaller serial than the latest, only the progress is published again. A greater serial
replaces a release that is not in use yet. A soaking release first completes, unless it is to be rolled back.

A release with `is_rollback` rolls back the release that the named rollout has installed, if that one is in use.
Otherwise the device changes nothing and reports "returned".
"""

from __future__ import annotations

import math
import re
import time
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from fedquilt.core import REFETCH, Metrics, OptionalDigest, Reading, Sentence, ShortText, WireMessage, shorten_error
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.state_machine import MAX_KILLS
from fedquilt.edge_agent.task.memory_budget import format_megabytes
from fedquilt.wire import DesiredRelease, ReleaseStatus

POLL_S: Final = 5.0  # interval of polls while a release waits
MIN_BATTERY: Final = 0.2  # minimum charge for a release, unless the battery is being charged
MAX_TEMPERATURE_C: Final = 85.0  # maximum temperature for a release
SOAK_POLL_S: Final = 1.0  # interval of polls while a release soaks

EARLIEST_YEAR: Final = 2020  # earlier times mean an unset clock, because boards without a clock battery start in 1970
WINDOW_HINT: Final = 'write two times of a day, "02:00-05:00"'

_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z")
_PHASE_OF_STAGE: Final[dict[str, Any]] = {
    "gate": "waiting",
    "fetching": "fetching",
    "fetched": "fetching",
    "checking": "checking",
    "checked": "checking",
}

# -- state ----------------------------------------------------------------------------------------


class ReleaseRecord(WireMessage, frozen=True, omit_defaults=True):
    release: DesiredRelease  # the latest release
    step: Literal["wanted", "swapping", "soaking", "committed", "refused", "returning", "returned"] = "wanted"
    reason: Sentence = ""
    metrics: Metrics = msgspec.field(default_factory=dict)
    next_release: DesiredRelease | None = None  # a release that arrived while `release` soaks
    replaced_sha256: OptionalDigest = ""  # sha256 of the release in use before the activation
    rollout: ShortText = ""  # rollout that installed the release in use, or "" if no rollback is possible
    name: ShortText = ""  # name of the release in use
    previous_sha256: OptionalDigest = ""  # sha256 of the previous release
    previous_name: ShortText = ""
    previous_rollout: ShortText = ""
    final_rollout: ShortText = ""  # rollout of the release in use, if no release before is stored any more


class ReleaseState(msgspec.Struct, frozen=True):
    record: ReleaseRecord | None = None
    stage: Literal["gate", "fetching", "fetched", "checking", "checked", "undone"] = "gate"  # stage within the step
    waiting_for: str = ""  # condition that the release waits for
    next_poll_s: float = math.inf  # time of the next poll
    soak_end_s: float = math.inf  # end of the soak
    failures: int = 0  # failed fetches of the blob, then kills of the check's process


# -- events and actions ---------------------------------------------------------------------------

Action = Literal["publish", "fetch", "cancel fetch", "check", "activate", "roll back", "confirm", "delete"]
"""Action on the release of the new state, except "cancel fetch", which is for the release of the old state."""


class ReleaseReceived(msgspec.Struct, frozen=True):
    release: DesiredRelease


class ReleaseCancelled(msgspec.Struct, frozen=True): ...


class ReleaseFetched(msgspec.Struct, frozen=True):
    error: str | None = None


class ActionDone(msgspec.Struct, frozen=True):
    """Completed action. `had_previous` is whether a roll-back had a previous release."""

    action: Action
    had_previous: bool = True


class ActionFailed(msgspec.Struct, frozen=True):
    """Failed action. `in_use` is whether the release has been activated nevertheless."""

    reason: str
    in_use: bool = False


class ProcessStarted(msgspec.Struct, frozen=True):
    current_sha256: str = ""
    unhealthy_reason: str = ""


class DeviceIdle(msgspec.Struct, frozen=True): ...


class StatusPolled(msgspec.Struct, frozen=True):
    current_sha256: str = ""
    is_blob_stored: bool = False  # the blob is on this device
    is_task_running: bool = False  # whether a task runs
    other_kind_in_check: str = ""  # kind of another release under check
    check_bytes: int = 0  # memory that the check needs
    reading: Reading = Reading()
    local_time: time.struct_time | None = None
    is_settled: bool = True  # no hook runs
    unhealthy_reason: str = ""  # why the release in use is unhealthy, polled during the soak and after a roll-back


Event = (
    ReleaseReceived
    | ReleaseCancelled
    | ReleaseFetched
    | CheckResult
    | ActionDone
    | ActionFailed
    | ProcessStarted
    | DeviceIdle
    | StatusPolled
)
Step = tuple[ReleaseState, tuple[Action, ...]]

# -- published status -----------------------------------------------------------------------------


def release_status_message(state: ReleaseState, current_sha256: str) -> ReleaseStatus | None:
    """Return the progress to publish, or None if the device has had no release of this kind."""
    record = state.record
    if record is None:
        return None
    phase: Any = record.step
    reason = record.reason
    if phase == "wanted":
        phase = (
            _PHASE_OF_STAGE[state.stage]
            if state.stage in ("fetching", "checking") or not state.waiting_for
            else "waiting"
        )
        reason = state.waiting_for
    elif phase == "returning" and state.waiting_for:
        reason = shorten_error(f"{reason}; rollback pending: {state.waiting_for}")
    phase = {"swapping": "checking", "returning": "soaking"}.get(phase, phase)
    return ReleaseStatus(
        rollout=record.release.rollout,
        kind=record.release.kind,
        serial=record.release.serial,
        phase=phase,
        current=current_sha256,
        name=record.name,
        reason=reason,
        metrics=record.metrics,
    )


# -- transitions ----------------------------------------------------------------------------------


def advance(state: ReleaseState, event: Event, now_s: float) -> Step:
    """Return the next state, and the actions to carry out in order once its record is on disk."""
    if isinstance(event, ReleaseReceived):
        return _handle_release(state, event, now_s)
    record = state.record
    if record is None:
        return state, ()
    match event:
        case ProcessStarted():
            return _resume_release(state, record, event, now_s)
        case ReleaseCancelled():
            return _handle_cancellation(state, record)
        case ReleaseFetched() if record.step == "wanted" and state.stage == "fetching":
            if event.error is None:
                return replace(state, stage="fetched", waiting_for="", next_poll_s=now_s, failures=0), ()
            retry_s, failures = now_s + REFETCH.delay_s(state.failures), state.failures + 1
            return replace(state, waiting_for=shorten_error(event.error), next_poll_s=retry_s, failures=failures), ()
        case CheckResult(killed_externally=True) if state.stage == "checking" and state.failures < MAX_KILLS:
            return replace(state, failures=state.failures + 1), ("check",)
        case CheckResult() if record.step == "wanted" and state.stage == "checking":
            record = replace(record, metrics=dict(event.metrics))
            if event.refusal_reason:
                return _end_release(replace(state, record=record), "refused", event.refusal_reason, now_s)
            record = replace(record, reason=shorten_error(event.note))
            return replace(state, record=record, stage="checked", next_poll_s=now_s), ()
        case ActionFailed():
            return _handle_failure(state, record, event, now_s)
        case ActionDone("activate") if record.step in ("swapping", "soaking"):
            return _handle_activation(state, record, now_s)
        case ActionDone("confirm") if record.step == "soaking":
            return _end_release(state, "committed", record.reason, now_s)
        case ActionDone("roll back") if record.step == "returning":
            if not event.had_previous:
                return _end_release(state, "refused", "roll-back is impossible: there is no previous release", now_s)
            return replace(state, stage="undone", next_poll_s=now_s), ()
        case DeviceIdle() if record.step == "wanted" and state.stage != "fetching" and state.waiting_for:
            return replace(state, next_poll_s=now_s), ()  # before another task starts
        case StatusPolled() if now_s >= state.next_poll_s:
            return _handle_poll(state, record, event, now_s)
        case _:
            return state, ()


def _handle_release(state: ReleaseState, event: ReleaseReceived, now_s: float) -> Step:
    """Start a release with a higher serial, or publish the progress again for any other serial.

    While another release is activated, soaks or is rolled back, the new release is only stored as next.
    """
    release, record = event.release, state.record
    if record is None:
        return _start_or_end_release(state, release, now_s)
    newest = record.next_release or record.release
    if release.serial <= newest.serial:
        return state, ("publish",)
    if record.step == "soaking" and release.is_rollback and release.rollout == record.rollout:
        return _start_roll_back(replace(state, record=replace(record, release=release, next_release=None)), "")
    if record.step in ("swapping", "soaking", "returning"):
        return replace(state, record=replace(record, next_release=release)), ()
    next_state, actions = _start_or_end_release(state, release, now_s)
    return next_state, (*_cancel_actions(state), *actions)


def _start_or_end_release(state: ReleaseState, release: DesiredRelease, now_s: float) -> Step:
    previous_record = state.record
    if previous_record is None:
        record = ReleaseRecord(release=release)
    else:
        record = replace(
            previous_record,
            release=release,
            step="wanted",
            reason="",
            metrics={},
            next_release=None,
            replaced_sha256="",
        )
    state = ReleaseState(record=record, next_poll_s=now_s)
    if window_problem := window_error(release.window):
        return _end_release(state, "refused", window_problem, now_s)
    if release.is_rollback:
        if record.final_rollout and record.final_rollout == release.rollout:
            reason = "roll-back is impossible: a later release was tried, so no release before is stored any more"
            return _end_release(state, "refused", reason, now_s)
        if not record.rollout or record.rollout != release.rollout:
            return _end_release(state, "returned", "this device does not use a release of that rollout", now_s)
        return state, ()
    if release.kind != "settings" and release.blob is None:
        return _end_release(state, "refused", "release has no blob", now_s)
    return state, ()


def _cancel_actions(state: ReleaseState) -> tuple[Action, ...]:
    if state.record is None or state.record.step != "wanted":
        return ()
    return ("cancel fetch", "delete") if state.stage == "fetching" else ("delete",)


def _handle_cancellation(state: ReleaseState, record: ReleaseRecord) -> Step:
    if record.step in ("soaking", "swapping", "returning"):
        return replace(state, record=replace(record, next_release=None)), ()
    if record.step != "wanted":
        return state, ()
    cancel_actions = _cancel_actions(state)
    next_state, _ = _end_release(state, "refused", "release was cancelled", math.inf)
    return next_state, cancel_actions


def _resume_release(state: ReleaseState, record: ReleaseRecord, event: ProcessStarted, now_s: float) -> Step:
    """Continue the recorded step of a release after a restart of the process.

    A release in use ends as "returned" if the new process does not run it, or if its start has failed.
    """
    blob = record.release.blob
    is_running = blob is None or event.current_sha256 == blob.sha256
    match record.step:
        case "wanted":
            return replace(state, next_poll_s=now_s), ()
        case "swapping" if not event.unhealthy_reason or is_running:
            return state, ("activate",)
        case "soaking" if is_running:
            return state, ("activate",)
        case "swapping" | "soaking":
            reason = (
                event.unhealthy_reason or "the agent started without this release, which was rolled back outside it"
            )
            state = _with_release_in_use(state, record)
            assert state.record is not None
            return _end_release(_with_previous_in_use(state, state.record), "returned", reason, now_s)
        case "returning":
            return state, ("roll back",)
        case _:
            return replace(state, next_poll_s=math.inf if record.next_release is None else now_s), ("delete",)


def _handle_failure(state: ReleaseState, record: ReleaseRecord, event: ActionFailed, now_s: float) -> Step:
    """Refuse a release that is not in use yet, or roll back one in use. Repeat a failed roll-back later."""
    if event.in_use and record.step in ("swapping", "soaking"):
        return _start_roll_back(_with_release_in_use(state, record), event.reason)
    if record.step in ("wanted", "swapping"):
        return _end_release(state, "refused", event.reason, now_s)
    if record.step == "returning":
        return replace(state, waiting_for=shorten_error(event.reason), next_poll_s=now_s + POLL_S), ()
    if record.step == "soaking":
        return replace(state, next_poll_s=now_s + POLL_S), ()
    return state, ()


def _handle_activation(state: ReleaseState, record: ReleaseRecord, now_s: float) -> Step:
    state = _with_release_in_use(state, record)
    assert state.record is not None
    record = replace(state.record, step="soaking")
    soak_end_s = now_s + record.release.soak_s
    return replace(state, record=record, soak_end_s=soak_end_s, next_poll_s=now_s, waiting_for=""), ()


def _with_release_in_use(state: ReleaseState, record: ReleaseRecord) -> ReleaseState:
    if record.step != "swapping":
        return state
    release = record.release
    return replace(
        state,
        record=replace(
            record,
            rollout=release.rollout,
            name=release.name,
            previous_sha256=record.replaced_sha256,
            previous_name=record.name,
            previous_rollout=record.rollout or record.final_rollout,
            final_rollout="",
        ),
    )


def _start_roll_back(state: ReleaseState, reason: str) -> Step:
    assert state.record is not None
    record = replace(state.record, step="returning", reason=shorten_error(reason))
    return replace(state, record=record, stage="gate", next_poll_s=math.inf), ("roll back",)


def _with_previous_in_use(state: ReleaseState, record: ReleaseRecord) -> ReleaseState:
    return replace(
        state,
        record=replace(
            record,
            rollout="",
            final_rollout=record.previous_rollout,
            name=record.previous_name,
            previous_sha256="",
            previous_name="",
            previous_rollout="",
        ),
    )


def _end_release(
    state: ReleaseState, step: Literal["committed", "refused", "returned"], reason: str, now_s: float
) -> Step:
    assert state.record is not None
    record = replace(state.record, step=step, reason=shorten_error(reason), replaced_sha256="")
    return ReleaseState(record=record, next_poll_s=math.inf if record.next_release is None else now_s), ("delete",)


# -- polls ----------------------------------------------------------------------------------------


def _handle_poll(state: ReleaseState, record: ReleaseRecord, status: StatusPolled, now_s: float) -> Step:
    match record.step:
        case "wanted":
            return _continue_release(state, record, status, now_s)
        case "swapping":  # the link was offline at the first attempt
            return replace(state, next_poll_s=math.inf), ("activate",)
        case "soaking":
            if status.unhealthy_reason:
                return _start_roll_back(state, status.unhealthy_reason)
            if now_s >= state.soak_end_s and status.is_settled:
                return replace(state, next_poll_s=math.inf), ("confirm",)
            next_poll_s = now_s + SOAK_POLL_S
            return replace(
                state, next_poll_s=next_poll_s if now_s >= state.soak_end_s else min(state.soak_end_s, next_poll_s)
            ), ()
        case "returning" if state.stage != "undone":
            return replace(state, next_poll_s=math.inf), ("roll back",)
        case "returning" if not status.is_settled:
            return replace(state, next_poll_s=now_s + SOAK_POLL_S), ()
        case "returning":
            reason = "; ".join(
                filter(
                    None, (record.reason, status.unhealthy_reason and f"after the roll-back: {status.unhealthy_reason}")
                )
            )
            return _end_release(_with_previous_in_use(state, record), "returned", reason, now_s)
        case _ if record.next_release is not None:
            return _start_or_end_release(state, record.next_release, now_s)
        case _:
            return replace(state, next_poll_s=math.inf), ()


def _continue_release(state: ReleaseState, record: ReleaseRecord, status: StatusPolled, now_s: float) -> Step:
    release = record.release
    if state.stage == "gate" and release.blob is not None and release.blob.sha256 == status.current_sha256:
        return _end_release(state, "committed", "release was in use already", now_s)
    if state.stage == "fetching":  # the previous fetch has failed
        return replace(state, next_poll_s=math.inf), ("fetch",)
    if state.stage == "checking":
        return replace(state, next_poll_s=math.inf), ()
    if condition := waiting_reason(release, state, status):
        return replace(state, waiting_for=shorten_error(condition), next_poll_s=now_s + POLL_S), ()
    state = replace(state, waiting_for="", next_poll_s=now_s)
    if release.is_rollback:
        return _start_roll_back(state, "")
    if state.stage == "gate":
        if release.blob is None or status.is_blob_stored:
            return replace(state, stage="fetched"), ()
        return replace(state, stage="fetching", next_poll_s=math.inf), ("fetch",)
    if state.stage == "fetched":
        if release.blob is not None and not status.is_blob_stored:  # the blob was deleted or damaged
            return replace(state, stage="gate"), ()
        return replace(state, stage="checking", next_poll_s=math.inf), ("check",)
    swapping_record = replace(record, step="swapping", replaced_sha256=status.current_sha256)
    return replace(state, record=swapping_record, next_poll_s=math.inf), ("activate",)


def waiting_reason(release: DesiredRelease, state: ReleaseState, status: StatusPolled) -> str:
    """Return why a release waits before its next step, or "".

    The text has no measured values, because each change of the text is published.
    """
    is_idle = release.force or not status.is_task_running
    if release.is_rollback:  # the release in use is unwanted, and only replacing the agent would end a task
        return "" if is_idle or release.kind != "agent" else "a task runs"
    if window_reason := outside_window_reason(release.window, status.local_time):
        return window_reason
    reading = status.reading
    if reading.battery is not None and reading.battery < MIN_BATTERY and not reading.charging:
        return f"the battery is below {MIN_BATTERY:.0%} and is not charging"
    if reading.temperature_c is not None and reading.temperature_c > MAX_TEMPERATURE_C:
        return f"the device is hotter than {MAX_TEMPERATURE_C:g} °C"
    if state.stage == "gate":
        return ""
    if not is_idle:
        return "a task runs"
    if state.stage != "fetched":
        return ""
    if status.other_kind_in_check:
        return f"a release of kind {status.other_kind_in_check} is being checked"
    free = reading.available_bytes
    if free is not None and free < status.check_bytes:
        return f"the check needs {format_megabytes(status.check_bytes)} of memory, and less is free"
    return ""


# -- windows of local time ------------------------------------------------------------------------


def window_error(window: str) -> str:
    return "" if not window or _WINDOW.match(window) else f"{window!r} is not a window: {WINDOW_HINT}"


def outside_window_reason(window: str, local_time: time.struct_time | None) -> str:
    """Return why nothing may be installed at this time, or ""."""
    match = _WINDOW.match(window)
    if match is None:
        return ""
    if local_time is None:
        return f"the window is {window}, and the device has no clock"
    if local_time.tm_year < EARLIEST_YEAR:
        return f"the window is {window}, and the device's clock is not set (year {local_time.tm_year})"
    start, end = (60 * int(match[group]) + int(match[group + 1]) for group in (1, 3))
    minute = 60 * local_time.tm_hour + local_time.tm_min
    is_inside = start <= minute < end if start < end else minute >= start or minute < end
    return "" if is_inside else f"the window is {window}"
