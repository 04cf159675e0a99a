"""MQTT client of one connection on an open socket, and payload limits of brokers.

Paho connects, subscribes and keeps the connection alive. Messages and their acknowledgements, which are nearly all
packets, bypass paho: paho 2.2 needs 3 to 4 reads of the socket for each packet, one write for each, and a dozen
property tables that are never used. `MqttClient` reads and writes 64 KiB at a time, handles these two kinds of packets
itself, and passes all others to paho.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

if TYPE_CHECKING:
    from fedquilt.transport.mqtt.broker import Broker

KIB: Final = 1024
HEADER_BYTES: Final = KIB  # bytes of a packet reserved for topic and header
DEFAULT_PAYLOAD_5: Final = 1024 * KIB  # payload limit for an MQTT 5 broker that announces no packet limit
MAX_PACKET_BYTES: Final = DEFAULT_PAYLOAD_5 + HEADER_BYTES  # limit on packets from the broker
FILTERS_PER_PACKET: Final = 100  # brokers may refuse a packet with a thousand filters
DEFAULT_PAYLOAD_311: Final = 121 * KIB  # MQTT 3.1.1 announces no limit; some brokers refuse packets above 128 KiB
IO_BYTES: Final = 64 * KIB  # bytes of one read or write of the socket
UNREAD_KEEPALIVES: Final = 1.5  # keep-alive intervals without a write, as MQTT defines for the broker's side


def payload_limit(level: int, announced: int | None) -> int:
    """Return the largest payload in bytes, from MQTT's protocol level and CONNACK's packet limit."""
    if level < 5:
        return DEFAULT_PAYLOAD_311
    return DEFAULT_PAYLOAD_5 if announced is None else max(announced - HEADER_BYTES, 0)


def describe_reason(code: int) -> str:
    try:
        return str(ReasonCode(PacketTypes.PUBACK, identifier=code))
    except (KeyError, ValueError):  # a code that paho does not know, or not of this packet
        return f"reason {code}"


class MqttClient(paho.Client):
    """MQTT client on an open socket.

    `on_settled` receives the packet id and reason code of each acknowledged (QoS 1) or written (QoS 0) message.
    """

    def __init__(
        self,
        sock: socket.socket,
        level: int,
        client_id: str,
        on_message: Callable[[str, bytes, bool], None] = lambda topic, payload, retained: None,
        on_settled: Callable[[int, int], None] = lambda mid, code: None,
    ) -> None:
        self._open_socket, self._level = sock, level
        self._on_broker_message, self._on_settled = on_message, on_settled
        self._input, self._output = bytearray(), bytearray()
        self._queued_bytes = self._written_bytes = 0  # total bytes of all packets
        self._blocked_s: float | None = None  # time of the first blocked write since the last written byte
        self.is_unread = False  # whether the connection has ended because the broker did not read
        self._unreliable: deque[tuple[int, int]] = deque()  # (end in `_queued_bytes`, id) of unwritten QoS-0 messages
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if level == 5 else False,
            protocol=MQTTProtocolVersion(level),
            reconnect_on_failure=False,
        )

    def _create_socket(self) -> socket.socket:
        return self._open_socket

    def queue_message(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        packet_id = self._mid_generate()
        self._append_output(publish_packet(self._level, packet_id, topic, payload, qos, retain))
        if not qos:
            self._unreliable.append((self._queued_bytes, packet_id))
        return packet_id

    def want_write(self) -> bool:
        return bool(self._output)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read up to IO_BYTES bytes and handle all complete packets, or raise MalformedPacketError."""
        if self._sock is None:
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        try:
            received = self._sock.recv(IO_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        except OSError as error:
            self._easy_log(paho.MQTT_LOG_ERR, "failed to receive on socket: %s", error)
            received = b""
        if not received:
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
        self._last_bytes_received = self._last_msg_in = time.monotonic()  # for keep-alive: paho 2.2's name, and 2.1's
        self._input += received
        end = 0
        try:
            while self._sock is not None and (packet := find_packet(self._input, end, MAX_PACKET_BYTES)) is not None:
                first_byte, body_start, end = packet
                self._handle_broker_packet(first_byte, self._input[body_start:end])
        finally:
            del self._input[:end]
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def loop_write(self) -> MQTTErrorCode:
        """Write the bytes that the network accepts, and end the connection if the broker does not read.

        Paho's keep-alive does not detect a broker that sends and never reads.
        """
        while self._output and self._sock is not None:
            try:
                size = self._sock.send(self._output[:IO_BYTES])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                now_s = time.monotonic()
                self._blocked_s = now_s if self._blocked_s is None else self._blocked_s
                self.is_unread = now_s - self._blocked_s > UNREAD_KEEPALIVES * self.keepalive
                if self.is_unread:
                    return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_KEEPALIVE)
                break
            except OSError as error:
                self._easy_log(paho.MQTT_LOG_ERR, "failed to send on socket: %s", error)
                return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
            del self._output[:size]
            self._written_bytes += size
            self._blocked_s = None
            self._last_msg_out = time.monotonic()
        while self._unreliable and self._unreliable[0][0] <= self._written_bytes:
            self._on_settled(self._unreliable.popleft()[1], 0)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _handle_broker_packet(self, first_byte: int, body: bytearray) -> None:
        packet_type = first_byte & 0xF0
        if packet_type == PUBLISH and first_byte & 0x06 != 0x04:  # QoS 2 was not subscribed to
            topic, payload, packet_id = parse_publish(self._level, first_byte, body)
            if topic is not None:
                self._on_broker_message(topic, payload, bool(first_byte & 1))
            if packet_id is not None:
                self._append_output(puback_packet(packet_id))
        elif packet_type == PUBACK:
            self._on_settled(*parse_puback(body))
        else:
            self._in_packet |= {"command": first_byte, "packet": body, "remaining_length": len(body), "pos": 0}
            if failed := self._packet_handle():
                self._loop_rc_handle(failed)

    def _packet_queue(self, command: int, packet: bytes | bytearray, *args: Any, **kwargs: Any) -> MQTTErrorCode:
        self._append_output(packet)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _append_output(self, packet: bytes | bytearray) -> None:
        self._output += packet
        self._queued_bytes += len(packet)

    def send_connect(self, broker: Broker, password: str | None, will: tuple[str, bytes] | None) -> None:
        self.username_pw_set(broker.user, password)
        if will is not None:
            self.will_set(*will, qos=1, retain=True)
        properties = None
        if self.protocol == MQTTProtocolVersion.MQTTv5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = broker.session_expiry_s
            properties.MaximumPacketSize = MAX_PACKET_BYTES
        self.connect_async(broker.host, broker.port, broker.keepalive_s, clean_start=False, properties=properties)
        self.reconnect()

    def subscribe_filters(self, filters: Sequence[str]) -> None:
        for start in range(0, len(filters), FILTERS_PER_PACKET):
            self.subscribe([(pattern, 1) for pattern in filters[start : start + FILTERS_PER_PACKET]])

    def unsubscribe_filters(self, filters: Sequence[str]) -> None:
        for start in range(0, len(filters), FILTERS_PER_PACKET):
            self.unsubscribe(list(filters[start : start + FILTERS_PER_PACKET]))

    def disconnect_and_wait(self, sock: socket.socket) -> None:
        """Send DISCONNECT and wait until the broker has closed the connection.

        Closing at once while input is unread would reset the connection. A broker that has not yet read DISCONNECT
        would then publish the last will.
        """
        deadline_s = time.monotonic() + 1.0
        # Paho closes its socket if the broker disconnects, so the rest is read from a duplicate.
        with socket.socket(fileno=os.dup(sock.fileno())) as own_socket:
            self.disconnect()
            poller = select.poll()
            poller.register(own_socket, select.POLLOUT)
            while self.socket() is not None and self.want_write() and time.monotonic() < deadline_s:
                poller.poll(100)
                self.loop_write()
            own_socket.settimeout(0.5)
            try:
                own_socket.shutdown(socket.SHUT_WR)
                while own_socket.recv(65536) and time.monotonic() < deadline_s:
                    pass
            except OSError:
                return


PUBLISH: Final = 0x30
PUBACK: Final = 0x40
MAX_BODY_BYTES: Final = 2**28 - 1  # limit of MQTT's four-byte length field
_UINT16: Final = struct.Struct("!H")


class MalformedPacketError(Exception): ...


def find_packet(data: bytearray, start: int, max_bytes: int = MAX_BODY_BYTES) -> tuple[int, int, int] | None:
    """Return (first byte, body offset, end offset) of a packet, or None if the packet is incomplete."""
    size, body_start = 0, start + 1
    while True:
        if body_start >= len(data):
            return None
        byte = data[body_start]
        size |= (byte & 0x7F) << 7 * (body_start - start - 1)
        body_start += 1
        if byte < 0x80:
            break
        if body_start > start + 4:
            raise MalformedPacketError("packet has a length field of more than four bytes")
    if size > max_bytes:
        raise MalformedPacketError(f"packet has {size} bytes, more than {max_bytes}")
    return (data[start], body_start, body_start + size) if body_start + size <= len(data) else None


def publish_packet(level: int, packet_id: int, topic: str, payload: bytes, qos: int, retain: bool) -> bytes:
    name = topic.encode()
    header = _UINT16.pack(len(name)) + name + (_UINT16.pack(packet_id) if qos else b"") + (b"\0" if level == 5 else b"")
    return b"".join(
        (bytes((PUBLISH | qos << 1 | retain,)), _encode_length(len(header) + len(payload)), header, payload)
    )


def puback_packet(packet_id: int) -> bytes:
    return b"\x40\x02" + _UINT16.pack(packet_id)


def parse_publish(level: int, first_byte: int, body: bytearray) -> tuple[str | None, bytes, int | None]:
    """Return topic (None if not UTF-8), payload and packet id (None with QoS 0) of a PUBLISH packet."""
    packet_id = None
    try:
        position = 2 + _UINT16.unpack_from(body)[0]
        name = body[2:position]
        if first_byte & 0x06:
            (packet_id,) = _UINT16.unpack_from(body, position)
            position += 2
        if level == 5:
            properties = find_packet(body, position - 1)  # properties have a length as packets have
            if properties is None:
                raise MalformedPacketError("properties of a message are longer than its packet")
            position = properties[2]
    except struct.error:
        raise MalformedPacketError("message is shorter than its fields") from None
    if position > len(body):
        raise MalformedPacketError("topic is longer than its packet")
    try:
        return name.decode(), bytes(body[position:]), packet_id
    except UnicodeDecodeError:
        return None, b"", packet_id


def parse_puback(body: bytearray) -> tuple[int, int]:
    """Return the id and the reason code of a PUBACK packet. Codes from 128 on are failures."""
    if len(body) < 2:
        raise MalformedPacketError("acknowledgement has no packet id")
    return _UINT16.unpack_from(body)[0], body[2] if len(body) > 2 else 0


def _encode_length(size: int) -> bytes:
    encoded = bytearray()
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)
