"""Paho client of one connection, on an open socket; and the largest payload of a broker."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

if TYPE_CHECKING:
    from fedquilt.transport.broker import Broker

KIB: Final = 1024
HEADER: Final = KIB  # bytes left for the topic and the packet's own header
UNANNOUNCED_5: Final = 1024 * KIB  # for an MQTT 5 broker that announces no limit
FILTERS: Final = 100  # in a packet: a thousand may be more than a broker takes at once
UNANNOUNCED_311: Final = 121 * KIB  # 3.1.1 cannot announce one: safe where packets end at 128 KiB


def payload_limit(level: int, announced: int | None, override: int | None) -> int:
    """Largest payload in bytes, by MQTT level (4 is 3.1.1) and CONNACK's announcement."""
    if override is not None:
        return override
    if level < 5:
        return UNANNOUNCED_311
    return UNANNOUNCED_5 if announced is None else max(announced - HEADER, 0)


class Client(paho.Client):
    """Paho client on an open socket, so that connecting never blocks."""

    def __init__(self, sock: socket.socket, level: int, client_id: str) -> None:
        self._given = sock
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if level == 5 else False,
            protocol=MQTTProtocolVersion(level),
            reconnect_on_failure=False,
        )
        # With this callback paho queues packets instead of writing from inside publish().
        self.on_socket_register_write = lambda client, userdata, sock: None

    def _create_socket(self) -> socket.socket:
        return self._given

    def introduce(self, broker: Broker, password: str | None, will: tuple[str, bytes] | None) -> None:
        """Send CONNECT; `will` is as in `transport.mqtt.MqttLink`."""
        self.username_pw_set(broker.user, password)
        if will is not None:
            self.will_set(*will, qos=1, retain=True)
        properties = None
        if self.protocol == MQTTProtocolVersion.MQTTv5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = broker.session_expiry_s
            properties.MaximumPacketSize = max(broker.max_payload or 0, UNANNOUNCED_5) + HEADER
        self.connect_async(broker.host, broker.port, broker.keepalive_s, clean_start=False, properties=properties)
        self.reconnect()

    def ask(self, filters: Sequence[str]) -> None:
        """Subscribe to topic filters, at QoS 1."""
        for at in range(0, len(filters), FILTERS):
            self.subscribe([(pattern, 1) for pattern in filters[at : at + FILTERS]])

    def ask_no_more(self, filters: Sequence[str]) -> None:
        """Undo subscriptions."""
        for at in range(0, len(filters), FILTERS):
            self.unsubscribe(list(filters[at : at + FILTERS]))

    def say_goodbye(self, sock: socket.socket) -> None:
        """Send DISCONNECT and wait until the broker has hung up.

        Closing at once while input is unread would reset the connection: a broker that has not yet read
        the goodbye would publish our last will.
        """
        until = time.monotonic() + 1.0
        with socket.socket(fileno=os.dup(sock.fileno())) as raw:  # paho closes its own once it has written
            self.disconnect()
            poller = select.poll()
            poller.register(raw, select.POLLOUT)
            while self.socket() is not None and time.monotonic() < until:
                poller.poll(100)
                self.loop_write()
            raw.settimeout(0.5)
            try:
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536) and time.monotonic() < until:
                    pass
            except OSError:
                return
