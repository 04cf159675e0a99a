"""Scheduler of a simulation: endpoints with due times and arrived messages on virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedquilt.transport.link import Endpoint
    from fedquilt.transport.memory_link import MemoryLink


class Scheduler:
    def __init__(self) -> None:
        self._seats: list[tuple[MemoryLink, Endpoint]] = []
        self._due_s: list[float] = []  # by place
        self._places: dict[MemoryLink, int] = {}
        self._heap: list[tuple[float, int]] = []  # (due, place); outdated if `_due_s` differs

    def set_endpoints(self, seats: Sequence[tuple[MemoryLink, Endpoint]], now_s: float) -> None:
        """Replace the endpoints, with the due times of those that stay. New ones are due now."""
        known = {id(endpoint): due_s for (_, endpoint), due_s in zip(self._seats, self._due_s, strict=True)}
        self._seats = list(seats)
        self._places = {link: place for place, (link, _) in enumerate(self._seats)}
        self._due_s = [now_s if link.inbox else known.get(id(endpoint), now_s) for link, endpoint in self._seats]
        self._heap = [(due_s, place) for place, due_s in enumerate(self._due_s) if due_s < math.inf]
        heapq.heapify(self._heap)

    def ready_indices(self, reached: Sequence[MemoryLink], now_s: float) -> list[int]:
        """Return the indices of the endpoints that are due or in `reached`, ascending."""
        found = {self._places[link] for link in reached if link in self._places}
        while self._heap and self._heap[0][0] <= now_s:
            due_s, place = heapq.heappop(self._heap)
            if due_s == self._due_s[place]:
                found.add(place)
        return sorted(found)

    def step_endpoint(self, place: int, now_s: float) -> None:
        """Step an endpoint and schedule its next step, unless it is finished."""
        link, endpoint = self._seats[place]
        due_s = math.inf if endpoint.finished else endpoint.step(now_s)
        if endpoint.finished:
            due_s = math.inf
        elif link.inbox:
            due_s = now_s  # it has left something for the next time
        if due_s != self._due_s[place] or due_s <= now_s:
            self._due_s[place] = due_s
            if due_s < math.inf:
                heapq.heappush(self._heap, (due_s, place))

    def next_due_s(self) -> float:
        while self._heap and self._heap[0][0] != self._due_s[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf
