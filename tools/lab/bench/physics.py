"""Simulated physics of a board for evaluating the governor, independent of its model.

A task has arithmetic, memory traffic and host work. Arithmetic and traffic overlap (a roofline), host work does not. A
clock domain draws switching power at its voltage, in proportion to its load, and leakage with the cube of the voltage.
Numbers are synthetic, of the size of a TX2's. The clocks are the public tables'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fedquilt.core import WorkEstimate

Engine = Literal["cpu", "cuda"]
MHZ: Final = 1e6


@dataclass(frozen=True)
class ClockDomain:
    """Power model of one clock domain."""

    steps_hz: tuple[float, ...]  # rising
    floor_v: float
    top_v: float
    knee: float  # share of the highest clock below which the voltage is at its floor
    switching_w: float  # at the highest clock, when busy
    leakage_w: float  # at the highest voltage
    waiting: float  # share of the switching power while it waits

    def watts(self, hz: float, busy: float) -> float:
        """Return the power at a clock, busy for a share of the time."""
        share = hz / self.steps_hz[-1]
        rise = max(0.0, (share - self.knee) / (1 - self.knee)) if self.knee < 1 else 1.0
        volts = (self.floor_v + (self.top_v - self.floor_v) * rise) / self.top_v
        used = self.waiting + (1 - self.waiting) * min(busy, 1.0)
        return self.switching_w * share * volts**2 * used + self.leakage_w * volts**3


def _from_mhz(*values: float) -> tuple[float, ...]:
    return tuple(value * MHZ for value in values)


class BoardPhysics:
    """Physics of a board with three clocks. `clocks` maps an axis to hertz."""

    units: Mapping[str, ClockDomain] = {
        "cpu_hz": ClockDomain(
            _from_mhz(345.6, 499.2, 652.8, 806.4, 960, 1113.6, 1267.2, 1420.8, 1574.4, 1728, 1881.6, 2035.2),
            0.62, 1.12, 0.45, 4.2, 0.5, 0.25,
        ),
        "gpu_hz": ClockDomain(
            _from_mhz(
                140.25, 229.5, 318.75, 408, 497.25, 586.5, 675.75, 765, 854.25, 943.5, 1032.75, 1122, 1211.25, 1300.5
            ),
            0.60, 1.05, 0.4, 7.0, 0.6, 0.2,
        ),
        "emc_hz": ClockDomain(_from_mhz(408, 665.6, 800, 1062.4, 1331.2, 1600, 1866), 1.1, 1.1, 1.0, 2.2, 0.2, 0.3),
    }  # fmt: skip
    idle_w, base_w = 2.4, 3.0  # at rest, and what follows no clock while it works
    cuda_flops_per_s, cpu_flops_per_s, bytes_per_s = 330e9, 45e9, 38e9  # at the highest clocks
    host_s_per_flop = 7.5e-12 * 0.1  # of a task on the GPU, likewise
    overlap = 0.85  # share of the shorter of arithmetic and traffic that the longer one hides

    def highest_clocks(self) -> dict[str, float]:
        return {axis: unit.steps_hz[-1] for axis, unit in self.units.items()}

    def busy_seconds(self, work: WorkEstimate, engine: Engine, clocks: Mapping[str, float | None]) -> dict[str, float]:
        """Return the seconds that each clock domain is busy, by axis."""
        top = self.highest_clocks()
        slow = {axis: top[axis] / (clocks.get(axis) or top[axis]) for axis in top}
        if engine == "cpu":
            arithmetic = {"cpu_hz": work.flops / self.cpu_flops_per_s * slow["cpu_hz"], "gpu_hz": 0.0}
        else:
            host_s = work.flops * self.host_s_per_flop * slow["cpu_hz"]
            arithmetic = {"cpu_hz": host_s, "gpu_hz": work.flops / self.cuda_flops_per_s * slow["gpu_hz"]}
        return {**arithmetic, "emc_hz": work.read_bytes / self.bytes_per_s * slow["emc_hz"]}

    def seconds(self, work: WorkEstimate, engine: Engine, clocks: Mapping[str, float | None]) -> float:
        parts = self.busy_seconds(work, engine, clocks)
        main, host_s = ("gpu_hz", parts["cpu_hz"]) if engine == "cuda" else ("cpu_hz", 0.0)
        long_s, short_s = sorted((parts[main], parts["emc_hz"]), reverse=True)
        return host_s + long_s + (1 - self.overlap) * short_s

    def watts(self, work: WorkEstimate, engine: Engine, clocks: Mapping[str, float | None]) -> float:
        top, all_s = self.highest_clocks(), self.seconds(work, engine, clocks)
        parts = self.busy_seconds(work, engine, clocks)
        return self.base_w + sum(
            unit.watts(clocks.get(axis) or top[axis], parts[axis] / all_s) for axis, unit in self.units.items()
        )

    def governor_clocks(self, work: WorkEstimate, engine: Engine) -> dict[str, float | None]:
        # schedutil and devfreq leave a fifth idle, and the CPU spins at its highest clock while waiting for the GPU
        clocks: dict[str, float | None] = dict(self.highest_clocks())
        for _ in range(8):  # as the load depends on the other clocks
            parts, all_s = self.busy_seconds(work, engine, clocks), self.seconds(work, engine, clocks)
            for axis in ("gpu_hz", "emc_hz"):
                wanted = 1.25 * (clocks[axis] or 0.0) * parts[axis] / all_s
                steps = self.units[axis].steps_hz
                clocks[axis] = next((hz for hz in steps if hz >= wanted), steps[-1])
        return clocks

    def clock_lists(self) -> dict[str, tuple[float, ...]]:
        return {axis: unit.steps_hz for axis, unit in self.units.items()}
