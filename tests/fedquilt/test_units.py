"""Numbers for people."""

from __future__ import annotations

import pytest

from fedquilt import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (64_210, "64.2 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (1_234_567_890, "1.23 GB"),
        (5 * 10**12, "5 TB"),
    ],
)
def test_bytes_have_three_digits_and_their_unit(count: int, text: str) -> None:
    """What is little is not 0.0 of something large."""
    assert units.size(count) == text


def test_units_are_those_of_the_largest() -> None:
    """Bytes and joules of any size have labels of a few digits."""
    assert units.unit(2_500_000) == (1e6, "M")
    assert units.unit(0.004) == (1e-3, "m")
    assert units.unit(0.0) == (1.0, "")
