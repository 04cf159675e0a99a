"""A link that lies around another one and changes some of what passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from fedquilt.transport.link import Link, Message


class Around:
    """A `Link` that hands everything on to the link within; subclasses override what they change."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def session(self) -> int:
        """See `Link`."""
        return self._link.session

    @property
    def connected(self) -> bool:
        """See `Link`."""
        return self._link.connected

    @property
    def backlog(self) -> int:
        """See `Link`."""
        return self._link.backlog

    @property
    def max_payload(self) -> int:
        """See `Link`."""
        return self._link.max_payload

    @property
    def problem(self) -> str | None:
        """What is wrong with the connection, as a sentence; None: nothing, or the link within cannot tell."""
        found: str | None = getattr(self._link, "problem", None)
        return found

    def subscribe(self, filters: Sequence[str]) -> None:
        """See `Link`."""
        self._link.subscribe(filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """See `Link`."""
        self._link.unsubscribe(filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """See `Link`."""
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        """See `Link`."""
        return self._link.receive()

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """See `Link`."""
        self._link.wait(timeout_s, fds)

    def tended(self) -> AbstractContextManager[None]:
        """See `Link`."""
        return self._link.tended()

    def close(self) -> None:
        """See `Link`."""
        self._link.close()
