"""Record of the times when no device can be reached because the broker is disconnected.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import math

from fedquilt.transport.mqtt.connection import RECONNECT

RETURN_S = 5.0  # after each connection, until a device that its broker reports offline counts as such


class BrokerOutage:
    """Disconnections of the broker, and the round time lost to them.

    Devices that also lost the broker reconnect after a backoff. A broker that is disconnected when the process starts
    may have been so for long, so the longest backoff is assumed.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0  # seconds so far: of each absence, and of the longest back-off that follows it
        self._since_s: float | None = None
        self._known = False  # whether it has been reached by this process
        self._back_s = -math.inf  # when the devices that it lost as well are back

    @property
    def is_disconnected(self) -> bool:
        return self._since_s is not None

    def lost_since(self, lost_s: float) -> float:
        """Return the seconds lost to disconnection after `lost_s`, or infinity while disconnected."""
        return math.inf if self.is_disconnected else self.lost_s - lost_s

    def can_reach_devices(self, now_s: float) -> bool:
        """Return whether the broker is connected and devices have had time to reconnect."""
        return not self.is_disconnected and now_s >= self._back_s

    def record_connection(self, reached: bool, now_s: float) -> None:
        """Record whether the broker is connected, and add an ended outage to `lost_s`.

        The added time is the outage plus the longest backoff of devices after an outage of this length.
        """
        if not reached and self._since_s is None:
            self._since_s = now_s
        elif reached and self._since_s is not None:
            gone_s, self._since_s = now_s - self._since_s, None
            began = self._known or gone_s < RECONNECT.first_s  # here, or it was not away: a connection takes a moment
            back_off_s = min(gone_s, RECONNECT.most_s) if began else RECONNECT.most_s
            self.lost_s, self._back_s = self.lost_s + gone_s + back_off_s, now_s + max(back_off_s, RETURN_S)
        if reached and not self._known:
            self._known, self._back_s = True, max(self._back_s, now_s + RETURN_S)
