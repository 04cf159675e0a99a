"""Link of a coordinator with a rate limit for each device.

The limit applies before signatures are checked, as checking takes time as well. A blocked device is unsubscribed, so
that the broker drops its messages: reading a message takes 50 to 100 microseconds even if the message is dropped. MQTT
has no subscription to all devices but one. So while a device is blocked, each known device is subscribed to by name,
and new devices are found through their retained presence from time to time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from fedquilt import wire
from fedquilt.coordinator.conduct import ASIDE_S, HELLO_S, MESSAGE_S, Conduct
from fedquilt.core import WireError
from fedquilt.logs import log_ids
from fedquilt.transport.around import Around
from fedquilt.transport.link import Link, Message

log = logging.getLogger("fedquilt.coordinator")

KNOWN_MOST: Final = 4096  # devices that are subscribed to by name; with more, what a flood sends is read and dropped
LOOK_S: Final = 60.0  # between two looks for devices that are not known yet
LOOKED_S: Final = 1.0  # that a look lasts: what is flooded with comes as well


class Gate(Around):
    """Link that drops the messages of devices above their rate limit.

    Args:
        link: Link to the broker.
        topics: Topics of the fleet.
    """

    def __init__(self, link: Link, topics: wire.Topics) -> None:
        super().__init__(link)
        self.now_s = 0.0  # the owner's clock; set before `receive`
        self._topics, self._conduct = topics, Conduct()
        self._known: dict[str, None] = {}  # devices, in the order of their first message
        self._aside: dict[str, float] = {}  # device -> until when it is not read
        self._flooded: list[str] = []  # set aside, and not told yet
        self._narrow = False  # devices are subscribed to by name
        self._look_s = math.inf  # when the next look begins
        self._looked_s = math.inf  # or the present one ends

    def subscribe(self, filters: Sequence[str]) -> None:
        if not self._narrow:
            self._link.subscribe(filters)
        else:  # the broker may know of the earlier subscription alone
            self._link.unsubscribe(filters)

    def receive(self) -> list[Message]:
        self._update_subscriptions()
        return [message for message in self._link.receive() if self._is_admitted(message)]

    # -- of devices --

    def take_blocked_devices(self) -> list[str]:
        flooded, self._flooded = self._flooded, []
        return flooded

    def charge_time(self, device: str, seconds: float) -> None:
        self._conduct.charge_time(device, seconds, self.now_s)

    def admit_message(self, device: str, size: int, cost_s: float = MESSAGE_S) -> bool:
        """Return whether to process a message. Block a device that keeps sending too much."""
        verdict = self._conduct.admit_message(device, size, self.now_s, cost_s)
        if verdict == "slowed":
            ids = log_ids(device=device)
            log.warning("%s sends more than can be answered: what comes too fast is dropped", device, extra=ids)
        elif verdict == "aside":
            self._block_device(device)
        return verdict == "taken"

    def next_s(self) -> float:
        """Return the time at which `receive` must be called even without a message."""
        return min((*self._aside.values(), self._looked_s, self._look_s)) if self._narrow else math.inf

    # -- within --

    def _is_admitted(self, message: Message) -> bool:
        device = wire.device_from_topic(message.topic)
        if not device:
            return True
        if device not in self._known:
            self._add_known_device(device)
        if device in self._aside:
            return False
        try:
            route = wire.parse_topic(message.topic)
        except WireError:
            return self.admit_message(device, len(message.payload))
        if route.kind is None:  # a chunk: the coordinator has asked for it, or says otherwise by `admit_message`
            return True
        return self.admit_message(device, len(message.payload), HELLO_S if route.leaf == "hello" else MESSAGE_S)

    def _add_known_device(self, device: str) -> None:
        if len(self._known) <= KNOWN_MOST:
            self._known[device] = None
            if self._narrow and len(self._known) <= KNOWN_MOST:
                self._link.subscribe(self._device_filters([device]))
            elif self._narrow:
                self._subscribe_to_all()

    def _block_device(self, device: str) -> None:
        self._flooded.append(device)
        self._aside[device] = self.now_s + ASIDE_S
        if self._narrow:
            self._link.unsubscribe(self._device_filters([device]))
        elif len(self._known) <= KNOWN_MOST:
            self._narrow, self._look_s, self._looked_s = True, self.now_s + LOOK_S, math.inf
            self._link.subscribe(self._device_filters([each for each in self._known if each not in self._aside]))
            self._link.unsubscribe(self._topics.coordinator_filters())

    def _subscribe_to_all(self) -> None:
        self._narrow, self._look_s, self._looked_s = False, math.inf, math.inf
        self._link.subscribe(self._topics.coordinator_filters())
        self._link.unsubscribe([*self._device_filters(list(self._known)), self._presence_filter])

    def _update_subscriptions(self) -> None:
        back = [device for device, until_s in self._aside.items() if self.now_s >= until_s]
        for device in back:
            del self._aside[device]
        if not self._narrow:
            return
        if not self._aside:
            return self._subscribe_to_all()
        if back:
            self._link.subscribe(self._device_filters(back))
        if self.now_s >= self._looked_s:
            self._link.unsubscribe([self._presence_filter])
            self._look_s, self._looked_s = self.now_s + LOOK_S, math.inf
        elif self.now_s >= self._look_s:
            self._link.subscribe([self._presence_filter])
            self._look_s, self._looked_s = math.inf, self.now_s + LOOKED_S

    @property
    def _presence_filter(self) -> str:
        return f"{self._topics.root}/dev/+/up/presence"

    def _device_filters(self, devices: Sequence[str]) -> list[str]:
        return [f"{self._topics.root}/dev/{device}/up/#" for device in devices]
