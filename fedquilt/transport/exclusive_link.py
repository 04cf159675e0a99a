"""Exclusive use of a name at a broker: one coordinator for each fleet, one agent for each device.

All processes of a name have the same client id. A broker disconnects the first of two clients with one id, so that two
processes would disconnect each other for ever. Each process therefore publishes a retained `ProcessState` whenever it
connects, and ends if the state of another running process ranks before its own.

A state does not prove that its process still runs: a killed process leaves its state, and a broker may restore an older
one or deliver old messages of a session. A process runs if its number has grown since an earlier connection, or if its
message arrives after the first one of this process.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedquilt import wire
from fedquilt.core import JobError, WireError
from fedquilt.transport.link import Link, LinkWrapper, Message

log = logging.getLogger(__name__)

CONNECT_S: Final = 3.0  # wait for the broker; without one the process starts, and connects later
OWN_STATE_S: Final = 20.0  # wait for this process's own state, which a busy machine delays
ANSWER_S: Final = 3.0  # wait for the next state of another process, which reconnects in the meantime
MAX_PLACE_CHARACTERS: Final = 200  # of `ShortText`
MAX_KNOWN_PROCESSES: Final = 16


def make_coordinator_client_id(fleet: str) -> str:
    return f"fedquilt-coordinator-{fleet}"


def make_coordinator_link(link: Link, fleet: str, home: Path) -> ExclusiveLink:
    return ExclusiveLink(
        link,
        wire.Topics(fleet).coordinator_process,
        home,
        subject=f"coordinator of fleet {fleet!r}",
        fix="give another --fleet or --broker",
    )


def make_device_link(link: Link, fleet: str, device: str, home: Path) -> ExclusiveLink:
    return ExclusiveLink(
        link,
        wire.Topics(fleet).device_process(device),
        home,
        subject=f"agent of device {device!r}",
        fix="give this board a `device`, key and certificate of its own. If this board replaces that one, copy crl.pem "
        "to the broker and restart the broker",
    )


def describe_place(home: Path) -> str:
    return f"{socket.gethostname()}:{home.resolve()}"[-MAX_PLACE_CHARACTERS:]


def make_process_id() -> str:
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class ExclusiveLink(LinkWrapper):
    """Link of a process that must be the only one of its name.

    Args:
        topic: The topic of the name's process.
        subject: What the process is, such as "coordinator of fleet 'lab'".
        fix: What to do with another process besides ending it.
    """

    def __init__(
        self,
        link: Link,
        topic: str,
        home: Path,
        *,
        subject: str,
        fix: str,
        clock: Callable[[], float] = time.monotonic,
        process: str = "",
    ) -> None:
        super().__init__(link)
        self._topic, self._subject, self._fix, self._clock = topic, subject, fix, clock
        self._state = wire.ProcessState(process or make_process_id(), 0, False, describe_place(home))
        self._session = 0
        self._is_published = False  # whether the broker has delivered this process's first state
        self._is_displaced = False
        self._numbers: dict[str, int] = {}  # other process -> number of its latest state
        self._earlier_numbers: dict[str, int] = {}  # those of earlier connections
        self._reported: set[str] = set()
        link.subscribe([topic])

    def require_exclusive_use(self) -> None:
        """Connect to the broker, and wait until an earlier process of this name has ended or answered.

        Raises:
            JobError: If another process of this name is running.
        """
        self._wait_until(lambda: self._link.connected, CONNECT_S)
        if self._link.connected:
            self._wait_until(lambda: self._is_published, OWN_STATE_S)
            if not self._is_published:
                log.warning("the broker does not deliver %s: permit the topic in its access rules", self._topic)
            elif self._numbers:
                self._wait_until(lambda: False, ANSWER_S)
                log.warning("%s: the former process does not answer, taking over", self._subject)
        self._publish_state(is_established=True)

    def receive(self) -> list[Message]:
        """Return the messages of other topics than the process states.

        Raises:
            JobError: If another process of this name is running, and ranks before this one.
        """
        messages = self._link.receive()
        if self._link.session != self._session:
            self._session, self._earlier_numbers = self._link.session, dict(self._numbers)
            self._publish_state(is_established=self._state.is_established)
        for message in messages:
            if message.topic == self._topic:
                self._handle_state(message)
        return [message for message in messages if message.topic != self._topic]

    def close(self) -> None:
        if not self._is_displaced:
            self._link.publish(self._topic, b"", retain=True)
        self._link.close()

    def _wait_until(self, is_complete: Callable[[], bool], limit_s: float) -> None:
        deadline_s = self._clock() + limit_s
        self.receive()  # publishes the state, if the link is connected already
        while not is_complete() and (remaining_s := deadline_s - self._clock()) > 0:
            self._link.wait(remaining_s)
            self.receive()

    def _publish_state(self, *, is_established: bool) -> None:
        state = self._state
        self._state = wire.ProcessState(state.process, state.number + 1, is_established, state.place)
        self._link.publish(self._topic, wire.encode(self._state), retain=True)

    def _handle_state(self, message: Message) -> None:
        try:
            state = wire.decode(message.payload, wire.ProcessState)
        except WireError:  # empty after the end of a process
            return
        if state.process == self._state.process:
            self._is_published = True
        elif self._is_running(state, message):
            self._yield_or_answer(state, message)

    def _is_running(self, state: wire.ProcessState, message: Message) -> bool:
        self._numbers[state.process] = max(state.number, self._numbers.pop(state.process, 0))
        if len(self._numbers) > MAX_KNOWN_PROCESSES:
            del self._numbers[next(iter(self._numbers))]
        if message.retained:
            return state.number > self._earlier_numbers.get(state.process, state.number)
        return self._is_published

    def _yield_or_answer(self, other: wire.ProcessState, message: Message) -> None:
        place = "".join(character if character.isprintable() else "?" for character in other.place)
        if _rank(other) < _rank(self._state):
            self._is_displaced = True
            raise JobError(f"the {self._subject} runs already, at {place}: stop it, or {self._fix}")
        if other.process not in self._reported:
            self._reported.add(other.process)
            log.warning("another %s, at %s, must end: stop it, or %s", self._subject, place, self._fix)
        if not message.retained:
            self._publish_state(is_established=self._state.is_established)


def _rank(state: wire.ProcessState) -> tuple[bool, str]:
    return not state.is_established, state.process
