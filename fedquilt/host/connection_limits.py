"""Limits on the connections of an HTTP listener, independent of the server implementation.

A listener accepts `ConnectionLimits.connections` connections, and `ConnectionLimits.per_address` per address. Each
connection has a deadline. At the limit, a new connection replaces one that waits for a request, or one of an address
with more connections. Listeners never use the upper half of the process's file descriptors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

HEADER_S: Final = 10.0  # for a TLS handshake and a request's header, and for the pause between two requests
REQUEST_S: Final = 60.0  # for a request's body and the answer

Count = Annotated[int, Meta(ge=1)]


class ConnectionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    connections: Count = 256  # at once
    per_address: Count = 128  # at once, of one IPv4 address or IPv6 network of 64 bits


class Connection:
    """Open connection, with attributes that `ConnectionLimiter` updates."""

    def __init__(self, address: str, close: Callable[[], None], now_s: float, deadline_s: float) -> None:
        self.address, self.close, self.since_s, self.deadline_s = address, close, now_s, deadline_s
        self.waits = True  # for a request
        self.owner: str | None = None  # verified name of the peer: the connection is not closed for others


class ConnectionLimiter:
    """Open connections of a listener, within its limits. Thread-safe.

    Args:
        limits: Limits on the number of connections.
        header_s: Seconds for a handshake and a header, and between requests.
        request_s: Seconds for a request's body and the answer.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        limits: ConnectionLimits = ConnectionLimits(),
        *,
        header_s: float = HEADER_S,
        request_s: float = REQUEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self._header_s, self._request_s, self._clock = limits, header_s, request_s, clock
        self._lock = threading.Lock()
        self._open: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add_connection(self, address: str, descriptor: int, close: Callable[[], None]) -> Connection | None:
        """Add a connection, if need be by closing another one, or return None if there is no room.

        Args:
            address: IP address of the peer.
            descriptor: File descriptor of the connection.
            close: Function that closes the connection. It must not block or call this object.
        """
        network = _address_group(address)
        with self._lock:
            of_address = Counter(each.address for each in self._open)
            crowded = descriptor >= _descriptor_limit() // 2 or len(self._open) >= self.limits.connections
            full = of_address[network] >= self.limits.per_address
            if crowded or full:
                candidates = [
                    each
                    for each in self._open
                    if (not full or each.address == network)
                    and each.owner is None
                    and (each.waits or of_address[each.address] > of_address[network])
                ]
                if not candidates:
                    return None
                self._close(max(candidates, key=lambda each: (of_address[each.address], -each.since_s)))
            now_s = self._clock()
            made = Connection(network, close, now_s, now_s + self._header_s)
            self._open.add(made)
            return made

    def begin_request(self, connection: Connection, more_s: float = 0.0) -> None:
        """Start the time of a request whose header is complete. `more_s` is added to the usual time."""
        connection.waits, connection.deadline_s = False, self._clock() + self._request_s + more_s

    def await_request(self, connection: Connection) -> None:
        """Start the time until the next request's header, after an answer."""
        connection.waits, connection.since_s = True, self._clock()
        connection.deadline_s = connection.since_s + self._header_s

    def assign_owner(self, connection: Connection, owner: str, most: int) -> bool:
        """Assign a connection to a verified peer, or return False if `most` others are assigned to the peer."""
        with self._lock:
            if sum(each.owner == owner for each in self._open) >= most:
                return False
            connection.owner = owner
            return True

    def remove_connection(self, connection: Connection) -> None:
        """Remove a connection that has ended. Its `close` is not called from now on."""
        with self._lock:
            self._open.discard(connection)

    def close_overdue(self) -> None:
        with self._lock:
            for each in [each for each in self._open if self._clock() >= each.deadline_s]:
                self._close(each)

    def close_waiting(self) -> None:
        with self._lock:
            for each in [each for each in self._open if each.waits]:
                self._close(each)

    def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(OSError):
            connection.close()


def raise_descriptor_limit() -> None:
    """Raise the limit of this process on open files as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _descriptor_limit() -> float:
    """Return this process's soft limit on open files, which may be infinite."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _address_group(address: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address: one subscriber usually has the whole network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
