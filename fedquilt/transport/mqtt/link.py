"""Link over an MQTT broker. Only this package imports paho.

The link works inside `wait`, in the caller's thread, and only the resolver blocks. A caller that computes for long uses
`keep_alive`, which polls the link in another thread. MQTT 5 is tried first, and 3.1.1 if a broker refuses MQTT 5. Only
the packet limit depends on the version.

Messages wait in `SendQueue`, not in paho's queue. Paho 2.2 obeys neither the broker's packet limit nor its
ReceiveMaximum, has no limit on its queue, and repeats for ever a message at which a broker closes the connection.
Paho therefore gets a few messages at a time, and each connection has a new client.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.reasoncodes import ReasonCode

from fedquilt.core import FedquiltError, LinkError
from fedquilt.host.process_resources import call_in_background
from fedquilt.transport.link import Message, Subscriptions
from fedquilt.transport.mqtt import connection
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.client import KIB, MqttClient, describe_reason, payload_limit
from fedquilt.transport.mqtt.connection import ANSWER_TIMEOUT_S, RetryDelay, SocketWait, dial, has_buffered_input

log = logging.getLogger(__name__)

RELIABLE_WINDOW: Final = 100  # QoS-1 messages in flight, unless the broker's ReceiveMaximum is smaller
MAX_INBOX_BYTES: Final = 1024 * KIB  # limit on received messages; further messages wait in the broker
MIN_PAYLOAD_LIMIT: Final = 16 * KIB
CLOSE_TIMEOUT_S: Final = 5.0
POLLS_PER_KEEPALIVE: Final = 20  # polls of the connection in `keepalive_s` while the caller computes


class MqttLink:
    """Link over an MQTT broker. Nothing is sent before the first `wait` or `wait_until_connected`.

    `will` (topic, payload) is published by the broker, retained, when this client is lost without `close`.
    `random_number` returns numbers in [0, 1) for the jitter of the backoff.
    """

    def __init__(
        self,
        broker: Broker,
        client_id: str,
        will: tuple[str, bytes] | None = None,
        *,
        random_number: Callable[[], float] = random.random,
    ) -> None:
        self.broker = broker
        self.client_id = client_id
        self.will = will
        self.session = 0
        self.connected = False
        self.level = 5  # protocol level of MQTT: 5, or 4 (3.1.1) if a broker refuses 5
        self.max_payload = payload_limit(4, None)
        self.dropped = 0  # messages that were refused, too large, or too many while offline
        self._retry = RetryDelay(random_number)
        self._subscribed = Subscriptions()
        self._inbox: list[Message] = []
        self._inbox_bytes = 0
        self._queue = SendQueue()
        self._window = RELIABLE_WINDOW
        self._payload_limit: int | None = None  # assumed limit of a broker that closes connections at larger payloads
        self._dial: Generator[SocketWait, None, socket.socket] | None = None
        self._dial_wait: SocketWait | None = None  # event that the dial waits for
        self._socket: socket.socket | None = None  # socket of a finished dial
        self._client: MqttClient | None = None
        self._paho_error = ""  # last error message of paho
        self._end_reason: ReasonCode | None = None  # reason for the end of the connection
        self._due_s = 0.0  # time of the next attempt, or deadline of the current attempt
        self._connection_problem: str | None = None
        self._refusal: str | None = None
        self._is_permanent = False  # whether further attempts cannot solve the problem
        self._has_waiting_command = False  # whether `wait_until_connected` is active, which raises the problem itself
        self._closed = False

    @property
    def backlog(self) -> int:
        return self._queue.backlog

    @property
    def problem(self) -> str | None:
        """Why the link is not connected, else the latest refused message or subscription, or None."""
        return self._connection_problem or self._refusal

    def wait_until_connected(self, timeout_s: float) -> None:
        """Wait for the first connection, or raise LinkError on timeout or a permanent problem."""
        deadline_s = time.monotonic() + timeout_s
        self._is_permanent, self._has_waiting_command = False, True
        try:
            while not self.connected:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or self._is_permanent:
                    no_answer = f"no answer from {self.broker} within {timeout_s:g} s"
                    tls_hint = " with TLS (mqtts)" if self.broker.tls else ""
                    raise LinkError(self.problem or f"{no_answer}: check that it is an MQTT broker{tls_hint}")
                self.wait(remaining_s)
        finally:
            self._has_waiting_command = False

    def subscribe(self, filters: Sequence[str]) -> None:
        self._subscribed.add(filters)
        if self.connected and self._client is not None:
            self._client.subscribe_filters(filters)

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self._subscribed.remove(filters)
        if self.connected and self._client is not None:
            self._client.unsubscribe_filters(filters)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Queue a message, or raise LinkError if the payload exceeds `max_payload`.

        While offline, unreliable messages are dropped, and a full queue drops its oldest reliable messages.
        """
        if len(payload) > self.max_payload:
            raise LinkError(
                f"message of {len(payload)} bytes to {topic} exceeds the limit of {self.max_payload} of {self.broker}: "
                "raise the broker's packet limit"
            )
        if not self.connected and not reliable:
            return
        self._queue.add(QueuedMessage(topic, payload, retain, reliable))
        if not self.connected and (dropped := self._queue.drop_oldest()):
            self._count_dropped(dropped, f"queue for {self.broker} is full while offline: oldest messages are dropped")

    def receive(self) -> list[Message]:
        messages, self._inbox, self._inbox_bytes = self._inbox, [], 0
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Sleep until a message arrives, the connection changes or half of `backlog` is sent.

        A readable descriptor of `fds` and the timeout also end the sleep. The connection is kept alive only in `wait`
        and `keep_alive`: call `wait` at least every `keepalive_s`.
        """
        deadline_s = time.monotonic() + max(timeout_s, 0.0)
        state_before = (self.session, self.connected, self.problem)
        half_backlog = self.backlog // 2 if self.backlog else -1
        while True:
            remaining_s = 0.0 if self._inbox else deadline_s - time.monotonic()
            is_fd_ready = self._poll_once(max(remaining_s, 0.0), fds)
            if is_fd_ready or self._inbox or self.backlog <= half_backlog or time.monotonic() >= deadline_s:
                return
            if state_before != (self.session, self.connected, self.problem):
                return

    def keep_alive(self) -> AbstractContextManager[None]:
        return call_in_background(self._poll_if_connected, self.broker.keepalive_s / POLLS_PER_KEEPALIVE, "keep-alive")

    def _poll_if_connected(self) -> bool:
        if self.connected:
            self._poll_once(0.0, ())
        return self.connected

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self.connected and self.backlog and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._poll_once(remaining_s, ())
            self.receive()
        self._closed = True
        if self.connected and self._client is not None and self._socket is not None:
            self._client.disconnect_and_wait(self._socket)
        self._close_socket()
        self.connected = False

    def _poll_once(self, timeout_s: float, fds: Sequence[int]) -> bool:
        """Send and receive for at most a second. Return whether one of `fds` is readable."""
        is_idle = self._client is None and self._dial is None and not self._closed
        if is_idle and time.monotonic() >= self._due_s:
            self._dial = dial(self.broker)
            self._step_dial(is_late=False)
        self._send_queued()
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        socket_wait = self._current_socket_wait()
        if socket_wait is not None:
            poller.register(*socket_wait)
            if socket_wait.events & select.POLLIN and has_buffered_input(socket_wait.socket):
                timeout_s = 0.0
        due_s = 1.0 if self.connected or self._closed else max(self._due_s - time.monotonic(), 0.0)
        ready = dict(poller.poll(min(timeout_s, due_s, 1.0) * 1000))
        if socket_wait is not None:
            self._advance_connection(bool(ready.pop(socket_wait.socket.fileno(), 0)))
        return bool(ready)

    def _current_socket_wait(self) -> SocketWait | None:
        if self._client is None or self._socket is None:
            return self._dial_wait
        read_event = select.POLLIN if self._inbox_bytes < MAX_INBOX_BYTES else 0
        return SocketWait(self._socket, read_event | (select.POLLOUT if self._client.want_write() else 0))

    def _advance_connection(self, ready: bool) -> None:
        is_late = not self.connected and time.monotonic() >= self._due_s
        if self._client is None:
            if ready or is_late:
                self._step_dial(is_late)
        elif is_late:
            self._switch_protocol_version()
            self._end_connection(connection.unreachable_error(self.broker, TimeoutError()))
        else:
            self._exchange_packets()

    def _step_dial(self, is_late: bool) -> None:
        assert self._dial is not None
        wait_before = self._dial_wait
        try:
            self._dial_wait = self._dial.throw(TimeoutError()) if is_late else next(self._dial)
        except StopIteration as stop:
            self._dial = self._dial_wait = None
            self._due_s = time.monotonic() + ANSWER_TIMEOUT_S  # for CONNACK
            return self._send_connect(stop.value)
        except FedquiltError as error:
            return self._end_connection(error)
        # A new socket means another address, or the start of TLS.
        if wait_before is None or wait_before.socket is not self._dial_wait.socket:
            self._due_s = time.monotonic() + ANSWER_TIMEOUT_S

    def _send_connect(self, sock: socket.socket) -> None:
        self._socket = sock
        try:
            password = self.broker.read_password()
        except FedquiltError as error:
            return self._end_connection(error)
        client = self._client = MqttClient(sock, self.level, self.client_id, self._on_message, self._on_publish)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_subscribe, client.on_log = self._on_subscribe, self._on_log
        self._end_reason, self._paho_error = None, ""
        client.send_connect(self.broker, password, self.will)

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        client.on_log = None  # paho would format a string for every packet
        self._end_reason = reason
        if reason.is_failure:
            return
        self.connected = True
        self.session += 1
        limit = payload_limit(self.level, getattr(properties, "MaximumPacketSize", None))
        self.max_payload = limit if self._payload_limit is None else min(limit, self._payload_limit)
        self._window = min(RELIABLE_WINDOW, getattr(properties, "ReceiveMaximum", RELIABLE_WINDOW))
        self._retry.record_connection(time.monotonic())
        self._connection_problem, self._is_permanent = None, False
        client.subscribe_filters(list(self._subscribed.filters))
        level = "5" if self.level == 5 else "3.1.1"
        log.info("connected to %s by MQTT %s, payloads up to %d bytes", self.broker, level, self.max_payload)

    def _exchange_packets(self) -> None:
        client, sock, poller = self._client, self._socket, select.poll()
        assert client is not None
        assert sock is not None
        poller.register(sock, select.POLLIN)
        while client.socket() is not None and self._inbox_bytes < MAX_INBOX_BYTES:
            if not poller.poll(0) and not has_buffered_input(sock):
                break
            try:
                client.loop_read()
            except Exception as error:  # paho's decoder may raise any exception for bytes that are not MQTT
                return self._end_connection(connection.not_mqtt_error(self.broker, str(error)))
        if client.socket() is not None:
            client.loop_misc()
        self._send_queued()
        client.loop_write()
        if client.socket() is None:
            self._handle_closed_socket()

    def _send_queued(self) -> None:
        client = self._client
        while self.connected and client is not None and client.socket() is not None:
            message = self._queue.take_next(self._window)
            if message is None:
                return
            if message.size > self.max_payload:  # published when the limit was larger
                self._queue.discard(message)
                sentence = f"{self.broker} accepts only {self.max_payload} bytes now: larger messages are dropped"
                self._count_dropped(1, sentence)
            else:
                qos = int(message.reliable)
                packet_id = client.queue_message(message.topic, message.payload, qos, message.retain)
                self._queue.record_in_flight(packet_id, message)

    def _on_publish(self, packet_id: int, code: int) -> None:
        message = self._queue.remove_sent(packet_id)
        if message is not None and code == connection.TOO_LARGE:
            self._drop_oversized_and_lower_limit(message)
        elif message is not None and code >= connection.UNSPECIFIED:
            self._count_dropped(
                1, connection.describe_refused_message(self.broker, message.topic, code, describe_reason(code))
            )

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._subscribed.matches_topic(topic):  # false for earlier subscriptions, and for other clients' (amqtt)
            self._inbox.append(Message(topic, payload, retained))
            self._inbox_bytes += len(payload) + len(topic)

    def _on_subscribe(
        self, client: Any, userdata: Any, packet_id: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        for reason in reasons:
            if reason.is_failure:
                self._log_refusal(f"{self.broker} refuses a subscription of {self.client_id} ({reason}): see its ACL")

    def _on_disconnect(self, client: Any, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if self._end_reason is None or not self._end_reason.is_failure:  # CONNACK's reason is more precise
            self._end_reason = reason

    def _on_log(self, client: Any, userdata: Any, level: int, text: str) -> None:
        if level == paho.MQTT_LOG_ERR:
            self._paho_error = text

    def _handle_closed_socket(self) -> None:
        code = self._end_reason.value if self._end_reason is not None else connection.UNSPECIFIED
        reason = str(self._end_reason)
        if self.connected and self._client is not None and self._client.is_unread:
            return self._end_connection(connection.unread_error(self.broker))
        if self.connected:
            is_repeated = self._retry.short_connections >= 2
            lost_error = connection.connection_lost_error(self.broker, self.client_id, code, reason, is_repeated)
            return self._end_connection(lost_error)
        if code == connection.UNSUPPORTED_VERSION and self.level == 5:
            log.info("%s refuses MQTT 5: using 3.1.1", self.broker)
            self.level = 4
            self._due_s = 0.0
            return self._close_socket()
        if error := connection.attempt_error(self.broker, self.client_id, code, reason, self._paho_error):
            return self._end_connection(error)
        self._switch_protocol_version()
        self._end_connection(connection.no_answer_error(self.broker))

    def _switch_protocol_version(self) -> None:
        # Some brokers of 3.1.1 (amqtt) close a connection of MQTT 5 without CONNACK.
        if not self.session:
            self.level = 4 if self.level == 5 else 5

    def _end_connection(self, error: FedquiltError) -> None:
        self._close_socket()
        delay_s = self._retry.record_failure(self.connected, time.monotonic())
        self._due_s = time.monotonic() + delay_s
        if self.connected:
            self._requeue_in_flight(self._end_reason.value if self._end_reason is not None else connection.UNSPECIFIED)
        self.connected = False
        if self._connection_problem != str(error):
            level = logging.INFO if self._has_waiting_command else logging.WARNING
            log.log(level, "%s; trying again in %.1f s", error, delay_s)
        self._connection_problem, self._is_permanent = str(error), getattr(error, "is_permanent", True)

    def _requeue_in_flight(self, code: int) -> None:
        max_breaks = 1 if code == connection.TOO_LARGE else MAX_BREAKS
        culprit = self._queue.handle_disconnect(max_breaks, is_clean=code == connection.KEEP_ALIVE)
        if culprit is None:
            return
        if culprit.size > MIN_PAYLOAD_LIMIT:  # the next attempt uses a lower limit, so no backoff is needed
            self._retry.failures, self._due_s = 0, time.monotonic()
        self._drop_oversized_and_lower_limit(culprit)

    def _drop_oversized_and_lower_limit(self, refused: QueuedMessage) -> None:
        if refused.size > MIN_PAYLOAD_LIMIT:
            self._payload_limit = max(refused.size // 2, MIN_PAYLOAD_LIMIT)
            self.max_payload = min(self.max_payload, self._payload_limit)
        self._count_dropped(1, connection.describe_oversized_message(self.broker, refused.topic, refused.size))

    def _count_dropped(self, count: int, sentence: str) -> None:
        self.dropped += count
        self._log_refusal(sentence)

    def _log_refusal(self, sentence: str) -> None:
        if sentence != self._refusal:
            log.warning("%s", sentence)
        self._refusal = sentence

    def _close_socket(self) -> None:
        if self._dial is not None:
            self._dial.close()
        if self._socket is not None:
            self._socket.close()
        self._dial = self._dial_wait = self._client = self._socket = None


MAX_IN_FLIGHT_BYTES: Final = 1 << 20  # paho copies each message
MAX_IN_FLIGHT_MESSAGES: Final = 100
MAX_OFFLINE_BYTES: Final = 16 << 20
MAX_OFFLINE_MESSAGES: Final = 10_000
MAX_BREAKS: Final = 3


@dataclass(eq=False)
class QueuedMessage:
    topic: str
    payload: bytes
    retain: bool
    reliable: bool
    breaks: int = 0  # connections that broke while it was in flight

    @property
    def size(self) -> int:
        return len(self.payload)


class SendQueue:
    """Queue of outgoing messages. Messages in flight at a disconnection are sent again one by one."""

    def __init__(self) -> None:
        self.backlog = 0  # payload bytes that are neither written (QoS 0) nor acknowledged (QoS 1)
        self._waiting: deque[QueuedMessage] = deque()
        self._in_flight: dict[int, QueuedMessage] = {}
        self._in_flight_bytes = 0
        self._reliable_in_flight = 0
        self._suspects_in_flight = 0  # messages that were in flight when a connection broke

    def add(self, message: QueuedMessage) -> None:
        self._waiting.append(message)
        self.backlog += message.size

    def drop_oldest(self) -> int:
        dropped = 0
        while len(self._waiting) > MAX_OFFLINE_MESSAGES or self.backlog > MAX_OFFLINE_BYTES:
            self.discard(self._waiting.popleft())
            dropped += 1
        return dropped

    def take_next(self, window: int) -> QueuedMessage | None:
        """Return the next message for `record_in_flight` or `discard`, or None if none may be sent now."""
        if not self._waiting:
            return None
        message = self._waiting[0]
        if self._in_flight and (
            len(self._in_flight) >= MAX_IN_FLIGHT_MESSAGES
            or message.size + self._in_flight_bytes > MAX_IN_FLIGHT_BYTES
            or message.breaks
            or self._suspects_in_flight
            or (message.reliable and self._reliable_in_flight >= window)
        ):
            return None
        return self._waiting.popleft()

    def record_in_flight(self, packet_id: int, message: QueuedMessage) -> None:
        self._in_flight[packet_id] = message
        self._update_totals(message, 1)

    def remove_sent(self, packet_id: int) -> QueuedMessage | None:
        """Remove and return the message in flight with this packet id, or return None if the id is unknown."""
        message = self._in_flight.pop(packet_id, None)
        if message is not None:
            self.backlog -= message.size
            self._update_totals(message, -1)
        return message

    def _update_totals(self, message: QueuedMessage, sign: int) -> None:
        self._in_flight_bytes += sign * message.size
        self._reliable_in_flight += sign * message.reliable
        self._suspects_in_flight += sign * bool(message.breaks)

    def discard(self, message: QueuedMessage) -> None:
        self.backlog -= message.size

    def handle_disconnect(self, max_breaks: int = MAX_BREAKS, *, is_clean: bool = False) -> QueuedMessage | None:
        """Queue the reliable messages in flight again, and drop all unreliable ones.

        A reliable message that was alone in flight at its `max_breaks`th broken connection is the probable cause. It is
        dropped and returned. With `is_clean`, this break does not count.
        """
        suspects = [message for message in self._in_flight.values() if message.reliable]
        for message in suspects:
            message.breaks += not is_clean
        culprit = suspects.pop() if len(suspects) == 1 and suspects[0].breaks >= max_breaks else None
        self._in_flight.clear()
        self._in_flight_bytes = self._reliable_in_flight = self._suspects_in_flight = 0
        self._waiting = deque(suspects + [message for message in self._waiting if message.reliable])
        self.backlog = sum(message.size for message in self._waiting)
        return culprit
