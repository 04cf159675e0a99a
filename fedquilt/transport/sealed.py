"""Links over which coordinator and boards know who sent what, whatever the broker does.

`BoardLink` and `FleetLink` (`fedquilt.transport.sealed_fleet`) lie around a `Link` to a broker. They shake hands
(`fedquilt.transport.handshake`), put what is published into an envelope (`fedquilt.transport.envelope`), and let
nothing out of `receive` that the other side did not send here and now.

Everything is in an envelope but what cannot harm: a chunk of a blob, which is checked by the manifest and by the
sha256 in an enveloped message; and what the coordinator tells everybody for observers (coord/state, job/#), on which
no board acts. A last will cannot be, because the broker has it before there is a session: it counts for the start of
the agent that it names, and a broker could cut that agent off in any case.

An unsigned side uses the plain link. Neither side of a signed fleet takes a message without an envelope.
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


def identity(broker: Broker) -> Identity | None:
    """With what this side proves who it is; None: it is unsigned, as it has no certificate.

    Raises:
        JobError: there is a certificate, and no authority to check the other side by.
    """
    return None if broker.cert is None else Identity(broker)


def beginning(identity: Identity) -> wire.Hello:
    """The first flight of a handshake that is not gone on with: an answer to it shows that both ways are open."""
    attempt = identity.board()
    return flight(attempt, 0, attempt.step(b""))


class Sealed(Around):
    """What both sides have: a link, and a log of what is refused."""

    def __init__(self, link: Link, identity: Identity, fleet: str, clock: Callable[[], float]) -> None:
        super().__init__(link)
        self._identity, self._clock = identity, clock
        self._topics = wire.Topics(fleet)
        self._refused, self._late = Garbage(), Garbage()
        self._former: dict[str, tuple[str, float]] = {}  # device -> name of its former session, when it is late no more

    @property
    def max_payload(self) -> int:
        """See `Link`: the envelope takes its part."""
        return self._link.max_payload - envelope.ENVELOPE_BYTES

    def _hello(self, device: str, direction: wire.Direction, hello: wire.Hello) -> None:
        try:
            self._link.publish(self._topics.device(device, direction, "hello"), wire.encode(hello))
        except LinkError as error:
            log.error("cannot shake hands: %s", error)

    def _exchange(self, device: str, former: Session | None) -> None:
        """Note that another session has taken the place of a device's former one."""
        if former is not None:
            self._former[device] = (former.name, self._clock() + LATE_S)

    def _refuse(self, message: Message, error: Exception, key: Session | None) -> None:
        """Log what is refused. What is late, as every exchange of a session leaves it, is noted without a warning.

        Args:
            message: the refused one.
            error: why it is.
            key: session with the device whose message it is.
        """
        if message.retained and isinstance(error, StrangeSessionError | UnsignedError):
            return  # what lies at the broker from before is no news
        kind = str(error).partition(":")[0]  # "unsigned", "oversized", "forged", "replayed", "stale"
        kind = kind if kind.isalpha() else "others"
        if isinstance(error, StrangeSessionError):
            former, until_s = self._former.get(wire.sender(message.topic), ("", -math.inf))
            if key is None or (error.session == former and self._clock() < until_s):
                if said := self._late.take(message.topic, error, message.retained, self._clock()):
                    log.info("%s", said)
                return
        if said := self._refused.take(message.topic, error, message.retained, self._clock(), kind):
            log.warning("%s", said)

    def _tell_refused(self) -> None:
        for said in self._refused.due(self._clock()):
            log.warning("%s", said)
        for said in self._late.due(self._clock()):
            log.info("%s", said)


def flight(handshake: Handshake, number: int, data: bytes) -> wire.Hello:
    """A flight of a handshake as a message."""
    return wire.Hello(attempt=handshake.attempt, flight=number, tls=binascii.b2a_base64(data, newline=False).decode())


def data_of(hello: wire.Hello) -> bytes:
    """The bytes of a flight.

    Raises:
        WireError: they are none.
    """
    try:
        return base64.b64decode(hello.tls, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"no flight of a handshake: {error}") from None


class BoardLink(Sealed):
    """A board's side. It counts as connected while it has a session; each new one counts as a new connection.

    While no coordinator answers, observers are told in no envelope that the board is there; no coordinator takes that.
    """

    def __init__(
        self, link: Link, identity: Identity, fleet: str, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(link, identity, fleet, clock)
        self._device, self._own = device, self._topics.device(device, "up", "hello")
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
        link.subscribe(self._topics.for_device(device))

    @property
    def session(self) -> int:
        """A number that grows whenever everything has to be told anew; 0: there is nobody to tell yet."""
        return self._turns and self._turns + self._link.session

    @property
    def connected(self) -> bool:
        """Whether a coordinator can be reached that has proved to be one."""
        return self._link.connected and self._key is not None

    @property
    def problem(self) -> str | None:
        """Why there is no session, or what is wrong with the connection; one sentence, or None."""
        return super().problem or (self._trouble if self._key is None else None)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish in an envelope; without a session nothing is sent, as everything is told anew with the next one.

        Raises:
            LinkError: the payload is larger than the broker accepts.
        """
        leaf = wire.route(topic).leaf
        if self._key is not None and leaf != "chunk":
            payload = envelope.close(self._key, topic, payload)
        elif leaf != "chunk" and not (self._alone and leaf in _OBSERVED):
            return
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        """Messages of the coordinator that has proved to be one."""
        taken = []
        for message in self._link.receive():
            try:
                if (said := self._take(message)) is not None:
                    taken.append(said)
            except WireError as error:
                self._refuse(message, error, self._key)
        self._begin_if_due()
        self._tell_refused()
        return taken

    def _take(self, message: Message) -> Message | None:
        route = wire.route(message.topic)
        if route.leaf == "coord":
            told = wire.decode(message.payload, wire.CoordState)
            if told.online and (self._key is None or told.epoch not in (self._key.epoch, self._disproved)):
                self._announced = told.epoch
                self._want()
            return None
        if route.direction != "dn" or route.device != self._device:
            return None
        if route.leaf == "hello":
            self._answer(wire.decode(message.payload, wire.Hello))
            return None
        if route.leaf == "chunk":
            return message
        if not message.payload:  # cleared at the broker: the coordinator takes a task back in an envelope
            return None
        return envelope.open(self._key, route, message)

    def _want(self) -> None:
        """Begin an attempt now, unless one has begun just before: what asks for it may be forged."""
        self._wanted, self._patience_s, self._alone = True, AGAIN_S, False
        self._due_s = min(self._due_s, self._began_s + HINT_S)

    def _begin_if_due(self) -> None:
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
            self._fail("no coordinator answers: none is online, or it is unsigned (without a certificate)")
            self._turns += not self._alone
            self._alone = True
        self._began_s, self._due_s = now_s, now_s + self._patience_s
        self._patience_s = min(self._patience_s * 2, AGAIN_MOST_S)
        try:
            self._attempt = self._identity.board()
        except JobError as error:  # files that cannot be read now
            return self._fail(str(error))
        self._hello(self._device, "up", flight(self._attempt, 0, self._attempt.step(b"")))

    def _answer(self, hello: wire.Hello) -> None:
        attempt = self._attempt
        if not hello.attempt:
            self._want()
        elif attempt is not None and hello.attempt == attempt.attempt and hello.flight == attempt.flight + 1:
            try:
                if attempt.done:
                    self._agreed(attempt.granted(data_of(hello)))
                else:
                    self._prove(attempt, data_of(hello))
            except WireError as error:
                self._attempt = None
                self._fail(str(error))

    def _prove(self, attempt: Handshake, data: bytes) -> None:
        answer = attempt.step(data)
        if attempt.done and attempt.peer != COORDINATOR:
            raise WireError(f"{attempt.peer or 'somebody'!r} poses as the coordinator")
        attempt.flight = 2
        self._hello(self._device, "up", flight(attempt, 2, answer))

    def _agreed(self, session: Session) -> None:
        self._exchange(self._device, self._key)
        self._key, self._attempt, self._wanted, self._alone = session, None, False, False
        if self._announced not in (None, session.epoch):
            self._disproved = self._announced
        self._turns += 1
        self._due_s, self._patience_s = self._began_s + AGAIN_S, AGAIN_S
        self._renew_s, self._trouble = self._clock() + RENEW_S, None
        log.info("signed: the coordinator has proved that it is; session %s, its start %d", session.name, session.epoch)

    def _fail(self, reason: str) -> None:
        if reason != self._trouble:
            log.warning("no session with the coordinator: %s", reason)
        self._trouble = reason
