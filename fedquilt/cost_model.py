"""Cost of work at an operating point, in seconds and joules: for the coordinator's deadlines and the governor.

The one model both sides use: t = flops / flops_per_s + read_bytes / bytes_per_s, arithmetic and memory
traffic not overlapping; E = busy_w * t. Profiles compute a point's three numbers from its clocks.
"""

from __future__ import annotations

import math

from fedquilt.core import OperatingPoint, Work


def seconds(work: Work, point: OperatingPoint) -> float | None:
    """Seconds of the work at a point; None: a number of either is missing or out of range."""
    if work.flops <= 0 or not point.flops_per_s:
        return None
    traffic_s = work.read_bytes / point.bytes_per_s if point.bytes_per_s else 0.0
    whole_s = work.flops / point.flops_per_s + traffic_s
    return whole_s if math.isfinite(whole_s) else None


def joules(duration_s: float, point: OperatingPoint) -> float | None:
    """Joules of the whole board in that time; None: its power is unknown."""
    return None if point.busy_w is None else point.busy_w * duration_s
