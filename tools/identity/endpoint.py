"""Enrolment and renewal of certificates, and the HTTPS server for them on the authority's machine.

The server needs the authority's key, so run it on a machine that devices reach and the internet does not. The log names
the device and the result of each request, and nothing else.
"""

from __future__ import annotations

import datetime
import logging
import signal
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedquilt.core import FedquiltError, JobError, WireError
from fedquilt.host.http_server import (
    ConnectionLimiter,
    ConnectionLimits,
    HttpExchange,
    HttpServer,
    RequestRefusedError,
)
from fedquilt.security import enrolment
from fedquilt.security.enrolment import SigningRequest, SigningResponse, is_renewal_due, key_fingerprint
from fedquilt.tools.identity.authority import DAY_S, CertificateAuthority, clock_s, parse_signing_request
from fedquilt.tools.identity.register import IssuedCertificate, format_time

log = logging.getLogger("fedquilt.enrol")


class EnrolmentService:
    def __init__(self, authority: CertificateAuthority, clock: Callable[[], float] = clock_s) -> None:
        self.authority, self._clock = authority, clock

    def enrol_device(self, request: SigningRequest) -> IssuedCertificate:
        """Redeem a token and return a certificate, or the earlier one if its response was lost.

        The device's certificates for other keys are revoked. Raise JobError if the request is refused.
        """
        now_s, register = self._clock(), self.authority.register
        if request.token is None:
            raise JobError("token is missing: request one from the operator (`fedquilt identity token`)")
        key = parse_signing_request(request.csr, request.device)
        fingerprint = key_fingerprint(key)
        with register.transaction():
            token = register.redeem_token(request.token, request.device, fingerprint, now_s)
            # only the holder of a token learns who has the name
            self.authority.require_enrollable(request.device, key, now_s)
            valid = register.list_valid_certificates(now_s, name=request.device)
            if token.used_s is not None and (issued_before := [cert for cert in valid if cert.key_id == fingerprint]):
                return issued_before[-1]  # the first response was lost
            if token.used_s is not None:
                raise JobError("certificate of this token has expired: request another token from the operator")
            if not token.is_exact and any(cert.key_id != fingerprint for cert in valid):
                raise JobError(
                    f"{request.device} is enrolled with another key: choose another id or, if this board replaces the "
                    f"other, create a token for exactly this id (`fedquilt identity token {request.device}`)"
                )
            return self._sign_and_revoke_others(request.device, key, now_s)

    def renew_certificate(self, request: SigningRequest, serial: str | None) -> IssuedCertificate:
        """Sign a certificate for the holder of certificate `serial`, or return the newest if none is due yet.

        Raise JobError if the certificate is unknown, revoked, expired or of another device or key.
        """
        now_s, register = self._clock(), self.authority.register
        with register.transaction():
            current = None if serial is None else register.find_by_serial(serial)
            if current is None or current.kind != "device":
                raise JobError("renewal without a device's certificate: enrol with a token instead")
            if current.name != request.device:
                raise JobError(f"{current.name} cannot renew the certificate of {request.device}")
            if current.revoked_s is not None:
                raise JobError(
                    f"certificate of {current.name} was revoked at {format_time(current.revoked_s)}: enrol it again"
                )
            key = parse_signing_request(request.csr, request.device)
            fingerprint = key_fingerprint(key)
            if fingerprint != current.key_id:
                raise JobError(f"{current.name} has a new key, which cannot renew its certificate: enrol with a token")
            self.authority.require_enrollable(current.name, key, now_s)
            valid = [
                cert
                for cert in register.list_valid_certificates(now_s, name=current.name)
                if cert.key_id == fingerprint
            ]
            if not valid:
                raise JobError(
                    f"certificate of {current.name} expired at {format_time(current.ends_s)}: enrol it again"
                )
            newest = valid[-1]
            times_s = (newest.issued_s, newest.ends_s, now_s)
            if not is_renewal_due(*(datetime.datetime.fromtimestamp(s, datetime.timezone.utc) for s in times_s)):
                return newest
            renewed = self.authority.sign_certificate(current.name, "device", key, now_s)
        log.info("renewed %s, certificate until %s", renewed.name, format_time(renewed.ends_s))
        return renewed

    def _sign_and_revoke_others(self, device: str, key: ec.EllipticCurvePublicKey, now_s: float) -> IssuedCertificate:
        other_certs = [
            cert
            for cert in self.authority.register.list_valid_certificates(now_s, name=device)
            if cert.key_id != key_fingerprint(key)
        ]
        for cert in other_certs:
            self.authority.register.revoke_certificate(cert.serial, now_s)
        certificate = self.authority.sign_certificate(device, "device", key, now_s)
        if other_certs:
            self.authority.write_crl(now_s)
            log.warning("%s has a new key, its old certificate is revoked: copy crl.pem to the brokers", device)
        log.info("enrolled %s, certificate until %s", device, format_time(certificate.ends_s))
        return certificate

    def sign_request(self, csr: str, device: str) -> IssuedCertificate:
        """Sign a request without a token, and revoke the device's certificates of other keys."""
        now_s, key = self._clock(), parse_signing_request(csr, device)
        with self.authority.register.transaction():
            self.authority.require_enrollable(device, key, now_s)
            return self._sign_and_revoke_others(device, key, now_s)

    def make_response(
        self, issue_certificate: Callable[[], IssuedCertificate], requester: str
    ) -> tuple[int, SigningResponse]:
        """Return HTTP status 200 with the issued certificate, or 403 or 500 with the reason, which is logged."""
        try:
            issued = issue_certificate()
            is_other_revoked = self.authority.register.has_revoked_certificate(issued.name, self._clock())
            return 200, SigningResponse(certificate=issued.pem, is_other_revoked=is_other_revoked)
        except JobError as error:
            log.warning("refused %s: %s", requester, error)
            return 403, SigningResponse(reason=str(error))
        except FedquiltError as error:
            log.error("%s got no certificate: %s", requester, error)
            return 500, SigningResponse(reason="enrolment server failed: see its log")


LIMITS: Final = ConnectionLimits(connections=64, per_address=32)
REQUEST_S: Final = 10.0  # limit for request and response
RENEWAL_S: Final = 30 * DAY_S  # of the endpoint's own certificate


class EnrolmentServer:
    def __init__(
        self,
        authority: CertificateAuthority,
        host: str,
        port: int,
        hosts: Sequence[str],
        *,
        clock: Callable[[], float] = clock_s,
        connections: ConnectionLimiter | None = None,
    ) -> None:
        self._service = EnrolmentService(authority, clock)
        self.hosts, self._clock = tuple(hosts), clock
        self._lock = threading.Lock()  # for the authority's register
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.verify_mode = ssl.CERT_OPTIONAL  # a device without certificate enrols by token
        self._context.load_verify_locations(authority.folder / "ca.crt")
        self._renew_certificate()
        self._http = HttpServer(
            host,
            port,
            self._route_request,
            connections=ConnectionLimiter(LIMITS, request_s=REQUEST_S) if connections is None else connections,
            context=self._current_context,
            error_body=lambda sentence: ("application/json", msgspec.json.encode(SigningResponse(reason=sentence))),
        )

    @property
    def port(self) -> int:
        return self._http.address[1]

    def start(self) -> None:
        self._http.start()

    def close(self) -> None:
        self._http.close()

    def _renew_certificate(self) -> None:
        authority = self._service.authority
        issued, key = authority.issue_with_new_key(
            "enrolment", "server", self._clock(), hosts=self.hosts, days=3 * RENEWAL_S / DAY_S
        )
        self._certified_s = self._clock()
        for name, data in (("enrolment.crt", issued.pem.encode()), ("enrolment.key", key)):
            enrolment.write_file_with_mode(authority.folder / name, data, 0o600)
        self._context.load_cert_chain(authority.folder / "enrolment.crt", authority.folder / "enrolment.key")

    def _current_context(self) -> ssl.SSLContext:
        with self._lock:
            if not 0 <= self._clock() - self._certified_s < RENEWAL_S:
                self._renew_certificate()
        return self._context

    # -- requests --

    def _route_request(self, exchange: HttpExchange) -> None:
        authority = self._service.authority
        match exchange.method, exchange.path:
            case "POST", enrolment.ENROL | enrolment.RENEW:
                self._answer_enrolment(exchange)
            case "GET" | "HEAD", enrolment.CRL:  # public: brokers elsewhere can fetch the revocation list
                try:
                    crl = (authority.folder / "crl.pem").read_bytes()
                except OSError as error:  # an OSError would look like a connection error
                    log.error("revocation list cannot be read: %s", error)
                    raise RequestRefusedError(500, "revocation list cannot be read: see the server's log") from None
                exchange.send_response(200, {"Content-Type": "application/x-pem-file"}, crl)
            case _:
                raise RequestRefusedError(404, f"unknown address {exchange.method} {exchange.path[:100]!r}")

    def _answer_enrolment(self, exchange: HttpExchange) -> None:
        try:
            request = enrolment.decode_message(exchange.read_body(enrolment.MAX_BODY_BYTES), SigningRequest)
        except WireError as error:
            raise RequestRefusedError(400, str(error)) from None
        assert isinstance(exchange.socket, ssl.SSLSocket)
        der = exchange.socket.getpeercert(binary_form=True)  # checked by the handshake
        serial = None if der is None else f"{x509.load_der_x509_certificate(der).serial_number:x}"
        requester = f"{request.device} at {exchange.client_address}"

        with self._lock:
            if exchange.path == enrolment.ENROL:
                status, response = self._service.make_response(lambda: self._service.enrol_device(request), requester)
            else:
                status, response = self._service.make_response(
                    lambda: self._service.renew_certificate(request, serial), requester
                )
        exchange.send_response(status, {"Content-Type": "application/json"}, msgspec.json.encode(response))


def serve_until_signal(endpoint: EnrolmentServer, print_line: Callable[[str], None]) -> None:
    stopped = threading.Event()
    old_handler = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    print_line(
        f"enrolling on port {endpoint.port}: boards call https://{endpoint.hosts[0]}:{endpoint.port}; Ctrl-C ends it"
    )
    endpoint.start()
    try:
        stopped.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        endpoint.close()
