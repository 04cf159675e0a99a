"""Agreement of coordinator and board on a secret key, through a broker that neither trusts.

Both hold a certificate of the fleet's authority. They shake hands by TLS 1.3, whose flights travel in messages, each
in one; the coordinator then gives the board the key of a `Session` inside of that TLS connection, and the connection
has served its purpose. What follows is only Python's own `ssl`: a board needs no other package, and its daemon holds
no more memory than for the broker's TLS.

    board   ClientHello                            -> coordinator   flight 0
    board <- ServerHello, certificate, Finished       coordinator   flight 1
    board   certificate, Finished                  -> coordinator   flight 2
    board <- the session's name and key               coordinator   flight 3

A flight that is replayed, changed or lost ends the attempt and nothing else.
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

from fedquilt.core import UNDECODABLE, Count, JobError, SiteRight, WireError
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt_errors import OUT_OF_DATE, why

COORDINATOR: Final = "coordinator"  # the common name of its certificate
SITE: Final = "fedquilt:site:"  # beginning of the URI in a site's certificate: "fedquilt:site:40:cam-*,door-7"
OBSERVER: Final = "observer"  # the organisational unit in the certificate of who only watches
FLIGHT_BYTES: Final = 32 * 1024  # the most that TLS may want to send at once; chains of certificates have 1 to 5 KB
_ISSUE: Final = "`fedquilt ca issue coordinator` makes one, in place of an earlier version's too"


class Grant(msgspec.Struct, frozen=True):
    """What the coordinator gives a board inside of TLS."""

    session: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    key: bytes
    epoch: Count  # number of this start of the coordinator


class Identity:
    """One side's certificate and key, and the authority that the other's must be of. Renewed files are read anew.

    Raises:
        JobError: there is no authority to check the other side by.
    """

    def __init__(self, broker: Broker) -> None:
        if broker.ca is None or broker.cert is None or broker.key is None:
            raise JobError(
                "with a certificate of its own this side checks who sends what, and without ca it cannot: give the "
                "certificate of the fleet's authority as ca (one file may hold it together with the broker's)"
            )
        self._ca, self._cert, self._key = broker.ca, broker.cert, broker.key
        self._known: dict[int, tuple[tuple[int, ...], ssl.SSLContext]] = {}  # by protocol, of files as they were

    def board(self) -> Handshake:
        """Begin as a board."""
        return Handshake(self._context(ssl.PROTOCOL_TLS_CLIENT), server=False)

    def coordinator(self) -> Handshake:
        """Begin as the coordinator."""
        return Handshake(self._context(ssl.PROTOCOL_TLS_SERVER), server=True)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS of a connection of its own: either side shows its certificate and checks the other's.

        Whose that is, `peer_of` says: no host's name is checked.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)

    def require_coordinator(self) -> float:
        """Check that boards will take this certificate for the coordinator's; returns its end, seconds since 1970.

        Raises:
            JobError: they will not; says what is wrong with it.
        """
        ours = self.coordinator()
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        theirs = Handshake(context, server=False)
        try:
            theirs.step(ours.step(theirs.step(b"")))
        except WireError as error:
            raise JobError(f"no board will take {self._cert} for the coordinator's ({error}): {_ISSUE}") from None
        if theirs.peer != COORDINATOR:
            raise JobError(f"{self._cert} is the certificate of {theirs.peer!r}, not of {COORDINATOR!r}: {_ISSUE}")
        return float(ssl.cert_time_to_seconds(theirs.ends))

    def _context(self, protocol: int) -> ssl.SSLContext:
        try:
            files = tuple(os.stat(path).st_mtime_ns for path in (self._ca, self._cert, self._key))
        except OSError as error:
            raise JobError(f"{self._ca}, {self._cert} or {self._key} cannot be read: {why(error)}") from None
        known = self._known.get(protocol)
        if known is None or known[0] != files:
            known = self._known[protocol] = (files, self._read(protocol))
        return known[1]

    def _read(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a peer is known by its common name, not by where it can be reached
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self._ca)
            context.load_cert_chain(self._cert, self._key, password=_no_passphrase)
        except OSError as error:  # OpenSSL's own errors are some
            raise JobError(f"{self._ca}, {self._cert} or {self._key} cannot be used: {why(error)}") from None
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nothing is resumed
        return context


class Handshake:
    """One side of an attempt."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.attempt = secrets.token_hex(8)
        self.flight = 1 if server else 0  # the next that this side sends
        self.done = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)

    def step(self, flight: bytes) -> bytes:
        """Take a flight of the other side (b"": begin) and return the next of this side.

        Raises:
            WireError: it does not fit, or a certificate is not to be trusted; `alert` then has what is to be sent.
        """
        self._in.write(flight)
        try:
            self._tls.do_handshake()
            self.done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise WireError(_said(error)) from None
        return self._out.read()

    def alert(self) -> bytes:
        """What TLS says to the other side about an error; b"": nothing."""
        return self._out.read()

    def grant(self, epoch: int) -> tuple[Session, bytes]:
        """A new session, and the flight that gives it to the board."""
        grant = Grant(secrets.token_hex(8), secrets.token_bytes(32), epoch)
        self._tls.write(msgspec.json.encode(grant))
        return Session(grant), self._out.read()

    def granted(self, flight: bytes) -> Session:
        """The session that the coordinator gives.

        Raises:
            WireError: it gives none, or refuses this side's certificate.
        """
        self._in.write(flight)
        try:
            return Session(msgspec.json.decode(self._tls.read(FLIGHT_BYTES), type=Grant))
        except ssl.SSLError as error:
            raise WireError(_said(error)) from None
        except UNDECODABLE as error:
            raise WireError(f"no session was given: {error}") from None

    @property
    def peer(self) -> str:
        """The common name in the other side's certificate; "": it has none, or is an observer's."""
        return peer_of(self._tls)

    @property
    def peer_right(self) -> SiteRight | None:
        """Site right in the other side's certificate, or None if it states none.

        Raises:
            WireError: If the certificate states a right that cannot be read.
        """
        names = cast(Sequence[tuple[str, str]], (self._tls.getpeercert() or {}).get("subjectAltName", ()))
        found = [value for kind, value in names if kind == "URI" and value.startswith(SITE)]
        return right_from_uri(found[0]) if found else None

    @property
    def ends(self) -> str:
        """When the other side's certificate ends, as Python's `ssl` says it."""
        return str((self._tls.getpeercert() or {}).get("notAfter", ""))


def peer_of(tls: ssl.SSLObject | ssl.SSLSocket) -> str:
    """The common name in the other side's certificate; "": it has none, or is an observer's."""
    told = tls.getpeercert() or {}
    subject = cast(Sequence[Sequence[tuple[str, str]]], told.get("subject", ()))
    parts = [pair for several in subject for pair in several]
    names = [value for kind, value in parts if kind == "commonName"]
    watches = ("organizationalUnitName", OBSERVER) in parts
    return names[0] if len(names) == 1 and not watches else ""


def uri_from_right(right: SiteRight) -> str:
    """Return the URI that states a right in a certificate."""
    return f"{SITE}{right.most}:{','.join(right.boards)}"


def right_from_uri(uri: str) -> SiteRight:
    """Return the right that a URI states.

    Raises:
        WireError: If the URI states none.
    """
    most, _, boards = uri.removeprefix(SITE).partition(":")
    try:
        return msgspec.convert({"most": most, "boards": boards.split(",")}, SiteRight, strict=False)
    except UNDECODABLE as error:
        raise WireError(f"the site's right {uri[:100]!r} in its certificate cannot be read: {error}") from None


class Session:
    """Session of one coordinator with one board: their common key, and the numbers of the latest messages each way.

    A message under it carries its number and HMAC-SHA256 over topic, number and bytes. The topic names fleet, device,
    direction and kind. Who restarts has no session any more, so nothing from before counts afterwards.
    """

    def __init__(self, grant: Grant) -> None:
        self.name, self.epoch, self._key = grant.session, grant.epoch, grant.key
        self.ends_s = math.inf  # by the clock of who sets it
        self._sent = 0
        self._taken: dict[str, int] = {}  # leaf -> number of the latest message

    def closed(self, topic: str, payload: bytes) -> tuple[int, bytes]:
        """Number and authentication code of a message that is sent now."""
        self._sent += 1
        return self._sent, self._code(topic, self._sent, payload)

    def require(self, topic: str, leaf: str, number: int, code: bytes, payload: bytes) -> None:
        """Check a message; the latest of a kind may come again, as brokers repeat messages.

        Raises:
            WireError: it is not what the other side sent on this topic, or is older than one that has come.
        """
        if not hmac.compare_digest(code, self._code(topic, number, payload)):
            raise WireError("forged: it was not sent so, or not here, by who holds the session's key")
        if number < self._taken.get(leaf, 0):
            raise WireError(f"replayed: {leaf} number {number} came after number {self._taken[leaf]}")
        self._taken[leaf] = number

    def _code(self, topic: str, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, b"%b\0%d\0%b" % (topic.encode(), number, payload), "sha256")


def _said(error: ssl.SSLError) -> str:
    said = getattr(error, "verify_message", "") or why(error)
    if getattr(error, "verify_code", 0) in OUT_OF_DATE:
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        said = f"{said} by the clock here, which says {now}: set the clock, or renew the certificate of the other side"
    return f"the handshake failed: {said}"


def _no_passphrase() -> str:
    raise JobError("the key is encrypted, and a daemon has nobody to ask: give a key without a passphrase, mode 0600")
