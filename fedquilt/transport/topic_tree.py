"""Index of MQTT topics or topic filters, with a matching cost that does not grow with the fleet.

The tree answers two questions of a broker: which filters match a topic (`items_matching_topic`, in a tree of filters),
and which topics match a filter (`items_matching_filter`, in a tree of topics). Both agree with
`fedquilt.transport.link.filter_matches` for each pair, and their cost grows with the levels and the matches only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _TopicNode(Generic[T]):
    __slots__ = ("children", "items")

    def __init__(self) -> None:
        self.items: dict[T, None] = {}
        self.children: dict[str, _TopicNode[T]] = {}


class TopicTree(Generic[T]):
    """Items at topics, or at topic filters. A path can have several items."""

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
        """Return the items under filters that match a topic, repeated for each matching filter."""
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
        """Return the items under topics that match a filter. A first wildcard also matches topics with "$"."""
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
        self.filters: dict[str, None] = {}  # in the order of subscription
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
