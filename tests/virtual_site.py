"""Sites on virtual time, with a coordinator and its agent on a broker in memory."""

from __future__ import annotations

from typing import Any

from fedquilt import wire
from fedquilt.coordinator.background_worker import LARGE_BYTES, BackgroundWorker
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.jobs.context import Observe
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import sites
from fedquilt.edge_agent import settings
from fedquilt.tools.operations.site import SiteAgent
from fedquilt.transport.link import Endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink


class Uplink:
    def __init__(self, broker: MemoryBroker, fleet: str, device: str) -> None:
        gone = wire.encode(wire.Presence(online=False, boot="site", seq=0))
        self._broker, self._will = broker, (wire.Topics(fleet).device_topic(device, "up", "presence"), gone)
        self.session, self.inner = 1, broker.connect(self._will)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def disconnect(self) -> None:
        self._broker.lose_client(self.inner)

    def reconnect(self) -> MemoryLink:
        self.session += 1
        self.inner = self._broker.connect(self._will)
        return self.inner


class VirtualSite:
    """Site whose name is the fleet of its devices.

    Args:
        broker: Broker of the site and of the parent coordinator.
        store: Store of the site's coordinator.
        fleet: Fleet of the parent coordinator.
        name: Name of the site.
        observe: Observer as for `Server`.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        store: Store,
        fleet: str,
        name: str,
        observe: Observe = lambda job, fact: None,
    ) -> None:
        self.down, self.up = broker.connect(), Uplink(broker, fleet, name)
        options = settings.parse_settings({"device": name, "fleet": fleet, "home": str(store.home / "above")})
        self.agent = agent = SiteAgent(self.up, options, store, durable=False)

        def notify_observers(job: Any, event: Any) -> None:
            observe(job, event)
            agent.observe(job, event)

        executor = LinkExecutor(self.down, name, store.blob_store, store.begin_epoch())
        worker = BackgroundWorker(LARGE_BYTES)
        agent.attach_server(
            Server(
                executor,
                store,
                notify_observers,
                adapt_method=sites.adapt_for_parent,
                uses_wall_clock=True,
                worker=worker,
            )
        )

    def list_endpoints(self) -> list[tuple[MemoryLink, Endpoint]]:
        return [(self.down, self.agent.server), (self.up.inner, self.agent)]
