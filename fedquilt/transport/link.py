"""Links between coordinator and devices.

A `Link` is the only access of both sides to the network. A link never blocks and starts no thread except in
`keep_alive`: `publish` queues, `receive` returns arrived messages, `wait` sleeps. The implementation
`fedquilt.transport.mqtt.link.MqttLink` is for real brokers. `MemoryLink` is the client of a broker in memory on virtual
time, with seeded faults, for running a whole federation in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    topic: str
    payload: bytes
    retained: bool = False


class Link(Protocol):
    """One client's connection to a broker."""

    @property
    def session(self) -> int:
        """Number of connections so far, 0 before the first."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Bytes that are published and not yet sent."""
        ...

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that the broker accepts, as far as known."""
        ...

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe to topic filters, again after each reconnection."""
        ...

    def unsubscribe(self, filters: Sequence[str]) -> None: ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Queue one message. `reliable` is QoS 1, which a broker may still drop when its queue is full.

        Raises:
            LinkError: If the payload is larger than the broker accepts.
        """
        ...

    def receive(self) -> list[Message]: ...

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Sleep until a message arrives, one of `fds` is readable, or the timeout expires."""
        ...

    def keep_alive(self) -> AbstractContextManager[None]:
        """Keep the connection alive during a long computation. The body must not use the link."""
        ...

    def close(self) -> None:
        """Send queued messages and disconnect without publishing the last will."""
        ...


class Endpoint(Protocol):
    """Coordinator or agent, driven by `step` and never blocking."""

    @property
    def finished(self) -> bool: ...

    def step(self, now_s: float) -> float:
        """Process arrived messages and due work. Return the latest time of the next call."""
        ...

    def fds(self) -> Sequence[int]:
        """Return file descriptors that require a call of `step` when readable."""
        ...


def run_endpoint(
    endpoint: Endpoint,
    link: Link,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Step an endpoint when due, on messages and at least every second, until it is finished or `stop` is True."""
    while not endpoint.finished and not stop():
        due = endpoint.step(clock())
        if endpoint.finished:
            return
        link.wait(min(max(due - clock(), 0.0), 1.0), endpoint.fds())


def filter_matches(pattern: str, topic: str) -> bool:
    wanted, given = pattern.split("/"), topic.split("/")
    for place, level in enumerate(wanted):
        if level == "#":
            return True
        if place >= len(given) or level not in ("+", given[place]):
            return False
    return len(wanted) == len(given)


class LinkWrapper:
    """Link that passes all calls on to another link. Subclasses override a part."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def session(self) -> int:
        return self._link.session

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def backlog(self) -> int:
        return self._link.backlog

    @property
    def max_payload(self) -> int:
        return self._link.max_payload

    @property
    def problem(self) -> str | None:
        """Problem of the connection as a sentence, or None if there is none or it is not known."""
        found: str | None = getattr(self._link, "problem", None)
        return found

    def subscribe(self, filters: Sequence[str]) -> None:
        self._link.subscribe(filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self._link.unsubscribe(filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        return self._link.receive()

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self._link.wait(timeout_s, fds)

    def keep_alive(self) -> AbstractContextManager[None]:
        return self._link.keep_alive()

    def close(self) -> None:
        self._link.close()
