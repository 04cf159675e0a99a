"""`fedquilt dash`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.home_option
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address to serve it at.")
@option("--actions", is_flag=True, help="Allow holders of the printed token to control runs and end rollouts.")
@option("--host", "names", multiple=True, help="Name by which browsers may call it; may be repeated.")
def dash(home: Path, listen: str, actions: bool, names: tuple[str, ...]) -> None:
    """Show the fleet and its runs live in a browser, read-only without --actions."""
    from fedquilt.tools.operations import dash as tool

    home_access.require_home(home)
    tool.serve_dashboard(
        home.resolve(),
        listen,
        actions=actions,
        names=[name.lower() for name in names],
        print_line=lambda line: print(line, flush=True),
    )
