"""Queue of messages on their way to the network; finds the one at which a broker hangs up. No I/O.

A message is added, taken when it may be in flight, and done when the broker has acknowledged it
(QoS 1) or it is written (QoS 0). Messages in flight when a connection broke are tried again, then one
at a time: so the one that is alone in flight at the third break in a row is to blame, and given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

UNDER_WAY_BYTES: Final = 1 << 20  # paho copies each message
UNDER_WAY_MESSAGES: Final = 100
OFFLINE_BYTES: Final = 16 << 20
OFFLINE_MESSAGES: Final = 10_000
BREAKS: Final = 3


@dataclass(eq=False)
class Sending:
    """Outgoing message; `reliable` is QoS 1."""

    topic: str
    payload: bytes
    retain: bool
    reliable: bool
    breaks: int = 0  # connections that broke while it was in flight

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)


class SendQueue:
    """Messages in the order of adding, and those in flight by packet id."""

    def __init__(self) -> None:
        self.backlog = 0  # payload bytes that are neither written (QoS 0) nor acknowledged (QoS 1)
        self._waiting: deque[Sending] = deque()
        self._under_way: dict[int, Sending] = {}
        self._bytes = self._reliable = self._suspected = 0  # of those under way: size, QoS 1, had a connection break

    def add(self, message: Sending) -> None:
        """Queue a message behind all others."""
        self._waiting.append(message)
        self.backlog += message.size

    def trim(self) -> int:
        """Give up the oldest messages beyond the limit for offline times; returns how many."""
        given_up = 0
        while len(self._waiting) > OFFLINE_MESSAGES or self.backlog > OFFLINE_BYTES:
            self.give_up(self._waiting.popleft())
            given_up += 1
        return given_up

    def take(self, window: int) -> Sending | None:
        """Take the next message if it may be in flight too, at most `window` reliable ones at once.

        The caller then calls `sent` or `give_up`.
        """
        if not self._waiting:
            return None
        message = self._waiting[0]
        if self._under_way and (
            len(self._under_way) >= UNDER_WAY_MESSAGES
            or message.size + self._bytes > UNDER_WAY_BYTES
            or message.breaks
            or self._suspected
            or (message.reliable and self._reliable >= window)
        ):
            return None
        return self._waiting.popleft()

    def sent(self, packet_id: int, message: Sending) -> None:
        """Note a taken message as in flight."""
        self._under_way[packet_id] = message
        self._count(message, 1)

    def done(self, packet_id: int) -> Sending | None:
        """Remove an acknowledged or written message; None: no such message."""
        message = self._under_way.pop(packet_id, None)
        if message is not None:
            self.backlog -= message.size
            self._count(message, -1)
        return message

    def _count(self, message: Sending, by: int) -> None:
        self._bytes += by * message.size
        self._reliable += by * message.reliable
        self._suspected += by * bool(message.breaks)

    def give_up(self, message: Sending) -> None:
        """Drop a taken message that will not be sent."""
        self.backlog -= message.size

    def broken(self, breaks: int = BREAKS, *, innocent: bool = False) -> Sending | None:
        """Handle a broken connection: reliable messages in flight return to the head, unreliable ones are lost.

        Returns the message to blame after so many breaks, which is given up. `innocent`: the network failed.
        """
        suspects = [message for message in self._under_way.values() if message.reliable]
        for message in suspects:
            message.breaks += not innocent
        culprit = suspects.pop() if len(suspects) == 1 and suspects[0].breaks >= breaks else None
        self._under_way.clear()
        self._bytes = self._reliable = self._suspected = 0
        self._waiting = deque(suspects + [message for message in self._waiting if message.reliable])
        self.backlog = sum(message.size for message in self._waiting)
        return culprit
