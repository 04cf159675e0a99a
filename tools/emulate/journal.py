"""Messages in the journal of a unit."""

from __future__ import annotations

import re
from typing import Final

SAID: Final = re.compile(r"\S+ +\d+ \S+ \S+ ([^\[: ]+)(?:\[\d+\])?: (.*)")  # journalctl --output=short-precise


def count_restarts(journal: str) -> int:
    return journal.count("Scheduled restart job")


def last_message(journal: str) -> str:
    said = [found[2] for found in map(SAID.match, journal.splitlines()) if found and found[1] != "systemd"]
    return said[-1][:300] if said else "(it said nothing)"
