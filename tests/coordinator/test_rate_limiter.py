"""What a device may send, and how one that sends more is set aside."""

import pytest

from fedquilt import wire
from fedquilt.coordinator.delivery import rate_limiter
from fedquilt.coordinator.delivery.rate_limiter import (
    BLOCK_S,
    BURST_S,
    CALM_S,
    DEVICE_SHARE,
    DISCOVERY_INTERVAL_S,
    DISCOVERY_S,
    MAX_DROPPED,
    MESSAGE_S,
    ROUND_S,
    RateLimitedLink,
    RateLimiter,
    Verdict,
)
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink


def said(conduct: RateLimiter, messages: int, now_s: float, device: str = "a") -> dict[Verdict, int]:
    counts: dict[Verdict, int] = {}
    for _ in range(messages):
        verdict = conduct.admit_message(device, 0, now_s)
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def test_what_a_device_may_send_at_once_and_for_good():
    conduct, burst = RateLimiter(), round(BURST_S / MESSAGE_S)
    found = said(conduct, burst + 100, 0.0)
    assert burst <= found["processed"] <= burst + 1
    assert (found["slowed"], found["slowed"] + found["dropped"]) == (1, burst + 100 - found["processed"])
    assert abs(said(conduct, 1000, 1.0)["processed"] - DEVICE_SHARE / MESSAGE_S) <= 2


def test_a_device_that_goes_on_is_set_aside_and_read_again_after_a_while():
    conduct = RateLimiter()
    found = said(conduct, round(BURST_S / MESSAGE_S) + MAX_DROPPED + 5000, 0.0)
    assert found["blocked"] == 1
    assert said(conduct, 50, BLOCK_S - 1) == {"dropped": 50}
    assert said(conduct, 50, BLOCK_S) == {"processed": 50}


def test_a_device_that_is_slowed_now_and_then_is_not_set_aside():
    conduct, burst = RateLimiter(), round(BURST_S / MESSAGE_S)
    for time in range(20):
        found = said(conduct, burst + MAX_DROPPED // 2, time * (CALM_S + BURST_S / DEVICE_SHARE))
        assert "blocked" not in found
        assert found["slowed"] == 1


def test_one_device_costs_another_nothing():
    conduct = RateLimiter()
    said(conduct, 100_000, 0.0)
    assert said(conduct, 100, 0.0, "b") == {"processed": 100}


def test_other_work_for_a_device_counts_and_its_debt_is_bounded():
    conduct = RateLimiter()
    conduct.charge_time("a", 10 * BURST_S, 0.0)
    assert said(conduct, 1, 0.0) == {"slowed": 1}
    assert said(conduct, 1, BURST_S / DEVICE_SHARE - 1) != {"processed": 1}
    assert said(conduct, 1, BURST_S / DEVICE_SHARE + 1) == {"processed": 1}


def test_devices_that_are_quiet_are_not_remembered():
    conduct = RateLimiter()
    for number in range(20_000):
        said(conduct, 1, number * 1.0, f"d{number}")
    assert len(conduct._buckets) <= 1024


def test_who_was_slowed_of_late_is_remembered_though_it_has_its_time_back():
    conduct, later_s = RateLimiter(), BURST_S / DEVICE_SHARE + 1
    assert later_s < CALM_S
    flood = round(BURST_S / MESSAGE_S) + MAX_DROPPED
    assert "blocked" not in said(conduct, flood, 0.0)
    for number in range(2000):
        said(conduct, 1, later_s, f"d{number}")
    assert said(conduct, flood, later_s)["blocked"] == 1


def test_who_is_set_aside_stays_so_however_many_others_come():
    conduct, later_s = RateLimiter(), 2 * CALM_S
    assert BURST_S / DEVICE_SHARE < later_s < BLOCK_S
    assert said(conduct, round(BURST_S / MESSAGE_S) + MAX_DROPPED + 10, 0.0)["blocked"] == 1
    for number in range(2000):
        said(conduct, 1, later_s, f"d{number}")
    assert said(conduct, 1, later_s) == {"dropped": 1}


def test_a_clock_that_is_set_back_costs_a_device_nothing():
    conduct = RateLimiter()
    said(conduct, 1, 10 * BURST_S / DEVICE_SHARE)
    assert said(conduct, 10, 0.0) == {"processed": 10}


def test_what_the_coordinator_wants_of_a_device_pays_for_itself():
    conduct = RateLimiter()
    for number in range(1000):
        conduct.charge_time("a", -ROUND_S, number * 0.01)
        assert said(conduct, 10, number * 0.01) == {"processed": 10}
    conduct.charge_time("a", -100 * BURST_S, 20.0)
    assert abs(said(conduct, 10_000, 20.0)["processed"] - BURST_S / MESSAGE_S) <= 2


TOPICS = wire.Topics("f")
FLOOD = round(BURST_S / MESSAGE_S) + MAX_DROPPED + 100


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
    assert field.gate.next_s() < BLOCK_S + 1
    field.heard(BLOCK_S)
    field.say("b")
    field.say("c")
    assert field.heard() == {"b": 1, "c": 1}
    assert field.link.filters == list(TOPICS.coordinator_filters())
    assert field.gate.next_s() == float("inf")


def test_a_second_one_is_set_aside_beside_it_and_each_comes_back_in_its_time(field):
    field.heard(BLOCK_S / 2)
    field.say("a", times=FLOOD)
    field.heard()
    assert field.gate.take_blocked_devices() == ["a"]
    field.say("a", times=100)
    field.say("b", times=100)
    assert field.arrived() == 0
    field.heard(BLOCK_S / 2)
    field.say("a")
    field.say("b")
    assert field.heard() == {"b": 1}


def test_a_new_device_is_found_by_the_presence_that_the_broker_keeps(field):
    field.say("c", "presence", retain=True)
    field.say("b", "presence", 100, retain=True)
    assert field.arrived() == 0
    field.heard(DISCOVERY_INTERVAL_S)
    assert field.heard() == {"c": 1}
    field.say("c")
    assert field.heard()["c"] >= 1
    field.heard(DISCOVERY_S)
    field.say("b", "presence", 100)
    assert field.arrived() == 0
    field.say("c")
    assert field.heard() == {"c": 1}


def test_a_broker_that_comes_back_is_not_asked_for_everything(field):
    field.gate.subscribe(TOPICS.coordinator_filters())
    field.say("b", times=100)
    assert field.arrived() == 0


def test_where_more_devices_come_than_are_subscribed_to_by_name_all_are_heard(field, monkeypatch):
    monkeypatch.setattr(rate_limiter, "MAX_NAMED_SUBSCRIPTIONS", 3)
    for device in "cdef":
        field.say(device, "presence", retain=True)
    field.heard(DISCOVERY_INTERVAL_S)
    assert field.heard() == dict.fromkeys("cdef", 1)
    field.heard(DISCOVERY_S)
    for device in "abcdefg":
        field.say(device)
    field.say("b", f"blob/{'0' * 64}/7", 100)
    assert {device for device, count in field.heard().items() if count} >= set("acdefg")
    assert "b" not in field.heard()
    assert field.link.filters == list(TOPICS.coordinator_filters())
    field.heard(BLOCK_S)
    field.say("b")
    assert field.heard() == {"b": 1}
