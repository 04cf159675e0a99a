"""A runner's addresses, on the standard library's server: a thread for each of a few connections.

POST /v1/classify   bytes of an image, WAV file, text or .npy: one answer; of an .npz or CSV: one for each example
POST /v1/label      {"id": ..., "label": name or number}: the truth about an answer
GET  /v1/health     what runs, how often, how fast, how far inputs have moved

Every answer is JSON; what is refused is {"error": a sentence}.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

from fedquilt.core import UNDECODABLE, DataError, FedquiltError
from fedquilt.tools.dash import guard
from fedquilt.tools.runner.service import BODY_MOST, Service, UnknownAnswerError

log = logging.getLogger("fedquilt.runner")

BODIES_MOST: Final = 64 << 20  # bytes of all requests that are being read or wait
SMALL_MOST: Final = 4096  # bytes of a label
CONNECTIONS: Final = 64  # further ones are refused with 503
QUIET_S: Final = 10.0  # without a byte, after which a connection is closed
LINGER_S: Final = 3.0  # for which the rest of a refused request is read, so that its sender sees why
LINGER_QUIET_S: Final = 0.5  # without a byte meanwhile
LINGER_BYTES: Final = 256 << 20


class RefusedError(Exception):
    """A request that is not carried out, with its HTTP status; its connection ends."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class _Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    label: str | int


class Server(ThreadingHTTPServer):
    """Listens for a service.

    Args:
        service: that answers.
        host, port: to listen at; port 0 for any that is free.
        anywhere: whether it may be called by any name, and not by addresses and localhost alone.

    Raises:
        OSError: nothing can listen there.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, service: Service, host: str, port: int, *, anywhere: bool = False) -> None:
        self.service, self.anywhere = service, anywhere
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self.busy = self._bytes = 0  # requests that are being answered; bytes of their bodies
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """Address that it listens at."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else str(host)}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, or refuse it if there are too many."""
        if not self._places.acquire(blocking=False):
            body = b'{"error": "too many connections: try again"}'
            with contextlib.suppress(OSError):
                request.settimeout(0.5)
                request.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a connection ended with; those that go away are nobody's fault."""
        log.debug("a connection ended with an error", exc_info=True)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as `busy`."""
        with self._lock:
            self.busy += 1
        try:
            yield
        finally:
            with self._lock:
                self.busy -= 1

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Hold bytes of BODIES_MOST.

        Raises:
            RefusedError: too many are held.
        """
        with self._lock:
            if self._bytes + size > BODIES_MOST:
                raise RefusedError(503, "too many requests wait: try again")
            self._bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= size


class _Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "fedquilt", ""
    timeout = QUIET_S
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer's head and body leave together
    server: Server

    def do_GET(self) -> None:
        """Answer a question."""
        self._answered(self._get)

    def do_POST(self) -> None:
        """Answer an example, or take a label."""
        self._answered(self._post)

    def _get(self) -> Any:
        self._require_guest()
        if self.path != "/v1/health":
            raise RefusedError(404, f"there is no {self.path[:100]!r}; there are /v1/classify, /v1/label, /v1/health")
        return self.server.service.health()

    def _post(self) -> Any:
        self._require_guest()
        match self.path:
            case "/v1/classify":
                size = self._size(BODY_MOST)
                with self.server.room(size):
                    return self.server.service.asked(self._body(size))
            case "/v1/label":
                try:
                    label = msgspec.json.decode(self._body(self._size(SMALL_MOST)), type=_Label)
                except UNDECODABLE as error:
                    raise RefusedError(400, f'a label is {{"id": ..., "label": ...}}: {error}') from None
                return {"right": self.server.service.label(label.id, label.label)}
        raise RefusedError(404, f"nothing is posted to {self.path[:100]!r}; there are /v1/classify and /v1/label")

    def _answered(self, carry_out: Callable[[], Any]) -> None:
        with self.server.answering():
            self._answer(carry_out)

    def _answer(self, carry_out: Callable[[], Any]) -> None:
        try:
            status, told = 200, carry_out()
        except RefusedError as error:
            self.close_connection = True  # the body may be unread: no next request begins with it
            status, told = error.status, {"error": str(error)}
        except UnknownAnswerError as error:
            status, told = 404, {"error": str(error)}
        except DataError as error:
            status, told = 400, {"error": str(error)}
        except FedquiltError as error:
            status, told = 500, {"error": str(error)}
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except Exception as error:
            log.exception("no answer to a request")
            status, told = 500, {"error": f"an error of fedquilt's own ({type(error).__name__}); the log says more"}
        self._say(status, told)

    def _say(self, status: int, told: Any) -> None:
        body = msgspec.json.encode(told)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    # -- what is asked --

    def _require_guest(self) -> None:
        """Refuse what a browser sends for somebody else's page.

        Raises:
            RefusedError: it comes from there, or by a name that is not this runner's.
        """
        headers = {name.lower(): value for name, value in self.headers.items()}
        called = headers.get("host", "").rpartition(":")[0].lower()
        if guard.refusal(headers, (called,) if self.server.anywhere else ()) is not None:
            raise RefusedError(
                403, "this comes from somebody else's page, or calls the runner by a name: use its address"
            )

    def _size(self, most: int) -> int:
        """Bytes of the body.

        Raises:
            RefusedError: it does not say, or they are more than `most`.
        """
        given = self.headers.get("content-length")
        if given is None or not given.isascii() or not given.isdigit() or "transfer-encoding" in self.headers:
            raise RefusedError(411, "a request has to say how many bytes follow (Content-Length)")
        if len(given) > 15 or int(given) > most:
            raise RefusedError(413, f"{given[:20]} bytes in one request: at most {most} are read")
        return int(given)

    def _body(self, size: int) -> bytes:
        found = self.rfile.read(size)
        if len(found) < size:
            raise RefusedError(400, f"the request ended after {len(found)} of {size} bytes")
        return found

    # -- the standard library's --

    def handle_expect_100(self) -> bool:
        """Let a body come, unless it is too large to be read."""
        given = self.headers.get("content-length", "")
        if given.isascii() and given.isdigit() and int(given[:15]) > BODY_MOST:
            return True  # what follows refuses it
        return super().handle_expect_100()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._say(code, {"error": message or "this is no request that is answered here"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log at the lowest level only."""
        log.debug(format, *args)

    def finish(self) -> None:
        """End the connection; of a request that was refused the rest is read, so that its sender sees the answer."""
        super().finish()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_QUIET_S)
            end_s, left = time.monotonic() + LINGER_S, LINGER_BYTES
            while left > 0 and time.monotonic() < end_s and (found := self.connection.recv(1 << 16)):
                left -= len(found)
