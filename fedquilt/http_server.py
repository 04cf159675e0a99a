"""HTTP(S) server with a thread for each connection, and the limits of `Connections`.

Metrics, enrolment, blobs and the model runner use this server. Requests have a length: no chunked bodies, no upgrades.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

from fedquilt.connections import Connection, Connections

log = logging.getLogger(__name__)

HEADER_BYTES: Final = 8 * 1024
PIECE_BYTES: Final = 64 * 1024  # of a body that are read at once
LINGER_BYTES: Final = 256 << 20  # read and dropped after a refusal, so that the client gets the answer
POLL_MS: Final = 500  # between checks of deadlines
PORT_MOST: Final = 65535
SPARE_THREADS: Final = 16  # for connections that were closed and whose threads have not ended yet
_REQUEST: Final = re.compile(rb"([A-Z]{1,16}) (\S+) HTTP/1\.([01])\Z")
_ONCE: Final = frozenset({"host", "content-length", "content-range", "range", "authorization", "origin"})


class RefusedError(Exception):
    """A request that is answered with an error status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Exchange:
    """One request and its answer."""

    def __init__(self, line: _Line, method: str, path: str, headers: dict[str, str], reusable: bool) -> None:
        self._line, self.method, self.path, self.headers = line, method, path, headers  # header names in lower case
        self.answered, self._reusable = False, reusable
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise RefusedError(411, "a request has to say by Content-Length how many bytes follow")
        if not length.isascii() or not length.isdigit() or len(length) > 16:
            raise RefusedError(400, f"the Content-Length {length[:20]!r} is no number of bytes")
        self.size = self._unread = int(length)  # bytes of the body

    @property
    def address(self) -> str:
        """IP address of the client."""
        return self._line.address

    @property
    def socket(self) -> socket.socket:
        """Socket of the connection, an SSLSocket under TLS. The timeout is for the caller to set."""
        return self._line.sock

    @property
    def connection(self) -> Connection:
        """Entry of the connection in the server's `Connections`."""
        return self._line.connection

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._reusable and not self._unread

    def close_after(self) -> None:
        """Close the connection after this request's answer."""
        self._reusable = False

    def open_body(self) -> io.BufferedReader:
        """Return the stream from which the caller reads the whole body, of `size` bytes."""
        if self.headers.get("expect", "").lower() == "100-continue":
            self._line.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._unread = 0
        return self._line.file

    def read_body(self, most: int, reserve: Callable[[int], None] = lambda size: None) -> bytes:
        """Read the body.

        Args:
            most: Largest number of bytes of a body.
            reserve: Called with the size of each piece that has arrived. A RefusedError ends the reading.

        Raises:
            RefusedError: If the request has no Content-Length, or the body more than `most` bytes or too few.
        """
        if "content-length" not in self.headers:
            raise RefusedError(411, "a request has to say by Content-Length how many bytes follow")
        if self.size > most:
            raise RefusedError(413, f"{self.size} bytes in one request: at most {most} are read")
        stream, body, missing = self.open_body(), bytearray(), self.size
        while missing and (piece := stream.read1(min(missing, PIECE_BYTES))):
            missing -= len(piece)
            reserve(len(piece))
            body += piece  # small pieces on their own take many times their bytes
        if missing:
            self.close_after()
            raise RefusedError(400, f"the request ended after {self.size - missing} of {self.size} bytes")
        return bytes(body)

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes | None = b"") -> None:
        """Send an answer.

        Args:
            status: HTTP status.
            headers: Headers beside Content-Length and Connection.
            body: Body, or None if the caller sends a body of the Content-Length in `headers`.
        """
        self.answered = True
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None and status != 204:
            lines.append(f"Content-Length: {len(body)}")
        lines.append(f"Connection: {'keep-alive' if self.reusable else 'close'}")
        head = "\r\n".join([*lines, "", ""]).encode()
        self._line.sock.sendall(head + (b"" if body is None or self.method == "HEAD" else body))


Handler = Callable[[Exchange], None]


def _plain_text_body(sentence: str) -> tuple[str, bytes]:
    """Return the content type and the bytes of a plain text."""
    return "text/plain; charset=utf-8", sentence.encode()


class HttpServer:
    """Server of one address. `start` starts its threads.

    Args:
        host: Address to listen at.
        port: Port to listen at, or 0 for any free port.
        handler: Called in the thread of a connection for each request. A `RefusedError` is answered.
        connections: Limits.
        context: Returns the TLS context of a new connection, or None for a server without TLS.
        error_body: Returns content type and body of an answer with this error sentence.

    Raises:
        OSError: If the address cannot be listened at.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        connections: Connections | None = None,
        context: Callable[[], ssl.SSLContext] | None = None,
        error_body: Callable[[str], tuple[str, bytes]] = _plain_text_body,
    ) -> None:
        self.connections = Connections() if connections is None else connections
        self._handler, self._context, self._error_body = handler, context, error_body
        self._places = threading.BoundedSemaphore(self.connections.limits.connections + SPARE_THREADS)
        self._closed = False
        if not 0 <= port <= PORT_MOST:  # `create_server` would leave its socket open
            raise OSError(f"port {port} is not between 0 and {PORT_MOST}")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
            self._listener.setblocking(False)
        except (UnicodeError, TypeError) as error:  # Python's for host names that no host can have
            raise OSError(str(error)) from None
        self._thread = threading.Thread(target=self._accept_connections, name="http", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listener."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """URL of the listener."""
        host, port = self.address
        return f"http{'s' if self._context else ''}://{f'[{host}]' if ':' in host else host}:{port}/"

    def start(self) -> None:
        """Start the thread that accepts connections."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Requests that have begun continue until the process ends."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self.connections.close_waiting()

    # -- connections --

    def _accept_connections(self) -> None:
        """Accept connections until the server closes, and close those past their deadline."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while not self._closed:
            ready = poller.poll(POLL_MS)
            self.connections.close_late()
            if not ready or self._closed:
                continue
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:  # the client has gone
                continue
            except OSError as error:
                log.debug("no connection can be accepted: %s", error)
                self.connections.close_waiting()  # most likely no file descriptor is free
                time.sleep(0.1)
                continue
            try:
                self._start_connection(sock, str(address[0]))
            except RuntimeError as error:  # the system has no thread left
                log.debug("the connection of %s is closed: %s", address[0], error)
                sock.close()

    def _start_connection(self, sock: socket.socket, address: str) -> None:
        """Start a thread that serves a new connection, or close it with status 503 if there is no room."""
        descriptor = sock.fileno()  # TLS replaces the socket object and keeps the descriptor
        connection = self.connections.add_connection(address, descriptor, lambda: _reset_connection(descriptor))
        if connection is None or not self._places.acquire(timeout=1.0):
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
                target=self._serve_connection, args=(_Line(sock, address, connection),), daemon=True
            )
            thread.start()
        except RuntimeError:
            self.connections.remove_connection(connection)
            self._places.release()
            raise

    def _serve_connection(self, line: _Line) -> None:
        """Serve requests on a connection until it ends, then free its place."""
        try:
            line.open_stream(None if self._context is None else self._context())
            while self._serve_one_request(line):
                self.connections.await_request(line.connection)
        except OSError as error:  # TLS errors and timeouts are kinds of OSError
            log.debug("the connection of %s ended early: %s", line.address, error)
        except Exception:
            log.exception("the connection of %s ended by an error of fedquilt's own", line.address)
        finally:
            self.connections.remove_connection(line.connection)  # before the descriptor gets another meaning
            line.close()
            self._places.release()

    def _serve_one_request(self, line: _Line) -> bool:
        """Serve one request. Return whether the connection may have another one."""
        exchange: Exchange | None = None
        try:
            exchange = _read_header(line)
            if exchange is None:
                return False
            self.connections.begin_request(line.connection)
            self._handler(exchange)
        except RefusedError as error:
            if exchange is None:
                exchange = Exchange(line, "GET", "", {}, reusable=False)
                exchange._unread = 1  # unknown: read and dropped
            exchange._unread = exchange._unread or exchange.size  # a handler may have read a part of the body
            if not exchange.answered:
                kind, body = self._error_body(str(error))
                exchange.answer(error.status, {"Content-Type": kind}, body)
        if exchange._unread:
            self.connections.await_request(line.connection)
            line.drain()
        return exchange.reusable


class _Line:
    """Socket of a connection, and the stream of bytes from it."""

    def __init__(self, sock: socket.socket, address: str, connection: Connection) -> None:
        self.sock, self.address, self.connection = sock, address, connection
        self.file: io.BufferedReader

    def open_stream(self, context: ssl.SSLContext | None) -> None:
        """Do the TLS handshake, if there is a context, and open the stream for reading."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
            try:
                self.sock.do_handshake()
            except ssl.SSLError:
                self.drain()  # the client reads why
                raise
        self.file = cast(io.BufferedReader, self.sock.makefile("rb", HEADER_BYTES))

    def drain(self) -> None:
        """Stop sending and drop what the client still sends: closing with bytes unread would lose the answer."""
        socket.socket.shutdown(self.sock, socket.SHUT_WR)
        left = LINGER_BYTES
        while left > 0 and (found := socket.socket.recv(self.sock, 64 * 1024)):
            left -= len(found)

    def close(self) -> None:
        if hasattr(self, "file"):
            self.file.close()  # the socket's descriptor is closed with the last of both
        self.sock.close()


def _read_header(line: _Line) -> Exchange | None:
    """Read the header of a request, or return None if the client sends no further request."""
    rows: list[bytes] = []
    left = HEADER_BYTES
    while True:
        row = line.file.readline(left)
        left -= len(row)
        if not row and not rows:
            return None
        if not row.endswith(b"\n"):
            too_long = left <= 0
            raise RefusedError(431 if too_long else 400, f"a request's header has at most {HEADER_BYTES} bytes")
        row = row.rstrip(b"\r\n")
        if not row:
            break
        rows.append(row)
    found = _REQUEST.match(rows[0]) if rows else None
    if found is None:
        raise RefusedError(400, "the first line of the request is not that of an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for row in rows[1:]:
        name, colon, value = row.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name in _ONCE):
            raise RefusedError(400, f"the header {name[:40]!r} is malformed or given twice")
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    reusable = found[3] == b"1" and "close" not in headers.get("connection", "").lower()
    return Exchange(line, found[1].decode(), found[2].decode("latin-1"), headers, reusable)


def _reset_connection(descriptor: int) -> None:
    """Reset a connection, so that another thread's reads and writes on it end. Unsent bytes are dropped."""
    sock = socket.socket(fileno=descriptor)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    finally:
        sock.detach()
