"""Rate limiter that slows devices which send too much, and then blocks them for a while.

Costs are seconds of work, estimated from the handling of a message. Each device may permanently use RATE of the
coordinator's time, and BURST_S at once. Work that the coordinator requests is credited: a round's task pays for its
messages, and a model chunk that is sent for the first time pays for its request. Messages above the limit are dropped.
The protocol repeats all messages, so an honest device is only slower. A device that continues is blocked for ASIDE_S.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

RATE: Final = 0.0075  # of the coordinator's time
BURST_S: Final = 0.25
MESSAGE_S: Final = 1e-3  # of a message that comes alone and wakes the coordinator; of many at once a tenth
HELLO_S: Final = 2e-3  # of a flight of a handshake
BYTE_S: Final = 10e-9  # of each of its bytes: decoding
ROUND_S: Final = 20 * MESSAGE_S  # that a device is granted for a round's task: it takes about ten messages
DROPPED_MOST: Final = 100  # messages of one device that are dropped in a row of busy seconds before it is set aside
CALM_S: Final = 60.0  # without a dropped message, after which the count begins anew
ASIDE_S: Final = 600.0  # for which nothing of it is read

Verdict = Literal["taken", "slowed", "dropped", "aside"]
"""taken: read the message; slowed: drop it, the first of a row; dropped: drop it; aside: drop it and set it aside."""


@dataclass
class _Account:
    left_s: float = BURST_S
    at_s: float = -math.inf  # when that was so
    dropped: int = 0
    dropped_s: float = -math.inf  # when the last one was
    until_s: float = -math.inf  # it is set aside


@dataclass
class Conduct:
    """Token bucket of each device. Full buckets are removed from time to time."""

    _accounts: dict[str, _Account] = field(default_factory=dict)
    _most: int = 1024  # accounts before one looks which can be let go of

    def admit_message(self, device: str, size: int, now_s: float, cost_s: float = MESSAGE_S) -> Verdict:
        """Decide whether to process a message.

        Args:
            device: Id of the device.
            size: Bytes of the message.
            now_s: Time of the coordinator's clock in seconds.
            cost_s: Seconds of work that do not depend on the size.
        """
        account = self._refill_bucket(device, now_s)
        if now_s < account.until_s:
            return "dropped"
        if account.left_s >= 0:
            account.left_s -= cost_s + size * BYTE_S
            return "taken"
        if now_s >= account.dropped_s + CALM_S:
            account.dropped = 0
        account.dropped, account.dropped_s = account.dropped + 1, now_s
        if account.dropped > DROPPED_MOST:
            account.until_s, account.dropped = now_s + ASIDE_S, 0
            return "aside"
        return "slowed" if account.dropped == 1 else "dropped"

    def charge_time(self, device: str, seconds: float, now_s: float) -> None:
        """Charge processing time to a device's bucket. Negative values are credits.

        The bucket stays between -BURST_S and BURST_S.
        """
        account = self._refill_bucket(device, now_s)
        account.left_s = min(max(account.left_s - seconds, -BURST_S), BURST_S)

    def _refill_bucket(self, device: str, now_s: float) -> _Account:
        account = self._accounts.get(device)
        if account is None:
            if len(self._accounts) >= self._most:
                self._remove_full_buckets(now_s)
                self._most = max(1024, 2 * len(self._accounts))  # a look takes as long as there are accounts
            account = self._accounts[device] = _Account(at_s=now_s)
        account.left_s = min(account.left_s + RATE * max(now_s - account.at_s, 0.0), BURST_S)
        account.at_s = now_s
        return account

    def _remove_full_buckets(self, now_s: float) -> None:
        for device, account in list(self._accounts.items()):
            full = account.left_s + RATE * (now_s - account.at_s) >= BURST_S
            if full and now_s >= max(account.until_s, account.dropped_s + CALM_S):
                del self._accounts[device]
