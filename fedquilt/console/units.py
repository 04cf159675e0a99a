"""Formatting and parsing of numbers with units."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final

TIMES: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def select_prefix(largest: float) -> tuple[float, str]:
    """Return the divisor and unit prefix for numbers up to `largest`, such as (1e6, "M")."""
    return next(((scale, name) for scale, name in UNITS if largest >= scale), (1.0, ""))


def format_bytes(count: int) -> str:
    """Return a number of bytes as text with three digits: "0 B", "815 B", "64.2 kB", "1.23 GB"."""
    scale, prefix = select_prefix(count)
    if count >= 999.5 * scale and scale < UNITS[0][0]:  # would be rounded to a thousand
        scale, prefix = select_prefix(count * 1.001)
    return f"{count / scale:.3g} {prefix}B"


def format_duration(seconds: float) -> str:
    """Return a duration as text with about two digits: "0 s", "45 s", "12 min", "3 h", "5 d"."""
    for scale, name, min_seconds in ((86400.0, "d", 2 * 86400.0), (3600.0, "h", 2 * 3600.0), (60.0, "min", 120.0)):
        if seconds >= min_seconds:
            return f"{seconds / scale:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def format_time_of_day(time_s: float, now_s: float) -> str:
    """Return a local time such as "14:02", with the date if different from the date of `now_s`."""
    moment = time.localtime(time_s)
    return time.strftime("%H:%M" if moment[:3] == time.localtime(now_s)[:3] else "%Y-%m-%d %H:%M", moment)


def parse_amount(text: str, scales: Mapping[str, float], noun: str) -> float:
    """Return a number with a unit, such as "1.5 h", times the unit's scale. Errors name the value `noun`."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?) ?([A-Za-z%/]+)", text.strip())
    if match is None or match[2] not in scales:
        *first_units, last_unit = scales
        units = f"{', '.join(first_units)} or {last_unit}" if first_units else last_unit
        raise ValueError(f"{text!r} is not a {noun}: write a number with {units}")
    return float(match[1]) * scales[match[2]]


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as "40ms", "10min" or "30d", or raise ValueError."""
    try:
        value = parse_amount(text, TIMES, "time")
    except ValueError as error:
        raise ValueError(f"{error}, such as 90s or 30d") from None
    if not 0 <= value < 1e9:
        raise ValueError(f"{text} is negative or too long: write a time up to 1653w")
    return round(value, 9)
