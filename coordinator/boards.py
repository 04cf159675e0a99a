"""What is known of each board, for those who watch a fleet: pure, from what coordinator and boards tell each other.

Rounds do not depend on it. `boards_link` follows the messages, and `boards_store` keeps what comes of them.
Times are wall-clock seconds of the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from fedquilt import wire
from fedquilt.core import Profile, Task, Update, Wired
from fedquilt.wire import Telemetry

T = TypeVar("T", int, float)

SKEW_KEPT_S: Final = 300.0  # a message that was late makes a clock look slow: the fastest of this time is believed
SKEW_STEP_S: Final = 0.1  # smaller changes of a clock are not noted
NO_REFUSAL: Final = frozenset({"ok", "cleared", "counted"})  # codes of claims by which a board declines no work


class Doing(msgspec.Struct, frozen=True):
    """Task that a board has."""

    job: str
    round: int
    step: Literal["asked", "working", "waiting", "sending"]  # waiting: for its turn to send a large update
    since: float
    fraction: float | None = None  # of the work, 0 to 1; None: not told


class Refusal(msgspec.Struct, frozen=True):
    """Latest task that a board declined, or update of it that was refused."""

    at: float
    code: str  # of its claim; "update": the coordinator refused its update; "flooding": it was set aside
    reason: str
    job: str = ""
    round: int = 0


class Runs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a board runs of one kind of release, and how far it is with the latest one."""

    kind: wire.Kind
    phase: str
    name: str = ""  # of what it runs now, as people call it; "": what it was flashed with
    current: str = ""  # blob (sha256) that it runs now
    rollout: str = ""  # the latest release's
    reason: str = ""
    at: float = 0.0  # when it said so first


class Board(msgspec.Struct, frozen=True, omit_defaults=True):
    """One board, but for its sensors' readings."""

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
    doing: Doing | None = None
    refusal: Refusal | None = None
    skew_s: float | None = None  # its clock, less ours
    skew_at: float = 0.0
    runs: tuple[Runs, ...] = ()  # by kind


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sensors of a board over some time. None: not measurable."""

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


def board_after_message(board: Board, message: Wired, at: float) -> Board:
    """Return the board's status after a message from the board."""
    match message:
        case wire.Presence():
            return _board_after_presence(board, message, at)
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
            return _claim(board, message, at)
        case wire.Progress() if board.doing is not None and _same(board.doing, message.job, message.round):
            return replace(board, doing=replace(board.doing, step="working", fraction=message.fraction))
        case Update() if board.doing is not None and _same(board.doing, message.job, message.round):
            step = board.doing.step if board.doing.step == "waiting" else "sending"  # it offers the same again
            return replace(board, doing=replace(board.doing, step=step, fraction=None))
        case wire.Installed():
            return replace(board, runs=_runs(board.runs, message, at))
        case Telemetry():
            return _clock(replace(board, mode=message.mode), message.clock_s, at)
    return board


def board_after_silence(board: Board, at: float) -> Board:
    """Return the board marked offline and silent, after it has not answered."""
    return replace(board, online=False, silent=True, quiet=False, since=at if board.seen is None else board.seen)


def board_after_return(board: Board, at: float) -> Board:
    """Return a silent board marked online again, after a message from it."""
    return replace(board, online=True, silent=False, since=at)


def asked(board: Board, task: Task, at: float) -> Board:
    """The board after a task was sent to it, for the first time or again."""
    if board.doing is not None and _same(board.doing, task.job, task.round):
        return board
    return replace(board, doing=Doing(task.job, task.round, "asked", at))


def turned(board: Board, waits: bool) -> Board:
    """The board after its update has had to wait for its turn to be sent, or the turn has come."""
    if board.doing is None:
        return board
    return replace(board, doing=replace(board.doing, step="waiting" if waits else "sending"))


def answered(board: Board, ack: wire.Ack, at: float) -> Board:
    """The board after the answer to its update."""
    idle = replace(board, doing=None)
    return idle if ack.accepted else replace(idle, refusal=Refusal(at, "update", ack.reason, ack.job, ack.round))


def joined(before: Reading | None, count: int, told: Telemetry, at: int) -> Reading:
    """Reading of a time with one more message: its `count`th."""
    old = before or Reading(at)
    mean = told.power_w
    if mean is not None and old.power_w is not None:
        mean = old.power_w + (mean - old.power_w) / count
    return Reading(
        at,
        old.power_w if mean is None else mean,
        _of(max, old.power_most_w, told.power_w),
        _of(max, old.temperature_c, told.temperature_c),
        _of(min, old.available_bytes, told.available_bytes),
        _of(max, old.task_bytes, told.task_bytes),
        old.battery if told.battery is None else told.battery,
        old.served if told.served is None else told.served,
        _of(max, old.drift, told.drift),
        _of(min, old.accuracy, told.accuracy),
    )


def _of(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """What two values come to, of which one may be unknown."""
    return b if a is None else a if b is None else choose(a, b)


def _runs(known: tuple[Runs, ...], message: wire.Installed, at: float) -> tuple[Runs, ...]:
    """`known` with what a board has said of one kind of release."""
    new = Runs(message.kind, message.phase, message.name, message.current, message.rollout, message.reason, at)
    before = next((each for each in known if each.kind == message.kind), None)
    if before is not None and replace(before, at=at) == new:
        return known  # told again after each connecting
    others = (each for each in known if each.kind != message.kind)
    return tuple(sorted((*others, new), key=lambda each: each.kind))


def _board_after_presence(board: Board, message: wire.Presence, at: float) -> Board:
    """Return the board after a presence message, which may be a repeated or a retained one."""
    if board.silent and message.online and message.boot == board.boot:
        return board  # retained: `board_after_return` comes before a message of its own
    if message.online == board.online and (message.boot == board.boot or not message.online):
        return replace(board, silent=False)  # retained, or told again
    if not message.online and not board.boot:
        return replace(board, boot=message.boot)  # a broker keeps this of boards that went long ago
    return replace(board, online=message.online, silent=False, quiet=False, boot=message.boot, since=at)


def _claim(board: Board, message: wire.Claim, at: float) -> Board:
    doing = board.doing if board.doing is not None and _same(board.doing, message.job, message.round) else None
    if message.accepted:
        since = doing.since if doing is not None and doing.step == "working" else at
        fraction = None if doing is None else doing.fraction
        return replace(board, doing=Doing(message.job, message.round, "working", since, fraction))
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
    return replace(idle, refusal=Refusal(at, message.code, message.reason, message.job, message.round))


def _clock(board: Board, clock_s: float | None, at: float) -> Board:
    if clock_s is None:
        return board
    skew_s = clock_s - at
    if board.skew_s is None or skew_s > board.skew_s + SKEW_STEP_S or at > board.skew_at + SKEW_KEPT_S:
        return replace(board, skew_s=round(skew_s, 1), skew_at=at)
    return board


def _same(doing: Doing, job: str, round: int) -> bool:
    return (doing.job, doing.round) == (job, round)
