"""`fedquilt identity` enrol, request and accept, with the other verbs of the group."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb_group

settings_argument: Final = argument("settings", "The board's agent.toml.", type=options.PATH)


@verb_group()
def identity() -> None:
    """Manage the certificate authority of a fleet and enrol devices."""


identity.add_operator_verbs("authority")


@identity.command()
@settings_argument
@option("--wait", is_flag=True, help="Retry until the endpoint answers.")
def enrol(settings: Path, wait: bool) -> None:
    """Request a certificate for this device at [enrol] url, or renew it when due."""
    from fedquilt.tools.boards import enrol as tool

    tool.enrol_device(settings, should_retry=wait)


@identity.command()
@settings_argument
@argument("csr", "File for the certificate request.", type=options.PATH)
def request(settings: Path, csr: Path) -> None:
    """Write a certificate request of this device."""
    from fedquilt.tools.boards import enrol as tool

    tool.request_certificate(settings, csr)


@identity.command()
@settings_argument
@argument("certificate", "The signed certificate.", type=options.PATH)
def accept(settings: Path, certificate: Path) -> None:
    """Install the certificate that the authority has signed for this device."""
    from fedquilt.tools.boards import enrol as tool

    tool.accept_certificate(settings, certificate)
