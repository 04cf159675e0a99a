"""Tests of the broker's access rules, by publishing messages and receiving the responses.

A device requests an unknown blob from the coordinator on its own branch. The response, that the blob is missing,
arrives on the same branch and proves both directions. With message authentication the request is a handshake instead.
Without a coordinator only the broker's result for the message is available (PUBACK of MQTT 5). Then the same message
is published on the branch of a device that does not exist, where neither message nor response may pass.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from fedquilt import wire
from fedquilt.core import WireError, WireMessage
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

NOBODY: Final = "fedquilt-doctor"  # a device that does not exist
ANSWER_S: Final = 2.5  # for the coordinator's
GRACE_S: Final = 0.5  # for what may arrive after the broker's acknowledgement
CHUNK: Final = 1024
RULES: Final = "fedquilt broker config mosquitto ..., which writes the rules that are needed"


@dataclass(frozen=True)
class ExaminationDeadline:
    """End of the examination, in monotonic time."""

    until_s: float

    def remaining_s(self, most_s: float) -> float:
        """Return the seconds left for a check, between 0.05 and `most_s`."""
        return max(min(most_s, self.until_s - time.monotonic()), 0.05)


@dataclass(frozen=True)
class PermissionResult:
    """Outcome of a test of the broker's access rules."""

    level: int = 5  # of MQTT: only 5 says that it refuses
    coordinator: bool | None = None  # online by its own word; None: nothing heard of it
    refused: bool = False  # our message on our own branch
    arrived: bool = False  # it, or its answer
    other_refused: bool = False
    other_arrived: bool = False  # anything on another device's branch
    broke: bool = False  # the broker hung up meanwhile


Question = tuple[str, WireMessage]  # leaf and message that a coordinator answers on the same device's branch


def blob_question() -> Question:
    """Return a request for a blob that does not exist."""
    return "blob/get", wire.ChunkRequest(sha256=secrets.token_hex(32), chunk=CHUNK)


def try_device(
    link: MqttLink, fleet: str, name: str, timer: ExaminationDeadline, question: Callable[[], Question] = blob_question
) -> PermissionResult:
    """Test the rights of a device. A signed coordinator answers only a handshake as `question`."""
    topics = wire.Topics(fleet)
    own, other = (topics.device_topic(one, "up", "") for one in (name, NOBODY))
    heard: list[Message] = []
    link.subscribe(topics.device_filters(name))
    refused = _send_question(link, topics, name, timer, heard, question=question)
    coordinator = _is_coordinator_online(heard, topics)

    def is_answered() -> bool:
        return any("/blob/" in one.topic or one.topic.endswith("/hello") for one in heard)

    _receive_until(link, heard, is_answered, timer.remaining_s(ANSWER_S if coordinator else 0.0))
    if not is_answered() and not coordinator:  # where a broker has no rules, we hear ourselves
        link.subscribe([f"{own}#"])
        refused |= _send_question(link, topics, name, timer, heard, is_answered, question)
    arrived = is_answered()
    strange: list[Message] = []
    link.subscribe([f"{other}#", topics.device_topic(NOBODY, "dn", "#")])

    def has_leaked() -> bool:
        return any(f"/dev/{NOBODY}/" in one.topic for one in strange)

    other_refused = _send_question(link, topics, NOBODY, timer, strange, has_leaked, question)
    return PermissionResult(
        level=link.level,
        coordinator=coordinator,
        refused=refused,
        arrived=arrived,
        other_refused=other_refused or not link.connected,
        other_arrived=has_leaked(),
        broke=not link.connected and not arrived,
    )


def try_coordinator(link: MqttLink, fleet: str, timer: ExaminationDeadline) -> PermissionResult:
    topics = wire.Topics(fleet)
    heard: list[Message] = []
    link.subscribe(topics.coordinator_filters())
    before = link.dropped
    digest = secrets.token_hex(32)
    link.publish(
        topics.blob_topic(NOBODY, "dn", digest, "missing"),
        wire.encode(wire.MissingBlob(sha256=digest, reason="a self-test of fedquilt doctor")),
    )
    _receive_until(link, heard, lambda: link.backlog == 0, timer.remaining_s(ANSWER_S))
    refused = link.dropped > before
    _receive_until(link, heard, lambda: bool(heard), timer.remaining_s(GRACE_S))
    if not heard:
        _send_question(link, topics, NOBODY, timer, heard, lambda: bool(heard))
    return PermissionResult(level=link.level, refused=refused, arrived=bool(heard), broke=not link.connected)


def try_observer(
    link: MqttLink, fleet: str, name: str, timer: ExaminationDeadline
) -> tuple[PermissionResult, set[str]]:
    """Test the rights of an observer. Return the outcome and the senders of received messages."""
    topics = wire.Topics(fleet)
    heard: list[Message] = []
    link.subscribe([f"{topics.root}/dev/+/up/+", topics.coord])
    refused = _send_question(link, topics, name, timer, heard)
    devices = {wire.device_from_topic(one.topic) for one in heard} - {""}
    return PermissionResult(
        level=link.level,
        coordinator=_is_coordinator_online(heard, topics),
        arrived=bool(heard),
        refused=refused,
        broke=not link.connected,
    ), devices


def judge_observer(seen: PermissionResult, devices: Collection[str], broker: Broker) -> str | Problem:
    rules = (
        "fedquilt broker config mosquitto --host BROKER --out FOLDER, where the authority is: its rules name "
        "the observers with a certificate; then copy FOLDER to the broker and reload it"
    )
    if seen.level == 5 and not seen.refused and not seen.broke:
        return error(f"the rules of {broker} do not name this observer, which may write as a device", rules)
    if not seen.arrived:
        said = f"{broker} shows an observer nothing: neither a device nor the coordinator has said anything"
        return Problem(said, rules)
    online = "online" if seen.coordinator else "offline"
    said = f"an observer hears {len(devices)} device{'' if len(devices) == 1 else 's'}, and writes nothing"
    return f"{said}; the coordinator is {online}"


def judge_device(seen: PermissionResult, broker: Broker, name: str) -> Iterator[Numbered]:
    branch = f"dev/{name}"
    if seen.broke:
        yield "FQ411", error(f"{broker} hung up while {branch} was tried: see the broker's log", RULES)
        return
    if seen.refused:
        yield "FQ411", error(f"{broker} refuses what this device sends on its own branch, {branch}/up", RULES)
    elif seen.arrived:
        yield "FQ411", f"what this device sends on {branch} arrives, and so does the answer"
    elif seen.coordinator:
        yield (
            "FQ411",
            error(
                f"a coordinator is online, but what it answers to this device does not arrive: {broker} does not "
                f"let it read {branch}/dn, or drops what it sends on {branch}/up",
                RULES,
            ),
        )
    else:
        word = "acknowledges" if seen.level == 5 else "takes, without a word whether it passes them on,"
        yield (
            "FQ411",
            f"{broker} {word} messages on {branch}/up; whether answers arrive is seen while a coordinator is online",
        )
    yield "FQ412", _judge_other_branch(seen, broker)


def _judge_other_branch(seen: PermissionResult, broker: Broker) -> str | Problem:
    if seen.other_arrived:
        said = f"{broker} lets this device reach another device's branch: what was sent on dev/{NOBODY} arrived"
        if broker.tls or broker.user is not None:
            return error(said, RULES)
        if is_loopback(broker):
            return f"{broker} has no rules for devices; only this machine reaches it"
        return Problem(f"{said}; it has neither encryption nor users", RULES)
    if seen.other_refused or seen.level < 5:
        return f"nothing passes from this device to another's branch through {broker}"
    return Problem(
        f"{broker} acknowledges a message that this device sends on another's branch, dev/{NOBODY}; "
        "whether it is passed on is not seen from here",
        RULES,
    )


def judge_coordinator(seen: PermissionResult, broker: Broker) -> str | Problem:
    if seen.broke or seen.refused:
        return error(f"{broker} refuses what a coordinator sends to devices (dev/+/dn)", RULES)
    if seen.arrived:
        return f"{broker} lets a coordinator write to devices and hear them"
    return f"{broker} lets a coordinator write to devices; none has said anything yet"


def is_loopback(broker: Broker) -> bool:
    try:
        return ipaddress.ip_address(broker.host).is_loopback
    except ValueError:
        return broker.host == "localhost"


# -- trying ---------------------------------------------------------------------------------------


def _send_question(
    link: MqttLink,
    topics: wire.Topics,
    name: str,
    timer: ExaminationDeadline,
    heard: list[Message],
    enough: Callable[[], bool] = lambda: False,
    question: Callable[[], Question] = blob_question,
) -> bool:
    """Publish a question and wait for messages. Return whether the broker refused the question."""
    before = link.dropped
    leaf, message = question()
    link.publish(topics.device_topic(name, "up", leaf), wire.encode(message))
    _receive_until(link, heard, lambda: link.backlog == 0, timer.remaining_s(ANSWER_S))
    _receive_until(link, heard, enough, timer.remaining_s(GRACE_S))
    return link.dropped > before


def _receive_until(link: MqttLink, heard: list[Message], enough: Callable[[], bool], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while not enough() and link.connected and (left_s := until_s - time.monotonic()) > 0:
        link.wait(left_s)
        heard += link.receive()


def _is_coordinator_online(heard: list[Message], topics: wire.Topics) -> bool | None:
    """Return the coordinator's latest state among the messages, or None if unknown."""
    for one in reversed(heard):
        if one.topic == topics.coord:
            try:
                return wire.decode(one.payload, wire.CoordState).online
            except WireError:
                return None
    return None
