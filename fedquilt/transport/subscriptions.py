"""Subscriptions of a broker's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fedquilt.transport.topic_tree import TopicTree

TOPICS: Final = 1 << 14  # of which it is remembered whether a filter matches


class Subscriptions:
    """Topic filters in the order of subscription. Matching a topic takes constant time."""

    def __init__(self) -> None:
        self._filters: dict[str, None] = {}
        self._tree: TopicTree[str] = TopicTree()
        self._matched: dict[str, bool] = {}  # by topic

    @property
    def filters(self) -> list[str]:
        return list(self._filters)

    def add(self, filters: Sequence[str]) -> None:
        self._matched.clear()
        for pattern in filters:
            self._filters[pattern] = None
            self._tree.add(pattern, pattern)

    def remove(self, filters: Sequence[str]) -> None:
        self._matched.clear()
        for pattern in filters:
            self._filters.pop(pattern, None)
            self._tree.remove(pattern, pattern)

    def matches_topic(self, topic: str) -> bool:
        known = self._matched.get(topic)
        if known is None:
            if len(self._matched) >= TOPICS:
                self._matched.clear()
            known = self._matched[topic] = bool(self._tree.items_matching_topic(topic))
        return known
