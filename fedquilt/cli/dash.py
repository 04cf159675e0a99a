"""`fedquilt dash`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.home_option
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address to serve it at.")
@option("--actions", is_flag=True, help="Let whoever has the token that is printed approve, stop and resume runs.")
@option("--name", "names", many=True, metavar="NAME", help="Names by which browsers may call it, besides addresses.")
def dash(home: Path, listen: str, actions: bool, names: tuple[str, ...]) -> None:
    """Show the fleet and its runs live in a browser. The page only reads --home."""
    from fedquilt.tools.operations import dash as tool

    home_access.require_home(home)
    tool.main(
        home.resolve(),
        listen,
        actions=actions,
        names=[each.lower() for each in names],
        say=lambda line: print(line, flush=True),
    )
