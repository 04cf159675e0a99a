"""`fedquilt enrol`: token, serve, sign, board."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb_group


@verb_group()
def enrol() -> None:
    """Enrol devices with certificates, by a one-time token or by hand."""


@enrol.command()
@argument("device", "The board's id, or a pattern such as 'orin-*'.")
@option("--hours", type=options.ABOVE_0, default=72.0, metavar="N", help="Hours after which the token expires.")
@option(
    "--out",
    type=options.PATH,
    metavar="FILE",
    help="Write the token to this file, with mode 0600, instead of printing it.",
)
@options.authority_option
def token(device: str, hours: float, out: Path | None, ca: Path) -> int:
    """Create a one-time token for a device, which is shown once."""
    from fedquilt.tools.operations.identity import commands

    return commands.create_token(ca, device, hours, out)


@enrol.command()
@option("--listen", default="0.0.0.0", metavar="ADDRESS", help="Address to listen on.")  # noqa: S104
@option("--port", type=options.WHOLE, default=8884, help="Port to listen on.")
@option(
    "--host",
    "hosts",
    multiple=True,
    help="Name or address by which boards reach the endpoint (default: this machine's); may be repeated.",
)
@option("--days", type=options.ABOVE_0, metavar="N", help="Days for which certificates are valid (default: 365).")
@options.authority_option
def serve(listen: str, port: int, hosts: tuple[str, ...], days: float | None, ca: Path) -> int:
    """Run the HTTPS server at which devices enrol and renew certificates."""
    from fedquilt.tools.operations.identity import commands

    logging.getLogger("fedquilt.enrol").setLevel(min(logging.INFO, logging.getLogger().level))
    return commands.serve_enrolment(ca, listen, port, list(hosts), days)


@enrol.command()
@argument("csr", "The certificate request of a board.", type=options.PATH)
@option("--device", type=options.NAME, required=True, help="The board that the request comes from.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the certificate (default: CSR with .crt).")
@option("--days", type=options.ABOVE_0, metavar="N", help="Days for which the certificate is valid (default: 365).")
@options.authority_option
def sign(csr: Path, device: str, out: Path | None, days: float | None, ca: Path) -> int:
    """Sign a certificate request that was copied from a device."""
    from fedquilt.tools.operations.identity import commands

    return commands.sign_request(ca, csr, device, out, days)


@enrol.command()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option("--url", metavar="URL", help="Address of the enrolment endpoint (default: url under [enrol] in agent.toml).")
@option("--wait", is_flag=True, help="Try until the endpoint answers.")
@option(
    "--request", type=options.PATH, metavar="FILE", help="Write a certificate request, to be carried to the authority."
)
@option("--accept", type=options.PATH, metavar="FILE", help="Install the certificate that was carried back.")
def board(settings: Path, url: str | None, wait: bool, request: Path | None, accept: Path | None) -> int:
    """Request a certificate for this device, or renew it when due."""
    from fedquilt.tools.boards import enrol as tool

    options.require_exclusive(request=request, accept=accept)
    return tool.enrol_device(settings, url=url, waits=wait, request=request, accept=accept)
