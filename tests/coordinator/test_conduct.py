"""A device that floods is slowed, then set aside; one that does its work never is."""

from fedquilt.coordinator.delivery.rate_limiter import (
    ASIDE_S,
    BURST_S,
    BYTE_S,
    CALM_S,
    DROPPED_MOST,
    MESSAGE_S,
    RATE,
    ROUND_S,
    RateLimiter,
    Verdict,
)


def said(conduct: RateLimiter, messages: int, now_s: float, device: str = "a") -> dict[Verdict, int]:
    counts: dict[Verdict, int] = {}
    for _ in range(messages):
        verdict = conduct.admit_message(device, 0, now_s)
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def test_what_a_device_may_send_at_once_and_for_good():
    """BURST_S of work, then RATE of each second; the first that is dropped is told, so that it can be named."""
    conduct, burst = RateLimiter(), round(BURST_S / MESSAGE_S)
    found = said(conduct, burst + 100, 0.0)
    assert burst <= found["taken"] <= burst + 1
    assert (found["slowed"], found["slowed"] + found["dropped"]) == (1, burst + 100 - found["taken"])
    assert abs(said(conduct, 1000, 1.0)["taken"] - RATE / MESSAGE_S) <= 2


def test_a_device_that_goes_on_is_set_aside_and_read_again_after_a_while():
    conduct = RateLimiter()
    found = said(conduct, round(BURST_S / MESSAGE_S) + DROPPED_MOST + 5000, 0.0)
    assert found["aside"] == 1
    assert said(conduct, 50, ASIDE_S - 1) == {"dropped": 50}
    assert said(conduct, 50, ASIDE_S) == {"taken": 50}


def test_a_device_that_is_slowed_now_and_then_is_not_set_aside():
    """A little beyond what it may, again and again, with calm between: the count begins anew."""
    conduct, burst = RateLimiter(), round(BURST_S / MESSAGE_S)
    for time in range(20):
        found = said(conduct, burst + DROPPED_MOST // 2, time * (CALM_S + BURST_S / RATE))
        assert "aside" not in found
        assert found["slowed"] == 1


def test_one_device_costs_another_nothing():
    conduct = RateLimiter()
    said(conduct, 100_000, 0.0)
    assert said(conduct, 100, 0.0, "b") == {"taken": 100}


def test_other_work_for_a_device_counts_and_its_debt_is_bounded():
    """Ten times what it may take at once: it is heard again when BURST_S have been made good."""
    conduct = RateLimiter()
    conduct.charge_time("a", 10 * BURST_S, 0.0)
    assert said(conduct, 1, 0.0) == {"slowed": 1}
    assert said(conduct, 1, BURST_S / RATE - 1) != {"taken": 1}
    assert said(conduct, 1, BURST_S / RATE + 1) == {"taken": 1}


def test_devices_that_are_quiet_are_not_remembered():
    conduct = RateLimiter()
    for number in range(20_000):
        said(conduct, 1, number * 1.0, f"d{number}")
    assert len(conduct._accounts) <= 1024


def test_who_was_slowed_of_late_is_remembered_though_it_has_its_time_back():
    conduct, later_s = RateLimiter(), BURST_S / RATE + 1
    assert later_s < CALM_S
    flood = round(BURST_S / MESSAGE_S) + DROPPED_MOST
    assert "aside" not in said(conduct, flood, 0.0)
    for number in range(2000):
        said(conduct, 1, later_s, f"d{number}")
    assert said(conduct, flood, later_s)["aside"] == 1


def test_a_message_costs_by_its_bytes():
    conduct = RateLimiter()
    assert conduct.admit_message("a", round(BURST_S / BYTE_S), 0.0) == "taken"
    assert conduct.admit_message("a", 0, 0.0) == "slowed"
    assert conduct.admit_message("a", 0, MESSAGE_S / RATE + 1) == "taken"


def test_who_is_set_aside_stays_so_however_many_others_come():
    """Its account is kept, though it has its time back and nothing was dropped for longer than CALM_S."""
    conduct, later_s = RateLimiter(), 2 * CALM_S
    assert BURST_S / RATE < later_s < ASIDE_S
    assert said(conduct, round(BURST_S / MESSAGE_S) + DROPPED_MOST + 10, 0.0)["aside"] == 1
    for number in range(2000):
        said(conduct, 1, later_s, f"d{number}")
    assert said(conduct, 1, later_s) == {"dropped": 1}


def test_a_clock_that_is_set_back_costs_a_device_nothing():
    conduct = RateLimiter()
    said(conduct, 1, 10 * BURST_S / RATE)
    assert said(conduct, 10, 0.0) == {"taken": 10}


def test_what_the_coordinator_wants_of_a_device_pays_for_itself():
    conduct = RateLimiter()
    for number in range(1000):
        conduct.charge_time("a", -ROUND_S, number * 0.01)
        assert said(conduct, 10, number * 0.01) == {"taken": 10}
    conduct.charge_time("a", -100 * BURST_S, 20.0)
    assert abs(said(conduct, 10_000, 20.0)["taken"] - BURST_S / MESSAGE_S) <= 2
