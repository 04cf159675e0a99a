"""Numbers for people."""

import pytest

from fedquilt.cli import options
from fedquilt.console import units
from fedquilt.coordinator import settings


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
def test_bytes_have_three_digits_and_their_unit(count, text):
    assert units.format_bytes(count) == text


def test_units_are_those_of_the_largest():
    assert units.select_prefix(2_500_000) == (1e6, "M")
    assert units.select_prefix(0.004) == (1e-3, "m")
    assert units.select_prefix(0.0) == (1.0, "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40ms", 0.04),
        ("60s", 60.0),
        ("1min", 60.0),
        ("1.5m", 90.0),
        ("2 h", 7200.0),
        ("30d", 2_592_000.0),
        ("2w", 1_209_600.0),
        ("0s", 0.0),
    ],
)
def test_a_time_is_read_with_any_unit(text, seconds):
    assert units.parse_seconds(text) == seconds
    assert options.TIME.convert(text, None, None) == seconds
    assert settings.DriftTrigger(pause=text).pause_s == seconds
    assert settings.RetentionSettings(older_than=text).older_than_s == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12", "'12' is not a time: write a number with ms, s, min, m, h, d or w, such as 90s or 30d"),
        ("soon", "'soon' is not a time"),
        ("1month", "'1month' is not a time"),
        ("1.s", "'1.s' is not a time"),
        ("-1s", "-1s is negative or too long"),
        ("99999w", "99999w is negative or too long"),
    ],
)
def test_what_is_no_time_says_what_is_one(text, said):
    with pytest.raises(ValueError, match=said):
        units.parse_seconds(text)
