"""State machine of a release on a device: pure decisions from a state and an event.

    wanted: waiting -> fetching -> waiting -> checking -> waiting -+-> swapping -> soaking -+-> committed
            (gate)                 (gate)                 (gate)   |                        +-> returning -> returned
                                                                   +-> refused

`ReleaseRecord` is on disk before the actions that follow are carried out, so that the next process finds the step of a
killed one. After a kill, the steps before the activation are repeated: the blob is on disk already, and a second check
changes nothing. An activation is recorded in advance, together with the release in use until then, and so is a
roll-back. "committed" is recorded after the kind has confirmed the release: a version of the agent is on trial until
then.

A release with a smaller serial than the current one is ignored, and the same serial is answered with the progress. A
greater serial replaces a release that is not in use yet. A soaking release first completes, unless it is to be rolled
back.

`back` rolls back what the rollout of that name has installed, if that is in use. A device that never had it, or has
another release since, does nothing and reports "returned".
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
from fedquilt.edge_agent.state_machine import KILLED_MOST
from fedquilt.edge_agent.task.memory_budget import format_megabytes
from fedquilt.wire import DesiredRelease, ReleaseStatus

LOOK_S: Final = 5.0  # interval of polls while a release waits
LEAST_BATTERY: Final = 0.2  # charge below which no release begins, unless the battery is being charged
HOTTEST_C: Final = 85.0  # temperature above which no release begins
SOAK_LOOK_S: Final = 1.0  # interval of polls while a release soaks

EARLIEST_YEAR: Final = 2020  # an earlier clock was never set: boards without a clock battery begin in 1970
FORM: Final = 'a window is two times of a day, "02:00-05:00"'

_FORM: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z")
_WITHIN: Final[dict[str, Any]] = {
    "gate": "waiting",
    "fetching": "fetching",
    "fetched": "fetching",
    "checking": "checking",
    "checked": "checking",
}

# -- state ----------------------------------------------------------------------------------------


class ReleaseRecord(WireMessage, frozen=True, omit_defaults=True):
    release: DesiredRelease  # the latest one
    step: Literal["wanted", "swapping", "soaking", "committed", "refused", "returning", "returned"] = "wanted"
    reason: Sentence = ""
    metrics: Metrics = msgspec.field(default_factory=dict)
    next: DesiredRelease | None = None  # a release that arrived while `release` soaks
    origin: OptionalDigest = ""  # release in use (sha256) when the swap is about to be made
    rollout: ShortText = ""  # rollout that brought the release in use; "": none that could be taken back
    name: ShortText = ""  # name of the release in use
    before: OptionalDigest = ""  # release (sha256) that ran before the one in use
    before_name: ShortText = ""


class ReleaseState(msgspec.Struct, frozen=True):
    noted: ReleaseRecord | None = None
    stage: Literal["gate", "fetching", "fetched", "checking", "checked", "undone"] = "gate"  # stage within the step
    waits: str = ""  # condition that the release waits for
    again_s: float = math.inf  # when to look again
    until_s: float = math.inf  # end of the soak
    failures: int = 0  # to fetch the blob, then kills of the check's process


# -- events and actions ---------------------------------------------------------------------------

Action = Literal["publish", "fetch", "cancel fetch", "check", "activate", "roll back", "confirm", "delete"]
"""Action on the release of the new state. "cancel fetch" is about the one of the state before."""


class ReleaseReceived(msgspec.Struct, frozen=True):
    release: DesiredRelease


class ReleaseCancelled(msgspec.Struct, frozen=True): ...


class ReleaseFetched(msgspec.Struct, frozen=True):
    error: str | None = None


class ActionDone(msgspec.Struct, frozen=True):
    """Completed action. `found` is whether a roll-back had a previous release."""

    action: Action
    found: bool = True


class ActionFailed(msgspec.Struct, frozen=True):
    """Failed action. `in_use` is whether the release has been activated nevertheless."""

    reason: str
    in_use: bool = False


class ProcessStarted(msgspec.Struct, frozen=True):
    """Start of a process with the records of an earlier one."""

    current: str = ""
    ill: str = ""


class DeviceIdle(msgspec.Struct, frozen=True): ...


class StatusPolled(msgspec.Struct, frozen=True):
    current: str = ""
    here: bool = False  # the blob is on this device
    works: bool = False  # whether a task runs
    other: str = ""  # kind of another release that is being checked
    need_bytes: int = 0  # memory that the check will take
    reading: Reading = Reading()
    local: time.struct_time | None = None
    settled: bool = True  # no hook runs
    ill: str = ""  # verdict on the release in use: asked while it soaks, and after a return


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


def release_status_message(state: ReleaseState, current: str) -> ReleaseStatus | None:
    noted = state.noted
    if noted is None:
        return None
    phase: Any = noted.step
    reason = noted.reason
    if phase == "wanted":
        phase = _WITHIN[state.stage] if state.stage in ("fetching", "checking") or not state.waits else "waiting"
        reason = state.waits
    elif phase == "returning" and state.waits:
        reason = shorten_error(f"{reason}; it cannot return yet: {state.waits}")
    phase = {"swapping": "checking", "returning": "soaking"}.get(phase, phase)
    return ReleaseStatus(
        rollout=noted.release.rollout,
        kind=noted.release.kind,
        serial=noted.release.serial,
        phase=phase,
        current=current,
        name=noted.name,
        reason=reason,
        metrics=noted.metrics,
    )


# -- what follows ---------------------------------------------------------------------------------


def advance(state: ReleaseState, event: Event, now_s: float) -> Step:
    """Return the next state and the actions to carry out in order, once `noted` is on disk."""
    if isinstance(event, ReleaseReceived):
        return _handle_release(state, event, now_s)
    noted = state.noted
    if noted is None:
        return state, ()
    match event:
        case ProcessStarted():
            return _resume_release(state, noted, event, now_s)
        case ReleaseCancelled():
            return _handle_cancellation(state, noted)
        case ReleaseFetched() if noted.step == "wanted" and state.stage == "fetching":
            if event.error is None:
                return replace(state, stage="fetched", waits="", again_s=now_s, failures=0), ()
            later_s, failures = now_s + REFETCH.delay_s(state.failures), state.failures + 1
            return replace(state, waits=shorten_error(event.error), again_s=later_s, failures=failures), ()
        case CheckResult(killed=True) if state.stage == "checking" and state.failures < KILLED_MOST:
            return replace(state, failures=state.failures + 1), ("check",)
        case CheckResult() if noted.step == "wanted" and state.stage == "checking":
            noted = replace(noted, metrics=dict(event.metrics))
            if event.refused:
                return _end_release(replace(state, noted=noted), "refused", event.refused, now_s)
            noted = replace(noted, reason=shorten_error(event.note))
            return replace(state, noted=noted, stage="checked", again_s=now_s), ()
        case ActionFailed():
            return _handle_failure(state, noted, event, now_s)
        case ActionDone("activate") if noted.step in ("swapping", "soaking"):
            return _handle_activation(state, noted, now_s)
        case ActionDone("confirm") if noted.step == "soaking":
            return _end_release(state, "committed", noted.reason, now_s)
        case ActionDone("roll back") if noted.step == "returning":
            if not event.found:
                return _end_release(state, "refused", "there is nothing before it to return to", now_s)
            return replace(state, stage="undone", again_s=now_s), ()
        case DeviceIdle() if noted.step == "wanted" and state.stage != "fetching" and state.waits:
            return replace(state, again_s=now_s), ()  # at the next look another task may run
        case StatusPolled() if now_s >= state.again_s:
            return _handle_poll(state, noted, event, now_s)
        case _:
            return state, ()


def _handle_release(state: ReleaseState, event: ReleaseReceived, now_s: float) -> Step:
    """Start a release with a higher serial, or keep it as next while another is swapped, soaking or rolled back.

    For a serial that is not higher, publish the progress again.
    """
    release, noted = event.release, state.noted
    if noted is None:
        return _start_or_end_release(state, release, now_s)
    latest = noted.next or noted.release
    if release.serial <= latest.serial:
        return state, ("publish",)
    if noted.step == "soaking" and release.is_rollback and release.rollout == noted.rollout:
        return _start_roll_back(replace(state, noted=replace(noted, release=release, next=None)), "")
    if noted.step in ("swapping", "soaking", "returning"):
        return replace(state, noted=replace(noted, next=release)), ()
    after, actions = _start_or_end_release(state, release, now_s)
    return after, (*_cancel_actions(state), *actions)


def _start_or_end_release(state: ReleaseState, release: DesiredRelease, now_s: float) -> Step:
    known = state.noted
    if known is None:
        noted = ReleaseRecord(release=release)
    else:
        noted = replace(known, release=release, step="wanted", reason="", metrics={}, next=None, origin="")
    state = ReleaseState(noted=noted, again_s=now_s)
    if wrong := window_error(release.window):
        return _end_release(state, "refused", wrong, now_s)
    if release.is_rollback:
        if not noted.rollout or noted.rollout != release.rollout:
            return _end_release(state, "returned", "it does not run what that rollout has brought", now_s)
        return state, ()
    if release.kind != "settings" and release.blob is None:
        return _end_release(state, "refused", "it names no blob", now_s)
    return state, ()


def _cancel_actions(state: ReleaseState) -> tuple[Action, ...]:
    if state.noted is None or state.noted.step != "wanted":
        return ()
    return ("cancel fetch", "delete") if state.stage == "fetching" else ("delete",)


def _handle_cancellation(state: ReleaseState, noted: ReleaseRecord) -> Step:
    if noted.step in ("soaking", "swapping", "returning"):
        return replace(state, noted=replace(noted, next=None)), ()
    if noted.step != "wanted":
        return state, ()
    given_up = _cancel_actions(state)
    after, _ = _end_release(state, "refused", "it was withdrawn", math.inf)
    return after, given_up


def _resume_release(state: ReleaseState, noted: ReleaseRecord, event: ProcessStarted, now_s: float) -> Step:
    """Continue the recorded step of a release after a restart of the process.

    A release in use that the new process does not run, or whose start has failed, ends as "returned".
    """
    blob = noted.release.blob
    runs = blob is None or event.current == blob.sha256
    match noted.step:
        case "wanted":
            return replace(state, again_s=now_s), ()
        case "swapping" if not event.ill or runs:
            return state, ("activate",)
        case "soaking" if runs:
            return state, ("activate",)
        case "swapping" | "soaking":
            why = event.ill or "this process began without it: something has returned to what ran before"
            state = _with_release_in_use(state, noted)
            assert state.noted is not None
            return _end_release(_with_previous_in_use(state, state.noted), "returned", why, now_s)
        case "returning":
            return state, ("roll back",)
        case _:
            return replace(state, again_s=math.inf if noted.next is None else now_s), ("delete",)


def _handle_failure(state: ReleaseState, noted: ReleaseRecord, event: ActionFailed, now_s: float) -> Step:
    """Refuse a release that is not in use yet, else return to the previous one. Retry a failed return later."""
    if event.in_use and noted.step in ("swapping", "soaking"):
        return _start_roll_back(_with_release_in_use(state, noted), event.reason)
    if noted.step in ("wanted", "swapping"):
        return _end_release(state, "refused", event.reason, now_s)
    if noted.step == "returning":
        return replace(state, waits=shorten_error(event.reason), again_s=now_s + LOOK_S), ()
    if noted.step == "soaking":
        return replace(state, again_s=now_s + LOOK_S), ()
    return state, ()


def _handle_activation(state: ReleaseState, noted: ReleaseRecord, now_s: float) -> Step:
    state = _with_release_in_use(state, noted)
    assert state.noted is not None
    noted = replace(state.noted, step="soaking")
    until_s = now_s + noted.release.soak_s
    return replace(state, noted=noted, until_s=until_s, again_s=now_s, waits=""), ()


def _with_release_in_use(state: ReleaseState, noted: ReleaseRecord) -> ReleaseState:
    if noted.step != "swapping":
        return state
    release = noted.release
    return replace(
        state,
        noted=replace(
            noted,
            rollout=release.rollout,
            name=release.name,
            before=noted.origin,
            before_name=noted.name,
        ),
    )


def _start_roll_back(state: ReleaseState, reason: str) -> Step:
    assert state.noted is not None
    noted = replace(state.noted, step="returning", reason=shorten_error(reason))
    return replace(state, noted=noted, stage="gate", again_s=math.inf), ("roll back",)


def _with_previous_in_use(state: ReleaseState, noted: ReleaseRecord) -> ReleaseState:
    return replace(state, noted=replace(noted, rollout="", name=noted.before_name, before="", before_name=""))


def _end_release(
    state: ReleaseState, step: Literal["committed", "refused", "returned"], reason: str, now_s: float
) -> Step:
    assert state.noted is not None
    noted = replace(state.noted, step=step, reason=shorten_error(reason), origin="")
    return ReleaseState(noted=noted, again_s=math.inf if noted.next is None else now_s), ("delete",)


# -- when it is time to look ----------------------------------------------------------------------


def _handle_poll(state: ReleaseState, noted: ReleaseRecord, seen: StatusPolled, now_s: float) -> Step:
    match noted.step:
        case "wanted":
            return _continue_release(state, noted, seen, now_s)
        case "swapping":  # the link was not up the first time
            return replace(state, again_s=math.inf), ("activate",)
        case "soaking":
            if seen.ill:
                return _start_roll_back(state, seen.ill)
            if now_s >= state.until_s and seen.settled:
                return replace(state, again_s=math.inf), ("confirm",)
            late_s = now_s + SOAK_LOOK_S
            return replace(state, again_s=late_s if now_s >= state.until_s else min(state.until_s, late_s)), ()
        case "returning" if state.stage != "undone":
            return replace(state, again_s=math.inf), ("roll back",)
        case "returning" if not seen.settled:
            return replace(state, again_s=now_s + SOAK_LOOK_S), ()
        case "returning":
            reason = "; ".join(filter(None, (noted.reason, seen.ill and f"after the return: {seen.ill}")))
            return _end_release(_with_previous_in_use(state, noted), "returned", reason, now_s)
        case _ if noted.next is not None:
            return _start_or_end_release(state, noted.next, now_s)
        case _:
            return replace(state, again_s=math.inf), ()


def _continue_release(state: ReleaseState, noted: ReleaseRecord, seen: StatusPolled, now_s: float) -> Step:
    release = noted.release
    if state.stage == "gate" and release.blob is not None and release.blob.sha256 == seen.current:
        return _end_release(state, "committed", "it ran here already", now_s)
    if state.stage == "fetching":  # the fetch before has failed
        return replace(state, again_s=math.inf), ("fetch",)
    if state.stage == "checking":
        return replace(state, again_s=math.inf), ()
    if waits := waiting_reason(release, state, seen):
        return replace(state, waits=shorten_error(waits), again_s=now_s + LOOK_S), ()
    state = replace(state, waits="", again_s=now_s)
    if release.is_rollback:
        return _start_roll_back(state, "")
    if state.stage == "gate":
        if release.blob is None or seen.here:
            return replace(state, stage="fetched"), ()
        return replace(state, stage="fetching", again_s=math.inf), ("fetch",)
    if state.stage == "fetched":
        if release.blob is not None and not seen.here:  # dropped, or damaged meanwhile
            return replace(state, stage="gate"), ()
        return replace(state, stage="checking", again_s=math.inf), ("check",)
    swapping = replace(noted, step="swapping", origin=seen.current)
    return replace(state, noted=swapping, again_s=math.inf), ("activate",)


def waiting_reason(release: DesiredRelease, state: ReleaseState, seen: StatusPolled) -> str:
    """Return the condition that a release waits for before its next step, or "".

    Measured values are left out, because each change of the text is published.
    """
    idle = release.force or not seen.works
    if release.is_rollback:  # what runs now is not wanted: only an exchange of the agent itself would end a task
        return "" if idle or release.kind != "agent" else "a task runs"
    if waits := outside_window_reason(release.window, seen.local):
        return waits
    reading = seen.reading
    if reading.battery is not None and reading.battery < LEAST_BATTERY and not reading.charging:
        return f"its battery is below {LEAST_BATTERY:.0%}, and does not charge"
    if reading.temperature_c is not None and reading.temperature_c > HOTTEST_C:
        return f"it is hotter than {HOTTEST_C:g} °C"
    if state.stage == "gate":
        return ""
    if not idle:
        return "a task runs"
    if state.stage != "fetched":
        return ""
    if seen.other:
        return f"its release of kind {seen.other} is being checked"
    free = reading.available_bytes
    if free is not None and free < seen.need_bytes:
        return f"its check takes {format_megabytes(seen.need_bytes)} of memory, and less is free"
    return ""


# -- windows of local time ------------------------------------------------------------------------


def window_error(window: str) -> str:
    return "" if not window or _FORM.match(window) else f"{window!r} is no window: {FORM}"


def outside_window_reason(window: str, local: time.struct_time | None) -> str:
    """Return why nothing may be installed now, or ""."""
    found = _FORM.match(window)
    if found is None:
        return ""
    if local is None:
        return f"its window is {window}, and it has no clock"
    if local.tm_year < EARLIEST_YEAR:
        return f"its window is {window}, and its clock says {local.tm_year}"
    begin, end = (60 * int(found[at]) + int(found[at + 1]) for at in (1, 3))
    now = 60 * local.tm_hour + local.tm_min
    inside = begin <= now < end if begin < end else now >= begin or now < end
    return "" if inside else f"its window is {window}"
