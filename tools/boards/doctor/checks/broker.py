"""Checks of the connection to the broker, in order: name, port, TLS, login, packet limit."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fedquilt.core import FedquiltError, LinkError
from fedquilt.security import enrolment
from fedquilt.tools.boards.doctor import certificate
from fedquilt.tools.boards.doctor.checks.identity import format_day
from fedquilt.tools.boards.doctor.findings import Finding, error, ok, warning
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.errors import unreachable_error
from fedquilt.transport.mqtt.link import MqttLink
from fedquilt.wire import MAX_CONTROL

STEP_S: Final = 3.0  # for a port, and for TLS
ALERT_S: Final = 0.5  # for a refusal of our certificate
WORD_S: Final = 4.0  # for the broker's answer
LEAST_PAYLOAD: Final = 16 * 1024  # bytes: below it not even a task is sure to pass
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_OTHER_NAME: Final = frozenset({62, 64})


@dataclass(frozen=True)
class ExaminationDeadline:
    """End of the examination, in monotonic time."""

    until_s: float

    def remaining_s(self, most_s: float) -> float:
        """Return the seconds left for a check, between 0.05 and `most_s`."""
        return max(min(most_s, self.until_s - time.monotonic()), 0.05)


def check_connection(broker: Broker, clock_s: float, timer: ExaminationDeadline) -> list[Finding]:
    """Check name, port and TLS of a broker, up to the first failure."""
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return [error("FQ401", str(unreachable_error(broker, problem)), f"getent hosts {broker.host}")]
    addresses = sorted({str(one[4][0]) for one in found})
    told = [ok("FQ401", f"{broker.host} is {', '.join(addresses)}")]
    try:
        line = socket.create_connection((broker.host, broker.port), timer.remaining_s(STEP_S))
    except OSError as problem:
        return [*told, error("FQ402", str(unreachable_error(broker, problem)), f"nc -vz {broker.host} {broker.port}")]
    told.append(ok("FQ402", f"something listens at {broker}"))
    with line:
        if broker.tls:
            told.append(_check_tls(broker, line, clock_s, timer))
    return told


def _check_tls(broker: Broker, line: socket.socket, clock_s: float, timer: ExaminationDeadline) -> Finding:
    show = f"openssl s_client -connect {broker.host}:{broker.port} </dev/null"
    try:
        line.settimeout(timer.remaining_s(STEP_S))
        with broker.tls_context().wrap_socket(line, server_hostname=broker.host) as secure:
            held = certificate.parse_certificate(secure.getpeercert(binary_form=True) or b"")
            if broker.cert is not None and (refusal := _receive_tls_alert(secure, timer)) is not None:
                return error("FQ408", str(unreachable_error(broker, refusal)), _login_fix(broker))
    except ssl.SSLCertVerificationError as problem:
        return _untrusted_finding(broker, problem, show)
    except OSError as problem:
        return error("FQ403", str(unreachable_error(broker, problem)), show)
    except FedquiltError as problem:
        return error("FQ403", str(problem), "correct [broker]")
    except ValueError as problem:
        return warning("FQ403", f"the certificate of {broker} cannot be read: {problem}", show)
    if held.ends_s - clock_s < enrolment.SOON_S:
        return warning(
            "FQ407",
            f"the certificate of {broker} ends on {format_day(held.ends_s)}",
            "fedquilt broker config again on the authority's machine, and copy its files to the broker",
        )
    return ok("FQ403", f"the certificate of {broker} is to be trusted, until {format_day(held.ends_s)}")


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


def _untrusted_finding(broker: Broker, problem: ssl.SSLCertVerificationError, show: str) -> Finding:
    said = str(unreachable_error(broker, problem))
    if problem.verify_code == _NOT_YET:
        return error("FQ404", said, "sudo timedatectl set-ntp true")
    if problem.verify_code == _EXPIRED:
        mend = "fedquilt broker config again on the authority's machine, and copy its files to the broker"
        return error("FQ404", said, mend)
    if problem.verify_code in _OTHER_NAME:
        return error("FQ406", said, f"fedquilt broker config ... --host {broker.host}, on the authority's machine")
    return error("FQ405", said, f"{show} | openssl x509 -noout -issuer; give that authority's file as ca")


@contextmanager
def open_link(broker: Broker, client: str, timer: ExaminationDeadline) -> Iterator[MqttLink | Finding]:
    """Yield a connected link without a persistent session, or an error finding."""
    log = logging.getLogger("fedquilt.transport.mqtt")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what is refused here is a finding, no warning
    link = MqttLink(dataclasses.replace(broker, session_expiry_s=0, max_payload=None), client)
    try:
        try:
            link.wait_until_connected(timer.remaining_s(WORD_S))
        except LinkError as problem:
            yield error("FQ408", str(problem), _login_fix(broker))
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


def check_packet_limit(broker: Broker, link: MqttLink) -> list[Finding]:
    level = "5" if link.level == 5 else "3.1.1"
    told = [ok("FQ408", f"{broker} lets us in, by MQTT {level}")]
    most = link.max_payload
    raise_it = "max_packet_size 1048576 in mosquitto.conf, or what your broker calls it"
    if most < LEAST_PAYLOAD:
        told.append(error("FQ409", f"{broker} takes no more than {most} bytes: tasks do not pass", raise_it))
    elif most < MAX_CONTROL:
        said = (
            f"{broker} takes no more than {most} bytes: long lists of tensors (up to {MAX_CONTROL} bytes) do not pass"
        )
        told.append(warning("FQ409", said, raise_it))
    else:
        said = "announces no limit" if link.level < 5 else f"takes {most} bytes in a message"
        told.append(ok("FQ409", f"{broker} {said}"))
    if broker.max_payload is not None and link.level == 5 and broker.max_payload > most:
        said = (
            f"max_payload is {broker.max_payload}, and {broker} takes {most} bytes: it would hang up at larger messages"
        )
        told.append(error("FQ410", said, "leave max_payload out of [broker]"))
    return told


def is_loopback(broker: Broker) -> bool:
    try:
        return ipaddress.ip_address(broker.host).is_loopback
    except ValueError:
        return broker.host == "localhost"
