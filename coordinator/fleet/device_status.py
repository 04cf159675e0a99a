"""Status and sensor readings of each device for monitoring, and their database: HOME/boards.db.

Rounds do not depend on them. `delivery.monitoring_executor` follows the messages. No write waits for the disk, and a
damaged file is replaced. Times are wall-clock seconds of the coordinator. Readings are stored at three resolutions,
which become coarser with age. A device that has been offline for FORGOTTEN_S is deleted.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from fedquilt import wire
from fedquilt.coordinator.storage.rows import describe_database_error, open_read_only, transaction
from fedquilt.core import Profile, StoreError, Task, Update, WireMessage
from fedquilt.host.disk import PRIVATE
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
    at: float
    code: str  # of its claim; "update": the coordinator refused its update; "flooding": it was set aside
    reason: str
    job: str = ""
    round: int = 0


class InstalledRelease(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: wire.ReleaseKind
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
    return replace(board, online=False, silent=True, quiet=False, since=at if board.seen is None else board.seen)


def apply_return(board: DeviceStatus, at: float) -> DeviceStatus:
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


NAME: Final = "boards.db"
VERSION: Final = 3  # of the tables
STEPS: Final = ((30, 2 * 3600), (300, 2 * 86400), (3600, 30 * 86400))  # seconds of a reading, and how long it is kept
FORGOTTEN_S: Final = 30 * 86400.0
LATE_S: Final = 60  # after which the readings of a step are complete
FRESH_S: Final = 180  # after which a reading says nothing of the present
BUSY_S: Final = 5.0

_SCHEMA: Final = """
create table if not exists boards (id integer primary key, device text unique not null, body blob not null);
create table if not exists readings (
    step integer, at integer, board integer, power_w real, power_most_w real, temperature_c real,
    available_bytes integer, task_bytes integer, battery real, served integer, drift real, accuracy real,
    primary key (step, at, board)) without rowid;
-- since when the coordinator has not reached its broker, in wall-clock seconds; null: it does
create table if not exists contact (id integer primary key check (id = 1), away real);
-- devices that the coordinator is to remove
create table if not exists removals (device text primary key);
"""
_decoded: Final = msgspec.json.Decoder(DeviceStatus).decode
_VALUES: Final = "power_w, power_most_w, temperature_c, available_bytes, task_bytes, battery, served, drift, accuracy"
_COARSER: Final = f"""
insert or replace into readings (step, at, board, {_VALUES})
select :to, at / :to * :to, board, avg(power_w), max(power_most_w), max(temperature_c), min(available_bytes),
    max(task_bytes), avg(battery), max(served), max(drift), min(accuracy)
from readings where step = :step and at >= :begin and at < :end group by at / :to, board
"""  # noqa: S608


class TelemetryStore:
    """Database of device statuses and readings, with one writing process and any number of readers."""

    def __init__(self, home: Path, *, writes: bool = False) -> None:
        self._home = home
        with _convert_database_errors(home):
            try:
                self._db = self._open_database(writes)
            except sqlite3.DatabaseError as error:
                if not writes or isinstance(error, sqlite3.OperationalError):
                    raise
                (home / NAME).replace(home / f"{NAME}.damaged")  # nothing depends on it
                for end in ("-wal", "-shm"):
                    (home / f"{NAME}{end}").unlink(missing_ok=True)
                self._db = self._open_database(writes)

    def __enter__(self) -> TelemetryStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def _open_database(self, writes: bool) -> sqlite3.Connection:
        """Open the database, or an empty one in memory if there is nothing to read. Refuse another version."""
        path = self._home / NAME
        if not writes and not path.is_file():
            return _open_empty_database()
        if writes:
            PRIVATE.ensure(path)  # SQLite gives its other files the same mode
            db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        else:
            db = open_read_only(path, check_same_thread=False)
        try:
            found = int(db.execute("pragma user_version").fetchone()[0])
            if found not in (0, VERSION):
                raise StoreError(
                    f"{self._home / NAME} has tables of version {found}, and this fedquilt uses {VERSION}: use the "
                    "fedquilt that wrote it, or remove the file, on which no run depends"
                )
            if not found and not writes:  # whoever writes has not made all tables yet
                db.close()
                return _open_empty_database()
            if writes:
                db.execute("pragma journal_mode=wal")
                db.execute("pragma synchronous=off")
                db.executescript(_SCHEMA)
                db.execute(f"pragma user_version = {VERSION}")
            db.execute("select id, device, body from boards limit 1").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def write_telemetry(self, boards: Iterable[DeviceStatus], readings: Iterable[tuple[str, TelemetrySample]]) -> None:
        """Store device statuses, and readings at the finest resolution. Readings of unknown devices are dropped."""
        with _convert_database_errors(self._home), transaction(self._db):
            self._db.executemany(
                "insert into boards (device, body) values (?, ?) "
                "on conflict (device) do update set body = excluded.body",
                [(board.device, msgspec.json.encode(board)) for board in boards],
            )
            self._db.executemany(
                f"insert or replace into readings (step, at, board, {_VALUES}) "  # noqa: S608
                f"select {STEPS[0][0]}, ?, id{', ?' * (_VALUES.count(',') + 1)} from boards where device = ?",
                [(*msgspec.structs.astuple(reading), device) for device, reading in readings],
            )

    def record_broker_outage(self, since: float | None) -> None:
        with _convert_database_errors(self._home):
            self._db.execute("insert or replace into contact (id, away) values (1, ?)", (since,))

    def downsample_readings(self, now: float) -> None:
        with _convert_database_errors(self._home), transaction(self._db):
            for (step, _), (to, kept_s) in itertools.pairwise(STEPS):
                last = self._db.execute("select max(at) from readings where step = ?", (to,)).fetchone()[0]
                begin = 0 if last is None else last + to
                end = int(now - LATE_S) // to * to
                self._db.execute(_COARSER, {"to": to, "step": step, "begin": max(begin, int(now - kept_s)), "end": end})
            for step, kept_s in STEPS:
                self._db.execute("delete from readings where step = ? and at < ?", (step, int(now - kept_s)))

    def delete_devices(self, devices: Collection[str]) -> None:
        with _convert_database_errors(self._home), transaction(self._db):
            for device in devices:
                self._db.execute(
                    "delete from readings where board = (select id from boards where device = ?)", (device,)
                )
                self._db.execute("delete from boards where device = ?", (device,))

    def request_removal(self, devices: Iterable[str]) -> None:
        with _convert_database_errors(self._home), transaction(self._db):
            self._db.executemany("insert or ignore into removals values (?)", [(device,) for device in devices])

    def take_removals(self) -> list[str]:
        with _convert_database_errors(self._home):
            found = [str(device) for (device,) in self._db.execute("select device from removals order by device")]
            self._db.executemany("delete from removals where device = ?", [(device,) for device in found])
        return found

    def broker_outage_start(self) -> float | None:
        with _convert_database_errors(self._home):
            found: tuple[float | None] | None = self._db.execute("select away from contact").fetchone()
        return None if found is None else found[0]

    def load_statuses(self) -> list[DeviceStatus]:
        """Return the statuses of all devices, sorted by name. Rows that cannot be decoded are left out."""
        with _convert_database_errors(self._home):
            rows = self._db.execute("select body from boards order by device").fetchall()
        found = []
        for (body,) in rows:
            try:
                found.append(_decoded(body))
            except msgspec.MsgspecError:
                continue
        return found

    def latest_readings(self, now: float) -> dict[str, TelemetrySample]:
        """Return each device's latest reading, if not older than FRESH_S."""
        step, found = STEPS[0][0], dict[int, TelemetrySample]()
        with _convert_database_errors(self._home):
            devices = dict(self._db.execute("select id, device from boards"))
            at = self._db.execute("select max(at) from readings where step = ?", (step,)).fetchone()[0] or 0
            while at > now - FRESH_S and len(found) < len(devices):  # the newest have most boards
                query = f"select board, at, {_VALUES} from readings where step = ? and at = ?"  # noqa: S608
                for board, *values in self._db.execute(query, (step, at)):
                    if board not in found:
                        found[board] = TelemetrySample(*values)
                at -= step
        return {devices[board]: reading for board, reading in found.items() if board in devices}

    def load_readings(self, device: str, begin: float, end: float) -> list[TelemetrySample]:
        """Return a device's readings, oldest first, in the finest resolution retained for so long."""
        step = next((step for step, kept_s in STEPS if begin >= end - kept_s), STEPS[-1][0])
        at = range(int(begin) // step * step, int(end) + 1, step)
        with _convert_database_errors(self._home):
            found = self._db.execute("select id from boards where device = ?", (device,)).fetchone()
            rows = [] if found is None else [self._load_row(step, each, found[0]) for each in at]
        return [TelemetrySample(*row) for row in rows if row is not None]

    def _load_row(self, step: int, at: int, board: int) -> tuple[Any, ...] | None:
        query = f"select at, {_VALUES} from readings where step = ? and at = ? and board = ?"  # noqa: S608
        row: tuple[Any, ...] | None = self._db.execute(query, (step, at, board)).fetchone()
        return row


def _open_empty_database() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.executescript(_SCHEMA)
    return db


@contextmanager
def _convert_database_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            f"cannot use {home / NAME}: {describe_database_error(home, error)}. If it is damaged it may be removed: no "
            "run depends on it"
        ) from None
