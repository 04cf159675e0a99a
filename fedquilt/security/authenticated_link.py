"""Authenticated links: signed messages between coordinator and devices over any broker.

`AuthenticatedDeviceLink` and `AuthenticatedFleetLink` wrap a `Link` to a broker. Both links perform a handshake
(`fedquilt.security.handshake`), sign published messages, and receive only messages of the peer in the current session.

Three kinds of messages are unsigned. A chunk of a blob is verified by the manifest and by the sha256 in a signed
message. Messages of the coordinator for observers (coord/state, job/#) have no effect on devices. A last will is given
to the broker before the session. The will names one start of an agent, which a broker could disconnect anyway.

A process without a certificate uses the plain link. Processes with a certificate accept no other unsigned messages.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fedquilt import wire
from fedquilt.core import RESEND, JobError, LinkError, SiteRight, WireError
from fedquilt.security import enrolment, handshake
from fedquilt.security.certificates import COORDINATOR
from fedquilt.security.handshake import Handshake, LinkIdentity, Session
from fedquilt.transport.link import Link, LinkWrapper, MalformedMessages, Message
from fedquilt.transport.mqtt.broker import Broker

log = logging.getLogger("fedquilt.security")
OBSERVER: Final = handshake.OBSERVER_UNIT
UNSIGNED: Final = "messages are unsigned, so that their senders are not verified: no certificate is configured"
MIN_HANDSHAKE_INTERVAL_S: Final = 2.0  # minimum interval of the handshakes that messages cause on a device
SESSION_S: Final = 24 * 3600.0  # length of a session, after which certificates are verified again
LATE_MESSAGES_S: Final = 30.0  # time in which messages of the former session may still arrive
_UNSIGNED_SUBTOPICS: Final = frozenset({"presence", "profile", "telemetry"})


def load_identity(broker: Broker) -> LinkIdentity | None:
    """Return the identity of a process with a certificate, or None. Raise JobError without an authority."""
    return None if broker.cert is None else LinkIdentity(broker)


def handshake_probe(identity: LinkIdentity) -> wire.Hello:
    """Return the first message of a handshake that only tests the connection and is not continued."""
    attempt = identity.start_as_device()
    return hello_from_flight(attempt, 0, attempt.step(b""))


class AuthenticatedLink(LinkWrapper):
    def __init__(self, link: Link, identity: LinkIdentity, fleet: str, clock: Callable[[], float]) -> None:
        super().__init__(link)
        self._identity, self._clock = identity, clock
        self._topics = wire.Topics(fleet)
        self._rejected_messages, self._late_messages = MalformedMessages(), MalformedMessages()
        # device -> (name of the former session, time until which messages of that session may be late)
        self._former_sessions: dict[str, tuple[str, float]] = {}

    @property
    def max_payload(self) -> int:
        return self._link.max_payload - ENVELOPE_BYTES

    def _send_hello(self, device: str, direction: wire.Direction, hello: wire.Hello, *, reliable: bool = True) -> None:
        topic = self._topics.device_topic(device, direction, "hello")
        try:
            self._link.publish(topic, wire.encode(hello), reliable=reliable)
        except LinkError as error:
            log.error("handshake message cannot be sent: %s", error)

    def _remember_former_session(self, device: str, session: Session | None) -> None:
        if session is not None:
            self._former_sessions[device] = (session.name, self._clock() + LATE_MESSAGES_S)

    def _count_and_log_rejected(self, message: Message, error: Exception, session: Session | None) -> None:
        if message.retained and isinstance(error, UnknownSessionError | UnsignedMessageError):
            return  # a retained message of an earlier session
        kind = str(error).partition(":")[0]  # "unsigned", "oversized", "forged", "replayed", "stale"
        kind = kind if kind.isalpha() else "others"
        if isinstance(error, UnknownSessionError):
            former_name, late_until_s = self._former_sessions.get(
                wire.device_from_topic(message.topic), ("", -math.inf)
            )
            if session is None or (error.session_name == former_name and self._clock() < late_until_s):
                if line := self._late_messages.count_message(message.topic, error, message.retained, self._clock()):
                    log.info("%s", line)
                return
        if line := self._rejected_messages.count_message(message.topic, error, message.retained, self._clock(), kind):
            log.warning("%s", line)

    def _log_rejection_counts(self) -> None:
        for line in self._rejected_messages.take_due_lines(self._clock()):
            log.warning("%s", line)
        for line in self._late_messages.take_due_lines(self._clock()):
            log.info("%s", line)


def hello_from_flight(handshake: Handshake, number: int, data: bytes) -> wire.Hello:
    return wire.Hello(attempt=handshake.attempt, flight=number, tls=binascii.b2a_base64(data, newline=False).decode())


def flight_from_hello(hello: wire.Hello) -> bytes:
    try:
        return base64.b64decode(hello.tls, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"handshake message is malformed: {error}") from None


class AuthenticatedDeviceLink(AuthenticatedLink):
    """Device's side of an authenticated link, connected during a session.

    Each new session counts as a new connection. While no coordinator answers, presence, profile and telemetry are
    published unsigned for observers, and no coordinator accepts them.
    """

    def __init__(
        self, link: Link, identity: LinkIdentity, fleet: str, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(link, identity, fleet, clock)
        self._device, self._hello_topic = device, self._topics.device_topic(device, "up", "hello")
        self._current: Session | None = None
        self._is_unsigned = False  # whether no coordinator responds, so that observers are sent unsigned messages
        self._state_changes = 0  # number of new sessions, and of changes to unsigned messages
        self._attempt: Handshake | None = None
        self._needs_session = True  # whether a handshake is required
        self._due_s = -math.inf  # earliest start of the next attempt
        self._attempt_started_s = -math.inf  # start of the latest attempt
        self._attempts_in_a_row = 0  # handshakes started since the last session or announcement
        self._renew_s = 0.0
        self._connection = 0  # latest known `session` of the wrapped link
        self._announced_epoch: int | None = None  # announced start of the coordinator
        self._disproved_epoch: int | None = None  # announced start that a handshake has disproved
        self._session_problem: str | None = None
        link.subscribe(self._topics.device_filters(device))

    @property
    def session(self) -> int:
        return self._state_changes and self._state_changes + self._link.session

    @property
    def connected(self) -> bool:
        return self._link.connected and self._current is not None

    @property
    def problem(self) -> str | None:
        return super().problem or (self._session_problem if self._current is None else None)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        subtopic = wire.parse_topic(topic).subtopic
        if self._current is not None and subtopic != "chunk":
            payload = make_signed_payload(self._current, topic, payload)
        elif subtopic != "chunk" and not (self._is_unsigned and subtopic in _UNSIGNED_SUBTOPICS):
            return
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        messages = []
        for message in self._link.receive():
            try:
                if (verified := self._process_or_verify_message(message)) is not None:
                    messages.append(verified)
            except WireError as error:
                self._count_and_log_rejected(message, error, self._current)
        self._start_handshake_if_due()
        self._log_rejection_counts()
        return messages

    def _process_or_verify_message(self, message: Message) -> Message | None:
        """Return a verified message or a chunk, or None if the message needs no further processing."""
        route = wire.parse_topic(message.topic)
        if route.subtopic == "coord":
            state = wire.decode(message.payload, wire.CoordState)
            if state.online and (
                self._current is None or state.epoch not in (self._current.epoch, self._disproved_epoch)
            ):
                self._announced_epoch = state.epoch
                self._request_session()
            return None
        if route.direction != "dn" or route.device != self._device:
            return None
        if route.subtopic == "hello":
            self._handle_hello(wire.decode(message.payload, wire.Hello))
            return None
        if route.subtopic == "chunk":
            return message
        if not message.payload:  # cleared at the broker: the coordinator cancels tasks by signed messages
            return None
        return verify_message(self._current, route, message)

    def _request_session(self) -> None:
        # At most every MIN_HANDSHAKE_INTERVAL_S, because the message that causes this may be forged.
        self._needs_session, self._attempts_in_a_row, self._is_unsigned = True, 0, False
        self._due_s = min(self._due_s, self._attempt_started_s + MIN_HANDSHAKE_INTERVAL_S)

    def _start_handshake_if_due(self) -> None:
        if not self._link.connected:
            return
        now_s = self._clock()
        if self._connection != self._link.session:
            self._connection = self._link.session
            self._due_s = now_s if self._current is None else self._due_s  # messages in flight were lost
        if self._current is not None and now_s >= self._renew_s:
            self._needs_session = True
        if not self._needs_session or now_s < self._due_s:
            return
        if self._attempt is not None and self._current is None and now_s >= self._attempt_started_s + RESEND.first_s:
            self._record_failure("no coordinator answers: start one, or give it a certificate if it runs without")
            self._state_changes += not self._is_unsigned
            self._is_unsigned = True
        self._attempt_started_s, self._due_s = now_s, now_s + RESEND.delay_s(self._attempts_in_a_row)
        self._attempts_in_a_row += 1
        try:
            self._attempt = self._identity.start_as_device()
        except JobError as error:  # a file is unreadable
            return self._record_failure(str(error))
        self._send_hello(self._device, "up", hello_from_flight(self._attempt, 0, self._attempt.step(b"")))

    def _handle_hello(self, hello: wire.Hello) -> None:
        attempt = self._attempt
        if not hello.attempt:
            self._request_session()
        elif attempt is not None and hello.attempt == attempt.attempt and hello.flight == attempt.flight + 1:
            try:
                if attempt.is_done:
                    self._adopt_session(attempt.session_from_flight(flight_from_hello(hello)))
                else:
                    self._send_certificate(attempt, flight_from_hello(hello))
            except WireError as error:
                self._attempt = None
                self._record_failure(str(error))

    def _send_certificate(self, attempt: Handshake, data: bytes) -> None:
        flight = attempt.step(data)
        if attempt.is_done and attempt.peer_name != COORDINATOR:
            raise WireError(f"peer has a certificate of {attempt.peer_name!r}, not of the coordinator")
        attempt.flight = 2
        self._send_hello(self._device, "up", hello_from_flight(attempt, 2, flight))

    def _adopt_session(self, session: Session) -> None:
        self._remember_former_session(self._device, self._current)
        self._current, self._attempt, self._needs_session, self._is_unsigned = session, None, False, False
        if self._announced_epoch not in (None, session.epoch):
            self._disproved_epoch = self._announced_epoch
        self._state_changes += 1
        self._due_s, self._attempts_in_a_row = self._attempt_started_s + RESEND.first_s, 0
        self._renew_s, self._session_problem = self._clock() + SESSION_S, None
        log.info("coordinator is authenticated: session %s, epoch %d", session.name, session.epoch)

    def _record_failure(self, reason: str) -> None:
        if reason != self._session_problem:
            log.warning("no session with the coordinator: %s", reason)
        self._session_problem = reason


REQUEST_INTERVAL_S: Final = 5.0  # minimum interval of handshake requests to a device
MAX_ATTEMPTS: Final = 256  # handshakes in progress at a coordinator
MAX_REMEMBERED_DEVICES: Final = 4096  # devices with a remembered time of the latest request or response
MAX_HANDSHAKE_BURST: Final = 1000.0  # attempts that a coordinator accepts at once
DEVICE_HANDSHAKE_INTERVAL_S: Final = 0.25  # minimum interval of accepted attempts of a device
HANDSHAKES_PER_S: Final = 5.0  # long-term rate, so that a flood takes about 1 % of a coordinator's time


class AuthenticatedFleetLink(AuthenticatedLink):
    """Coordinator's side of authenticated links to all devices.

    Another coordinator may have started sessions with the devices while this one was disconnected. After a
    reconnection, a published message therefore requests a handshake if its device uses another session, or has not used
    this session for REQUEST_INTERVAL_S.
    """

    def __init__(
        self, link: Link, identity: LinkIdentity, fleet: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(link, identity, fleet, clock)
        self._warn_before_expiry()
        self._epoch = 0  # announced start of the coordinator
        self._sessions: dict[str, Session] = {}  # by device
        self._session_connections: dict[str, int] = {}  # device -> connection of the handshake
        self._last_used_connections: dict[str, int] = {}  # device -> connection of the latest signed message
        self._connection, self._connected_s = link.session, -math.inf  # current connection and its start
        self._rights: dict[str, SiteRight] = {}  # device -> right in the certificate of a site
        self._boots: dict[str, str] = {}  # device -> id of the agent's current start
        self._attempts: OrderedDict[str, Handshake] = OrderedDict()  # by device, oldest first
        self._requested_s: dict[str, float] = {}  # device -> time of the latest request
        self._accepted_s: dict[str, float] = {}  # device -> time of the latest accepted attempt
        self._available_attempts = MAX_HANDSHAKE_BURST  # attempts that the rate limiter accepts
        self._refilled_s = -math.inf  # time of the latest update of `_available_attempts`

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish a message, signed for its device. Without a session, only an empty message is sent."""
        self._update_connection()
        route = wire.parse_topic(topic)
        if route.direction == "dn" and route.subtopic != "chunk":
            session = self._current_session(route.device)
            if session is not None:
                payload = make_signed_payload(session, topic, payload)
                self._request_handshake_if_unanswered(route.device)
            elif payload:
                return
        elif route.subtopic == "coord":
            self._epoch = wire.decode(payload, wire.CoordState).epoch
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        self._update_connection()
        messages = []
        for message in self._link.receive():
            try:
                route = wire.parse_topic(message.topic)
                if (verified := self._process_or_verify_message(route, message)) is not None:
                    messages.append(verified)
            except (WireError, JobError) as error:
                self._count_and_log_rejected(
                    message, error, self._current_session(wire.device_from_topic(message.topic))
                )
                if isinstance(error, UnknownSessionError) and not message.retained:
                    self._request_handshake(route.device)
        self._log_rejection_counts()
        if self._clock() >= self._expiry_checked_s + SESSION_S:
            try:
                self._warn_before_expiry()
            except JobError as error:
                log.warning("%s", error)
        return messages

    def _warn_before_expiry(self) -> None:
        self._expiry_checked_s = self._clock()
        ends_s = self._identity.require_coordinator_certificate()
        if ends_s - time.time() < enrolment.EXPIRY_WARNING_S:  # certificates are valid by the wall clock
            day = time.strftime("%Y-%m-%d", time.gmtime(ends_s))
            log.warning(
                "coordinator's certificate expires on %s: replace it by `fedquilt identity issue coordinator` "
                "(no restart is needed)",
                day,
            )

    def _process_or_verify_message(self, route: wire.Route, message: Message) -> Message | None:
        if route.direction != "up" or route.subtopic == "chunk":
            return message
        if not message.payload:  # a retained message that was cleared
            return None
        if route.subtopic == "hello":
            self._handle_hello(route.device, wire.decode(message.payload, wire.Hello))
            return None
        if route.subtopic == "presence" and not is_signed(message.payload):
            return self._accept_last_will(route.device, message)
        verified = verify_message(self._current_session(route.device), route, message)
        if not message.retained:
            self._last_used_connections[route.device] = self._connection
        if route.subtopic == "presence":
            self._boots[route.device] = wire.decode(verified.payload, wire.Presence).boot
        return verified

    def site_right(self, device: str) -> SiteRight | None:
        return self._rights.get(device)

    def _current_session(self, device: str) -> Session | None:
        session = self._sessions.get(device)
        return session if session is not None and self._clock() < session.ends_s else None

    def _accept_last_will(self, device: str, message: Message) -> Message | None:
        """Return the will if it is of the agent's current start, or else None. Raise WireError unless it is a will."""
        presence = wire.decode(message.payload, wire.Presence)
        if presence.online:
            raise UnsignedMessageError
        return message if presence.boot == self._boots.get(device) else None

    def _update_connection(self) -> None:
        if self._connection != self._link.session:
            self._connection, self._connected_s = self._link.session, self._clock()

    def _request_handshake(self, device: str) -> None:
        # Only without a session of this connection, because a new session invalidates messages in flight.
        if self._current_session(device) is None or self._session_connections.get(device) != self._connection:
            self._publish_handshake_request(device)

    def _request_handshake_if_unanswered(self, device: str) -> None:
        has_waited = self._clock() >= self._connected_s + REQUEST_INTERVAL_S
        if has_waited and self._last_used_connections.get(device) != self._connection:
            # A broker would keep a reliable message for an offline device.
            self._publish_handshake_request(device, reliable=False)

    def _publish_handshake_request(self, device: str, *, reliable: bool = True) -> None:
        if _admit_unless_too_early(self._requested_s, device, self._clock(), REQUEST_INTERVAL_S):
            self._send_hello(device, "dn", wire.Hello(), reliable=reliable)

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
        self._available_attempts = min(
            self._available_attempts + HANDSHAKES_PER_S * (now_s - self._refilled_s), MAX_HANDSHAKE_BURST
        )
        self._refilled_s = now_s
        if self._available_attempts < 1 or not _admit_unless_too_early(
            self._accepted_s, device, now_s, DEVICE_HANDSHAKE_INTERVAL_S
        ):
            return False
        self._available_attempts -= 1
        return True

    def _answer_first_flight(self, device: str, hello: wire.Hello) -> None:
        if not self._admit_handshake(device):
            raise WireError("too many handshakes: the device must wait before the next attempt")
        attempt = self._identity.start_as_coordinator()
        attempt.attempt = hello.attempt
        flight = attempt.step(flight_from_hello(hello))
        self._attempts.pop(device, None)
        while len(self._attempts) >= MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._attempts[device] = attempt
        self._send_hello(device, "dn", hello_from_flight(attempt, 1, flight))

    def _finish_handshake(self, device: str, attempt: Handshake, hello: wire.Hello) -> None:
        try:
            attempt.step(flight_from_hello(hello))
        except WireError:
            self._send_hello(device, "dn", hello_from_flight(attempt, 3, attempt.take_alert()))
            raise
        if not attempt.is_done:
            raise WireError("a flight of the handshake is incomplete")
        if attempt.peer_name != device:
            raise WireError(f"certificate is for {attempt.peer_name or 'an observer'!r}")
        self._rights.pop(device, None)
        if (site_right := attempt.peer_right) is not None:
            self._rights[device] = site_right
        session, flight = attempt.create_session(self._epoch)
        self._send_hello(device, "dn", hello_from_flight(attempt, 3, flight))
        session.ends_s = self._clock() + 2 * SESSION_S  # a device with a valid certificate renews the session earlier
        self._remember_former_session(device, self._sessions.get(device))
        self._sessions[device] = session
        self._session_connections[device] = self._last_used_connections[device] = self._connection
        log.info("%s is authenticated: session %s", device, session.name)


def _admit_unless_too_early(last_s: dict[str, float], device: str, now_s: float, interval_s: float) -> bool:
    if now_s < last_s.get(device, -math.inf) + interval_s:
        return False
    if len(last_s) >= MAX_REMEMBERED_DEVICES:
        last_s.clear()
    last_s[device] = now_s
    return True


ENVELOPE_BYTES: Final = 128  # largest overhead of an envelope
MAX_SIGNED_BYTES: Final = wire.MAX_CHUNK + ENVELOPE_BYTES  # size of a message with its envelope

# {"mac":"...","in":"<session>","no":12,"said":{"v":1,"crc":"...", ...}}
_ENVELOPE = re.compile(rb'\{"mac":"([A-Za-z0-9+/]{43}=)","in":"([0-9a-f]{16})","no":(\d{1,15}),"said":')
_EMPTY: Final = b"null"  # payload of an empty message, which cancels a task


def is_signed(payload: bytes) -> bool:
    return _ENVELOPE.match(payload) is not None


def make_signed_payload(session: Session, topic: str, payload: bytes) -> bytes:
    payload = payload or _EMPTY
    number, code = session.sign(topic, payload)
    mac = binascii.b2a_base64(code, newline=False)
    return b'{"mac":"%b","in":"%b","no":%d,"said":%b}' % (mac, session.name.encode(), number, payload)


class UnknownSessionError(WireError):
    def __init__(self, session: str) -> None:
        super().__init__("stale: message is signed in another session, so it is late or replayed")
        self.session_name = session


class UnsignedMessageError(WireError):
    def __init__(self) -> None:
        super().__init__("unsigned: sender has no certificate")


def verify_message(session: Session | None, route: wire.Route, message: Message) -> Message:
    """Return a message without envelope. Raise WireError if unsigned, forged or of another session."""
    envelope = _ENVELOPE.match(message.payload)
    if envelope is None:
        raise UnsignedMessageError
    if (size := len(message.payload)) > MAX_SIGNED_BYTES:
        raise WireError(f"oversized: message has {size} bytes, more than {MAX_SIGNED_BYTES}")
    if message.payload[-1:] != b"}":
        raise WireError("forged: envelope has no end")
    if session is None or envelope[2] != session.name.encode():
        raise UnknownSessionError(envelope[2].decode())
    payload = message.payload[envelope.end() : -1]
    session.verify(message.topic, route.subtopic, int(envelope[3]), binascii.a2b_base64(envelope[1]), payload)
    return message._replace(payload=b"" if payload == _EMPTY else payload)
