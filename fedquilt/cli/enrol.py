"""`fedquilt enrol`: token, serve, sign, board."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, family, option


@family()
def enrol() -> None:
    """Give a board its certificate: by a one-time token, or carried by hand."""


@enrol.command()
@argument("device", "The board's id, or a pattern such as 'orin-*'.")
@option("--hours", type=options.ABOVE_0, default=72.0, metavar="N", help="It ends after so many.")
@option("--out", type=options.PATH, metavar="FILE", help="Write it there, mode 0600, and do not show it.")
@options.authority
def token(device: str, hours: float, out: Path | None, ca: Path) -> int:
    """Make a one-time token for a board; it is printed once."""
    from fedquilt.tools.identity import commands

    return commands.token(ca, device, hours, out)


@enrol.command()
@option("--listen", default="0.0.0.0", metavar="ADDRESS", help="Address to listen on.")  # noqa: S104
@option("--port", type=options.WHOLE, default=8884, help="Port to listen on.")
@option("--host", "hosts", multiple=True, help="Name or address that boards call (default: ours); may be repeated.")
@option("--days", type=options.ABOVE_0, metavar="N", help="How long certificates are valid (default: 365).")
@options.authority
def serve(listen: str, port: int, hosts: tuple[str, ...], days: float | None, ca: Path) -> int:
    """Answer boards that enrol or renew, over HTTPS."""
    from fedquilt.tools.identity import commands

    logging.getLogger("fedquilt.enrol").setLevel(min(logging.INFO, logging.getLogger().level))
    return commands.listen(ca, listen, port, list(hosts), days)


@enrol.command()
@argument("csr", "The request.", type=options.PATH)
@option("--device", type=options.NAME, required=True, help="The board that you took it from.")
@option("--out", type=options.PATH, metavar="FILE", help="Where to write it (default: CSR with .crt).")
@option("--days", type=options.ABOVE_0, metavar="N", help="How long it is valid (default: 365).")
@options.authority
def sign(csr: Path, device: str, out: Path | None, days: float | None, ca: Path) -> int:
    """Sign a request that was carried here from a board."""
    from fedquilt.tools.identity import commands

    return commands.sign(ca, csr, device, out, days)


@enrol.command()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option("--url", metavar="URL", help="The endpoint (default: url under [enrol]).")
@option("--wait", is_flag=True, help="Try until the endpoint answers.")
@option("--request", type=options.PATH, metavar="FILE", help="Write a request to be carried to the authority.")
@option("--accept", type=options.PATH, metavar="FILE", help="Keep the certificate that was carried back.")
def board(settings: Path, url: str | None, wait: bool, request: Path | None, accept: Path | None) -> int:
    """On the board: get a certificate, or renew it when it is due."""
    from fedquilt.tools.identity import commands

    options.exclusive(request=request, accept=accept)
    return commands.board(settings, url=url, waits=wait, request=request, accept=accept)
