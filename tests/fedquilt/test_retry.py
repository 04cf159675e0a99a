"""Delays between attempts."""

from fedquilt.core import ATTEMPTS_MOST, RESEND, Retry
from fedquilt.transport.mqtt.connection import RECONNECT


def test_delays_double_up_to_the_longest():
    assert [RESEND.delay_s(n) for n in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_device_that_tries_for_years_still_waits_the_longest_delay():
    assert Retry(0.1, 30.0, factor=1.5).delay_s(10**9) == 30.0


def test_delays_are_at_their_longest_when_attempts_are_no_longer_counted():
    assert Retry(1e-6, 1e5, factor=1.5).delay_s(ATTEMPTS_MOST) == 1e5


def test_a_first_delay_above_the_longest_is_cut():
    assert Retry(90.0, 30.0).delay_s(0) == 30.0


def test_jitter_shortens_a_delay_by_at_most_its_share():
    assert [Retry(2.0, 60.0, jitter=0.5).delay_s(1, draw) for draw in (0.0, 0.5, 1.0)] == [4.0, 3.0, 2.0]
    assert RECONNECT.delay_s(16, 1.0) == 15.0


def test_without_jitter_the_random_number_changes_nothing():
    assert RESEND.delay_s(2, 0.7) == RESEND.delay_s(2)
