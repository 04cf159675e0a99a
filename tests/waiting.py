"""Waiting for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_S = 600.0  # far above the duration of any test on a busy machine


def wait_until(
    condition: Callable[[], Found],
    description: str,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.02,
    diagnostics: Callable[[], str] = str,
) -> Found:
    """Poll a condition until the result is true, and return the result.

    Args:
        condition: Function to poll.
        description: What the test waits for, for the failure message.
        limit_s: Seconds after which the wait fails.
        pause_s: Seconds between two polls.
        diagnostics: Function that returns further text for the failure message, such as the end of a log.
    """
    end_s = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {description}; {diagnostics()}".removesuffix("; ")
        time.sleep(pause_s)
    return result


def is_running(pid: int) -> bool:
    """Return whether a process is running. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
