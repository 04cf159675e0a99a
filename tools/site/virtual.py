"""Sites on virtual time: a coordinator and its agent on a broker in memory."""

from __future__ import annotations

from typing import Any

from fedquilt import wire
from fedquilt.coordinator import sites
from fedquilt.coordinator.executors import OverLink
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.serving import Observe
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.worker import LARGE_BYTES, Here
from fedquilt.edge_agent import settings
from fedquilt.tools.site.agent import SiteAgent
from fedquilt.transport.link import Endpoint, MemoryBroker, MemoryLink


class Uplink:
    """Link of a site to the coordinator above, which may be lost and made again."""

    def __init__(self, broker: MemoryBroker, fleet: str, device: str) -> None:
        gone = wire.encode(wire.Presence(online=False, boot="site", seq=0))
        self._broker, self._will = broker, (wire.Topics(fleet).device(device, "up", "presence"), gone)
        self.session, self.inner = 1, broker.connect(self._will)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def lose(self) -> None:
        """Lose the connection."""
        self._broker.lose(self.inner)

    def renewed(self) -> MemoryLink:
        """Connect again."""
        self.session += 1
        self.inner = self._broker.connect(self._will)
        return self.inner


class VirtualSite:
    """A site whose boards have its name as their fleet.

    Args:
        broker: of the site and of the coordinator above.
        store: of the site's coordinator.
        fleet: of the coordinator above.
        name: of the site.
        observe: as of `Server`.
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
        options = settings.parse({"device": name, "fleet": fleet, "home": str(store.home / "above")})
        self.agent = agent = SiteAgent(self.up, options, store, durable=False)

        def noted(job: Any, fact: Any) -> None:
            observe(job, fact)
            agent.observe(job, fact)

        executor = OverLink(self.down, name, store.depot, store.next_epoch())
        worker = Here(LARGE_BYTES)
        agent.serves(Server(executor, store, noted, around=sites.below, by_wall=True, worker=worker))

    def seats(self) -> list[tuple[MemoryLink, Endpoint]]:
        """Its coordinator and its agent, as `simulate` takes them."""
        return [(self.down, self.agent.server), (self.up.inner, self.agent)]
