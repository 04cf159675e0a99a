"""Energy of a task in joules, from readings of the board's sensors during it. Pure: readings in, a `Cost` out.

Two successive readings with a counter (`Reading.energy_j`: RAPL, a power-monitoring chip) give a difference;
otherwise two with a power (`Reading.power_w`: INA3221 rails) give a trapezoid. Counters come first, as they
miss nothing between two readings. A reading with neither is ignored, and so is one from the past, and one of
another meter than the stretch began with: the two cover different parts of the board.

The bound, `energy_error_j`, has three parts:
  - for trapezoids, half of what the rectangles of the left and of the right powers differ by, interval by
    interval: the whole error of a power that only rose or only fell between two readings;
  - for a counter, the most that one interval added: it may lag by so much at either end;
  - in full, unwatched time: a gap of more than GAP_S between two powers, and the time before the first
    and after the last reading, both counted at the nearest power.
Joules are unknown, not guessed, where the meter has failed on the way: silent for more than LOST_S, at a value that
stands still for long beside how it moved before, or with numbers that no such board can draw, which are passed over
until it tells possible ones.

The bound lacks the error of the sensor itself (an INA3221's shunt: some per cent), which no board reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fedquilt.core import Cost, Reading
from fedquilt.edge_agent.devices.sensors.meters import MOST_W

SAMPLE_S = 0.1  # interval between sensor readings while a task runs
LOST_S = 5.0  # silence of a meter in a task, above which nobody knows what the board drew
STILL_S, STILL_TIMES = 10.0, 20.0  # a frozen meter: longer than this at one value, and so many times longer than before
NEVER_S = 60.0  # likewise of a meter that has never moved, as a coarse one on an idle board
LET_GO = "let go"  # suffix of a point's name: from there on the board's clocks were its own
GAP_S = 1.0  # powers further apart leave the time between them unknown


class Ledger(msgspec.Struct, frozen=True):
    """Sums over the readings of one stretch of time so far."""

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

    def seen(self, now_s: float, reading: Reading) -> Ledger:
        """The sums with one more reading."""
        if not _usable(reading, self.most_w) or (self.at_s is not None and now_s <= self.at_s):
            return self
        if self.at_s is None:
            power = _finite(reading.power_w)
            first = replace(self, at_s=now_s, last=reading, first_s=now_s, first_w=power, last_w=power, still_s=now_s)
            return replace(first, silent_s=max(self.silent_s, now_s - self.began_s))
        added = _interval(self.last, reading, now_s - self.at_s)
        if added is None or added[0] > self.most_w * (now_s - self.at_s):
            return self  # the counter fell or jumped, or only one of both has it: wait for one that fits
        energy, error, first_w, last_w, counted = added
        moved = _value(reading) != _value(self.last)
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

    def again(self, now_s: float) -> Ledger:
        """New stretch that begins now, with the last reading of this one if it is recent enough."""
        fresh = Ledger(now_s, most_w=self.most_w, stood_s=self.stood_s)
        if self.at_s is None or self.at_s < now_s:
            return fresh
        return replace(fresh.seen(now_s, self.last), still_s=self.still_s)

    def cost(self, now_s: float, idle_w: float | None, point: str | None = None) -> Cost:
        """Cost from `began_s` until now. Joules are None without a meter, or with one that has failed."""
        duration_s = max(now_s - self.began_s, 0.0)
        idle_j = None if idle_w is None else idle_w * duration_s
        if self.at_s is None or self.first_w is None or self.last_w is None or self._failed(now_s):
            return Cost(duration_s=duration_s, idle_j=idle_j, point=point)
        held_j = self.first_w * max(self.first_s - self.began_s, 0.0) + self.last_w * max(now_s - self.at_s, 0.0)
        return Cost(
            duration_s=duration_s,
            energy_j=self.energy_j + held_j,
            idle_j=idle_j,
            energy_error_j=self.error_j + self.most_j + held_j,
            energy_source=self._source(),
            point=point,
        )

    def _failed(self, now_s: float) -> bool:
        """Whether the meter was silent for too long, or stands still as it did not before."""
        at_s = now_s if self.at_s is None else self.at_s
        limit_s = max(STILL_S, STILL_TIMES * self.stood_s) if self.stood_s else NEVER_S
        return max(self.silent_s, now_s - at_s) > LOST_S or at_s - self.still_s > limit_s

    def _source(self) -> str:
        """Description of the sensor, its rate of readings and the conversion to joules."""
        sensor = self.last.energy_source or "a sensor without a name"
        if self.counted:
            return f"{sensor}, counter"[:200]
        span_s = (self.at_s or 0.0) - self.first_s
        rate = f"{self.intervals / span_s:.2g} Hz" if span_s > 0 else "one reading"
        return f"{sensor[:160]}, {rate}, trapezoids"


def total(costs: Sequence[Cost]) -> Cost:
    """Sum of one task's stretches; a value unknown in one is unknown in the sum."""
    if len(costs) == 1 and len(costs[0].energy_source or "") <= 200 and len(costs[0].point or "") <= 200:
        return costs[0]

    def added(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) > 0 else None

    points = [point for point, before in zip(costs, [None, *costs], strict=False) if _moved(point, before)]
    names = [cost.point or LET_GO for cost in points] if any(cost.point for cost in points) else []
    sources = list(dict.fromkeys(cost.energy_source for cost in costs if cost.energy_source is not None))
    return Cost(
        duration_s=sum(cost.duration_s for cost in costs),
        energy_j=added([cost.energy_j for cost in costs]),
        idle_j=added([cost.idle_j for cost in costs]),
        energy_error_j=added([cost.energy_error_j for cost in costs]),
        energy_source="; ".join(sources)[:200] or None,
        point=", then ".join(names)[:200] or None,
    )


def _moved(cost: Cost, before: Cost | None) -> bool:
    return before is None or cost.point != before.point


def _usable(reading: Reading, most_w: float) -> bool:
    if reading.power_w is None and reading.energy_j is None:  # as of every board without a meter
        return False
    power_w = _finite(reading.power_w)
    if power_w is not None and not 0 <= power_w <= most_w:
        return False
    return _finite(reading.energy_j) is not None or power_w is not None


def _value(reading: Reading) -> float | None:
    counter = _finite(reading.energy_j)
    return _finite(reading.power_w) if counter is None else counter


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _interval(before: Reading, after: Reading, dt_s: float) -> tuple[float, float, float, float, bool] | None:
    """Joules between two readings, their bound, the powers at its ends, and whether they are from a counter.

    None: the readings are of two meters, or have no value in common.
    """
    if None not in (before.energy_source, after.energy_source) and before.energy_source != after.energy_source:
        return None
    counters = _finite(before.energy_j), _finite(after.energy_j)
    if counters[0] is not None and counters[1] is not None and counters[1] >= counters[0]:
        gained = counters[1] - counters[0]
        return gained, 0.0, gained / dt_s, gained / dt_s, True
    powers = _finite(before.power_w), _finite(after.power_w)
    if powers[0] is None or powers[1] is None:
        return None
    energy = (powers[0] + powers[1]) / 2 * dt_s
    error = energy if dt_s > GAP_S else abs(powers[1] - powers[0]) / 2 * dt_s
    return energy, error, powers[0], powers[1], False
