"""Detection of a second coordinator of the same fleet on one broker.

A coordinator that starts publishes an offline state in coord/state, and a running coordinator of the fleet replies
with its state. The same home and a killed coordinator do not reply, so that restarts and take-overs are never refused.
A running coordinator also replies to the last will of another one, so that the retained state is that of a running one.
Two coordinators with one certificate are not detected: the broker disconnects the first of two clients with one name.
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
START_S: Final = 5.0  # time after the first published state in which one of two coordinators that started together ends
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
        self._question = wire.encode(wire.CoordState(online=False, home=self._home))
        self._state: bytes | None = None  # retained state, once published
        self._started_s = math.inf  # time of the first state
        self._replied_s, self._is_reply_due = -math.inf, False
        link.subscribe([self._topic])

    def require_sole_coordinator(self) -> None:
        deadline_s = self._clock() + CONNECT_S
        while not self._link.connected and (remaining_s := deadline_s - self._clock()) > 0:
            self._link.wait(remaining_s)
        if not self._link.connected:
            return
        self._link.publish(self._topic, self._question)
        other_home, deadline_s = "", self._clock() + ANSWER_S
        while (remaining_s := deadline_s - self._clock()) > 0:
            self._link.wait(remaining_s)
            for message in self._link.receive():
                if message.payload == self._question and not other_home:
                    return  # its own question, which the broker sends after the retained state
                if (state := self._decode_other_state(message)) is None or not state.online:
                    continue
                if not message.retained:
                    raise self._other_coordinator_error(state)
                other_home = state.home
        if other_home:
            log.warning("the coordinator %s of fleet %s does not answer: taking over", other_home, self._fleet)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if topic == self._topic:
            state = wire.decode(payload, wire.CoordState)
            self._state = payload = wire.encode(msgspec.structs.replace(state, home=self._home))
            if self._link.connected:
                self._started_s = min(self._started_s, self._clock())
        self._link.publish(topic, payload, retain=retain, reliable=reliable)

    def receive(self) -> list[Message]:
        """Return the messages of devices.

        Raises:
            JobError: If another coordinator has started at the same time, and its home is the first of the two.
        """
        messages = self._link.receive()
        for message in messages:
            if message.topic == self._topic:
                self._handle_other_state(message)
        self._reply_if_due()
        return [message for message in messages if message.topic != self._topic]

    def _handle_other_state(self, message: Message) -> None:
        state = self._decode_other_state(message)
        if state is None or (message.retained and not state.online):
            return
        if message.retained:  # the broker was unreachable before, and the state may be that of a killed coordinator
            self._link.publish(self._topic, self._question)
        elif not state.online:
            self._is_reply_due = self._state is not None
        elif state.home < self._home and self._clock() < self._started_s + START_S:
            raise self._other_coordinator_error(state)
        elif self._clock() >= self._replied_s + REPLY_INTERVAL_S:
            self._replied_s = self._clock()
            log.warning("fleet %s has another coordinator, %s: stop one of the two", self._fleet, state.home)

    def _reply_if_due(self) -> None:
        if self._is_reply_due and self._state is not None and self._clock() >= self._replied_s + REPLY_INTERVAL_S:
            self._replied_s, self._is_reply_due = self._clock(), False
            self._link.publish(self._topic, self._state, retain=True)

    def _other_coordinator_error(self, state: wire.CoordState) -> JobError:
        return JobError(
            f"fleet {self._fleet!r} has a coordinator already, {state.home}: stop it, or give another --fleet or "
            "--broker"
        )

    def _decode_other_state(self, message: Message) -> wire.CoordState | None:
        try:
            state = wire.decode(message.payload, wire.CoordState)
        except WireError:
            return None
        is_known = bool(state.home) or not state.online  # a last will names no home
        return state if is_known and state.home != self._home else None
