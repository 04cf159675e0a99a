"""Time that rounds lose while no device can be reached, as the broker is away: pure, no I/O, no clock."""

from __future__ import annotations

import math

from fedquilt.transport.connect import FIRST_S, LONGEST_S


class Absence:
    """The broker, as seen from here. Devices that it lost as well come back by themselves, after a back-off.

    One that is away as this process starts may have been away for long: the longest back-off follows.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0  # seconds so far: of each absence, and of the longest back-off that follows it
        self._since_s: float | None = None
        self._known = False  # whether it has been reached by this process

    @property
    def away(self) -> bool:
        """Whether it is not reached now."""
        return self._since_s is not None

    def since(self, lost_s: float) -> float:
        """Seconds lost since `lost_s` were; infinite while it is not reached."""
        return math.inf if self.away else self.lost_s - lost_s

    def note(self, reached: bool, now_s: float) -> None:
        """Note whether it is reached now."""
        if not reached and self._since_s is None:
            self._since_s = now_s
        elif reached and self._since_s is not None:
            gone_s, self._since_s = now_s - self._since_s, None
            began = self._known or gone_s < FIRST_S  # here, or it was not away: a connection takes a moment
            self.lost_s += gone_s + (min(gone_s, LONGEST_S) if began else LONGEST_S)
        self._known = self._known or reached
