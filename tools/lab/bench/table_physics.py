"""Simulated physics of a board with voltage tables and a smooth roofline.

The module shares no code with `physics` and the agent's model. Numbers are synthetic, of the size of an AGX Orin's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedquilt.core import WorkEstimate

Clocks = Mapping[str, float | None]
Engine = Literal["cpu", "cuda"]

CPU = [400e6, 600e6, 800e6, 1000e6, 1200e6, 1400e6, 1600e6, 1800e6, 2000e6]
CPU_V = [0.70, 0.70, 0.70, 0.74, 0.78, 0.83, 0.88, 0.94, 1.00]
GPU = [306e6, 408e6, 510e6, 612e6, 714e6, 816e6, 918e6, 1020e6, 1122e6, 1224e6, 1300e6]
GPU_V = [0.60, 0.60, 0.60, 0.60, 0.60, 0.63, 0.68, 0.74, 0.81, 0.89, 0.95]
EMC = [665.6e6, 2133e6, 3199e6]


class TablePhysics:
    """Physics of a board with three clocks and voltage tables. `clocks` maps an axis to hertz."""

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
