"""Many devices and blobs side by side, and the budgets that they share."""

import math

from two_sides import KIB, TOPICS, Side, noise, play, ref_of

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs import transfers as blob_transfers
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink


def test_devices_that_are_gone_do_not_keep_others_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(blob_transfers, "MAX_DOWNLOADS", 2)
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "alive")
    ref = agent.depot.store_bytes(noise(2_000_000))
    for number in range(4):
        coordinator.transfers.request_blob(f"dead{number}", ref_of(bytes([number])))
    coordinator.transfers.request_blob("alive", ref)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.errors == {("alive", ref.sha256): None}
    assert broker.now_s < 10.0
    play(broker, coordinator, agent, until=lambda: len(coordinator.errors) == 5)
    assert coordinator.errors["dead3", ref_of(bytes([3])).sha256] == "nothing arrived for 300 s"


def test_one_blob_from_two_devices_is_pulled_once_and_finished_for_both(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "alive")
    ref = agent.depot.store_bytes(noise(600_000))
    coordinator.transfers.request_blob("dead", ref)
    coordinator.transfers.request_blob("alive", ref)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.errors == {("dead", ref.sha256): None, ("alive", ref.sha256): None}
    assert coordinator.transfers.traffic_bytes("alive", "up") == 600_000


class SlowLink(MemoryLink):
    queued = 0
    most = 0

    @property
    def backlog(self) -> int:
        return self.queued

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if not reliable:
            self.queued += len(payload)
            self.most = max(self.most, self.queued)
        super().publish(topic, payload, retain=retain, reliable=reliable)


def test_the_send_budget_is_kept_and_used(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "BUDGET_BYTES", 64 * KIB)
    broker = MemoryBroker(max_payload=16 * KIB)
    link = SlowLink(broker, None)
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(noise(20 * 15 * KIB))
    transfers = Transfers(link, depot, TOPICS, "dn", lambda device, sha256: True)
    get = wire.encode(wire.ChunkRequest(sha256=ref.sha256, chunk=15 * KIB, indices=tuple(range(20))))
    for number in range(10):
        transfers.handle_message(wire.parse_topic(TOPICS.device_topic(f"d{number}", "up", "blob/get")), get, 0.0)
    steps, now_s = 0, 0.0
    while (due_s := transfers.step(now_s)) != math.inf:
        assert due_s > now_s
        now_s, steps = due_s, steps + 1
        link.queued = 0
    assert link.most == 60 * KIB
    assert steps == 200 / 4 - 1
    assert all(transfers.traffic_bytes(f"d{number}", "dn") == ref.size for number in range(10))


def test_no_more_is_asked_for_than_the_budget(tmp_path, monkeypatch):
    """Twelve devices are pulled from at once, but only 64 KiB may be on their way."""
    monkeypatch.setattr(chunks, "BUDGET_BYTES", 64 * KIB)
    broker = MemoryBroker(max_payload=16 * KIB)
    coordinator = Side(broker, tmp_path / "c")
    agents = [Side(broker, tmp_path / f"d{number}", f"d{number}") for number in range(12)]
    for number, agent in enumerate(agents):
        coordinator.transfers.request_blob(f"d{number}", agent.depot.store_bytes(noise(200_000, number)))
    most = 0

    def over():
        nonlocal most
        inbox = sum(len(m.payload) for m in coordinator.link.inbox)
        flying = sum(len(m.payload) for _, _, link, m in broker._heap if link is coordinator.link)
        most = max(most, inbox + flying)
        return len(coordinator.errors) == 12

    play(broker, coordinator, *agents, until=over)
    assert set(coordinator.errors.values()) == {None}
    assert 45 * KIB <= most <= 64 * KIB + 12 * KIB  # and the manifests
