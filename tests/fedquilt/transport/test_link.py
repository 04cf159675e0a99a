import gc
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest

from fedquilt.transport.link import Link, Message, filter_matches, run_endpoint
from fedquilt.transport.memory_link import MemoryBroker, MemoryLink, run_on_virtual_time


def arrived(broker: MemoryBroker, link: MemoryLink) -> list[Message]:
    while (due := broker.next_delivery_s()) is not None:
        broker.now_s = max(broker.now_s, due)
        broker.deliver_due()
    return link.receive()


@pytest.mark.parametrize(
    ("pattern", "topic", "taken"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
        ("a/+/c", "a/b/c", True),
        ("a/+/c", "a/b/d", False),
        ("a/+", "a/b/c", False),
        ("a/+", "a/", True),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "b", False),
        ("#", "a/b", True),
        ("+/+", "a/b", True),
        ("+", "a/b", False),
    ],
)
def test_topic_filters_match_as_the_mqtt_standard_says(pattern, topic, taken):
    assert filter_matches(pattern, topic) is taken


def test_a_message_comes_once_though_two_filters_take_it():
    broker = MemoryBroker()
    link = broker.connect()
    link.subscribe(["a/#", "a/+"])
    broker.connect().publish("a/b", b"x")
    assert arrived(broker, link) == [Message("a/b", b"x")]


def test_the_latest_retained_message_meets_a_new_subscriber():
    broker = MemoryBroker()
    author = broker.connect()
    author.publish("state", b"old", retain=True)
    author.publish("state", b"new", retain=True)
    author.publish("state", b"passing")
    reader = broker.connect()
    reader.subscribe(["state"])
    assert arrived(broker, reader) == [Message("state", b"new", retained=True)]
    author.publish("state", b"", retain=True)
    late = broker.connect()
    late.subscribe(["state"])
    assert arrived(broker, late) == []


def test_a_lost_client_leaves_its_will_and_one_that_says_goodbye_does_not():
    broker = MemoryBroker()
    reader = broker.connect()
    reader.subscribe(["will/+"])
    lost, gone = broker.connect(will=("will/lost", b"offline")), broker.connect(will=("will/gone", b"offline"))
    gone.close()
    broker.lose_client(gone)
    broker.lose_client(lost)
    broker.lose_client(lost)
    assert arrived(broker, reader) == [Message("will/lost", b"offline")]


def test_a_lost_client_neither_sends_nor_receives():
    broker = MemoryBroker()
    a, b = broker.connect(), broker.connect()
    a.subscribe(["t"])
    b.subscribe(["t"])
    b.publish("t", b"x")
    broker.lose_client(a)
    a.publish("t", b"y")
    assert arrived(broker, a) == []
    assert b.receive() == [Message("t", b"x")]


class Echo:
    def __init__(self, link: Link, hears: str, says: str, begins: bool = False) -> None:
        self.finished = False
        self.heard_s: list[float] = []
        self._link, self._says = link, says
        self._due_s = 0.0 if begins else math.inf
        link.subscribe([hears])

    def fds(self) -> Sequence[int]:
        return ()

    def step(self, now_s: float) -> float:
        if now_s >= self._due_s:
            self._due_s = math.inf
            self._link.publish(self._says, b"x")
        if self._link.receive():
            self.heard_s.append(now_s)
            self._due_s = now_s + 1.0
        return self._due_s


def calls(work: Callable[[], object]) -> int:
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # what other tests have left must not be finalised, by functions of its own, while these are counted
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def crowd(count: int) -> tuple[MemoryBroker, list[MemoryLink]]:
    broker = MemoryBroker()
    links = [broker.connect() for _ in range(count)]
    for number, link in enumerate(links):
        link.subscribe([f"dev/{number}/dn/#", "coord"])
        link.publish(f"dev/{number}/up/presence", b"here", retain=True)
    return broker, links


@pytest.mark.parametrize("what", ["publish", "retain", "subscribe", "lose"])
def test_what_one_client_does_costs_no_more_among_many(what):
    def cost(count):
        broker, links = crowd(count)
        arrived(broker, links[0])
        act = {
            "publish": lambda: links[0].publish("dev/1/dn/ack", b"x"),
            "retain": lambda: links[0].publish("dev/1/dn/task", b"x", retain=True),
            "subscribe": lambda: broker.connect().subscribe(["dev/1/up/#"]),
            "lose": lambda: broker.lose_client(links[1]),
        }
        return calls(act[what])

    assert cost(400) == cost(4)


class Sleeper:
    def __init__(self, link: Link) -> None:
        self.finished = False
        self.steps = 0
        self._link = link

    def fds(self) -> Sequence[int]:
        return ()

    def step(self, now_s: float) -> float:
        self.steps += 1
        self._link.receive()
        return math.inf


def test_only_who_has_something_to_do_is_woken():
    def cost(count):
        broker = MemoryBroker()
        here, there = broker.connect(), broker.connect()
        a, b = Echo(here, "a", "b", begins=True), Echo(there, "b", "a")
        crowd = [broker.connect() for _ in range(count)]
        sides = [(here, a), (there, b), *((link, Sleeper(link)) for link in crowd)]
        run_on_virtual_time(broker, lambda: sides, is_finished=lambda: broker.now_s > 0)
        spent = calls(lambda: run_on_virtual_time(broker, lambda: sides, is_finished=lambda: len(b.heard_s) == 20))
        assert all(side.steps == 2 for _, side in sides if isinstance(side, Sleeper))  # once for each `simulate`
        return spent

    assert cost(40) - cost(20) == cost(20) - cost(0) < 20 * 20


def test_a_simulation_in_which_nothing_can_happen_any_more_ends():
    broker = MemoryBroker()
    link = broker.connect()
    silent = Echo(link, "a", "b")
    with pytest.raises(TimeoutError, match=r"no event is due before .* at virtual second 0\.0"):
        run_on_virtual_time(broker, lambda: [(link, silent)], is_finished=lambda: False)


class PatientLink(MemoryLink):
    waited_s: tuple[float, ...] = ()

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self.waited_s += (timeout_s,)


class Counter:
    def __init__(self) -> None:
        self.finished = False
        self.steps = 0

    def fds(self) -> Sequence[int]:
        return ()

    def step(self, now_s: float) -> float:
        self.steps += 1
        self.finished = self.steps == 3
        return now_s + 0.25 if self.steps == 1 else math.inf


def test_real_time_waits_until_due_and_a_second_at_most():
    link, endpoint = PatientLink(MemoryBroker(), None), Counter()
    run_endpoint(endpoint, link, clock=lambda: 100.0)
    assert link.waited_s == (0.25, 1.0)
    assert endpoint.steps == 3


def test_a_request_to_stop_ends_the_loop():
    link, endpoint = PatientLink(MemoryBroker(), None), Counter()
    run_endpoint(endpoint, link, stop=lambda: endpoint.steps == 1, clock=lambda: 100.0)
    assert endpoint.steps == 1
