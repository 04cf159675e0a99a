"""Broker and links in memory, and the scheduler of endpoints on virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from fedquilt.costs.cost_model import LinkCost
from fedquilt.transport.link import Endpoint, Message, TopicTree

INSTANT_LINK = LinkCost()
DELIVERY_DELAY_S = 0.001


class MemoryBroker:
    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.max_payload = max_payload
        self.published = 0
        self.clients = 0  # number of connections and disconnections so far
        self._retained: dict[str, tuple[int, bytes]] = {}  # topic -> (sequence number of the first payload, payload)
        self._topics: TopicTree[str] = TopicTree()  # topics of `_retained`
        self._links: dict[MemoryLink, None] = {}
        self._filters: TopicTree[MemoryLink] = TopicTree()
        self._heap: list[tuple[float, int, MemoryLink | None, Message]] = []  # None for the broker
        self._sequence = 0

    def connect(self, will: tuple[str, bytes] | None = None, pace: LinkCost = INSTANT_LINK) -> MemoryLink:
        """Connect a client with a last will (topic, payload). `lose_client` publishes the will as retained."""
        self.clients += 1
        link = MemoryLink(self, will, pace)
        self._links[link] = None
        return link

    def lose_client(self, link: MemoryLink) -> None:
        """Simulate the end of a client's process. Its queue is dropped and its will is published."""
        if link not in self._links:
            return  # the client has disconnected
        self._remove_client(link)
        link.inbox.clear()
        if link.will is not None:
            self._publish(link.will[0], link.will[1], retain=True)

    def next_delivery_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def deliver_due(self) -> list[MemoryLink]:
        """Deliver the messages due by `now_s`. Return the links that have received messages."""
        receivers: dict[MemoryLink, None] = {}
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, link, message = heapq.heappop(self._heap)
            if link is None:
                self._receive_message(*message)
            elif link.connected:
                link.inbox.append(message)
                receivers[link] = None
        return list(receivers)

    def _remove_client(self, link: MemoryLink) -> None:
        self.clients += 1
        del self._links[link]
        for pattern in link.filters:
            self._filters.remove(pattern, link)
        link.connected = False

    def _publish(self, topic: str, payload: bytes, retain: bool) -> None:
        self.published += 1
        if retain:
            self._update_retained(topic, payload)
        subscribers = self._filters.items_matching_topic(topic)
        if len(subscribers) > 1:
            # A client receives the message once, even if several of its filters match.
            subscribers = sorted(set(subscribers), key=lambda link: link.number)
        for link in subscribers:
            self._schedule_delivery(link, Message(topic, payload))

    def _update_retained(self, topic: str, payload: bytes) -> None:
        retained = self._retained.get(topic)
        if payload:
            if retained is None:
                self._sequence += 1
                self._topics.add(topic, topic)
            self._retained[topic] = (self._sequence if retained is None else retained[0], payload)
        elif retained is not None:
            del self._retained[topic]
            self._topics.remove(topic, topic)

    def _subscribe(self, link: MemoryLink, filters: Sequence[str]) -> None:
        if link not in self._links:
            return  # the client is disconnected
        for pattern in filters:
            self._filters.add(pattern, link)
        topics = {topic for pattern in filters for topic in self._topics.items_matching_filter(pattern)}
        for topic in sorted(topics, key=lambda topic: self._retained[topic][0]):
            self._schedule_delivery(link, Message(topic, self._retained[topic][1], True))

    def _unsubscribe(self, link: MemoryLink, filters: Sequence[str]) -> None:
        for pattern in filters:
            self._filters.remove(pattern, link)

    def _send_to_broker(self, link: MemoryLink, message: Message) -> None:
        if link.pace is INSTANT_LINK:
            return self._receive_message(*message)
        self._sequence += 1
        link.sent_s, due_s = self._transmission_times(link, link.sent_s, message)
        heapq.heappush(self._heap, (due_s, self._sequence, None, message))

    def _transmission_times(self, link: MemoryLink, free_s: float, message: Message) -> tuple[float, float]:
        sent_s = max(free_s, self.now_s) + len(message.payload) / link.pace.bytes_per_s
        return sent_s, sent_s + link.pace.transfer_s

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        self._publish(topic, payload, retain)

    def _schedule_delivery(self, link: MemoryLink, message: Message, delay_s: float = DELIVERY_DELAY_S) -> None:
        start_s = self.now_s
        if link.pace is not INSTANT_LINK:
            link.received_s, start_s = self._transmission_times(link, link.received_s, message)
        self._sequence += 1
        heapq.heappush(self._heap, (start_s + delay_s, self._sequence, link, message))


class MemoryLink:
    backlog = 0

    def __init__(self, broker: MemoryBroker, will: tuple[str, bytes] | None, pace: LinkCost = INSTANT_LINK) -> None:
        self.broker = broker
        self.will = will
        self.pace, self.sent_s, self.received_s = pace, 0.0, 0.0
        self.number = broker.clients  # increases with each client, so links can be sorted by age
        self.session = 1
        self.connected = True
        self.max_payload = broker.max_payload
        self.filters: list[str] = []
        self.inbox: list[Message] = []

    def subscribe(self, filters: Sequence[str]) -> None:
        self.filters += [pattern for pattern in filters if pattern not in self.filters]
        self.broker._subscribe(self, filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self.filters = [pattern for pattern in self.filters if pattern not in filters]
        self.broker._unsubscribe(self, filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if self.connected:
            self.broker._send_to_broker(self, Message(topic, payload, retain))

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        raise RuntimeError("a link in memory cannot wait in real time: call `run_on_virtual_time`")

    def keep_alive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        if self in self.broker._links:
            self.broker._remove_client(self)
            self.inbox.clear()


def run_on_virtual_time(
    broker: MemoryBroker,
    endpoints: Callable[[], Sequence[tuple[MemoryLink, Endpoint]]],
    is_finished: Callable[[], bool],
    limit_s: float = 1e6,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Run endpoints on virtual time until `is_finished` returns True, or raise TimeoutError.

    Endpoints of one instant are stepped in the order of `endpoints`, which is called again whenever a client connects
    or disconnects. `on_step` is called after each step.
    """
    scheduler = Scheduler()
    clients = -1
    while not is_finished():
        receivers = broker.deliver_due()
        if broker.clients != clients:
            clients = broker.clients
            scheduler.set_endpoints(endpoints(), broker.now_s)
        for index in scheduler.ready_indices(receivers, broker.now_s):
            scheduler.step_endpoint(index, broker.now_s)
            on_step()
        if is_finished():
            return
        delivery_s = broker.next_delivery_s()
        next_s = min(scheduler.next_due_s(), math.inf if delivery_s is None else delivery_s)
        if next_s > limit_s:
            raise TimeoutError(f"no event is due before {limit_s:g} s, at virtual second {broker.now_s:.1f}")
        broker.now_s = max(broker.now_s, next_s)


class Scheduler:
    def __init__(self) -> None:
        self._endpoints: list[tuple[MemoryLink, Endpoint]] = []
        self._due_times_s: list[float] = []  # by index of the endpoint
        self._indices: dict[MemoryLink, int] = {}
        self._heap: list[tuple[float, int]] = []  # (due time, index), outdated if `_due_times_s` differs

    def set_endpoints(self, endpoints: Sequence[tuple[MemoryLink, Endpoint]], now_s: float) -> None:
        """Replace the endpoints. Retained endpoints keep their due times, and new endpoints are due now."""
        previous = zip(self._endpoints, self._due_times_s, strict=True)
        due_times_s = {id(endpoint): due_s for (_, endpoint), due_s in previous}
        self._endpoints = list(endpoints)
        self._indices = {link: index for index, (link, _) in enumerate(self._endpoints)}
        self._due_times_s = [
            now_s if link.inbox else due_times_s.get(id(endpoint), now_s) for link, endpoint in self._endpoints
        ]
        self._heap = [(due_s, index) for index, due_s in enumerate(self._due_times_s) if due_s < math.inf]
        heapq.heapify(self._heap)

    def ready_indices(self, receivers: Sequence[MemoryLink], now_s: float) -> list[int]:
        indices = {self._indices[link] for link in receivers if link in self._indices}
        while self._heap and self._heap[0][0] <= now_s:
            due_s, index = heapq.heappop(self._heap)
            if due_s == self._due_times_s[index]:
                indices.add(index)
        return sorted(indices)

    def step_endpoint(self, index: int, now_s: float) -> None:
        link, endpoint = self._endpoints[index]
        due_s = math.inf if endpoint.finished else endpoint.step(now_s)
        if endpoint.finished:
            due_s = math.inf
        elif link.inbox:
            due_s = now_s  # the endpoint has not received all messages
        if due_s != self._due_times_s[index] or due_s <= now_s:
            self._due_times_s[index] = due_s
            if due_s < math.inf:
                heapq.heappush(self._heap, (due_s, index))

    def next_due_s(self) -> float:
        while self._heap and self._heap[0][0] != self._due_times_s[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf
