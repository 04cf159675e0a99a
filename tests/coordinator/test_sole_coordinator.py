"""A second coordinator of a fleet is refused, and a restart or take-over never is."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedquilt import wire
from fedquilt.coordinator.delivery.sole_coordinator import SoleCoordinatorLink, make_client_id
from fedquilt.core import JobError
from fedquilt.transport.link import Link, LinkWrapper
from fedquilt.transport.memory_link import MemoryBroker

TOPIC = wire.Topics("fleet").coord
WILL = (TOPIC, wire.encode(wire.CoordState(online=False)))


class TurnTakingLink(LinkWrapper):
    """Link whose `wait` takes a tenth of a second, in which the other coordinator receives its messages."""

    def __init__(self, link: Link, broker: MemoryBroker, other_turn: Callable[[], object]) -> None:
        super().__init__(link)
        self._broker, self._other_turn = broker, other_turn

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self._broker.now_s += min(timeout_s, 0.1)
        self._broker.deliver_due()
        self._other_turn()
        self._broker.deliver_due()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


def deliver(broker: MemoryBroker) -> None:
    broker.now_s += 0.1
    broker.deliver_due()


def start(broker: MemoryBroker, home: str, other_turn: Callable[[], object] = lambda: None) -> SoleCoordinatorLink:
    link = TurnTakingLink(broker.connect(WILL), broker, other_turn)
    sole_link = SoleCoordinatorLink(link, "fleet", Path(home), lambda: broker.now_s)
    sole_link.require_sole_coordinator()
    sole_link.publish(TOPIC, wire.encode(wire.CoordState(online=True, epoch=3)), retain=True)
    broker.deliver_due()
    return sole_link


def test_another_home_is_refused_with_the_place_of_the_first(broker):
    first = start(broker, "/a")
    with pytest.raises(JobError, match=rf"'fleet' has a coordinator already, {socket.gethostname()}:/a: stop it, or"):
        start(broker, "/b", first.receive)
    assert broker.now_s < 1


def test_the_same_home_takes_over_at_once_even_if_the_first_still_runs(broker):
    first = start(broker, "/a")
    start(broker, "/a", first.receive)
    assert broker.now_s < 1


def test_a_refused_one_disconnects_without_a_last_will(broker):
    first = start(broker, "/a")
    for _ in range(2):
        with pytest.raises(JobError, match="has a coordinator already"):
            start(broker, "/b", first.receive)
        first.receive()


@pytest.mark.parametrize("state", [WILL[1], wire.encode(wire.CoordState(online=False, epoch=1, home="host:/b"))])
def test_the_end_of_another_one_does_not_hide_a_running_one(broker, state):
    first, other = start(broker, "/a"), broker.connect()
    other.publish(TOPIC, state, retain=True)
    deliver(broker)
    first.receive()
    with pytest.raises(JobError, match=":/a: stop it"):
        start(broker, "/c", first.receive)


def test_a_question_soon_after_another_is_answered_later(broker):
    first = start(broker, "/a")
    for home in ("/b", "/c"):
        with pytest.raises(JobError, match=":/a: stop it"):
            start(broker, home, first.receive)
    assert 1.0 < broker.now_s < 2.0


def test_of_two_that_start_together_the_one_with_the_later_home_ends(broker):
    links = {
        home: SoleCoordinatorLink(broker.connect(WILL), "fleet", Path(home), lambda: broker.now_s) for home in "ab"
    }
    for link in links.values():  # both have asked before the other was online
        link.publish(TOPIC, wire.encode(wire.CoordState(online=True, epoch=1)), retain=True)
    deliver(broker)
    assert links["a"].receive() == []
    with pytest.raises(JobError, match="/a: stop it"):
        links["b"].receive()


def test_of_two_without_a_broker_at_their_start_one_ends_once_there_is_one(broker):
    """The later one finds the retained state of the other, and asks whether that one still runs."""
    first = SoleCoordinatorLink(broker.connect(WILL), "fleet", Path("a"), lambda: broker.now_s)
    first.publish(TOPIC, wire.encode(wire.CoordState(online=True, epoch=1)), retain=True)
    deliver(broker)
    second = SoleCoordinatorLink(broker.connect(WILL), "fleet", Path("b"), lambda: broker.now_s)
    second.publish(TOPIC, wire.encode(wire.CoordState(online=True, epoch=1)), retain=True)

    def play() -> None:
        for _ in range(20):
            deliver(broker)
            first.receive()
            second.receive()

    with pytest.raises(JobError, match="/a: stop it"):
        play()


def test_one_that_went_offline_is_no_other(broker):
    first = start(broker, "/a")
    first.publish(TOPIC, wire.encode(wire.CoordState(online=False, epoch=3)), retain=True)
    start(broker, "/b")
    assert broker.now_s < 1


def test_one_whose_retained_state_outlived_it_is_replaced_with_a_warning(broker, caplog):
    start(broker, "/a")
    with caplog.at_level(logging.WARNING):
        start(broker, "/b")
    assert f"the coordinator {socket.gethostname()}:/a of fleet fleet does not answer: taking over" in caplog.text


def test_of_two_that_run_each_warns_and_they_do_not_answer_each_other_for_ever(broker, caplog):
    first = start(broker, "/b")
    broker.now_s += 6
    second = start(broker, "/a")
    for _ in range(10):
        broker.now_s += 2
        broker.deliver_due()
        assert first.receive() == second.receive() == []
    assert caplog.text.count("fleet fleet has another coordinator") == 2


def test_the_id_at_the_broker_is_that_of_the_home():
    ids = {make_client_id("fleet", Path(home)) for home in ("/a", "/b", "/a/../a")}
    assert len(ids) == 2
