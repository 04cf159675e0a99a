"""`fedquilt dash`, and `dash grafana`."""

from __future__ import annotations

from pathlib import Path

import click

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb_group


@verb_group(invoke_without_command=True)
@options.home_option
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address to serve it at.")
@option("--actions", is_flag=True, help="Allow holders of the printed token to control runs and end rollouts.")
@option("--host", "names", multiple=True, help="Name by which browsers may call it; may be repeated.")
@click.pass_context
def dash(context: click.Context, home: Path, listen: str, actions: bool, names: tuple[str, ...]) -> None:
    """Show the fleet and its runs live in a browser, read-only without --actions."""
    if context.invoked_subcommand is not None:
        return
    from fedquilt.tools.operations import dash as tool

    home_access.require_home(home)
    tool.serve_dashboard(
        home.resolve(),
        listen,
        actions=actions,
        names=[name.lower() for name in names],
        print_line=lambda line: print(line, flush=True),
    )


@dash.command()
@option("--out", type=options.FOLDER, default=Path("fedquilt-metrics"), help="Folder for the files.")
@option(
    "--target",
    default="127.0.0.1:9464",
    metavar="HOST:PORT",
    help="Address of `fedquilt serve --metrics` for Prometheus.",
)
def grafana(out: Path, target: str) -> None:
    """Write a Grafana dashboard, Prometheus alert rules and configuration."""
    from fedquilt.tools.operations import metrics as tool

    print("\n".join(map(str, tool.write_monitoring_files(out, target))))
