"""Broker on virtual time with sessions, wills and retained messages, and with faults."""

from __future__ import annotations

import heapq
import json
import math
import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

from fedquilt import wire
from fedquilt.transport import link as links
from fedquilt.transport.link import Message

matches = lru_cache(maxsize=1 << 14)(links.filter_matches)

HOP_S = 0.01  # of a message, each way; messages of one instant arrive together
WILL_S = 5.0  # after a client was last heard


def apply_faults(payload: bytes, draw: random.Random, drop: float, duplicate: float, corrupt: float) -> list[bytes]:
    def flip_bit(copy: bytes) -> bytes:
        place = draw.randrange(len(copy))
        return copy[:place] + bytes([copy[place] ^ (1 << draw.randrange(8))]) + copy[place + 1 :]

    if draw.random() < drop:
        return []
    copies = [payload, payload] if draw.random() < duplicate else [payload]
    return [flip_bit(copy) if copy and draw.random() < corrupt else copy for copy in copies]


class DeliveryNoise(NamedTuple):
    start_s: float
    end_s: float
    drop: float
    duplicate: float
    corrupt: float
    delay_s: float


class SimLink:
    backlog = 0

    def __init__(self, broker: SimBroker, name: str, will: tuple[str, bytes] | None) -> None:
        self.broker, self.name, self.will = broker, name, will
        self.session, self.connected = 1, True
        self.max_payload = broker.max_payload
        self.filters: list[str] = []
        self.inbox: list[Message] = []
        self.gate: Callable[[str, str], object] = lambda what, where: None
        self.rewrite: Callable[[str, bytes], bytes] | None = None  # modifies published payloads

    def subscribe(self, filters: Sequence[str]) -> None:
        self.filters += [pattern for pattern in filters if pattern not in self.filters]
        if self.connected:
            self.broker.deliver_retained(self)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self.filters = [pattern for pattern in self.filters if pattern not in filters]
        self.broker.clear_matches()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        self.gate("publish", topic)
        if self.rewrite is not None:
            payload = self.rewrite(topic, payload)
        self.broker.publish(self, topic, payload, retain, reliable)
        self.gate("published", topic)

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        raise RuntimeError("virtual time does not wait")

    def keep_alive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.broker.remove_client(self)


class SimBroker:
    def __init__(self, seed: int, noise: Sequence[DeliveryNoise] = (), max_payload: int = 1 << 20) -> None:
        self.now_s, self.max_payload = 0.0, max_payload
        self.up = True
        self.clients: dict[str, SimLink] = {}
        self.woken: set[str] = set()  # clients with something new since the last look
        self.published = 0
        self.noise, self._roll = tuple(noise), random.Random(seed)
        self._retained: dict[str, bytes] = {}
        self._queued_bytes: dict[
            str, list[tuple[str, bytes]]
        ] = {}  # of clients whose session is kept while they are away
        self._unsent: dict[str, list[tuple[str, bytes, bool]]] = {}  # of clients that are cut off
        self._wills: list[tuple[float, str]] = []
        self._takers: dict[str, tuple[str, ...]] = {}  # topic -> names of the clients that get it
        self._heap: list[tuple[float, int, str, int, Message]] = []
        self._sequence = 0

    def connect(self, name: str, will: tuple[str, bytes] | None = None) -> SimLink:
        if name in self.clients:
            self.clients[name].connected = False
        link = SimLink(self, name, will)
        self.clients[name] = link
        self._takers.clear()
        self._wills = [each for each in self._wills if each[1] != name]
        if not self.up:
            link.connected, link.session = False, 0
        else:
            self._deliver_queued(name)
        return link

    def remove_client(self, link: SimLink) -> None:
        if self.clients.get(link.name) is link:
            link.connected = False
            del self.clients[link.name]
            self._takers.clear()

    def disconnect_client(self, name: str, *, keep: bool) -> None:
        """Disconnect a client. Its will is published WILL_S later.

        Args:
            name: The name of the client.
            keep: Whether to keep the session and to queue messages for the client.
        """
        link = self.clients.get(name)
        if link is None or not link.connected:
            return
        link.connected = False
        self._takers.clear()
        if keep:
            self._queued_bytes.setdefault(name, [])
        else:
            self._queued_bytes.pop(name, None)
        if link.will is not None and self.up:
            heapq.heappush(self._wills, (self.now_s + WILL_S, name))

    def reconnect_client(self, name: str) -> None:
        link = self.clients.get(name)
        if link is None or link.connected or not self.up:
            return
        link.connected = True
        link.session += 1
        self._wills = [each for each in self._wills if each[1] != name]
        self._takers.clear()
        self.woken.add(name)
        self.deliver_retained(link)
        self._deliver_queued(name)
        for topic, payload, retain in self._unsent.pop(name, ()):
            self.publish(link, topic, payload, retain, True)

    def lose_client(self, name: str) -> None:
        self._unsent.pop(name, None)
        self.disconnect_client(name, keep=self._roll.random() < 0.5)

    def stop(self, *, sessions: bool, retained: bool) -> None:
        for name in list(self.clients):
            self.disconnect_client(name, keep=sessions)
        self.up = False
        self._wills.clear()
        self._heap.clear()
        if not sessions:
            self._queued_bytes.clear()
        if not retained:
            self._retained.clear()

    def start(self) -> None:
        self.up = True
        for name in list(self.clients):
            self.reconnect_client(name)

    def publish(self, link: SimLink, topic: str, payload: bytes, retain: bool, reliable: bool) -> None:
        if not link.connected:
            if reliable and self.clients.get(link.name) is link:
                self._unsent.setdefault(link.name, []).append((topic, payload, retain))
            return
        for copy in self._disturb_payload(payload):
            self._publish(topic, copy, retain)

    def clear_matches(self) -> None:
        self._takers.clear()

    def deliver_retained(self, link: SimLink) -> None:
        self._takers.clear()
        for topic, payload in self._retained.items():
            if any(matches(pattern, topic) for pattern in link.filters):
                self._schedule_delivery(link.name, Message(topic, payload, True))

    def retained_message(self, topic: str) -> bytes:
        return self._retained.get(topic, b"")

    def next_due_s(self) -> float:
        return min(self._heap[0][0] if self._heap else math.inf, self._wills[0][0] if self._wills else math.inf)

    def deliver_due(self) -> None:
        while self._wills and self._wills[0][0] <= self.now_s:
            _, name = heapq.heappop(self._wills)
            link = self.clients.get(name)
            if link is not None and link.will is not None:
                self._publish(*link.will, True)
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, name, session, message = heapq.heappop(self._heap)
            link = self.clients.get(name)
            if link is None or not link.connected:
                if name in self._queued_bytes and self.up:
                    self._queued_bytes[name].append((message.topic, message.payload))
            elif link.session == session:
                link.inbox.append(message)
                self.woken.add(name)

    def _publish(self, topic: str, payload: bytes, retain: bool) -> None:
        self.published += 1
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        takers = self._takers.get(topic)
        if takers is None:
            takers = self._takers[topic] = tuple(
                name
                for name, link in self.clients.items()
                if (link.connected or name in self._queued_bytes) and any(matches(each, topic) for each in link.filters)
            )
        for name in takers:
            self._schedule_delivery(name, Message(topic, payload))

    def _schedule_delivery(self, name: str, message: Message) -> None:
        noise = self._current_noise() if self.noise else None
        session = self.clients[name].session
        if noise is None:
            self._sequence += 1
            due_s = self.now_s + HOP_S
            heapq.heappush(self._heap, (due_s, self._sequence, name, session, message))
            return
        for payload in self._disturb_payload(message.payload):
            self._sequence += 1
            due_s = round(self.now_s + HOP_S * (1 + int(self._roll.random() * noise.delay_s / HOP_S)), 6)
            heapq.heappush(self._heap, (due_s, self._sequence, name, session, message._replace(payload=payload)))

    def _deliver_queued(self, name: str) -> None:
        for topic, payload in self._queued_bytes.pop(name, ()):
            self._schedule_delivery(name, Message(topic, payload))

    def _current_noise(self) -> DeliveryNoise | None:
        return next((each for each in self.noise if each.start_s <= self.now_s < each.end_s), None)

    def _disturb_payload(self, payload: bytes) -> list[bytes]:
        noise = self._current_noise() if self.noise else None
        if noise is None:
            return [payload]
        return apply_faults(payload, self._roll, noise.drop, noise.duplicate, noise.corrupt)


def with_unknown_field(topic: str, payload: bytes) -> bytes:
    if not payload.startswith(b'{"v":'):
        return payload
    rest = b"," + json.dumps({"next_version": [1, {"a": None}]}).encode()[1:-1]
    body = payload[payload.index(b'"crc":"') + 16 :]
    body = rest + body
    return b'{"v":%d,"crc":"%08x"' % (wire.VERSION, zlib.crc32(body)) + body
