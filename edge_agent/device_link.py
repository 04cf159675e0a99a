"""Link of a device to its coordinator: exclusive, and signed with a certificate."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt import wire
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.security.authenticated_link import UNSIGNED, AuthenticatedDeviceLink, load_identity
from fedquilt.security.certificates import require_device_name
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.exclusive_link import make_device_link
from fedquilt.transport.link import LinkWrapper
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

log = logging.getLogger("fedquilt.agent")


def open_device_link(settings: AgentSettings, broker: Broker, boot: str) -> tuple[LinkWrapper, LinkIdentity | None]:
    """Return the link and the identity of a device. The identity is None without a certificate.

    Raises:
        JobError: If the certificate is of another device, or another process of this device is running.
    """
    fleet, device, identity = settings.fleet, settings.device, load_identity(broker)
    if broker.cert is not None:
        require_device_name(broker.cert, device)
    presence = wire.Topics(fleet).device_topic(device, "up", "presence")
    will = presence, wire.encode(wire.Presence(online=False, boot=boot))
    link = make_device_link(MqttLink(broker, f"fedquilt-{fleet}-{device}", will), fleet, device, Path(settings.home))
    link.require_exclusive_use()
    if identity is None:
        log.info("%s", UNSIGNED)
        return link, None
    return AuthenticatedDeviceLink(link, identity, fleet, device), identity
