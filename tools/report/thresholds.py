"""Comparison of measured values with limits, and a meter of the load by other processes."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import psutil

VERDICTS: Final = {True: "ok ", False: "NOT", None: "?  "}  # None if the machine was busy
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


def compare_at_most(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_most": limit, "unit": unit, "reached": value <= limit}


def compare_at_least(value: float, limit: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 3), "at_least": limit, "unit": unit, "reached": value >= limit}


def format_figures(result: dict[str, Any]) -> list[str]:
    """Return a line for each of "figures", the results of `compare_at_most` or `compare_at_least`."""
    return [
        f"{VERDICTS[f['reached']]} {name.replace('_', ' '):44} {f['value']:10.2f} {f['unit']}"
        f"   ({'at most' if 'at_most' in f else 'at least'} {f.get('at_most', f.get('at_least')):g})"
        for name, f in result["figures"].items()
    ]
