"""What meters have in common: joules as watts, and several meters of one board as one.

A meter is an object with `covers` and `read`: see `fedquilt.core.Meter`. One file here holds one kind of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Final

from fedquilt.core import Meter, Power

log = logging.getLogger("fedquilt.devices")

WIDTH: Final = {"board": 0, "processor": 1, "rail": 2}  # the widest first
PATIENCE_S: Final = 10.0  # how long a meter that has answered is waited for before a narrower one stands in


class Widest:
    """Several meters as one, which tells the energy of the widest that answers.

    A meter that covers the board goes before one that covers the processor alone; among equally wide ones, the first
    given. A meter of a rail is never taken for the board: its power stands among the rails. All are read each time,
    as counters wrap. A meter that fails is reported once and passed over.
    """

    def __init__(self, meters: Iterable[Meter]) -> None:
        self._meters = sorted(meters, key=lambda meter: WIDTH[meter.covers])
        self._answered_s: dict[int, float] = {}  # place in the list -> when it last told something
        self._failed: set[int] = set()  # places of meters whose failure has been reported

    def read(self, now_s: float) -> Power:
        """The energy and power of the widest meter that answers, with the rails of all.

        A meter that answered a moment ago and is silent now is waited for: a narrower one would be taken for it.
        """
        chosen: Power | None = None
        rails_w: dict[str, float] = {}
        for place, meter in enumerate(self._meters):
            power = self._read(place, meter, now_s)
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

    def _read(self, place: int, meter: Meter, now_s: float) -> Power:
        """What a meter says; numbers that no board can take are unknown."""
        try:
            power = meter.read(now_s)
            rails_w = {label: watts for label, watts in power.rails_w.items() if plausible(watts) is not None}
            return Power(plausible(power.total_w), power.source, rails_w, plausible(power.energy_j))
        except Exception as error:  # a meter from outside may raise anything; the board's task goes on
            if place not in self._failed:
                self._failed.add(place)
                name = type(meter).__name__
                log.warning("the meter %s fails and is passed over: %s: %s", name, type(error).__name__, error)
            return Power()


def plausible(value: float | None) -> float | None:
    """The number, unless it is negative or none at all."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


class Rate:
    """Watts from a count of joules, between one reading and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # (now_s, energy_j)

    def watts(self, now_s: float, energy_j: float) -> float | None:
        """None for the first reading, and where the clock or the count went back."""
        last, self._last = self._last, (now_s, energy_j)
        if last is None or now_s <= last[0] or energy_j < last[1]:
            return None
        return (energy_j - last[1]) / (now_s - last[0])
