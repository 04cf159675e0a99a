"""Devices of a fleet: their latest messages, rebuilt at every start, and whether they can be reached.

A broker publishes the last will of a device, but not after its own power loss or behind a bridge. So a device without
messages for QUIET_LIMIT_S receives presence requests, and counts as silent if it does not answer.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.coordinator.device_columns import ELIGIBLE, CostColumn, LabelColumn
from fedquilt.coordinator.rounds import selection
from fedquilt.coordinator.rounds.selection import DeviceSnapshot, JobRequirements, ineligibility_code
from fedquilt.core import OperatingPoint, Profile, SiteRight
from fedquilt.transport.mqtt.connection import RECONNECT
from fedquilt.wire import Presence, Telemetry

RECONNECT_GRACE_S = 5.0  # time for devices to reconnect after each connection of the broker


class BrokerOutage:
    """Disconnections of the broker, and the round time lost to them.

    Devices that also lost the broker reconnect after a backoff. If the broker is disconnected when the process starts,
    the longest backoff is assumed, since the outage may have started long before.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0  # seconds of all ended outages, each with the longest backoff of a device
        self._outage_start_s: float | None = None
        self._was_connected = False  # whether this process has been connected before
        self._reconnected_s = -math.inf  # time at which all devices have had time to reconnect

    @property
    def is_disconnected(self) -> bool:
        return self._outage_start_s is not None

    def lost_since(self, lost_s: float) -> float:
        """Return the seconds lost since `self.lost_s` was `lost_s`, or infinity during an outage."""
        return math.inf if self.is_disconnected else self.lost_s - lost_s

    def can_reach_devices(self, now_s: float) -> bool:
        """Return whether the broker is connected and devices have had time to reconnect."""
        return not self.is_disconnected and now_s >= self._reconnected_s

    def record_connection(self, is_connected: bool, now_s: float) -> None:
        """Record whether the broker is connected. After an outage, add its seconds and a backoff to `lost_s`."""
        if not is_connected and self._outage_start_s is None:
            self._outage_start_s = now_s
        elif is_connected and self._outage_start_s is not None:
            outage_s, self._outage_start_s = now_s - self._outage_start_s, None
            # a short outage before the first connection is only the time to connect
            has_outage_start = self._was_connected or outage_s < RECONNECT.first_s
            backoff_s = min(outage_s, RECONNECT.max_s) if has_outage_start else RECONNECT.max_s
            self.lost_s = self.lost_s + outage_s + backoff_s
            self._reconnected_s = now_s + max(backoff_s, RECONNECT_GRACE_S)
        if is_connected and not self._was_connected:
            self._was_connected, self._reconnected_s = True, max(self._reconnected_s, now_s + RECONNECT_GRACE_S)


QUIET_LIMIT_S: Final = 35.0  # longer than three keep-alive periods (10 s) and the telemetry interval of an agent (30 s)
REQUEST_INTERVAL_S: Final = 5.0  # between two requests to a device
MAX_REQUESTS: Final = 3  # unanswered requests after which a device is silent
REQUESTS_PER_S: Final = 500.0  # first requests per second, enough for 17,000 idle devices in QUIET_LIMIT_S
MAX_STEP_S: Final = 1.0  # longest counted time between two steps, since messages wait unread during a longer step


class ReachabilityChange(NamedTuple):
    devices_to_request: list[str]  # devices whose presence is to be requested
    silent: list[str]  # devices that have become silent


class SilenceDetector:
    """Detector of silent devices.

    Time counts only while the coordinator can receive messages. So neither an outage of the broker nor a suspended
    coordinator makes a device silent.
    """

    def __init__(self) -> None:
        # device -> time of the latest message, earliest first
        self._last_contact_s: OrderedDict[str, float] = OrderedDict()
        self._requests: OrderedDict[str, tuple[float, int]] = OrderedDict()  # device -> next request, requests so far
        self._silent: set[str] = set()
        self._now_s = self._listening_s = 0.0  # time of the owner's clock, and counted time
        self._request_budget = REQUESTS_PER_S

    def record_contact(self, device: str) -> bool:
        """Record a message of a device. Return whether the device was silent before."""
        self._requests.pop(device, None)
        self._last_contact_s[device] = self._listening_s
        self._last_contact_s.move_to_end(device)
        silent = device in self._silent
        self._silent.discard(device)
        return silent

    def expect_contact(self, device: str) -> None:
        """Expect a message of a device whose only sign of presence is a retained message.

        The coordinator must have announced itself just before, because every device answers an announcement.
        """
        if device not in self._last_contact_s and device not in self._requests and device not in self._silent:
            self._requests[device] = self._listening_s + REQUEST_INTERVAL_S, 1

    def forget(self, device: str) -> None:
        self._last_contact_s.pop(device, None)
        self._requests.pop(device, None)
        self._silent.discard(device)

    def step(self, now_s: float, can_receive: bool) -> ReachabilityChange:
        """Advance the clock. Return the devices to request presence from, and newly silent devices."""
        elapsed_s = min(now_s - self._now_s, MAX_STEP_S) if can_receive else 0.0
        self._now_s, self._listening_s = now_s, self._listening_s + elapsed_s
        self._request_budget = min(self._request_budget + REQUESTS_PER_S * elapsed_s, REQUESTS_PER_S)
        devices_to_request, silent_devices = list[str](), list[str]()
        while self._requests and next(iter(self._requests.values()))[0] <= self._listening_s:
            device, (_, requests) = self._requests.popitem(last=False)
            if requests < MAX_REQUESTS:
                devices_to_request.append(device)
                self._requests[device] = self._listening_s + REQUEST_INTERVAL_S, requests + 1
            else:
                silent_devices.append(device)
        self._silent.update(silent_devices)
        while self._request_budget >= 1 and self._last_contact_s and self._next_quiet_s() <= self._listening_s:
            device, _ = self._last_contact_s.popitem(last=False)
            self._request_budget -= 1
            devices_to_request.append(device)
            self._requests[device] = self._listening_s + REQUEST_INTERVAL_S, 1
        return ReachabilityChange(devices_to_request, silent_devices)

    def next_step_s(self) -> float:
        """Return the time at which `step` may next return a device, or infinity."""
        due_times = [next(iter(self._requests.values()))[0]] if self._requests else []
        due_times += [self._next_quiet_s()] if self._last_contact_s else []
        return self._now_s + max(min(due_times) - self._listening_s, MAX_STEP_S / 2) if due_times else float("inf")

    def _next_quiet_s(self) -> float:
        return next(iter(self._last_contact_s.values())) + QUIET_LIMIT_S


OFFLINE_GRACE_S = 5.0  # a device that reconnects within this time counts as online throughout
log = logging.getLogger("fedquilt.coordinator")
FRESH_S = 600.0  # older sensor readings are ignored
MAX_AGENT_RETURNS = 2  # returns of an agent that prove a duplicate id, since a broker that lost its state causes one
MAX_POINT_TABLES = 256  # cached tables of operating points, one for each kind of board


@dataclass(slots=True)
class DeviceRecord:
    profile: Profile | None = None
    site_right: SiteRight | None = None  # None unless the device is a site
    is_announced: bool = False  # online according to the latest presence message
    silent: bool = False  # without an answer to presence requests
    boot: str = ""
    agents: tuple[tuple[str, int], ...] = ()  # `boot` and `seq` of the last two agents online, the latest last
    return_count: int = 0  # times that an agent was online again after another agent
    freed_count: int = 0  # times that disk space was freed
    offline_since_s: float = -OFFLINE_GRACE_S
    telemetry: Telemetry | None = None  # latest telemetry
    telemetry_s: float = 0.0  # time of its arrival
    blocked_until_s: float = -math.inf  # messages of the device are ignored until then
    is_removed: bool = False  # by a user, and without a message since

    @property
    def is_online(self) -> bool:
        return self.is_announced and not self.silent


class DeviceRegistry:
    """Devices by id, with cached views.

    A view is replaced only when a message or the passing of time changes it. So a query takes time in proportion to the
    changes since the previous query, not to the number of devices. A changed column is copied as one block. `now_s`
    must not decrease between calls.
    """

    def __init__(self) -> None:
        self.devices: dict[str, DeviceRecord] = {}
        self._points: OrderedDict[bytes, tuple[OperatingPoint, ...]] = OrderedDict()  # by digest
        self._views: dict[str, DeviceSnapshot] = {}  # at the time of the latest query
        self.kinds: Counter[tuple[int, tuple[str, ...]]] = Counter()  # online devices by budget and engines
        self._stale_devices: set[str] = set()  # devices with messages since then
        self._expirations: list[tuple[float, str]] = []  # heap of (time at which a view changes, device)
        self._changed_devices: list[str] = []  # device of each changed view, once per change
        self._usable_engines: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
        self._labels: dict[JobRequirements, tuple[int, LabelColumn]] = {}
        self._costs: tuple[int, CostColumn] = (0, CostColumn())

    def update_presence(self, device: str, message: Presence, now_s: float) -> bool:
        """Store a presence message. Return whether the device has come online or restarted."""
        record = self._record_for_update(device)
        has_appeared = message.online and (not record.is_online or record.boot != message.boot)
        if record.is_online and not message.online:
            record.offline_since_s = now_s
        if record.boot != message.boot:
            record.telemetry = None  # the restarted agent may report other values, such as free disk space
        if message.online:
            self._track_agents(device, record, message)
        record.is_announced, record.boot = message.online, message.boot
        record.is_removed = record.is_removed and not message.online
        record.silent = record.silent and message.online
        return has_appeared

    @staticmethod
    def _track_agents(device: str, record: DeviceRecord, message: Presence) -> None:
        """Record which agents use a device id, and warn once if two agents alternate."""
        seqs = dict(record.agents)
        if message.seq <= seqs.get(message.boot, -1):
            return
        if message.boot in seqs and record.agents[-1][0] != message.boot:
            record.return_count += 1
            if record.return_count == MAX_AGENT_RETURNS:
                log.warning(
                    "device id %s is used by two agents: set a different `device` in agent.toml of each", device
                )
        other_agents = [agent for agent in record.agents if agent[0] != message.boot]
        record.agents = (*other_agents[-1:], (message.boot, message.seq))

    def mark_silent(self, device: str, now_s: float) -> None:
        record = self._record_for_update(device)
        record.silent, record.offline_since_s = True, now_s

    def mark_returned(self, device: str) -> None:
        self._record_for_update(device).silent = False

    def forget_device(self, device: str, now_s: float) -> None:
        """Delete all data of a device, except its boot id."""
        self.devices[device] = DeviceRecord(
            boot=self._record_for_update(device).boot, offline_since_s=now_s - OFFLINE_GRACE_S, is_removed=True
        )

    def find_unreachable(self, devices: Iterable[str], now_s: float) -> frozenset[str]:
        """Return the given devices that are silent, or have been offline for OFFLINE_GRACE_S."""
        snapshots = self.device_views(now_s)
        return frozenset(
            device
            for device in devices
            if device in snapshots and not snapshots[device].online and self.devices[device].boot
        )

    def update_profile(self, device: str, profile: Profile) -> None:
        # devices of a kind have equal operating points, 80 kB in memory, which are stored once
        record = self._record_for_update(device)
        key = hashlib.sha256(msgspec.json.encode(profile.points)).digest()
        profile = msgspec.structs.replace(profile, points=self._points.setdefault(key, profile.points))
        self._points.move_to_end(key)
        while len(self._points) > MAX_POINT_TABLES:
            self._points.popitem(last=False)
        record.profile = profile

    def set_site_right(self, device: str, right: SiteRight | None) -> None:
        """Set a device's site right. A change deletes the profile, because the old right limited its values."""
        record = self.devices.get(device)
        if right == (record.site_right if record else None):
            return
        record = self._record_for_update(device)
        record.site_right, record.profile = right, None

    def site_right(self, device: str) -> SiteRight | None:
        record = self.devices.get(device)
        return record.site_right if record else None

    def update_telemetry(self, device: str, message: Telemetry, now_s: float) -> None:
        record = self._record_for_update(device)
        record.freed_count += bool(record.telemetry and record.telemetry.disk_full and message.disk_full is False)
        record.telemetry, record.telemetry_s = message, now_s

    def block_device(self, device: str, until_s: float) -> None:
        self._record_for_update(device).blocked_until_s = until_s

    def latest_profile(self, device: str) -> Profile | None:
        record = self.devices.get(device)
        return record.profile if record else None

    def agent_start_key(self, device: str) -> str:
        """Return a text that changes if the agent restarts, changes its profile or frees disk space.

        The text is "" for an unknown device.
        """
        record = self.devices.get(device)
        if record is None or not record.boot:
            return ""
        profile_digest = "" if record.profile is None else hashlib.sha256(wire.encode(record.profile)).hexdigest()[:16]
        return f"{record.boot} {profile_digest} {record.freed_count}"

    def device_views(self, now_s: float) -> dict[str, DeviceSnapshot]:
        """Return the view of every device. A device counts as online for OFFLINE_GRACE_S after it disconnects.

        The result must not be changed, and is valid until the next query.
        """
        self.refresh_views(now_s)
        return self._views

    def online_devices(self, now_s: float) -> set[str]:
        """Return the devices with a profile that are online, or were less than OFFLINE_GRACE_S ago."""
        return {
            device
            for device, snapshot in self.device_views(now_s).items()
            if snapshot.online and snapshot.profile is not None
        }

    def usable_engines(self, engines: tuple[str, ...], now_s: float) -> dict[str, str]:
        """Return the first of `engines` that each online device has, for devices with any.

        The result must not be changed, and is valid until the next query.
        """
        version = self.refresh_views(now_s)
        cached_version, engine_by_device = self._usable_engines.get(engines, (0, {}))
        if cached_version != version:
            for device in self._devices_changed_since(cached_version):
                snapshot = self._views[device]
                usable_names = [engine for engine in engines if snapshot.profile and engine in snapshot.profile.engines]
                engine_by_device.pop(device, None)
                if snapshot.online and usable_names:
                    engine_by_device[device] = usable_names[0]
            self._usable_engines[engines] = (version, engine_by_device)
        return engine_by_device

    def eligibility(self, requirements: JobRequirements, now_s: float) -> LabelColumn:
        """Return the label of each known device: ELIGIBLE, or the code why the device cannot be selected."""
        version = self.refresh_views(now_s)
        cached_version, labels = self._labels.get(requirements, (0, LabelColumn()))
        if cached_version != version:
            changed_devices = self._devices_changed_since(cached_version)
            labels = labels.with_values(
                {
                    device: ineligibility_code(self._views[device], requirements) or ELIGIBLE
                    for device in changed_devices
                }
            )
            self._labels[requirements] = (version, labels)
        return labels

    def energy_costs(self, now_s: float) -> CostColumn:
        """Return the joules per FLOP of all devices whose profile contains them, online or offline."""
        version = self.refresh_views(now_s)
        cached_version, costs = self._costs
        if cached_version != version:
            profiles = {device: self._views[device].profile for device in self._devices_changed_since(cached_version)}
            self._costs = (version, costs := costs.with_values(selection.energy_costs(profiles)))
        return costs

    def _record_for_update(self, device: str) -> DeviceRecord:
        self._stale_devices.add(device)
        return self.devices.setdefault(device, DeviceRecord())

    def refresh_views(self, now_s: float) -> int:
        """Bring all views up to date. Return a number that changes whenever a view does."""
        while self._expirations and self._expirations[0][0] <= now_s:
            self._stale_devices.add(heapq.heappop(self._expirations)[1])
        for device in sorted(self._stale_devices):
            record = self.devices[device]
            grace_end_s, telemetry_end_s = record.offline_since_s + OFFLINE_GRACE_S, record.telemetry_s + FRESH_S
            telemetry = record.telemetry if now_s < telemetry_end_s else None
            is_online = record.is_online or (now_s < grace_end_s and not record.silent)
            is_blocked = now_s < record.blocked_until_s
            view = DeviceSnapshot(is_online, record.profile, telemetry, is_blocked, record.silent, record.is_removed)
            if now_s < record.blocked_until_s:
                heapq.heappush(self._expirations, (record.blocked_until_s, device))
            if not record.is_online and now_s < grace_end_s:
                heapq.heappush(self._expirations, (grace_end_s, device))
            if telemetry is not None:
                heapq.heappush(self._expirations, (telemetry_end_s, device))
            if view != (previous := self._views.get(device)):
                for snapshot, change in ((previous, -1), (view, 1)):
                    if snapshot is not None and snapshot.online and snapshot.profile is not None:
                        self.kinds[kind := (snapshot.profile.budget_bytes, snapshot.profile.engines)] += change
                        if not self.kinds[kind]:
                            del self.kinds[kind]
                self._views[device] = view
                self._changed_devices.append(device)
        self._stale_devices.clear()
        if len(self._changed_devices) > 1000 + 4 * len(self._views):  # bound the memory of a long-running process
            self._changed_devices = list(self._views)
            self._usable_engines.clear()
            self._labels.clear()
            self._costs = (0, CostColumn())
        return len(self._changed_devices)

    def _devices_changed_since(self, version: int) -> Iterable[str]:
        return dict.fromkeys(self._changed_devices[version:])
