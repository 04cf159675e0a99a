"""Connections to a broker, opened without ever blocking, and the waits between attempts.

`dial` does TCP and TLS as a generator: it yields whenever it would have to wait.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Generator
from typing import NamedTuple

from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt_errors import unreachable

ANSWER_S = 5.0  # longest time for one address to answer
FIRST_S = 0.1  # before the first attempt after a connection: a broker that was restarted is back within a second
LONGEST_S = 30.0
STABLE_S = 10.0  # a connection that lasted this long was a good one: back-off restarts


class Waiting(NamedTuple):
    """Event that a dial waits for: a socket, and the `select.poll` events on it."""

    socket: socket.socket
    events: int


def dial(broker: Broker) -> Generator[Waiting, None, socket.socket]:
    """Open a socket to the broker, trying its addresses in turn; TLS is ready when it returns.

    Only the look-up of a name blocks, as the system's resolver does. The caller keeps
    the time: it throws `TimeoutError` in when an address has had ANSWER_S, and the next is tried.
    Closing the generator closes its socket.

    Raises:
        DialError: no address answered like a broker.
        JobError: a certificate, key or CA file is no longer usable.
    """
    context = broker.context() if broker.tls else None
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise unreachable(broker, error) from None
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # QoS-1 round trips of 0.5 ms, not 80
            yield from _connect(sock, address)
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname=broker.host, do_handshake_on_connect=False)
                yield from _shake_hands(sock)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:  # the generator was closed
            sock.close()
            raise
    raise unreachable(broker, failure) from None


def _connect(sock: socket.socket, address: object) -> Generator[Waiting, None, None]:
    code = sock.connect_ex(address)  # type: ignore[arg-type]  # as getaddrinfo gave it
    if code == errno.EINPROGRESS:
        yield Waiting(sock, select.POLLOUT)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _shake_hands(sock: ssl.SSLSocket) -> Generator[Waiting, None, None]:
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            yield Waiting(sock, select.POLLIN)
        except ssl.SSLWantWriteError:
            yield Waiting(sock, select.POLLOUT)


def read_ahead(sock: socket.socket) -> bool:
    """Whether TLS has buffered input that is not read yet: a poll of the socket does not show it."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def backoff_s(failures: int, roll: float) -> float:
    """Seconds to wait after `failures` in a row: FIRST_S growing to LONGEST_S, shortened by up to half at random.

    By half each time, so that whatever is drawn a client is back before the broker was away twice as long; the draws
    spread a fleet.
    """
    return float(min(LONGEST_S, FIRST_S * 1.5 ** min(failures - 1, 20)) * (1.0 - 0.5 * roll))


class Retry:
    """Waits between attempts to connect.

    Args:
        roll: draws from [0, 1) for the back-off's jitter.
    """

    def __init__(self, roll: Callable[[], float]) -> None:
        self.failures = 0  # attempts and short connections in a row
        self.short = 0  # of these, connections that the broker closed soon
        self._since_s = 0.0  # when the connection began
        self._roll = roll

    def connected(self, now_s: float) -> None:
        """Record that the broker has accepted the connection, for the back-off after it ends."""
        self._since_s = now_s

    def failed(self, was_connected: bool, now_s: float) -> float:
        """Record the end of an attempt or a connection; returns seconds to wait."""
        if was_connected:
            self.short = self.short + 1 if now_s - self._since_s < STABLE_S else 0
            self.failures = max(self.short - 1, 0)
        self.failures += 1
        return backoff_s(self.failures, self._roll())
