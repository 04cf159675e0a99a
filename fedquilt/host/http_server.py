"""HTTP and HTTPS server with a thread per connection, within the limits of `ConnectionLimiter`.

Metrics, enrolment, blobs and the model runner use this server. Requests need a Content-Length: chunked bodies and
upgrades are not supported.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import os
import re
import resource
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Final, cast
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from fedquilt.core import JobError

log = logging.getLogger(__name__)

HEADER_BYTES: Final = 8 * 1024
PIECE_BYTES: Final = 64 * 1024  # bytes of a body in one read
LINGER_BYTES: Final = 256 << 20  # input dropped after a refusal, so that the client receives the response
POLL_MS: Final = 500  # interval of the checks of deadlines
MAX_PORT: Final = 65535
BACKLOG: Final = 128
SPARE_THREADS: Final = 16  # threads of closed connections that have not ended
_REQUEST: Final = re.compile(rb"([A-Z]{1,16}) (\S+) HTTP/1\.([01])\Z")
_SINGLE_HEADERS: Final = frozenset({"host", "content-length", "content-range", "range", "authorization", "origin"})


def describe_listen_error(error: BaseException) -> str:
    """Return why a server cannot listen, such as "address already in use", without the address."""
    while not isinstance(error, OSError) and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if not isinstance(error, OSError):
        return str(error)
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
    return text[:1].lower() + text[1:]


def open_listener(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port <= MAX_PORT:  # `create_server` would leave its socket open
            raise OSError(f"port {port} is not between 0 and {MAX_PORT}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError, TypeError) as error:  # the last two are raised for invalid host names
        problem = describe_listen_error(error)
        raise JobError(f"cannot listen at {_format_address(host, port)} ({problem}): choose another address") from None


def _format_address(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"


class RequestRefusedError(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class HttpExchange:
    def __init__(
        self, stream: _ConnectionStream, method: str, path: str, headers: dict[str, str], reusable: bool
    ) -> None:
        self.method, self.path, self.headers = method, path, headers  # header names in lower case
        self._stream, self.client_address, self.connection = stream, stream.address, stream.connection
        self.socket, self.is_answered, self._reusable = stream.sock, False, reusable
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise RequestRefusedError(411, "request has a Transfer-Encoding: send a Content-Length instead")
        if not length.isascii() or not length.isdigit() or len(length) > 16:
            raise RequestRefusedError(400, f"Content-Length {length[:20]!r} is not a number of bytes")
        self.size = self._unread = int(length)  # bytes of the body

    @property
    def is_reusable(self) -> bool:
        return self._reusable and not self._unread

    def close_after(self) -> None:
        self._reusable = False

    def open_body(self) -> io.BufferedReader:
        """Return the stream of the body, from which the caller must read `size` bytes."""
        if self.headers.get("expect", "").lower() == "100-continue":
            self.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._unread = 0
        return self._stream.file

    def read_body(self, max_bytes: int, reserve: Callable[[int], None] = lambda size: None) -> bytes:
        """Return the body, or raise RequestRefusedError. `reserve` is called with the size of each piece."""
        if "content-length" not in self.headers:
            raise RequestRefusedError(411, "request has no Content-Length")
        if self.size > max_bytes:
            raise RequestRefusedError(413, f"request has {self.size} bytes: send at most {max_bytes}")
        stream, body, missing = self.open_body(), bytearray(), self.size
        while missing and (data := stream.read1(min(missing, PIECE_BYTES))):
            missing -= len(data)
            reserve(len(data))
            body += data  # a list of small pieces takes many times their bytes
        if missing:
            self.close_after()
            raise RequestRefusedError(400, f"request ended after {self.size - missing} of {self.size} bytes")
        return bytes(body)

    def send_response(self, status: int, headers: dict[str, str] | None = None, body: bytes | None = b"") -> None:
        """Send a response. If `body` is None, the caller sends the body and sets Content-Length in `headers`."""
        self.is_answered = True
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None and status != 204:
            lines.append(f"Content-Length: {len(body)}")
        lines.append(f"Connection: {'keep-alive' if self.is_reusable else 'close'}")
        head = "\r\n".join([*lines, "", ""]).encode()
        self.socket.sendall(head + (b"" if body is None or self.method == "HEAD" else body))


Handler = Callable[[HttpExchange], None]


def _plain_text_body(sentence: str) -> tuple[str, bytes]:
    return "text/plain; charset=utf-8", sentence.encode()


class HttpServer:
    """HTTP server at one address, which runs after `start`. The constructor may raise JobError.

    `handler` is called in the thread of a connection, and may raise RequestRefusedError. `context` returns the TLS
    context of a new connection. `error_body` returns the content type and the body for the text of a refusal.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        connections: ConnectionLimiter | None = None,
        context: Callable[[], ssl.SSLContext] | None = None,
        error_body: Callable[[str], tuple[str, bytes]] = _plain_text_body,
    ) -> None:
        self.connections = ConnectionLimiter() if connections is None else connections
        self._handler, self._context, self._error_body = handler, context, error_body
        self._thread_slots = threading.BoundedSemaphore(self.connections.limits.connections + SPARE_THREADS)
        self._closed = False
        self._listener = open_listener(host, port)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept_connections, name="http", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        return f"http{'s' if self._context else ''}://{_format_address(*self.address)}/"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Requests in progress continue until the process ends."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self.connections.close_waiting()

    def _accept_connections(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while not self._closed:
            ready = poller.poll(POLL_MS)
            self.connections.close_overdue()
            if not ready or self._closed:
                continue
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:  # the client has disconnected
                continue
            except OSError as error:
                log.debug("no connection can be accepted: %s", error)
                self.connections.close_waiting()  # probably no file descriptor is free
                time.sleep(0.1)
                continue
            try:
                self._start_connection(sock, str(address[0]))
            except RuntimeError as error:  # the system has no thread left
                log.debug("the connection of %s is closed: %s", address[0], error)
                sock.close()

    def _start_connection(self, sock: socket.socket, address: str) -> None:
        descriptor = sock.fileno()  # TLS replaces the socket object and keeps the descriptor
        connection = self.connections.add_connection(address, descriptor, lambda: _reset_connection(descriptor))
        if connection is None or not self._thread_slots.acquire(timeout=1.0):
            if connection is not None:
                self.connections.remove_connection(connection)
            if self._context is None:
                kind, body = self._error_body("too many connections: try again")
                head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                with contextlib.suppress(OSError):
                    sock.send(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
            return sock.close()
        try:
            thread = threading.Thread(
                target=self._serve_connection, args=(_ConnectionStream(sock, address, connection),), daemon=True
            )
            thread.start()
        except RuntimeError:
            self.connections.remove_connection(connection)
            self._thread_slots.release()
            raise

    def _serve_connection(self, stream: _ConnectionStream) -> None:
        try:
            stream.open_file(None if self._context is None else self._context())
            while self._serve_one_request(stream):
                self.connections.await_request(stream.connection)
        except OSError as error:  # TLS errors and timeouts are kinds of OSError
            log.debug("the connection of %s ended early: %s", stream.address, error)
        except Exception:
            log.exception("the connection of %s ended by an internal error", stream.address)
        finally:
            self.connections.remove_connection(stream.connection)  # before the descriptor can be reused
            stream.close()
            self._thread_slots.release()

    def _serve_one_request(self, stream: _ConnectionStream) -> bool:
        exchange: HttpExchange | None = None
        try:
            exchange = _read_request(stream)
            if exchange is None:
                return False
            self.connections.begin_request(stream.connection)
            self._handler(exchange)
        except RequestRefusedError as error:
            if exchange is None:
                exchange = HttpExchange(stream, "GET", "", {}, reusable=False)
                exchange._unread = 1  # the unknown rest is read and dropped
            exchange._unread = exchange._unread or exchange.size  # a handler may have read a part of the body
            if not exchange.is_answered:
                kind, body = self._error_body(str(error))
                exchange.send_response(error.status, {"Content-Type": kind}, body)
        if exchange._unread:
            self.connections.await_request(stream.connection)
            stream.stop_and_drain()
        return exchange.is_reusable


class _ConnectionStream:
    def __init__(self, sock: socket.socket, address: str, connection: Connection) -> None:
        self.sock, self.address, self.connection = sock, address, connection
        self.file: io.BufferedReader

    def open_file(self, context: ssl.SSLContext | None) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
            try:
                self.sock.do_handshake()
            except ssl.SSLError:
                self.stop_and_drain()  # the client receives the TLS alert
                raise
        self.file = cast(io.BufferedReader, self.sock.makefile("rb", HEADER_BYTES))

    def stop_and_drain(self) -> None:
        """Stop sending, and drop further input so that closing does not lose the response."""
        socket.socket.shutdown(self.sock, socket.SHUT_WR)
        remaining_bytes = LINGER_BYTES
        while remaining_bytes > 0 and (received := socket.socket.recv(self.sock, 64 * 1024)):
            remaining_bytes -= len(received)

    def close(self) -> None:
        if hasattr(self, "file"):
            self.file.close()  # the descriptor is closed after file and socket
        self.sock.close()


def _read_request(stream: _ConnectionStream) -> HttpExchange | None:
    rows: list[bytes] = []
    remaining_bytes = HEADER_BYTES
    while True:
        row = stream.file.readline(remaining_bytes)
        remaining_bytes -= len(row)
        if not row and not rows:
            return None
        if not row.endswith(b"\n"):
            status = 431 if remaining_bytes <= 0 else 400
            reason = f"is longer than {HEADER_BYTES} bytes" if remaining_bytes <= 0 else "is incomplete"
            raise RequestRefusedError(status, f"header of the request {reason}")
        row = row.rstrip(b"\r\n")
        if not row:
            break
        rows.append(row)
    match = _REQUEST.match(rows[0]) if rows else None
    if match is None:
        raise RequestRefusedError(400, "first line of the request is not HTTP/1.1")
    headers: dict[str, str] = {}
    for row in rows[1:]:
        name, colon, value = row.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name in _SINGLE_HEADERS):
            raise RequestRefusedError(400, f"header {name[:40]!r} is malformed or repeated")
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    reusable = match[3] == b"1" and "close" not in headers.get("connection", "").lower()
    return HttpExchange(stream, match[1].decode(), match[2].decode("latin-1"), headers, reusable)


def _reset_connection(descriptor: int) -> None:
    """Reset a connection, so that another thread's reads and writes on it end. Unsent bytes are dropped."""
    sock = socket.socket(fileno=descriptor)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    finally:
        sock.detach()


HEADER_S: Final = 10.0  # timeout of a TLS handshake, of a request's header, and of the pause between two requests
REQUEST_S: Final = 60.0  # timeout of a request's body and of the response

Count = Annotated[int, Meta(ge=1)]


class ConnectionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    connections: Count = 256  # open at the same time
    per_address: Count = 128  # open at the same time from one IPv4 address or /64 network of IPv6


class Connection:
    def __init__(self, address: str, close: Callable[[], None], now_s: float, deadline_s: float) -> None:
        self.address, self.close, self.since_s, self.deadline_s = address, close, now_s, deadline_s
        self.is_waiting = True  # whether the connection waits for a request
        self.owner: str | None = None  # verified name of the peer: the connection is not closed to make room


class ConnectionLimiter:
    """Open connections of a listener, within its limits. Thread-safe.

    At a limit, a new connection replaces one that waits for a request, or one of an address with more connections.
    Listeners never use the upper half of the process's file descriptors.
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
        """Add a connection. At a limit, close another one or return None. `close` must not block."""
        network = _address_group(address)
        with self._lock:
            counts_by_address = Counter(other.address for other in self._open)
            soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            is_scarce = soft_limit != resource.RLIM_INFINITY and descriptor >= soft_limit // 2
            is_crowded = is_scarce or len(self._open) >= self.limits.connections
            is_address_full = counts_by_address[network] >= self.limits.per_address
            if is_crowded or is_address_full:
                closable = [
                    other
                    for other in self._open
                    if (not is_address_full or other.address == network)
                    and other.owner is None
                    and (other.is_waiting or counts_by_address[other.address] > counts_by_address[network])
                ]
                if not closable:
                    return None
                self._close(max(closable, key=lambda other: (counts_by_address[other.address], -other.since_s)))
            now_s = self._clock()
            connection = Connection(network, close, now_s, now_s + self._header_s)
            self._open.add(connection)
            return connection

    def begin_request(self, connection: Connection, extra_s: float = 0.0) -> None:
        """Set the deadline of a request whose header is complete. `extra_s` is added to the usual time."""
        connection.is_waiting, connection.deadline_s = False, self._clock() + self._request_s + extra_s

    def await_request(self, connection: Connection) -> None:
        connection.is_waiting, connection.since_s = True, self._clock()
        connection.deadline_s = connection.since_s + self._header_s

    def assign_owner(self, connection: Connection, owner: str, limit: int) -> bool:
        """Assign a connection to a verified peer. Return False if the peer has `limit` connections already."""
        with self._lock:
            if sum(other.owner == owner for other in self._open) >= limit:
                return False
            connection.owner = owner
            return True

    def remove_connection(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)

    def close_overdue(self) -> None:
        with self._lock:
            for connection in [connection for connection in self._open if self._clock() >= connection.deadline_s]:
                self._close(connection)

    def close_waiting(self) -> None:
        with self._lock:
            for connection in [connection for connection in self._open if connection.is_waiting]:
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(OSError):
            connection.close()


def raise_descriptor_limit() -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _address_group(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, usually that of one subscriber."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


def split_http_url(url: str) -> SplitResult:
    """Return the parts of an HTTP URL with a usable host and port, or raise ValueError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host.encode("idna")  # as Python does to resolve the name
    if parts.scheme not in ("http", "https") or not host or parts.port == 0 or parts.username is not None:
        raise ValueError(f"{url!r} is not an HTTP address")
    return parts
