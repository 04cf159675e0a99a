"""Time and energy of work at an operating point, used for all predictions.

Deadlines, the governor, budgets and simulated devices use this model:

    t = tasks * task_s + launches * launch_s + flops / flops_per_s + read_bytes / bytes_per_s        E = busy_w * t

Arithmetic and memory traffic do not overlap. A launch is an operation started by an engine. Its cost does not depend on
its size, and dominates small networks. Profiles contain rates for each measured workload (`Rates`). Other workloads use
the point's own rates. Unknown costs of launches, tasks and traffic count as 0 seconds.

Transfers of a task take additional time, in which the device idles. Their rates are measured per fleet (`LinkCost`):

    t = transfer_s + bytes / bytes_per_s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedquilt.console import units
from fedquilt.core import OperatingPoint, Rates, WorkEstimate


def select_rates(work: WorkEstimate, point: OperatingPoint) -> Rates | OperatingPoint:
    """Return the rates of a point for this workload, or the point's own if it was not measured."""
    return point.rates.get(work.workload, point)


def work_seconds(work: WorkEstimate, point: OperatingPoint) -> float | None:
    """Return the seconds of the work at a point, or None without work or without known rates."""
    speed = select_rates(work, point)
    if work.flops > 0 and not speed.flops_per_s:
        return None
    arithmetic_s = work.flops / speed.flops_per_s if speed.flops_per_s else 0.0
    traffic_s = work.read_bytes / speed.bytes_per_s if speed.bytes_per_s else 0.0
    if work.flops <= 0 and not work.launches:
        return None
    whole_s = _overhead_seconds(work, speed) + arithmetic_s + traffic_s
    return whole_s if 0 < whole_s < math.inf else None


def overhead_seconds(work: WorkEstimate, point: OperatingPoint) -> float:
    """Return the seconds for tasks and launches at a point, or 0 if their costs are unknown."""
    return _overhead_seconds(work, select_rates(work, point))


def _overhead_seconds(work: WorkEstimate, speed: Rates | OperatingPoint) -> float:
    found = work.tasks * (speed.task_s or 0.0) + work.launches * (speed.launch_s or 0.0)
    return found if math.isfinite(found) else 0.0


def work_joules(duration_s: float, point: OperatingPoint) -> float | None:
    """Return the joules of the whole device for a duration, or None if its power is unknown."""
    return None if point.busy_w is None else point.busy_w * duration_s


class LinkCost(NamedTuple):
    """Cost of transfers between the coordinator and a device."""

    transfer_s: float = 0.0  # of one task, whatever its size: messages, claims, waiting in queues
    bytes_per_s: float = math.inf

    def transfer_seconds(self, size: int) -> float:
        return self.transfer_s + size / self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> LinkCost:
        """Parse a rate with an optional delay per transfer, such as "2MB/s 50ms".

        Raises:
            ValueError: If the text has another form, or the rate is 0.
        """
        rate, _, delay = text.strip().partition(" ")
        known = {f"{unit}/s": scale for unit, scale in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9))}
        bytes_per_s = units.parse_amount(rate, known, "rate")
        if bytes_per_s <= 0:
            raise ValueError(f"{text!r} is no link: nothing would ever arrive")
        return cls(units.parse_seconds(delay) if delay else 0.0, bytes_per_s)

    @staticmethod
    def fit_link(transfers: Sequence[tuple[int, float]]) -> LinkCost | None:
        """Fit a link to transfers (bytes, seconds), or return None for fewer than three with bytes.

        If sizes differ by less than a factor of 2, or the fit is impossible, all time is attributed to the bytes.
        Predictions for more bytes are then too long rather than too short.
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
                return LinkCost(seconds - slope * size, 1 / slope)
        return LinkCost(0.0, size / seconds if seconds > 0 else math.inf)
