"""Board interface: sensor readings, operating points and the cost of a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from fedquilt.core.messages import OperatingPoint, WorkEstimate


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Sensor values at one moment. A value is None if the board cannot measure the quantity."""

    energy_j: float | None = None  # since the creation of the device object, None if the meter reports only power
    energy_source: str | None = None  # meter of energy and power with the widest coverage
    power_w: float | None = None  # from the same meter
    rails_w: dict[str, float] = {}  # by label; a rail may include other rails
    temperature_c: float | None = None  # of the hottest zone
    available_bytes: int | None = None
    memory_pressure: float | None = None  # share of the last 10 s in which something waited for memory, 0..1
    battery: float | None = None  # charge, 0..1, None without a battery
    charging: bool | None = None
    mode: str | None = None  # power mode set by the owner, None if the board has no modes


Coverage: TypeAlias = Literal["board", "processor", "rail"]
"""Coverage of a meter: the whole board, its processor (and memory) alone, or one rail."""


@dataclass(frozen=True)
class Power:
    """Output of a meter at one moment. A value is None if the meter does not measure it."""

    total_w: float | None = None  # watts of the whole coverage
    source: str | None = None  # name of the meter in reports: "ina3221 VDD_IN", "shelly plug"
    rails_w: dict[str, float] = field(default_factory=dict)  # watts of parts by label
    energy_j: float | None = None  # joules since the creation of the meter, never decreasing


class Meter(Protocol):
    """Meter of power or energy, either built in or a plug-in named in agent.toml.

    The event loop of the agent calls `read` up to ten times a second, so `read` must not block. A meter behind a
    network reads in its own thread and returns the latest value, or `Power()` if the latest value is old.
    """

    @property
    def coverage(self) -> Coverage:
        """Part of the device that the meter measures. The trusted meter with the largest part counts energy."""
        ...

    def read(self, now_s: float) -> Power:
        """Return the current values. `now_s` is in seconds of a monotonic clock."""
        ...


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Time and energy of one task, measured or predicted from a device profile.

    The fields have the same meaning as in `Usage`.
    """

    duration_s: float
    energy_j: float | None = None
    idle_j: float | None = None
    energy_error_j: float | None = None
    energy_source: str | None = None
    point: str | None = None


class Device(Protocol):
    """Sensors and clock controls of a board, real or simulated. Unknown values are None."""

    board: str
    memory_bytes: int
    points: tuple[OperatingPoint, ...]  # empty if unknown
    idle_w: float | None
    provenance: str  # of the values above, as in `Profile`
    adjustable: bool  # whether `pin_clocks` can set the clocks

    @property
    def clocks_unchanged(self) -> bool:
        """Whether the pinned clocks were unchanged at the last reading of the sensors."""
        ...

    def read_sensors(self, now_s: float) -> Reading:
        """Return the values of all sensors. `now_s` is in seconds of a monotonic clock."""
        ...

    def pin_clocks(self, point: OperatingPoint) -> OperatingPoint:
        """Pin the clocks to one of `points` and return the operating point that the board reports.

        Raises:
            ClockError: If the clocks are not adjustable, the point is unknown, the board is too hot, or the board
                reports other clocks afterwards.
        """
        ...

    def unpin_clocks(self) -> None:
        """Restore the clock settings from before the first `pin_clocks`."""
        ...

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        """Return the cost of a finished task: `measured`, or on a simulated board the profile's prediction."""
        ...
