"""`fedquilt ca`: init, issue, list, revoke."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb_group


@verb_group()
def ca() -> None:
    """Manage the certificate authority of a fleet: create, issue, list and revoke."""


@ca.command()
@option("--name", default="fedquilt", help="Name of the authority in its certificate.")
@option("--crl-url", metavar="URL", help="Address from which brokers will fetch the revocation list (EMQX does).")
@options.authority_option
def init(name: str, crl_url: str | None, ca: Path) -> int:
    """Create a certificate authority: key, certificate and revocation list."""
    from fedquilt.tools.operations.identity import commands

    return commands.create_authority(ca, name, crl_url)


@ca.command()
@argument("name", "Whose certificate it is.", type=options.NAME)
@option("--host", "hosts", multiple=True, help="Name or address of a server; may be repeated.")
@option(
    "--role",
    type=options.WordChoice(("observer", "site")),
    help="Role of the holder: an observer only reads messages, a site submits updates of its boards.",
)
@option("--boards", multiple=True, metavar="PATTERN", help="Boards of a site, by name or 'cam-*'; may be repeated.")
@option("--most-boards", type=options.COUNT, metavar="N", help="Most boards of a site in a round.")
@option("--out", type=options.FOLDER, default=Path(), help="Folder to write into.")
@option(
    "--days",
    type=options.ABOVE_0,
    metavar="N",
    help="Days for which the certificate is valid (default: 730; an observer's or a site's 365).",
)
@options.authority_option
def issue(
    name: str,
    hosts: tuple[str, ...],
    role: Literal["observer", "site"] | None,
    boards: tuple[str, ...],
    most_boards: int | None,
    out: Path,
    days: float | None,
    ca: Path,
) -> int:
    """Issue a certificate and key for the coordinator, a server or another role."""
    from fedquilt.tools.operations.identity import commands

    return commands.issue(ca, name, list(hosts), out, days, role, boards, most_boards)


@ca.command(name="list")
@options.authority_option
@options.format_option
def list_certificates(ca: Path, format: str) -> int:
    """List all certificates and the unused tokens."""
    from fedquilt.tools.operations.identity import commands

    return commands.print_certificates(ca, format)


@ca.command()
@argument("device", "Whose certificates are revoked.", type=options.NAME)
@options.authority_option
def revoke(device: str, ca: Path) -> int:
    """Revoke the certificates of a device or server, and update the revocation list."""
    from fedquilt.tools.operations.identity import commands

    return commands.revoke_certificates(ca, device)
