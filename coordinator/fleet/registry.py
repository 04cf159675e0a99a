"""Devices of a fleet: their latest messages, rebuilt at every start, and whether they can be reached.

A broker publishes the last will of a device, but not after a power loss of its own or behind a bridge. So a device
without messages for QUIET_S is asked for its presence, and counts as silent if there is no answer.
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

RETURN_S = 5.0  # after each connection, until a device that its broker reports offline counts as such


class BrokerOutage:
    """Disconnections of the broker, and the round time lost to them.

    Devices that also lost the broker reconnect after a backoff. A broker that is disconnected when the process starts
    may have been so for long, so the longest backoff is assumed.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0  # seconds so far: of each absence, and of the longest back-off that follows it
        self._since_s: float | None = None
        self._known = False  # whether it has been reached by this process
        self._back_s = -math.inf  # when the devices that it lost as well are back

    @property
    def is_disconnected(self) -> bool:
        return self._since_s is not None

    def lost_since(self, lost_s: float) -> float:
        """Return the seconds lost to disconnection after `lost_s`, or infinity while disconnected."""
        return math.inf if self.is_disconnected else self.lost_s - lost_s

    def can_reach_devices(self, now_s: float) -> bool:
        """Return whether the broker is connected and devices have had time to reconnect."""
        return not self.is_disconnected and now_s >= self._back_s

    def record_connection(self, reached: bool, now_s: float) -> None:
        """Record whether the broker is connected. Add an ended outage and the longest backoff after it to `lost_s`."""
        if not reached and self._since_s is None:
            self._since_s = now_s
        elif reached and self._since_s is not None:
            gone_s, self._since_s = now_s - self._since_s, None
            began = self._known or gone_s < RECONNECT.first_s  # here, or it was not away: a connection takes a moment
            back_off_s = min(gone_s, RECONNECT.max_s) if began else RECONNECT.max_s
            self.lost_s, self._back_s = self.lost_s + gone_s + back_off_s, now_s + max(back_off_s, RETURN_S)
        if reached and not self._known:
            self._known, self._back_s = True, max(self._back_s, now_s + RETURN_S)


QUIET_S: Final = 35.0  # three keep-alive periods (10 s), and above the 30 s between two telemetry messages of an agent
AGAIN_S: Final = 5.0  # between two requests, as each may be lost
REQUESTS: Final = 3  # without an answer, until a device is silent
RATE: Final = 500.0  # devices asked for the first time in a second: 17,000 idle ones in QUIET_S
STEP_S: Final = 1.0  # longest time counted between two steps: messages wait to be read after a longer one


class ReachabilityChange(NamedTuple):
    ask: list[str]  # for their presence
    silent: list[str]


class SilenceDetector:
    """Detector of silent devices.

    Time counts only while the coordinator can receive messages. So neither an outage of the broker nor a suspended
    coordinator makes a device silent.
    """

    def __init__(self) -> None:
        self._heard_s: OrderedDict[str, float] = OrderedDict()  # device -> when it was heard, the earliest first
        self._asked: OrderedDict[str, tuple[float, int]] = OrderedDict()  # device -> when it is due, requests so far
        self._silent: set[str] = set()
        self._now_s = self._counted_s = 0.0  # of the owner's clock, and of the time that counts
        self._left = RATE

    def record_contact(self, device: str) -> bool:
        """Record a message of a device. Return whether the device was silent before."""
        self._asked.pop(device, None)
        self._heard_s[device] = self._counted_s
        self._heard_s.move_to_end(device)
        silent = device in self._silent
        self._silent.discard(device)
        return silent

    def expect_contact(self, device: str) -> None:
        """Wait for a message of a device that only a retained message reports as online.

        The coordinator must have announced itself just before, because every device answers an announcement.
        """
        if device not in self._heard_s and device not in self._asked and device not in self._silent:
            self._asked[device] = self._counted_s + AGAIN_S, 1

    def forget(self, device: str) -> None:
        self._heard_s.pop(device, None)
        self._asked.pop(device, None)
        self._silent.discard(device)

    def step(self, now_s: float, hears: bool) -> ReachabilityChange:
        """Return the devices whose presence is to be requested, and the devices that have become silent."""
        passed_s = min(now_s - self._now_s, STEP_S) if hears else 0.0
        self._now_s, self._counted_s = now_s, self._counted_s + passed_s
        self._left = min(self._left + RATE * passed_s, RATE)
        ask, silent = list[str](), list[str]()
        while self._asked and next(iter(self._asked.values()))[0] <= self._counted_s:
            device, (_, requests) = self._asked.popitem(last=False)
            if requests < REQUESTS:
                ask.append(device)
                self._asked[device] = self._counted_s + AGAIN_S, requests + 1
            else:
                silent.append(device)
        self._silent.update(silent)
        while self._left >= 1 and self._heard_s and self._next_quiet_s() <= self._counted_s:
            device, _ = self._heard_s.popitem(last=False)
            self._left -= 1
            ask.append(device)
            self._asked[device] = self._counted_s + AGAIN_S, 1
        return ReachabilityChange(ask, silent)

    def next_step_s(self) -> float:
        """Return the time of the owner's clock at which `step` may return a device."""
        due_s = [next(iter(self._asked.values()))[0]] if self._asked else []
        due_s += [self._next_quiet_s()] if self._heard_s else []
        return self._now_s + max(min(due_s) - self._counted_s, STEP_S / 2) if due_s else float("inf")

    def _next_quiet_s(self) -> float:
        return next(iter(self._heard_s.values())) + QUIET_S


GRACE_S = 5.0  # a device that returns within this time counts as never gone: no round closes without it
log = logging.getLogger("fedquilt.coordinator")
FRESH_S = 600.0  # older sensor readings are ignored
RETURNS = 2  # of an agent, after which two are certain: a broker that lost its latest state causes one
KINDS_MOST = 256  # kinds of boards whose operating points are shared


@dataclass(slots=True)
class DeviceRecord:
    profile: Profile | None = None
    right: SiteRight | None = None  # None unless the device is a site
    announced: bool = False  # online, by the latest presence
    silent: bool = False  # and yet it does not answer
    boot: str = ""
    agents: tuple[tuple[str, int], ...] = ()  # boot and `seq` of the last two online, the latest last
    returns: int = 0  # times that an agent was online again after another one
    freed: int = 0  # times that disk space was freed
    gone_s: float = -GRACE_S  # when it went offline
    telemetry: Telemetry | None = None  # the last one received
    told_s: float = 0.0  # when it was received
    aside_s: float = -math.inf  # nothing from it is read until then

    @property
    def is_online(self) -> bool:
        return self.announced and not self.silent


class DeviceRegistry:
    """Devices by id, with cached views.

    A view is replaced only when a message or the passing of time changes it. So a query takes time in proportion to
    the changes since the previous query, not to the number of devices. A changed column is copied as one block. Times
    must be given in ascending order.
    """

    def __init__(self) -> None:
        self.devices: dict[str, DeviceRecord] = {}
        self._points: OrderedDict[bytes, tuple[OperatingPoint, ...]] = OrderedDict()  # by their digest
        self._views: dict[str, DeviceSnapshot] = {}  # as of the last query
        self.kinds: Counter[tuple[int, tuple[str, ...]]] = Counter()  # online devices by budget and engines
        self._stale: set[str] = set()  # devices with messages since then
        self._expiring: list[tuple[float, str]] = []  # when time alone changes a device's view
        self._changed: list[str] = []  # every device whose view has changed, once per change
        self._able: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
        self._labels: dict[JobRequirements, tuple[int, LabelColumn]] = {}
        self._costs: tuple[int, CostColumn] = (0, CostColumn())

    def update_presence(self, device: str, message: Presence, now_s: float) -> bool:
        """Store a presence message. Return whether the device has just appeared or restarted."""
        known = self._record_for_update(device)
        appeared = message.online and (not known.is_online or known.boot != message.boot)
        if known.is_online and not message.online:
            known.gone_s = now_s
        if known.boot != message.boot:
            known.telemetry = None  # an earlier process sent it: a full disk, for one, is not known any more
        if message.online:
            self._track_agents(device, known, message)
        known.announced, known.boot = message.online, message.boot
        known.silent = known.silent and message.online
        return appeared

    @staticmethod
    def _track_agents(device: str, known: DeviceRecord, message: Presence) -> None:
        """Record which agents use this id. Warn once if two are online in turn."""
        seqs = dict(known.agents)
        if message.seq <= seqs.get(message.boot, -1):
            return
        if message.boot in seqs and known.agents[-1][0] != message.boot:
            known.returns += 1
            if known.returns == RETURNS:
                log.warning("two agents use the id %s in turn: give each its own `device`", device)
        others = [each for each in known.agents if each[0] != message.boot]
        known.agents = (*others[-1:], (message.boot, message.seq))

    def mark_silent(self, device: str, now_s: float) -> None:
        known = self._record_for_update(device)
        known.silent, known.gone_s = True, now_s

    def mark_returned(self, device: str) -> None:
        self._record_for_update(device).silent = False

    def forget_device(self, device: str, now_s: float) -> None:
        """Delete all data of a device, except its boot id."""
        self.devices[device] = DeviceRecord(boot=self._record_for_update(device).boot, gone_s=now_s - GRACE_S)

    def find_unreachable(self, devices: Iterable[str], now_s: float) -> frozenset[str]:
        """Return the given devices that are silent, or have been offline for GRACE_S."""
        seen = self.device_views(now_s)
        return frozenset(
            device for device in devices if device in seen and not seen[device].online and self.devices[device].boot
        )

    def update_profile(self, device: str, profile: Profile) -> None:
        # devices of a kind have equal operating points, 80 kB in memory, which are stored once
        known = self._record_for_update(device)
        key = hashlib.sha256(msgspec.json.encode(profile.points)).digest()
        profile = msgspec.structs.replace(profile, points=self._points.setdefault(key, profile.points))
        self._points.move_to_end(key)
        while len(self._points) > KINDS_MOST:
            self._points.popitem(last=False)
        known.profile = profile

    def set_site_right(self, device: str, right: SiteRight | None) -> None:
        """Set the site right of a device. If the right has changed, delete the device's profile."""
        known = self.devices.get(device)
        if right == (known.right if known else None):
            return
        known = self._record_for_update(device)
        known.right, known.profile = right, None

    def site_right(self, device: str) -> SiteRight | None:
        known = self.devices.get(device)
        return known.right if known else None

    def update_telemetry(self, device: str, message: Telemetry, now_s: float) -> None:
        known = self._record_for_update(device)
        known.freed += bool(known.telemetry and known.telemetry.disk_full and message.disk_full is False)
        known.telemetry, known.told_s = message, now_s

    def block_device(self, device: str, until_s: float) -> None:
        self._record_for_update(device).aside_s = until_s

    def latest_profile(self, device: str) -> Profile | None:
        known = self.devices.get(device)
        return known.profile if known else None

    def agent_start_key(self, device: str) -> str:
        """Return a text that changes when the device's agent restarts, changes its profile or frees disk space."""
        known = self.devices.get(device)
        if known is None or not known.boot:
            return ""
        about = "" if known.profile is None else hashlib.sha256(wire.encode(known.profile)).hexdigest()[:16]
        return f"{known.boot} {about} {known.freed}"

    def device_views(self, now_s: float) -> dict[str, DeviceSnapshot]:
        """Return the view of every device, online if offline for less than GRACE_S. It must not be changed or kept."""
        self.refresh_views(now_s)
        return self._views

    def online_devices(self, now_s: float) -> set[str]:
        """Return the devices with a profile that are online, or were less than GRACE_S ago."""
        return {device for device, seen in self.device_views(now_s).items() if seen.online and seen.profile is not None}

    def usable_engines(self, engines: tuple[str, ...], now_s: float) -> dict[str, str]:
        """Return the first of `engines` that each online device has, if any. It must not be changed or kept."""
        version = self.refresh_views(now_s)
        upto, found = self._able.get(engines, (0, {}))
        if upto != version:
            for device in self._devices_changed_since(upto):
                seen = self._views[device]
                usable = [engine for engine in engines if seen.profile and engine in seen.profile.engines]
                found.pop(device, None)
                if seen.online and usable:
                    found[device] = usable[0]
            self._able[engines] = (version, found)
        return found

    def eligibility(self, wants: JobRequirements, now_s: float) -> LabelColumn:
        """Return for each known device whether a job may select the device, or the code of the reason why not."""
        version = self.refresh_views(now_s)
        upto, found = self._labels.get(wants, (0, LabelColumn()))
        if upto != version:
            again = self._devices_changed_since(upto)
            found = found.with_values(
                {each: ineligibility_code(self._views[each], wants) or ELIGIBLE for each in again}
            )
            self._labels[wants] = (version, found)
        return found

    def energy_costs(self, now_s: float) -> CostColumn:
        """Return the joules per operation by device, offline devices included, as far as profiles have them."""
        version = self.refresh_views(now_s)
        upto, found = self._costs
        if upto != version:
            profiles = {device: self._views[device].profile for device in self._devices_changed_since(upto)}
            self._costs = (version, found := found.with_values(selection.energy_costs(profiles)))
        return found

    def _record_for_update(self, device: str) -> DeviceRecord:
        self._stale.add(device)
        return self.devices.setdefault(device, DeviceRecord())

    def refresh_views(self, now_s: float) -> int:
        """Bring all views up to date. Return a number that changes whenever a view does."""
        while self._expiring and self._expiring[0][0] <= now_s:
            self._stale.add(heapq.heappop(self._expiring)[1])
        for device in sorted(self._stale):
            known = self.devices[device]
            back_s, fresh_s = known.gone_s + GRACE_S, known.told_s + FRESH_S
            told = known.telemetry if now_s < fresh_s else None
            online = known.is_online or (now_s < back_s and not known.silent)
            view = DeviceSnapshot(online, known.profile, told, now_s < known.aside_s, known.silent)
            if now_s < known.aside_s:
                heapq.heappush(self._expiring, (known.aside_s, device))
            if not known.is_online and now_s < back_s:
                heapq.heappush(self._expiring, (back_s, device))
            if told is not None:
                heapq.heappush(self._expiring, (fresh_s, device))
            if view != (before := self._views.get(device)):
                for seen, change in ((before, -1), (view, 1)):
                    if seen is not None and seen.online and seen.profile is not None:
                        self.kinds[kind := (seen.profile.budget_bytes, seen.profile.engines)] += change
                        if not self.kinds[kind]:
                            del self.kinds[kind]
                self._views[device] = view
                self._changed.append(device)
        self._stale.clear()
        if len(self._changed) > 1000 + 4 * len(self._views):  # boards send telemetry for years
            self._changed = list(self._views)
            self._able.clear()
            self._labels.clear()
            self._costs = (0, CostColumn())
        return len(self._changed)

    def _devices_changed_since(self, version: int) -> Iterable[str]:
        return dict.fromkeys(self._changed[version:])
