"""HTTP protocol of uvicorn with the limits of `ConnectionLimiter`."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedquilt.host.http_server import Connection, ConnectionLimiter

CHECK_S = 0.5  # between checks of deadlines


def make_limited_protocol(connections: ConnectionLimiter) -> Callable[..., asyncio.Protocol]:
    """Return a protocol class for uvicorn whose connections are limited by `connections`."""

    class LimitedProtocol(H11Protocol):
        entry: Connection | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            sock: socket.socket = transport.get_extra_info("socket")
            address = str((transport.get_extra_info("peername") or ("",))[0])
            self.entry = connections.add_connection(address, sock.fileno(), transport.abort)
            if self.entry is None:
                transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n")
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.entry is not None:
                connections.remove_connection(self.entry)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.entry is not None:
                super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            self._restart_deadline()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._restart_deadline()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._restart_deadline()

        def _restart_deadline(self) -> None:
            if self.entry is None or self.cycle is None or self.cycle.response_complete:
                return
            if self.conn.their_state is not h11.SEND_BODY and not self.flow.write_paused:
                connections.begin_request(self.entry, math.inf)  # changes are streamed for hours
            elif self.entry.waits or self.entry.deadline_s == math.inf:
                connections.begin_request(self.entry)

        def on_response_complete(self) -> None:
            if self.entry is not None:
                connections.await_request(self.entry)
            super().on_response_complete()

    return LimitedProtocol


async def close_late_connections(connections: ConnectionLimiter, server: Any) -> None:
    """Close connections whose deadline has passed, until the server ends."""
    while not server.should_exit:
        connections.close_overdue()
        await asyncio.sleep(CHECK_S)
