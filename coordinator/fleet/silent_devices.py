"""Detection of silent devices that their broker reports as online. No I/O and no clock.

A broker publishes the last will of a device, but not after a power loss of its own or behind a bridge. So a device
without messages for QUIET_S is asked for its presence, and counts as silent if there is no answer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

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
        """Return the devices whose presence is to be requested, and the devices that have become silent.

        Args:
            now_s: The time of the owner's clock, in seconds.
            hears: Whether messages of devices can arrive.
        """
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
