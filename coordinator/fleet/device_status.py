"""Status and sensor readings of each device for monitoring, and their database: HOME/boards.db.

Rounds do not depend on this database. `delivery.monitoring_executor` collects the data from messages. No write waits
for the disk, and a damaged file is replaced. Times are wall-clock seconds of the coordinator. Readings are stored at
three resolutions, which become coarser with age. A device that has been offline for FORGOTTEN_S is deleted.
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

SKEW_KEPT_S: Final = 300.0  # time for which the largest offset is kept, since late messages lower the offset
SKEW_STEP_S: Final = 0.1  # smallest stored change of an offset
NO_REFUSAL: Final = frozenset({"ok", "cleared", "counted"})  # codes of claims that are not declines


class CurrentTask(msgspec.Struct, frozen=True):
    job: str
    round: int
    step: Literal["asked", "working", "waiting", "sending"]  # waiting: queued for a large transfer
    since: float
    fraction: float | None = None  # progress from 0 to 1
    is_evaluation: bool = False  # whether the task is of the final evaluation, which has no number for people


class LatestDecline(msgspec.Struct, frozen=True):
    at: float
    code: str  # code of a claim, "update" for a rejected update, or "flooding" for a blocked device
    reason: str
    job: str = ""
    round: int = 0
    is_evaluation: bool = False  # as of the task


class InstalledRelease(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: wire.ReleaseKind
    phase: str
    name: str = ""  # name of the running release, or empty for the flashed one
    current: str = ""  # sha256 of the running blob
    rollout: str = ""  # rollout of the latest release
    reason: str = ""
    at: float = 0.0  # time of the first such report


class DeviceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    device: str
    online: bool = False
    silent: bool = False  # reported online by the broker, without an answer
    quiet: bool = False  # has not answered a presence request yet
    since: float | None = None  # time of the latest change between online, offline and silent
    seen: float | None = None  # time of the latest message
    boot: str = ""
    board: str = ""
    version: str = ""  # fedquilt version of the agent
    memory_bytes: int = 0
    budget_bytes: int = 0
    engines: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    mode: str | None = None  # power mode
    doing: CurrentTask | None = None
    refusal: LatestDecline | None = None
    skew_s: float | None = None  # the device's clock minus the coordinator's clock
    skew_at: float = 0.0
    runs: tuple[InstalledRelease, ...] = ()  # by kind


class TelemetrySample(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sensor readings of a device, merged over an interval. None means that there is no reading."""

    at: int  # start of the interval
    power_w: float | None = None  # mean
    power_most_w: float | None = None
    temperature_c: float | None = None  # highest
    available_bytes: int | None = None  # lowest
    task_bytes: int | None = None  # highest
    battery: float | None = None  # last
    served: int | None = None  # answers of the model runner since its start, last
    drift: float | None = None  # input drift of the model runner, highest
    accuracy: float | None = None  # accuracy of the model runner, lowest


def apply_message(status: DeviceStatus, message: WireMessage, time_s: float) -> DeviceStatus:
    match message:
        case wire.Presence():
            return _apply_presence(status, message, time_s)
        case Profile():
            return replace(
                status,
                board=message.board,
                version=message.versions.get("fedquilt", ""),
                memory_bytes=message.memory_bytes,
                budget_bytes=message.budget_bytes,
                engines=message.engines,
                labels=message.labels,
            )
        case wire.Claim():
            return _apply_claim(status, message, time_s)
        case wire.Progress() if status.doing is not None and _is_task(status.doing, message.job, message.round):
            return replace(status, doing=replace(status.doing, step="working", fraction=message.fraction))
        case Update() if status.doing is not None and _is_task(status.doing, message.job, message.round):
            step = status.doing.step if status.doing.step == "waiting" else "sending"
            return replace(status, doing=replace(status.doing, step=step, fraction=None))
        case wire.ReleaseStatus():
            return replace(status, runs=_apply_release_status(status.runs, message, time_s))
        case Telemetry():
            return _apply_clock_skew(replace(status, mode=message.mode), message.clock_s, time_s)
    return status


def apply_silence(status: DeviceStatus, time_s: float) -> DeviceStatus:
    return replace(status, online=False, silent=True, quiet=False, since=time_s if status.seen is None else status.seen)


def apply_return(status: DeviceStatus, time_s: float) -> DeviceStatus:
    return replace(status, online=True, silent=False, since=time_s)


def apply_task(status: DeviceStatus, task: Task, time_s: float) -> DeviceStatus:
    if status.doing is not None and _is_task(status.doing, task.job, task.round):
        return status
    return replace(status, doing=CurrentTask(task.job, task.round, "asked", time_s, None, "work" not in task.actions))


def apply_transfer_turn(status: DeviceStatus, is_waiting: bool) -> DeviceStatus:
    """Return a device's status after the transfer of its update was queued (`is_waiting`) or started."""
    if status.doing is None:
        return status
    return replace(status, doing=replace(status.doing, step="waiting" if is_waiting else "sending"))


def apply_ack(status: DeviceStatus, ack: wire.Ack, time_s: float) -> DeviceStatus:
    idle = replace(status, doing=None)
    if ack.accepted or ack.is_late:
        return idle
    is_evaluation = status.doing is not None and status.doing.is_evaluation
    return replace(idle, refusal=LatestDecline(time_s, "update", ack.reason, ack.job, ack.round, is_evaluation))


def add_sample(previous: TelemetrySample | None, count: int, telemetry: Telemetry, time_s: int) -> TelemetrySample:
    previous_sample = previous or TelemetrySample(time_s)
    mean = telemetry.power_w
    if mean is not None and previous_sample.power_w is not None:
        mean = previous_sample.power_w + (mean - previous_sample.power_w) / count
    return TelemetrySample(
        time_s,
        previous_sample.power_w if mean is None else mean,
        _combine(max, previous_sample.power_most_w, telemetry.power_w),
        _combine(max, previous_sample.temperature_c, telemetry.temperature_c),
        _combine(min, previous_sample.available_bytes, telemetry.available_bytes),
        _combine(max, previous_sample.task_bytes, telemetry.task_bytes),
        previous_sample.battery if telemetry.battery is None else telemetry.battery,
        previous_sample.served if telemetry.served is None else telemetry.served,
        _combine(max, previous_sample.drift, telemetry.drift),
        _combine(min, previous_sample.accuracy, telemetry.accuracy),
    )


def _combine(combine: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    return b if a is None else a if b is None else combine(a, b)


def _apply_release_status(
    releases: tuple[InstalledRelease, ...], message: wire.ReleaseStatus, time_s: float
) -> tuple[InstalledRelease, ...]:
    new = InstalledRelease(
        message.kind, message.phase, message.name, message.current, message.rollout, message.reason, time_s
    )
    previous = next((release for release in releases if release.kind == message.kind), None)
    if previous is not None and replace(previous, at=time_s) == new:
        return releases  # repeated after a reconnection
    other_releases = (release for release in releases if release.kind != message.kind)
    return tuple(sorted((*other_releases, new), key=lambda release: release.kind))


def _apply_presence(status: DeviceStatus, message: wire.Presence, time_s: float) -> DeviceStatus:
    if status.silent and message.online and message.boot == status.boot:
        return status  # a retained message: `apply_return` precedes a new message
    if message.online == status.online and (message.boot == status.boot or not message.online):
        return replace(status, silent=False)  # a retained or repeated message
    if not message.online and not status.boot:
        return replace(status, boot=message.boot)  # a retained message of a device that has long been offline
    return replace(status, online=message.online, silent=False, quiet=False, boot=message.boot, since=time_s)


def _apply_claim(status: DeviceStatus, message: wire.Claim, time_s: float) -> DeviceStatus:
    task = status.doing if status.doing is not None and _is_task(status.doing, message.job, message.round) else None
    is_evaluation = task is not None and task.is_evaluation
    if message.accepted:
        since = task.since if task is not None and task.step == "working" else time_s
        fraction = None if task is None else task.fraction
        doing = CurrentTask(message.job, message.round, "working", since, fraction, is_evaluation)
        return replace(status, doing=doing)
    idle_status = replace(status, doing=None)
    if message.code in NO_REFUSAL:
        return idle_status
    decline = LatestDecline(time_s, message.code, message.reason, message.job, message.round, is_evaluation)
    if status.refusal is not None and replace(status.refusal, at=time_s) == decline:
        return idle_status  # a repeated decline of a repeated task
    return replace(idle_status, refusal=decline)


def _apply_clock_skew(status: DeviceStatus, clock_s: float | None, time_s: float) -> DeviceStatus:
    """Return the status with the new clock offset, if it is larger or the stored offset is outdated."""
    if clock_s is None:
        return status
    skew_s = clock_s - time_s
    if status.skew_s is None or skew_s > status.skew_s + SKEW_STEP_S or time_s > status.skew_at + SKEW_KEPT_S:
        return replace(status, skew_s=round(skew_s, 1), skew_at=time_s)
    return status


def _is_task(doing: CurrentTask, job: str, round: int) -> bool:
    return (doing.job, doing.round) == (job, round)


NAME: Final = "boards.db"
VERSION: Final = 4  # version of the tables
STEPS: Final = ((30, 2 * 3600), (300, 2 * 86400), (3600, 30 * 86400))  # (interval, retention) in seconds
FORGOTTEN_S: Final = 30 * 86400.0
LATE_S: Final = 60  # delay after which the readings of an interval are complete
FRESH_S: Final = 180  # age up to which a reading counts as current
BUSY_S: Final = 5.0

_SCHEMA: Final = """
create table if not exists boards (id integer primary key, device text unique not null, body blob not null);
create table if not exists readings (
    step integer, at integer, board integer, power_w real, power_most_w real, temperature_c real,
    available_bytes integer, task_bytes integer, battery real, served integer, drift real, accuracy real,
    primary key (step, at, board)) without rowid;
-- start of the broker outage in wall-clock seconds, or null while the coordinator is connected
create table if not exists contact (id integer primary key check (id = 1), away real);
-- devices to be removed by the coordinator
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
    """Database of statuses and readings, written by one process.

    Methods raise StoreError if the file is unusable.
    """

    def __init__(self, home: Path, *, writes: bool = False) -> None:
        self._home = home
        with _convert_database_errors(home):
            try:
                self._db = self._open_database(writes)
            except sqlite3.DatabaseError as error:
                if not writes or isinstance(error, sqlite3.OperationalError):
                    raise
                (home / NAME).replace(home / f"{NAME}.damaged")  # monitoring data may be lost
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
        path = self._home / NAME
        if not writes and not path.is_file():
            return _open_empty_database()
        if writes:
            PRIVATE.create_if_missing(path)  # SQLite gives its other files the same mode
            db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        else:
            db = open_read_only(path, check_same_thread=False)
        try:
            version = int(db.execute("pragma user_version").fetchone()[0])
            if version not in (0, VERSION):
                raise StoreError(
                    f"{self._home / NAME} has tables of version {version}, but this fedquilt uses {VERSION}: use the "
                    "fedquilt version that wrote the file, or remove the file, which only contains monitoring data"
                )
            if not version and not writes:  # the writer is still creating the tables
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
        """Store statuses, and readings at the finest resolution. Readings of unknown devices are dropped."""
        with _convert_database_errors(self._home), transaction(self._db):
            self._db.executemany(
                "insert into boards (device, body) values (?, ?) "
                "on conflict (device) do update set body = excluded.body",
                [(status.device, msgspec.json.encode(status)) for status in boards],
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
        """Merge complete intervals into the coarser resolutions, and delete outdated readings."""
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
        """Return the devices whose removal was requested, and delete the requests."""
        with _convert_database_errors(self._home):
            devices = [str(device) for (device,) in self._db.execute("select device from removals order by device")]
            self._db.executemany("delete from removals where device = ?", [(device,) for device in devices])
        return devices

    def broker_outage_start(self) -> float | None:
        """Return the wall-clock start of the running broker outage, or None."""
        with _convert_database_errors(self._home):
            row: tuple[float | None] | None = self._db.execute("select away from contact").fetchone()
        return None if row is None else row[0]

    def load_statuses(self) -> list[DeviceStatus]:
        """Return the statuses of all devices, sorted by name. Rows that cannot be decoded are left out."""
        with _convert_database_errors(self._home):
            rows = self._db.execute("select body from boards order by device").fetchall()
        statuses = []
        for (body,) in rows:
            try:
                statuses.append(_decoded(body))
            except msgspec.MsgspecError:
                continue
        return statuses

    def latest_readings(self, now: float) -> dict[str, TelemetrySample]:
        """Return each device's latest reading at the finest resolution, if not older than FRESH_S."""
        step, readings = STEPS[0][0], dict[int, TelemetrySample]()
        with _convert_database_errors(self._home):
            devices = dict(self._db.execute("select id, device from boards"))
            time_s = self._db.execute("select max(at) from readings where step = ?", (step,)).fetchone()[0] or 0
            while time_s > now - FRESH_S and len(readings) < len(devices):
                query = f"select board, at, {_VALUES} from readings where step = ? and at = ?"  # noqa: S608
                for board, *values in self._db.execute(query, (step, time_s)):
                    if board not in readings:
                        readings[board] = TelemetrySample(*values)
                time_s -= step
        return {devices[board]: reading for board, reading in readings.items() if board in devices}

    def load_readings(self, device: str, begin: float, end: float) -> list[TelemetrySample]:
        """Return a device's readings from `begin` to `end`, oldest first, at the finest stored resolution."""
        step = next((step for step, kept_s in STEPS if begin >= end - kept_s), STEPS[-1][0])
        times = range(int(begin) // step * step, int(end) + 1, step)
        with _convert_database_errors(self._home):
            board = self._db.execute("select id from boards where device = ?", (device,)).fetchone()
            rows = [] if board is None else [self._load_row(step, time_s, board[0]) for time_s in times]
        return [TelemetrySample(*row) for row in rows if row is not None]

    def _load_row(self, step: int, time_s: int, board: int) -> tuple[Any, ...] | None:
        query = f"select at, {_VALUES} from readings where step = ? and at = ? and board = ?"  # noqa: S608
        row: tuple[Any, ...] | None = self._db.execute(query, (step, time_s, board)).fetchone()
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
            f"{home / NAME} cannot be used: {describe_database_error(home, error)}. A damaged file may be removed: it "
            "only contains monitoring data"
        ) from None
