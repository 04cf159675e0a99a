"""Simulated device, which predicts the cost of work from a profile and has no real sensors.

Time and energy come from `fedquilt.costs.cost_model` at the pinned operating point. If the task declares no FLOPs or
the profile no speed, the time measured on this host is used and the energy is unknown.

Real boards differ from their profile. `spread` changes the speed of this device by one random factor, and `noise`
the time of each task by another. Both are log-normal with median 1 and follow from the seed. Energy follows the time.
Battery and temperature follow from the work of `task_cost` and the time that passes between calls of `read_sensors`.
With [thermal] in the profile, the temperature is one heat capacity behind one resistance:
T' = (ambient + rise * P - T) / time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qsl

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, JobError, OperatingPoint, Reading, WorkEstimate, derive_seed
from fedquilt.costs import cost_model

J_PER_WH = 3600.0
_NOTHING = Reading()


@dataclass(frozen=True)
class SimulationTraits:
    battery_wh: float | None = None  # capacity of a battery, full at first, or None without a battery
    noise: float = 0.0  # standard deviation of the logarithm of each task's time, about its relative error
    spread: float = 0.0  # standard deviation of the logarithm of the device's factor
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = (self.noise, self.spread, 0.0 if self.battery_wh is None else self.battery_wh)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.battery_wh == 0:
            raise JobError(f"simulated board has noise, spread and battery of {numbers}: use positive numbers")

    @classmethod
    def parse(cls, text: str) -> SimulationTraits:
        """Parse "battery=40Wh&noise=0.1&spread=0.2&seed=7", or raise JobError. Every part is optional."""
        values = dict(parse_qsl(text, keep_blank_values=True))
        try:
            battery = values.pop("battery", None)
            traits = cls(
                battery_wh=None if battery is None else float(battery.removesuffix("Wh")),
                noise=float(values.pop("noise", 0)),
                spread=float(values.pop("spread", 0)),
                seed=int(values.pop("seed", 0)),
            )
        except ValueError:
            raise JobError(
                f"{text!r} has an invalid number: battery, noise and spread are floats, seed an integer"
            ) from None
        if values:
            raise JobError(f"{text!r} has unknown {', '.join(sorted(values))}: use battery, noise, spread or seed")
        return traits


class SimulatedDevice:
    adjustable = clocks_unchanged = True

    def __init__(
        self,
        profile: profiles.BoardProfile,
        point: str | None = None,
        traits: SimulationTraits = SimulationTraits(),
        points: tuple[OperatingPoint, ...] | None = None,
        provenance: str = "",
    ) -> None:
        self.points = profile.operating_points() if points is None else points
        self._points_by_name = {operating_point.name: operating_point for operating_point in self.points}
        if point is not None and point not in self._points_by_name:
            modes = ", ".join(mode.name for mode in profile.points)
            raise JobError(f"board {profile.board!r} has no operating point {point!r}: choose one of {modes}")
        self._default_point = self._point = self.points[0] if point is None else self._points_by_name[point]
        self._profile, self._traits = profile, traits
        self.board = profile.board
        self.memory_bytes = int(profile.memory_bytes.value)
        self.idle_w = None if profile.idle_w is None else profile.idle_w.value
        self.provenance: str = provenance or profile.provenance()
        self.factor = _lognormal(traits.spread, traits.seed, "board")  # factor on the profile's times for this board
        self._provenances: dict[tuple[str, str], str] = {}  # (point, workload) -> provenance of its numbers
        self._last_prediction: tuple[WorkEstimate, OperatingPoint, int, Cost] | None = (
            None  # the int is the task's number
        )
        self._task_count = 0  # number of finished tasks
        self._charge_j = None if traits.battery_wh is None else traits.battery_wh * J_PER_WH
        self._temperature_c = None if profile.thermal is None else profile.thermal.ambient_c.value
        self._has_state = self._charge_j is not None or self._temperature_c is not None  # power when idle
        self._last_read_s: float | None = None
        self._pending_work: list[tuple[float, float]] = []  # (seconds, watts) of work before the latest reading's time

    @classmethod
    def from_name(cls, board: str) -> SimulatedDevice:
        """Create a device from "NAME[:POINT][?TRAITS]", as in "jetson-tx2:MAXQ?battery=40Wh&noise=0.1"."""
        return cls(*_parse_board(board))

    def read_sensors(self, now_s: float) -> Reading:
        if not self._has_state:
            return _NOTHING
        elapsed_s = 0.0 if self._last_read_s is None else max(0.0, now_s - self._last_read_s)
        self._last_read_s = now_s if self._last_read_s is None else max(now_s, self._last_read_s)
        while elapsed_s > 0:
            busy_s, watts = self._pending_work[0] if self._pending_work else (math.inf, self.idle_w)
            step_s = min(elapsed_s, busy_s)
            self._advance_time(step_s, watts, idle=not self._pending_work)
            if self._pending_work:
                self._pending_work[0] = (busy_s - step_s, self._pending_work[0][1])
                if self._pending_work[0][0] <= 0:
                    del self._pending_work[0]
            elapsed_s -= step_s
        full_wh = self._traits.battery_wh
        return Reading(
            temperature_c=self._temperature_c,
            battery=None if self._charge_j is None or full_wh is None else self._charge_j / (full_wh * J_PER_WH),
            charging=None if full_wh is None else False,
        )

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        if point.name not in self._points_by_name:
            raise ClockError(f"board {self.board} has no operating point {point.name!r}")
        self._point = self._points_by_name[point.name]
        return self._point

    def unpin_clocks(self) -> None:
        self._point = self._default_point

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        """Return the cost of a task on this device.

        If the measured time is 0, as on virtual time, the cost is a prediction. Otherwise the task has ended: its
        energy is drained from the battery, and the next task gets a new noise factor.
        """
        cost = self._predict_cost(work, measured)
        if measured.duration_s > 0:
            self._task_count += 1
            if self._has_state and cost.energy_j is not None and cost.duration_s > 0:
                self._pending_work.append((cost.duration_s, cost.energy_j / cost.duration_s))
                self._drain_battery(cost.energy_j)
        return cost

    def _predict_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        point, last_prediction, task = self._point, self._last_prediction, self._task_count if self._traits.noise else 0
        if (
            last_prediction is not None
            and last_prediction[1] is point
            and last_prediction[2] == task
            and last_prediction[0] == work
        ):
            return last_prediction[3]
        duration_s = cost_model.work_seconds(work, point)
        if duration_s is None:  # this host's time does not predict the board's time or energy
            overhead_s = cost_model.overhead_seconds(work, point) if measured.duration_s else 0.0
            return Cost(duration_s=max(measured.duration_s, overhead_s), point=point.name)
        duration_s *= self.factor * _lognormal(self._traits.noise, self._traits.seed, "task", task)
        duration_s = max(duration_s, cost_model.overhead_seconds(work, point))
        energy_j = cost_model.work_joules(duration_s, point)
        if energy_j is None:
            return Cost(duration_s=duration_s, point=point.name)
        cost = Cost(
            duration_s=duration_s,
            energy_j=energy_j,
            idle_j=None if self.idle_w is None else self.idle_w * duration_s,
            energy_source=f"profile {self.board} ({self._describe_sources(point, work)})",
            point=point.name,
        )
        self._last_prediction = (work, point, task, cost)
        return cost

    def _describe_sources(self, point: OperatingPoint, work: WorkEstimate) -> str:
        provenance = self._provenances.get((point.name, work.workload))
        if provenance is None:
            values = self._profile.values_behind(point.name, *profiles.BEHIND, workload=work.workload)
            provenance = self._profile.provenance(*values)
            self._provenances[point.name, work.workload] = provenance
        return provenance

    def _advance_time(self, seconds: float, watts: float | None, *, idle: bool) -> None:
        # `task_cost` has already taken the energy of work from the battery.
        if idle and watts is not None:
            self._drain_battery(watts * seconds)
        thermal = self._profile.thermal
        if thermal is not None and self._temperature_c is not None and watts is not None:
            final_c = thermal.ambient_c.value + thermal.rise_c_per_w.value * watts
            self._temperature_c = final_c + (self._temperature_c - final_c) * math.exp(-seconds / thermal.time_s.value)

    def _drain_battery(self, joules: float) -> None:
        if self._charge_j is not None:
            self._charge_j = max(0.0, self._charge_j - joules)


@lru_cache(maxsize=64)  # a fleet of a thousand boards has a few kinds
def _load_profile(name: str) -> profiles.BoardProfile:
    return profiles.load_board_profile(name)


@lru_cache(maxsize=64)
def _load_points(name: str) -> tuple[OperatingPoint, ...]:
    return _load_profile(name).operating_points()


@lru_cache(maxsize=64)  # a fleet has many devices of few kinds
def _parse_board(
    board: str,
) -> tuple[profiles.BoardProfile, str | None, SimulationTraits, tuple[OperatingPoint, ...], str]:
    point_spec, _, traits = board.partition("?")
    name, _, point = point_spec.partition(":")
    profile = _load_profile(name)
    return profile, point or None, SimulationTraits.parse(traits), _load_points(name), profile.provenance()


def _lognormal(sigma: float, *keys: object) -> float:
    return random.Random(derive_seed(*keys)).lognormvariate(0.0, sigma) if sigma else 1.0
