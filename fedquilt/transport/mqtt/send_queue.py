"""Queue of outgoing messages, which detects a message that makes the broker disconnect. No I/O.

A message is added, taken when it may be in flight, and removed when the broker has acknowledged it (QoS 1) or it is
written (QoS 0). Messages in flight when a connection breaks are sent again, then one at a time. The message that is
alone in flight at the third break in a row is dropped as the cause.
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
class QueuedMessage:
    """Outgoing message. `reliable` is QoS 1."""

    topic: str
    payload: bytes
    retain: bool
    reliable: bool
    breaks: int = 0  # connections that broke while it was in flight

    @property
    def size(self) -> int:
        return len(self.payload)


class SendQueue:
    def __init__(self) -> None:
        self.backlog = 0  # payload bytes that are neither written (QoS 0) nor acknowledged (QoS 1)
        self._waiting: deque[QueuedMessage] = deque()
        self._under_way: dict[int, QueuedMessage] = {}
        self._bytes = self._reliable = self._suspected = 0  # of those under way: size, QoS 1, had a connection break

    def add(self, message: QueuedMessage) -> None:
        self._waiting.append(message)
        self.backlog += message.size

    def drop_oldest(self) -> int:
        """Drop the oldest messages beyond the offline limits. Return the number of dropped messages."""
        given_up = 0
        while len(self._waiting) > OFFLINE_MESSAGES or self.backlog > OFFLINE_BYTES:
            self.discard(self._waiting.popleft())
            given_up += 1
        return given_up

    def take_next(self, window: int) -> QueuedMessage | None:
        """Return the next message, or None if the in-flight limits are reached.

        At most `window` reliable messages are in flight. The caller must call `record_in_flight` or `discard` next.
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

    def record_in_flight(self, packet_id: int, message: QueuedMessage) -> None:
        self._under_way[packet_id] = message
        self._update_totals(message, 1)

    def remove_sent(self, packet_id: int) -> QueuedMessage | None:
        """Remove a message in flight and return the message, or None if the id is unknown."""
        message = self._under_way.pop(packet_id, None)
        if message is not None:
            self.backlog -= message.size
            self._update_totals(message, -1)
        return message

    def _update_totals(self, message: QueuedMessage, by: int) -> None:
        self._bytes += by * message.size
        self._reliable += by * message.reliable
        self._suspected += by * bool(message.breaks)

    def discard(self, message: QueuedMessage) -> None:
        self.backlog -= message.size

    def handle_disconnect(self, breaks: int = BREAKS, *, innocent: bool = False) -> QueuedMessage | None:
        """Requeue reliable messages in flight and drop the unreliable ones.

        Args:
            breaks: The number of broken connections after which a message alone in flight is the cause.
            innocent: Whether the network failed, so that no message is the cause.

        Returns:
            The message that caused the disconnection, which is dropped, or None.
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
