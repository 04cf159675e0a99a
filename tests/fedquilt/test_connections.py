"""Places of one listener: who gets one, who loses one, and when."""

import resource

import pytest

from fedquilt.host.http_server import Connection, ConnectionLimiter, ConnectionLimits, raise_descriptor_limit


class Places:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.closed: list[str] = []
        limits = ConnectionLimits(connections=4, per_address=2)
        self.open = ConnectionLimiter(limits, header_s=10.0, request_s=60.0, clock=lambda: self.now_s)

    def enter(self, address: str, name: str = "", descriptor: int = 3) -> Connection | None:
        self.now_s += 1.0
        return self.open.add_connection(address, descriptor, lambda: self.closed.append(name or address))

    def work(self, address: str, name: str = "") -> Connection:
        entry = self.enter(address, name)
        assert entry is not None
        self.open.begin_request(entry)
        return entry


@pytest.fixture
def places() -> Places:
    return Places()


def test_an_address_without_a_free_place_loses_its_oldest_waiting_connection(places):
    for address, name in (("10.0.0.2", "b"), ("10.0.0.1", "a1"), ("10.0.0.1", "a2"), ("10.0.0.1", "a3")):
        assert places.enter(address, name) is not None
    assert places.closed == ["a1"]
    assert len(places.open) == 3


def test_an_address_whose_requests_all_run_gets_no_further_place(places):
    for name in ("a1", "a2"):
        places.work("10.0.0.1", name)
    assert places.enter("10.0.0.1") is None
    assert places.enter("10.0.0.2") is not None
    assert places.closed == []


def test_addresses_that_hold_all_places_with_requests_lose_one_to_an_address_that_has_none(places):
    for address, name in (("10.0.0.1", "a1"), ("10.0.0.2", "b1"), ("10.0.0.1", "a2"), ("10.0.0.2", "b2")):
        places.work(address, name)
    assert places.enter("10.0.0.3", "c") is not None
    assert places.closed == ["a1"]
    places.work("10.0.0.4", "d")
    assert places.closed == ["a1", "b1"]
    places.work("10.0.0.4", "d2")
    assert places.closed == ["a1", "b1", "c"]  # which waited
    assert places.enter("10.0.0.4") is None


def test_a_verified_peer_keeps_its_connections_and_has_a_number_of_them(places):
    for number in range(4):
        entry = places.work(f"10.0.{number // 2}.1")
        assert places.open.assign_owner(entry, "device", limit=3) is (number < 3)
    places.open.assign_owner(entry, "other device", limit=3)
    assert places.enter("10.0.9.9") is None
    assert places.closed == []


def test_each_state_of_a_connection_has_a_deadline(places):
    late, works, waits, gone = (places.enter(f"10.0.0.{number}", name) for number, name in enumerate("abcd"))
    assert late
    assert works
    assert waits
    assert gone
    places.open.begin_request(works)
    places.open.remove_connection(gone)
    places.now_s = 9.0
    places.open.await_request(waits)
    places.now_s = 12.0
    places.open.close_overdue()
    assert places.closed == ["a"]
    places.now_s = 19.0
    places.open.close_overdue()
    assert places.closed == ["a", "c"]
    places.now_s = 100.0
    places.open.close_overdue()
    assert places.closed == ["a", "c", "b"]
    assert len(places.open) == 0


def test_a_network_of_ipv6_counts_as_one_address_and_a_mapped_address_as_itself(places):
    for name in ("1", "2", "3"):
        places.enter(f"2001:db8:0:1::{name}", name)
    places.enter("2001:db8:0:2::1", "other")
    assert places.closed == ["1"]
    places.enter("::ffff:10.0.0.1", "mapped")
    assert len(places.open) == 4
    places.enter("10.0.0.1", "same")
    assert len(places.open) == 4


def test_listeners_leave_the_upper_half_of_the_descriptors_alone(places):
    half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    assert places.enter("10.0.0.1", descriptor=half) is None
    assert places.enter("10.0.0.1", "a", descriptor=half - 1) is not None
    assert places.enter("10.0.0.2", "b", descriptor=half) is not None
    assert places.closed == ["a"]


def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
