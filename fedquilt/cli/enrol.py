"""`fedquilt enrol`: token, serve, sign, board."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, family, option


@family()
def enrol() -> None:
    """Give a board its certificate, by a one-time token or by hand."""


@enrol.command()
@argument("device", "The board's id, or a pattern such as 'orin-*'.")
@option("--hours", type=options.ABOVE_0, default=72.0, metavar="N", help="Hours after which the token expires.")
@option(
    "--out",
    type=options.PATH,
    metavar="FILE",
    help="Write the token to this file, with mode 0600, instead of printing it.",
)
@options.authority
def token(device: str, hours: float, out: Path | None, ca: Path) -> int:
    """Make a one-time token for a board; it is printed once."""
    from fedquilt.tools.identity import commands

    return commands.token(ca, device, hours, out)


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
@options.authority
def serve(listen: str, port: int, hosts: tuple[str, ...], days: float | None, ca: Path) -> int:
    """Answer boards that enrol or renew, over HTTPS."""
    from fedquilt.tools.identity import commands

    logging.getLogger("fedquilt.enrol").setLevel(min(logging.INFO, logging.getLogger().level))
    return commands.serve_enrolment(ca, listen, port, list(hosts), days)


@enrol.command()
@argument("csr", "The certificate request of a board.", type=options.PATH)
@option("--device", type=options.NAME, required=True, help="The board that the request comes from.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the certificate (default: CSR with .crt).")
@option("--days", type=options.ABOVE_0, metavar="N", help="Days for which the certificate is valid (default: 365).")
@options.authority
def sign(csr: Path, device: str, out: Path | None, days: float | None, ca: Path) -> int:
    """Sign a request that was carried here from a board."""
    from fedquilt.tools.identity import commands

    return commands.sign(ca, csr, device, out, days)


@enrol.command()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option("--url", metavar="URL", help="Address of the enrolment endpoint (default: url under [enrol] in agent.toml).")
@option("--wait", is_flag=True, help="Try until the endpoint answers.")
@option(
    "--request", type=options.PATH, metavar="FILE", help="Write a certificate request, to be carried to the authority."
)
@option("--accept", type=options.PATH, metavar="FILE", help="Install the certificate that was carried back.")
def board(settings: Path, url: str | None, wait: bool, request: Path | None, accept: Path | None) -> int:
    """Get a certificate for this board, or renew it when it is due."""
    from fedquilt.tools.identity import commands

    options.exclusive(request=request, accept=accept)
    return commands.board(settings, url=url, waits=wait, request=request, accept=accept)
