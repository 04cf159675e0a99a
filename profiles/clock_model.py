"""Speed and power of a board as functions of its clocks, and the grid of operating points.

Time of one FLOP:                t = a + b / f_cpu + c / f_gpu + d / f_emc      (b, c, d are clock cycles)
Time of one byte of traffic:     the same form, with its own coefficients
Power of the board while busy:   P = base + cpu * r_cpu^k + gpu * r_gpu^k + emc * r_emc,   r = f / the highest f

Voltage falls with the clock, so the f V^2 of a core grows like f^k with k between 1 (minimum voltage) and 3. The
voltage of memory is constant. `base` is the power while busy that does not depend on the clocks, and mostly exceeds
idle power. The paper's law, t = c D / f (FedStitch, arXiv 2409.07202, equation 4), is the case a = b = d = 0, and does
not fit the paper's Table II. The number of active cores is not in the model.

An axis that a point leaves out has the board's highest clock. No I/O and no numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AXES: Final = ("cpu_hz", "gpu_hz", "emc_hz")  # processor, graphics processor, memory controller
POWERED: Final = {"cpu_hz": "cpu_w", "gpu_hz": "gpu_w", "emc_hz": "emc_w"}
LINEAR: Final = "emc_hz"  # axis whose power is proportional to its clock

Clocks = Mapping[str, float | None]  # axis -> hertz


@dataclass(frozen=True)
class InverseTimeLaw:
    """Time of one unit of work: `fixed_s`, plus the cycles of each axis divided by its clock frequency."""

    fixed_s: float = 0.0
    cycles: Mapping[str, float] = field(default_factory=dict)  # axis -> clock cycles

    def compute_seconds(self, clocks: Clocks, top: Mapping[str, float]) -> float | None:
        seconds = self.fixed_s + sum(count / clock_of_axis(clocks, top, axis) for axis, count in self.cycles.items())
        return seconds or None


@dataclass(frozen=True)
class PowerModel:
    base_w: float = 0.0
    axes_w: Mapping[str, float] = field(default_factory=dict)  # axis -> watts at its highest
    exponent: float = 2.0  # k

    def compute_watts(self, clocks: Clocks, top: Mapping[str, float]) -> float | None:
        shares = (watts * power_ratio(axis, clocks, top, self.exponent) for axis, watts in self.axes_w.items())
        return self.base_w + sum(shares) or None


def clock_of_axis(clocks: Clocks, top: Mapping[str, float], axis: str) -> float:
    return clocks.get(axis) or top[axis]


def power_ratio(axis: str, clocks: Clocks, top: Mapping[str, float], exponent: float) -> float:
    """Return the power of an axis at these clocks, as a share of its power at the highest clock."""
    ratio = clock_of_axis(clocks, top, axis) / top[axis]
    return float(ratio if axis == LINEAR else ratio**exponent)


def make_grid(axes: Mapping[str, Sequence[float]], room: int) -> list[dict[str, float]]:
    """Return at most `room` combinations of the clocks, the fastest first.

    While there are too many combinations, the longest list loses one value (of equally long ones, the first in `AXES`).
    The remaining values are evenly distributed, and include both ends of a list of two or more. The result is
    deterministic.
    """
    lists = {axis: sorted(axes[axis]) for axis in AXES if axes.get(axis)}
    sizes = {axis: len(values) for axis, values in lists.items()}
    if not lists or room < 1:
        return []
    while _product(sizes) > room:
        longest = max(sizes, key=lambda axis: (sizes[axis], -AXES.index(axis)))
        sizes[longest] -= 1
    axis_values = [list(reversed(pick_evenly(values, sizes[axis]))) for axis, values in lists.items()]
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*axis_values)]


def pick_evenly(values: Sequence[float], count: int) -> list[float]:
    """Return `count` evenly distributed values with both ends, or only the last if `count` is 1."""
    if count == 1:
        return [values[-1]]
    last_index = len(values) - 1
    return [values[(2 * i * last_index + count - 1) // (2 * (count - 1))] for i in range(count)]


def _product(sizes: Mapping[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product


def format_point_name(clocks: Mapping[str, float]) -> str:
    """Return the name of a point with these clocks in hertz, as "cpu1200-gpu850" in megahertz."""
    return "-".join(f"{axis[:-3]}{clocks[axis] / 1e6:.0f}" for axis in AXES if axis in clocks)
