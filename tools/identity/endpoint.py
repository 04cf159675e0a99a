"""HTTPS server for enrolment on the authority's machine.

The server needs the authority's key, so it belongs on a machine that devices reach and the internet does not. The log
contains who received a certificate or why not, and nothing else of a request.
"""

from __future__ import annotations

import logging
import signal
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from cryptography import x509

from fedquilt.core import LinkError, WireError
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits, HttpExchange, HttpServer, RequestRefusedError
from fedquilt.security import enrolment
from fedquilt.security.enrolment import SigningRequest, SigningResponse
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, clock_s
from fedquilt.tools.identity.enrolment_service import EnrolmentService, make_enrolment_response

log = logging.getLogger("fedquilt.enrol")

LIMITS: Final = ConnectionLimits(connections=64, per_address=32)
REQUEST_S: Final = 10.0  # for a request of at most 16 KiB and the answer
RENEW_S: Final = 30 * DAY_S  # of the endpoint's own certificate


class EnrolmentServer:
    """HTTPS server for enrolment and renewal at `host`:`port`.

    Args:
        authority: Authority that signs the certificates.
        host: Address to listen on.
        port: Port to listen on.
        hosts: Names and addresses in the URLs that devices use.
        days: Validity of the certificates.
        clock: Function that returns the current time.
        connections: Limits of the connections.

    Raises:
        LinkError: If the server cannot listen there.
    """

    def __init__(
        self,
        authority: CertificateAuthority,
        host: str,
        port: int,
        hosts: Sequence[str],
        *,
        days: float | None = None,
        clock: Callable[[], float] = clock_s,
        connections: ConnectionLimiter | None = None,
    ) -> None:
        self._desk = EnrolmentService(authority, days, clock)
        self.hosts, self._clock = tuple(hosts), clock
        self._lock = threading.Lock()  # for the authority's register
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.verify_mode = ssl.CERT_OPTIONAL  # who enrols has none yet
        self._context.load_verify_locations(authority.folder / "ca.crt")
        self._renew_certificate()
        try:
            self._http = HttpServer(
                host,
                port,
                self._route_request,
                connections=ConnectionLimiter(LIMITS, request_s=REQUEST_S) if connections is None else connections,
                context=self._current_context,
                error_body=lambda sentence: ("application/json", msgspec.json.encode(SigningResponse(reason=sentence))),
            )
        except OSError as error:
            raise LinkError(f"cannot listen on {host}:{port} ({error}): choose another, or stop what uses it") from None

    @property
    def port(self) -> int:
        return self._http.address[1]

    def start(self) -> None:
        self._http.start()

    def close(self) -> None:
        self._http.close()

    def _renew_certificate(self) -> None:
        """Issue and load a new certificate and key of the endpoint itself."""
        authority = self._desk.authority
        issued, key = authority.issue_with_new_key(
            "enrolment", "server", self._clock(), hosts=self.hosts, days=3 * RENEW_S / DAY_S
        )
        self._certified_s = self._clock()
        for name, data in (("enrolment.crt", issued.pem.encode()), ("enrolment.key", key)):
            enrolment.write_file_with_mode(authority.folder / name, data, 0o600)
        self._context.load_cert_chain(authority.folder / "enrolment.crt", authority.folder / "enrolment.key")

    def _current_context(self) -> ssl.SSLContext:
        """Return the TLS context, with a new certificate if the present one is due for renewal."""
        with self._lock:
            if not 0 <= self._clock() - self._certified_s < RENEW_S:
                self._renew_certificate()
        return self._context

    # -- requests --

    def _route_request(self, exchange: HttpExchange) -> None:
        authority = self._desk.authority
        match exchange.method, exchange.path:
            case "POST", enrolment.ENROL | enrolment.RENEW:
                self._answer_enrolment(exchange)
            case "GET" | "HEAD", enrolment.CRL:  # public: brokers elsewhere can fetch the revocation list
                try:
                    crl = (authority.folder / "crl.pem").read_bytes()
                except OSError as error:  # raised further, it would count as the connection's
                    log.error("the revocation list cannot be read: %s", error)
                    raise RequestRefusedError(
                        500, "the revocation list cannot be read: see the endpoint's log"
                    ) from None
                exchange.send_response(200, {"Content-Type": "application/x-pem-file"}, crl)
            case _:
                raise RequestRefusedError(404, "there is nothing at this address")

    def _answer_enrolment(self, exchange: HttpExchange) -> None:
        """Enrol a device or renew its certificate, and send the outcome as JSON."""
        try:
            request = enrolment.decode_message(exchange.read_body(enrolment.MAX_BODY), SigningRequest)
        except WireError as error:
            raise RequestRefusedError(400, str(error)) from None
        assert isinstance(exchange.socket, ssl.SSLSocket)
        der = exchange.socket.getpeercert(binary_form=True)  # checked by the handshake
        serial = None if der is None else f"{x509.load_der_x509_certificate(der).serial_number:x}"
        who = f"{request.device} at {exchange.client_address}"

        with self._lock:
            if exchange.path == enrolment.ENROL:
                status, said = make_enrolment_response(lambda: self._desk.enrol_device(request), who)
            else:
                status, said = make_enrolment_response(lambda: self._desk.renew_certificate(request, serial), who)
        exchange.send_response(status, {"Content-Type": "application/json"}, msgspec.json.encode(said))


def serve_until_signal(endpoint: EnrolmentServer, say: Callable[[str], None]) -> None:
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    say(f"enrolling on port {endpoint.port}: boards call https://{endpoint.hosts[0]}:{endpoint.port}; Ctrl-C ends it")
    endpoint.start()
    try:
        stopped.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        endpoint.close()
