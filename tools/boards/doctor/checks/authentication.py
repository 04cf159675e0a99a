"""Checks of message authentication, by a handshake with the coordinator."""

from __future__ import annotations

import time
from typing import Final

from fedquilt.core import JobError
from fedquilt.security import authenticated_link, enrolment
from fedquilt.security.authenticated_link import AuthenticatedDeviceLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.tools.boards.doctor.checks import broker as checks_broker
from fedquilt.tools.boards.doctor.checks.broker import ExaminationDeadline
from fedquilt.tools.boards.doctor.checks.identity import format_day
from fedquilt.tools.boards.doctor.findings import Finding, error, ok, warning
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

ANSWER_S: Final = 2.5  # for a handshake
ISSUE: Final = "fedquilt identity issue coordinator, on the authority's machine"
_ENROL: Final = "fedquilt identity and fedquilt identity give both sides a certificate (docs/security.md)"


def load_identity(broker: Broker) -> LinkIdentity | Finding:
    """Return the identity for signing, or a finding if none is configured."""
    try:
        found = authenticated_link.load_identity(broker)
    except JobError as problem:
        return error("FQ414", str(problem), "add ca")
    if found is not None:
        return found
    if checks_broker.is_loopback(broker):
        return ok("FQ414", f"{authenticated_link.UNSIGNED}; only this machine reaches {broker}")
    return warning("FQ414", authenticated_link.UNSIGNED, _ENROL)


def check_handshake(
    link: MqttLink, own: LinkIdentity, fleet: str, name: str, online: bool | None, timer: ExaminationDeadline
) -> Finding:
    """Check the handshake of a device. An offline coordinator is not waited for."""
    board = AuthenticatedDeviceLink(link, own, fleet, name)
    until_s = time.monotonic() + timer.remaining_s(ANSWER_S if online else 0.0)
    board.receive()
    while not board.connected and link.connected and (left_s := until_s - time.monotonic()) > 0:
        link.wait(left_s)
        board.receive()
    if board.connected:
        return ok("FQ414", "signed: the coordinator has proved that it is, and takes this device's certificate")
    if not online:
        return ok("FQ414", "signed: whether certificates are taken is seen while a coordinator is online")
    said = f"no handshake with the coordinator comes about: {board.problem or 'it does not answer'}"
    return error("FQ414", said, "look into the coordinator's log, which says why it refuses a device")


def check_coordinator_certificate(own: LinkIdentity, clock_s: float) -> Finding:
    try:
        ends_s = own.require_coordinator_certificate()
    except JobError as problem:
        return error("FQ414", str(problem), ISSUE)
    if ends_s - clock_s < enrolment.SOON_S:
        return warning(
            "FQ414", f"signed: no board takes the coordinator's certificate after {format_day(ends_s)}", ISSUE
        )
    return ok("FQ414", "signed: boards will take the certificate for the coordinator's")
