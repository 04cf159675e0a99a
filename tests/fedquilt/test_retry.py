"""Delays between attempts."""

import pytest

from fedquilt.core import MAX_COUNTED_ATTEMPTS, RESEND, Retry


@pytest.mark.parametrize(
    ("retry", "attempts", "draw", "delay_s"),
    [
        *((RESEND, attempts, 0.7, delay_s) for attempts, delay_s in enumerate([5.0, 10.0, 20.0, 40.0, 60.0, 60.0])),
        (Retry(0.1, 30.0, factor=1.5), 10**9, 0.0, 30.0),  # a device that tries for years
        (Retry(1e-6, 1e5, factor=1.5), MAX_COUNTED_ATTEMPTS, 0.0, 1e5),
        (Retry(90.0, 30.0), 0, 0.0, 30.0),
        *((Retry(2.0, 60.0, jitter=0.5), 1, draw, 4.0 - 2 * draw) for draw in (0.0, 0.5, 1.0)),
    ],
)
def test_delays_grow_up_to_the_longest_and_jitter_shortens_them(retry, attempts, draw, delay_s):
    assert retry.delay_s(attempts, draw) == delay_s
