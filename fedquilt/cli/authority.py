"""`fedquilt identity` verbs for the certificate authority, left out of the wheel for boards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@options.authority_option
def init(ca: Path) -> None:
    """Create a certificate authority: key, certificate and revocation list."""
    from fedquilt.tools.identity import commands

    commands.create_authority(ca)


@verb()
@argument("name", "Name of the holder; without --host and --role the coordinator's.", type=options.NAME)
@option("--host", "hosts", multiple=True, help="Name or address of a server; may be repeated.")
@option(
    "--role",
    type=options.WordChoice(("observer", "site")),
    help="Role: observer reads messages, site submits updates of boards.",
)
@option("--boards", multiple=True, metavar="PATTERN", help="Boards of a site, by name or 'cam-*'; may be repeated.")
@option("--most-boards", type=options.COUNT, metavar="N", help="Largest number of a site's boards in a round.")
@option("--out", type=options.FOLDER, default=Path(), help="Folder to write into.")
@options.authority_option
def issue(
    name: str,
    hosts: tuple[str, ...],
    role: Literal["observer", "site"] | None,
    boards: tuple[str, ...],
    most_boards: int | None,
    out: Path,
    ca: Path,
) -> None:
    """Issue a certificate and key for the coordinator, a server or another role. Existing files are replaced."""
    from fedquilt.tools.identity import commands

    commands.issue_and_write_certificate(ca, name, list(hosts), out, role, boards, most_boards)


@verb(name="list")
@options.authority_option
@options.format_option
def list_certificates(ca: Path, format: str) -> None:
    """List all certificates and the unused tokens."""
    from fedquilt.tools.identity import commands

    commands.print_certificates(ca, format)


@verb()
@argument("device", "Holder of the certificates.", type=options.NAME)
@options.authority_option
def revoke(device: str, ca: Path) -> None:
    """Revoke the certificates of a device or server, and update the revocation list."""
    from fedquilt.tools.identity import commands

    commands.revoke_certificates(ca, device)


@verb()
@argument("device", "The board's id, or a pattern such as 'orin-*'.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the token (mode 0600), which is then not printed.")
@options.authority_option
def token(device: str, out: Path | None, ca: Path) -> None:
    """Create a one-time token for a device, valid for 72 hours and shown once."""
    from fedquilt.tools.identity import commands

    commands.create_and_print_token(ca, device, out)


@verb()
@option("--listen", default="0.0.0.0:8884", metavar="HOST:PORT", help="Address to listen on.")
@option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or address for boards (default: this machine's); may be repeated.",
)
@options.authority_option
def serve(listen: str, hosts: tuple[str, ...], ca: Path) -> None:
    """Run the HTTPS server at which devices enrol and renew certificates."""
    from fedquilt.tools.identity import commands

    logging.getLogger("fedquilt.enrol").setLevel(min(logging.INFO, logging.getLogger().level))
    commands.serve_enrolment(ca, listen, list(hosts))


@verb()
@argument("csr", "The certificate request of a board.", type=options.PATH)
@option("--device", type=options.NAME, required=True, help="The board that the request comes from.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the certificate (default: CSR with .crt).")
@options.authority_option
def sign(csr: Path, device: str, out: Path | None, ca: Path) -> None:
    """Sign a certificate request that was copied from a device."""
    from fedquilt.tools.identity import commands

    commands.sign_request_file(ca, csr, device, out)
