"""amqtt's broker without the faults that a fleet runs into (read and seen in amqtt 0.12.1).

1. It parses an MQTT 5 CONNECT as one of 3.1.1 before it looks at the level, takes the properties for
   a string's length and waits for ever: refused here as soon as the level is read.
2. It sends each newcomer whatever is retained for anybody's subscription: only for its own here.
3. It walks its subscriptions with awaits in between, while others subscribe, and then drops the
   newcomer's session on the floor: it walks a copy here.
4. Its shutdown leaves connections that never became sessions open, and waits for ever for a client
   that was just being sent something: connections are closed first here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker

PROTOCOL = b"\x00\x04MQTT"
LEVEL_311 = 4
HEAD = 11  # bytes: a CONNECT's longest fixed header, its protocol's name and level; the shortest CONNECT has 14
REFUSED_LEVEL = b"\x20\x02\x00\x01"  # CONNACK of 3.1.1, "unacceptable protocol version"


class Replayed(StreamReaderAdapter):  # type: ignore[misc]
    """A stream whose first bytes have been read already."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._head = head

    async def read(self, n: int = -1) -> bytes:
        """Read up to n bytes, those read ahead first; n < 0: to the end."""
        if not self._head:
            return await super().read(n)
        if n < 0:
            head, self._head = self._head, b""
            return head + await super().read(n)
        head, self._head = self._head[:n], self._head[n:]
        return head if len(head) == n else head + await super().read(n - len(head))


class Subscriptions(dict[str, Any]):
    """A dictionary that may change while it is walked."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))

    def items(self) -> Any:
        """Copy of the items, as amqtt changes the mapping while it iterates."""
        return list(super().items())


class MendedBroker(Broker):  # type: ignore[misc]
    """Broker of amqtt with this file's corrections."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._subscriptions = Subscriptions()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return int(self._servers["default"].instance.sockets[0].getsockname()[1])

    async def shutdown(self) -> None:
        """Abort open connections, which amqtt would wait for, then shut down."""
        for writer in self._writers:
            writer.transport.abort()
        await super().shutdown()

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        """Refuse other protocol levels than MQTT 3.1.1 with a proper CONNACK, which amqtt does not send."""
        self._writers.add(writer)
        try:
            head = await reader.readexactly(HEAD)
            _, found, level = head.partition(PROTOCOL)
            if found and level and level[0] != LEVEL_311:
                writer.write(REFUSED_LEVEL)
            else:
                await self._client_connected(listener_name, Replayed(head, reader), StreamWriterAdapter(writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it left
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        subscribers = self._subscriptions.get(subscription[0], ())
        if any(other.client_id == session.client_id for other, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)
