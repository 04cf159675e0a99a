"""`fedquilt broker`, and `broker config`."""

from __future__ import annotations

from pathlib import Path

import click

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb_group


@verb_group(invoke_without_command=True)
@option("--listen", default="127.0.0.1:1883", metavar="HOST:PORT", help="Address to listen on.")
@option(
    "--password-file",
    type=options.PATH,
    help="File with users and their passwords; required unless --listen is a loopback address.",
)
@click.pass_context
def broker(context: click.Context, listen: str, password_file: Path | None) -> None:
    """Run the embedded MQTT broker (3.1.1, without TLS), for one machine and tests."""
    if context.invoked_subcommand is None:
        from fedquilt import open_metrics
        from fedquilt.tools import broker as tool

        tool.serve_foreground(*open_metrics.parse_listen_address(listen), password_file)


@broker.command()
@argument("kind", "mosquitto or emqx.", type=options.WordChoice(("mosquitto", "emqx")), metavar="KIND")
@option(
    "--host",
    "hosts",
    multiple=True,
    required=True,
    help="Name or address by which clients reach the broker; may be repeated.",
)
@option("--out", type=options.FOLDER, required=True, help="Folder for all that the broker needs.")
@option(
    "--installed", metavar="DIR", help="Path that the folder will have on the broker's machine (default: one in /etc)."
)
@option("--listen", default="0.0.0.0:8883", metavar="HOST:PORT", help="Address at which the broker takes TLS.")
@option("--fleet", type=options.NAME, default="fleet", help="Name of the fleet in MQTT topics.")
@options.authority_option
def config(
    kind: str, hosts: tuple[str, ...], out: Path, installed: str | None, listen: str, fleet: str, ca: Path
) -> int:
    """Write the configuration of an MQTT broker: TLS, permissions and limits."""
    from fedquilt.tools.identity import commands

    return commands.configure_broker(ca, kind, list(hosts), out, fleet=fleet, listen=listen, installed=installed)
