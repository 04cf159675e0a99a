"""Key exchange of coordinator and device through an untrusted broker.

Both have a certificate of the fleet's authority. They perform a TLS 1.3 handshake, each flight in one message. The
coordinator then sends the key of a `Session` inside this TLS connection, which is not used afterwards. Only Python's
`ssl` is required, so that a device needs no other package and no more memory than for the broker's TLS.

    device   ClientHello                            -> coordinator   flight 0
    device <- ServerHello, certificate, Finished       coordinator   flight 1
    device   certificate, Finished                  -> coordinator   flight 2
    device <- the session's name and key               coordinator   flight 3

A flight that is replayed, changed or lost ends the attempt and has no other effect.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Annotated, Final, cast

import msgspec
from msgspec import Meta

from fedquilt.core import DECODE_ERRORS, Count, JobError, SiteRight, WireError
from fedquilt.security.certificates import COORDINATOR
from fedquilt.transport.mqtt.broker import Broker, describe_exception, refuse_passphrase
from fedquilt.transport.mqtt.connection import OUT_OF_DATE

SITE_URI_PREFIX: Final = "fedquilt:site:"  # prefix of a URI in a site's certificate: "fedquilt:site:40:cam-*,door-7"
OBSERVER_UNIT: Final = "observer"  # organisational unit in the certificate of an observer
MAX_FLIGHT_BYTES: Final = 32 * 1024  # limit on a TLS flight, where certificate chains have 1 to 5 KB
_ISSUE_FIX: Final = "`fedquilt identity issue coordinator` makes one"


class SessionGrant(msgspec.Struct, frozen=True):
    session: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    key: bytes
    epoch: Count  # number of this start of the coordinator


class LinkIdentity:
    """Certificate and key of this process, and the fleet's authority. Changed files are read again."""

    def __init__(self, broker: Broker) -> None:
        if broker.ca is None or broker.cert is None or broker.key is None:
            raise JobError(
                "[broker] has cert and key without ca, so that senders of messages cannot be verified: set ca to the "
                "certificate of the fleet's authority (the file may also contain the broker's authority)"
            )
        self._ca, self._cert, self._key = broker.ca, broker.cert, broker.key
        # server -> (file times, context)
        self._cached_contexts: dict[bool, tuple[tuple[int, ...], ssl.SSLContext]] = {}

    def start_as_device(self) -> Handshake:
        return Handshake(self.tls_context(server=False), server=False)

    def start_as_coordinator(self) -> Handshake:
        return Handshake(self.tls_context(server=True), server=True)

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Return a TLS context with which both sides verify certificates but no host names."""
        try:
            files = tuple(os.stat(path).st_mtime_ns for path in (self._ca, self._cert, self._key))
        except OSError as error:
            raise JobError(
                f"{self._ca}, {self._cert} or {self._key} cannot be read: {describe_exception(error)}"
            ) from None
        cached = self._cached_contexts.get(server)
        if cached is None or cached[0] != files:
            cached = self._cached_contexts[server] = (files, self._load_context(server))
        return cached[1]

    def require_coordinator_certificate(self) -> float:
        """Return when this certificate expires, in Unix seconds. Raise JobError if devices would reject it."""
        coordinator_side, device_side = self.start_as_coordinator(), self.start_as_device()
        try:
            device_side.step(coordinator_side.step(device_side.step(b"")))
        except WireError as error:
            raise JobError(
                f"certificate {self._cert} would be rejected by devices as the coordinator's ({error}): {_ISSUE_FIX}"
            ) from None
        if device_side.peer_name != COORDINATOR:
            raise JobError(
                f"certificate {self._cert} is for {device_side.peer_name!r}, not for {COORDINATOR!r}: {_ISSUE_FIX}"
            )
        return float(ssl.cert_time_to_seconds(device_side.peer_not_after))

    def _load_context(self, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a peer is verified by its common name, not by its address
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self._ca)
            context.load_cert_chain(self._cert, self._key, password=refuse_passphrase)
        except OSError as error:  # the base class of OpenSSL's errors
            raise JobError(
                f"{self._ca}, {self._cert} or {self._key} cannot be used: {describe_exception(error)}"
            ) from None
        if server:
            context.num_tickets = 0  # TLS sessions are not resumed
        return context


class Handshake:
    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.attempt = secrets.token_hex(8)
        self.flight = 1 if server else 0  # number of this side's next flight
        self.is_done = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)

    def step(self, flight: bytes) -> bytes:
        """Process the peer's flight and return the next one. A device starts with b"".

        After a WireError, send the peer the result of `take_alert`.
        """
        self._in.write(flight)
        try:
            self._tls.do_handshake()
            self.is_done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise WireError(_describe_ssl_error(error)) from None
        return self._out.read()

    def take_alert(self) -> bytes:
        return self._out.read()

    def create_session(self, epoch: int) -> tuple[Session, bytes]:
        grant = SessionGrant(secrets.token_hex(8), secrets.token_bytes(32), epoch)
        self._tls.write(msgspec.json.encode(grant))
        return Session(grant), self._out.read()

    def session_from_flight(self, flight: bytes) -> Session:
        """Return the session in the coordinator's last flight, or raise WireError."""
        self._in.write(flight)
        try:
            return Session(msgspec.json.decode(self._tls.read(MAX_FLIGHT_BYTES), type=SessionGrant))
        except ssl.SSLError as error:
            raise WireError(_describe_ssl_error(error)) from None
        except DECODE_ERRORS as error:
            raise WireError(f"coordinator sent no valid session: {error}") from None

    @property
    def peer_name(self) -> str:
        return common_name_of_peer(self._tls)

    @property
    def peer_right(self) -> SiteRight | None:
        """Right of a site in the peer's certificate, or None. Raises WireError if the right is malformed."""
        names = cast(Sequence[tuple[str, str]], (self._tls.getpeercert() or {}).get("subjectAltName", ()))
        uris = [value for kind, value in names if kind == "URI" and value.startswith(SITE_URI_PREFIX)]
        return right_from_uri(uris[0]) if uris else None

    @property
    def peer_not_after(self) -> str:
        return str((self._tls.getpeercert() or {}).get("notAfter", ""))


def common_name_of_peer(tls: ssl.SSLObject | ssl.SSLSocket) -> str:
    """Return the common name in a peer's certificate, or "" for observers and without exactly one name."""
    certificate = tls.getpeercert() or {}
    subject = cast(Sequence[Sequence[tuple[str, str]]], certificate.get("subject", ()))
    parts = [pair for group in subject for pair in group]
    names = [value for kind, value in parts if kind == "commonName"]
    is_observer = ("organizationalUnitName", OBSERVER_UNIT) in parts
    return names[0] if len(names) == 1 and not is_observer else ""


def uri_from_right(site_right: SiteRight) -> str:
    return f"{SITE_URI_PREFIX}{site_right.most}:{','.join(site_right.boards)}"


def right_from_uri(uri: str) -> SiteRight:
    max_devices, _, boards = uri.removeprefix(SITE_URI_PREFIX).partition(":")
    try:
        return msgspec.convert({"most": max_devices, "boards": boards.split(",")}, SiteRight, strict=False)
    except DECODE_ERRORS as error:
        raise WireError(f"certificate of the site has an invalid right {uri[:100]!r}: {error}") from None


class Session:
    """Session of the coordinator with one device: common key, and latest message numbers.

    A message contains its number and an HMAC-SHA256 of topic, number and payload. The topic names fleet, device,
    direction and kind. A restarted process has no session, so earlier messages are invalid afterwards.
    """

    def __init__(self, grant: SessionGrant) -> None:
        self.name, self.epoch, self._key = grant.session, grant.epoch, grant.key
        self.ends_s = math.inf  # by the clock of the link
        self._sent_number = 0
        self._latest_numbers: dict[str, int] = {}  # subtopic -> number of the latest message

    def sign(self, topic: str, payload: bytes) -> tuple[int, bytes]:
        """Return the number and the authentication code of the next outgoing message."""
        self._sent_number += 1
        return self._sent_number, self._authentication_code(topic, self._sent_number, payload)

    def verify(self, topic: str, subtopic: str, number: int, code: bytes, payload: bytes) -> None:
        """Raise WireError if a message is forged, or older than the latest message of its subtopic.

        The latest message itself is permitted again, because QoS 1 may repeat messages.
        """
        if not hmac.compare_digest(code, self._authentication_code(topic, number, payload)):
            raise WireError("forged: topic, number or content do not match the signature")
        if number < self._latest_numbers.get(subtopic, 0):
            raise WireError(f"replayed: {subtopic} number {number} came after number {self._latest_numbers[subtopic]}")
        self._latest_numbers[subtopic] = number

    def _authentication_code(self, topic: str, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, b"%b\0%d\0%b" % (topic.encode(), number, payload), "sha256")


def _describe_ssl_error(error: ssl.SSLError) -> str:
    description = getattr(error, "verify_message", "") or describe_exception(error)
    if getattr(error, "verify_code", 0) in OUT_OF_DATE:
        time_text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        description = (
            f"{description} at {time_text}, this machine's time: set the clock, or renew the peer's certificate"
        )
    return f"handshake failed: {description}"
