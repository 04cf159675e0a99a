"""Energy of a task, computed from sensor readings during the task. Pure functions.

Two successive readings with a counter (`Reading.energy_j`, such as RAPL or a power monitor) give a difference.
Otherwise, two readings with a power (`Reading.power_w`, such as INA3221 rails) give a trapezoid. Counters have
priority, because they miss nothing between readings. Ignored are readings without a value, from the past, or from
another meter than that of the segment's first reading, which covers another part of the board.

The error bound, `energy_error_j`, has three parts:
  - for trapezoids, half the difference between the rectangles of the left and of the right powers in each interval: the
    whole error of a power that only rose or only fell between two readings,
  - for a counter, the largest increment of one interval, by which it may lag at either end,
  - unwatched time in full: a gap of more than GAP_S between two powers, and the time before the first and after the
    last reading, both at the nearest power.
Energy is unknown if the meter has failed during the task: silent for more than LOST_S, constant for much longer than
before, or with impossible values, which are skipped until values are possible again.

The bound lacks the error of the sensor (some per cent for an INA3221's shunt), which no board reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fedquilt.core import Cost, Reading
from fedquilt.edge_agent.devices.sensors.meters import MOST_W

SAMPLE_S = 0.1  # interval between sensor readings while a task runs
LOST_S = 5.0  # longest gap between readings of a task, after which its energy is unknown
STILL_S, STILL_TIMES = 10.0, 20.0  # a frozen meter: longer than this at one value, and so many times longer than before
NEVER_S = 60.0  # likewise of a meter that has never moved, as a coarse one on an idle board
LET_GO = "let go"  # suffix of a point's name: from there on the board's clocks were its own
GAP_S = 1.0  # powers further apart leave the time between them unknown


class EnergyAccount(msgspec.Struct, frozen=True):
    began_s: float
    at_s: float | None = None  # of the last usable reading
    last: Reading = Reading()
    first_s: float = 0.0  # of the first
    intervals: int = 0
    energy_j: float = 0.0  # from the first to the last
    error_j: float = 0.0
    most_j: float = 0.0  # largest gain of a counter in one interval
    first_w: float | None = None  # power assumed before the first reading
    last_w: float | None = None  # power assumed after the last reading
    counted: bool = False  # some of it is from a counter
    most_w: float = MOST_W  # no more is believed
    silent_s: float = 0.0  # longest time between two usable readings
    still_s: float = 0.0  # time since which the meter tells the same value
    stood_s: float = 0.0  # longest time for which it has told one value and then another

    def with_reading(self, now_s: float, reading: Reading) -> EnergyAccount:
        """Return the sums with one more reading. An unusable reading changes nothing."""
        if not _is_usable(reading, self.most_w) or (self.at_s is not None and now_s <= self.at_s):
            return self
        if self.at_s is None:
            power = _finite_or_none(reading.power_w)
            first = replace(self, at_s=now_s, last=reading, first_s=now_s, first_w=power, last_w=power, still_s=now_s)
            return replace(first, silent_s=max(self.silent_s, now_s - self.began_s))
        added = _interval_energy(self.last, reading, now_s - self.at_s)
        if added is None or added[0] > self.most_w * (now_s - self.at_s):
            return self  # the counter fell or jumped, or only one of both has it: wait for one that fits
        energy, error, first_w, last_w, counted = added
        moved = _meter_value(reading) != _meter_value(self.last)
        return replace(
            self,
            at_s=now_s,
            last=reading,
            intervals=self.intervals + 1,
            energy_j=self.energy_j + energy,
            error_j=self.error_j + error,
            most_j=max(self.most_j, energy if counted else 0.0),
            first_w=first_w if self.first_w is None else self.first_w,
            last_w=last_w,
            counted=self.counted or counted,
            silent_s=max(self.silent_s, now_s - self.at_s),
            still_s=now_s if moved else self.still_s,
            stood_s=max(self.stood_s, now_s - self.still_s) if moved else self.stood_s,
        )

    def next_segment(self, now_s: float) -> EnergyAccount:
        """Start a new segment now, with the last reading of this segment if it is recent."""
        fresh = EnergyAccount(now_s, most_w=self.most_w, stood_s=self.stood_s)
        if self.at_s is None or self.at_s < now_s:
            return fresh
        return replace(fresh.with_reading(now_s, self.last), still_s=self.still_s)

    def cost_until(self, now_s: float, idle_w: float | None, point: str | None = None) -> Cost:
        """Return the cost from `began_s` to now. Energy is None without a working meter."""
        duration_s = max(now_s - self.began_s, 0.0)
        idle_j = None if idle_w is None else idle_w * duration_s
        if self.at_s is None or self.first_w is None or self.last_w is None or self._has_meter_failed(now_s):
            return Cost(duration_s=duration_s, idle_j=idle_j, point=point)
        held_j = self.first_w * max(self.first_s - self.began_s, 0.0) + self.last_w * max(now_s - self.at_s, 0.0)
        return Cost(
            duration_s=duration_s,
            energy_j=self.energy_j + held_j,
            idle_j=idle_j,
            energy_error_j=self.error_j + self.most_j + held_j,
            energy_source=self._describe_source(),
            point=point,
        )

    def _has_meter_failed(self, now_s: float) -> bool:
        at_s = now_s if self.at_s is None else self.at_s
        limit_s = max(STILL_S, STILL_TIMES * self.stood_s) if self.stood_s else NEVER_S
        return max(self.silent_s, now_s - at_s) > LOST_S or at_s - self.still_s > limit_s

    def _describe_source(self) -> str:
        sensor = self.last.energy_source or "a sensor without a name"
        if self.counted:
            return f"{sensor}, counter"[:200]
        span_s = (self.at_s or 0.0) - self.first_s
        rate = f"{self.intervals / span_s:.2g} Hz" if span_s > 0 else "one reading"
        return f"{sensor[:160]}, {rate}, trapezoids"


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Return the sum of a task's segments. A value unknown in any segment is unknown in the sum."""
    if len(costs) == 1 and len(costs[0].energy_source or "") <= 200 and len(costs[0].point or "") <= 200:
        return costs[0]

    def sum_known(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) > 0 else None

    points = [point for point, before in zip(costs, [None, *costs], strict=False) if _has_point_changed(point, before)]
    names = [cost.point or LET_GO for cost in points] if any(cost.point for cost in points) else []
    sources = list(dict.fromkeys(cost.energy_source for cost in costs if cost.energy_source is not None))
    return Cost(
        duration_s=sum(cost.duration_s for cost in costs),
        energy_j=sum_known([cost.energy_j for cost in costs]),
        idle_j=sum_known([cost.idle_j for cost in costs]),
        energy_error_j=sum_known([cost.energy_error_j for cost in costs]),
        energy_source="; ".join(sources)[:200] or None,
        point=", then ".join(names)[:200] or None,
    )


def _has_point_changed(cost: Cost, before: Cost | None) -> bool:
    return before is None or cost.point != before.point


def _is_usable(reading: Reading, most_w: float) -> bool:
    if reading.power_w is None and reading.energy_j is None:  # as of every board without a meter
        return False
    power_w = _finite_or_none(reading.power_w)
    if power_w is not None and not 0 <= power_w <= most_w:
        return False
    return _finite_or_none(reading.energy_j) is not None or power_w is not None


def _meter_value(reading: Reading) -> float | None:
    counter = _finite_or_none(reading.energy_j)
    return _finite_or_none(reading.power_w) if counter is None else counter


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _interval_energy(before: Reading, after: Reading, dt_s: float) -> tuple[float, float, float, float, bool] | None:
    """Return energy, error bound, both powers and whether counted, or None without a value of one meter in both."""
    if None not in (before.energy_source, after.energy_source) and before.energy_source != after.energy_source:
        return None
    counters = _finite_or_none(before.energy_j), _finite_or_none(after.energy_j)
    if counters[0] is not None and counters[1] is not None and counters[1] >= counters[0]:
        gained = counters[1] - counters[0]
        return gained, 0.0, gained / dt_s, gained / dt_s, True
    powers = _finite_or_none(before.power_w), _finite_or_none(after.power_w)
    if powers[0] is None or powers[1] is None:
        return None
    energy = (powers[0] + powers[1]) / 2 * dt_s
    error = energy if dt_s > GAP_S else abs(powers[1] - powers[0]) / 2 * dt_s
    return energy, error, powers[0], powers[1], False
