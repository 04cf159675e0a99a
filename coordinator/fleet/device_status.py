"""Status of each device, derived from its messages, for monitoring.

Rounds do not depend on the status. `delivery.monitoring_executor` follows the messages, and
`telemetry_store` stores the status. Times are wall-clock seconds of the coordinator. Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from fedquilt import wire
from fedquilt.core import Profile, Task, Update, WireMessage
from fedquilt.wire import Telemetry

T = TypeVar("T", int, float)

SKEW_KEPT_S: Final = 300.0  # a message that was late makes a clock look slow: the fastest of this time is believed
SKEW_STEP_S: Final = 0.1  # smaller changes of a clock are not noted
NO_REFUSAL: Final = frozenset({"ok", "cleared", "counted"})  # codes of claims by which a board declines no work


class CurrentTask(msgspec.Struct, frozen=True):
    job: str
    round: int
    step: Literal["asked", "working", "waiting", "sending"]  # waiting: for its turn to send a large update
    since: float
    fraction: float | None = None  # of the work, 0 to 1; None: not told


class LatestDecline(msgspec.Struct, frozen=True):
    """Latest task that a device declined, or latest rejection of its update."""

    at: float
    code: str  # of its claim; "update": the coordinator refused its update; "flooding": it was set aside
    reason: str
    job: str = ""
    round: int = 0


class InstalledRelease(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: wire.Kind
    phase: str
    name: str = ""  # name of the running release, or empty for the flashed one
    current: str = ""  # sha256 of the running blob
    rollout: str = ""  # the latest release's
    reason: str = ""
    at: float = 0.0  # when it said so first


class DeviceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    device: str
    online: bool = False
    silent: bool = False  # not online: its broker reports it so, and it does not answer
    quiet: bool = False  # it has been asked for its presence, and has not answered yet
    since: float | None = None  # it is online, offline or silent; None: from before anything was noted
    seen: float | None = None  # when its last message came, as far as it is known
    boot: str = ""
    board: str = ""
    version: str = ""  # of its agent
    memory_bytes: int = 0
    budget_bytes: int = 0
    engines: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    mode: str | None = None  # power mode
    doing: CurrentTask | None = None
    refusal: LatestDecline | None = None
    skew_s: float | None = None  # its clock, less ours
    skew_at: float = 0.0
    runs: tuple[InstalledRelease, ...] = ()  # by kind


class TelemetrySample(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sensor readings of a device, merged over an interval. None means that there is no reading."""

    at: int  # when it began
    power_w: float | None = None  # mean
    power_most_w: float | None = None
    temperature_c: float | None = None  # highest
    available_bytes: int | None = None  # lowest
    task_bytes: int | None = None  # highest
    battery: float | None = None  # last
    served: int | None = None  # answers of its model runner since that started, last
    drift: float | None = None  # of the runner's inputs, highest
    accuracy: float | None = None  # of the runner's answers, lowest


def apply_message(board: DeviceStatus, message: WireMessage, at: float) -> DeviceStatus:
    match message:
        case wire.Presence():
            return _apply_presence(board, message, at)
        case Profile():
            return replace(
                board,
                board=message.board,
                version=message.versions.get("fedquilt", ""),
                memory_bytes=message.memory_bytes,
                budget_bytes=message.budget_bytes,
                engines=message.engines,
                labels=message.labels,
            )
        case wire.Claim():
            return _apply_claim(board, message, at)
        case wire.Progress() if board.doing is not None and _is_task(board.doing, message.job, message.round):
            return replace(board, doing=replace(board.doing, step="working", fraction=message.fraction))
        case Update() if board.doing is not None and _is_task(board.doing, message.job, message.round):
            step = board.doing.step if board.doing.step == "waiting" else "sending"  # it offers the same again
            return replace(board, doing=replace(board.doing, step=step, fraction=None))
        case wire.ReleaseStatus():
            return replace(board, runs=_apply_release_status(board.runs, message, at))
        case Telemetry():
            return _apply_clock_skew(replace(board, mode=message.mode), message.clock_s, at)
    return board


def apply_silence(board: DeviceStatus, at: float) -> DeviceStatus:
    """Return a device's status, offline and silent, after the device has stopped answering."""
    return replace(board, online=False, silent=True, quiet=False, since=at if board.seen is None else board.seen)


def apply_return(board: DeviceStatus, at: float) -> DeviceStatus:
    """Return a silent device's status, online again, after a message from the device."""
    return replace(board, online=True, silent=False, since=at)


def apply_task(board: DeviceStatus, task: Task, at: float) -> DeviceStatus:
    if board.doing is not None and _is_task(board.doing, task.job, task.round):
        return board
    return replace(board, doing=CurrentTask(task.job, task.round, "asked", at))


def apply_transfer_turn(board: DeviceStatus, waits: bool) -> DeviceStatus:
    """Return a device's status after the transfer of its update was queued (`waits`) or started."""
    if board.doing is None:
        return board
    return replace(board, doing=replace(board.doing, step="waiting" if waits else "sending"))


def apply_ack(board: DeviceStatus, ack: wire.Ack, at: float) -> DeviceStatus:
    idle = replace(board, doing=None)
    return idle if ack.accepted else replace(idle, refusal=LatestDecline(at, "update", ack.reason, ack.job, ack.round))


def add_sample(before: TelemetrySample | None, count: int, told: Telemetry, at: int) -> TelemetrySample:
    """Return an interval's sensor readings after its `count`-th telemetry message."""
    old = before or TelemetrySample(at)
    mean = told.power_w
    if mean is not None and old.power_w is not None:
        mean = old.power_w + (mean - old.power_w) / count
    return TelemetrySample(
        at,
        old.power_w if mean is None else mean,
        _combine(max, old.power_most_w, told.power_w),
        _combine(max, old.temperature_c, told.temperature_c),
        _combine(min, old.available_bytes, told.available_bytes),
        _combine(max, old.task_bytes, told.task_bytes),
        old.battery if told.battery is None else told.battery,
        old.served if told.served is None else told.served,
        _combine(max, old.drift, told.drift),
        _combine(min, old.accuracy, told.accuracy),
    )


def _combine(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    return b if a is None else a if b is None else choose(a, b)


def _apply_release_status(
    known: tuple[InstalledRelease, ...], message: wire.ReleaseStatus, at: float
) -> tuple[InstalledRelease, ...]:
    new = InstalledRelease(
        message.kind, message.phase, message.name, message.current, message.rollout, message.reason, at
    )
    before = next((each for each in known if each.kind == message.kind), None)
    if before is not None and replace(before, at=at) == new:
        return known  # told again after each connecting
    others = (each for each in known if each.kind != message.kind)
    return tuple(sorted((*others, new), key=lambda each: each.kind))


def _apply_presence(board: DeviceStatus, message: wire.Presence, at: float) -> DeviceStatus:
    """Return the status after a presence message, unchanged after a retained or repeated message."""
    if board.silent and message.online and message.boot == board.boot:
        return board  # retained: `apply_return` comes before a message of its own
    if message.online == board.online and (message.boot == board.boot or not message.online):
        return replace(board, silent=False)  # retained, or told again
    if not message.online and not board.boot:
        return replace(board, boot=message.boot)  # a broker keeps this of boards that went long ago
    return replace(board, online=message.online, silent=False, quiet=False, boot=message.boot, since=at)


def _apply_claim(board: DeviceStatus, message: wire.Claim, at: float) -> DeviceStatus:
    doing = board.doing if board.doing is not None and _is_task(board.doing, message.job, message.round) else None
    if message.accepted:
        since = doing.since if doing is not None and doing.step == "working" else at
        fraction = None if doing is None else doing.fraction
        return replace(board, doing=CurrentTask(message.job, message.round, "working", since, fraction))
    idle = replace(board, doing=None)
    if message.code in NO_REFUSAL:
        return idle
    last = board.refusal
    if last is not None and (last.job, last.round, last.code, last.reason) == (
        message.job,
        message.round,
        message.code,
        message.reason,
    ):
        return idle  # it repeats its refusal as often as the task is repeated
    return replace(idle, refusal=LatestDecline(at, message.code, message.reason, message.job, message.round))


def _apply_clock_skew(board: DeviceStatus, clock_s: float | None, at: float) -> DeviceStatus:
    """Store the clock's offset if it exceeds the stored offset, or if that is older than SKEW_KEPT_S."""
    if clock_s is None:
        return board
    skew_s = clock_s - at
    if board.skew_s is None or skew_s > board.skew_s + SKEW_STEP_S or at > board.skew_at + SKEW_KEPT_S:
        return replace(board, skew_s=round(skew_s, 1), skew_at=at)
    return board


def _is_task(doing: CurrentTask, job: str, round: int) -> bool:
    return (doing.job, doing.round) == (job, round)
