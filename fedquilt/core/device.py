"""A board as the agent sees it: readings, operating points, what a task takes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from fedquilt.core.messages import OperatingPoint, Work


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a board's sensors say now. None: not measurable here."""

    energy_j: float | None = None  # by the board's own counter, since the device object was made
    energy_source: str | None = None  # what `energy_j`, or else `power_w`, is read from
    power_w: float | None = None  # of the whole board, as far as its rails tell
    rails_w: dict[str, float] = {}  # by label; some are parts of others
    temperature_c: float | None = None  # the hottest zone
    available_bytes: int | None = None
    memory_pressure: float | None = None  # share of the last 10 s in which something waited for memory, 0..1
    battery: float | None = None  # charge, 0..1; None: no battery
    charging: bool | None = None


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
