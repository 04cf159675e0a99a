"""How messages get from one side to the other.

`Link` is all that either side knows of the network. It never blocks and starts no thread:
`publish` queues, `receive` hands over what has come, `wait` sleeps. `fedquilt.mqtt.MqttLink` is a
real broker's; `MemoryLink` is a broker of a few dictionaries on virtual time, with seeded faults,
on which a whole federation runs in one process.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """One message as it came."""

    topic: str
    payload: bytes
    retained: bool = False


class Link(Protocol):
    """One client's connection to a broker."""

    @property
    def session(self) -> int:
        """Grows with every (re)connection; 0 before the first."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Bytes published and not yet handed to the network."""
        ...

    @property
    def max_payload(self) -> int:
        """The largest payload this broker takes, as far as is known."""
        ...

    def subscribe(self, filters: Sequence[str]) -> None:
        """Ask for topics; remembered, and asked again after a reconnection."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Queue one message. `reliable` is QoS 1, which a broker may still drop when its queue is full.

        Raises:
            LinkError: the payload is larger than the broker takes.
        """
        ...

    def receive(self) -> list[Message]:
        """What has arrived since the last call."""
        ...

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Sleep until something arrives, one of `fds` is readable, or the time is up."""
        ...

    def close(self) -> None:
        """Send what is queued, say goodbye (no last will) and disconnect."""
        ...


class Endpoint(Protocol):
    """A coordinator or an agent: stepped, never blocking."""

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        ...

    def step(self, now_s: float) -> float:
        """Handle what has arrived and what is due; returns when to be called again at the latest."""
        ...

    def fds(self) -> Sequence[int]:
        """File descriptors whose readiness should wake it (its worker's, say)."""
        ...


def run(
    endpoint: Endpoint,
    link: Link,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Drive one endpoint in real time until it has finished or `stop` says so."""
    while not endpoint.finished and not stop():
        due = endpoint.step(clock())
        if endpoint.finished:
            return
        link.wait(min(max(due - clock(), 0.0), 1.0), endpoint.fds())


# -- in memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """What goes wrong on a MemoryBroker, as probabilities for each delivery; delays in virtual seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 0.0  # each delivery takes 1 ms plus up to this, so messages overtake each other


class MemoryBroker:
    """Topics, retained messages and last wills in dictionaries, on virtual time."""

    def __init__(self, seed: int = 0, faults: Faults = Faults(), max_payload: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.faults = faults
        self.max_payload = max_payload
        self.published = 0
        self._random = random.Random(seed)
        self._retained: dict[str, bytes] = {}
        self._links: list[MemoryLink] = []
        self._heap: list[tuple[float, int, MemoryLink, Message]] = []
        self._sequence = 0

    def connect(self, will: tuple[str, bytes] | None = None) -> MemoryLink:
        """A new client; `will` is published (retained) when it is lost without a goodbye."""
        link = MemoryLink(self, will)
        self._links.append(link)
        return link

    def lose(self, link: MemoryLink) -> None:
        """The client's process died: its queue is gone, its will is published."""
        if link not in self._links:
            return  # it has said goodbye
        self._links.remove(link)
        link.connected = False
        if link.will is not None:
            self._publish(link.will[0], link.will[1], retain=True)

    def next_s(self) -> float | None:
        """When the next delivery is due."""
        return self._heap[0][0] if self._heap else None

    def deliver(self) -> None:
        """Put every delivery that is due by now into its client's inbox."""
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, link, message = heapq.heappop(self._heap)
            if link.connected:
                link.inbox.append(message)

    def _publish(self, topic: str, payload: bytes, retain: bool) -> None:
        self.published += 1
        if retain:
            if payload:
                self._retained[topic] = payload
            else:
                self._retained.pop(topic, None)
        for link in self._links:
            if any(matches(pattern, topic) for pattern in link.filters):
                self._schedule(link, Message(topic, payload))

    def _receive(self, topic: str, payload: bytes, retain: bool) -> None:
        for copy in self._disturb(payload):
            self._publish(topic, copy, retain)

    def _schedule(self, link: MemoryLink, message: Message) -> None:
        for payload in self._disturb(message.payload):
            self._sequence += 1
            due = self.now_s + 0.001 + self._random.random() * self.faults.delay_s
            heapq.heappush(self._heap, (due, self._sequence, link, message._replace(payload=payload)))

    def _disturb(self, payload: bytes) -> list[bytes]:
        roll, faults = self._random.random, self.faults
        if roll() < faults.drop:
            return []
        copies = [payload, payload] if roll() < faults.duplicate else [payload]
        return [self._corrupt(copy) if copy and roll() < faults.corrupt else copy for copy in copies]

    def _corrupt(self, payload: bytes) -> bytes:
        place = self._random.randrange(len(payload))
        flipped = payload[place] ^ (1 << self._random.randrange(8))
        return payload[:place] + bytes([flipped]) + payload[place + 1 :]


class MemoryLink:
    """A client of a MemoryBroker."""

    backlog = 0

    def __init__(self, broker: MemoryBroker, will: tuple[str, bytes] | None) -> None:
        self.broker = broker
        self.will = will
        self.session = 1
        self.connected = True
        self.max_payload = broker.max_payload
        self.filters: list[str] = []
        self.inbox: list[Message] = []

    def subscribe(self, filters: Sequence[str]) -> None:
        self.filters += [pattern for pattern in filters if pattern not in self.filters]
        for topic, payload in list(self.broker._retained.items()):
            if any(matches(pattern, topic) for pattern in filters):
                self.broker._schedule(self, Message(topic, payload, True))

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if self.connected:
            self.broker._receive(topic, payload, retain)

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        raise RuntimeError("virtual time does not wait: drive a MemoryBroker with `simulate`")

    def close(self) -> None:
        if self in self.broker._links:
            self.broker._links.remove(self)
        self.connected = False


def matches(pattern: str, topic: str) -> bool:
    """Whether an MQTT topic filter takes a topic."""
    wanted, given = pattern.split("/"), topic.split("/")
    for place, level in enumerate(wanted):
        if level == "#":
            return True
        if place >= len(given) or level not in ("+", given[place]):
            return False
    return len(wanted) == len(given)


def simulate(
    broker: MemoryBroker,
    endpoints: Callable[[], Sequence[tuple[MemoryLink, Endpoint]]],
    until: Callable[[], bool],
    limit_s: float = 1e6,
) -> None:
    """Drive endpoints on virtual time until `until`; `endpoints` is asked anew at each step, so they may come and go.

    Raises:
        TimeoutError: the virtual time limit passed, or nothing is left to happen.
    """
    due: dict[int, tuple[Endpoint, float]] = {}  # endpoint id -> (it, when it is due)
    while not until():
        broker.deliver()
        present = endpoints()
        for link, endpoint in present:
            _, when = due.get(id(endpoint), (endpoint, broker.now_s))
            if not endpoint.finished and (link.inbox or when <= broker.now_s):
                due[id(endpoint)] = (endpoint, endpoint.step(broker.now_s))
        upcoming = [due[id(e)][1] for _, e in present if id(e) in due and not e.finished]
        upcoming += [broker.now_s for link, e in present if link.inbox and not e.finished]
        if (delivery := broker.next_s()) is not None:
            upcoming.append(delivery)
        if until():
            return
        if not upcoming or min(upcoming) > limit_s:
            raise TimeoutError(f"nothing left to happen at virtual second {broker.now_s:.1f}")
        broker.now_s = max(broker.now_s, min(upcoming))
