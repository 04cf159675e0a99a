"""Corrections of amqtt's broker (faults observed in amqtt 0.12.1).

1. amqtt parses an MQTT 5 CONNECT as one of 3.1.1, reads the properties as a string's length and waits forever.
   This broker refuses other protocol levels at once.
2. amqtt sends a new client the retained messages of other clients' subscriptions. This broker sends only those of
   the client's own.
3. amqtt iterates over its subscriptions while others subscribe, and then loses the new client's session. This broker
   iterates over a copy.
4. The shutdown of amqtt waits forever for clients without a session or with a message in transit. This broker closes
   connections first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker

PROTOCOL = b"\x00\x04MQTT"
LEVEL_311 = 4
HEAD_BYTES = 11  # bytes: a CONNECT's longest fixed header, its protocol's name and level; the shortest CONNECT has 14
REFUSED_LEVEL = b"\x20\x02\x00\x01"  # CONNACK of 3.1.1, "unacceptable protocol version"


class ReplayedStream(StreamReaderAdapter):  # type: ignore[misc]
    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._head = head

    async def read(self, n: int = -1) -> bytes:
        if not self._head:
            return await super().read(n)
        if n < 0:
            head, self._head = self._head, b""
            return head + await super().read(n)
        head, self._head = self._head[:n], self._head[n:]
        return head if len(head) == n else head + await super().read(n - len(head))


class SafeSubscriptions(dict[str, Any]):
    """Dictionary that can change while it is iterated."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))

    def items(self) -> Any:
        return list(super().items())


class PatchedBroker(Broker):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._subscriptions = SafeSubscriptions()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        return int(self._servers["default"].instance.sockets[0].getsockname()[1])

    async def shutdown(self) -> None:
        # amqtt would wait for open connections
        for writer in self._writers:
            writer.transport.abort()
        await super().shutdown()

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        # amqtt does not answer an unsupported protocol level with a CONNACK
        self._writers.add(writer)
        try:
            head = await reader.readexactly(HEAD_BYTES)
            _, protocol, level = head.partition(PROTOCOL)
            if protocol and level and level[0] != LEVEL_311:
                writer.write(REFUSED_LEVEL)
            else:
                await self._client_connected(listener_name, ReplayedStream(head, reader), StreamWriterAdapter(writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client disconnected
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        subscribers = self._subscriptions.get(subscription[0], ())
        if any(other.client_id == session.client_id for other, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)
