"""Links between coordinator and devices.

`Link` is the only view of the network on either side. It never blocks and, but for `tended`, starts no thread:
`publish` queues, `receive` returns arrived messages, `wait` sleeps. `fedquilt.transport.mqtt.MqttLink` is for
real brokers; `MemoryLink` is a broker of a few dictionaries on virtual time, with seeded faults,
on which a whole federation runs in one process.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fedquilt.cost_model import Link as Pace
from fedquilt.transport.agenda import Agenda
from fedquilt.transport.topic_tree import TopicTree


class Message(NamedTuple):
    """Message as it arrived."""

    topic: str
    payload: bytes
    retained: bool = False


class Link(Protocol):
    """One client's connection to a broker."""

    @property
    def session(self) -> int:
        """Number of connections so far: grows with every (re)connection; 0 before the first."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
        ...

    @property
    def backlog(self) -> int:
        """Bytes published and not yet given to the network."""
        ...

    @property
    def max_payload(self) -> int:
        """Largest payload this broker accepts, as far as is known."""
        ...

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe to topics; subscriptions are repeated after a reconnection."""
        ...

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Undo subscriptions to these filters: from now on nothing comes by them."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Queue one message. `reliable` is QoS 1, which a broker may still drop when its queue is full.

        Raises:
            LinkError: the payload is larger than the broker accepts.
        """
        ...

    def receive(self) -> list[Message]:
        """Messages that have arrived since the last call."""
        ...

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Sleep until something arrives, one of `fds` is readable, or the time is up."""
        ...

    def tended(self) -> AbstractContextManager[None]:
        """While its body computes for long: keep the connection alive. The body must not use the link."""
        ...

    def close(self) -> None:
        """Send queued messages, say goodbye (no last will) and disconnect."""
        ...


class Endpoint(Protocol):
    """Coordinator or agent: stepped, never blocking."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def step(self, now_s: float) -> float:
        """Handle messages that have arrived and everything due; returns when to call again at the latest."""
        ...

    def fds(self) -> Sequence[int]:
        """File descriptors whose readiness should wake it, such as its worker's."""
        ...


def run(
    endpoint: Endpoint,
    link: Link,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Drive one endpoint in real time until it has finished or `stop` returns True."""
    while not endpoint.finished and not stop():
        due = endpoint.step(clock())
        if endpoint.finished:
            return
        link.wait(min(max(due - clock(), 0.0), 1.0), endpoint.fds())


# -- in memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """Faults of a MemoryBroker, as probabilities for each delivery; delays in virtual seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 0.0  # each delivery takes 1 ms plus up to this, so messages overtake each other


NO_FAULTS = Faults()
AT_ONCE = Pace()


def disturbed(payload: bytes, draw: random.Random, drop: float, duplicate: float, corrupt: float) -> list[bytes]:
    """Copies of a message that arrive, by these probabilities: none, one or two, each perhaps with a flipped bit."""

    def flipped(copy: bytes) -> bytes:
        place = draw.randrange(len(copy))
        return copy[:place] + bytes([copy[place] ^ (1 << draw.randrange(8))]) + copy[place + 1 :]

    if draw.random() < drop:
        return []
    copies = [payload, payload] if draw.random() < duplicate else [payload]
    return [flipped(copy) if copy and draw.random() < corrupt else copy for copy in copies]


class MemoryBroker:
    """Topics, retained messages and last wills in dictionaries, on virtual time."""

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS, max_payload: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.faults = faults
        self.max_payload = max_payload
        self.published = 0
        self.clients = 0  # number of clients that have ever come or gone
        self._random = random.Random(seed)
        self._retained: dict[str, tuple[int, bytes]] = {}  # topic -> since which sequence number, and the latest
        self._topics: TopicTree[str] = TopicTree()  # those of `_retained`
        self._links: dict[MemoryLink, None] = {}
        self._filters: TopicTree[MemoryLink] = TopicTree()
        self._heap: list[tuple[float, int, MemoryLink | None, Message]] = []  # None: it comes to this broker
        self._sequence = 0

    def connect(self, will: tuple[str, bytes] | None = None, pace: Pace = AT_ONCE) -> MemoryLink:
        """Connect a new client.

        Args:
            will: published (retained) when the client is lost without a goodbye.
            pace: time that its messages take, one after the other in each direction.
        """
        self.clients += 1
        link = MemoryLink(self, will, pace)
        self._links[link] = None
        return link

    def lose(self, link: MemoryLink) -> None:
        """Simulate the death of a client's process: its queue is gone, its will is published."""
        if link not in self._links:
            return  # it has said goodbye
        self._forget(link)
        link.inbox.clear()
        if link.will is not None:
            self._publish(link.will[0], link.will[1], retain=True)

    def next_s(self) -> float | None:
        """Time of the next delivery; None: none."""
        return self._heap[0][0] if self._heap else None

    def deliver(self) -> list[MemoryLink]:
        """Put every due delivery into its client's inbox; returns the clients that received any."""
        reached: dict[MemoryLink, None] = {}
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, link, message = heapq.heappop(self._heap)
            if link is None:
                self._receive(*message)
            elif link.connected:
                link.inbox.append(message)
                reached[link] = None
        return list(reached)

    def _forget(self, link: MemoryLink) -> None:
        self.clients += 1
        del self._links[link]
        for pattern in link.filters:
            self._filters.remove(pattern, link)
        link.connected = False

    def _publish(self, topic: str, payload: bytes, retain: bool) -> None:
        self.published += 1
        if retain:
            self._retain(topic, payload)
        takers = self._filters.matching(topic)
        if len(takers) > 1:  # once for each client, even if several of its filters match, in the order of connecting
            takers = sorted(set(takers), key=lambda link: link.number)
        for link in takers:
            self._schedule(link, Message(topic, payload))

    def _retain(self, topic: str, payload: bytes) -> None:
        """Keep the latest message of a topic; an empty one clears it."""
        known = self._retained.get(topic)
        if payload:
            if known is None:
                self._sequence += 1
                self._topics.add(topic, topic)
            self._retained[topic] = (self._sequence if known is None else known[0], payload)
        elif known is not None:
            del self._retained[topic]
            self._topics.remove(topic, topic)

    def _subscribe(self, link: MemoryLink, filters: Sequence[str]) -> None:
        if link in self._links:
            for pattern in filters:
                self._filters.add(pattern, link)
        kept = {topic for pattern in filters for topic in self._topics.under(pattern)}
        for topic in sorted(kept, key=lambda topic: self._retained[topic][0]):
            self._schedule(link, Message(topic, self._retained[topic][1], True))

    def _unsubscribe(self, link: MemoryLink, filters: Sequence[str]) -> None:
        for pattern in filters:
            self._filters.remove(pattern, link)

    def _sent(self, link: MemoryLink, message: Message) -> None:
        """Take a client's message after the time that its link needs for it."""
        if link.pace is AT_ONCE:
            return self._receive(*message)
        self._sequence += 1
        link.sent_s, due_s = self._way(link, link.sent_s, message)
        heapq.heappush(self._heap, (due_s, self._sequence, None, message))

    def _way(self, link: MemoryLink, free_s: float, message: Message) -> tuple[float, float]:
        """When a client's line is free again after a message, and when the message has arrived."""
        passed_s = max(free_s, self.now_s) + len(message.payload) / link.pace.bytes_per_s
        return passed_s, passed_s + link.pace.transfer_s

    def _receive(self, topic: str, payload: bytes, retain: bool) -> None:
        for copy in self._disturbed(payload):
            self._publish(topic, copy, retain)

    def _schedule(self, link: MemoryLink, message: Message) -> None:
        begun_s = self.now_s
        if link.pace is not AT_ONCE:
            link.received_s, begun_s = self._way(link, link.received_s, message)
        if self.faults == NO_FAULTS:
            self._sequence += 1
            heapq.heappush(self._heap, (begun_s + 0.001, self._sequence, link, message))
            return
        for payload in self._disturbed(message.payload):
            self._sequence += 1
            due = begun_s + 0.001 + self._random.random() * self.faults.delay_s
            heapq.heappush(self._heap, (due, self._sequence, link, message._replace(payload=payload)))

    def _disturbed(self, payload: bytes) -> list[bytes]:
        faults = self.faults
        if faults == NO_FAULTS:
            return [payload]
        return disturbed(payload, self._random, faults.drop, faults.duplicate, faults.corrupt)


class MemoryLink:
    """Client of a MemoryBroker."""

    backlog = 0

    def __init__(self, broker: MemoryBroker, will: tuple[str, bytes] | None, pace: Pace = AT_ONCE) -> None:
        self.broker = broker
        self.will = will
        self.pace, self.sent_s, self.received_s = pace, 0.0, 0.0
        self.number = broker.clients  # grows with every client
        self.session = 1
        self.connected = True
        self.max_payload = broker.max_payload
        self.filters: list[str] = []
        self.inbox: list[Message] = []

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe; retained messages of matching topics are delivered."""
        self.filters += [pattern for pattern in filters if pattern not in self.filters]
        self.broker._subscribe(self, filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Undo subscriptions."""
        self.filters = [pattern for pattern in self.filters if pattern not in filters]
        self.broker._unsubscribe(self, filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish at this link's pace; a lost client's messages are dropped."""
        if self.connected:
            self.broker._sent(self, Message(topic, payload, retain))

    def receive(self) -> list[Message]:
        """Empty the inbox."""
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Refuse: virtual time does not wait.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("virtual time does not wait: drive a MemoryBroker with `simulate`")

    def tended(self) -> AbstractContextManager[None]:
        """Virtual time stands still while something computes."""
        return nullcontext()

    def close(self) -> None:
        """Disconnect without a last will."""
        if self in self.broker._links:
            self.broker._forget(self)
            self.inbox.clear()


def matches(pattern: str, topic: str) -> bool:
    """Whether an MQTT topic filter matches a topic."""
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
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Drive endpoints on virtual time until `until` returns True.

    An endpoint is stepped when a message has arrived for it or when its own due time has come, those of one
    instant in the order of `endpoints`; an idle one costs nothing. `endpoints` is called again
    whenever a client has connected to the broker or left it, so they may come and go. `watch` is called after
    each step, to show progress.

    Raises:
        TimeoutError: the virtual time limit passed, or no event is left.
    """
    agenda = Agenda()
    clients = -1
    while not until():
        reached = broker.deliver()
        if broker.clients != clients:
            clients = broker.clients
            agenda.seat(endpoints(), broker.now_s)
        for place in agenda.ready(reached, broker.now_s):
            agenda.step(place, broker.now_s)
            watch()
        if until():
            return
        next_s = min(agenda.next_s(), math.inf if (delivery := broker.next_s()) is None else delivery)
        if next_s > limit_s:
            raise TimeoutError(f"nothing left to happen at virtual second {broker.now_s:.1f}")
        broker.now_s = max(broker.now_s, next_s)
