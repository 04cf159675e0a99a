"""Executor over a link that also records the status of every device for monitoring."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.delivery.blob_server import BlobLocationSettings
from fedquilt.coordinator.delivery.executor import Heard, LinkExecutor
from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.fleet.device_status import (
    FORGOTTEN_S,
    STEPS,
    DeviceStatus,
    LatestDecline,
    TelemetrySample,
    TelemetryStore,
)
from fedquilt.coordinator.rounds import decisions
from fedquilt.core import StoreError, Task
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.link import Link
from fedquilt.wire import Telemetry

log = logging.getLogger("fedquilt.coordinator")

SOON_S: Final = 0.5  # until a change of what a board does is stored
LATER_S: Final = 5.0  # until its progress and readings are
TIDY_S: Final = 300.0
DOUBT_S: Final = 30.0  # after a start: who was online before, and has not been heard of, is not
MOST: Final = 20_000  # boards that are noted
_OFTEN: Final = (Telemetry, wire.Progress)
REMOVED_S: Final = 0.5  # between two looks for boards that are to be removed
RETRY_S: Final = 10.0  # after an error of the disk


class DeviceStatusTracker:
    """Status of every device, written to disk at intervals.

    A disk error is logged once. Rounds continue, and writing is tried again later.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._store: TelemetryStore | None = None
        self._boards: dict[str, DeviceStatus] = {}
        self._changed: set[str] = set()  # devices that are not stored as they are
        # device -> number of messages of the running step, their sum
        self._sums: dict[str, tuple[int, TelemetrySample]] = {}
        self._readings: dict[tuple[str, int], TelemetrySample] = {}  # by device and time: not stored yet
        self._seen: dict[str, float] = {}  # device -> when its last message came, where that is not in `_boards` yet
        self._doubted: set[str] = set()  # devices that were online when the last coordinator ended
        self._now_s, self._due_s = 0.0, -math.inf  # on the server's clock, as the two that follow
        self._doubt_s = self._tidy_s = self._remove_s = math.inf
        self._removed: list[str] = []  # by request, and not taken yet
        self._begun = self._failed = False
        self._away: float | None = clock()  # since when the broker is not reached; None: it is
        self._told_away = True  # whether that is to be stored
        try:
            self._store = TelemetryStore(home, writes=True)
            before = self._store.load_statuses()
            self._boards = {each.device: replace(each, doing=None, silent=False, quiet=False) for each in before}
            self._changed = {each.device for each in before if each != self._boards[each.device]}
        except StoreError as error:
            log.warning("%s; nothing is noted of boards meanwhile", error)
        self._doubted = {each.device for each in self._boards.values() if each.online}

    def record_message(self, heard: Heard, now_s: float) -> None:
        self._now_s, at = now_s, self._clock()
        if isinstance(heard, decisions.DeviceChange):
            board = self._status_with_last_seen(heard.device)
            match heard.kind:
                case "flooding":
                    refusal = LatestDecline(at, "flooding", decisions.FLOODED)
                    self._set_status(replace(board, refusal=refusal), SOON_S)
                case "silent":
                    self._set_status(device_status.apply_silence(board, at), SOON_S)
                case "returned":
                    self._set_status(device_status.apply_return(board, at), SOON_S)
        if not isinstance(heard, tuple):
            return
        device, message = heard
        if isinstance(message, wire.Presence):
            self._doubted.discard(device)
        self._set_status(
            device_status.apply_message(self._status_with_last_seen(device), message, at),
            LATER_S if isinstance(message, _OFTEN) else SOON_S,
        )
        if isinstance(message, Telemetry) and device in self._boards:
            self._add_telemetry(device, message, int(at))

    def record_contact(self, device: str) -> None:
        if device in self._boards or len(self._seen) < MOST:
            self._seen[device] = self._clock()
        if device in self._boards and self._boards[device].quiet:
            self._set_status(replace(self._status_with_last_seen(device), quiet=False), SOON_S)

    def mark_quiet(self, device: str) -> None:
        """Mark a known device as quiet, since its presence has been requested without an answer so far."""
        if device in self._boards:
            self._set_status(replace(self._status_with_last_seen(device), quiet=True), SOON_S)

    def record_broker_connection(self, connected: bool) -> None:
        if connected != (self._away is None):
            self._away, self._told_away = None if connected else self._clock(), True
            self._schedule_write(0.0)

    def find_status(self, device: str) -> DeviceStatus | None:
        return self._status_with_last_seen(device) if device in self._boards else None

    def statuses_with_readings(self) -> list[tuple[DeviceStatus, TelemetrySample | None]]:
        """Return every device's status and latest reading, if any. Safe to call from another thread."""
        sums = self._sums
        return [
            (self._status_with_last_seen(device), sums[device][1] if device in sums else None)
            for device in self._boards.copy()
        ]

    def record_task(self, device: str, task: Task) -> None:
        self._set_status(device_status.apply_task(self._status_with_last_seen(device), task, self._clock()), SOON_S)

    def record_transfer_turn(self, device: str, waits: bool) -> None:
        self._set_status(device_status.apply_transfer_turn(self._status_with_last_seen(device), waits), SOON_S)

    def record_ack(self, device: str, ack: wire.Ack) -> None:
        self._set_status(device_status.apply_ack(self._status_with_last_seen(device), ack, self._clock()), SOON_S)

    def mark_idle(self, device: str) -> None:
        if device in self._boards:
            self._set_status(replace(self._status_with_last_seen(device), doing=None), SOON_S)

    def step(self, now_s: float) -> float:
        """Write due changes and apply removal requests. Return the time of the next call."""
        if self._store is None:
            return math.inf
        if not self._begun:
            self._begun, self._doubt_s, self._tidy_s = True, now_s + DOUBT_S, now_s
            self._remove_s = now_s
        self._now_s = now_s
        if now_s >= self._doubt_s:
            self._doubt_s = math.inf
            for device in self._doubted:
                self._set_status(replace(self._boards[device], online=False, since=self._clock()), 0.0)
        try:
            if now_s >= self._due_s:
                self._write_changes(self._store)
            if now_s >= self._remove_s:
                self._remove_s = now_s + REMOVED_S
                self._removed += (removed := self._store.take_removals())
                self._delete_devices(self._store, removed)
            if now_s >= self._tidy_s:
                self._tidy_s = now_s + TIDY_S
                self._remove_expired(self._store, self._clock())
        except StoreError as error:
            self._due_s = now_s + RETRY_S
            self._readings.clear()  # they would pile up
            if not self._failed:
                log.warning("%s; `fedquilt devices` shows what was known before", error)
            self._failed = True
        return min(self._due_s, self._tidy_s, self._doubt_s, self._remove_s)

    def take_removed_devices(self) -> list[str]:
        removed, self._removed = self._removed, []
        return removed

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(StoreError):
                self._write_changes(self._store)
            self._store.close()
            self._store = None

    def _status_with_last_seen(self, device: str) -> DeviceStatus:
        board = self._boards.get(device) or DeviceStatus(device)
        seen = self._seen.get(device)
        return board if seen is None else replace(board, seen=seen)

    def _set_status(self, board: DeviceStatus, within_s: float) -> None:
        """Replace a changed status and write it within `within_s`. Above MOST, ignore new devices."""
        before = self._boards.get(board.device)
        if self._store is None or board == before or (before is None and len(self._boards) >= MOST):
            return
        self._boards[board.device] = board
        if before is None or replace(board, seen=None) != replace(before, seen=None):
            self._changed.add(board.device)
            self._schedule_write(within_s)

    def _add_telemetry(self, device: str, told: Telemetry, at: int) -> None:
        begin = at // STEPS[0][0] * STEPS[0][0]
        count, before = self._sums.get(device, (0, None))
        count, before = (count, before) if before is not None and before.at == begin else (0, None)
        reading = device_status.add_sample(before, count + 1, told, begin)
        self._sums[device] = (count + 1, reading)
        self._readings[device, begin] = reading
        self._schedule_write(LATER_S)

    def _schedule_write(self, within_s: float) -> None:
        if not self._failed:  # else it is tried again in its own time
            self._due_s = min(self._due_s, self._now_s + within_s)

    def _write_changes(self, store: TelemetryStore) -> None:
        readings = [(device, reading) for (device, _), reading in self._readings.items()]
        if self._told_away:
            store.record_broker_outage(self._away)
            self._told_away = False
        store.write_telemetry([self._status_with_last_seen(device) for device in self._changed], readings)
        self._changed.clear()
        self._readings.clear()
        self._due_s, self._failed = math.inf, False

    def _remove_expired(self, store: TelemetryStore, now: float) -> None:
        store.downsample_readings(now)
        gone = {device for device in self._boards if _is_expired(self._status_with_last_seen(device), now)}
        self._delete_devices(store, gone)

    def _delete_devices(self, store: TelemetryStore, devices: Collection[str]) -> None:
        store.delete_devices(devices)
        for device in devices:
            for place in (self._boards, self._sums, self._seen):
                place.pop(device, None)
            self._changed.discard(device)
            self._doubted.discard(device)
        self._readings = {key: each for key, each in self._readings.items() if key[0] not in devices}


def _is_expired(board: DeviceStatus, now: float) -> bool:
    return not board.online and now > max(board.seen or 0.0, board.since or 0.0) + FORGOTTEN_S


class MonitoringExecutor(LinkExecutor):
    """`LinkExecutor` that also records all messages in `DeviceStatusTracker`."""

    def __init__(
        self,
        link: Link,
        fleet: str,
        depot: BlobStore,
        epoch: int,
        noted: DeviceStatusTracker,
        identity: LinkIdentity | None = None,
        where: BlobLocationSettings = BlobLocationSettings(),
    ) -> None:
        super().__init__(link, fleet, depot, epoch, identity, where)
        self._noted = noted

    def receive_inputs(self, now_s: float) -> Iterator[Heard]:
        for heard in super().receive_inputs(now_s):
            self._noted.record_message(heard, now_s)
            yield heard
        for device in self._noted.take_removed_devices():
            self._remove_device(device)
            yield decisions.DeviceChange(device, "removed")

    def _record_contact(self, device: str) -> None:
        super()._record_contact(device)
        self._noted.record_contact(device)

    def _request_presence(self, device: str) -> None:
        super()._request_presence(device)
        self._noted.mark_quiet(device)

    def send_pending(self, now_s: float) -> float:
        self._noted.record_broker_connection(self._link.connected)
        due_s = super().send_pending(now_s)
        for device, waits in self._transfers.queue.take_changes().items():
            self._noted.record_transfer_turn(device, waits)
        return min(due_s, self._noted.step(now_s))

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        super().send_task(device, task, now_s)
        self._noted.record_task(device, task)

    def cancel_task(self, device: str) -> None:
        super().cancel_task(device)
        self._noted.mark_idle(device)

    def send_ack(self, device: str, ack: wire.Ack) -> None:
        super().send_ack(device, ack)
        self._noted.record_ack(device, ack)

    def close(self) -> None:
        self._noted.close()
        super().close()
