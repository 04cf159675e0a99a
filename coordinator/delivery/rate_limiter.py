"""Rate limiter that slows devices which send too much, and then blocks them for a while.

Costs are seconds of work, estimated from the handling of a message. Each device may permanently use DEVICE_SHARE of the
coordinator's time, and BURST_S at once. Work that the coordinator requests is credited to the device: a task is a
credit for the messages of its round, and the first transfer of a model chunk is a credit for the request of the chunk.
Messages above the limit are dropped. The protocol repeats all messages, so an honest device is only slower. A device
that continues is blocked for BLOCK_S. No I/O and no clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from fedquilt import wire
from fedquilt.core import WireError
from fedquilt.host.logs import log_ids
from fedquilt.transport.link import Link, LinkWrapper, Message

DEVICE_SHARE: Final = 0.0075  # share of the coordinator's time per device
BURST_S: Final = 0.25
MESSAGE_S: Final = 1e-3  # cost of a single message, ten times the cost of a message in a batch
HELLO_S: Final = 2e-3  # cost of a handshake message
BYTE_S: Final = 10e-9  # cost of decoding a byte
ROUND_S: Final = 20 * MESSAGE_S  # credit for a round's task, which takes about ten messages
MAX_DROPPED: Final = 100  # dropped messages after which a device is blocked
CALM_S: Final = 60.0  # time without a dropped message after which the count restarts
BLOCK_S: Final = 600.0  # duration of a block
Verdict = Literal["processed", "slowed", "dropped", "blocked"]
"""Decision on a message: process, drop as the first in a row, drop as a later one, or drop and block the device."""


@dataclass
class _TokenBucket:
    balance_s: float = BURST_S
    updated_s: float = -math.inf  # time of the latest update
    dropped_count: int = 0
    dropped_s: float = -math.inf  # time of the latest dropped message
    blocked_until_s: float = -math.inf  # end of the block


@dataclass
class RateLimiter:
    """Token buckets, one for each device."""

    _buckets: dict[str, _TokenBucket] = field(default_factory=dict)
    _cleanup_size: int = 1024  # number of buckets above which full ones are removed

    def admit_message(self, device: str, size: int, now_s: float, cost_s: float = MESSAGE_S) -> Verdict:
        """Decide whether to process a message of `size` bytes. Only processed messages are charged."""
        bucket = self._refill_bucket(device, now_s)
        if now_s < bucket.blocked_until_s:
            return "dropped"
        if bucket.balance_s >= 0:
            bucket.balance_s -= cost_s + size * BYTE_S
            return "processed"
        if now_s >= bucket.dropped_s + CALM_S:
            bucket.dropped_count = 0
        bucket.dropped_count, bucket.dropped_s = bucket.dropped_count + 1, now_s
        if bucket.dropped_count > MAX_DROPPED:
            bucket.blocked_until_s, bucket.dropped_count = now_s + BLOCK_S, 0
            return "blocked"
        return "slowed" if bucket.dropped_count == 1 else "dropped"

    def charge_time(self, device: str, seconds: float, now_s: float) -> None:
        """Charge a device for processing time. A negative time is a credit. The balance stays within BURST_S."""
        bucket = self._refill_bucket(device, now_s)
        bucket.balance_s = min(max(bucket.balance_s - seconds, -BURST_S), BURST_S)

    def _refill_bucket(self, device: str, now_s: float) -> _TokenBucket:
        bucket = self._buckets.get(device)
        if bucket is None:
            if len(self._buckets) >= self._cleanup_size:
                self._remove_full_buckets(now_s)
                self._cleanup_size = max(1024, 2 * len(self._buckets))  # the removal visits every bucket
            bucket = self._buckets[device] = _TokenBucket(updated_s=now_s)
        bucket.balance_s = min(bucket.balance_s + DEVICE_SHARE * max(now_s - bucket.updated_s, 0.0), BURST_S)
        bucket.updated_s = now_s
        return bucket

    def _remove_full_buckets(self, now_s: float) -> None:
        for device, bucket in list(self._buckets.items()):
            is_full = bucket.balance_s + DEVICE_SHARE * (now_s - bucket.updated_s) >= BURST_S
            if is_full and now_s >= max(bucket.blocked_until_s, bucket.dropped_s + CALM_S):
                del self._buckets[device]


log = logging.getLogger("fedquilt.coordinator")
# devices with subscriptions by name. With more, the messages of a blocked device are received and dropped
MAX_NAMED_SUBSCRIPTIONS: Final = 4096
DISCOVERY_INTERVAL_S: Final = 60.0  # interval of subscriptions to all presences, to find unknown devices
DISCOVERY_S: Final = 1.0  # duration of such a subscription, in which flooding messages arrive too


class RateLimitedLink(LinkWrapper):
    """Link that drops the messages of devices above their rate limit."""

    def __init__(self, link: Link, topics: wire.Topics) -> None:
        super().__init__(link)
        self.now_s = 0.0  # the owner's clock; set before `receive`
        self._topics, self._limiter = topics, RateLimiter()
        self._known_devices: dict[str, None] = {}  # devices, in the order of their first message
        self._blocked_until_s: dict[str, float] = {}  # device -> end of the block
        self._newly_blocked: list[str] = []  # blocked devices to be reported
        self._subscribes_per_device = False
        self._next_discovery_s = math.inf  # start of the next discovery
        self._discovery_end_s = math.inf  # end of the running discovery

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe to the topics of all devices, unless some device is blocked.

        In that case the link subscribes to each other device by name, and cancels the common subscription.
        """
        if not self._subscribes_per_device:
            self._link.subscribe(filters)
        else:  # the broker may still have only the earlier subscription
            self._link.unsubscribe(filters)

    def receive(self) -> list[Message]:
        self._update_subscriptions()
        return [message for message in self._link.receive() if self._admit_received(message)]

    def take_blocked_devices(self) -> list[str]:
        blocked, self._newly_blocked = self._newly_blocked, []
        return blocked

    def charge_time(self, device: str, seconds: float) -> None:
        self._limiter.charge_time(device, seconds, self.now_s)

    def admit_message(self, device: str, size: int, cost_s: float = MESSAGE_S) -> bool:
        """Return whether to process a message, and count the message. Block a flooding device."""
        verdict = self._limiter.admit_message(device, size, self.now_s, cost_s)
        if verdict == "slowed":
            ids = log_ids(device=device)
            log.warning("%s exceeds its rate limit: some of its messages are dropped", device, extra=ids)
        elif verdict == "blocked":
            self._block_device(device)
        return verdict == "processed"

    def next_s(self) -> float:
        """Return the time at which `receive` must be called even without a message."""
        if not self._subscribes_per_device:
            return math.inf
        return min((*self._blocked_until_s.values(), self._discovery_end_s, self._next_discovery_s))

    def _admit_received(self, message: Message) -> bool:
        device = wire.device_from_topic(message.topic)
        if not device:
            return True
        if device not in self._known_devices:
            self._register_new_device(device)
        if device in self._blocked_until_s:
            return False
        try:
            route = wire.parse_topic(message.topic)
        except WireError:
            return self.admit_message(device, len(message.payload))
        if route.message_type is None:  # a chunk, which the coordinator has requested or charges later
            return True
        return self.admit_message(device, len(message.payload), HELLO_S if route.subtopic == "hello" else MESSAGE_S)

    def _register_new_device(self, device: str) -> None:
        if len(self._known_devices) <= MAX_NAMED_SUBSCRIPTIONS:
            self._known_devices[device] = None
            if self._subscribes_per_device and len(self._known_devices) <= MAX_NAMED_SUBSCRIPTIONS:
                self._link.subscribe(self._device_filters([device]))
            elif self._subscribes_per_device:
                self._subscribe_to_all()

    def _block_device(self, device: str) -> None:
        """Drop a device's messages for BLOCK_S, and unsubscribe unless the fleet has too many devices."""
        self._newly_blocked.append(device)
        self._blocked_until_s[device] = self.now_s + BLOCK_S
        if self._subscribes_per_device:
            self._link.unsubscribe(self._device_filters([device]))
        elif len(self._known_devices) <= MAX_NAMED_SUBSCRIPTIONS:
            self._subscribes_per_device = True
            self._next_discovery_s = self.now_s + DISCOVERY_INTERVAL_S
            self._discovery_end_s = math.inf
            admitted_devices = [name for name in self._known_devices if name not in self._blocked_until_s]
            self._link.subscribe(self._device_filters(admitted_devices))
            self._link.unsubscribe(self._topics.coordinator_filters())

    def _subscribe_to_all(self) -> None:
        self._subscribes_per_device, self._next_discovery_s, self._discovery_end_s = False, math.inf, math.inf
        self._link.subscribe(self._topics.coordinator_filters())
        self._link.unsubscribe([*self._device_filters(list(self._known_devices)), self._presence_filter])

    def _update_subscriptions(self) -> None:
        """Unblock devices after BLOCK_S. While devices are blocked, discover new devices at intervals."""
        unblocked = [device for device, until_s in self._blocked_until_s.items() if self.now_s >= until_s]
        for device in unblocked:
            del self._blocked_until_s[device]
        if not self._subscribes_per_device:
            return
        if not self._blocked_until_s:
            return self._subscribe_to_all()
        if unblocked:
            self._link.subscribe(self._device_filters(unblocked))
        if self.now_s >= self._discovery_end_s:
            self._link.unsubscribe([self._presence_filter])
            self._next_discovery_s, self._discovery_end_s = self.now_s + DISCOVERY_INTERVAL_S, math.inf
        elif self.now_s >= self._next_discovery_s:
            self._link.subscribe([self._presence_filter])
            self._next_discovery_s, self._discovery_end_s = math.inf, self.now_s + DISCOVERY_S

    @property
    def _presence_filter(self) -> str:
        return f"{self._topics.root}/dev/+/up/presence"

    def _device_filters(self, devices: Sequence[str]) -> list[str]:
        return [f"{self._topics.root}/dev/{device}/up/#" for device in devices]
