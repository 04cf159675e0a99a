"""Of two processes of one name, one ends. A restart or take-over is never refused."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedquilt import wire
from fedquilt.core import JobError
from fedquilt.transport.exclusive_link import ANSWER_S, CONNECT_S, ExclusiveLink, make_coordinator_link
from fedquilt.transport.link import Message
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink

TOPICS = wire.Topics("fleet")
TOPIC = TOPICS.coordinator_process
STEP_S = 0.1


class Client:
    """Client of a broker that has one connection for each id. It reconnects a step after it was disconnected."""

    backlog, max_payload = 0, 1 << 20

    def __init__(self, machine: Machine, id: str) -> None:
        self._machine, self.id, self.session = machine, id, 0
        self._link: MemoryLink | None = None
        self._filters: list[str] = []
        self._unsent: list[tuple[str, bytes, bool]] = []

    @property
    def connected(self) -> bool:
        return self._link is not None

    def connect(self) -> None:
        self._machine.disconnect(self.id)
        self._machine.clients[self.id], self._link = self, self._machine.broker.connect()
        self.session += 1
        self._link.subscribe(self._filters)
        for topic, payload, retain in self._unsent:
            self._link.publish(topic, payload, retain=retain)
        self._unsent.clear()

    def lose_connection(self) -> None:
        assert self._link is not None
        self._machine.broker.lose_client(self._link)
        self._link = None

    def subscribe(self, filters: Sequence[str]) -> None:
        self._filters += filters
        if self._link is not None:
            self._link.subscribe(filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if self._link is None:
            self._unsent.append((topic, payload, retain))
        else:
            self._link.publish(topic, payload, retain=retain)

    def receive(self) -> list[Message]:
        return [] if self._link is None else self._link.receive()

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self._machine.take_step(min(timeout_s, STEP_S), self)

    def close(self) -> None:
        if self._link is not None:
            self._machine.clients.pop(self.id, None)
            self._link.close()
            self._link = None


class Machine:
    """Broker, and processes that take their turns while one of them waits."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.is_reachable = True
        self.clients: dict[str, Client] = {}
        self.running: dict[Client, ExclusiveLink] = {}
        self._started = 0

    def disconnect(self, id: str) -> None:
        if (client := self.clients.pop(id, None)) is not None:
            client.lose_connection()

    def create(self, home: str, *, id: str = "coordinator", process: int | None = None) -> tuple[Client, ExclusiveLink]:
        self._started += 1
        client = Client(self, id)
        started = self._started if process is None else process
        return client, ExclusiveLink(
            client,  # type: ignore[arg-type]  # without `unsubscribe` and `keep_alive`
            TOPIC,
            Path(home),
            subject="coordinator",
            fix="rename it",
            clock=lambda: self.broker.now_s,
            process=f"{started:032x}",
        )

    def start(self, home: str, *, id: str = "coordinator", process: int | None = None) -> Client:
        client, link = self.create(home, id=id, process=process)
        try:
            link.require_exclusive_use()
        except JobError:
            link.close()
            raise
        self.running[client] = link
        return client

    def kill(self, client: Client) -> None:
        del self.running[client]
        if client.connected:
            self.disconnect(client.id)

    def end(self, client: Client) -> None:
        self.running.pop(client).close()

    def take_step(self, step_s: float, waiting: Client | None = None) -> None:
        self.broker.now_s += step_s
        for client in [*self.running, *([waiting] if waiting else [])]:
            if self.is_reachable and not client.connected:
                client.connect()
            self.broker.deliver_due()
            self.broker.now_s += 0.001
            self.broker.deliver_due()
            if client is not waiting:
                self.running[client].receive()
            self.broker.deliver_due()

    def play(self, steps: int = 30) -> None:
        for _ in range(steps):
            self.take_step(STEP_S)


@pytest.fixture
def machine() -> Machine:
    return Machine()


SAME_ID, OWN_IDS = ("x", "x"), ("x", "y")
both_brokers = pytest.mark.parametrize("ids", [SAME_ID, OWN_IDS], ids=["one-client-id", "own-client-ids"])


@both_brokers
@pytest.mark.parametrize("process", [2, 0], ids=["clock-right", "clock-behind"])
def test_the_second_process_ends_and_names_the_first(machine, ids, process):
    first = machine.start("/a", id=ids[0], process=1)
    with pytest.raises(JobError, match=rf"the coordinator runs already, at {socket.gethostname()}:/a: stop it, or re"):
        machine.start("/b", id=ids[1], process=process)
    machine.play()
    assert first.connected


@both_brokers
def test_a_second_process_can_be_refused_again_and_again(machine, ids):
    machine.start("/a", id=ids[0])
    for _ in range(3):
        with pytest.raises(JobError, match=":/a"):
            machine.start("/b", id=ids[1])
        machine.play(1)


def test_a_process_after_one_that_ended_starts_at_once(machine):
    machine.end(machine.start("/a"))
    machine.start("/b")
    assert machine.broker.now_s < 1


@pytest.mark.parametrize("home", ["/a", "/b"])
def test_a_process_after_a_killed_one_starts_with_a_warning(machine, caplog, home):
    machine.kill(machine.start("/a"))
    with caplog.at_level(logging.WARNING):
        machine.start(home)
    assert ANSWER_S < machine.broker.now_s < ANSWER_S + 1
    assert "the former process does not answer, taking over" in caplog.text
    machine.play()


def test_a_broker_that_restores_an_old_state_ends_no_process(machine):
    killed = machine.start("/a")
    machine.kill(killed)
    old_state = machine.broker._retained[TOPIC]
    machine.start("/b")
    for _ in range(3):
        machine.broker._retained[TOPIC] = old_state
        machine.disconnect("coordinator")
        machine.play(3)
    assert len(machine.running) == 1


def test_messages_queued_for_a_killed_process_do_not_refuse_its_successor(machine):
    killed = machine.start("/a")
    queued = [wire.encode(machine.running[killed]._state)]
    machine.kill(killed)
    client, link = machine.create("/a")
    client.connect()
    for number, payload in enumerate(queued):
        machine.broker._schedule_delivery(client._link, Message(TOPIC, payload), number * 1e-6)
    link.require_exclusive_use()


@both_brokers
@pytest.mark.parametrize("earlier", [0, 1])
def test_of_two_that_started_without_a_broker_the_later_one_ends(machine, ids, earlier):
    machine.is_reachable = False
    processes = [1, 2] if earlier == 0 else [2, 1]
    clients = [machine.start(home, id=id, process=n) for home, id, n in zip("ab", ids, processes, strict=True)]
    assert machine.broker.now_s == pytest.approx(2 * CONNECT_S, abs=0.1)
    machine.is_reachable = True
    with pytest.raises(JobError, match=f":{Path('ab'[earlier]).resolve()}: stop it"):
        machine.play()
    later = clients[1 - earlier]
    machine.end(later)
    machine.play()
    assert clients[earlier].connected
    assert machine.broker._retained[TOPIC][1] == wire.encode(machine.running[clients[earlier]]._state)


@both_brokers
def test_the_running_process_reports_the_place_of_the_other_once(machine, ids, caplog):
    machine.start("/a", id=ids[0])
    with pytest.raises(JobError):
        machine.start("/b", id=ids[1])
    machine.play()
    assert caplog.text.count(f"another coordinator, at {socket.gethostname()}:/b, must end: stop it") == 1


def test_a_place_cannot_control_a_terminal(machine, caplog):
    first = machine.start("/a")
    state = wire.ProcessState(f"{9:032x}", 1, False, "/b\n\x1b[2J")
    machine.broker.connect().publish(TOPIC, wire.encode(state))
    machine.play(1)
    assert first.connected
    assert "another coordinator, at /b??[2J, must end" in caplog.text


def test_a_topic_that_the_broker_does_not_permit_is_reported(machine, caplog):
    client, link = machine.create("/a")
    client._filters.clear()
    link.require_exclusive_use()
    assert f"the broker does not deliver {TOPIC}: permit the topic" in caplog.text


def test_a_link_that_is_connected_already_publishes_its_state_before_it_waits(machine, monkeypatch):
    client, link = machine.create("/a")
    client.connect()
    numbers = []
    monkeypatch.setattr(
        client, "wait", lambda timeout_s: numbers.append(link._state.number) or machine.take_step(STEP_S, client)
    )
    link.require_exclusive_use()
    assert numbers
    assert numbers[0] == 1


def test_a_slow_broker_is_not_reported_and_the_second_process_ends(machine, monkeypatch, caplog):
    machine.start("/a", id="x")
    client, link = machine.create("/b", id="y")
    monkeypatch.setattr(client, "receive", lambda: Client.receive(client) if machine.broker.now_s > 10 else [])
    with pytest.raises(JobError, match=":/a"):
        link.require_exclusive_use()
    assert machine.broker.now_s > 10
    assert "does not come back" not in caplog.text


def test_other_messages_pass_and_unreadable_states_are_ignored(machine):
    first = machine.start("/a")
    link = machine.running[first]
    link.subscribe(["other"])
    for topic, payload in (("other", b"1"), (TOPIC, b"junk"), (TOPIC, b"")):
        machine.broker.connect().publish(topic, payload)
    machine.broker.now_s += 1
    machine.broker.deliver_due()
    assert [message.payload for message in link.receive()] == [b"1"]


def test_a_fleet_has_one_topic_of_coordinators():
    broker = MemoryBroker()
    links = [make_coordinator_link(broker.connect(), "fleet", Path(home)) for home in "ab"]
    assert {link._topic for link in links} == {TOPIC}
