"""Meter of the load by other processes, which disturb a measurement of times."""

from __future__ import annotations

import os
import time
from typing import Final

import psutil

MAX_OTHER_LOAD: Final = 0.1  # share of the machine that other processes may use during a measurement


class LoadMeter:
    """Meter of the share of the processors that other processes use.

    The time of a child process counts as that of other processes until the child has ended and was waited for.
    """

    def __init__(self) -> None:
        self._others_s, self._started_s = _others_processor_s(), time.monotonic()

    def measure_share(self) -> float:
        """Return the share since the last call, or since the meter was created."""
        previous_others_s, previous_start_s = self._others_s, self._started_s
        self._others_s, self._started_s = _others_processor_s(), time.monotonic()
        used_s, elapsed_s = max(self._others_s - previous_others_s, 0.0), self._started_s - previous_start_s
        return used_s / elapsed_s / (psutil.cpu_count() or 1)


def _others_processor_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice - sum(os.times()[:4]))
