"""What a broker can do to a signed fleet: on a broker in memory that the test reads, changes and repeats at will."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certified import Certified

from fedquilt import wire
from fedquilt.core import JobError
from fedquilt.transport import envelope, sealed, sealed_fleet
from fedquilt.transport.handshake import Identity, Session
from fedquilt.transport.link import MemoryBroker, Message
from fedquilt.transport.sealed import BoardLink
from fedquilt.transport.sealed_fleet import BURST, FleetLink

TOPICS = wire.Topics("f")
CLAIM = b'{"v":1,"crc":"00000000","round":1}'


class Tampered(MemoryBroker):
    """A broker that keeps all it has carried, and changes what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[tuple[str, bytes]] = []
        self.change: Callable[[str, bytes], bytes | None] = lambda topic, payload: payload

    def _receive(self, topic: str, payload: bytes, retain: bool) -> None:
        self.carried.append((topic, payload))
        changed = self.change(topic, payload)
        if changed is not None:
            super()._receive(topic, changed, retain)

    def of(self, topic: str) -> list[bytes]:
        return [payload for at, payload in self.carried if at == topic]


class Fleet:
    """One coordinator and boards, each on a sealed link, and time that the test moves on."""

    def __init__(self, site: Certified) -> None:
        self.site, self.broker = site, Tampered()
        self.identities = {"coordinator": Identity(site.broker("coordinator", "coordinator"))}
        self.boards: dict[str, BoardLink] = {}
        self.heard: dict[str, list[Message]] = {}
        self.epoch = 0
        self.coordinate()
        self.mallory = self.broker.connect()  # writes where it likes

    def coordinate(self) -> None:
        """A new coordinator's process."""
        self.epoch += 1
        if self.epoch > 1:
            self.broker.lose(self.raw)
        self.raw = self.broker.connect()
        self.link = FleetLink(self.raw, self.identities["coordinator"], "f", self.clock)
        self.link.subscribe(TOPICS.for_coordinator())
        self.link.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=self.epoch)), retain=True)
        self.heard["coordinator"] = []

    def join(self, name: str, identity: Identity | None = None) -> BoardLink:
        """A new agent's process of a board."""
        self.identities.setdefault(name, identity or Identity(self.site.broker(name)))
        self.boards[name] = BoardLink(self.broker.connect(), self.identities[name], "f", name, self.clock)
        self.heard[name] = []
        return self.boards[name]

    def clock(self) -> float:
        return self.broker.now_s

    def run(self, seconds: float = 0.3) -> None:
        until_s = self.broker.now_s + seconds
        while self.broker.now_s < until_s:
            self.broker.now_s += 0.01
            self.broker.deliver()
            self.heard["coordinator"] += self.link.receive()
            for name, board in self.boards.items():
                self.heard[name] += board.receive()

    def payloads(self, name: str) -> list[bytes]:
        return [message.payload for message in self.heard[name]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("site"))


@pytest.fixture
def fleet(site: Certified, caplog: pytest.LogCaptureFixture) -> Fleet:
    """A coordinator and two boards that have shaken hands."""
    caplog.set_level(logging.INFO, "fedquilt.sealed")
    made = Fleet(site)
    made.join("a")
    made.join("b")
    made.run()
    assert made.boards["a"].connected
    assert made.boards["b"].connected
    return made


def up(device: str, leaf: str = "claim") -> str:
    return TOPICS.device(device, "up", leaf)


def down(device: str, leaf: str = "task") -> str:
    return TOPICS.device(device, "dn", leaf)


def test_what_is_said_arrives_as_it_was_said(fleet: Fleet) -> None:
    """Both ways, also nothing at all, which takes a task back; and in few bytes more."""
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM, retain=True)
    fleet.run()
    fleet.link.publish(down("a"), b"", retain=True)
    fleet.run()
    assert fleet.heard["coordinator"] == [Message(up("a"), CLAIM)]
    assert fleet.payloads("a") == [CLAIM, b""]
    assert fleet.heard["b"] == []
    assert [envelope.inside(payload) for payload in fleet.broker.of(up("a"))] == [CLAIM]
    assert len(fleet.broker.of(up("a"))[0]) <= len(CLAIM) + envelope.ENVELOPE_BYTES


def test_chunks_and_what_is_for_everybody_are_in_no_envelope(fleet: Fleet) -> None:
    """A chunk is checked by its manifest."""
    chunk, round = TOPICS.chunk("a", "dn", "0" * 64, 0), TOPICS.job("j")
    fleet.link.publish(chunk, b"bytes")
    fleet.link.publish(round, b"state")
    fleet.boards["a"].publish(TOPICS.chunk("a", "up", "1" * 64, 3), b"more")
    fleet.run()
    assert fleet.broker.of(chunk) == [b"bytes"]
    assert fleet.broker.of(round) == [b"state"]
    assert fleet.payloads("a") == [b"bytes"]
    assert fleet.payloads("coordinator") == [b"more"]


Attack = Callable[[Fleet], None]


def forged(fleet: Fleet) -> None:
    """Somebody without the key."""
    fleet.mallory.publish(up("a"), CLAIM)
    fleet.mallory.publish(down("a"), CLAIM)


def altered(fleet: Fleet) -> None:
    """One byte of what is under way."""
    fleet.broker.change = lambda topic, payload: payload.replace(b'"round":1', b'"round":2')
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)


def renumbered(fleet: Fleet) -> None:
    """The number alone, so that an old one is new."""
    fleet.broker.change = lambda topic, payload: payload.replace(b'"no":1,', b'"no":9,')
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)


def to_another(fleet: Fleet) -> None:
    """What a said as b's, and what the coordinator said to a, to b."""
    fleet.broker.change = lambda topic, payload: None if "hello" not in topic else payload
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.broker.change = lambda topic, payload: payload
    fleet.mallory.publish(up("b"), fleet.broker.of(up("a"))[-1])
    fleet.mallory.publish(down("b"), fleet.broker.of(down("a"))[-1])


def as_another_kind(fleet: Fleet) -> None:
    """A claim as an update, a task as an answer."""
    fleet.broker.change = lambda topic, payload: None if "hello" not in topic else payload
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.broker.change = lambda topic, payload: payload
    fleet.mallory.publish(up("a", "update"), fleet.broker.of(up("a"))[-1])
    fleet.mallory.publish(down("a", "ack"), fleet.broker.of(down("a"))[-1])


def sent_back(fleet: Fleet) -> None:
    """To who said it."""
    fleet.broker.change = lambda topic, payload: None if "hello" not in topic else payload
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.broker.change = lambda topic, payload: payload
    said, answered = fleet.broker.of(up("a"))[-1], fleet.broker.of(down("a"))[-1]
    fleet.mallory.publish(down("a"), said)
    fleet.mallory.publish(up("a"), answered)


@pytest.mark.parametrize("attack", [forged, altered, renumbered, to_another, as_another_kind, sent_back])
def test_what_the_other_side_has_not_said_here_is_refused_by_name(
    fleet: Fleet, attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    """On both sides, with a line for each; and what is said afterwards still arrives."""
    attack(fleet)
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}
    dropped = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(dropped) == 2, dropped
    assert any("/up/" in line for line in dropped)
    assert any("/dn/" in line for line in dropped)
    fleet.broker.change = lambda topic, payload: payload
    fleet.boards["a"].publish(up("a"), b"1")
    fleet.link.publish(down("a"), b"2")
    fleet.run()
    assert fleet.payloads("coordinator") == [b"1"]
    assert fleet.payloads("a") == [b"2"]


def test_an_older_message_of_a_kind_is_refused_and_the_latest_may_come_again(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """As MQTT repeats what it is not sure of."""
    for text in (b"1", b"2"):
        fleet.boards["a"].publish(up("a"), text)
        fleet.link.publish(down("a"), text)
    fleet.run()
    for topic in (up("a"), down("a")):
        older, latest = fleet.broker.of(topic)
        fleet.mallory.publish(topic, older)
        fleet.mallory.publish(topic, latest)
    fleet.run()
    assert fleet.payloads("coordinator") == fleet.payloads("a") == [b"1", b"2", b"2"]
    assert caplog.text.count("replayed: ") == 2


def test_nothing_of_an_earlier_coordinator_counts_for_the_next(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Boards shake hands with it by themselves; what was said to and by the one before is refused on both sides."""
    fleet.boards["a"].publish(up("a", "update"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.run()
    before = fleet.boards["a"].session
    fleet.coordinate()
    fleet.run(6.0)
    assert fleet.boards["a"].session == before + 1
    fleet.heard["a"].clear()
    for topic in (up("a", "update"), down("a")):
        fleet.mallory.publish(topic, fleet.broker.of(topic)[-1])
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}
    assert caplog.text.count("stale: it is sealed under another session") == 2


def test_nothing_of_an_earlier_start_of_a_board_counts_for_the_next(fleet: Fleet) -> None:
    """Also if the coordinator is the same all along."""
    fleet.boards["a"].publish(up("a", "profile"), b"old", retain=True)
    fleet.link.publish(down("a"), CLAIM)
    fleet.run()
    fleet.heard["coordinator"].clear()
    fleet.join("a")
    fleet.run()
    assert fleet.boards["a"].connected
    for topic in (up("a", "profile"), down("a")):
        fleet.mallory.publish(topic, fleet.broker.of(topic)[-1])
    fleet.run()
    assert fleet.heard == {"coordinator": [], "a": [], "b": []}


def test_handshakes_that_are_replayed_or_changed_delay_and_change_nothing(fleet: Fleet) -> None:
    """The session in use stays until a new one is agreed on; then it goes on by itself."""
    hellos = [(topic, payload) for topic, payload in fleet.broker.carried if topic.endswith("/hello")]
    assert len(hellos) == 8  # four flights with each board
    for topic, payload in hellos:
        fleet.mallory.publish(topic, payload)
        fleet.mallory.publish(topic, payload.replace(b'"tls":"', b'"tls":"AAAA'))
    fleet.run(6.0)
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == fleet.payloads("a") == [CLAIM]


def test_a_board_that_is_alone_tells_observers_that_it_is_there(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """In no envelope, once it has waited for an answer; a later coordinator neither takes nor mentions it."""
    fleet.broker.change = lambda topic, payload: None if topic.endswith("/hello") else payload
    board = fleet.join("c")
    fleet.run(1.0)
    assert board.session == 0
    fleet.run(6.0)
    assert board.session > 0
    assert not board.connected
    assert "no coordinator answers" in str(board.problem)
    board.publish(up("c", "presence"), b"there", retain=True)
    board.publish(up("c", "update"), CLAIM)
    assert fleet.broker.of(up("c", "presence")) == [b"there"]
    assert fleet.broker.of(up("c", "update")) == []
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
def test_a_lost_flight_of_a_handshake_is_made_up_for(fleet: Fleet, flight: int) -> None:
    """By another attempt, whichever it was."""
    lost: list[str] = []

    def drop_once(topic: str, payload: bytes) -> bytes | None:
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


def test_a_forged_announcement_costs_a_handshake_every_few_seconds_at_most(fleet: Fleet) -> None:
    """Whatever is announced, and how often; sessions stay in use."""
    fleet.run(6.0)
    before = len(fleet.broker.of(up("a", "hello")))
    for epoch in range(200):
        fleet.mallory.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=99 + epoch)))
        fleet.mallory.publish(down("a", "hello"), wire.encode(wire.Hello()))
        fleet.run(0.05)
    assert len(fleet.broker.of(up("a", "hello"))) - before <= 2 * (10.0 / sealed.HINT_S + 1)


def test_a_forged_announcement_that_the_broker_keeps_costs_one_handshake(fleet: Fleet) -> None:
    """It comes again with every subscription; a coordinator that has truly begun anew asks for a handshake itself."""
    fleet.run(6.0)
    before = len(fleet.broker.of(up("a", "hello")))
    fleet.mallory.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=99)), retain=True)
    for _ in range(10):
        fleet.boards["a"].subscribe(TOPICS.for_device("a"))
        fleet.run(3.0)
    assert len(fleet.broker.of(up("a", "hello"))) == before + 2
    session, fleet.epoch = fleet.boards["a"].session, 98
    fleet.coordinate()
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.run(6.0)
    assert fleet.boards["a"].session == session + 1


def test_what_comes_late_from_the_session_before_begins_no_other_one(fleet: Fleet) -> None:
    """On a slow network there is always something on its way; each new session would make more of it late."""
    board = fleet.boards["a"]
    fleet.run(6.0)
    board.publish(up("a", "progress"), CLAIM)
    fleet.mallory.publish(down("a", "hello"), wire.encode(wire.Hello()))
    fleet.run(1.0)
    late, session, hellos = (
        fleet.broker.of(up("a", "progress"))[0],
        board.session,
        len(fleet.broker.of(up("a", "hello"))),
    )
    assert hellos == 4  # two handshakes
    for _ in range(60):
        fleet.mallory.publish(up("a", "progress"), late)
        fleet.run(0.5)
    assert board.session == session
    assert len(fleet.broker.of(up("a", "hello"))) == hellos


def test_what_comes_late_after_a_change_is_no_warning_and_later_it_is_one(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one of a board that has another session, as after a restart of either side, and before there is any."""

    def told(topic: str, payload: bytes) -> str:
        caplog.clear()
        fleet.mallory.publish(topic, payload)
        fleet.run(0.1)
        (record,) = (each for each in caplog.records if "stale: " in each.getMessage())
        return record.levelname

    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.run()
    own, sent = fleet.broker.of(up("a"))[-1], fleet.broker.of(down("a"))[-1]
    fleet.broker.change = lambda topic, payload: None if topic.endswith("up/hello") else payload
    fleet.coordinate()
    fleet.run(3.0)
    assert told(up("a"), own) == "INFO"  # no board has a session with this coordinator yet
    fleet.broker.change = lambda topic, payload: payload
    fleet.run(60.0)
    assert fleet.boards["a"].connected
    assert told(down("a"), sent) == told(up("a"), own) == "WARNING"
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.link.publish(down("a"), CLAIM)
    fleet.run()
    own, sent = fleet.broker.of(up("a"))[-1], fleet.broker.of(down("a"))[-1]
    fleet.mallory.publish(down("a", "hello"), wire.encode(wire.Hello()))  # it asks for another session
    fleet.run(6.0)
    assert told(down("a"), sent) == told(up("a"), own) == "INFO"
    fleet.run(sealed.LATE_S)
    assert told(down("a"), sent) == told(up("a"), own) == "WARNING"
    assert fleet.payloads("coordinator")[1:] == []


def test_what_is_larger_than_any_message_is_not_even_hashed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may carry a megabyte; a manifest has a quarter of one at most."""
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.run()
    monkeypatch.setattr(Session, "require", None)
    fleet.mallory.publish(up("a"), fleet.broker.of(up("a"))[0].replace(b"round", bytes(wire.MAX_CHUNK + 100)))
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]


def test_a_flood_of_handshakes_takes_a_hundredth_of_the_coordinators_time(fleet: Fleet) -> None:
    """Of one board it answers one in a while; of all together so many at once and so many a second."""
    first = next(payload for payload in fleet.broker.of(up("a", "hello")) if b'"flight":0' in payload)
    before = len(fleet.broker.of(down("a", "hello")))
    for _ in range(100):
        fleet.mallory.publish(up("a", "hello"), first)
    fleet.run()
    assert len(fleet.broker.of(down("a", "hello"))) - before <= 1
    count = 1500
    for index in range(count):
        fleet.mallory.publish(up(f"x{index}", "hello"), first)
    fleet.run()
    answered = sum(bool(fleet.broker.of(down(f"x{index}", "hello"))) for index in range(count))
    assert 900 < answered <= BURST + 10
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]


def test_a_last_will_counts_for_the_start_that_it_names(fleet: Fleet) -> None:
    """It is the only thing of a board in no envelope: the broker has it from before there was a session."""
    will = wire.encode(wire.Presence(online=False, boot="1"))
    fleet.mallory.publish(up("a", "presence"), will)
    fleet.mallory.publish(up("a", "presence"), wire.encode(wire.Presence(online=True, boot="1")))
    fleet.run()
    assert fleet.heard["coordinator"] == []
    fleet.boards["a"].publish(up("a", "presence"), wire.encode(wire.Presence(online=True, boot="1")))
    fleet.mallory.publish(up("a", "presence"), wire.encode(wire.Presence(online=False, boot="2")))
    fleet.run()
    fleet.mallory.publish(up("a", "presence"), will)
    fleet.run()
    told = [wire.decode(payload, wire.Presence) for payload in fleet.payloads("coordinator")]
    assert [(one.online, one.boot) for one in told] == [(True, "1"), (False, "1")]


def test_nobody_says_in_no_envelope_that_a_board_is_there(fleet: Fleet) -> None:
    """Only that a known start has ended: of that very start the broker could say the opposite."""
    online = wire.encode(wire.Presence(online=True, boot="1"))
    fleet.boards["a"].publish(up("a", "presence"), online)
    fleet.run()
    assert fleet.payloads("coordinator") == [online]
    fleet.mallory.publish(up("a", "presence"), online)
    fleet.run()
    assert fleet.payloads("coordinator") == [online]


def test_the_envelope_takes_its_part_of_the_largest_payload(fleet: Fleet) -> None:
    """What is as large as a link says goes through."""
    assert fleet.link.max_payload == fleet.raw.max_payload - envelope.ENVELOPE_BYTES


def test_a_board_that_nobody_answers_asks_ever_more_rarely(fleet: Fleet) -> None:
    """After 2 s, as somebody has announced a coordinator, then after 5, 10, 20 and 40 more."""
    fleet.broker.change = lambda topic, payload: None if topic == down("c", "hello") else payload
    fleet.join("c")
    fleet.run(80.0)
    assert 5 <= len(fleet.broker.of(up("c", "hello"))) <= 7


def test_what_the_broker_keeps_of_an_earlier_session_makes_nobody_begin_another(fleet: Fleet) -> None:
    """The board that sent it may be gone, and one that is there hears of the new coordinator anyhow."""
    fleet.boards["a"].publish(up("a", "profile"), CLAIM, retain=True)
    fleet.run()
    del fleet.boards["a"]
    before = len(fleet.broker.of(down("a", "hello")))
    fleet.coordinate()
    fleet.run()
    assert fleet.boards["b"].connected
    assert len(fleet.broker.of(down("a", "hello"))) == before


def test_handshakes_that_are_begun_and_left_fill_no_memory(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one goes; of a device only the latest is kept; a board that answers in time gets its session."""
    monkeypatch.setattr(sealed_fleet, "ATTEMPTS_MOST", 3)
    for number in range(10):
        begun = sealed.beginning(fleet.identities["a"])
        fleet.mallory.publish(up(f"x{number}", "hello"), wire.encode(begun))
    fleet.run()
    assert list(fleet.link._attempts) == ["x7", "x8", "x9"]
    fleet.join("c")
    fleet.run()
    assert fleet.boards["c"].connected


def test_names_that_a_broker_makes_up_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of when something was last done is bounded, and begins anew."""
    monkeypatch.setattr(sealed_fleet, "DEVICES_MOST", 3)
    last_s: dict[str, float] = {}
    for number in range(10):
        assert sealed_fleet._rarely(last_s, f"d{number}", 0.0, 5.0)
        assert not sealed_fleet._rarely(last_s, f"d{number}", 4.9, 5.0)
    assert len(last_s) <= 3


def test_who_has_not_the_right_certificate_gets_no_session_and_the_log_says_why(
    fleet: Fleet, site: Certified, stranger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Another board's, an observer's, an expired one, a stranger's."""
    cases: dict[str, tuple[Identity, str]] = {
        "c1": (Identity(site.broker("other")), "the certificate is of 'other'"),
        "c2": (Identity(site.broker("c2", "observer")), "the certificate is of 'an observer'"),
        "c3": (Identity(site.broker("c3", days_ago=400)), "expired"),
        "c4": (Identity(site.broker("c4", "server")), "unsuitable certificate purpose"),
    }
    cert, key = stranger.issue("c5")
    strange = site.broker("c5")
    strange = type(strange).parse("mqtts://localhost", ca=site.ca, cert=cert, key=key)
    cases["c5"] = (Identity(strange), "unable to get local issuer certificate")
    for name, (identity, _) in cases.items():
        fleet.join(name, identity)
    fleet.run()
    for name, (_, said) in cases.items():
        assert not fleet.boards[name].connected, name
        assert any(f"dev/{name}/up" in line and said in line for line in caplog.messages), (name, caplog.messages)


def test_a_board_takes_nobody_but_the_coordinator_for_it(site: Certified, caplog: pytest.LogCaptureFixture) -> None:
    """Not another board, and not the broker, whose certificate is a server's."""
    for name, kind, said in (("a", "device", "unsuitable certificate purpose"), ("hub", "server", "'hub' poses as")):
        posing = Identity(site.broker(name, kind))
        with pytest.raises(JobError, match="ca issue coordinator"):
            FleetLink(MemoryBroker().connect(), posing, "f")
        posing.require_coordinator = lambda: None  # type: ignore[method-assign]
        fleet = Fleet.__new__(Fleet)
        fleet.site, fleet.broker, fleet.boards, fleet.heard, fleet.epoch = site, Tampered(), {}, {}, 0
        fleet.identities = {"coordinator": posing}
        fleet.coordinate()
        board = fleet.join("b")
        fleet.run()
        assert not board.connected
        assert said in caplog.text
        assert said in str(board.problem)


def test_a_coordinators_certificate_of_an_earlier_version_says_how_to_renew_it(site: Certified) -> None:
    """It was a client's alone; boards' certificates stay as they are."""
    earlier = Identity(site.broker("coordinator", "device"))
    with pytest.raises(JobError, match=r"unsuitable certificate purpose.*`fedquilt ca issue coordinator` makes one"):
        earlier.require_coordinator()


def test_without_an_authority_there_is_no_signing_and_no_silence(site: Certified) -> None:
    """A certificate without ca could prove who we are, but not check who others are."""
    files = site.files("d")
    with pytest.raises(JobError, match="give the certificate of the fleet's authority as ca"):
        sealed.identity(type(site.broker("d")).parse("mqtts://host", cert=files["cert"], key=files["key"]))
    assert sealed.identity(type(site.broker("d")).parse("mqtt://host")) is None


def test_certificates_are_checked_anew_every_day(fleet: Fleet, site: Certified) -> None:
    """A board asks for another session in time; without a good certificate it is shut out after two days."""
    first = fleet.boards["a"].session
    site.files("b", days_ago=400)
    fleet.broker.now_s += sealed.RENEW_S + 1.0
    fleet.run()
    assert fleet.boards["a"].session == first + 1
    fleet.boards["b"].publish(up("b"), b"1")
    fleet.run()
    assert fleet.payloads("coordinator") == [b"1"]
    fleet.broker.now_s += sealed.RENEW_S + 1.0
    fleet.run()
    for name in ("a", "b"):
        fleet.boards[name].publish(up(name), b"2")
    fleet.run()
    assert fleet.heard["coordinator"][1:] == [Message(up("a"), b"2")]


def test_a_renewed_certificate_is_used_without_a_restart(fleet: Fleet, site: Certified, tmp_path: Path) -> None:
    """The same files with another key; the session in use stays until the next one."""
    site.files("a")
    fleet.coordinate()
    fleet.run(6.0)
    assert fleet.boards["a"].connected
    fleet.boards["a"].publish(up("a"), CLAIM)
    fleet.run()
    assert fleet.payloads("coordinator") == [CLAIM]
