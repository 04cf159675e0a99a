"""Board interface: sensor readings, operating points and the cost of a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from fedquilt.core.messages import OperatingPoint, Work


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Sensor values at one moment. None: not measurable on this board."""

    energy_j: float | None = None  # counted since the device object was made; None: the meter reports only power
    energy_source: str | None = None  # meter of both energy and power: the widest that answers
    power_w: float | None = None  # by the same meter
    rails_w: dict[str, float] = {}  # by label; some are parts of others
    temperature_c: float | None = None  # hottest zone
    available_bytes: int | None = None
    memory_pressure: float | None = None  # share of the last 10 s in which something waited for memory, 0..1
    battery: float | None = None  # charge, 0..1; None: no battery
    charging: bool | None = None
    mode: str | None = None  # power mode that the owner has set, where the board has any


Covers: TypeAlias = Literal["board", "processor", "rail"]
"""Coverage of a meter: the whole board, its processor (and memory) alone, or one rail."""


@dataclass(frozen=True)
class Power:
    """Output of a meter at one moment. None: not available, now or ever."""

    total_w: float | None = None  # watts of everything the meter covers
    source: str | None = None  # name of the meter in reports: "ina3221 VDD_IN", "shelly plug"
    rails_w: dict[str, float] = field(default_factory=dict)  # watts of parts, by label
    energy_j: float | None = None  # joules counted since the meter was made; it never falls


class Meter(Protocol):
    """A sensor of power or energy: one of ours, or one from outside that agent.toml names.

    `read` is called up to ten times a second by the agent's loop: it has to return at once. A meter that waits for a
    network does so in a thread of its own, and `read` returns the latest value, or `Power()` once that is old.
    """

    @property
    def covers(self) -> Covers:
        """Coverage of this meter: the widest one that is trusted is used for energy."""
        ...

    def read(self, now_s: float) -> Power:
        """Current values at `now_s`, seconds of a monotonic clock."""
        ...


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Time and energy of one task on a board, or a simulated board's prediction. Fields as in `Usage`."""

    duration_s: float
    energy_j: float | None = None
    idle_j: float | None = None
    energy_error_j: float | None = None
    energy_source: str | None = None
    point: str | None = None


class Device(Protocol):
    """A board: real or simulated. What is unknown is None."""

    board: str
    memory_bytes: int
    points: tuple[OperatingPoint, ...]  # (): not known
    idle_w: float | None
    provenance: str  # of the numbers above, as in `Profile`
    adjustable: bool  # whether `hold` can set the clocks

    @property
    def holds(self) -> bool:
        """Whether the held point is still set, as of the last `read`: another program may have changed the clocks."""
        ...

    def read(self, now_s: float) -> Reading:
        """Read all sensors at `now_s`, seconds of a monotonic clock."""
        ...

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at one of `points`; returns the point that the board reports afterwards.

        Raises:
            ClockError: not adjustable, no such point, too hot, or the board reports other clocks.
        """
        ...

    def release(self) -> None:
        """Return the clocks to the board's own governor, as they were before the first `hold`."""
        ...

    def cost(self, work: Work, measured: Cost) -> Cost:
        """Cost of a task: as measured, or on a simulated board as its profile predicts at the point held."""
        ...
