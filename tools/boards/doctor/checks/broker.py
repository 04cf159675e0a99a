"""Checks of the connection to the broker, in order: name, port, TLS, login, packet limit, rights, signatures.

The checks end at the first error before the login. A running agent or coordinator keeps its connection: the broker
would take a second client of the same name for it.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import FedquiltError, JobError, LinkError
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.security import authenticated_link, enrolment
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.boards.doctor import machine_facts
from fedquilt.tools.boards.doctor.checks import permissions
from fedquilt.tools.boards.doctor.checks.identity import format_day, load_certificate
from fedquilt.tools.boards.doctor.checks.permissions import ExaminationDeadline
from fedquilt.tools.boards.doctor.findings import Numbered, Problem, error
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.connection import unreachable_error
from fedquilt.transport.mqtt.link import MqttLink
from fedquilt.wire import MAX_CONTROL

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
    with open_link(broker, f"{permissions.NOBODY}-{settings.device}", timer) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        own, told = load_identity(broker)
        question = permissions.blob_question
        if own is not None:
            question = lambda: ("hello", authenticated_link.handshake_probe(own))  # noqa: E731
        seen = permissions.try_device(link, settings.fleet, settings.device, timer, question)
        yield from permissions.judge_device(seen, broker, settings.device)
        if own is not None:
            told = check_handshake(link, own, settings.fleet, settings.device, seen.coordinator, timer)
        yield "FQ414", told


def check_broker_for_coordinator(
    table: Mapping[str, Any], home: Path | None, fleet: str, clock_s: float, timer: ExaminationDeadline
) -> Iterator[Numbered]:
    """Yield findings on the connection and access rules of a coordinator or an observer.

    Args:
        table: [broker] table.
        home: Folder of the coordinator, if given.
        fleet: Name of the fleet.
        clock_s: Time of this machine, in seconds since 1970.
        timer: End of the examination.
    """
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
    with open_link(broker, f"{permissions.NOBODY}-{'observer' if watches else 'coordinator'}", timer) as link:
        if isinstance(link, Problem):
            yield "FQ408", link
            return
        yield from check_packet_limit(broker, link)
        if watches:
            seen, devices = permissions.try_observer(link, fleet, str(held and held.name), timer)
            yield "FQ415", permissions.judge_observer(seen, devices, broker)
            return
        own, told = load_identity(broker)
        yield "FQ414", told if own is None else check_coordinator_certificate(own, clock_s)
        yield "FQ413", permissions.judge_coordinator(permissions.try_coordinator(link, fleet, timer), broker)


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
    """Return the broker's TLS alert against this side's certificate, or None if it sends none in time."""
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
    """Yield a connected link without a persistent session, or the problem."""
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
    """Yield findings on the login and the broker's packet limit."""
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
    if permissions.is_loopback(broker):
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
        return "signed: the coordinator has proved that it is, and takes this device's certificate"
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
