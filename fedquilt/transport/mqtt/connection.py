"""Non-blocking connections to a broker, delays between attempts, and errors with their fixes."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

from fedquilt.core import LinkError, Retry
from fedquilt.transport.mqtt.broker import Broker, describe_exception

ANSWER_TIMEOUT_S = 5.0  # timeout for one address
# A restarted broker is reachable within a second. With a factor of 1.5 and any jitter, the time to reconnect after an
# outage is at most the length of the outage, which `BrokerOutage` of the coordinator relies on.
RECONNECT: Final = Retry(0.1, 30.0, factor=1.5, jitter=0.5)
STABLE_CONNECTION_S = 10.0  # a connection of this length resets the backoff


class SocketWait(NamedTuple):
    socket: socket.socket
    events: int


def dial(broker: Broker) -> Generator[SocketWait, None, socket.socket]:
    """Connect to the broker's addresses in turn. Yield what to wait for, and return the socket.

    The caller must throw `TimeoutError` into the generator after ANSWER_TIMEOUT_S at one address.

    Raises:
        BrokerError: If no address works.
        JobError: If a file with credentials is unusable.
    """
    context = broker.tls_context() if broker.tls else None
    try:
        addresses = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise unreachable_error(broker, error) from None
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in addresses:
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
    code = sock.connect_ex(address)  # type: ignore[arg-type]  # an address of getaddrinfo
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
    """Return whether TLS has buffered input, which a poll of the socket does not report."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


class RetryDelay:
    def __init__(self, random_number: Callable[[], float]) -> None:
        self.failures = 0  # failed attempts and short connections in a row
        self.short_connections = 0  # connections in a row that ended within STABLE_CONNECTION_S
        self._connected_since_s = 0.0
        self._random_number = random_number

    def record_connection(self, now_s: float) -> None:
        self._connected_since_s = now_s

    def record_failure(self, was_connected: bool, now_s: float) -> float:
        """Record a failed attempt or the end of a connection. Return the seconds until the next attempt."""
        if was_connected:
            is_short = now_s - self._connected_since_s < STABLE_CONNECTION_S
            self.short_connections = self.short_connections + 1 if is_short else 0
            self.failures = max(self.short_connections - 1, 0)
        self.failures += 1
        return RECONNECT.delay_s(self.failures - 1, self._random_number())


# Reason codes of MQTT 5. Paho translates the codes of 3.1.1.
UNSPECIFIED: Final = 128  # also the code without a reason
PROTOCOL_ERROR: Final = 130
UNSUPPORTED_VERSION: Final = 132
KEEP_ALIVE: Final = 141
SESSION_TAKEN_OVER: Final = 142
TOO_LARGE: Final = 149
NOT_AUTHORIZED: Final = 135
_CREDENTIALS: Final = frozenset({134, NOT_AUTHORIZED})
_TRANSIENT: Final = frozenset({136, 137, 151, 159})  # unavailable, busy, quota, rate
OUT_OF_DATE: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_CERTIFICATE_FIXES: Final = {
    "certificate expired": "renew it: `fedquilt identity enrol` on a board, `fedquilt identity issue` for the "
    "coordinator",
    "certificate revoked": "to use this device again, remove its key and certificate, and enrol it with a new token",
}
_ID_FIX: Final = "give each agent its own `device`, and each fleet one coordinator"
_NAME_MISMATCH: Final = frozenset({62, 64})  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


class BrokerError(LinkError):
    def __init__(self, sentence: str, is_permanent: bool = False) -> None:
        super().__init__(sentence)
        self.is_permanent = is_permanent


def unreachable_error(broker: Broker, error: Exception) -> BrokerError:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        is_permanent = getattr(error, "errno", None) == socket.EAI_NONAME
        return BrokerError(
            f"host {broker.host!r} has no known address: check the name in {broker}, or the DNS", is_permanent
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME_MISMATCH:
            return BrokerError(f"certificate of {broker} is for another name: use the name in the certificate", True)
        if error.verify_code in OUT_OF_DATE:
            problem = f"certificate of {broker} is not valid at this machine's time ({error.verify_message})"
            return BrokerError(f"{problem}: set the clock, or renew the broker's certificate")
        authority = broker.ca or "an authority of this system"
        problem = f"certificate of {broker} is not signed by {authority} ({error.verify_message})"
        return BrokerError(f"{problem}: set `ca` to the file of the authority that signed it", True)
    if isinstance(error, ssl.SSLError):
        return tls_error(broker, describe_exception(error))
    if isinstance(error, ConnectionRefusedError):
        return BrokerError(f"{broker} refused the connection: start the broker, or correct the URL")
    if broker.tls and isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return BrokerError(
            f"{broker} closed the connection during the TLS handshake: use its TLS port (mostly 8883), or mqtt://"
        )
    if isinstance(error, TimeoutError):
        return BrokerError(f"no answer from {broker}: check the address, the network and the firewall")
    return BrokerError(
        f"{broker} cannot be reached ({describe_exception(error)}): check the address, the network and the broker"
    )


def tls_error(broker: Broker, description: str) -> BrokerError:
    if "wrong version number" in description or "record layer failure" in description:
        return BrokerError(f"{broker} does not use TLS on this port: use its TLS port (mostly 8883), or mqtt://", True)
    if "alert" not in description:
        return BrokerError(f"TLS with {broker} failed ({description}): check that it is an MQTT broker's TLS port")
    if broker.cert is None:
        return BrokerError(f"{broker} requires a client certificate ({description}): set cert and key", True)
    fix = next(
        (fix for phrase, fix in _CERTIFICATE_FIXES.items() if phrase in description),
        "have one signed by the broker's CA",
    )
    return BrokerError(f"{broker} refuses {broker.cert} ({description}): {fix}", True)


def refusal_error(broker: Broker, client_id: str, code: int, reason: str) -> BrokerError:
    if code not in _CREDENTIALS:
        return BrokerError(f"{broker} refuses {client_id!r} ({reason}): see the broker's log", code not in _TRANSIENT)
    if broker.user is None:
        fix = "write mqtt[s]://USER@host and set a password file, or set a certificate that the broker accepts"
        return BrokerError(f"{broker} refuses a client without a user ({reason}): {fix}", True)
    fix = f"the password in {broker.password_file}" if broker.password_file else "give a password file"
    return BrokerError(f"{broker} refuses user {broker.user!r} ({reason}): check the user and {fix}", True)


def attempt_error(broker: Broker, client_id: str, code: int, reason: str, paho_error: str) -> BrokerError | None:
    """Return the error of a failed attempt, or None if neither CONNACK code nor paho's text explains it."""
    if code == PROTOCOL_ERROR:
        return not_mqtt_error(broker, reason)
    if code > UNSPECIFIED and code != KEEP_ALIVE:
        return refusal_error(broker, client_id, code, reason)
    if "[SSL" in paho_error:
        return tls_error(broker, paho_error.rpartition("] ")[2].partition(" (_ssl")[0])
    return None


def no_answer_error(broker: Broker) -> BrokerError:
    if not broker.tls:
        fix = "check that it is an MQTT port, or try mqtts://"
    elif broker.cert is None:
        fix = "the broker may require a certificate, so set cert and key"
    else:
        fix = f"check whether {broker.cert} has expired or was revoked"
    return BrokerError(f"{broker} closed the connection without an answer: {fix}")


def not_mqtt_error(broker: Broker, description: str) -> BrokerError:
    return BrokerError(f"{broker} sent bytes that are not MQTT ({description}): use the port of an MQTT broker")


def connection_lost_error(broker: Broker, client_id: str, code: int, reason: str, is_repeated: bool) -> BrokerError:
    """Return the error for a lost connection. `is_repeated` is whether earlier connections ended soon too."""
    if code == KEEP_ALIVE:
        return BrokerError(f"{broker} was silent for too long: check the network")
    if code == SESSION_TAKEN_OVER:
        return BrokerError(f"another client uses the id {client_id!r} at {broker}: {_ID_FIX}")
    suffix = f" ({reason})" if code > UNSPECIFIED else ""
    if is_repeated:  # Mosquitto 2.0 and MQTT 3.1.1 state no reason
        behaviour = f"soon closes each connection{suffix}, as if another client used the id {client_id!r}"
        return BrokerError(f"{broker} {behaviour}: {_ID_FIX}, or see the broker's log")
    fix = f"check that it still runs, and that no other client uses the id {client_id!r}"
    return BrokerError(f"{broker} closed the connection{suffix}: {fix}")


def unread_error(broker: Broker) -> BrokerError:
    return BrokerError(f"{broker} has stopped reading: check the network, and the broker's load")


def describe_refused_message(broker: Broker, topic: str, code: int, reason: str) -> str:
    fix = "permit this client's certificate or user in the broker's ACL" if code == NOT_AUTHORIZED else "see its log"
    return f"{broker} refuses messages to {topic} ({reason}): {fix}"


def describe_oversized_message(broker: Broker, topic: str, size: int) -> str:
    return f"{broker} refused a message of {size} bytes to {topic}, which is dropped: raise the broker's packet limit"
