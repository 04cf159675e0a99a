"""A device that floods is not subscribed to for a while; everybody else is heard, new devices too."""

import pytest

from fedquilt import wire
from fedquilt.coordinator.delivery import rate_limiter
from fedquilt.coordinator.delivery.rate_limiter import (
    ASIDE_S,
    BURST_S,
    DROPPED_MOST,
    LOOK_S,
    LOOKED_S,
    MESSAGE_S,
    RateLimitedLink,
)
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink

TOPICS = wire.Topics("f")
FLOOD = round(BURST_S / MESSAGE_S) + DROPPED_MOST + 100


class Field:
    """A gate, and devices that publish."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.link = self.broker.connect()
        self.gate = RateLimitedLink(self.link, TOPICS)
        self.gate.subscribe(TOPICS.coordinator_filters())
        self.devices: dict[str, MemoryLink] = {}

    def say(self, device: str, leaf: str = "telemetry", times: int = 1, *, retain: bool = False) -> None:
        link = self.devices.get(device) or self.devices.setdefault(device, self.broker.connect())
        for number in range(times):
            link.publish(TOPICS.device_topic(device, "up", leaf), b"%d" % number, retain=retain)

    def heard(self, after_s: float = 0.01) -> dict[str, int]:
        """Device -> number of its messages that came through, once so much time has passed."""
        self.broker.now_s += after_s
        self.broker.deliver_due()
        self.gate.now_s = self.broker.now_s
        found: dict[str, int] = {}
        for message in self.gate.receive():
            device = wire.device_from_topic(message.topic)
            found[device] = found.get(device, 0) + 1
        return found

    def arrived(self) -> int:
        """Number of messages that the broker has sent to the coordinator, and nobody has looked at."""
        self.broker.now_s += 0.01
        self.broker.deliver_due()
        return len(self.link.inbox)


@pytest.fixture
def field() -> Field:
    """With a device "a" that was heard, and "b" that has flooded and is set aside."""
    made = Field()
    made.say("a")
    assert made.heard() == {"a": 1}
    made.say("b", times=FLOOD)
    assert made.heard()["b"] <= BURST_S / MESSAGE_S + 2
    assert made.gate.take_blocked_devices() == ["b"]
    assert not made.gate.take_blocked_devices()
    return made


@pytest.mark.parametrize("leaf", ["telemetry", "presence", "hello", "nonsense", "blob/get", f"blob/{'0' * 64}/7"])
def test_of_a_device_that_is_set_aside_the_broker_delivers_nothing(field, leaf):
    field.say("b", leaf, 1000)
    assert field.arrived() == 0
    field.say("a")
    assert field.heard() == {"a": 1}


@pytest.mark.parametrize("leaf", ["telemetry", "hello", "nonsense", "blob/x/7"])
def test_a_flood_of_any_kind_is_noticed(leaf):
    field = Field()
    field.say("b", leaf, FLOOD)
    field.heard()
    assert field.gate.take_blocked_devices() == ["b"]


def test_it_is_heard_again_after_a_while(field):
    assert field.gate.next_s() < ASIDE_S + 1
    field.heard(ASIDE_S)
    field.say("b")
    field.say("c")
    assert field.heard() == {"b": 1, "c": 1}
    assert field.link.filters == list(TOPICS.coordinator_filters())
    assert field.gate.next_s() == float("inf")


def test_a_second_one_is_set_aside_beside_it_and_each_comes_back_in_its_time(field):
    field.heard(ASIDE_S / 2)
    field.say("a", times=FLOOD)
    field.heard()
    assert field.gate.take_blocked_devices() == ["a"]
    field.say("a", times=100)
    field.say("b", times=100)
    assert field.arrived() == 0
    field.heard(ASIDE_S / 2)
    field.say("a")
    field.say("b")
    assert field.heard() == {"b": 1}


def test_a_new_device_is_found_by_the_presence_that_the_broker_keeps(field):
    field.say("c", "presence", retain=True)
    field.say("b", "presence", 100, retain=True)
    assert field.arrived() == 0
    field.heard(LOOK_S)
    assert field.heard() == {"c": 1}
    field.say("c")
    assert field.heard()["c"] >= 1
    field.heard(LOOKED_S)
    field.say("b", "presence", 100)
    assert field.arrived() == 0
    field.say("c")
    assert field.heard() == {"c": 1}


def test_a_broker_that_comes_back_is_not_asked_for_everything(field):
    """The broker may remember the subscription to all devices: it is undone again at each connection."""
    field.gate.subscribe(TOPICS.coordinator_filters())
    field.say("b", times=100)
    assert field.arrived() == 0


def test_where_more_devices_come_than_are_subscribed_to_by_name_all_are_heard(field, monkeypatch):
    monkeypatch.setattr(rate_limiter, "KNOWN_MOST", 3)
    for device in "cdef":
        field.say(device, "presence", retain=True)
    field.heard(LOOK_S)
    assert field.heard() == dict.fromkeys("cdef", 1)
    field.heard(LOOKED_S)
    for device in "abcdefg":
        field.say(device)
    field.say("b", f"blob/{'0' * 64}/7", 100)
    assert {device for device, count in field.heard().items() if count} >= set("acdefg")
    assert "b" not in field.heard()
    assert field.link.filters == list(TOPICS.coordinator_filters())
    field.heard(ASIDE_S)
    field.say("b")
    assert field.heard() == {"b": 1}
