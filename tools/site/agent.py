"""Agent of a site: that of a board, whose means are its boards'."""

from __future__ import annotations

import math
from typing import Any

from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.store import Store
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.tools.site.worker import Site, SiteWorker
from fedquilt.transport.link import Link

MEANS_S = 5.0  # between two looks at which boards there are


class SiteAgent:
    """The agent of a site, beside its coordinator. A `fedquilt.transport.link.Endpoint`.

    Args:
        link: to the broker of the coordinator above.
        options: as of a board's agent.toml: `device` is the site's name, `fleet` that of the coordinator above.
        store: of the site's coordinator.
        durable: see `fedquilt.edge_agent.state.Local`.
    """

    finished = False
    server: Server

    def __init__(self, link: Link, options: AgentSettings, store: Store, *, durable: bool = True) -> None:
        board = Site()
        self._worker = SiteWorker(store, board)
        self.agent = Agent(link, options, board, self._worker, durable=durable, clock=lambda: None)
        self._means_s = -math.inf

    def serves(self, server: Server) -> None:
        """Go on with the site's coordinator, whose observer is `observe`."""
        self.server = self._worker.server = server

    def observe(self, job: Running, fact: AnyFact) -> None:
        """Take note of a fact of the site's coordinator."""
        self._worker.observe(job, fact)

    def step(self, now_s: float) -> float:
        """Handle what has come from above, and tell it which boards there are."""
        if now_s >= self._means_s + MEANS_S:
            self._means_s = now_s
            means = self._worker.means(self.agent.duty.state.means, now_s)
            if means != self.agent.duty.state.means:
                self.agent.have(means)
        return min(self.agent.step(now_s), self._means_s + MEANS_S)

    def fds(self) -> Any:
        """Those of the agent."""
        return self.agent.fds()

    def goodbye(self) -> None:
        """Announce that the site goes; its round goes on at the next start."""
        self.agent.goodbye()
