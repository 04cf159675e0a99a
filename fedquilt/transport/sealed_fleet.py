"""Coordinator's side of authenticated links (see `fedquilt.transport.sealed`)."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fedquilt import enrolment, wire
from fedquilt.core import JobError, SiteRight, WireError
from fedquilt.transport import envelope
from fedquilt.transport.envelope import StrangeSessionError, UnsignedError
from fedquilt.transport.handshake import Handshake, Identity, Session
from fedquilt.transport.link import Link, Message
from fedquilt.transport.sealed import RENEW_S, Sealed, flight_from_hello, hello_from_flight

log = logging.getLogger("fedquilt.sealed")

ASK_S: Final = 5.0  # how often a board is asked to begin
ATTEMPTS_MOST: Final = 256  # under way at a coordinator, whoever began them
DEVICES_MOST: Final = 4096  # of which it is remembered when something was last done for them
BURST: Final = 1000.0  # attempts that a coordinator answers at once
EVERY_S: Final = 0.25  # between two attempts of a board that it answers
RATE: Final = 5.0  # and a second for good, so that a flood takes about a hundredth of its time


class FleetLink(Sealed):
    """Coordinator's side of authenticated links to all devices.

    Raises:
        JobError: If devices would not accept this certificate as the coordinator's.
    """

    def __init__(self, link: Link, identity: Identity, fleet: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(link, identity, fleet, clock)
        self._warn_before_expiry()
        self._epoch = 0  # as the coordinator has announced it
        self._keys: dict[str, Session] = {}  # by device
        self._rights: dict[str, SiteRight] = {}  # of sites, by their certificates
        self._boots: dict[str, str] = {}  # device -> the start of its agent that is online
        self._attempts: OrderedDict[str, Handshake] = OrderedDict()  # by device, the oldest first
        self._asked_s: dict[str, float] = {}  # device -> when it was asked to begin
        self._begun_s: dict[str, float] = {}  # device -> when an attempt of it was answered
        self._left, self._left_s = BURST, -math.inf  # attempts that may be answered now, and when that was so

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish a message, signed for its device. Without a session, only an empty message is sent.

        Messages for observers (coord/state, job/#) and chunks are unsigned.

        Raises:
            LinkError: If the payload is larger than the broker accepts.
        """
        route = wire.parse_topic(topic)
        if route.direction == "dn" and route.leaf != "chunk":
            session = self._current_session(route.device)
            if session is not None:
                payload = envelope.sign_payload(session, topic, payload)
            elif payload:
                return
        elif route.leaf == "coord":
            self._epoch = wire.decode(payload, wire.CoordState).epoch
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        taken = []
        for message in self._link.receive():
            try:
                route = wire.parse_topic(message.topic)
                if (said := self._verify_message(route, message)) is not None:
                    taken.append(said)
            except (WireError, JobError) as error:
                self._log_rejected(message, error, self._current_session(wire.device_from_topic(message.topic)))
                if isinstance(error, StrangeSessionError) and not message.retained:
                    self._request_handshake(route.device)
        self._log_rejection_counts()
        if self._clock() >= self._told_s + RENEW_S:
            try:
                self._warn_before_expiry()
            except JobError as error:
                log.warning("%s", error)
        return taken

    def _warn_before_expiry(self) -> None:
        self._told_s = self._clock()
        ends_s = self._identity.require_coordinator_certificate()
        if ends_s - time.time() < enrolment.SOON_S:  # certificates go by the wall clock, of which ssl asks the system
            day = time.strftime("%Y-%m-%d", time.gmtime(ends_s))
            log.warning(
                "no board takes this coordinator's certificate after %s: `fedquilt ca issue coordinator` on the "
                "authority's machine makes another, which is taken up without a restart",
                day,
            )

    def _verify_message(self, route: wire.Route, message: Message) -> Message | None:
        if route.direction != "up" or route.leaf == "chunk":
            return message
        if not message.payload:  # a retained message that was cleared
            return None
        if route.leaf == "hello":
            self._handle_hello(route.device, wire.decode(message.payload, wire.Hello))
            return None
        if route.leaf == "presence" and not envelope.is_signed(message.payload):
            return self._accept_last_will(route.device, message)
        said = envelope.verify_message(self._current_session(route.device), route, message)
        if route.leaf == "presence":
            self._boots[route.device] = wire.decode(said.payload, wire.Presence).boot
        return said

    def site_right(self, device: str) -> SiteRight | None:
        return self._rights.get(device)

    def _current_session(self, device: str) -> Session | None:
        session = self._keys.get(device)
        return session if session is not None and self._clock() < session.ends_s else None

    def _accept_last_will(self, device: str, message: Message) -> Message | None:
        told = wire.decode(message.payload, wire.Presence)
        if told.online:
            raise UnsignedError
        return message if told.boot == self._boots.get(device) else None

    def _request_handshake(self, device: str) -> None:
        # Only without a session: each new session makes messages under way in the latest session late.
        if self._current_session(device) is None and _admit_device(self._asked_s, device, self._clock(), ASK_S):
            self._send_hello(device, "dn", wire.Hello())

    def _handle_hello(self, device: str, hello: wire.Hello) -> None:
        attempt = self._attempts.get(device)
        try:
            if hello.flight == 0 and hello.attempt:
                self._answer_first_flight(device, hello)
            elif attempt is not None and hello.attempt == attempt.attempt and hello.flight == 2:
                del self._attempts[device]
                self._finish_handshake(device, attempt, hello)
        except WireError as error:
            raise WireError(f"{device}: {error}") from None

    def _admit_handshake(self, device: str) -> bool:
        now_s = self._clock()
        self._left = min(self._left + RATE * (now_s - self._left_s), BURST)
        self._left_s = now_s
        if self._left < 1 or not _admit_device(self._begun_s, device, now_s, EVERY_S):
            return False
        self._left -= 1
        return True

    def _answer_first_flight(self, device: str, hello: wire.Hello) -> None:
        if not self._admit_handshake(device):
            raise WireError("too many handshakes are begun: it has to wait")
        attempt = self._identity.start_as_coordinator()
        attempt.attempt = hello.attempt
        answer = attempt.step(flight_from_hello(hello))
        self._attempts.pop(device, None)
        while len(self._attempts) >= ATTEMPTS_MOST:
            self._attempts.popitem(last=False)
        self._attempts[device] = attempt
        self._send_hello(device, "dn", hello_from_flight(attempt, 1, answer))

    def _finish_handshake(self, device: str, attempt: Handshake, hello: wire.Hello) -> None:
        """Verify the last flight of a handshake, store the device's right and session, and send the answer."""
        try:
            attempt.step(flight_from_hello(hello))
        except WireError:
            self._send_hello(device, "dn", hello_from_flight(attempt, 3, attempt.take_alert()))
            raise
        if not attempt.done:
            raise WireError("a flight of the handshake is incomplete")
        if attempt.peer_name != device:
            raise WireError(f"the certificate is of {attempt.peer_name or 'an observer'!r}")
        self._rights.pop(device, None)
        if (right := attempt.peer_right) is not None:
            self._rights[device] = right
        session, answer = attempt.create_session(self._epoch)
        self._send_hello(device, "dn", hello_from_flight(attempt, 3, answer))
        session.ends_s = self._clock() + 2 * RENEW_S  # a board renews it in time, if its certificate is still good
        self._remember_former_session(device, self._keys.get(device))
        self._keys[device] = session
        log.info("signed: %s has proved that it is; session %s", device, session.name)


def _admit_device(last_s: dict[str, float], device: str, now_s: float, every_s: float) -> bool:
    if now_s < last_s.get(device, -math.inf) + every_s:
        return False
    if len(last_s) >= DEVICES_MOST:
        last_s.clear()
    last_s[device] = now_s
    return True
