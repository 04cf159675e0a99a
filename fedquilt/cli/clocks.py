"""`fedquilt board clocks`: serve, status, hold."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import F, argument, option, verb_group


def root_option(function: F) -> F:
    return option(
        "--root", type=options.PATH, default=Path("/"), help="Folder that has sys, run/fedquilt and var/lib."
    )(function)


@verb_group()
def clocks() -> None:
    """Pin a device's clocks at an operating point, and unpin them."""


@clocks.command()
@argument(
    "settings",
    "The board's agent.toml, whose [governor] limits watts and degrees (default: 85 degrees).",
    type=options.PATH,
    required=False,
)
@root_option
def serve(settings: Path | None, root: Path) -> None:
    """Run the helper that sets clocks for root and the group fedquilt (requires root)."""
    from fedquilt import profiles
    from fedquilt.edge_agent.clocks import helper
    from fedquilt.edge_agent.devices import linux
    from fedquilt.edge_agent.settings import load_settings

    limits = None if settings is None else load_settings(settings)
    max_w = None if limits is None else limits.governor.max_w
    watts = None
    if limits is not None and max_w is not None:
        named = limits.profile
        board = linux.find_profile(root) if named is None else profiles.find_board_profile(named)
        watts = None if board is None else linux.create_power_lookup(board, root)
    helper.run_helper(root, max_w=max_w, watts=watts)


@clocks.command()
@options.format_option
@root_option
def status(format: str, root: Path) -> int:
    """Show the available clock controls, their settings and the client that pinned them."""
    from fedquilt.tools.boards import clocks as tool

    return tool.print_status(root, format)


@clocks.command()
@argument("point", "A mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
@option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@root_option
def hold(point: str, dry_run: bool, root: Path) -> int:
    """Pin an operating point through the helper until interrupted."""
    from fedquilt.tools.boards import clocks as tool

    return tool.pin_point(point, root, dry_run=dry_run)
