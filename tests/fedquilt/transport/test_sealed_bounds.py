"""Bounds of a signed link: floods, late packets and made-up names cost it little time and memory."""

from sealed_fleets import CLAIM, down_topic, up_topic

from fedquilt import wire
from fedquilt.security import authenticated_link
from fedquilt.security.authenticated_link import MAX_HANDSHAKE_BURST
from fedquilt.security.handshake import Session


def test_what_comes_late_after_a_change_is_no_warning_and_later_it_is_one(fleet, caplog):
    def told(topic, payload):
        caplog.clear()
        fleet.attacker.publish(topic, payload)
        fleet.run(0.1)
        (record,) = (each for each in caplog.records if "stale: " in each.getMessage())
        return record.levelname

    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    own, sent = fleet.broker.of(up_topic("a"))[-1], fleet.broker.of(down_topic("a"))[-1]
    fleet.broker.change = lambda topic, payload: None if topic.endswith("up/hello") else payload
    fleet.coordinate()
    fleet.run(3.0)
    assert told(up_topic("a"), own) == "INFO"  # no board has a session with this coordinator yet
    fleet.broker.change = lambda topic, payload: payload
    fleet.run(60.0)
    assert fleet.boards["a"].connected
    assert told(down_topic("a"), sent) == told(up_topic("a"), own) == "WARNING"
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.link.publish(down_topic("a"), CLAIM)
    fleet.run()
    own, sent = fleet.broker.of(up_topic("a"))[-1], fleet.broker.of(down_topic("a"))[-1]
    fleet.attacker.publish(down_topic("a", "hello"), wire.encode(wire.Hello()))  # it asks for another session
    fleet.run(6.0)
    assert told(down_topic("a"), sent) == told(up_topic("a"), own) == "INFO"
    fleet.run(authenticated_link.LATE_MESSAGES_S)
    assert told(down_topic("a"), sent) == told(up_topic("a"), own) == "WARNING"
    assert fleet.payloads("coordinator")[1:] == []


def test_what_is_larger_than_any_message_is_not_even_hashed(fleet, monkeypatch, caplog):
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run()
    monkeypatch.setattr(Session, "verify", None)
    large = fleet.broker.of(up_topic("a"))[0].replace(b"round", bytes(wire.MAX_CHUNK + 100))
    fleet.attacker.publish(up_topic("a"), large)
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]
    assert f"oversized: message has {len(large)} bytes, more than 262272" in caplog.text
    assert "unsigned" not in caplog.text


def test_a_signed_message_whose_end_is_lost_is_not_called_unsigned(fleet, caplog):
    fleet.broker.change = lambda topic, payload: payload[:-2] if topic == up_topic("a") else payload
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == []
    assert "forged: " in caplog.text
    assert "unsigned" not in caplog.text


def test_a_flood_of_handshakes_takes_a_hundredth_of_the_coordinators_time(fleet):
    first = next(payload for payload in fleet.broker.of(up_topic("a", "hello")) if b'"flight":0' in payload)
    before = len(fleet.broker.of(down_topic("a", "hello")))
    for _ in range(100):
        fleet.attacker.publish(up_topic("a", "hello"), first)
    fleet.run()
    assert len(fleet.broker.of(down_topic("a", "hello"))) - before <= 1
    count = 1500
    for index in range(count):
        fleet.attacker.publish(up_topic(f"x{index}", "hello"), first)
    fleet.run()
    answered = sum(bool(fleet.broker.of(down_topic(f"x{index}", "hello"))) for index in range(count))
    assert 900 < answered <= MAX_HANDSHAKE_BURST + 10
    fleet.boards["a"].publish(up_topic("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]


def test_a_last_will_counts_for_the_start_that_it_names(fleet):
    will = wire.encode(wire.Presence(online=False, boot="1"))
    fleet.attacker.publish(up_topic("a", "presence"), will)
    fleet.attacker.publish(up_topic("a", "presence"), wire.encode(wire.Presence(online=True, boot="1")))
    fleet.run()
    assert fleet.heard["coordinator"] == []
    fleet.boards["a"].publish(up_topic("a", "presence"), wire.encode(wire.Presence(online=True, boot="1")))
    fleet.attacker.publish(up_topic("a", "presence"), wire.encode(wire.Presence(online=False, boot="2")))
    fleet.run()
    fleet.attacker.publish(up_topic("a", "presence"), will)
    fleet.run()
    told = [wire.decode(payload, wire.Presence) for payload in fleet.payloads("coordinator")]
    assert [(one.online, one.boot) for one in told] == [(True, "1"), (False, "1")]


def test_nobody_says_in_no_envelope_that_a_board_is_there(fleet):
    online = wire.encode(wire.Presence(online=True, boot="1"))
    fleet.boards["a"].publish(up_topic("a", "presence"), online)
    fleet.run()
    assert fleet.payloads("coordinator") == [online]
    fleet.attacker.publish(up_topic("a", "presence"), online)
    fleet.run()
    assert fleet.payloads("coordinator") == [online]


def test_the_envelope_takes_its_part_of_the_largest_payload(fleet):
    assert fleet.link.max_payload == fleet.raw.max_payload - authenticated_link.ENVELOPE_BYTES


def test_a_board_that_nobody_answers_asks_ever_more_rarely(fleet):
    fleet.broker.change = lambda topic, payload: None if topic == down_topic("c", "hello") else payload
    fleet.join("c")
    fleet.run(80.0)
    assert 5 <= len(fleet.broker.of(up_topic("c", "hello"))) <= 7


def test_what_the_broker_keeps_of_an_earlier_session_makes_nobody_begin_another(fleet):
    fleet.boards["a"].publish(up_topic("a", "profile"), CLAIM, retain=True)
    fleet.run()
    del fleet.boards["a"]
    before = len(fleet.broker.of(down_topic("a", "hello")))
    fleet.coordinate()
    fleet.run()
    assert fleet.boards["b"].connected
    assert len(fleet.broker.of(down_topic("a", "hello"))) == before


def test_handshakes_that_are_begun_and_left_fill_no_memory(fleet, monkeypatch):
    monkeypatch.setattr(authenticated_link, "MAX_ATTEMPTS", 3)
    for number in range(10):
        begun = authenticated_link.handshake_probe(fleet.identities["a"])
        fleet.attacker.publish(up_topic(f"x{number}", "hello"), wire.encode(begun))
    fleet.run()
    assert list(fleet.link._attempts) == ["x7", "x8", "x9"]
    fleet.join("c")
    fleet.run()
    assert fleet.boards["c"].connected


def test_names_that_a_broker_makes_up_fill_no_memory(monkeypatch):
    monkeypatch.setattr(authenticated_link, "MAX_REMEMBERED_DEVICES", 3)
    last_s = {}
    for number in range(10):
        assert authenticated_link._admit_unless_too_early(last_s, f"d{number}", 0.0, 5.0)
        assert not authenticated_link._admit_unless_too_early(last_s, f"d{number}", 4.9, 5.0)
    assert len(last_s) <= 3
