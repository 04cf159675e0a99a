"""What a broker can do to a signed fleet: on a broker in memory that the test reads, changes and repeats at will."""

import logging
from collections.abc import Callable

import pytest
from sealed_fleets import CLAIM, TOPICS, Fleet, down_topic, up_topic
from signed_payloads import payload_without_check

from fedquilt import wire
from fedquilt.security import authenticated_link
from fedquilt.transport.link import Message


def test_what_is_said_arrives_as_it_was_said(fleet):
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM, retain=True)
    fleet.run()
    fleet.link.publish(down_topic("a"), b"", retain=True)
    fleet.run()
    assert fleet.heard["coordinator"] == [Message(up_topic("a"), CLAIM)]
    assert fleet.payloads("a") == [CLAIM, b""]
    assert fleet.heard["b"] == []
    assert [payload_without_check(payload) for payload in fleet.broker.of(up_topic("a"))] == [CLAIM]
    assert len(fleet.broker.of(up_topic("a"))[0]) <= len(CLAIM) + authenticated_link.ENVELOPE_BYTES


def test_chunks_and_what_is_for_everybody_are_in_no_envelope(fleet):
    chunk, round = TOPICS.chunk_topic("a", "dn", "0" * 64, 0), TOPICS.round_topic("j")
    fleet.link.publish(chunk, b"bytes")
    fleet.link.publish(round, b"state")
    fleet.boards["a"].publish(TOPICS.chunk_topic("a", "up", "1" * 64, 3), b"more")
    fleet.run()
    assert fleet.broker.of(chunk) == [b"bytes"]
    assert fleet.broker.of(round) == [b"state"]
    assert fleet.payloads("a") == [b"bytes"]
    assert fleet.payloads("coordinator") == [b"more"]


Attack = Callable[[Fleet], None]


def forged(fleet: Fleet) -> None:
    fleet.attacker.publish(up_topic("a"), CLAIM)
    fleet.attacker.publish(down_topic("a"), CLAIM)


def altered(fleet: Fleet) -> None:
    fleet.broker.change = lambda topic, payload: payload.replace(b'"round":1', b'"round":2')
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)


def renumbered(fleet: Fleet) -> None:
    fleet.broker.change = lambda topic, payload: payload.replace(b'"no":1,', b'"no":9,')
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)


def withheld(fleet: Fleet) -> tuple[bytes, bytes]:
    fleet.broker.change = lambda topic, payload: None if "hello" not in topic else payload
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.broker.change = lambda topic, payload: payload
    return fleet.broker.of(up_topic("a"))[-1], fleet.broker.of(down_topic("a"))[-1]


def to_another(fleet: Fleet) -> None:
    said, answered = withheld(fleet)
    fleet.attacker.publish(up_topic("b"), said)
    fleet.attacker.publish(down_topic("b"), answered)


def as_another_kind(fleet: Fleet) -> None:
    said, answered = withheld(fleet)
    fleet.attacker.publish(up_topic("a", "update"), said)
    fleet.attacker.publish(down_topic("a", "ack"), answered)


def sent_back(fleet: Fleet) -> None:
    said, answered = withheld(fleet)
    fleet.attacker.publish(down_topic("a"), said)
    fleet.attacker.publish(up_topic("a"), answered)


@pytest.mark.parametrize("attack", [forged, altered, renumbered, to_another, as_another_kind, sent_back])
def test_what_the_other_side_has_not_said_here_is_refused_by_name(fleet, attack, caplog):
    attack(fleet)
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}
    dropped = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(dropped) == 2, dropped
    assert any("/up/" in line for line in dropped)
    assert any("/dn/" in line for line in dropped)
    fleet.broker.change = lambda topic, payload: payload
    fleet.boards["a"].publish(up_topic("a"), b"1")
    fleet.link.publish(down_topic("a"), b"2")
    fleet.run()
    assert fleet.payloads("coordinator") == [b"1"]
    assert fleet.payloads("a") == [b"2"]


def test_an_older_message_of_a_kind_is_refused_and_the_latest_may_come_again(fleet, caplog):
    for text in (b"1", b"2"):
        fleet.boards["a"].publish(up_topic("a"), text)
        fleet.link.publish(down_topic("a"), text)
    fleet.run()
    for topic in (up_topic("a"), down_topic("a")):
        older, latest = fleet.broker.of(topic)
        fleet.attacker.publish(topic, older)
        fleet.attacker.publish(topic, latest)
    fleet.run()
    assert fleet.payloads("coordinator") == fleet.payloads("a") == [b"1", b"2", b"2"]
    assert caplog.text.count("replayed: ") == 2


def test_nothing_of_an_earlier_coordinator_counts_for_the_next(fleet, caplog):
    fleet.boards["a"].publish(up_topic("a", "update"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    before = fleet.boards["a"].session
    fleet.coordinate()
    fleet.run(6.0)
    assert fleet.boards["a"].session == before + 1
    fleet.heard["a"].clear()
    for topic in (up_topic("a", "update"), down_topic("a")):
        fleet.attacker.publish(topic, fleet.broker.of(topic)[-1])
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}
    assert caplog.text.count("stale: message is signed in another session, so it is late") == 2


def test_nothing_of_an_earlier_start_of_a_board_counts_for_the_next(fleet):
    fleet.boards["a"].publish(up_topic("a", "profile"), b"old", retain=True)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    fleet.heard["coordinator"].clear()
    fleet.join("a")
    fleet.run()
    assert fleet.boards["a"].connected
    for topic in (up_topic("a", "profile"), down_topic("a")):
        fleet.attacker.publish(topic, fleet.broker.of(topic)[-1])
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}


def test_handshakes_that_are_replayed_or_changed_delay_and_change_nothing(fleet):
    hellos = [(topic, payload) for topic, payload in fleet.broker.transcript if topic.endswith("/hello")]
    assert len(hellos) == 8  # four flights with each board
    for topic, payload in hellos:
        fleet.attacker.publish(topic, payload)
        fleet.attacker.publish(topic, payload.replace(b'"tls":"', b'"tls":"AAAA'))
    fleet.run(6.0)
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == fleet.payloads("a") == [CLAIM]


def test_a_board_that_is_alone_tells_observers_that_it_is_there(fleet, caplog):
    fleet.broker.change = lambda topic, payload: None if topic.endswith("/hello") else payload
    board = fleet.join("c")
    fleet.run(1.0)
    assert board.session == 0
    fleet.run(6.0)
    assert board.session > 0
    assert not board.connected
    assert "no coordinator answers" in str(board.problem)
    board.publish(up_topic("c", "presence"), b"there", retain=True)
    board.publish(up_topic("c", "update"), CLAIM)
    assert fleet.broker.of(up_topic("c", "presence")) == [b"there"]
    assert fleet.broker.of(up_topic("c", "update")) == []
    fleet.coordinate()
    fleet.broker.change = lambda topic, payload: payload
    caplog.clear()
    alone = board.session
    fleet.run(6.0)
    assert board.connected
    assert board.session > alone
    assert fleet.heard["coordinator"] == []
    assert "unsigned" not in caplog.text


@pytest.mark.parametrize("flight", range(4))
def test_a_lost_flight_of_a_handshake_is_made_up_for(fleet, flight):
    lost = []

    def drop_once(topic, payload):
        if topic.endswith("/hello") and b'"flight":%d' % flight in payload and not lost:
            lost.append(topic)
            return None
        return payload

    fleet.broker.change = drop_once
    board = fleet.join("c")
    fleet.run(0.3)
    assert lost
    assert not board.connected
    fleet.run(6.0)
    assert board.connected


def test_a_forged_announcement_costs_a_handshake_every_few_seconds_at_most(fleet):
    fleet.run(6.0)
    before = len(fleet.broker.of(up_topic("a", "hello")))
    for epoch in range(200):
        fleet.attacker.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=99 + epoch)))
        fleet.attacker.publish(down_topic("a", "hello"), wire.encode(wire.Hello()))
        fleet.run(0.05)
    assert len(fleet.broker.of(up_topic("a", "hello"))) - before <= 2 * (
        10.0 / authenticated_link.MIN_HANDSHAKE_INTERVAL_S + 1
    )


def test_a_forged_announcement_that_the_broker_keeps_costs_one_handshake(fleet):
    fleet.run(6.0)
    before = len(fleet.broker.of(up_topic("a", "hello")))
    fleet.attacker.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=99)), retain=True)
    for _ in range(10):
        fleet.boards["a"].subscribe(TOPICS.device_filters("a"))
        fleet.run(3.0)
    assert len(fleet.broker.of(up_topic("a", "hello"))) == before + 2
    session, fleet.epoch = fleet.boards["a"].session, 98
    fleet.coordinate()
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run(6.0)
    assert fleet.boards["a"].session == session + 1


def test_what_comes_late_from_the_session_before_begins_no_other_one(fleet):
    board = fleet.boards["a"]
    fleet.run(6.0)
    board.publish(up_topic("a", "progress"), CLAIM)
    fleet.attacker.publish(down_topic("a", "hello"), wire.encode(wire.Hello()))
    fleet.run(1.0)
    late, session, hellos = (
        fleet.broker.of(up_topic("a", "progress"))[0],
        board.session,
        len(fleet.broker.of(up_topic("a", "hello"))),
    )
    assert hellos == 4  # two handshakes
    for _ in range(60):
        fleet.attacker.publish(up_topic("a", "progress"), late)
        fleet.run(0.5)
    assert board.session == session
    assert len(fleet.broker.of(up_topic("a", "hello"))) == hellos
