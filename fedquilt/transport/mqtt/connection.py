"""Non-blocking connections to a broker, and delays between attempts.

`dial` connects by TCP and TLS as a generator that yields whenever it would have to wait.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

from fedquilt.core import Retry
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.errors import unreachable_error

ANSWER_S = 5.0  # longest time for one address to answer
# A broker that was restarted is back within a second. By a factor of 1.5, with any jitter, a device is back within the
# length of an outage after it, which `BrokerOutage` of the coordinator relies on.
RECONNECT: Final = Retry(0.1, 30.0, factor=1.5, jitter=0.5)
STABLE_S = 10.0  # a connection that lasted this long was a good one: back-off restarts


class SocketWait(NamedTuple):
    socket: socket.socket
    events: int


def dial(broker: Broker) -> Generator[SocketWait, None, socket.socket]:
    """Open a socket to the broker, trying its addresses in turn. Return after the TLS handshake.

    Only the name lookup blocks, in the system's resolver. The caller measures time: it throws `TimeoutError` into the
    generator after ANSWER_S at one address, and the next address is tried. Closing the generator closes its socket.

    Raises:
        ConnectionFailedError: If no address answers like a broker.
        JobError: If a certificate, key or CA file cannot be used.
    """
    context = broker.tls_context() if broker.tls else None
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise unreachable_error(broker, error) from None
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # QoS-1 round trips of 0.5 ms, not 80
            yield from _connect(sock, address)
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname=broker.host, do_handshake_on_connect=False)
                yield from _do_tls_handshake(sock)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:  # the generator was closed
            sock.close()
            raise
    raise unreachable_error(broker, failure) from None


def _connect(sock: socket.socket, address: object) -> Generator[SocketWait, None, None]:
    code = sock.connect_ex(address)  # type: ignore[arg-type]  # as getaddrinfo gave it
    if code == errno.EINPROGRESS:
        yield SocketWait(sock, select.POLLOUT)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _do_tls_handshake(sock: ssl.SSLSocket) -> Generator[SocketWait, None, None]:
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            yield SocketWait(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            yield SocketWait(sock, select.POLLOUT)


def has_buffered_input(sock: socket.socket) -> bool:
    """Return whether TLS has unread input in its buffer, which a poll of the socket cannot show."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


class RetryDelay:
    def __init__(self, roll: Callable[[], float]) -> None:
        self.failures = 0  # attempts and short connections in a row
        self.short = 0  # of these, connections that the broker closed soon
        self._since_s = 0.0  # when the connection began
        self._roll = roll

    def record_connection(self, now_s: float) -> None:
        self._since_s = now_s

    def record_failure(self, was_connected: bool, now_s: float) -> float:
        """Record the end of an attempt or a connection. Return the seconds until the next attempt."""
        if was_connected:
            self.short = self.short + 1 if now_s - self._since_s < STABLE_S else 0
            self.failures = max(self.short - 1, 0)
        self.failures += 1
        return RECONNECT.delay_s(self.failures - 1, self._roll())
