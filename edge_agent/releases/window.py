"""Windows of local time in which a device may install releases. Pure functions."""

from __future__ import annotations

import re
import time
from typing import Final

EARLIEST_YEAR: Final = 2020  # an earlier clock was never set: boards without a clock battery begin in 1970
FORM: Final = 'a window is two times of a day, "02:00-05:00"'

_FORM: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z")


def window_error(window: str) -> str:
    """Return why a text is no window, or "". An empty text means any time."""
    return "" if not window or _FORM.match(window) else f"{window!r} is no window: {FORM}"


def outside_window_reason(window: str, local: time.struct_time | None) -> str:
    """Return why nothing may be installed now, or "".

    Args:
        window: "HH:MM-HH:MM", over midnight if the second time is earlier, or "" for any time.
        local: Local time of the device, or None without a clock.
    """
    found = _FORM.match(window)
    if found is None:
        return ""
    if local is None:
        return f"its window is {window}, and it has no clock"
    if local.tm_year < EARLIEST_YEAR:
        return f"its window is {window}, and its clock says {local.tm_year}"
    begin, end = (60 * int(found[at]) + int(found[at + 1]) for at in (1, 3))
    now = 60 * local.tm_hour + local.tm_min
    inside = begin <= now < end if begin < end else now >= begin or now < end
    return "" if inside else f"its window is {window}"
