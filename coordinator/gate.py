"""A coordinator's link, on which no device takes more than its share of the time: `conduct` decides.

It lies below the signatures, as what they refuse takes time as well. A device that floods is not subscribed to while it
is set aside, so that the broker drops what it sends: to read a message takes 50 to 100 microseconds even if nobody
looks at it. MQTT knows no subscription to all devices but one, so every device that is known is subscribed to by
name meanwhile, and others are looked for now and then, by the presence that the broker keeps of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from fedquilt import wire
from fedquilt.coordinator.conduct import ASIDE_S, HELLO_S, MESSAGE_S, Conduct
from fedquilt.core import WireError
from fedquilt.logs import about
from fedquilt.transport.around import Around
from fedquilt.transport.link import Link, Message

log = logging.getLogger("fedquilt.coordinator")

KNOWN_MOST: Final = 4096  # devices that are subscribed to by name; with more, what a flood sends is read and dropped
LOOK_S: Final = 60.0  # between two looks for devices that are not known yet
LOOKED_S: Final = 1.0  # that a look lasts: what is flooded with comes as well


class Gate(Around):
    """A `Link` around a coordinator's link to its broker.

    Args:
        link: to the broker.
        topics: of the fleet.
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
        """Subscribe to all devices, or to those of them that are not set aside; see `Link`."""
        if not self._narrow:
            self._link.subscribe(filters)
        else:  # the broker may know of the earlier subscription alone
            self._link.unsubscribe(filters)

    def receive(self) -> list[Message]:
        """What has come of devices that have time left."""
        self._tend()
        return [message for message in self._link.receive() if self._passes(message)]

    # -- of devices --

    def take_flooded(self) -> list[str]:
        """Devices that were set aside since the last call."""
        flooded, self._flooded = self._flooded, []
        return flooded

    def took(self, device: str, seconds: float) -> None:
        """A device has made the coordinator work for so long, or is granted so much where less than 0."""
        self._conduct.took(device, seconds, self.now_s)

    def weigh(self, device: str, size: int, cost_s: float = MESSAGE_S) -> bool:
        """Whether to go on with a message of so many bytes."""
        verdict = self._conduct.message(device, size, self.now_s, cost_s)
        if verdict == "slowed":
            ids = about(device=device)
            log.warning("%s sends more than can be answered: what comes too fast is dropped", device, extra=ids)
        elif verdict == "aside":
            self._set_aside(device)
        return verdict == "taken"

    def next_s(self) -> float:
        """When `receive` has something to do though nothing has come."""
        return min((*self._aside.values(), self._looked_s, self._look_s)) if self._narrow else math.inf

    # -- within --

    def _passes(self, message: Message) -> bool:
        device = wire.sender(message.topic)
        if not device:
            return True
        if device not in self._known:
            self._meet(device)
        if device in self._aside:
            return False
        try:
            route = wire.route(message.topic)
        except WireError:
            return self.weigh(device, len(message.payload))
        if route.kind is None:  # a chunk: the coordinator has asked for it, or says otherwise by `weigh`
            return True
        return self.weigh(device, len(message.payload), HELLO_S if route.leaf == "hello" else MESSAGE_S)

    def _meet(self, device: str) -> None:
        if len(self._known) <= KNOWN_MOST:
            self._known[device] = None
            if self._narrow and len(self._known) <= KNOWN_MOST:
                self._link.subscribe(self._branches([device]))
            elif self._narrow:
                self._widen()

    def _set_aside(self, device: str) -> None:
        self._flooded.append(device)
        self._aside[device] = self.now_s + ASIDE_S
        if self._narrow:
            self._link.unsubscribe(self._branches([device]))
        elif len(self._known) <= KNOWN_MOST:
            self._narrow, self._look_s, self._looked_s = True, self.now_s + LOOK_S, math.inf
            self._link.subscribe(self._branches([each for each in self._known if each not in self._aside]))
            self._link.unsubscribe(self._topics.for_coordinator())

    def _widen(self) -> None:
        """Subscribe to all devices by one filter again."""
        self._narrow, self._look_s, self._looked_s = False, math.inf, math.inf
        self._link.subscribe(self._topics.for_coordinator())
        self._link.unsubscribe([*self._branches(list(self._known)), self._presences])

    def _tend(self) -> None:
        """Let devices back whose time is over, and look for new ones."""
        back = [device for device, until_s in self._aside.items() if self.now_s >= until_s]
        for device in back:
            del self._aside[device]
        if not self._narrow:
            return
        if not self._aside:
            return self._widen()
        if back:
            self._link.subscribe(self._branches(back))
        if self.now_s >= self._looked_s:
            self._link.unsubscribe([self._presences])
            self._look_s, self._looked_s = self.now_s + LOOK_S, math.inf
        elif self.now_s >= self._look_s:
            self._link.subscribe([self._presences])
            self._look_s, self._looked_s = math.inf, self.now_s + LOOKED_S

    @property
    def _presences(self) -> str:
        return f"{self._topics.root}/dev/+/up/presence"

    def _branches(self, devices: Sequence[str]) -> list[str]:
        return [f"{self._topics.root}/dev/{device}/up/#" for device in devices]
