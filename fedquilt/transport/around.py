"""Wrapper of a link, the base of links that change messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from fedquilt.transport.link import Link, Message


class Around:
    """Link that passes all calls on to another link. Subclasses override a part."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def session(self) -> int:
        return self._link.session

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def backlog(self) -> int:
        return self._link.backlog

    @property
    def max_payload(self) -> int:
        return self._link.max_payload

    @property
    def problem(self) -> str | None:
        """Problem of the connection as a sentence, or None if there is none or it is not known."""
        found: str | None = getattr(self._link, "problem", None)
        return found

    def subscribe(self, filters: Sequence[str]) -> None:
        self._link.subscribe(filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self._link.unsubscribe(filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        return self._link.receive()

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        self._link.wait(timeout_s, fds)

    def keep_alive(self) -> AbstractContextManager[None]:
        return self._link.keep_alive()

    def close(self) -> None:
        self._link.close()
