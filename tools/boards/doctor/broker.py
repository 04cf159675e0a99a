"""Checks of the connection to the broker, in order: name, port, TLS, login, packet limit, rights, signatures.

The checks end at the first error before the login. A running agent or coordinator keeps its connection: the broker
would take a second client of the same name for it.

Access rules are tested by publishing messages and receiving the responses. A device requests an unknown blob from the
coordinator on its own branch. The response, that the blob is missing, arrives on the same branch and proves both
directions. With message authentication the request is a handshake instead. Without a coordinator only the broker's
result for the message is available (PUBACK of MQTT 5). Then the same message is published on the branch of a device
that does not exist, where neither message nor response may pass.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import wire
from fedquilt.core import FedquiltError, JobError, LinkError, WireError, WireMessage
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.security import authenticated_link, enrolment
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.agent import format_day, load_certificate
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.connection import unreachable_error
from fedquilt.transport.mqtt.link import MqttLink
from fedquilt.wire import MAX_CONTROL

NOBODY: Final = "fedquilt-doctor"  # a device that does not exist
GRACE_S: Final = 0.5  # for what may arrive after the broker's acknowledgement
CHUNK: Final = 1024
RULES: Final = "fedquilt broker config mosquitto ..., which writes the rules that are needed"


@dataclass(frozen=True)
class ExaminationDeadline:
    until_s: float

    def remaining_s(self, most_s: float) -> float:
        """Return the seconds left for a check, between 0.05 and `most_s`."""
        return max(min(most_s, self.until_s - time.monotonic()), 0.05)


@dataclass(frozen=True)
class PermissionResult:
    level: int = 5  # of MQTT: only 5 says that it refuses
    coordinator: bool | None = None  # online by its own word; None: nothing heard of it
    refused: bool = False  # our message on our own branch
    arrived: bool = False  # it, or its answer
    other_refused: bool = False
    other_arrived: bool = False  # anything on another device's branch
    broke: bool = False  # the broker hung up meanwhile


Question = tuple[str, WireMessage]  # leaf and message that a coordinator answers on the same device's branch


def blob_question() -> Question:
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
    for one in reversed(heard):
        if one.topic == topics.coord:
            try:
                return wire.decode(one.payload, wire.CoordState).online
            except WireError:
                return None
    return None


STEP_S: Final = 3.0  # for a port, and for TLS
ALERT_S: Final = 0.5  # for a refusal of our certificate
WORD_S: Final = 4.0  # for the broker's answer
ANSWER_S: Final = 2.5  # for a handshake with the coordinator
LEAST_PAYLOAD: Final = 16 * 1024  # bytes: below it not even a task is sure to pass
ISSUE: Final = "fedquilt identity issue coordinator, on the authority's machine"
AGAIN: Final = "fedquilt broker config again on the authority's machine, and copy its files to the broker"
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_OTHER_NAME: Final = frozenset({62, 64})

Steps = Generator[Numbered, None, bool]
"""Findings of a part of the examination, which returns whether the examination can go on."""


# -- the whole of a device and of a coordinator ---------------------------------------------------


def check_broker_for_device(settings: AgentSettings, clock_s: float, timer: ExaminationDeadline) -> Iterator[Numbered]:
    """Yield findings on a device's connection, access rules and handshake, up to an error that hides the rest."""
    try:
        broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    except FedquiltError:
        return  # FQ304 tells
    if not (yield from check_connection(broker, clock_s, timer)):
        return
    if machine_facts.is_locked(Path(settings.home)):
        yield "FQ411", f"{settings.device}'s agent runs here: its rights at {broker} are tried while it is stopped"
        return
    with open_link(broker, f"{NOBODY}-{settings.device}", timer) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        own, told = load_identity(broker)
        question = blob_question
        if own is not None:
            question = lambda: ("hello", authenticated_link.handshake_probe(own))  # noqa: E731
        seen = try_device(link, settings.fleet, settings.device, timer, question)
        yield from judge_device(seen, broker, settings.device)
        if own is not None:
            told = check_handshake(link, own, settings.fleet, settings.device, seen.coordinator, timer)
        yield "FQ414", told


def check_broker_for_coordinator(
    table: Mapping[str, Any], home: Path | None, fleet: str, clock_s: float, timer: ExaminationDeadline
) -> Iterator[Numbered]:
    """Yield findings on the connection and access rules of a coordinator or an observer."""
    try:
        broker = Broker.from_url(**table)
    except FedquiltError as problem:
        yield "FQ400", error(str(problem), "correct --broker and the files beside it")
        return
    if not (yield from check_connection(broker, clock_s, timer)):
        return
    held = None if broker.cert is None else load_certificate(str(broker.cert))
    watches = held is not None and held.unit == authenticated_link.OBSERVER
    if not watches and home is not None and machine_facts.is_locked(home):
        yield "FQ413", f"a coordinator serves {home}: its rights at {broker} are tried while it is stopped"
        return
    with open_link(broker, f"{NOBODY}-{'observer' if watches else 'coordinator'}", timer) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        if watches:
            seen, devices = try_observer(link, fleet, str(held and held.name), timer)
            yield "FQ415", judge_observer(seen, devices, broker)
            return
        own, told = load_identity(broker)
        yield "FQ414", told if own is None else check_coordinator_certificate(own, clock_s)
        yield "FQ413", judge_coordinator(try_coordinator(link, fleet, timer), broker)


# -- getting there --------------------------------------------------------------------------------


def check_connection(broker: Broker, clock_s: float, timer: ExaminationDeadline) -> Steps:
    """Yield findings on name, port and TLS up to the first error. Return True without errors."""
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        yield "FQ401", error(str(unreachable_error(broker, problem)), f"getent hosts {broker.host}")
        return False
    yield "FQ401", f"{broker.host} is {', '.join(sorted({str(one[4][0]) for one in found}))}"
    try:
        line = socket.create_connection((broker.host, broker.port), timer.remaining_s(STEP_S))
    except OSError as problem:
        yield "FQ402", error(str(unreachable_error(broker, problem)), f"nc -vz {broker.host} {broker.port}")
        return False
    yield "FQ402", f"something listens at {broker}"
    with line:
        if not broker.tls:
            return True
        number, told = _check_tls(broker, line, clock_s, timer)
    yield number, told
    return not (isinstance(told, Problem) and told.severity == "error")


def _check_tls(broker: Broker, line: socket.socket, clock_s: float, timer: ExaminationDeadline) -> Numbered:
    show = f"openssl s_client -connect {broker.host}:{broker.port} </dev/null"
    try:
        line.settimeout(timer.remaining_s(STEP_S))
        with broker.tls_context().wrap_socket(line, server_hostname=broker.host) as secure:
            ends_s = ssl.cert_time_to_seconds(str((secure.getpeercert() or {})["notAfter"]))
            if broker.cert is not None and (refusal := _receive_tls_alert(secure, timer)) is not None:
                return "FQ408", error(str(unreachable_error(broker, refusal)), _login_fix(broker))
    except ssl.SSLCertVerificationError as problem:
        return _explain_untrusted_certificate(broker, problem, show)
    except OSError as problem:
        return "FQ403", error(str(unreachable_error(broker, problem)), show)
    except FedquiltError as problem:
        return "FQ403", error(str(problem), "correct [broker]")
    day = format_day(ends_s)
    if ends_s - clock_s < enrolment.SOON_S:
        return "FQ407", Problem(f"the certificate of {broker} ends on {day}", AGAIN)
    return "FQ403", f"the certificate of {broker} is to be trusted, until {day}"


def _receive_tls_alert(secure: ssl.SSLSocket, timer: ExaminationDeadline) -> ssl.SSLError | None:
    # TLS 1.3 checks the client's certificate after the handshake
    secure.settimeout(timer.remaining_s(ALERT_S))
    try:
        secure.recv(1)
    except ssl.SSLError as refusal:
        return refusal
    except OSError:  # it has said nothing so far
        pass
    return None


def _explain_untrusted_certificate(broker: Broker, problem: ssl.SSLCertVerificationError, show: str) -> Numbered:
    said = str(unreachable_error(broker, problem))
    if problem.verify_code == _NOT_YET:
        return "FQ404", error(said, "sudo timedatectl set-ntp true")
    if problem.verify_code == _EXPIRED:
        return "FQ404", error(said, AGAIN)
    if problem.verify_code in _OTHER_NAME:
        return "FQ406", error(said, f"fedquilt broker config ... --host {broker.host}, on the authority's machine")
    return "FQ405", error(said, f"{show} | openssl x509 -noout -issuer; give that authority's file as ca")


@contextmanager
def open_link(broker: Broker, client: str, timer: ExaminationDeadline) -> Iterator[MqttLink | Problem]:
    log = logging.getLogger("fedquilt.transport.mqtt")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what is refused here is a finding, no warning
    link = MqttLink(dataclasses.replace(broker, session_expiry_s=0), client)
    try:
        try:
            link.wait_until_connected(timer.remaining_s(WORD_S))
        except LinkError as problem:
            yield error(str(problem), _login_fix(broker))
        else:
            yield link
    finally:
        link.close()
        log.setLevel(level)


def _login_fix(broker: Broker) -> str:
    if broker.cert is not None:
        return f"openssl x509 -noout -subject -dates -in {broker.cert}; and see the broker's log"
    if broker.user is not None:
        return f"mosquitto_passwd, for user {broker.user}, on the broker's machine; and see the broker's log"
    return "see the broker's log"


def check_packet_limit(broker: Broker, link: MqttLink) -> Iterator[Numbered]:
    yield "FQ408", f"{broker} lets us in, by MQTT {'5' if link.level == 5 else '3.1.1'}"
    most, raise_it = link.max_payload, "max_packet_size 1048576 in mosquitto.conf, or what your broker calls it"
    takes = f"{broker} takes no more than {most} bytes"
    if most < LEAST_PAYLOAD:
        yield "FQ409", error(f"{takes}: tasks do not pass", raise_it)
    elif most < MAX_CONTROL:
        yield "FQ409", Problem(f"{takes}: long lists of tensors (up to {MAX_CONTROL} bytes) do not pass", raise_it)
    else:
        said = "announces no limit" if link.level < 5 else f"takes {most} bytes in a message"
        yield "FQ409", f"{broker} {said}"


# -- signatures -----------------------------------------------------------------------------------


def load_identity(broker: Broker) -> tuple[LinkIdentity | None, str | Problem]:
    """Return the identity for signing, or None and what that means."""
    try:
        found = authenticated_link.load_identity(broker)
    except JobError as problem:
        return None, error(str(problem), "add ca")
    if found is not None:
        return found, ""
    if is_loopback(broker):
        return None, f"{authenticated_link.UNSIGNED}; only this machine reaches {broker}"
    fix = "fedquilt identity gives both sides a certificate (docs/security.md)"
    return None, Problem(authenticated_link.UNSIGNED, fix)


def check_handshake(
    link: MqttLink, own: LinkIdentity, fleet: str, name: str, online: bool | None, timer: ExaminationDeadline
) -> str | Problem:
    """Check the handshake of a device. An offline coordinator is not waited for."""
    board = AuthenticatedDeviceLink(link, own, fleet, name)
    until_s = time.monotonic() + timer.remaining_s(ANSWER_S if online else 0.0)
    board.receive()
    while not board.connected and link.connected and (left_s := until_s - time.monotonic()) > 0:
        link.wait(left_s)
        board.receive()
    if board.connected:
        return "signed: the coordinator has proved its identity, and takes this device's certificate"
    if not online:
        return "signed: whether certificates are taken is seen while a coordinator is online"
    said = f"no handshake with the coordinator comes about: {board.problem or 'it does not answer'}"
    return error(said, "look into the coordinator's log, which says why it refuses a device")


def check_coordinator_certificate(own: LinkIdentity, clock_s: float) -> str | Problem:
    try:
        ends_s = own.require_coordinator_certificate()
    except JobError as problem:
        return error(str(problem), ISSUE)
    if ends_s - clock_s < enrolment.SOON_S:
        return Problem(f"signed: no board takes the coordinator's certificate after {format_day(ends_s)}", ISSUE)
    return "signed: boards will take the certificate for the coordinator's"
