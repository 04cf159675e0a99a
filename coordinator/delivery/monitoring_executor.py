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
from fedquilt.coordinator.delivery.executor import ExecutorInput, LinkExecutor
from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.fleet.device_status import (
    FORGOTTEN_S,
    STEPS,
    DeviceStatus,
    LatestDecline,
    TelemetrySample,
    TelemetryStore,
)
from fedquilt.coordinator.rounds import responses
from fedquilt.core import StoreError, Task
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.link import Link
from fedquilt.wire import Telemetry

log = logging.getLogger("fedquilt.coordinator")

STATUS_DELAY_S: Final = 0.5  # delay before a changed status is stored
TELEMETRY_DELAY_S: Final = 5.0  # delay before progress and readings are stored
CLEANUP_INTERVAL_S: Final = 300.0
START_GRACE_S: Final = 30.0  # after which devices without a message since the start count as offline
MAX_DEVICES: Final = 20_000  # largest number of stored devices
_FREQUENT: Final = (Telemetry, wire.Progress)
REMOVAL_POLL_S: Final = 0.5  # between two checks for removal requests
RETRY_S: Final = 10.0  # delay after a disk error


class DeviceStatusTracker:
    """Status of every device, written to disk at intervals.

    A disk error is logged once. Rounds continue, and writing is repeated after RETRY_S.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._store: TelemetryStore | None = None
        self._statuses: dict[str, DeviceStatus] = {}
        self._changed_devices: set[str] = set()  # devices with unstored changes
        # device -> number of messages in the running interval, and merged readings
        self._sums: dict[str, tuple[int, TelemetrySample]] = {}
        self._readings: dict[tuple[str, int], TelemetrySample] = {}  # unstored readings by device and time
        # device -> time of the latest message, if later than in the stored status
        self._last_seen: dict[str, float] = {}
        self._unconfirmed_devices: set[str] = set()  # devices that were online when the last coordinator ended
        self._now_s, self._due_s = 0.0, -math.inf  # times on the server's clock
        self._grace_end_s = self._next_cleanup_s = self._next_removal_poll_s = math.inf
        self._removed_devices: list[str] = []  # requested removals to be reported
        self._has_started = self._has_failed = False
        self._outage_start: float | None = clock()  # start of a broker outage, or None
        self._is_outage_unwritten = True  # whether `_outage_start` is not stored yet
        try:
            self._store = TelemetryStore(home, writes=True)
            stored = self._store.load_statuses()
            self._statuses = {
                status.device: replace(status, doing=None, silent=False, quiet=False) for status in stored
            }
            self._changed_devices = {status.device for status in stored if status != self._statuses[status.device]}
        except StoreError as error:
            log.warning("%s. Devices are not monitored until the next start of the coordinator", error)
        self._unconfirmed_devices = {status.device for status in self._statuses.values() if status.online}

    def record_message(self, input: ExecutorInput, now_s: float) -> None:
        """Update a device's status and readings from one input of the executor. Other inputs change nothing."""
        self._now_s, time_s = now_s, self._clock()
        if isinstance(input, responses.DeviceChange):
            status = self._status_with_last_seen(input.device)
            match input.kind:
                case "flooding":
                    decline = LatestDecline(time_s, "flooding", responses.FLOODED)
                    self._set_status(replace(status, refusal=decline), STATUS_DELAY_S)
                case "silent":
                    self._set_status(device_status.apply_silence(status, time_s), STATUS_DELAY_S)
                case "returned":
                    self._set_status(device_status.apply_return(status, time_s), STATUS_DELAY_S)
        if not isinstance(input, tuple):
            return
        device, message = input
        if isinstance(message, wire.Presence):
            self._unconfirmed_devices.discard(device)
        self._set_status(
            device_status.apply_message(self._status_with_last_seen(device), message, time_s),
            TELEMETRY_DELAY_S if isinstance(message, _FREQUENT) else STATUS_DELAY_S,
        )
        if isinstance(message, Telemetry) and device in self._statuses:
            self._add_telemetry(device, message, int(time_s))

    def record_contact(self, device: str) -> None:
        if device in self._statuses or len(self._last_seen) < MAX_DEVICES:
            self._last_seen[device] = self._clock()
        if device in self._statuses and self._statuses[device].quiet:
            self._set_status(replace(self._status_with_last_seen(device), quiet=False), STATUS_DELAY_S)

    def mark_quiet(self, device: str) -> None:
        """Mark a known device as quiet, since its presence has been requested without an answer so far."""
        if device in self._statuses:
            self._set_status(replace(self._status_with_last_seen(device), quiet=True), STATUS_DELAY_S)

    def record_broker_connection(self, connected: bool) -> None:
        if connected != (self._outage_start is None):
            self._outage_start, self._is_outage_unwritten = None if connected else self._clock(), True
            self._schedule_write(0.0)

    def find_status(self, device: str) -> DeviceStatus | None:
        return self._status_with_last_seen(device) if device in self._statuses else None

    def statuses_with_readings(self) -> list[tuple[DeviceStatus, TelemetrySample | None]]:
        """Return every device's status and latest reading, if any. Safe to call from another thread."""
        sums = self._sums
        return [
            (self._status_with_last_seen(device), sums[device][1] if device in sums else None)
            for device in self._statuses.copy()
        ]

    def record_task(self, device: str, task: Task) -> None:
        status = device_status.apply_task(self._status_with_last_seen(device), task, self._clock())
        self._set_status(status, STATUS_DELAY_S)

    def record_transfer_turn(self, device: str, waits: bool) -> None:
        self._set_status(device_status.apply_transfer_turn(self._status_with_last_seen(device), waits), STATUS_DELAY_S)

    def record_ack(self, device: str, ack: wire.Ack) -> None:
        status = device_status.apply_ack(self._status_with_last_seen(device), ack, self._clock())
        self._set_status(status, STATUS_DELAY_S)

    def mark_idle(self, device: str) -> None:
        if device in self._statuses:
            self._set_status(replace(self._status_with_last_seen(device), doing=None), STATUS_DELAY_S)

    def step(self, now_s: float) -> float:
        """Write due changes, apply removal requests and delete old data. Return the time of the next call."""
        if self._store is None:
            return math.inf
        if not self._has_started:
            self._has_started, self._grace_end_s = True, now_s + START_GRACE_S
            self._next_cleanup_s = self._next_removal_poll_s = now_s
        self._now_s = now_s
        if now_s >= self._grace_end_s:
            self._mark_unconfirmed_offline()
        try:
            if now_s >= self._due_s:
                self._write_changes(self._store)
            if now_s >= self._next_removal_poll_s:
                self._next_removal_poll_s = now_s + REMOVAL_POLL_S
                self._removed_devices += (removed := self._store.take_removals())
                self._delete_devices(self._store, removed)
            if now_s >= self._next_cleanup_s:
                self._next_cleanup_s = now_s + CLEANUP_INTERVAL_S
                self._remove_expired(self._store, self._clock())
        except StoreError as error:
            self._due_s = now_s + RETRY_S
            self._readings.clear()  # bound the memory
            if not self._has_failed:
                log.warning("%s. `fedquilt devices` shows old data until writing succeeds", error)
            self._has_failed = True
        return min(self._due_s, self._next_cleanup_s, self._grace_end_s, self._next_removal_poll_s)

    def _mark_unconfirmed_offline(self) -> None:
        self._grace_end_s = math.inf
        for device in self._unconfirmed_devices:
            self._set_status(replace(self._statuses[device], online=False, since=self._clock()), 0.0)

    def take_removed_devices(self) -> list[str]:
        removed, self._removed_devices = self._removed_devices, []
        return removed

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(StoreError):
                self._write_changes(self._store)
            self._store.close()
            self._store = None

    def _status_with_last_seen(self, device: str) -> DeviceStatus:
        status = self._statuses.get(device) or DeviceStatus(device)
        seen = self._last_seen.get(device)
        return status if seen is None else replace(status, seen=seen)

    def _set_status(self, status: DeviceStatus, within_s: float) -> None:
        previous = self._statuses.get(status.device)
        if self._store is None or status == previous or (previous is None and len(self._statuses) >= MAX_DEVICES):
            return
        self._statuses[status.device] = status
        if previous is None or replace(status, seen=None) != replace(previous, seen=None):
            self._changed_devices.add(status.device)
            self._schedule_write(within_s)

    def _add_telemetry(self, device: str, telemetry: Telemetry, time_s: int) -> None:
        begin = time_s // STEPS[0][0] * STEPS[0][0]
        count, previous = self._sums.get(device, (0, None))
        count, previous = (count, previous) if previous is not None and previous.at == begin else (0, None)
        reading = device_status.add_sample(previous, count + 1, telemetry, begin)
        self._sums[device] = (count + 1, reading)
        self._readings[device, begin] = reading
        self._schedule_write(TELEMETRY_DELAY_S)

    def _schedule_write(self, within_s: float) -> None:
        if not self._has_failed:  # after a failure, the next try is scheduled already
            self._due_s = min(self._due_s, self._now_s + within_s)

    def _write_changes(self, store: TelemetryStore) -> None:
        readings = [(device, reading) for (device, _), reading in self._readings.items()]
        if self._is_outage_unwritten:
            store.record_broker_outage(self._outage_start)
            self._is_outage_unwritten = False
        store.write_telemetry([self._status_with_last_seen(device) for device in self._changed_devices], readings)
        self._changed_devices.clear()
        self._readings.clear()
        self._due_s, self._has_failed = math.inf, False

    def _remove_expired(self, store: TelemetryStore, now: float) -> None:
        store.downsample_readings(now)
        expired = {device for device in self._statuses if _is_expired(self._status_with_last_seen(device), now)}
        self._delete_devices(store, expired)

    def _delete_devices(self, store: TelemetryStore, devices: Collection[str]) -> None:
        store.delete_devices(devices)
        for device in devices:
            for values in (self._statuses, self._sums, self._last_seen):
                values.pop(device, None)
            self._changed_devices.discard(device)
            self._unconfirmed_devices.discard(device)
        self._readings = {key: reading for key, reading in self._readings.items() if key[0] not in devices}


def _is_expired(status: DeviceStatus, now: float) -> bool:
    return not status.online and now > max(status.seen or 0.0, status.since or 0.0) + FORGOTTEN_S


class MonitoringExecutor(LinkExecutor):
    """`LinkExecutor` that also records all messages in `DeviceStatusTracker`."""

    def __init__(
        self,
        link: Link,
        fleet: str,
        blob_store: BlobStore,
        epoch: int,
        tracker: DeviceStatusTracker,
        identity: LinkIdentity | None = None,
        location_settings: BlobLocationSettings = BlobLocationSettings(),
    ) -> None:
        super().__init__(link, fleet, blob_store, epoch, identity, location_settings)
        self._tracker = tracker

    def receive_inputs(self, now_s: float) -> Iterator[ExecutorInput]:
        for input in super().receive_inputs(now_s):
            self._tracker.record_message(input, now_s)
            yield input
        for device in self._tracker.take_removed_devices():
            self._remove_device(device)
            yield responses.DeviceChange(device, "removed")

    def _record_contact(self, device: str) -> None:
        super()._record_contact(device)
        self._tracker.record_contact(device)

    def _request_presence(self, device: str) -> None:
        super()._request_presence(device)
        self._tracker.mark_quiet(device)

    def send_pending(self, now_s: float) -> float:
        self._tracker.record_broker_connection(self._link.connected)
        due_s = super().send_pending(now_s)
        for device, waits in self._transfers.queue.take_changes().items():
            self._tracker.record_transfer_turn(device, waits)
        return min(due_s, self._tracker.step(now_s))

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        super().send_task(device, task, now_s)
        self._tracker.record_task(device, task)

    def cancel_task(self, device: str) -> None:
        super().cancel_task(device)
        self._tracker.mark_idle(device)

    def send_ack(self, device: str, ack: wire.Ack) -> None:
        super().send_ack(device, ack)
        self._tracker.record_ack(device, ack)

    def close(self) -> None:
        self._tracker.close()
        super().close()
