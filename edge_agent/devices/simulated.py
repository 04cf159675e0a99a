"""Simulated board: predicts the cost of work from a profile. It has no sensors of its own.

Time and energy are `fedquilt.cost_model`'s at the operating point it is held at. If the task declares no
FLOPs, or the profile no speed, the time measured on this host is used, and the energy is unknown.

A real board is not its profile. `spread` makes this one slower or faster than its profile by a factor of its
own, and `noise` every task by another: both log-normal with median 1, from the seed. Joules follow the time.
Battery and temperature follow the work: `cost` reports work, `read` the passing of time. The temperature is
one heat capacity behind one resistance, if the profile has [thermal]: T' = (ambient + rise * P - T) / time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qsl

from fedquilt import cost_model, profiles
from fedquilt.core import ClockError, Cost, JobError, OperatingPoint, Reading, Work, derive_seed

J_PER_WH = 3600.0
_NOTHING = Reading()


@dataclass(frozen=True)
class Traits:
    """Properties of one simulated board beside its profile."""

    battery_wh: float | None = None  # capacity; full at first. None: no battery
    noise: float = 0.0  # of each task's time: standard deviation of its logarithm, about its relative error
    spread: float = 0.0  # of the board's own factor, likewise
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = (self.noise, self.spread, 0.0 if self.battery_wh is None else self.battery_wh)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.battery_wh == 0:
            raise JobError(f"a simulated board's battery, noise and spread are positive numbers, not {numbers}")

    @classmethod
    def parse(cls, text: str) -> Traits:
        """Parse "battery=40Wh&noise=0.1&spread=0.2&seed=7"; every part may be left out.

        Raises:
            JobError: another name, or no number.
        """
        told = dict(parse_qsl(text, keep_blank_values=True))
        try:
            battery = told.pop("battery", None)
            found = cls(
                battery_wh=None if battery is None else float(battery.removesuffix("Wh")),
                noise=float(told.pop("noise", 0)),
                spread=float(told.pop("spread", 0)),
                seed=int(told.pop("seed", 0)),
            )
        except ValueError:
            raise JobError(f"{text!r}: battery, noise and spread are numbers, seed is a whole one") from None
        if told:
            raise JobError(f"a simulated board has no {', '.join(sorted(told))}: battery, noise, spread or seed")
        return found


class SimulatedDevice:
    """Board predicted by its profile, held at one operating point (the profile's first unless named).

    Raises:
        JobError: the profile has no such point.
    """

    adjustable = holds = True

    def __init__(
        self,
        profile: profiles.Board,
        point: str | None = None,
        traits: Traits = Traits(),
        points: tuple[OperatingPoint, ...] | None = None,
    ) -> None:
        """`points`: the profile's operating points, if computed already."""
        self.points = profile.operating_points() if points is None else points
        self._known = {held.name: held for held in self.points}
        if point is not None and point not in self._known:
            modes = ", ".join(mode.name for mode in profile.points)
            raise JobError(f"board {profile.board!r} has no operating point {point!r}; it has the modes {modes}")
        self._own = self._point = self.points[0] if point is None else self._known[point]
        self._profile, self._traits = profile, traits
        self.board = profile.board
        self.memory_bytes = int(profile.memory_bytes.value)
        self.idle_w = None if profile.idle_w is None else profile.idle_w.value
        self.provenance: str = profile.provenance()
        self.factor = _lognormal(traits.spread, traits.seed, "board")  # of its profile's times, the whole board
        self._rests_on: dict[tuple[str, str], str] = {}  # (point, workload) -> provenance of its numbers
        self._told: tuple[Work, OperatingPoint, int, Cost] | None = None  # last prediction, and of which task
        self._tasks = 0  # number of finished tasks
        self._charge_j = None if traits.battery_wh is None else traits.battery_wh * J_PER_WH
        self._temperature_c = None if profile.thermal is None else profile.thermal.ambient_c.value
        self._changes = self._charge_j is not None or self._temperature_c is not None  # while time passes
        self._seen_s: float | None = None
        self._busy: list[tuple[float, float]] = []  # (seconds, watts) of work before the latest reading's time

    @classmethod
    def named(cls, board: str) -> SimulatedDevice:
        """Parse "NAME[:POINT][?TRAITS]", as in "jetson-tx2:MAXQ?battery=40Wh&noise=0.1".

        Raises:
            JobError: no such profile, point or trait.
        """
        place, _, traits = board.partition("?")
        name, _, point = place.partition(":")
        return cls(_shipped(name), point or None, Traits.parse(traits), _shipped_points(name))

    def read(self, now_s: float) -> Reading:
        """Battery and temperature, if it has them; the sensors of this host are not the board's."""
        if not self._changes:
            return _NOTHING
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s if self._seen_s is None else max(now_s, self._seen_s)
        while passed_s > 0:
            busy_s, watts = self._busy[0] if self._busy else (math.inf, self.idle_w)
            step_s = min(passed_s, busy_s)
            self._pass(step_s, watts, idle=not self._busy)
            if self._busy:
                self._busy[0] = (busy_s - step_s, self._busy[0][1])
                if self._busy[0][0] <= 0:
                    del self._busy[0]
            passed_s -= step_s
        full_wh = self._traits.battery_wh
        return Reading(
            temperature_c=self._temperature_c,
            battery=None if self._charge_j is None or full_wh is None else self._charge_j / (full_wh * J_PER_WH),
            charging=None if full_wh is None else False,
        )

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """See `fedquilt.core.Device`."""
        if point.name not in self._known:
            raise ClockError(f"board {self.board} has no operating point {point.name!r}")
        self._point = self._known[point.name]
        return self._point

    def release(self) -> None:
        """Return to the point that the board was made with."""
        self._point = self._own

    def cost(self, work: Work, measured: Cost) -> Cost:
        """Cost of a task on this board.

        With a measured time of 0 it is a prediction, as on virtual time: nothing has happened yet.
        With a time the task is over: it has drained the battery, and the next one has a noise of its own.
        """
        cost = self._cost(work, measured)
        if measured.duration_s > 0:
            self._tasks += 1
            if self._changes and cost.energy_j is not None and cost.duration_s > 0:
                self._busy.append((cost.duration_s, cost.energy_j / cost.duration_s))
                self._drain(cost.energy_j)
        return cost

    def _cost(self, work: Work, measured: Cost) -> Cost:
        """Cost of some work, predicted anew only if it is other work than last, at another point, or another task's."""
        point, told, task = self._point, self._told, self._tasks if self._traits.noise else 0
        if told is not None and told[1] is point and told[2] == task and told[0] == work:
            return told[3]
        duration_s = cost_model.seconds(work, point)
        if duration_s is None:  # what this host took says nothing of the board, least of all its joules
            least_s = cost_model.launch_s(work, point) if measured.duration_s else 0.0
            return Cost(duration_s=max(measured.duration_s, least_s), point=point.name)
        duration_s *= self.factor * _lognormal(self._traits.noise, self._traits.seed, "task", task)
        duration_s = max(duration_s, cost_model.launch_s(work, point))
        energy_j = cost_model.joules(duration_s, point)
        if energy_j is None:
            return Cost(duration_s=duration_s, point=point.name)
        cost = Cost(
            duration_s=duration_s,
            energy_j=energy_j,
            idle_j=None if self.idle_w is None else self.idle_w * duration_s,
            energy_source=f"profile {self.board} ({self._figures(point, work)})",
            point=point.name,
        )
        self._told = (work, point, task, cost)
        return cost

    def _figures(self, point: OperatingPoint, work: Work) -> str:
        """Where the numbers behind a prediction come from."""
        rests_on = self._rests_on.get((point.name, work.workload))
        if rests_on is None:
            figures = self._profile.basis(point.name, *profiles.BEHIND, workload=work.workload)
            rests_on = self._profile.provenance(*figures)
            self._rests_on[point.name, work.workload] = rests_on
        return rests_on

    def _pass(self, seconds: float, watts: float | None, *, idle: bool) -> None:
        """Let time pass at a power. Energy of work has been taken from the battery by `cost` already."""
        if idle and watts is not None:
            self._drain(watts * seconds)
        thermal = self._profile.thermal
        if thermal is not None and self._temperature_c is not None and watts is not None:
            aim_c = thermal.ambient_c.value + thermal.rise_c_per_w.value * watts
            self._temperature_c = aim_c + (self._temperature_c - aim_c) * math.exp(-seconds / thermal.time_s.value)

    def _drain(self, joules: float) -> None:
        if self._charge_j is not None:
            self._charge_j = max(0.0, self._charge_j - joules)


@lru_cache(maxsize=64)  # a fleet of a thousand boards has a few kinds
def _shipped(name: str) -> profiles.Board:
    return profiles.load(name)


@lru_cache(maxsize=64)
def _shipped_points(name: str) -> tuple[OperatingPoint, ...]:
    return _shipped(name).operating_points()


def _lognormal(sigma: float, *keys: object) -> float:
    """Log-normal factor with median 1; exactly 1 if `sigma` is 0."""
    return random.Random(derive_seed(*keys)).lognormvariate(0.0, sigma) if sigma else 1.0
