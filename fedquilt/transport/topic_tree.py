"""Index of MQTT topics, or of topic filters, level by level, so that matching costs no more in a larger fleet.

It answers a broker's two questions: which filters match this topic (`matching`; the tree holds filters),
and which topics match this filter (`under`; the tree holds topics). Both agree with `fedquilt.transport.link.matches`
for each pair, at a cost that grows with the levels and with the matches, not with the size of the tree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Node(Generic[T]):
    """One level of the tree: the items held here, and the levels below by name."""

    __slots__ = ("below", "held")

    def __init__(self) -> None:
        self.held: dict[T, None] = {}
        self.below: dict[str, _Node[T]] = {}


class TopicTree(Generic[T]):
    """Items by topic or topic filter; an item may be held under several."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, path: str, item: T) -> None:
        """Store an item under a topic or a filter."""
        node = self._root
        for level in path.split("/"):
            found = node.below.get(level)
            if found is None:
                found = node.below[level] = _Node()
            node = found
        node.held[item] = None

    def remove(self, path: str, item: T) -> None:
        """Remove an item under a topic or a filter, with levels that become empty."""
        way = [self._root]
        levels = path.split("/")
        for level in levels:
            found = way[-1].below.get(level)
            if found is None:
                return
            way.append(found)
        way[-1].held.pop(item, None)
        for parent, level, node in zip(way[-2::-1], levels[::-1], way[:0:-1], strict=True):
            if node.held or node.below:
                return
            del parent.below[level]

    def matching(self, topic: str) -> list[T]:
        """Items under filters that match a topic; an item under several such filters is repeated."""
        found: list[T] = []
        nodes = [self._root]
        for level in topic.split("/"):
            following = []
            for node in nodes:
                below = node.below
                if (rest := below.get("#")) is not None:
                    found += rest.held
                if (exact := below.get(level)) is not None and level not in ("+", "#"):
                    following.append(exact)
                if (single := below.get("+")) is not None:
                    following.append(single)
            nodes = following
            if not nodes:
                return found
        for node in nodes:
            found += node.held
            if (rest := node.below.get("#")) is not None:  # "a/#" matches "a" as well
                found += rest.held
        return found

    def under(self, pattern: str) -> list[T]:
        """Items under topics that match a filter."""
        nodes = [self._root]
        for level in pattern.split("/"):
            if level == "#":
                return [item for node in nodes for item in _all(node)]
            if level == "+":
                nodes = [below for node in nodes for below in node.below.values()]
            else:
                nodes = [node.below[level] for node in nodes if level in node.below]
        return [item for node in nodes for item in node.held]


def _all(node: _Node[T]) -> Iterator[T]:
    yield from node.held
    for below in node.below.values():
        yield from _all(below)
