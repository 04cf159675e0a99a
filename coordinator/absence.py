"""Time that rounds lose while no device can be reached, as the broker is away: pure, no I/O, no clock."""

from __future__ import annotations

import math

from fedquilt.transport.connect import FIRST_S, LONGEST_S

RETURN_S = 5.0  # after each connection, until a device that its broker reports offline counts as such


class Absence:
    """The broker, as seen from here. Devices that it lost as well come back by themselves, after a back-off.

    One that is away as this process starts may have been away for long: the longest back-off follows.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0  # seconds so far: of each absence, and of the longest back-off that follows it
        self._since_s: float | None = None
        self._known = False  # whether it has been reached by this process
        self._back_s = -math.inf  # when the devices that it lost as well are back

    @property
    def away(self) -> bool:
        """Whether it is not reached now."""
        return self._since_s is not None

    def since(self, lost_s: float) -> float:
        """Seconds lost since `lost_s` were; infinite while it is not reached."""
        return math.inf if self.away else self.lost_s - lost_s

    def can_reach_devices(self, now_s: float) -> bool:
        """Return whether the broker is connected and devices have had time to reconnect."""
        return not self.away and now_s >= self._back_s

    def record_connection(self, reached: bool, now_s: float) -> None:
        """Record whether the broker is connected, and add the time without a connection to `lost_s`."""
        if not reached and self._since_s is None:
            self._since_s = now_s
        elif reached and self._since_s is not None:
            gone_s, self._since_s = now_s - self._since_s, None
            began = self._known or gone_s < FIRST_S  # here, or it was not away: a connection takes a moment
            back_off_s = min(gone_s, LONGEST_S) if began else LONGEST_S
            self.lost_s, self._back_s = self.lost_s + gone_s + back_off_s, now_s + max(back_off_s, RETURN_S)
        if reached and not self._known:
            self._known, self._back_s = True, max(self._back_s, now_s + RETURN_S)
