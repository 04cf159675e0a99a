"""A board as the agent sees it: readings, operating points, what a task takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from fedquilt.core.messages import OperatingPoint, Work


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a board's sensors say now. None: not measurable here."""

    energy_j: float | None = None  # by a counter, since the device object was made; None: the meter tells power alone
    energy_source: str | None = None  # the meter that both are of: the widest that answers
    power_w: float | None = None  # by the same meter
    rails_w: dict[str, float] = {}  # by label; some are parts of others
    temperature_c: float | None = None  # the hottest zone
    available_bytes: int | None = None
    memory_pressure: float | None = None  # share of the last 10 s in which something waited for memory, 0..1
    battery: float | None = None  # charge, 0..1; None: no battery
    charging: bool | None = None


Covers: TypeAlias = Literal["board", "processor", "rail"]
"""What a meter's total is of: the whole board, its processor (and memory) alone, or one rail."""


@dataclass(frozen=True)
class Power:
    """What a meter says now. None: it does not tell, now or ever."""

    total_w: float | None = None  # watts of all that the meter covers
    source: str | None = None  # the meter, as a report names it: "ina3221 VDD_IN", "shelly plug"
    rails_w: dict[str, float] = field(default_factory=dict)  # watts of parts, by label
    energy_j: float | None = None  # joules counted since the meter was made; it never falls


class Meter(Protocol):
    """A sensor of power or energy: one of ours, or one from outside that agent.toml names.

    `read` is called up to ten times a second by the agent's loop: it has to return at once. A meter that waits for a
    network does so in a thread of its own, and `read` returns the latest value, or `Power()` once that is old.
    """

    @property
    def covers(self) -> Covers: ...

    def read(self, now_s: float) -> Power:
        """What it says at `now_s`, seconds of a clock that never goes back."""
        ...


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one task took on a board. On a simulated board it is what its profile predicts. Fields as in `Usage`."""

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
    adjustable: bool  # whether `hold` can set clocks here

    @property
    def holds(self) -> bool:
        """Whether what `hold` set is still so, as of the last `read`: what sets the clocks may let go by itself."""
        ...

    def read(self, now_s: float) -> Reading: ...

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at one of `points`; what the board then says that they are.

        Raises:
            ClockError: not adjustable, no such point, too hot, or the board took something else.
        """
        ...

    def release(self) -> None:
        """Give the clocks back to the board's own governor, as they were before the first `hold`."""
        ...

    def cost(self, work: Work, measured: Cost) -> Cost:
        """What a task took: as it was measured, or as a simulated board's profile tells at the point it is held at."""
        ...
