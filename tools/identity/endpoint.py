"""The enrolment endpoint: HTTPS in one thread, from the standard library, beside the coordinator.

Bounded on purpose: one connection at a time, SECONDS for all of it, MAX_BODY bytes, a few connections
per address and minute. Nothing is logged but who got a certificate or why not. It needs the
authority's key, so it belongs on a machine that boards reach and the world does not.
"""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

import msgspec
from cryptography import x509

from fedquilt import enrolment
from fedquilt.core import LinkError, WireError
from fedquilt.enrolment import Answer, Request
from fedquilt.tools.identity.authority import DAY_S, Authority, clock_s
from fedquilt.tools.identity.desk import Desk, answer
from fedquilt.transport import mqtt_errors

log = logging.getLogger("fedquilt.enrol")

SECONDS: Final = 5.0  # a whole connection: handshake, request and answer
BURST: Final = 30.0  # connections an address may make at once
REFILL_S: Final = 2.0  # until it may make one more
ADDRESSES: Final = 1024  # remembered; the longest unseen is forgotten
RENEW_S: Final = 30 * DAY_S  # of the endpoint's own certificate


class Allowance:
    """How often an address may connect: a bucket of BURST that fills by one each REFILL_S."""

    def __init__(self, burst: float = BURST, refill_s: float = REFILL_S, most: int = ADDRESSES) -> None:
        self._burst, self._refill_s, self._most = burst, refill_s, most
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> (left, when), the latest last

    def take(self, address: str, now_s: float) -> bool:
        """Whether it may connect now."""
        left, when_s = self._left.pop(address, (self._burst, now_s))
        left = min(left + max(now_s - when_s, 0.0) / self._refill_s, self._burst)
        self._left[address] = (left - 1 if left >= 1 else left, now_s)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return left >= 1


class _Bounded(io.RawIOBase):
    """Reads from a socket until a moment, however slowly bytes come."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    connection: ssl.SSLSocket
    server_version, sys_version = "fedquilt", ""

    def setup(self) -> None:
        until_s = time.monotonic() + self.server.seconds
        self.request.settimeout(self.server.seconds)
        try:
            self.request.do_handshake()
        except ssl.SSLError:
            self._linger(until_s)
            raise
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection, until_s))

    def _linger(self, until_s: float) -> None:
        """Let the other side read TLS's alert: closing with its request unread would reset the connection."""
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)
            while (left_s := min(until_s - time.monotonic(), 1.0)) > 0:
                self.request.settimeout(left_s)
                if not self.request.recv(4096):
                    return

    def do_POST(self) -> None:
        if self.path not in (enrolment.ENROL, enrolment.RENEW):
            return self._say(404, Answer(reason="there is nothing at this address"))
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > enrolment.MAX_BODY:
            return self._say(413, Answer(reason=f"a request has at most {enrolment.MAX_BODY} bytes, and says how many"))
        try:
            request = enrolment.decode(self.rfile.read(int(length)), Request)
        except WireError as error:
            return self._say(400, Answer(reason=str(error)))
        who = f"{request.device} at {self.client_address[0]}"
        if self.path == enrolment.ENROL:
            return self._say(*answer(lambda: self.server.desk.enrol(request), who))
        self._say(*answer(lambda: self.server.desk.renew(request, self._serial()), who))

    def do_GET(self) -> None:
        """The revocation list, which is public: brokers elsewhere can fetch it."""
        if self.path != enrolment.CRL:
            return self._say(404, Answer(reason="there is nothing at this address"))
        self._send(200, "application/x-pem-file", (self.server.desk.authority.folder / "crl.pem").read_bytes())

    def _serial(self) -> str | None:
        """Serial number of the client's certificate, checked by the handshake; None: it sent none."""
        der = self.connection.getpeercert(binary_form=True)
        return None if der is None else f"{x509.load_der_x509_certificate(der).serial_number:x}"

    def _say(self, status: int, said: Answer) -> None:
        self._send(status, "application/json", msgspec.json.encode(said))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)  # the request line: a path, never a body


class Endpoint(HTTPServer):
    """Listens on `host`:`port`; `hosts` are the names and addresses that boards may call it by.

    Raises:
        LinkError: it cannot listen there.
    """

    request_queue_size = 16
    timeout = 1.0
    seconds = SECONDS

    def __init__(
        self,
        authority: Authority,
        host: str,
        port: int,
        hosts: Sequence[str],
        *,
        days: float | None = None,
        clock: Callable[[], float] = clock_s,
    ) -> None:
        self.desk = Desk(authority, days, clock)
        self.hosts, self._clock = tuple(hosts), clock
        self._allowance = Allowance()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.verify_mode = ssl.CERT_OPTIONAL  # who enrols has none yet
        self._context.load_verify_locations(authority.folder / "ca.crt")
        self._certify()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise LinkError(f"cannot listen on {host}:{port} ({error}): choose another, or stop what uses it") from None

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self.server_address[1])

    def _certify(self) -> None:
        """A new certificate of the endpoint's own; its key is never kept longer than that."""
        authority = self.desk.authority
        issued, key = authority.issue("enrolment", "server", self._clock(), hosts=self.hosts, days=3 * RENEW_S / DAY_S)
        self._certified_s = self._clock()
        for name, data in (("enrolment.crt", issued.pem.encode()), ("enrolment.key", key)):
            enrolment.keep(authority.folder / name, data, 0o600)
        self._context.load_cert_chain(authority.folder / "enrolment.crt", authority.folder / "enrolment.key")

    def service_actions(self) -> None:
        """Renew its own certificate when due."""
        if not 0 <= self._clock() - self._certified_s < RENEW_S:
            self._certify()

    def get_request(self) -> tuple[Any, Any]:
        """Wrap a new connection in TLS; the handshake is left to its thread."""
        sock, address = super().get_request()
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the client's address may send another request now."""
        return self._allowance.take(client_address[0], time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # TLS's errors and time-outs are some
            log.info("a connection of %s ended early: %s", client_address[0], mqtt_errors.why(error))
        else:
            log.exception("a connection of %s ended", client_address[0])


def serve(endpoint: Endpoint, say: Callable[[str], None]) -> None:
    """Answer until SIGTERM or SIGINT."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    say(f"enrolling on port {endpoint.port}: boards call https://{endpoint.hosts[0]}:{endpoint.port}; Ctrl-C ends it")
    try:
        while not stopped.is_set():
            endpoint.handle_request()
            endpoint.service_actions()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        endpoint.server_close()
