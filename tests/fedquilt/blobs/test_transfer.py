from __future__ import annotations

import hashlib
import math
import random
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.core import BlobRef, WireError
from fedquilt.transport.link import Faults, MemoryBroker, MemoryLink, simulate

KIB = 1024
TOPICS = wire.Topics("lab")
ROUGH = Faults(drop=0.1, duplicate=0.1, corrupt=0.1, delay_s=0.5)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def ref_of(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


class Side:
    """One process that moves blobs: an agent (a device's name) or the coordinator (no name)."""

    def __init__(self, broker: MemoryBroker, folder: Path, device: str = "", **settings: object) -> None:
        self.finished = False
        self.link = broker.connect()
        self.depot = Depot(folder)
        self.refused: set[tuple[str, str]] = set()
        self.undecodable = 0
        self.errors: dict[tuple[str, str], str | None] = {}
        way: wire.Direction = "up" if device else "dn"
        self.transfers = Transfers(
            self.link,
            self.depot,
            TOPICS,
            way,
            lambda device, sha256: (device, sha256) not in self.refused,
            **settings,  # type: ignore[arg-type]
        )
        self.link.subscribe(TOPICS.for_device(device) if device else TOPICS.for_coordinator())

    def fds(self) -> Sequence[int]:
        return ()

    def step(self, now_s: float) -> float:
        for message in self.link.receive():
            try:
                assert self.transfers.handle(wire.route(message.topic), message.payload, now_s)
            except WireError:
                self.undecodable += 1
        due_s = self.transfers.step(now_s)
        for device, sha256, error in self.transfers.take_done():
            assert (device, sha256) not in self.errors
            self.errors[device, sha256] = error
        return due_s


def play(broker: MemoryBroker, *sides: Side, until: Callable[[], bool], limit_s: float = 1e6) -> None:
    simulate(broker, lambda: [(side.link, side) for side in sides], until, limit_s)


# -- one blob --


@pytest.mark.parametrize("size", [0, 1, 256 * KIB, 256 * KIB + 1, 3_000_000])
def test_an_agent_pulls_what_the_coordinator_offers(tmp_path: Path, size: int) -> None:
    """Downwards; from nothing to several chunks."""
    broker, payload = MemoryBroker(), noise(size)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(payload)
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", ref.sha256): None}
    path = agent.depot.path(ref.sha256)
    assert path is not None
    assert path.read_bytes() == payload
    assert agent.transfers.traffic_bytes("tx2", "dn") == size
    assert coordinator.transfers.traffic_bytes("tx2", "dn") == size
    assert coordinator.transfers.traffic_bytes("tx2", "up") == 0


def test_the_coordinator_pulls_what_an_agent_offers(tmp_path: Path) -> None:
    """Upwards: the same, mirrored."""
    broker, payload = MemoryBroker(), noise(1_000_000)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = agent.depot.put(payload)
    coordinator.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.depot.has(ref)
    assert coordinator.transfers.traffic_bytes("tx2", "up") == 1_000_000
    assert agent.transfers.traffic_bytes("tx2", "up") == 1_000_000


def test_what_is_here_already_is_done_at_once(tmp_path: Path) -> None:
    """Nothing is published."""
    broker = MemoryBroker()
    agent = Side(broker, tmp_path, "tx2")
    ref = agent.depot.put(b"here")
    agent.transfers.want("tx2", ref)
    assert agent.transfers.take_done() == [("tx2", ref.sha256, None)]
    assert agent.transfers.take_done() == []
    assert agent.transfers.step(0.0) == math.inf
    assert broker.published == 0


def test_wanting_twice_pulls_once_and_cancelling_ends_it(tmp_path: Path) -> None:
    """A cancelled pull is not reported."""
    broker = MemoryBroker()
    agent = Side(broker, tmp_path, "tx2")
    ref = ref_of(b"there")
    agent.transfers.want("tx2", ref)
    agent.transfers.want("tx2", ref)
    assert agent.transfers.step(0.0) == 2.0
    assert broker.published == 1
    agent.transfers.cancel("tx2", ref.sha256)
    agent.transfers.cancel("tx2", ref.sha256)
    assert agent.transfers.step(5.0) == math.inf
    assert agent.transfers.take_done() == []


def test_a_blob_the_other_side_does_not_have_ends_with_its_reason(tmp_path: Path) -> None:
    """Not here, or not for this device; wanting it again asks again."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    absent, secret = ref_of(b"absent"), coordinator.depot.put(b"secret")
    coordinator.refused.add(("tx2", secret.sha256))
    agent.transfers.want("tx2", absent)
    agent.transfers.want("tx2", secret)
    play(broker, coordinator, agent, until=lambda: len(agent.errors) == 2)
    assert "is not here any more" in str(agent.errors["tx2", absent.sha256])
    assert "is not offered to tx2 now" in str(agent.errors["tx2", secret.sha256])
    assert coordinator.transfers.traffic_bytes("tx2", "dn") == 0
    coordinator.refused.clear()
    agent.errors.clear()
    agent.transfers.want("tx2", secret)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", secret.sha256): None}


def test_a_silent_peer_ends_the_pull_after_patience(tmp_path: Path) -> None:
    """Nobody answers: 60 s, not sooner."""
    broker = MemoryBroker()
    agent = Side(broker, tmp_path, "tx2", patience_s=60.0)
    ref = ref_of(b"there")
    agent.transfers.want("tx2", ref)
    play(broker, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", ref.sha256): "no answer for 60 s"}
    assert broker.now_s == 60.0


def test_a_blob_damaged_on_the_sender_s_disk_is_not_sent_and_can_be_stored_again(tmp_path: Path) -> None:
    """The puller is told, and the damaged file is gone."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(b"0123456789")
    (tmp_path / "c" / ref.sha256).write_bytes(b"0123456780")
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "cannot send it" in str(agent.errors["tx2", ref.sha256])
    assert not coordinator.depot.has(ref)


def test_a_full_disk_ends_the_pull_with_the_mend(tmp_path: Path) -> None:
    """The folder has gone from under the agent."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(1_000_000))
    agent.transfers.want("tx2", ref)
    (tmp_path / "a").rmdir()
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "cannot receive blob" in str(agent.errors["tx2", ref.sha256])


# -- packets --


class Meter(MemoryBroker):
    """A broker that notes the largest payload it was given, and refuses what it would not take."""

    largest = 0

    def _receive(self, topic: str, payload: bytes, retain: bool) -> None:
        assert len(payload) <= self.max_payload
        self.largest = max(self.largest, len(payload))
        super()._receive(topic, payload, retain)


def test_chunks_fit_a_broker_that_takes_128_kib(tmp_path: Path) -> None:
    """20 MB; each side sees only the broker's limit."""
    broker = Meter(max_payload=128 * KIB)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(20_000_000))
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.depot.has(ref)
    assert broker.largest == 127 * KIB


def test_the_smaller_limit_of_the_two_sides_counts(tmp_path: Path) -> None:
    """Only one of them has been told a limit by the broker (MQTT 3.1.1 says none)."""
    for side in ("c", "a"):
        broker = Meter(max_payload=256 * KIB)
        coordinator = Side(broker, tmp_path / side / "c")
        agent = Side(broker, tmp_path / side / "a", "tx2")
        (coordinator if side == "c" else agent).link.max_payload = 16 * KIB
        ref = coordinator.depot.put(noise(100_000))
        agent.transfers.want("tx2", ref)
        play(broker, coordinator, agent, until=lambda agent=agent: bool(agent.errors))
        assert agent.depot.has(ref)
        assert broker.largest == 15 * KIB


def test_a_limit_that_shrinks_in_the_middle_only_costs_what_was_on_its_way(tmp_path: Path) -> None:
    """Moved to another broker: the chunks that are here stay, though the blob is cut anew."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(4_000_000))
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: agent.transfers.traffic_bytes("tx2", "dn") > 3_000_000)
    for link in (coordinator.link, agent.link):
        link.max_payload = 64 * KIB
        link.session += 1
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert agent.depot.has(ref)
    assert agent.transfers.traffic_bytes("tx2", "dn") < 4_000_000 + 9 * 256 * KIB


def test_a_blob_too_large_for_the_broker_s_packets_says_so(tmp_path: Path) -> None:
    """A manifest of 1 MB in 2 KiB packets does not fit; packets of 1 KiB fit nothing."""
    broker = MemoryBroker(max_payload=3 * KIB)
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(1_000_000))
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: bool(agent.errors))
    assert "raise the broker's packet limit" in str(agent.errors["tx2", ref.sha256])
    agent.link.max_payload = KIB
    agent.errors.clear()
    agent.transfers.want("tx2", ref)
    agent.step(0.0)
    assert "raise its packet limit" in str(agent.errors["tx2", ref.sha256])


# -- faults --


@pytest.mark.parametrize("seed", range(60))
def test_every_blob_arrives_through_loss_duplicates_delay_and_damage(tmp_path: Path, seed: int) -> None:
    """Both ways at once, three devices, blobs of 0 to 40 chunks; a failing seed is in the test's name."""
    roll = random.Random(seed)
    faults = Faults(
        drop=roll.choice([0.0, 0.05, 0.3]),
        duplicate=roll.choice([0.0, 0.3]),
        corrupt=roll.choice([0.0, 0.02, 0.2]),
        delay_s=roll.choice([0.0, 0.5, 5.0]),
    )
    broker = MemoryBroker(seed, faults, max_payload=5 * KIB)
    coordinator = Side(broker, tmp_path / "c", patience_s=1e6)
    agents = {name: Side(broker, tmp_path / name, name, patience_s=1e6) for name in ("nano", "tx2", "xavier")}
    shared = coordinator.depot.put(roll.randbytes(roll.randrange(160_000)))
    wanted = []
    for name, agent in agents.items():
        mine = agent.depot.put(roll.randbytes(roll.randrange(40_000)))
        coordinator.transfers.want(name, mine)
        agent.transfers.want(name, shared)
        wanted.append((agent, name, mine))
    play(broker, coordinator, *agents.values(), until=lambda: all(agent.errors for agent in agents.values()))
    play(broker, coordinator, *agents.values(), until=lambda: len(coordinator.errors) == 3)
    for agent, name, mine in wanted:
        assert agent.errors == {(name, shared.sha256): None}
        assert coordinator.errors[name, mine.sha256] is None
        assert Depot(tmp_path / name).read(shared.sha256, 0, 1 << 20) == coordinator.depot.read(
            shared.sha256, 0, 1 << 20
        )
        assert hashlib.sha256(coordinator.depot.read(mine.sha256, 0, 1 << 20)).hexdigest() == mine.sha256


def test_the_same_seed_plays_the_same(tmp_path: Path) -> None:
    """Otherwise a failing seed could not be replayed."""
    ends = []
    for attempt in ("one", "two"):
        broker = MemoryBroker(7, ROUGH, max_payload=5 * KIB)
        coordinator = Side(broker, tmp_path / attempt / "c")
        agent = Side(broker, tmp_path / attempt / "a", "tx2")
        agent.transfers.want("tx2", coordinator.depot.put(noise(50_000)))
        play(broker, coordinator, agent, until=lambda agent=agent: bool(agent.errors))
        ends.append((broker.now_s, broker.published, agent.undecodable))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("way", ["dn", "up"])
def test_a_transfer_goes_on_where_a_crash_ended_it(tmp_path: Path, way: wire.Direction) -> None:
    """The puller dies half way, three times, and is started again on the same folder: 60 chunks pass once."""
    broker = MemoryBroker(max_payload=17 * KIB)
    size = 60 * 16 * KIB
    devices = {"dn": ("", "tx2"), "up": ("tx2", "")}[way]
    server = Side(broker, tmp_path / "server", devices[0])
    ref = server.depot.put(noise(size))
    received = 0
    for crash_at in (size // 4, size // 4, size // 4, math.inf):
        puller = Side(broker, tmp_path / "puller", devices[1])
        puller.transfers.want("tx2", ref)

        def moved(puller: Side = puller) -> int:
            return puller.transfers.traffic_bytes("tx2", way)

        play(broker, server, puller, until=lambda p=puller, at=crash_at: bool(p.errors) or moved() >= at)
        received += moved()
        broker.lose(puller.link)
        for _ in range(2):  # what was on its way goes nowhere
            broker.now_s += 1.0
            broker.deliver()
            server.step(broker.now_s)
    assert puller.errors == {("tx2", ref.sha256): None}
    assert puller.depot.has(ref)
    assert received == size


def test_the_serving_side_may_restart_in_the_middle(tmp_path: Path) -> None:
    """The puller asks on; nothing that is here is sent again but what was on its way."""
    broker = MemoryBroker(max_payload=17 * KIB)
    size = 60 * 16 * KIB
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(size))
    agent.transfers.want("tx2", ref)
    play(broker, coordinator, agent, until=lambda: agent.transfers.traffic_bytes("tx2", "dn") >= size // 2)
    broker.lose(coordinator.link)
    away_s = broker.now_s
    play(broker, agent, until=lambda: broker.now_s > away_s + 60)
    again = Side(broker, tmp_path / "c")
    play(broker, again, agent, until=lambda: bool(agent.errors))
    assert agent.errors == {("tx2", ref.sha256): None}
    assert agent.transfers.traffic_bytes("tx2", "dn") == size


def test_a_new_session_asks_at_once_and_not_after_a_time_out(tmp_path: Path) -> None:
    """All that was on its way is lost with the connection."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put(noise(1_000_000))
    agent.transfers.want("tx2", ref)
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


# -- many at once --


def test_devices_are_served_side_by_side(tmp_path: Path) -> None:
    """Four start together and none has half of its blob before every other has a quarter."""
    broker, size = MemoryBroker(max_payload=17 * KIB), 64 * 16 * KIB
    coordinator = Side(broker, tmp_path / "c")
    agents = [Side(broker, tmp_path / name, name) for name in ("a", "b", "c1", "d")]
    ref = coordinator.depot.put(noise(size))
    for agent, name in zip(agents, ("a", "b", "c1", "d"), strict=True):
        agent.transfers.want(name, ref)

    def moved() -> list[int]:
        return [coordinator.transfers.traffic_bytes(name, "dn") for name in ("a", "b", "c1", "d")]

    play(broker, coordinator, *agents, until=lambda: max(moved()) >= size // 2)
    assert min(moved()) >= size // 4
    play(broker, coordinator, *agents, until=lambda: all(agent.errors for agent in agents))
    assert all(agent.depot.has(ref) for agent in agents)


def test_devices_that_are_gone_do_not_keep_others_waiting(tmp_path: Path) -> None:
    """Two places, four dead devices before one that lives: it is served within a few time-outs."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c", max_pulls=2), Side(broker, tmp_path / "a", "alive")
    ref = agent.depot.put(noise(2_000_000))
    for number in range(4):
        coordinator.transfers.want(f"dead{number}", ref_of(bytes([number])))
    coordinator.transfers.want("alive", ref)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.errors == {("alive", ref.sha256): None}
    assert broker.now_s < 10.0
    play(broker, coordinator, agent, until=lambda: len(coordinator.errors) == 5)
    assert coordinator.errors["dead3", ref_of(bytes([3])).sha256] == "no answer for 300 s"


def test_one_blob_from_two_devices_is_pulled_once_and_finished_for_both(tmp_path: Path) -> None:
    """Also when the first of them is gone."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "alive")
    ref = agent.depot.put(noise(600_000))
    coordinator.transfers.want("dead", ref)
    coordinator.transfers.want("alive", ref)
    play(broker, coordinator, agent, until=lambda: bool(coordinator.errors))
    assert coordinator.errors == {("dead", ref.sha256): None, ("alive", ref.sha256): None}
    assert coordinator.transfers.traffic_bytes("alive", "up") == 600_000


def test_many_small_blobs_arrive_side_by_side(tmp_path: Path) -> None:
    """100 of them, 16 at a time: two round trips of 2 ms each for every 16, not for every one."""
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    for number in range(100):
        agent.transfers.want("tx2", coordinator.depot.put(number.to_bytes(2, "big") * 50))
    play(broker, coordinator, agent, until=lambda: len(agent.errors) == 100)
    assert set(agent.errors.values()) == {None}
    assert broker.now_s < 100 / 16 * 2 * 0.004


class SlowLink(MemoryLink):
    """A link whose queue is emptied by hand."""

    queued = 0
    most = 0

    @property
    def backlog(self) -> int:  # type: ignore[override]
        return self.queued

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if not reliable:
            self.queued += len(payload)
            self.most = max(self.most, self.queued)
        super().publish(topic, payload, retain=retain, reliable=reliable)


def test_the_send_budget_is_kept_and_used(tmp_path: Path) -> None:
    """Ten devices ask for 20 chunks of 15 KiB; never more than 64 KiB, four chunks, are queued."""
    broker = MemoryBroker(max_payload=16 * KIB)
    link = SlowLink(broker, None)
    depot = Depot(tmp_path)
    ref = depot.put(noise(20 * 15 * KIB))
    transfers = Transfers(link, depot, TOPICS, "dn", lambda device, sha256: True, budget_bytes=64 * KIB)
    get = wire.encode(wire.Get(sha256=ref.sha256, chunk=15 * KIB, indices=tuple(range(20))))
    for number in range(10):
        transfers.handle(wire.route(TOPICS.device(f"d{number}", "up", "blob/get")), get, 0.0)
    steps, now_s = 0, 0.0
    while (due_s := transfers.step(now_s)) != math.inf:
        assert due_s > now_s
        now_s, steps = due_s, steps + 1
        link.queued = 0
    assert link.most == 60 * KIB
    assert steps == 200 / 4 - 1
    assert all(transfers.traffic_bytes(f"d{number}", "dn") == ref.size for number in range(10))


def test_no_more_is_asked_for_than_the_budget(tmp_path: Path) -> None:
    """Twelve devices are pulled from at once, but only 64 KiB may be on their way."""
    broker = MemoryBroker(max_payload=16 * KIB)
    coordinator = Side(broker, tmp_path / "c", budget_bytes=64 * KIB)
    agents = [Side(broker, tmp_path / f"d{number}", f"d{number}") for number in range(12)]
    for number, agent in enumerate(agents):
        coordinator.transfers.want(f"d{number}", agent.depot.put(noise(200_000, number)))
    most = 0

    def over() -> bool:
        nonlocal most
        inbox = sum(len(m.payload) for m in coordinator.link.inbox)
        flying = sum(len(m.payload) for _, _, link, m in broker._heap if link is coordinator.link)
        most = max(most, inbox + flying)
        return len(coordinator.errors) == 12

    play(broker, coordinator, *agents, until=over)
    assert set(coordinator.errors.values()) == {None}
    assert 45 * KIB <= most <= 64 * KIB + 12 * KIB  # and the manifests


def test_a_blob_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """32 MB between two sides in one process, the broker's queue included: less than 12 MB at any time."""
    source = tmp_path / "source"
    with open(source, "wb") as file:
        for number in range(32):
            file.write(noise(1_000_000, number))
    broker = MemoryBroker()
    coordinator, agent = Side(broker, tmp_path / "c"), Side(broker, tmp_path / "a", "tx2")
    ref = coordinator.depot.put_file(source)
    tracemalloc.start()
    try:
        agent.transfers.want("tx2", ref)
        play(broker, coordinator, agent, until=lambda: bool(agent.errors))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert agent.errors == {("tx2", ref.sha256): None}
    assert peak_bytes < 12_000_000


# -- what comes from outside --


def test_other_messages_are_left_to_the_owner(tmp_path: Path) -> None:
    """And our own, come back, are nobody's."""
    agent = Side(MemoryBroker(), tmp_path, "tx2")
    ack = wire.route(TOPICS.device("tx2", "dn", "ack"))
    assert not agent.transfers.handle(ack, b"anything", 0.0)
    echo = wire.route(TOPICS.device("tx2", "up", "blob/get"))
    assert agent.transfers.handle(echo, b"anything", 0.0)


def test_chunks_nobody_asked_for_are_dropped(tmp_path: Path) -> None:
    """They are not written, not counted, not kept."""
    agent = Side(MemoryBroker(), tmp_path, "tx2")
    route = wire.route(TOPICS.chunk("tx2", "dn", "0" * 64, 3))
    assert agent.transfers.handle(route, b"x" * 1000, 0.0)
    assert agent.transfers.traffic_bytes("tx2", "dn") == 0
    assert list(tmp_path.iterdir()) == []


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(messages=st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=40), st.integers(0, 200)), max_size=12))
def test_arbitrary_and_mutated_blob_messages_give_only_the_named_error(
    tmp_path: Path, messages: list[tuple[int, bytes, int]]
) -> None:
    """To a side that both pulls and serves; afterwards it still steps."""
    payload = noise(10_000)
    depot = Depot(tmp_path)
    here = depot.put(payload)
    coming = ref_of(noise(10_000, 1))
    broker = MemoryBroker(max_payload=5 * KIB)
    transfers = Transfers(broker.connect(), depot, TOPICS, "up", lambda device, sha256: True)
    transfers.want("tx2", coming)
    digests = "".join(hashlib.sha256(noise(10_000, 1)[at : at + 4096]).hexdigest() for at in range(0, 10_000, 4096))
    valid: list[tuple[str, bytes]] = [
        ("blob/get", wire.encode(wire.Get(sha256=here.sha256, chunk=4096))),
        ("blob/get", wire.encode(wire.Get(sha256=here.sha256, chunk=4096, indices=(0, 2, 2**53)))),
        (
            f"blob/{coming.sha256}/manifest",
            wire.encode(wire.Manifest(sha256=coming.sha256, size=10_000, chunk=4096, digests=digests)),
        ),
        (f"blob/{coming.sha256}/missing", wire.encode(wire.Missing(sha256=coming.sha256))),
        (f"blob/{coming.sha256}/0", noise(10_000, 1)[:4096]),
        (f"blob/{coming.sha256}/7", b""),
    ]
    for number, (kind, junk, place) in enumerate(messages):
        leaf, message = valid[kind]
        if junk:
            message = message[:place] + junk + message[place + len(junk) :]
        with suppress(WireError):
            assert transfers.handle(wire.route(TOPICS.device("tx2", "dn", leaf)), message, float(number))
        assert transfers.step(float(number)) > number
