"""Messages in the journal of a unit."""

from __future__ import annotations

import re
from typing import Final

SAID: Final = re.compile(r"\S+ +\d+ \S+ \S+ ([^\[: ]+)(?:\[\d+\])?: (.*)")  # journalctl --output=short-precise


def starts(journal: str) -> int:
    """How often systemd has started a unit again, by its journal."""
    return journal.count("Scheduled restart job")


def reason(journal: str) -> str:
    """The last that a unit's own processes said, by its journal: systemd's and the time are left out."""
    said = [found[2] for found in map(SAID.match, journal.splitlines()) if found and found[1] != "systemd"]
    return said[-1][:300] if said else "(it said nothing)"
