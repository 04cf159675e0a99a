"""Waiting for what only other processes and threads can change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_S = 600.0  # many times what anything here takes, also on a machine that is busy: a test that needs more hangs


def until(
    condition: Callable[[], Found],
    what: str,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.02,
    told: Callable[[], str] = str,
) -> Found:
    """Poll a condition until it holds.

    Args:
        condition: polled; what it says first that is not false is returned.
        what: is waited for, in a word or two.
        limit_s: after so many seconds it fails.
        pause_s: between two polls.
        told: what else is said when it fails, such as a log's end.
    """
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}; {told()}".removesuffix("; ")
        time.sleep(pause_s)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
