"""Agent of a site, which represents the devices of the site to the parent coordinator."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import wire
from fedquilt.coordinator.rounds.events import AnyEvent, JobView
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.settings import AgentSettings, load_settings
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink, load_identity
from fedquilt.tools.operations.site.worker import SiteDevice, SiteWorker
from fedquilt.transport.link import Endpoint, Link
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

MEANS_S: Final = 5.0  # between two looks at which boards there are
BUSY_S: Final = 0.02  # between two looks at the link above while something is on its way
IDLE_S: Final = 0.25


class SiteAgent:
    """Agent of a site, an `Endpoint` that runs together with the site's coordinator.

    Args:
        link: Link to the broker of the parent coordinator.
        options: Settings as in agent.toml. `device` is the name of the site, `fleet` that of the parent coordinator.
        store: Store of the site's coordinator.
        boot: As for `Agent`.
        durable: As for `fedquilt.edge_agent.agent_state.AgentState`.
    """

    finished = False
    server: Server

    def __init__(
        self, link: Link, options: AgentSettings, store: Store, boot: str | None = None, *, durable: bool = True
    ) -> None:
        board, self.link = SiteDevice(), link
        self._worker = SiteWorker(store, board)
        self.agent = Agent(link, options, board, self._worker, boot, durable=durable, clock=lambda: None)
        self._lock = self.agent.local.lock_home()
        self._means_s, self._there = -math.inf, False  # whether a board has been seen: without any, it is no device yet

    def attach_server(self, server: Server) -> None:
        """Set the site's coordinator, which must have `observe` as its observer."""
        self.server = self._worker.server = server

    def observe(self, job: JobView, fact: AnyEvent) -> None:
        self._worker.observe(job, fact)

    def step(self, now_s: float) -> float:
        """Handle messages of the parent coordinator, and publish changed capabilities.

        Nothing is published before the site has a device.
        """
        if now_s >= self._means_s + (MEANS_S if self._there else IDLE_S):
            self._means_s = now_s
            means = self._worker.read_capabilities(self.agent.duty.state.means, now_s)
            self._there = self._there or bool(means.engines)
            if means != self.agent.duty.state.means:
                self.agent.apply_capabilities(means)
        if not self._there:
            return now_s + IDLE_S
        return min(self.agent.step(now_s), self._means_s + MEANS_S)

    def make_endpoint(self, server: Server) -> Endpoint:
        """Attach the site's coordinator, and return an endpoint that drives both."""
        self.attach_server(server)
        return _SiteEndpoint(server, self)

    def fds(self) -> Sequence[int]:
        return self.agent.fds()

    @property
    def has_pending_transfer(self) -> bool:
        """Whether a task is being received or an update awaits its acknowledgement."""
        state = self.agent.duty.state
        return bool(state.outbox) or (state.open is not None and not state.open.working)

    def announce_end(self) -> None:
        """Announce that the site goes offline. Its round resumes at the next start."""
        self.agent.shut_down()
        self._lock.release()


class _SiteEndpoint:
    def __init__(self, server: Server, site: SiteAgent) -> None:
        self._server, self._site = server, site

    @property
    def finished(self) -> bool:
        return self._server.finished

    def step(self, now_s: float) -> float:
        # the caller waits for the coordinator's link alone, so the agent's link is polled
        server_s = self._server.step(now_s)
        self._site.link.wait(0.0)
        return min(server_s, self._site.step(now_s), now_s + (BUSY_S if self._site.has_pending_transfer else IDLE_S))

    def fds(self) -> Sequence[int]:
        return [*self._server.fds(), *self._site.fds()]


def connect_site_agent(path: Path, store: Store) -> SiteAgent:
    """Return the agent of a site, connected to the broker of the parent coordinator.

    Args:
        path: Settings file as agent.toml.
        store: Store of the site's coordinator.

    Raises:
        JobError: If a setting is invalid, or another agent uses the same home.
        StoreError: If the home cannot be read or written.
    """
    options = load_settings(path)
    broker, boot = Broker.from_url(**msgspec.structs.asdict(options.broker)), os.urandom(8).hex()
    presence = wire.Topics(options.fleet).device_topic(options.device, "up", "presence")
    will = presence, wire.encode(wire.Presence(online=False, boot=boot))
    plain = MqttLink(broker, f"fedquilt-{options.fleet}-{options.device}", will)
    own = load_identity(broker)
    return SiteAgent(
        plain if own is None else AuthenticatedDeviceLink(plain, own, options.fleet, options.device),
        options,
        store,
        boot,
    )
