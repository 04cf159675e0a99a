"""`fedquilt broker`, and `broker config`."""

from __future__ import annotations

from pathlib import Path

import click

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb_group


@verb_group(invoke_without_command=True)
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", type=options.WHOLE, default=1883, help="Port to listen on.")
@option(
    "--password-file",
    type=options.PATH,
    help="File with users and their passwords; required unless --host is a loopback address.",
)
@click.pass_context
def broker(context: click.Context, host: str, port: int, password_file: Path | None) -> None:
    """Run the embedded MQTT broker (3.1.1), for tests and small networks."""
    if context.invoked_subcommand is None:
        from fedquilt.tools import broker as tool

        tool.serve_foreground(host, port, password_file)


@broker.command()
@option(
    "--for",
    "kind",
    type=options.WordChoice(("mosquitto", "emqx")),
    required=True,
    help="The broker that the configuration is for.",
)
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
@option("--listen", type=options.PORT, default=8883, metavar="PORT", help="TLS port of the broker.")
@option("--fleet", type=options.NAME, default="fleet", help="Name of the fleet in MQTT topics.")
@options.authority_option
def config(
    kind: str, hosts: tuple[str, ...], out: Path, installed: str | None, listen: int, fleet: str, ca: Path
) -> int:
    """Write the configuration of an MQTT broker: TLS, permissions and limits."""
    from fedquilt.tools.operations.identity import commands

    return commands.configure_broker(ca, kind, list(hosts), out, fleet=fleet, port=listen, installed=installed)
