"""The fleet as last seen: who is online, with what profile. Rebuilt from retained messages at every start."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedquilt.coordinator.eligible import Seen
from fedquilt.core import Profile
from fedquilt.wire import Presence, Telemetry

GRACE_S = 20.0  # a device that drops out and is back within this was never gone
FRESH_S = 600.0  # what sensors said longer ago than this says nothing of now


@dataclass
class Known:
    """One device."""

    profile: Profile | None = None
    online: bool = False
    boot: str = ""
    gone_s: float = -GRACE_S  # when it went offline
    telemetry: Telemetry | None = None  # the last that it told
    told_s: float = 0.0  # when


@dataclass
class Registry:
    """Devices by id."""

    devices: dict[str, Known] = field(default_factory=dict)

    def presence(self, device: str, message: Presence, now_s: float) -> bool:
        """Take note; True when the device has just appeared, or started anew."""
        known = self.devices.setdefault(device, Known())
        appeared = message.online and (not known.online or known.boot != message.boot)
        if known.online and not message.online:
            known.gone_s = now_s
        known.online, known.boot = message.online, message.boot
        return appeared

    def profile(self, device: str, profile: Profile) -> None:
        self.devices.setdefault(device, Known()).profile = profile

    def telemetry(self, device: str, message: Telemetry, now_s: float) -> None:
        known = self.devices.setdefault(device, Known())
        known.telemetry, known.told_s = message, now_s

    def profile_of(self, device: str) -> Profile | None:
        """What a device has said of itself."""
        known = self.devices.get(device)
        return known.profile if known else None

    def seen(self, now_s: float) -> dict[str, Seen]:
        """All devices ever heard of, as they are known now; online: or were a moment ago."""
        return {
            device: Seen(
                known.online or now_s - known.gone_s < GRACE_S,
                known.profile,
                known.telemetry if now_s - known.told_s < FRESH_S else None,
            )
            for device, known in self.devices.items()
        }

    def online(self, now_s: float) -> set[str]:
        """Devices that are there, or were a moment ago, and have said what they are."""
        return {device for device, seen in self.seen(now_s).items() if seen.online and seen.profile is not None}

    def able(self, engines: tuple[str, ...], now_s: float) -> dict[str, str]:
        """Devices online that have one of the engines -> the first of `engines` that they have."""
        found = {}
        for device in self.online(now_s):
            profile = self.devices[device].profile
            usable = [engine for engine in engines if profile and engine in profile.engines]
            if usable:
                found[device] = usable[0]
        return found
