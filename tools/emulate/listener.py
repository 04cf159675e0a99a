"""Listener to a device's messages at the broker, beside the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fedquilt import wire
from fedquilt.core import Profile, WireError
from fedquilt.transport import envelope
from fedquilt.transport.link import Link, Message


@dataclass(frozen=True)
class Heard:
    """Latest messages of one device."""

    presence: wire.Presence | None = None
    profile: Profile | None = None
    telemetry: wire.Telemetry | None = None
    begun: frozenset[str] = frozenset()  # names of the agent's starts that have been online

    @property
    def online(self) -> str:
        """Name of the agent's start that is online; "": the agent is offline."""
        return self.presence.boot if self.presence is not None and self.presence.online else ""

    def after(self, message: Message, device: str) -> Heard:
        """State after a message; those of other devices and damaged ones change nothing."""
        try:
            route = wire.route(message.topic)
            if route.device != device or route.direction != "up":
                return self
            payload = envelope.inside(message.payload)
            if route.leaf == "presence":
                said = wire.decode(payload, wire.Presence)
                begun = self.begun | {said.boot} if said.online else self.begun
                again = self.presence is not None and self.presence.boot == said.boot
                return Heard(said, self.profile if again else None, self.telemetry if again else None, begun)
            if route.leaf == "profile":
                return Heard(self.presence, wire.decode(payload, Profile), self.telemetry, self.begun)
            if route.leaf == "telemetry":
                told = wire.decode(payload, wire.Telemetry)
                return Heard(self.presence, self.profile, told, self.begun)
        except WireError:
            pass
        return self


class Listener:
    """Client of the broker that receives one device's messages and publishes nothing.

    Args:
        connect: makes a link to the broker.
    """

    def __init__(self, connect: Callable[[], Link], fleet: str, device: str) -> None:
        self._device, self.heard = device, Heard()
        self._connect, self._topic = connect, wire.Topics(fleet).device(device, "up", "+")
        self._link: Link | None = self._connected()

    def _connected(self) -> Link:
        link = self._connect()
        link.subscribe([self._topic])
        return link

    def listen(self, limit_s: float) -> Heard:
        """State after waiting for messages, for at most that long."""
        self._link = self._link or self._connected()
        self._link.wait(limit_s)
        for message in self._link.receive():
            self.heard = self.heard.after(message, self._device)
        return self.heard

    def until(self, true: Callable[[Heard], bool], limit_s: float, alive: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a condition on the messages; returns whether it held in time and while the process lived."""
        end_s = time.monotonic() + limit_s
        while not true(self.listen(0.2)):
            if time.monotonic() >= end_s or not alive():
                return False
        return True

    def close(self) -> None:
        """Close the link until the next `listen`: a broker disconnects clients that are silent for long."""
        if self._link is not None:
            self._link.close()
            self._link = None
