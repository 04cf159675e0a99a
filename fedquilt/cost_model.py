"""What work will take at an operating point, in seconds and joules: for the coordinator's deadlines and the governor.

The one model both sides use: t = flops / flops_per_s + read_bytes / bytes_per_s, arithmetic and memory
traffic not overlapping; E = busy_w * t. How a point's three numbers come from clocks is the profile's matter.
"""

from __future__ import annotations

import math

from fedquilt.core import OperatingPoint, Work


def seconds(work: Work, point: OperatingPoint) -> float | None:
    """How long the work takes there; None: the work or the point does not say enough, or nothing sensible."""
    if work.flops <= 0 or not point.flops_per_s:
        return None
    traffic_s = work.read_bytes / point.bytes_per_s if point.bytes_per_s else 0.0
    whole_s = work.flops / point.flops_per_s + traffic_s
    return whole_s if math.isfinite(whole_s) else None


def joules(duration_s: float, point: OperatingPoint) -> float | None:
    """What the whole board takes meanwhile; None: its power is not known."""
    return None if point.busy_w is None else point.busy_w * duration_s
