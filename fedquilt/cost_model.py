"""Cost of work at an operating point, in seconds and joules: the one model of all that predicts.

Deadlines, the governor, budgets and simulated boards use it:

    t = tasks * task_s + launches * launch_s + flops / flops_per_s + read_bytes / bytes_per_s        E = busy_w * t

Arithmetic and memory traffic do not overlap. A launch is an operation that an engine begins; its cost does not depend
on its size, and decides how long small networks take. Profiles compute a point's numbers from its clocks, for each
workload that was measured (`Rates`); other workloads use the point's own numbers. A launch or a task whose cost is
not known counts 0 seconds, and so does traffic without a rate: profiles from before these numbers predict as they did.
"""

from __future__ import annotations

import math

from fedquilt.core import OperatingPoint, Rates, Work


def rates(work: Work, point: OperatingPoint) -> Rates | OperatingPoint:
    """Speed of a point for this work: that of its workload where it was measured, else the point's own numbers."""
    return point.rates.get(work.workload, point)


def seconds(work: Work, point: OperatingPoint) -> float | None:
    """Seconds of the work at a point; None: there is no work, or a number of either is missing or out of range."""
    speed = rates(work, point)
    if work.flops > 0 and not speed.flops_per_s:
        return None
    arithmetic_s = work.flops / speed.flops_per_s if speed.flops_per_s else 0.0
    traffic_s = work.read_bytes / speed.bytes_per_s if speed.bytes_per_s else 0.0
    if work.flops <= 0 and not work.launches:
        return None
    whole_s = launch_s(work, point) + arithmetic_s + traffic_s
    return whole_s if 0 < whole_s < math.inf else None


def launch_s(work: Work, point: OperatingPoint) -> float:
    """Seconds that the work takes at a point however little there is to compute: its task, and its launches.

    0: neither cost is known.
    """
    speed = rates(work, point)
    found = work.tasks * (speed.task_s or 0.0) + work.launches * (speed.launch_s or 0.0)
    return found if math.isfinite(found) else 0.0


def joules(duration_s: float, point: OperatingPoint) -> float | None:
    """Joules of the whole board in that time; None: its power is unknown."""
    return None if point.busy_w is None else point.busy_w * duration_s
