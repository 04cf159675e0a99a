"""Cost of work at an operating point, in seconds and joules: the one model of all that predicts.

Deadlines, the governor, budgets and simulated boards use it:

    t = tasks * task_s + launches * launch_s + flops / flops_per_s + read_bytes / bytes_per_s        E = busy_w * t

Arithmetic and memory traffic do not overlap. A launch is an operation that an engine begins; its cost does not depend
on its size, and decides how long small networks take. Profiles compute a point's numbers from its clocks, for each
workload that was measured (`Rates`); other workloads use the point's own numbers. A launch or a task whose cost is
not known counts 0 seconds, and so does traffic without a rate: profiles from before these numbers predict as they did.

What a task is sent and sends takes time besides, in which the board idles. Rates are a fleet's, as measured (`Link`):

    t = transfer_s + bytes / bytes_per_s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedquilt import units
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
    whole_s = _launch_s(work, speed) + arithmetic_s + traffic_s
    return whole_s if 0 < whole_s < math.inf else None


def launch_s(work: Work, point: OperatingPoint) -> float:
    """Seconds that the work takes at a point however little there is to compute: its task, and its launches.

    0: neither cost is known.
    """
    return _launch_s(work, rates(work, point))


def _launch_s(work: Work, speed: Rates | OperatingPoint) -> float:
    found = work.tasks * (speed.task_s or 0.0) + work.launches * (speed.launch_s or 0.0)
    return found if math.isfinite(found) else 0.0


def joules(duration_s: float, point: OperatingPoint) -> float | None:
    """Joules of the whole board in that time; None: its power is unknown."""
    return None if point.busy_w is None else point.busy_w * duration_s


class Link(NamedTuple):
    """What transfers of blobs cost between the coordinator and its boards."""

    transfer_s: float = 0.0  # of one task, whatever its size: messages, claims, waiting in queues
    bytes_per_s: float = math.inf

    def seconds(self, size: int) -> float:
        """Seconds of transfers of so many bytes in all."""
        return self.transfer_s + size / self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse "2MB/s" or "2MB/s 50ms", the latter for each transfer besides.

        Raises:
            ValueError: it is no such text; the message says what is one.
        """
        rate, _, delay = text.strip().partition(" ")
        known = {f"{unit}/s": scale for unit, scale in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9))}
        bytes_per_s = units.amount(rate, known, "rate")
        if bytes_per_s <= 0:
            raise ValueError(f"{text!r} is no link: nothing would ever arrive")
        return cls(units.seconds(delay) if delay else 0.0, bytes_per_s)

    @staticmethod
    def measured(transfers: Sequence[tuple[int, float]]) -> Link | None:
        """Fit a link to tasks' transfers, as (bytes, seconds); None: fewer than three say anything.

        Where sizes are too much alike to tell what does not grow with them, or seem to take less the larger they are,
        all the time counts as the bytes': more bytes are then predicted to take too long rather than too short.
        """
        known = [(size, seconds) for size, seconds in transfers if size > 0]
        if len(known) < 3:
            return None
        sizes, times = zip(*known, strict=True)
        size, seconds = sum(sizes) / len(known), sum(times) / len(known)
        if max(sizes) >= 2 * min(sizes):  # by least squares
            spread = sum((each - size) ** 2 for each in sizes)
            slope = sum((each - size) * (took - seconds) for each, took in known) / spread
            if slope > 0 and seconds >= slope * size:
                return Link(seconds - slope * size, 1 / slope)
        return Link(0.0, size / seconds if seconds > 0 else math.inf)
