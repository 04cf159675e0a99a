"""Fleet on a signed link, and a broker that tampers with messages."""

from __future__ import annotations

from collections.abc import Callable

from certified import Certified

from fedquilt import wire
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink, AuthenticatedFleetLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.link import Message
from fedquilt.transport.memory_link import MemoryBroker

TOPICS = wire.Topics("f")
CLAIM = b'{"v":1,"crc":"00000000","round":1}'


class TamperingBroker(MemoryBroker):
    def __init__(self) -> None:
        super().__init__()
        self.transcript: list[tuple[str, bytes]] = []
        self.change: Callable[[str, bytes], bytes | None] = lambda topic, payload: payload

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        self.transcript.append((topic, payload))
        changed = self.change(topic, payload)
        if changed is not None:
            super()._receive_message(topic, changed, retain)

    def of(self, topic: str) -> list[bytes]:
        return [payload for at, payload in self.transcript if at == topic]


class Fleet:
    def __init__(self, site: Certified) -> None:
        self.site, self.broker = site, TamperingBroker()
        self.identities = {"coordinator": LinkIdentity(site.broker("coordinator", "coordinator"))}
        self.boards: dict[str, AuthenticatedDeviceLink] = {}
        self.heard: dict[str, list[Message]] = {}
        self.epoch = 0
        self.coordinate()
        self.attacker = self.broker.connect()  # may publish on all topics

    def coordinate(self) -> None:
        self.epoch += 1
        if self.epoch > 1:
            self.broker.lose_client(self.raw)
        self.raw = self.broker.connect()
        self.link = AuthenticatedFleetLink(self.raw, self.identities["coordinator"], "f", self.clock)
        self.link.subscribe(TOPICS.coordinator_filters())
        self.link.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=self.epoch)), retain=True)
        self.heard["coordinator"] = []

    def reconnect(self, link: AuthenticatedFleetLink) -> None:
        """Reconnect a coordinator after a connection loss."""
        self.broker.lose_client(self.raw)
        self.raw, self.link = self.broker.connect(), link
        self.raw.session = link.session + 1
        link._link = self.raw
        link.subscribe(TOPICS.coordinator_filters())
        link.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=self.epoch)), retain=True)

    def displace_coordinator(self) -> None:
        """Run a coordinator of another home with the same certificate and epoch for 6 s, then the first one again."""
        first_link = self.link
        self.broker.lose_client(self.raw)
        self.epoch -= 1
        self.coordinate()
        for name, board in self.boards.items():
            board.publish(up_topic(name, "telemetry"), CLAIM)
        self.run(6.0)
        assert first_link._sessions.keys() == self.link._sessions.keys()
        self.reconnect(first_link)
        self.heard = {name: [] for name in self.heard}

    def join(self, name: str, identity: LinkIdentity | None = None) -> AuthenticatedDeviceLink:
        self.identities.setdefault(name, identity or LinkIdentity(self.site.broker(name)))
        self.boards[name] = AuthenticatedDeviceLink(self.broker.connect(), self.identities[name], "f", name, self.clock)
        self.heard[name] = []
        return self.boards[name]

    def clock(self) -> float:
        return self.broker.now_s

    def run(self, seconds: float = 0.3) -> None:
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.broker.now_s += 0.01
            self.broker.deliver_due()
            self.heard["coordinator"] += self.link.receive()
            for name, board in self.boards.items():
                self.heard[name] += board.receive()

    def payloads(self, name: str) -> list[bytes]:
        return [message.payload for message in self.heard[name]]


def up_topic(device: str, leaf: str = "claim") -> str:
    return TOPICS.device_topic(device, "up", leaf)


def down_topic(device: str, leaf: str = "task") -> str:
    return TOPICS.device_topic(device, "dn", leaf)
