"""Checks of the broker: name, port, TLS, login, packet limit, rights and signatures, in this order.

The checks end at the first error before the login. Rights are not checked while the agent or coordinator runs: the
broker would replace its connection by a second client of the same name.

Access rules are tested by publishing messages and receiving the responses. A device requests an unknown blob from the
coordinator on its own branch. The response, that the blob is missing, arrives on the same branch and proves both
directions. With message authentication the request is a handshake instead. Without a coordinator only the broker's
result for the message is available (PUBACK of MQTT 5). Then the same message is published on the branch of a device
that does not exist, where neither message nor response may pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from fedquilt import metrics_endpoint, wire
from fedquilt.core import FedquiltError, JobError, LinkError, WireError, WireMessage
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.security import authenticated_link, enrolment
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.certificates import load_certificate
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.agent import format_day
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.connection import unreachable_error
from fedquilt.transport.mqtt.link import MqttLink
from fedquilt.wire import MAX_CONTROL

TEST_DEVICE: Final = "fedquilt-doctor"  # a device that does not exist
GRACE_S: Final = 0.5  # wait for messages after the broker's acknowledgement
CHUNK: Final = 1024
RULES_FIX: Final = "fedquilt broker config ..., which writes the access rules"


@dataclass(frozen=True)
class PermissionResult:
    level: int = 5  # only MQTT 5 reports refusals
    is_coordinator_online: bool | None = None  # None if no state was received
    is_refused: bool = False  # the message on the device's own branch was refused
    has_arrived: bool = False  # the message or a response has arrived
    is_other_refused: bool = False
    has_other_arrived: bool = False  # a message on another device's branch has arrived
    is_disconnected: bool = False  # the broker closed the connection


ProbeRequest = tuple[str, WireMessage]  # topic suffix and message, to which a coordinator responds


def make_blob_request() -> ProbeRequest:
    return "blob/get", wire.ChunkRequest(sha256=secrets.token_hex(32), chunk=CHUNK)


def try_device(
    link: MqttLink,
    fleet: str,
    name: str,
    deadline_s: float,
    make_request: Callable[[], ProbeRequest] = make_blob_request,
) -> PermissionResult:
    """Test the rights of a device on its own branch and on another device's.

    A coordinator with certificates responds only if `make_request` returns a handshake.
    """
    topics = wire.Topics(fleet)
    own_branch, other_branch = (topics.device_topic(message, "up", "") for message in (name, TEST_DEVICE))
    messages: list[Message] = []
    link.subscribe(topics.device_filters(name))
    refused = _send_request(link, topics, name, deadline_s, messages, make_request=make_request)
    coordinator = _is_coordinator_online(messages, topics)

    def is_answered() -> bool:
        return any("/blob/" in message.topic or message.topic.endswith("/hello") for message in messages)

    _receive_until(link, messages, is_answered, _remaining_s(deadline_s, ANSWER_S if coordinator else 0.0))
    if not is_answered() and not coordinator:  # without access rules the message itself comes back
        link.subscribe([f"{own_branch}#"])
        refused |= _send_request(link, topics, name, deadline_s, messages, is_answered, make_request)
    arrived = is_answered()
    leaked_messages: list[Message] = []
    link.subscribe([f"{other_branch}#", topics.device_topic(TEST_DEVICE, "dn", "#")])

    def has_leaked() -> bool:
        return any(f"/dev/{TEST_DEVICE}/" in message.topic for message in leaked_messages)

    other_refused = _send_request(link, topics, TEST_DEVICE, deadline_s, leaked_messages, has_leaked, make_request)
    return PermissionResult(
        level=link.level,
        is_coordinator_online=coordinator,
        is_refused=refused,
        has_arrived=arrived,
        is_other_refused=other_refused or not link.connected,
        has_other_arrived=has_leaked(),
        is_disconnected=not link.connected and not arrived,
    )


def try_coordinator(link: MqttLink, fleet: str, deadline_s: float) -> PermissionResult:
    topics = wire.Topics(fleet)
    messages: list[Message] = []
    link.subscribe(topics.coordinator_filters())
    dropped_before = link.dropped
    digest = secrets.token_hex(32)
    link.publish(
        topics.blob_topic(TEST_DEVICE, "dn", digest, "missing"),
        wire.encode(wire.MissingBlob(sha256=digest, reason="a self-test of fedquilt doctor")),
    )
    _receive_until(link, messages, lambda: link.backlog == 0, _remaining_s(deadline_s, ANSWER_S))
    refused = link.dropped > dropped_before
    _receive_until(link, messages, lambda: bool(messages), _remaining_s(deadline_s, GRACE_S))
    if not messages:
        _send_request(link, topics, TEST_DEVICE, deadline_s, messages, lambda: bool(messages))
    return PermissionResult(
        level=link.level, is_refused=refused, has_arrived=bool(messages), is_disconnected=not link.connected
    )


def find_running_coordinator(link: MqttLink, fleet: str, deadline_s: float) -> str | None:
    """Return host and folder of the fleet's coordinator process, or None if there is none.

    A killed process leaves its message at the broker, too.
    """
    topic = wire.Topics(fleet).coordinator_process
    messages: list[Message] = []
    link.subscribe([topic])
    _receive_until(link, messages, lambda: any(m.topic == topic for m in messages), _remaining_s(deadline_s, GRACE_S))
    for message in reversed(messages):
        with contextlib.suppress(WireError):  # empty after the end of a process
            if message.topic == topic:
                return wire.decode(message.payload, wire.ProcessState).place
    return None


def try_observer(link: MqttLink, fleet: str, name: str, deadline_s: float) -> tuple[PermissionResult, set[str]]:
    """Test the rights of an observer. Return the result, and the devices whose messages were received."""
    topics = wire.Topics(fleet)
    messages: list[Message] = []
    link.subscribe([f"{topics.root}/dev/+/up/+", topics.coord])
    refused = _send_request(link, topics, name, deadline_s, messages)
    devices = {wire.device_from_topic(message.topic) for message in messages} - {""}
    return PermissionResult(
        level=link.level,
        is_coordinator_online=_is_coordinator_online(messages, topics),
        has_arrived=bool(messages),
        is_refused=refused,
        is_disconnected=not link.connected,
    ), devices


def judge_observer(result: PermissionResult, devices: Collection[str], broker: Broker) -> str | Problem:
    fix = (
        "fedquilt broker config --host BROKER --out FOLDER on the authority's machine, then copy FOLDER "
        "to the broker and reload it"
    )
    if result.level == 5 and not result.is_refused and not result.is_disconnected:
        return error(f"{broker} lets this observer publish as a device: its access rules lack the observer", fix)
    if not result.has_arrived:
        sentence = f"no message reaches this observer: {broker} does not permit reading, or nothing is published"
        return Problem(sentence, fix)
    online = "online" if result.is_coordinator_online else "offline"
    sentence = f"the observer receives from {len(devices)} device{'' if len(devices) == 1 else 's'}, and cannot publish"
    return f"{sentence}; the coordinator is {online}"


def judge_device(result: PermissionResult, broker: Broker, name: str) -> Iterator[Numbered]:
    branch = f"dev/{name}"
    if result.is_disconnected:
        yield "FQ411", error(f"{broker} closed the connection during the test of {branch}: see its log", RULES_FIX)
        return
    if result.is_refused:
        yield "FQ411", error(f"{broker} refuses this device's messages on its own branch, {branch}/up", RULES_FIX)
    elif result.has_arrived:
        yield "FQ411", f"messages of this device on {branch} arrive, and so do responses"
    elif result.is_coordinator_online:
        sentence = (
            f"a coordinator is online, but its responses do not arrive: {broker} does not let this device read "
            f"{branch}/dn, or drops its messages on {branch}/up"
        )
        yield "FQ411", error(sentence, RULES_FIX)
    else:
        accepts = "accepts" if result.level == 5 else "does not report whether it accepts"
        sentence = f"{broker} {accepts} messages on {branch}/up"
        yield "FQ411", f"{sentence}; responses can only be tested while a coordinator is online"
    yield "FQ412", _judge_other_branch(result, broker)


def _judge_other_branch(result: PermissionResult, broker: Broker) -> str | Problem:
    if result.has_other_arrived:
        sentence = f"{broker} delivers messages of this device on another device's branch, dev/{TEST_DEVICE}"
        if broker.tls or broker.user is not None:
            return error(sentence, RULES_FIX)
        if metrics_endpoint.is_loopback(broker.host):
            return f"{broker} has no access rules for devices, but only this machine can connect"
        return Problem(f"{sentence}, and has neither encryption nor users", RULES_FIX)
    if result.is_other_refused or result.level < 5:
        return f"{broker} delivers no message of this device on another device's branch"
    sentence = f"{broker} accepts messages of this device on another device's branch, dev/{TEST_DEVICE}"
    return Problem(f"{sentence}; whether it delivers them cannot be tested here", RULES_FIX)


def judge_coordinator(result: PermissionResult, broker: Broker) -> str | Problem:
    if result.is_disconnected or result.is_refused:
        return error(f"{broker} refuses a coordinator's messages to devices (dev/+/dn)", RULES_FIX)
    if result.has_arrived:
        return f"{broker} lets a coordinator send to devices and receive from them"
    return f"{broker} lets a coordinator send to devices; no device has published anything"


def _remaining_s(deadline_s: float, limit_s: float) -> float:
    return max(min(limit_s, deadline_s - time.monotonic()), 0.05)


# -- probe messages -------------------------------------------------------------------------------


def _send_request(
    link: MqttLink,
    topics: wire.Topics,
    name: str,
    deadline_s: float,
    messages: list[Message],
    is_complete: Callable[[], bool] = lambda: False,
    make_request: Callable[[], ProbeRequest] = make_blob_request,
) -> bool:
    dropped_before = link.dropped
    topic_suffix, message = make_request()
    link.publish(topics.device_topic(name, "up", topic_suffix), wire.encode(message))
    _receive_until(link, messages, lambda: link.backlog == 0, _remaining_s(deadline_s, ANSWER_S))
    _receive_until(link, messages, is_complete, _remaining_s(deadline_s, GRACE_S))
    return link.dropped > dropped_before


def _receive_until(link: MqttLink, messages: list[Message], is_complete: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_complete() and link.connected and (remaining_s := deadline_s - time.monotonic()) > 0:
        link.wait(remaining_s)
        messages += link.receive()


def _is_coordinator_online(messages: list[Message], topics: wire.Topics) -> bool | None:
    for message in reversed(messages):
        if message.topic == topics.coord:
            try:
                return wire.decode(message.payload, wire.CoordState).online
            except WireError:
                return None
    return None


PORT_S: Final = 3.0  # limit for the port, and for TLS
ALERT_S: Final = 0.5  # wait for a refusal of the client's certificate
CONNECT_S: Final = 4.0  # limit for the MQTT login
ANSWER_S: Final = 2.5  # limit for responses of the coordinator
MIN_PAYLOAD: Final = 16 * 1024  # bytes. Tasks may be larger than a smaller limit
ISSUE_FIX: Final = "fedquilt identity issue coordinator, on the authority's machine"
RENEW_FIX: Final = "fedquilt broker config again on the authority's machine, and copy its files to the broker"
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_OTHER_NAME: Final = frozenset({62, 64})

CheckSteps = Generator[Numbered, None, bool]
"""Findings of a part of the examination. The generator returns whether the examination can go on."""


# -- device and coordinator -----------------------------------------------------------------------


def check_broker_for_device(settings: AgentSettings, clock_s: float, deadline_s: float) -> Iterator[Numbered]:
    try:
        broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    except FedquiltError:
        return  # FQ304 reports the error
    if not (yield from check_connection(broker, clock_s, deadline_s)):
        return
    if machine_facts.is_locked(Path(settings.home)):
        yield "FQ411", f"{settings.device}'s agent is running: stop it to have its rights at {broker} tested"
        return
    with open_link(broker, f"{TEST_DEVICE}-{settings.device}", deadline_s) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        identity, verdict = load_identity(broker)
        make_request = make_blob_request
        if identity is not None:
            make_request = lambda: ("hello", authenticated_link.handshake_probe(identity))  # noqa: E731
        result = try_device(link, settings.fleet, settings.device, deadline_s, make_request)
        yield from judge_device(result, broker, settings.device)
        if identity is not None:
            verdict = check_handshake(
                link, identity, settings.fleet, settings.device, result.is_coordinator_online, deadline_s
            )
        yield "FQ414", verdict


def check_broker_for_coordinator(
    table: Mapping[str, Any], home: Path | None, fleet: str, clock_s: float, deadline_s: float
) -> Iterator[Numbered]:
    try:
        broker = Broker.from_url(**table)
    except FedquiltError as problem:
        yield "FQ400", error(str(problem), "correct --broker and the options for its files")
        return
    if not (yield from check_connection(broker, clock_s, deadline_s)):
        return
    certificate = None if broker.cert is None else load_certificate(str(broker.cert))
    is_observer = certificate is not None and certificate.unit == authenticated_link.OBSERVER
    if not is_observer and home is not None and machine_facts.is_locked(home):
        yield "FQ413", f"a coordinator serves {home}: stop it to have its rights at {broker} tested"
        return
    with open_link(broker, f"{TEST_DEVICE}-{'observer' if is_observer else 'coordinator'}", deadline_s) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        if is_observer:
            result, devices = try_observer(link, fleet, str(certificate and certificate.name), deadline_s)
            yield "FQ415", judge_observer(result, devices, broker)
            return
        if (other := find_running_coordinator(link, fleet, deadline_s)) is not None:
            sentence = f"a coordinator of fleet {fleet!r} runs at {other}, or was killed there"
            yield "FQ416", Problem(sentence, "stop it before you start another one, or give another --fleet")
        identity, verdict = load_identity(broker)
        yield "FQ414", verdict if identity is None else check_coordinator_certificate(identity, clock_s)
        yield "FQ413", judge_coordinator(try_coordinator(link, fleet, deadline_s), broker)


# -- connection -----------------------------------------------------------------------------------


def check_connection(broker: Broker, clock_s: float, deadline_s: float) -> CheckSteps:
    """Yield findings on name, port and TLS up to the first error. Return True without errors."""
    try:
        addresses = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        yield "FQ401", error(str(unreachable_error(broker, problem)), f"getent hosts {broker.host}")
        return False
    yield "FQ401", f"{broker.host} is {', '.join(sorted({str(address[4][0]) for address in addresses}))}"
    try:
        connection = socket.create_connection((broker.host, broker.port), _remaining_s(deadline_s, PORT_S))
    except OSError as problem:
        yield "FQ402", error(str(unreachable_error(broker, problem)), f"nc -vz {broker.host} {broker.port}")
        return False
    yield "FQ402", f"{broker} accepts connections"
    with connection:
        if not broker.tls:
            return True
        number, verdict = _check_tls(broker, connection, clock_s, deadline_s)
    yield number, verdict
    return not (isinstance(verdict, Problem) and verdict.severity == "error")


def _check_tls(broker: Broker, connection: socket.socket, clock_s: float, deadline_s: float) -> Numbered:
    show_command = f"openssl s_client -connect {broker.host}:{broker.port} </dev/null"
    try:
        connection.settimeout(_remaining_s(deadline_s, PORT_S))
        with broker.tls_context().wrap_socket(connection, server_hostname=broker.host) as tls_socket:
            ends_s = ssl.cert_time_to_seconds(str((tls_socket.getpeercert() or {})["notAfter"]))
            if broker.cert is not None and (refusal := _receive_tls_alert(tls_socket, deadline_s)) is not None:
                return "FQ408", error(str(unreachable_error(broker, refusal)), _login_fix(broker))
    except ssl.SSLCertVerificationError as problem:
        return _explain_untrusted_certificate(broker, problem, show_command)
    except OSError as problem:
        return "FQ403", error(str(unreachable_error(broker, problem)), show_command)
    except FedquiltError as problem:
        return "FQ403", error(str(problem), "correct [broker]")
    day = format_day(ends_s)
    if ends_s - clock_s < enrolment.EXPIRY_WARNING_S:
        return "FQ407", Problem(f"the certificate of {broker} expires on {day}", RENEW_FIX)
    return "FQ403", f"the certificate of {broker} is trusted, and valid until {day}"


def _receive_tls_alert(tls_socket: ssl.SSLSocket, deadline_s: float) -> ssl.SSLError | None:
    # TLS 1.3 checks the client's certificate after the handshake
    tls_socket.settimeout(_remaining_s(deadline_s, ALERT_S))
    try:
        tls_socket.recv(1)
    except ssl.SSLError as alert:
        return alert
    except OSError:  # no alert has arrived
        pass
    return None


def _explain_untrusted_certificate(
    broker: Broker, problem: ssl.SSLCertVerificationError, show_command: str
) -> Numbered:
    sentence = str(unreachable_error(broker, problem))
    if problem.verify_code == _NOT_YET:
        return "FQ404", error(sentence, "sudo timedatectl set-ntp true")
    if problem.verify_code == _EXPIRED:
        return "FQ404", error(sentence, RENEW_FIX)
    if problem.verify_code in _OTHER_NAME:
        return "FQ406", error(sentence, f"fedquilt broker config ... --host {broker.host}, on the authority's machine")
    return "FQ405", error(sentence, f"{show_command} | openssl x509 -noout -issuer; set ca to that authority's file")


@contextmanager
def open_link(broker: Broker, client: str, deadline_s: float) -> Iterator[MqttLink | Problem]:
    """Yield a connected link without a session, or the problem if the broker refuses the login."""
    log = logging.getLogger("fedquilt.transport.mqtt")
    level = log.level
    log.setLevel(logging.CRITICAL)  # refusals are reported as findings
    link = MqttLink(dataclasses.replace(broker, session_expiry_s=0), client)
    try:
        try:
            link.wait_until_connected(_remaining_s(deadline_s, CONNECT_S))
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
        return f"mosquitto_passwd for user {broker.user} on the broker's machine; and see the broker's log"
    return "see the broker's log"


def check_packet_limit(broker: Broker, link: MqttLink) -> Iterator[Numbered]:
    yield "FQ408", f"{broker} accepts the login (MQTT {'5' if link.level == 5 else '3.1.1'})"
    limit_bytes, fix = link.max_payload, "max_packet_size 1048576 in mosquitto.conf, or your broker's name for it"
    limit_text = f"{broker} accepts at most {limit_bytes} bytes in a message"
    if limit_bytes < MIN_PAYLOAD:
        yield "FQ409", error(f"{limit_text}: tasks are larger", fix)
    elif limit_bytes < MAX_CONTROL:
        yield "FQ409", Problem(f"{limit_text}: tasks with many tensors (up to {MAX_CONTROL} bytes) are larger", fix)
    else:
        sentence = "announces no limit" if link.level < 5 else f"accepts {limit_bytes} bytes in a message"
        yield "FQ409", f"{broker} {sentence}"


# -- signatures -----------------------------------------------------------------------------------


def load_identity(broker: Broker) -> tuple[LinkIdentity | None, str | Problem]:
    """Return the identity for signing and "", or None and the verdict on why messages are unsigned."""
    try:
        identity = authenticated_link.load_identity(broker)
    except JobError as problem:
        return None, error(str(problem), "add ca")
    if identity is not None:
        return identity, ""
    if metrics_endpoint.is_loopback(broker.host):
        return None, f"{authenticated_link.UNSIGNED}, but only this machine can connect to {broker}"
    fix = "fedquilt identity gives both sides a certificate (docs/security.md)"
    return None, Problem(authenticated_link.UNSIGNED, fix)


def check_handshake(
    link: MqttLink, identity: LinkIdentity, fleet: str, name: str, is_online: bool | None, deadline_s: float
) -> str | Problem:
    """Return the verdict on a device's handshake with the coordinator.

    `is_online` says whether the coordinator is online. If not, return without waiting.
    """
    device_link = AuthenticatedDeviceLink(link, identity, fleet, name)
    answer_deadline_s = time.monotonic() + _remaining_s(deadline_s, ANSWER_S if is_online else 0.0)
    device_link.receive()
    while not device_link.connected and link.connected and (remaining_s := answer_deadline_s - time.monotonic()) > 0:
        link.wait(remaining_s)
        device_link.receive()
    if device_link.connected:
        return "signed: the coordinator has proved its identity, and accepts this device's certificate"
    if not is_online:
        return "signed: certificates can only be tested while a coordinator is online"
    sentence = f"handshake with the coordinator failed: {device_link.problem or 'no response'}"
    return error(sentence, "see the coordinator's log for the reason")


def check_coordinator_certificate(identity: LinkIdentity, clock_s: float) -> str | Problem:
    try:
        ends_s = identity.require_coordinator_certificate()
    except JobError as problem:
        return error(str(problem), ISSUE_FIX)
    if ends_s - clock_s < enrolment.EXPIRY_WARNING_S:
        return Problem(f"signed: the coordinator's certificate expires on {format_day(ends_s)}", ISSUE_FIX)
    return "signed: devices accept this certificate as the coordinator's"
