"""Blobs that arrive through loss, damage, crashes and restarts."""

import hashlib
import math
import random

import pytest
from two_sides import KIB, Side, noise, play

from fedquilt.blobs import download
from fedquilt.blobs.store import BlobStore
from fedquilt.transport.link import Message
from fedquilt.transport.memory_link import DELIVERY_DELAY_S, MemoryBroker, MemoryLink
from tests.faults.broker import apply_faults


class FaultyBroker(MemoryBroker):
    """Broker that drops, duplicates and damages messages on each of their two hops, and delays them."""

    def __init__(self, seed: int, drop: float, duplicate: float, corrupt: float, delay_s: float) -> None:
        super().__init__(max_payload=5 * KIB)
        self._odds, self._delay_s, self._roll = (drop, duplicate, corrupt), delay_s, random.Random(seed)

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        for copy in apply_faults(payload, self._roll, *self._odds):
            super()._receive_message(topic, copy, retain)

    def _schedule_delivery(self, link: MemoryLink, message: Message, delay_s: float = DELIVERY_DELAY_S) -> None:
        for copy in apply_faults(message.payload, self._roll, *self._odds):
            late_s = delay_s + self._roll.random() * self._delay_s
            super()._schedule_delivery(link, message._replace(payload=copy), late_s)


@pytest.mark.parametrize("seed", [n if n < 15 else pytest.param(n, marks=pytest.mark.nightly) for n in range(60)])
def test_every_blob_arrives_through_loss_duplicates_delay_and_damage(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(download, "STALL_TIMEOUT_S", 1e6)
    roll = random.Random(seed)
    odds = roll.choice([0.0, 0.05, 0.3]), roll.choice([0.0, 0.3]), roll.choice([0.0, 0.02, 0.2])
    broker = FaultyBroker(seed, *odds, delay_s=roll.choice([0.0, 0.5, 5.0]))
    coordinator = Side(broker, tmp_path / "c")
    agents = {name: Side(broker, tmp_path / name, name) for name in ("nano", "tx2", "xavier")}
    shared = coordinator.depot.store_bytes(roll.randbytes(roll.randrange(160_000)))
    wanted = []
    for name, agent in agents.items():
        mine = agent.depot.store_bytes(roll.randbytes(roll.randrange(40_000)))
        coordinator.transfers.request_blob(name, mine)
        agent.transfers.request_blob(name, shared)
        wanted.append((agent, name, mine))
    play(broker, coordinator, *agents.values(), until=lambda: all(agent.errors for agent in agents.values()))
    play(broker, coordinator, *agents.values(), until=lambda: len(coordinator.errors) == 3)
    for agent, name, mine in wanted:
        assert agent.errors == {(name, shared.sha256): None}
        assert coordinator.errors[name, mine.sha256] is None
        assert BlobStore(tmp_path / name).read_range(shared.sha256, 0, 1 << 20) == coordinator.depot.read_range(
            shared.sha256, 0, 1 << 20
        )
        assert hashlib.sha256(coordinator.depot.read_range(mine.sha256, 0, 1 << 20)).hexdigest() == mine.sha256


def test_the_same_seed_plays_the_same(tmp_path):
    ends = []
    for attempt in ("one", "two"):
        broker = FaultyBroker(7, 0.1, 0.1, 0.1, 0.5)
        coordinator = Side(broker, tmp_path / attempt / "c")
        agent = Side(broker, tmp_path / attempt / "a", "tx2")
        agent.transfers.request_blob("tx2", coordinator.depot.store_bytes(noise(50_000)))
        play(broker, coordinator, agent, until=lambda agent=agent: bool(agent.errors))
        ends.append((broker.now_s, broker.published, agent.undecodable))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("way", ["dn", "up"])
def test_a_transfer_goes_on_where_a_crash_ended_it(tmp_path, way):
    broker = MemoryBroker(max_payload=17 * KIB)
    size = 60 * 16 * KIB
    devices = {"dn": ("", "tx2"), "up": ("tx2", "")}[way]
    server = Side(broker, tmp_path / "server", devices[0])
    ref = server.depot.store_bytes(noise(size))
    received = 0
    for crash_at in (size // 4, size // 4, size // 4, math.inf):
        puller = Side(broker, tmp_path / "puller", devices[1])
        puller.transfers.request_blob("tx2", ref)

        def moved(puller=puller):
            return puller.transfers.traffic_bytes("tx2", way)

        play(broker, server, puller, until=lambda p=puller, at=crash_at: bool(p.errors) or moved() >= at)
        received += moved()
        broker.lose_client(puller.link)
        for _ in range(2):  # what was on its way goes nowhere
            broker.now_s += 1.0
            broker.deliver_due()
            server.step(broker.now_s)
    assert puller.errors == {("tx2", ref.sha256): None}
    assert puller.depot.has_blob(ref)
    assert received == size


def test_a_new_session_asks_at_once_and_not_after_a_time_out(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(noise(1_000_000))
    agent.transfers.request_blob("tx2", ref)
    agent.step(0.0)
    coordinator.link.inbox.clear()
    broker._heap.clear()
    agent.link.connected = False
    assert agent.step(0.1) == pytest.approx(1.1)
    agent.link.connected = True
    agent.link.session += 1
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", ref.sha256): None}
    assert broker.now_s < 1.0
