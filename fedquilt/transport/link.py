"""Links between coordinator and devices, and matching of topics.

A link never blocks and starts no thread except in `keep_alive`. `MqttLink` is for real brokers, `MemoryLink` for a
federation in one process on virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar


class Message(NamedTuple):
    topic: str
    payload: bytes
    retained: bool = False


class Link(Protocol):
    @property
    def session(self) -> int:
        """Number of connections so far, 0 before the first."""

    @property
    def connected(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Bytes of queued messages that are neither written (QoS 0) nor acknowledged (QoS 1)."""

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that the broker accepts, or a safe assumption before the first connection."""

    def subscribe(self, filters: Sequence[str]) -> None:
        """Subscribe to topic filters, again after each reconnection."""

    def unsubscribe(self, filters: Sequence[str]) -> None: ...

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Queue a message, or raise LinkError if the payload is too large.

        A `reliable` message has QoS 1. A broker with a full queue may still drop the message.
        """

    def receive(self) -> list[Message]: ...

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Sleep until a message arrives, one of `fds` is readable, or the timeout expires."""

    def keep_alive(self) -> AbstractContextManager[None]:
        """Keep the connection alive during a long computation. The body must not use the link."""

    def close(self) -> None:
        """Send queued messages and disconnect without publishing the last will."""


class Endpoint(Protocol):
    @property
    def finished(self) -> bool: ...

    def step(self, now_s: float) -> float:
        """Process arrived messages and due work. Return the time by which the next call is due."""

    def fds(self) -> Sequence[int]: ...


def run_endpoint(
    endpoint: Endpoint,
    link: Link,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Step an endpoint when due, on messages and every second, until it finishes or `stop` returns True."""
    while not endpoint.finished and not stop():
        due = endpoint.step(clock())
        if endpoint.finished:
            return
        link.wait(min(max(due - clock(), 0.0), 1.0), endpoint.fds())


def filter_matches(pattern: str, topic: str) -> bool:
    pattern_levels, topic_levels = pattern.split("/"), topic.split("/")
    for index, level in enumerate(pattern_levels):
        if level == "#":
            return True
        if index >= len(topic_levels) or level not in ("+", topic_levels[index]):
            return False
    return len(pattern_levels) == len(topic_levels)


T = TypeVar("T", bound=Hashable)


class _TopicNode(Generic[T]):
    __slots__ = ("children", "items")

    def __init__(self) -> None:
        self.items: dict[T, None] = {}
        self.children: dict[str, _TopicNode[T]] = {}


class TopicTree(Generic[T]):
    """Items by topic or by topic filter, with matching as in `filter_matches`. A path may have many items.

    The cost of a search grows with levels and matches, not with the number of items.
    """

    def __init__(self) -> None:
        self._root: _TopicNode[T] = _TopicNode()

    def add(self, path: str, item: T) -> None:
        node = self._root
        for level in path.split("/"):
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _TopicNode()
            node = child
        node.items[item] = None

    def remove(self, path: str, item: T) -> None:
        nodes = [self._root]
        levels = path.split("/")
        for level in levels:
            child = nodes[-1].children.get(level)
            if child is None:
                return
            nodes.append(child)
        nodes[-1].items.pop(item, None)
        for parent, level, node in zip(nodes[-2::-1], levels[::-1], nodes[:0:-1], strict=True):
            if node.items or node.children:
                return
            del parent.children[level]

    def items_matching_topic(self, topic: str) -> list[T]:
        """Return the items of all filters that match a topic. An item of several filters is repeated."""
        items: list[T] = []
        nodes = [self._root]
        for level in topic.split("/"):
            next_nodes = []
            for node in nodes:
                children = node.children
                if (multi_level := children.get("#")) is not None:
                    items += multi_level.items
                if (same_level := children.get(level)) is not None and level not in ("+", "#"):
                    next_nodes.append(same_level)
                if (single_level := children.get("+")) is not None:
                    next_nodes.append(single_level)
            nodes = next_nodes
            if not nodes:
                return items
        for node in nodes:
            items += node.items
            if (multi_level := node.children.get("#")) is not None:  # "a/#" matches "a" as well
                items += multi_level.items
        return items

    def items_matching_filter(self, pattern: str) -> list[T]:
        """Return the items of all topics that match a filter. An initial wildcard also matches "$" topics."""
        nodes = [self._root]
        for level in pattern.split("/"):
            if level == "#":
                return [item for node in nodes for item in _iterate_items(node)]
            if level == "+":
                nodes = [child for node in nodes for child in node.children.values()]
            else:
                nodes = [node.children[level] for node in nodes if level in node.children]
        return [item for node in nodes for item in node.items]


def _iterate_items(node: _TopicNode[T]) -> Iterator[T]:
    yield from node.items
    for child in node.children.values():
        yield from _iterate_items(child)


class Subscriptions:
    def __init__(self) -> None:
        self.filters: dict[str, None] = {}
        self._tree: TopicTree[str] = TopicTree()

    def add(self, filters: Sequence[str]) -> None:
        for pattern in filters:
            self.filters[pattern] = None
            self._tree.add(pattern, pattern)

    def remove(self, filters: Sequence[str]) -> None:
        for pattern in filters:
            self.filters.pop(pattern, None)
            self._tree.remove(pattern, pattern)

    def matches_topic(self, topic: str) -> bool:
        return bool(self._tree.items_matching_topic(topic))


class LinkWrapper:
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
        problem: str | None = getattr(self._link, "problem", None)
        return problem

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


MAX_LOGGED_PER_BRANCH: Final = 3  # messages of one topic branch that are logged individually
COUNT_INTERVAL_S: Final = 600.0  # interval at which the number of further messages is logged
MAX_BRANCHES: Final = 64  # branches counted separately, so that a sender cannot fill the memory
OTHER_BRANCHES: Final = "other branches"


@dataclass
class BranchCounter:
    logged: int = 0
    unlogged: int = 0  # messages since the last line about the branch
    last_text: str = ""
    due_s: float = 0.0  # time of the next line about unlogged messages


class MalformedMessages:
    def __init__(self) -> None:
        self.dropped = 0
        self._branches: dict[str, BranchCounter] = {}

    def count_message(self, topic: str, error: Exception, retained: bool, now_s: float, kind: str = "") -> str | None:
        """Count a dropped message and return the line to log now, or None."""
        self.dropped += 1
        name = "/".join(topic.split("/")[:6])[:120] + (f" ({kind})" if kind else "")
        if name not in self._branches and len(self._branches) >= MAX_BRANCHES:
            name = OTHER_BRANCHES
        branch = self._branches.setdefault(name, BranchCounter())
        if branch.logged >= MAX_LOGGED_PER_BRANCH:
            branch.due_s = branch.due_s if branch.unlogged else now_s + COUNT_INTERVAL_S
            branch.unlogged, branch.last_text = branch.unlogged + 1, f"{topic[:120]}: {error}"
            return None
        branch.logged += 1
        line = f"dropped a message on {topic[:120]}: {error}"
        if retained:
            line += f"; the broker retains the message until you clear it: mosquitto_pub -r -n -t '{topic[:120]}'"
        if branch.logged == MAX_LOGGED_PER_BRANCH:
            line += f" (further messages under {name} are only counted)"
        return line

    def take_due_lines(self, now_s: float) -> list[str]:
        """Return the lines to log now, with the numbers of messages that were only counted."""
        lines = []
        for name, branch in list(self._branches.items()):
            if branch.unlogged and now_s >= branch.due_s:
                lines.append(f"dropped {branch.unlogged} more messages under {name}; the last: {branch.last_text}")
                branch.unlogged, branch.due_s = 0, now_s + COUNT_INTERVAL_S
            elif not branch.unlogged and branch.logged >= MAX_LOGGED_PER_BRANCH and 0 < branch.due_s <= now_s:
                del self._branches[name]
        return lines
