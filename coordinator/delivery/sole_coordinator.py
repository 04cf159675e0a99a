"""Detection of a second coordinator of the same fleet on one broker.

A coordinator that starts publishes a question in coord/state, and a running coordinator of the fleet replies with its
state. Replies of the same home do not count, and a killed coordinator does not reply. So restarts and take-overs are
never refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import wire
from fedquilt.core import JobError, WireError
from fedquilt.transport.link import Link, LinkWrapper, Message

log = logging.getLogger(__name__)

CONNECT_S: Final = 3.0  # wait for the broker; without one the coordinator starts, and connects later
ANSWER_S: Final = 3.0  # wait for the answer of a coordinator that the broker calls online
REPLY_INTERVAL_S: Final = 1.0
MAX_HOME_CHARACTERS: Final = 200  # of `ShortText`


def describe_home(home: Path) -> str:
    return f"{socket.gethostname()}:{home.resolve()}"[-MAX_HOME_CHARACTERS:]


def make_client_id(fleet: str, home: Path) -> str:
    """Return an MQTT client id that depends on the home. A broker would disconnect one of two equal ids."""
    return f"fedquilt-coordinator-{fleet}-{hashlib.sha256(describe_home(home).encode()).hexdigest()[:8]}"


class SoleCoordinatorLink(LinkWrapper):
    """Link of a coordinator that publishes its home in coord/state, and replies to other coordinators."""

    def __init__(self, link: Link, fleet: str, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(link)
        self._fleet, self._home, self._clock = fleet, describe_home(home), clock
        self._topic = wire.Topics(fleet).coord
        self._state: bytes | None = None  # retained state, once published
        self._replied_s = -math.inf
        link.subscribe([self._topic])

    def require_sole_coordinator(self) -> None:
        deadline_s = self._clock() + CONNECT_S
        while not self._link.connected and (remaining_s := deadline_s - self._clock()) > 0:
            self._link.wait(remaining_s)
        if not self._link.connected:
            return
        question = wire.encode(wire.CoordState(online=False, home=self._home))
        self._link.publish(self._topic, question)
        other_home, deadline_s = "", self._clock() + ANSWER_S
        while (remaining_s := deadline_s - self._clock()) > 0:
            self._link.wait(remaining_s)
            for message in self._link.receive():
                if message.payload == question and not other_home:
                    return  # its own question, which the broker sends after the retained state
                if (state := self._decode_other_state(message)) is None or not state.online:
                    continue
                if not message.retained:
                    raise JobError(
                        f"fleet {self._fleet!r} has a coordinator already, {state.home}: stop it, or give another "
                        "--fleet or --broker"
                    )
                other_home = state.home
        if other_home:
            log.warning("the coordinator %s of fleet %s does not answer: taking over", other_home, self._fleet)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if topic == self._topic:
            state = wire.decode(payload, wire.CoordState)
            self._state = payload = wire.encode(msgspec.structs.replace(state, home=self._home))
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        messages = self._link.receive()
        for message in messages:
            if message.topic == self._topic and not message.retained:
                self._answer(message)
        return [message for message in messages if message.topic != self._topic]

    def _answer(self, message: Message) -> None:
        state = self._decode_other_state(message)
        if state is None or self._state is None or self._clock() < self._replied_s + REPLY_INTERVAL_S:
            return
        if not state.epoch:
            self._replied_s = self._clock()
            self._link.publish(self._topic, self._state, retain=True)
        elif state.online:
            self._replied_s = self._clock()
            log.warning("fleet %s has another coordinator, %s: stop one of the two", self._fleet, state.home)

    def _decode_other_state(self, message: Message) -> wire.CoordState | None:
        try:
            state = wire.decode(message.payload, wire.CoordState)
        except WireError:
            return None
        return state if state.home not in ("", self._home) else None
