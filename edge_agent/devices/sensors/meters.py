"""Common parts of meters: power from energy, and several meters of one board as one.

A meter is an object with `covers` and `read`, see `fedquilt.core.Meter`. Each module here contains one kind.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from fedquilt.core import Meter, Power

log = logging.getLogger("fedquilt.devices")

WIDTH: Final = {"board": 0, "processor": 1, "rail": 2}  # widest first
MOST_W: Final = 2000.0  # no board draws more
SLOW_S: Final = 1.0  # longest `read` without a warning, as the agent's loop waits
PATIENCE_S: Final = 10.0  # time to wait for a silent meter before a narrower one replaces it


class WidestRangeMeter:
    """Several meters as one, with the power of the widest that responds.

    A meter of the board precedes a meter of the processor. Among equals the first counts. The power of a rail's meter
    is listed among the rails and never taken for the board. All meters are read each time, because counters wrap. A
    meter that fails or is slow is reported once, and a failed one is skipped.

    Args:
        meters: Meters of one board.
        clock: Monotonic clock in seconds, which measures the duration of a reading.
    """

    def __init__(self, meters: Iterable[Meter], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters = sorted(meters, key=lambda meter: WIDTH[meter.covers])
        self._answered_s: dict[int, float] = {}  # place in the list -> time of its last value
        self._failed: set[int] = set()  # places of meters whose failure has been reported
        self._slow: set[int] = set()  # places of meters whose slowness has been

    def read(self, now_s: float) -> Power:
        """Return the power of the widest meter that responds, with the rails of all meters.

        If a meter that responded recently is silent, the reading has no total: a narrower meter would be mistaken for
        it.
        """
        chosen: Power | None = None
        rails_w: dict[str, float] = {}
        for place, meter in enumerate(self._meters):
            power = self._read_meter(place, meter, now_s)
            rails_w |= power.rails_w
            if meter.covers == "rail":
                if power.total_w is not None and power.source is not None:
                    rails_w[power.source] = power.total_w
            elif chosen is None and (power.total_w is not None or power.energy_j is not None):
                chosen, self._answered_s[place] = power, now_s
            elif chosen is None and 0 <= now_s - self._answered_s.get(place, math.inf) <= PATIENCE_S:
                chosen = Power()
        told = chosen or Power()
        return Power(told.total_w, told.source, rails_w, told.energy_j)

    def _read_meter(self, place: int, meter: Meter, now_s: float) -> Power:
        """Return the plausible values of a meter, or an empty reading after an error, which is logged once."""
        try:
            begun_s = self._clock()
            power = meter.read(now_s)
            self._report_slow_meter(place, meter, self._clock() - begun_s)
            rails_w = {
                label: watts for label, watts in power.rails_w.items() if plausible_or_none(watts, MOST_W) is not None
            }
            return Power(
                plausible_or_none(power.total_w, MOST_W), power.source, rails_w, plausible_or_none(power.energy_j)
            )
        except Exception as error:  # code from outside may raise anything; the board's task continues
            if place not in self._failed:
                self._failed.add(place)
                name = type(meter).__name__
                log.warning("the meter %s fails and is passed over: %s: %s", name, type(error).__name__, error)
            return Power()

    def _report_slow_meter(self, place: int, meter: Meter, seconds: float) -> None:
        if seconds > SLOW_S and place not in self._slow:
            self._slow.add(place)
            log.warning(
                "the meter %s took %.1f s to answer, for which the agent answered nobody: let it ask in a thread "
                "(docs/add-a-sensor.md)",
                *(type(meter).__name__, seconds),
            )


def plausible_or_none(value: float | None, most: float = math.inf) -> float | None:
    """Return the number, or None if it is negative, not finite or above `most`."""
    return value if value is not None and math.isfinite(value) and 0 <= value <= most else None


class PowerFromEnergy:
    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # (now_s, energy_j)

    def mean_power_w(self, now_s: float, energy_j: float) -> float | None:
        """Return the mean power since the last reading, or None at first or after a decrease."""
        last, self._last = self._last, (now_s, energy_j)
        if last is None or now_s <= last[0] or energy_j < last[1]:
            return None
        return (energy_j - last[1]) / (now_s - last[0])
