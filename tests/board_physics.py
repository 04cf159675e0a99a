"""Two simulated physics of a board, which judge the governor and share no code with its model or with each other.

A task has arithmetic, memory traffic and host work. `BoardPhysics` has a voltage with a floor and a roofline, with
numbers of the size of a TX2's; `TablePhysics` voltage tables and a smooth roofline, of the size of an AGX Orin's.
Arguments `clocks` map an axis to hertz.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fedquilt.core import WorkEstimate

Engine = Literal["cpu", "cuda"]
Clocks = Mapping[str, float | None]
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
        used_share = self.waiting + (1 - self.waiting) * min(busy, 1.0)
        return self.switching_w * share * volts**2 * used_share + self.leakage_w * volts**3


def _from_mhz(*values: float) -> tuple[float, ...]:
    return tuple(value * MHZ for value in values)


class BoardPhysics:
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

    def busy_seconds(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> dict[str, float]:
        """Return the seconds that each clock domain is busy, by axis."""
        top = self.highest_clocks()
        slow = {axis: top[axis] / (clocks.get(axis) or top[axis]) for axis in top}
        if engine == "cpu":
            arithmetic = {"cpu_hz": work.flops / self.cpu_flops_per_s * slow["cpu_hz"], "gpu_hz": 0.0}
        else:
            host_s = work.flops * self.host_s_per_flop * slow["cpu_hz"]
            arithmetic = {"cpu_hz": host_s, "gpu_hz": work.flops / self.cuda_flops_per_s * slow["gpu_hz"]}
        return {**arithmetic, "emc_hz": work.read_bytes / self.bytes_per_s * slow["emc_hz"]}

    def seconds(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> float:
        parts = self.busy_seconds(work, engine, clocks)
        main, host_s = ("gpu_hz", parts["cpu_hz"]) if engine == "cuda" else ("cpu_hz", 0.0)
        long_s, short_s = sorted((parts[main], parts["emc_hz"]), reverse=True)
        return host_s + long_s + (1 - self.overlap) * short_s

    def watts(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> float:
        top, all_s = self.highest_clocks(), self.seconds(work, engine, clocks)
        parts = self.busy_seconds(work, engine, clocks)
        return self.base_w + sum(
            unit.watts(clocks.get(axis) or top[axis], parts[axis] / all_s) for axis, unit in self.units.items()
        )

    def governor_clocks(self, work: WorkEstimate, engine: Engine) -> dict[str, float | None]:
        # schedutil and devfreq leave a fifth idle, and the CPU spins at its highest clock while waiting for the GPU
        clocks = dict[str, float | None](self.highest_clocks())
        for _ in range(8):  # as the load depends on the other clocks
            parts, all_s = self.busy_seconds(work, engine, clocks), self.seconds(work, engine, clocks)
            for axis in ("gpu_hz", "emc_hz"):
                target = 1.25 * (clocks[axis] or 0.0) * parts[axis] / all_s
                steps = self.units[axis].steps_hz
                clocks[axis] = next((hz for hz in steps if hz >= target), steps[-1])
        return clocks

    def clock_lists(self) -> dict[str, tuple[float, ...]]:
        return {axis: unit.steps_hz for axis, unit in self.units.items()}


CPU = [400e6, 600e6, 800e6, 1000e6, 1200e6, 1400e6, 1600e6, 1800e6, 2000e6]
CPU_V = [0.70, 0.70, 0.70, 0.74, 0.78, 0.83, 0.88, 0.94, 1.00]
GPU = [306e6, 408e6, 510e6, 612e6, 714e6, 816e6, 918e6, 1020e6, 1122e6, 1224e6, 1300e6]
GPU_V = [0.60, 0.60, 0.60, 0.60, 0.60, 0.63, 0.68, 0.74, 0.81, 0.89, 0.95]
EMC = [665.6e6, 2133e6, 3199e6]


class TablePhysics:
    idle_w = 6.8

    def clock_lists(self) -> dict[str, tuple[float, ...]]:
        return {"cpu_hz": tuple(CPU), "gpu_hz": tuple(GPU), "emc_hz": tuple(EMC)}

    def highest_clocks(self) -> dict[str, float]:
        return {"cpu_hz": CPU[-1], "gpu_hz": GPU[-1], "emc_hz": EMC[-1]}

    def _busy_times(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> tuple[float, float, float, float]:
        """Return the seconds of host, arithmetic and traffic alone, and of the whole task."""
        cpu, gpu, emc = (clocks.get(axis) or hz for axis, hz in self.highest_clocks().items())
        memory_s = work.read_bytes / 120e9 * (3199e6 / emc) ** 0.9
        if engine == "cpu":
            cores_s = work.flops / (60.0 * cpu)
            return 0.0, cores_s, memory_s, (cores_s**2.5 + memory_s**2.5) ** 0.4
        host_s, shaders_s = work.flops / (2286.0 * cpu), work.flops / (1231.0 * gpu)
        hidden_s = (shaders_s**2.5 + memory_s**2.5 + (0.4 * host_s) ** 2.5) ** 0.4
        return host_s, shaders_s, memory_s, 0.6 * host_s + hidden_s

    def seconds(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> float:
        return self._busy_times(work, engine, clocks)[3]

    def watts(self, work: WorkEstimate, engine: Engine, clocks: Clocks) -> float:
        cpu, gpu, emc = (clocks.get(axis) or hz for axis, hz in self.highest_clocks().items())
        host_s, main_s, memory_s, all_s = self._busy_times(work, engine, clocks)
        cpu_v, gpu_v = CPU_V[CPU.index(cpu)], GPU_V[GPU.index(gpu)]
        cores = min(1.0, (main_s if engine == "cpu" else host_s) / all_s)
        shaders = min(1.0, main_s / all_s) if engine == "cuda" else 0.0
        cores_w = 3.0 * cpu / 2000e6 * cpu_v**2 * (0.4 + 0.6 * cores)
        shaders_w = 24.0 * gpu / 1300e6 * gpu_v**2 * (0.15 + 0.85 * shaders)
        memory_w = 5.0 * emc / 3199e6 * (0.5 + 0.5 * min(1.0, memory_s / all_s))
        return 7.4 + cores_w + shaders_w + memory_w + 0.4 * cpu_v**2 + 1.6 * gpu_v**2

    def governor_clocks(self, work: WorkEstimate, engine: Engine) -> dict[str, float | None]:
        return dict(self.highest_clocks())
