"""How a board's speed and power come from its clocks, and the grid of points that follows.

Time of one FLOP:                t = a + b / f_cpu + c / f_gpu + d / f_emc      (b, c, d are clock cycles)
Time of one byte of traffic:     the same form, with coefficients of its own
Power of the board while busy:   P = base + cpu * r_cpu^k + gpu * r_gpu^k + emc * r_emc,   r = f / the highest f

Voltage falls with the clock, so a core's f V^2 grows like f^k with k between 1 (voltage at its floor) and 3;
memory keeps its voltage. `base` is all that does not follow the clocks while the board works, mostly more than
it draws when idle. The paper's own law, t = c D / f (FedStitch, arXiv 2409.07202, equation 4), is the case
a = b = d = 0, and does not fit its own Table II. How many cores are on is not in the model.

Clocks that a point does not name are taken at the board's highest. Plain numbers: no I/O, no numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AXES: Final = ("cpu_hz", "gpu_hz", "emc_hz")  # processor, graphics processor, memory controller
POWERED: Final = {"cpu_hz": "cpu_w", "gpu_hz": "gpu_w", "emc_hz": "emc_w"}
LINEAR: Final = "emc_hz"  # its power grows with the clock itself

Clocks = Mapping[str, float | None]  # axis -> hertz


@dataclass(frozen=True)
class Inverse:
    """A time that falls with clocks: fixed_s + cycles / f for each axis. Seconds per FLOP, or per byte."""

    fixed_s: float = 0.0
    cycles: Mapping[str, float] = field(default_factory=dict)  # axis -> clock cycles

    def seconds(self, clocks: Clocks, top: Mapping[str, float]) -> float | None:
        """None: the model knows nothing of this time."""
        found = self.fixed_s + sum(count / at(clocks, top, axis) for axis, count in self.cycles.items())
        return found or None


@dataclass(frozen=True)
class Draw:
    """The power of a busy board, in watts at the highest clocks."""

    base_w: float = 0.0
    axes_w: Mapping[str, float] = field(default_factory=dict)  # axis -> watts at its highest
    exponent: float = 2.0  # k

    def watts(self, clocks: Clocks, top: Mapping[str, float]) -> float | None:
        """None: the model knows nothing of power."""
        shares = (watts * ratio(axis, clocks, top, self.exponent) for axis, watts in self.axes_w.items())
        return self.base_w + sum(shares) or None


def at(clocks: Clocks, top: Mapping[str, float], axis: str) -> float:
    """The clock of an axis, in hertz: the board's highest where it is not said."""
    return clocks.get(axis) or top[axis]


def ratio(axis: str, clocks: Clocks, top: Mapping[str, float], exponent: float) -> float:
    """What share of its power at the highest clock an axis takes."""
    found = at(clocks, top, axis) / top[axis]
    return float(found if axis == LINEAR else found**exponent)


def grid(axes: Mapping[str, Sequence[float]], room: int) -> list[dict[str, float]]:
    """Every combination of clocks, thinned to at most `room`; fastest first.

    The longest list loses one value at a time (of lists as long, the first of `AXES`) until the product
    fits; what is left of a list is spread evenly over its places, both ends kept while it has two or more.
    The same lists give the same grid everywhere.
    """
    lists = {axis: sorted(axes[axis]) for axis in AXES if axes.get(axis)}
    sizes = {axis: len(values) for axis, values in lists.items()}
    if not lists or room < 1:
        return []
    while _product(sizes) > room:
        longest = max(sizes, key=lambda axis: (sizes[axis], -AXES.index(axis)))
        sizes[longest] -= 1
    chosen = [list(reversed(spread(values, sizes[axis]))) for axis, values in lists.items()]
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*chosen)]


def spread(values: Sequence[float], count: int) -> list[float]:
    """So many of the values, evenly by place, the ends among them; of one alone, the last."""
    if count == 1:
        return [values[-1]]
    last = len(values) - 1
    return [values[(2 * i * last + count - 1) // (2 * (count - 1))] for i in range(count)]


def _product(sizes: Mapping[str, int]) -> int:
    found = 1
    for size in sizes.values():
        found *= size
    return found


def name(clocks: Mapping[str, float]) -> str:
    """What a point of the grid is called: its clocks in MHz, "cpu1190-gpu854-emc1331"."""
    return "-".join(f"{axis[:-3]}{clocks[axis] / 1e6:.0f}" for axis in AXES if axis in clocks)
