"""Receiver of a device's messages at the broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fedquilt import wire
from fedquilt.core import Profile, WireError
from fedquilt.security import message_signature
from fedquilt.transport.link import Link, Message


@dataclass(frozen=True)
class ReceivedMessages:
    presence: wire.Presence | None = None
    profile: Profile | None = None
    telemetry: wire.Telemetry | None = None
    begun: frozenset[str] = frozenset()  # names of the agent's starts that have been online

    @property
    def online(self) -> str:
        return self.presence.boot if self.presence is not None and self.presence.online else ""

    def with_message(self, message: Message, device: str) -> ReceivedMessages:
        """Return the state after a message. Messages of other devices and invalid ones change nothing."""
        try:
            route = wire.parse_topic(message.topic)
            if route.device != device or route.direction != "up":
                return self
            payload = message_signature.payload_without_check(message.payload)
            if route.leaf == "presence":
                said = wire.decode(payload, wire.Presence)
                begun = self.begun | {said.boot} if said.online else self.begun
                again = self.presence is not None and self.presence.boot == said.boot
                return ReceivedMessages(said, self.profile if again else None, self.telemetry if again else None, begun)
            if route.leaf == "profile":
                return ReceivedMessages(self.presence, wire.decode(payload, Profile), self.telemetry, self.begun)
            if route.leaf == "telemetry":
                told = wire.decode(payload, wire.Telemetry)
                return ReceivedMessages(self.presence, self.profile, told, self.begun)
        except WireError:
            pass
        return self


class DeviceListener:
    """Client of the broker that receives the messages of one device and publishes none.

    Args:
        connect: Function that creates a link to the broker.
    """

    def __init__(self, connect: Callable[[], Link], fleet: str, device: str) -> None:
        self._device, self.heard = device, ReceivedMessages()
        self._connect, self._topic = connect, wire.Topics(fleet).device_topic(device, "up", "+")
        self._link: Link | None = self._connect_link()

    def _connect_link(self) -> Link:
        link = self._connect()
        link.subscribe([self._topic])
        return link

    def receive(self, limit_s: float) -> ReceivedMessages:
        self._link = self._link or self._connect_link()
        self._link.wait(limit_s)
        for message in self._link.receive():
            self.heard = self.heard.with_message(message, self._device)
        return self.heard

    def wait_until(
        self, true: Callable[[ReceivedMessages], bool], limit_s: float, alive: Callable[[], bool] = lambda: True
    ) -> bool:
        """Return whether a condition became true within `limit_s`, while `alive` returned True."""
        end_s = time.monotonic() + limit_s
        while not true(self.receive(0.2)):
            if time.monotonic() >= end_s or not alive():
                return False
        return True

    def close(self) -> None:
        # the broker disconnects clients that are silent for long, so `receive` connects again
        if self._link is not None:
            self._link.close()
            self._link = None
