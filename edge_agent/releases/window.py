"""Windows of a board's local time in which it may exchange something. Pure."""

from __future__ import annotations

import re
import time
from typing import Final

EARLIEST_YEAR: Final = 2020  # an earlier clock was never set: boards without a clock battery begin in 1970
FORM: Final = 'a window is two times of a day, "02:00-05:00"'

_FORM: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z")


def wrong(window: str) -> str:
    """Reason why a text is no window; "": the text is one, or empty for any time."""
    return "" if not window or _FORM.match(window) else f"{window!r} is no window: {FORM}"


def waits(window: str, local: time.struct_time | None) -> str:
    """Reason why nothing may be exchanged now; "": there is none.

    Args:
        window: "HH:MM-HH:MM", over midnight too if the second time is the earlier one; "": at any time.
        local: the board's local time; None: the board has no clock.
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
