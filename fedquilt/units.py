"""Numbers for people, with the prefix that needs few digits."""

from __future__ import annotations

import re
from typing import Final

AGES: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def unit(largest: float) -> tuple[float, str]:
    """Divisor for numbers up to `largest`, and the prefix of their unit: (1e6, "M")."""
    return next(((scale, name) for scale, name in UNITS if largest >= scale), (1.0, ""))


def size(count: int) -> str:
    """Bytes in three digits: "0 B", "815 B", "64.2 kB", "1.23 GB"."""
    scale, prefix = unit(count)
    if count >= 999.5 * scale and scale < UNITS[0][0]:  # rounding would give a thousand
        scale, prefix = unit(count * 1.001)
    return f"{count / scale:.3g} {prefix}B"


def duration(seconds: float) -> str:
    """A time in two digits or so: "0 s", "45 s", "12 min", "3 h", "5 d"."""
    for scale, name, least in ((86400.0, "d", 2 * 86400.0), (3600.0, "h", 2 * 3600.0), (60.0, "min", 120.0)):
        if seconds >= least:
            return f"{seconds / scale:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def age_s(text: str) -> float:
    """Seconds of an age such as "30d".

    Raises:
        ValueError: it is none; the message says what is one.
    """
    if not re.fullmatch(r"\d+(\.\d+)?[mhdw]", text):
        raise ValueError(f"{text!r} is no age: a number with m, h, d or w, such as 30d")
    return float(text[:-1]) * AGES[text[-1]]
