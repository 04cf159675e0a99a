"""Agent of a site: that of a board, whose means are its boards'."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import wire
from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.store import Store
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings, load
from fedquilt.tools.site.worker import Site, SiteWorker
from fedquilt.transport.broker import Broker
from fedquilt.transport.link import Endpoint, Link
from fedquilt.transport.mqtt import MqttLink
from fedquilt.transport.sealed import BoardLink, identity

MEANS_S: Final = 5.0  # between two looks at which boards there are
BUSY_S: Final = 0.02  # between two looks at the link above while something is on its way
IDLE_S: Final = 0.25


class SiteAgent:
    """The agent of a site, beside its coordinator. A `fedquilt.transport.link.Endpoint`.

    Args:
        link: to the broker of the coordinator above.
        options: as of a board's agent.toml: `device` is the site's name, `fleet` that of the coordinator above.
        store: of the site's coordinator.
        boot: as of `Agent`.
        durable: see `fedquilt.edge_agent.state.Local`.
    """

    finished = False
    server: Server

    def __init__(
        self, link: Link, options: AgentSettings, store: Store, boot: str | None = None, *, durable: bool = True
    ) -> None:
        board, self.link = Site(), link
        self._worker = SiteWorker(store, board)
        self.agent = Agent(link, options, board, self._worker, boot, durable=durable, clock=lambda: None)
        self._lock = self.agent.local.lock()
        self._means_s, self._there = -math.inf, False  # whether a board has been seen: without any, it is no device yet

    def serves(self, server: Server) -> None:
        """Go on with the site's coordinator, whose observer is `observe`."""
        self.server = self._worker.server = server

    def observe(self, job: Shown, fact: AnyFact) -> None:
        """Take note of a fact of the site's coordinator."""
        self._worker.observe(job, fact)

    def step(self, now_s: float) -> float:
        """Handle what has come from above, once there are boards, and tell it which."""
        if now_s >= self._means_s + (MEANS_S if self._there else IDLE_S):
            self._means_s = now_s
            means = self._worker.means(self.agent.duty.state.means, now_s)
            self._there = self._there or bool(means.engines)
            if means != self.agent.duty.state.means:
                self.agent.have(means)
        if not self._there:
            return now_s + IDLE_S
        return min(self.agent.step(now_s), self._means_s + MEANS_S)

    def beside(self, server: Server) -> Endpoint:
        """Endpoint that drives the site's coordinator and, on a link of its own, this agent."""
        self.serves(server)
        return _Both(server, self)

    def fds(self) -> Sequence[int]:
        """Those of the agent."""
        return self.agent.fds()

    @property
    def busy(self) -> bool:
        """Whether something is on its way from above, or to it."""
        state = self.agent.duty.state
        return bool(state.outbox) or (state.open is not None and not state.open.working)

    def goodbye(self) -> None:
        """Announce that the site goes; its round goes on at the next start."""
        self.agent.goodbye()
        self._lock.close()


class _Both:
    """A site's coordinator, whose link the caller waits for, and its agent, whose link is looked at now and then."""

    def __init__(self, server: Server, site: SiteAgent) -> None:
        self._server, self._site = server, site

    @property
    def finished(self) -> bool:
        """Whether the coordinator has finished."""
        return self._server.finished

    def step(self, now_s: float) -> float:
        """Step both; returns when to call again."""
        server_s = self._server.step(now_s)
        self._site.link.wait(0.0)
        return min(server_s, self._site.step(now_s), now_s + (BUSY_S if self._site.busy else IDLE_S))

    def fds(self) -> Sequence[int]:
        """Those of both."""
        return [*self._server.fds(), *self._site.fds()]


def connected(path: Path, store: Store) -> SiteAgent:
    """The agent of a site, with a link to the broker of the coordinator above.

    Args:
        path: settings, as a board's agent.toml.
        store: of the site's coordinator.

    Raises:
        JobError: a setting that cannot be used, or another agent in the same home.
        StoreError: the home cannot be read or written.
    """
    options = load(path)
    broker, boot = Broker.parse(**msgspec.structs.asdict(options.broker)), os.urandom(8).hex()
    presence = wire.Topics(options.fleet).device(options.device, "up", "presence")
    will = presence, wire.encode(wire.Presence(online=False, boot=boot))
    plain = MqttLink(broker, f"fedquilt-{options.fleet}-{options.device}", will)
    own = identity(broker)
    return SiteAgent(
        plain if own is None else BoardLink(plain, own, options.fleet, options.device), options, store, boot
    )
