"""One blob from one side to the other: in packets that fit, in bounded memory, and checked."""

import hashlib
import math
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from two_sides import KIB, TOPICS, Side, noise, play, ref_of

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.core import WireError
from fedquilt.transport.memory_link import MemoryBroker


@pytest.mark.parametrize("size", [0, 1, 256 * KIB, 256 * KIB + 1, 3_000_000])
def test_an_agent_pulls_what_the_coordinator_offers(tmp_path, size):
    broker, payload = MemoryBroker(), noise(size)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(payload)
    agent.transfers.request_blob("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", ref.sha256): None}
    path = agent.depot.blob_path(ref.sha256)
    assert path.read_bytes() == payload
    assert agent.transfers.traffic_bytes("tx2", "dn") == size
    assert coordinator.transfers.traffic_bytes("tx2", "dn") == size
    assert coordinator.transfers.traffic_bytes("tx2", "up") == 0


def test_what_is_here_already_is_done_at_once(tmp_path):
    broker = MemoryBroker()
    agent = Side(broker, tmp_path, "tx2")
    ref = agent.depot.store_bytes(b"here")
    agent.transfers.request_blob("tx2", ref)
    assert agent.transfers.take_finished() == [("tx2", ref.sha256, None)]
    assert agent.transfers.take_finished() == []
    assert agent.transfers.step(0.0) == math.inf
    assert broker.published == 0


def test_wanting_twice_pulls_once_and_cancelling_ends_it(tmp_path):
    broker = MemoryBroker()
    agent = Side(broker, tmp_path, "tx2")
    ref = ref_of(b"there")
    agent.transfers.request_blob("tx2", ref)
    agent.transfers.request_blob("tx2", ref)
    assert agent.transfers.step(0.0) == 2.0
    assert broker.published == 1
    agent.transfers.cancel("tx2", ref.sha256)
    agent.transfers.cancel("tx2", ref.sha256)
    assert agent.transfers.step(5.0) == math.inf
    assert agent.transfers.take_finished() == []


def test_a_blob_the_other_side_does_not_have_ends_with_its_reason(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    absent, secret = ref_of(b"absent"), coordinator.depot.store_bytes(b"secret")
    coordinator.refused.add(("tx2", secret.sha256))
    agent.transfers.request_blob("tx2", absent)
    agent.transfers.request_blob("tx2", secret)
    play(broker, coordinator, agent, until=lambda: len(agent.errors) == 2)
    assert "is no longer stored" in str(agent.errors["tx2", absent.sha256])
    assert "is not for tx2 at this time" in str(agent.errors["tx2", secret.sha256])
    assert coordinator.transfers.traffic_bytes("tx2", "dn") == 0
    coordinator.refused.clear()
    agent.errors.clear()
    agent.transfers.request_blob("tx2", secret)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", secret.sha256): None}


def test_a_blob_damaged_on_the_sender_s_disk_is_not_sent_and_can_be_stored_again(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(b"0123456789")
    (tmp_path / "c" / ref.sha256).write_bytes(b"0123456780")
    agent.transfers.request_blob("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "cannot send the blob" in str(agent.errors["tx2", ref.sha256])
    assert not coordinator.depot.has_blob(ref)


def test_a_full_disk_ends_the_pull_with_the_mend(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(noise(1_000_000))
    agent.transfers.request_blob("tx2", ref)
    (tmp_path / "a").rmdir()
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "cannot receive blob" in str(agent.errors["tx2", ref.sha256])


class Meter(MemoryBroker):
    largest = 0

    def _receive_message(self, topic: str, payload: bytes, retain: bool) -> None:
        assert len(payload) <= self.max_payload
        self.largest = max(self.largest, len(payload))
        super()._receive_message(topic, payload, retain)


def test_the_smaller_limit_of_the_two_sides_counts(tmp_path):
    for side in ("c", "a"):
        broker = Meter(max_payload=256 * KIB)
        coordinator = Side(broker, tmp_path / side / "c")
        agent = Side(broker, tmp_path / side / "a", "tx2")
        (coordinator if side == "c" else agent).link.max_payload = 16 * KIB
        ref = coordinator.depot.store_bytes(noise(100_000))
        agent.transfers.request_blob("tx2", ref)
        play(broker, coordinator, agent, until=lambda agent=agent: bool(agent.errors))
        assert agent.depot.has_blob(ref)
        assert broker.largest == 15 * KIB


def test_a_limit_that_shrinks_in_the_middle_only_costs_what_was_on_its_way(tmp_path):
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(noise(4_000_000))
    agent.transfers.request_blob("tx2", ref)
    play(broker, coordinator, agent, until=lambda: agent.transfers.traffic_bytes("tx2", "dn") > 3_000_000)
    for link in (coordinator.link, agent.link):
        link.max_payload = 64 * KIB
        link.session += 1
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.depot.has_blob(ref)
    assert agent.transfers.traffic_bytes("tx2", "dn") < 4_000_000 + 9 * 256 * KIB


def test_a_blob_too_large_for_the_broker_s_packets_says_so(tmp_path):
    broker = MemoryBroker(max_payload=3 * KIB)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_bytes(noise(1_000_000))
    agent.transfers.request_blob("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "raise the broker's packet limit" in str(agent.errors["tx2", ref.sha256])
    agent.link.max_payload = KIB
    agent.errors.clear()
    agent.transfers.request_blob("tx2", ref)
    agent.step(0.0)
    assert "raise its packet limit" in str(agent.errors["tx2", ref.sha256])


def test_a_blob_is_never_in_memory_as_a_whole(tmp_path):
    source = tmp_path / "source"
    with open(source, "wb") as file:
        for number in range(32):
            file.write(noise(1_000_000, number))
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.store_file(source)
    tracemalloc.start()
    try:
        agent.transfers.request_blob("tx2", ref)
        play(broker, coordinator, agent, until=lambda: bool(agent.errors))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert agent.errors == {("tx2", ref.sha256): None}
    assert peak_bytes < 12_000_000


def test_other_messages_are_left_to_the_owner(tmp_path):
    agent = Side(MemoryBroker(), tmp_path, "tx2")
    ack = wire.parse_topic(TOPICS.device_topic("tx2", "dn", "ack"))
    assert not agent.transfers.handle_message(ack, b"anything", 0.0)
    echo = wire.parse_topic(TOPICS.device_topic("tx2", "up", "blob/get"))
    assert agent.transfers.handle_message(echo, b"anything", 0.0)


def test_chunks_nobody_asked_for_are_dropped(tmp_path):
    agent = Side(MemoryBroker(), tmp_path, "tx2")
    route = wire.parse_topic(TOPICS.chunk_topic("tx2", "dn", "0" * 64, 3))
    assert agent.transfers.handle_message(route, b"x" * 1000, 0.0)
    assert agent.transfers.traffic_bytes("tx2", "dn") == 0
    assert list(tmp_path.iterdir()) == []


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(messages=st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=40), st.integers(0, 200)), max_size=12))
def test_arbitrary_and_mutated_blob_messages_give_only_the_named_error(tmp_path, messages):
    payload = noise(10_000)
    depot = BlobStore(tmp_path)
    here = depot.store_bytes(payload)
    coming = ref_of(noise(10_000, 1))
    broker = MemoryBroker(max_payload=5 * KIB)
    transfers = Transfers(broker.connect(), depot, TOPICS, "up", lambda device, sha256: True)
    transfers.request_blob("tx2", coming)
    digests = "".join(hashlib.sha256(noise(10_000, 1)[at : at + 4096]).hexdigest() for at in range(0, 10_000, 4096))
    valid = [
        ("blob/get", wire.encode(wire.ChunkRequest(sha256=here.sha256, chunk=4096))),
        ("blob/get", wire.encode(wire.ChunkRequest(sha256=here.sha256, chunk=4096, indices=(0, 2, 2**53)))),
        (
            f"blob/{coming.sha256}/manifest",
            wire.encode(wire.BlobManifest(sha256=coming.sha256, size=10_000, chunk=4096, digests=digests)),
        ),
        (f"blob/{coming.sha256}/missing", wire.encode(wire.MissingBlob(sha256=coming.sha256))),
        (f"blob/{coming.sha256}/0", noise(10_000, 1)[:4096]),
        (f"blob/{coming.sha256}/7", b""),
    ]
    for number, (kind, junk, place) in enumerate(messages):
        leaf, message = valid[kind]
        if junk:
            message = message[:place] + junk + message[place + len(junk) :]
        with suppress(WireError):
            assert transfers.handle_message(
                wire.parse_topic(TOPICS.device_topic("tx2", "dn", leaf)), message, float(number)
            )
        assert transfers.step(float(number)) > number
