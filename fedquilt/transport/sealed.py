"""Authenticated links: signed messages between coordinator and devices over any broker.

`BoardLink` and `FleetLink` (`fedquilt.transport.sealed_fleet`) wrap a `Link` to a broker. They perform a handshake
(`fedquilt.transport.handshake`), sign what is published (`fedquilt.transport.envelope`), and `receive` returns only
messages that the peer sent in the current session.

Three kinds of messages are unsigned. A chunk of a blob is verified by the manifest and by the sha256 in a signed
message. Messages of the coordinator for observers (coord/state, job/#) have no effect on devices. A last will is given
to the broker before there is a session: it applies to the start of the agent that it names, and a broker could cut off
that agent in any case.

An unsigned side uses the plain link. Neither side of a signed fleet accepts other unsigned messages.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import time
from collections.abc import Callable
from typing import Final

from fedquilt import wire
from fedquilt.core import JobError, LinkError, WireError
from fedquilt.transport import envelope, handshake
from fedquilt.transport.around import Around
from fedquilt.transport.broker import Broker
from fedquilt.transport.envelope import StrangeSessionError, UnsignedError
from fedquilt.transport.handshake import Handshake, Identity, Session
from fedquilt.transport.link import Link, Message
from fedquilt.transport.malformed import Garbage

log = logging.getLogger("fedquilt.sealed")

COORDINATOR: Final = handshake.COORDINATOR
OBSERVER: Final = handshake.OBSERVER
UNSIGNED: Final = "unsigned: without certificates nobody checks who sends what over the broker"

AGAIN_S: Final = 5.0  # between two attempts of a board, then twice as long, and so on
AGAIN_MOST_S: Final = 60.0
HINT_S: Final = 2.0  # and at the least, if somebody says that there is a coordinator
RENEW_S: Final = 24 * 3600.0  # a session's length, after which certificates are checked anew
LATE_S: Final = 30.0  # after the exchange of a session: until then brokers bring what was on its way under the former

_OBSERVED: Final = frozenset({"presence", "profile", "telemetry"})


def load_identity(broker: Broker) -> Identity | None:
    """Return the identity for signing, or None if this side has no certificate.

    Raises:
        JobError: If there is a certificate and no authority to verify the peer.
    """
    return None if broker.cert is None else Identity(broker)


def handshake_probe(identity: Identity) -> wire.Hello:
    """Return a first flight of which only the answer is of interest, to test the connection."""
    attempt = identity.start_as_device()
    return hello_from_flight(attempt, 0, attempt.step(b""))


class Sealed(Around):
    def __init__(self, link: Link, identity: Identity, fleet: str, clock: Callable[[], float]) -> None:
        super().__init__(link)
        self._identity, self._clock = identity, clock
        self._topics = wire.Topics(fleet)
        self._refused, self._late = Garbage(), Garbage()
        self._former: dict[str, tuple[str, float]] = {}  # device -> name of its former session, when it is late no more

    @property
    def max_payload(self) -> int:
        return self._link.max_payload - envelope.ENVELOPE_BYTES

    def _send_hello(self, device: str, direction: wire.Direction, hello: wire.Hello) -> None:
        try:
            self._link.publish(self._topics.device_topic(device, direction, "hello"), wire.encode(hello))
        except LinkError as error:
            log.error("cannot shake hands: %s", error)

    def _remember_former_session(self, device: str, former: Session | None) -> None:
        if former is not None:
            self._former[device] = (former.name, self._clock() + LATE_S)

    def _log_rejected(self, message: Message, error: Exception, key: Session | None) -> None:
        if message.retained and isinstance(error, StrangeSessionError | UnsignedError):
            return  # what lies at the broker from before is no news
        kind = str(error).partition(":")[0]  # "unsigned", "oversized", "forged", "replayed", "stale"
        kind = kind if kind.isalpha() else "others"
        if isinstance(error, StrangeSessionError):
            former, until_s = self._former.get(wire.device_from_topic(message.topic), ("", -math.inf))
            if key is None or (error.session == former and self._clock() < until_s):
                if said := self._late.count_message(message.topic, error, message.retained, self._clock()):
                    log.info("%s", said)
                return
        if said := self._refused.count_message(message.topic, error, message.retained, self._clock(), kind):
            log.warning("%s", said)

    def _log_rejection_counts(self) -> None:
        for said in self._refused.due_lines(self._clock()):
            log.warning("%s", said)
        for said in self._late.due_lines(self._clock()):
            log.info("%s", said)


def hello_from_flight(handshake: Handshake, number: int, data: bytes) -> wire.Hello:
    return wire.Hello(attempt=handshake.attempt, flight=number, tls=binascii.b2a_base64(data, newline=False).decode())


def flight_from_hello(hello: wire.Hello) -> bytes:
    """Return the bytes of a handshake flight.

    Raises:
        WireError: If the message contains no base64.
    """
    try:
        return base64.b64decode(hello.tls, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"no flight of a handshake: {error}") from None


class BoardLink(Sealed):
    """Device's side of an authenticated link, connected while there is a session.

    Each new session counts as a new connection. While no coordinator answers, presence, profile and telemetry are
    published unsigned for observers, and no coordinator accepts them.
    """

    def __init__(
        self, link: Link, identity: Identity, fleet: str, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(link, identity, fleet, clock)
        self._device, self._own = device, self._topics.device_topic(device, "up", "hello")
        self._key: Session | None = None
        self._alone = False  # no coordinator answers
        self._turns = 0  # sessions, and times that it was alone
        self._attempt: Handshake | None = None
        self._wanted = True  # a session, or another one
        self._due_s = -math.inf  # when the next attempt may begin
        self._began_s = -math.inf  # the latest one
        self._patience_s = AGAIN_S
        self._renew_s = 0.0
        self._connection = 0  # number of the broker's, at the last look
        self._announced: int | None = None  # start of the coordinator for which a session is wanted
        self._disproved: int | None = None  # start that was announced, while a handshake showed another
        self._trouble: str | None = None
        link.subscribe(self._topics.device_filters(device))

    @property
    def session(self) -> int:
        """Number that grows whenever all state must be published again, 0 before the first time."""
        return self._turns and self._turns + self._link.session

    @property
    def connected(self) -> bool:
        return self._link.connected and self._key is not None

    @property
    def problem(self) -> str | None:
        return super().problem or (self._trouble if self._key is None else None)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish a signed message. Without a session, most messages are dropped.

        The agent publishes its state again with the next session.

        Raises:
            LinkError: If the payload is larger than the broker accepts.
        """
        leaf = wire.parse_topic(topic).leaf
        if self._key is not None and leaf != "chunk":
            payload = envelope.sign_payload(self._key, topic, payload)
        elif leaf != "chunk" and not (self._alone and leaf in _OBSERVED):
            return
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        taken = []
        for message in self._link.receive():
            try:
                if (said := self._verify_message(message)) is not None:
                    taken.append(said)
            except WireError as error:
                self._log_rejected(message, error, self._key)
        self._start_handshake_if_due()
        self._log_rejection_counts()
        return taken

    def _verify_message(self, message: Message) -> Message | None:
        route = wire.parse_topic(message.topic)
        if route.leaf == "coord":
            told = wire.decode(message.payload, wire.CoordState)
            if told.online and (self._key is None or told.epoch not in (self._key.epoch, self._disproved)):
                self._announced = told.epoch
                self._request_session()
            return None
        if route.direction != "dn" or route.device != self._device:
            return None
        if route.leaf == "hello":
            self._handle_hello(wire.decode(message.payload, wire.Hello))
            return None
        if route.leaf == "chunk":
            return message
        if not message.payload:  # cleared at the broker: the coordinator takes a task back in an envelope
            return None
        return envelope.verify_message(self._key, route, message)

    def _request_session(self) -> None:
        # At most every HINT_S, because the message that causes this may be forged.
        self._wanted, self._patience_s, self._alone = True, AGAIN_S, False
        self._due_s = min(self._due_s, self._began_s + HINT_S)

    def _start_handshake_if_due(self) -> None:
        if not self._link.connected:
            return
        now_s = self._clock()
        if self._connection != self._link.session:
            self._connection = self._link.session
            self._due_s = now_s if self._key is None else self._due_s  # what was under way is lost
        if self._key is not None and now_s >= self._renew_s:
            self._wanted = True
        if not self._wanted or now_s < self._due_s:
            return
        if self._attempt is not None and self._key is None and now_s >= self._began_s + AGAIN_S:
            self._record_failure("no coordinator answers: none is online, or it is unsigned (without a certificate)")
            self._turns += not self._alone
            self._alone = True
        self._began_s, self._due_s = now_s, now_s + self._patience_s
        self._patience_s = min(self._patience_s * 2, AGAIN_MOST_S)
        try:
            self._attempt = self._identity.start_as_device()
        except JobError as error:  # files that cannot be read now
            return self._record_failure(str(error))
        self._send_hello(self._device, "up", hello_from_flight(self._attempt, 0, self._attempt.step(b"")))

    def _handle_hello(self, hello: wire.Hello) -> None:
        attempt = self._attempt
        if not hello.attempt:
            self._request_session()
        elif attempt is not None and hello.attempt == attempt.attempt and hello.flight == attempt.flight + 1:
            try:
                if attempt.done:
                    self._adopt_session(attempt.session_from_flight(flight_from_hello(hello)))
                else:
                    self._send_certificate(attempt, flight_from_hello(hello))
            except WireError as error:
                self._attempt = None
                self._record_failure(str(error))

    def _send_certificate(self, attempt: Handshake, data: bytes) -> None:
        answer = attempt.step(data)
        if attempt.done and attempt.peer_name != COORDINATOR:
            raise WireError(f"{attempt.peer_name or 'somebody'!r} poses as the coordinator")
        attempt.flight = 2
        self._send_hello(self._device, "up", hello_from_flight(attempt, 2, answer))

    def _adopt_session(self, session: Session) -> None:
        self._remember_former_session(self._device, self._key)
        self._key, self._attempt, self._wanted, self._alone = session, None, False, False
        if self._announced not in (None, session.epoch):
            self._disproved = self._announced
        self._turns += 1
        self._due_s, self._patience_s = self._began_s + AGAIN_S, AGAIN_S
        self._renew_s, self._trouble = self._clock() + RENEW_S, None
        log.info("signed: the coordinator has proved that it is; session %s, its start %d", session.name, session.epoch)

    def _record_failure(self, reason: str) -> None:
        if reason != self._trouble:
            log.warning("no session with the coordinator: %s", reason)
        self._trouble = reason
