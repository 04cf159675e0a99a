"""Execution of a home's rollouts: device reports become events, and events become releases.

All decisions are made by `rounds.rollout`. Events are written before any message that depends on them is sent, so that
a restarted coordinator continues at the same event.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from fedquilt import wire
from fedquilt.coordinator.delivery.executor import KINDS, Executor
from fedquilt.coordinator.fleet.registry import DeviceRegistry
from fedquilt.coordinator.rounds import rollout
from fedquilt.coordinator.rounds.rollout import (
    AnyRolloutEvent,
    ReleaseOffered,
    Rollout,
    RolloutDevice,
    RolloutReverted,
    StatusReported,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import RESEND, FedquiltError, Profile, StoreError, shorten_error
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.coordinator")

SESSION_SETTLE_S: Final = 5.0  # wait after a new broker session, until presence messages have arrived
# interval after which an unfinished release is sent again, so that the device reports its progress
REPORT_REQUEST_INTERVAL_S: Final = 600.0
RESEND_CHECK_S: Final = 2.0  # between two searches for releases to send again
MAX_EVENTS_PER_DEVICE: Final = 100  # events of one device in the log of one rollout, per coordinator process

ObserveRollout = Callable[[Rollout, AnyRolloutEvent], None]


class RolloutRunner:
    def __init__(
        self,
        executor: Executor,
        store: Store,
        registry: DeviceRegistry,
        poll_s: float,
        observe: ObserveRollout = lambda rollout, event: None,
    ) -> None:
        self._executor, self._store, self._registry = executor, store, registry
        self._poll_interval_s, self._observe = poll_s, observe
        self._states: dict[str, Rollout] = {}  # by id, in queueing order
        # (kind, device) -> rollout of the latest offer
        self._owners: dict[tuple[wire.ReleaseKind, str], str] = {}
        self._unwritten: list[tuple[str, wire.ReleaseStatus]] = []
        self._last_contact_s: dict[str, float] = {}  # device -> time of the latest offer or new report
        # (kind, device) -> time of the next send, and sends so far or None after a report
        self._resends: dict[tuple[wire.ReleaseKind, str], tuple[float, int | None]] = {}
        self._event_counts: Counter[tuple[str, str]] = Counter()  # by rollout and device
        self._reported_unreadable: set[str] = set()  # rollouts whose read error was logged
        self._session_started_s = math.inf  # start of the broker session, or of this process
        self._last_poll_s = self._resend_s = -math.inf
        # whether a device connected or a rollout ended since completed rollouts were checked
        self._has_new_devices = True

    def receive_report(self, device: str, message: wire.ReleaseStatus) -> None:
        self._unwritten.append((device, message))

    def resend_releases(self, device: str, now_s: float) -> None:
        """Send a device its latest release of each kind again, even if it has reported an outcome."""
        self._has_new_devices = True
        for kind in KINDS:
            if (kind, device) in self._owners:
                self._send_release(kind, device, now_s)

    def resend_unsettled_releases(self, now_s: float) -> None:
        """Record a new broker session, and resend releases to the devices that have not reported an outcome."""
        self._session_started_s = now_s
        for kind, device in self._owners:
            if self._states[self._owners[kind, device]].device_phase(device) not in rollout.SETTLED:
                self._send_release(kind, device, now_s)

    def step(self, now_s: float) -> float:
        """Read rollouts, record reports and due events, and resend releases. Return the time of the next call."""
        self._session_started_s = min(self._session_started_s, now_s)
        polled = now_s >= self._last_poll_s + self._poll_interval_s
        if polled:
            self._last_poll_s = now_s
            self._load_rollouts_and_requests(now_s)
        if unwritten := self._unwritten:
            self._unwritten = []
            self._record_reports(unwritten, now_s)
        if polled or unwritten:
            self._record_due_events(now_s)
        if now_s >= self._resend_s:
            self._resend_due_releases(now_s)
        return min(self._last_poll_s + self._poll_interval_s, self._resend_s)

    def _load_rollouts_and_requests(self, now_s: float) -> None:
        rollout_log = self._store.rollouts
        for stored in rollout_log.readable_rollouts():
            state = self._states.get(stored.state.id)
            if state is None:
                state = self._states[stored.state.id] = stored.state
                self._update_owners(state.plan.kind, state.offered)
                wall_s = self._store.blob_store.disk.wall_clock_s()
                if (restart_event := rollout.rollout_restart_event(state, wall_s - stored.last_event_time)) is not None:
                    self._record_events([(state.id, restart_event)], now_s)
                    state = self._states[state.id]
                if state.offered:
                    self._send_releases(state, state.offered, now_s)
            if stored.revert_requested:
                self._revert(state, now_s)
        for id, reason in rollout_log.read_errors().items():
            if id not in self._reported_unreadable:
                self._reported_unreadable.add(id)
                log.error("%s", reason)

    def _revert(self, state: Rollout, now_s: float) -> None:
        if not state.is_reverted:
            reason = "by request" if state.is_under_way else ""
            self._record_events([(state.id, RolloutReverted(self._store.rollouts.next_serial(), reason))], now_s)
        self._store.rollouts.request_revert(state.id, False)

    def _record_reports(self, reports: Iterable[tuple[str, wire.ReleaseStatus]], now_s: float) -> None:
        """Record new device reports as events, at most MAX_EVENTS_PER_DEVICE for each rollout and device."""
        latest_states: dict[tuple[str, str], Rollout] = {}
        new_events: list[tuple[str, AnyRolloutEvent]] = []
        for device, message in reports:
            id = self._owners.get((message.kind, device))
            if id is None:
                continue
            state = latest_states.get((id, device), self._states[id])
            event = rollout.event_from_report(state, device, message)
            if event is None:
                continue
            self._event_counts[id, device] += 1
            if (count := self._event_counts[id, device]) > MAX_EVENTS_PER_DEVICE:
                if count == MAX_EVENTS_PER_DEVICE + 1:
                    log.warning("%s sends too many reports on %s: further ones are ignored", device, id)
                continue
            latest_states[id, device] = rollout.apply_rollout_event(state, event)
            new_events.append((id, event))
        self._record_events(new_events, now_s)

    def _record_due_events(self, now_s: float) -> None:
        """Record the due events of all rollouts, unless the broker is disconnected or has just connected."""
        if self._executor.outage.is_disconnected or now_s < self._session_started_s + SESSION_SETTLE_S:
            return
        has_new_devices, self._has_new_devices = self._has_new_devices, False
        for id in list(self._states):
            while (state := self._states[id]).is_under_way or (has_new_devices and state.status == "done"):
                is_queued, fleet = state.status == "queued", self.devices_of_rollout(state)
                incompatible = rollout.incompatible_devices(state.plan, self._known_profiles()) if is_queued else None
                serial = self._store.rollouts.next_serial()
                event = rollout.decide_rollout_event(state, fleet, now_s, serial, incompatible)
                if event is None:
                    break
                self._record_events([(id, event)], now_s)

    def devices_of_rollout(self, state: Rollout) -> dict[str, RolloutDevice]:
        devices = {}
        for device in {*self._registry.devices, *state.offered}:
            record = self._registry.devices.get(device)
            online = record is not None and record.is_online  # a device that has just disconnected is no canary
            offline_since_s = record.offline_since_s if record is not None and not online else -math.inf
            session_started_s = self._session_started_s - rollout.earlier_wait_s(state, device, online)
            last_contact_s = max(session_started_s, self._last_contact_s.get(device, -math.inf), offline_since_s)
            profile = record.profile if record is not None else None
            is_compatible = profile is None or not rollout.incompatibility_reason(state.plan, profile)
            labels = None if profile is None else profile.labels
            devices[device] = RolloutDevice(online, last_contact_s, labels, is_compatible)
        return rollout.select_rollout_devices(state, list(self._states.values()), devices)

    def _known_profiles(self) -> dict[str, Profile]:
        records = self._registry.devices
        return {device: record.profile for device, record in records.items() if record.profile is not None}

    def _record_events(self, new_events: list[tuple[str, AnyRolloutEvent]], now_s: float) -> None:
        if not new_events:
            return
        self._store.rollouts.append_events(new_events)
        for id, event in new_events:
            state = self._states[id] = rollout.apply_rollout_event(self._states[id], event)
            self._observe(state, event)
            match event:
                case ReleaseOffered(devices=devices):
                    self._update_owners(state.plan.kind, devices)
                    self._last_contact_s.update(dict.fromkeys(devices, now_s))
                    self._send_releases(state, devices, now_s)
                case RolloutReverted():
                    self._has_new_devices = True
                    self._update_owners(state.plan.kind, state.offered)
                    self._send_releases(state, state.offered, now_s)
                case StatusReported(device):
                    self._last_contact_s[device] = now_s
                    if state.is_reverted:  # the device may need another release after its report
                        self._send_releases(state, [device], now_s)
                case rollout.RolloutCompleted():
                    self._has_new_devices = True

    def _update_owners(self, kind: wire.ReleaseKind, devices: Iterable[str]) -> None:
        rollouts = [state for state in self._states.values() if state.plan.kind == kind]
        for device in devices:
            offering = [state for state in rollouts if device in state.offered]
            self._owners[kind, device] = rollout.find_device_owner(offering).id

    def _send_releases(self, state: Rollout, devices: Iterable[str], now_s: float) -> None:
        for device in sorted(devices):
            if self._owners[state.plan.kind, device] == state.id:
                self._send_release(state.plan.kind, device, now_s)

    def _send_release(self, kind: wire.ReleaseKind, device: str, now_s: float) -> None:
        """Send a device its release and schedule a resend. After a failure, abort a running rollout."""
        state = self._states[self._owners[kind, device]]
        try:
            self._executor.send_release(device, kind, rollout.release_for_device(state, device))
        except StoreError:
            raise
        except FedquiltError as error:
            if not state.is_reverted:
                log.error(
                    "release of %s could not be sent to %s: %s", state.id, device, error, extra=log_ids(device=device)
                )
            if state.status == "running":
                reverted = RolloutReverted(self._store.rollouts.next_serial(), shorten_error(str(error)))
                self._record_events([(state.id, reverted)], now_s)
            return
        if (phase := state.device_phase(device)) not in rollout.SETTLED:
            sends = self._resends.get((kind, device), (0.0, None))[1] or 0
            due_s = now_s + (REPORT_REQUEST_INTERVAL_S if phase else RESEND.delay_s(sends))
            self._resends[kind, device] = due_s, None if phase else sends + 1
            self._resend_s = min(self._resend_s, due_s)

    def _resend_due_releases(self, now_s: float) -> None:
        views = self._registry.device_views(now_s)
        for (kind, device), (due_s, sends) in list(self._resends.items()):
            state = self._states[self._owners[kind, device]]
            phase = state.device_phase(device)
            if phase in rollout.SETTLED:
                del self._resends[kind, device]
            elif phase and sends is not None:
                self._resends[kind, device] = now_s + REPORT_REQUEST_INTERVAL_S, None
            elif now_s >= due_s and device in views and views[device].online:
                self._send_release(kind, device, now_s)
        due_times = (due_s for due_s, _ in self._resends.values() if due_s > now_s)
        self._resend_s = max(min(due_times, default=math.inf), now_s + RESEND_CHECK_S)
