"""`fedquilt board` and `fedquilt doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fedquilt.cli import options
from fedquilt.cli.commands import CommandGroup, argument, option, verb, verb_group
from fedquilt.console import progress
from fedquilt.core import JobError


@verb_group()
def board() -> None:
    """Install agents on boards, record a board's profile, pin its clocks and check its GPU."""


board.add_operator_verbs("flash")


@board.command()
@option("--out", type=options.PATH, help="File for the profile (default: BOARD.toml).")
@option(
    "--minutes", type=options.SECONDS, default=5.0, metavar="M", help="Time for all measurements together, in minutes."
)
@option("--root", type=options.PATH, default=Path("/"), help="Folder that has proc, sys and run/fedquilt.")
@option("--dry-run", is_flag=True, help="List the points that would be measured, and set nothing.")
@options.format_option
def record(out: Path | None, minutes: float, root: Path, dry_run: bool, format: str) -> int:
    """Measure this device's speed and power at several clocks, and write its profile."""
    from fedquilt.tools.boards import record as tool

    with progress.show_progress(f"measuring for at most {minutes:g} min"):
        report = progress.LINE.print_to_stdout
        return tool.record_profile(out, minutes, root=root, dry_run=dry_run, format=format, print_line=report)


root_option: Final = option(
    "--root", type=options.PATH, default=Path("/"), help="Folder that has sys, run/fedquilt and var/lib."
)


@board.group(cls=CommandGroup)
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
        profile_name = limits.profile
        board = linux.find_profile(root) if profile_name is None else profiles.find_board_profile(profile_name)
        watts = None if board is None else linux.create_power_lookup(board, root)
    helper.run_helper(root, max_w=max_w, power_of_point=watts)


@clocks.command()
@options.format_option
@root_option
def status(format: str, root: Path) -> None:
    """Show the available clock controls, their settings and the client that pinned them."""
    from fedquilt.tools.boards import clocks as tool

    tool.print_status(root, format)


@clocks.command()
@argument("point", "A mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
@option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@root_option
def hold(point: str, dry_run: bool, root: Path) -> None:
    """Pin an operating point through the helper until interrupted."""
    from fedquilt.tools.boards import clocks as tool

    tool.pin_point(point, root, dry_run=dry_run)


@verb()
@argument(
    "settings", "A board's agent.toml; its agent, broker and machine are checked.", type=options.PATH, required=False
)
@option("--home", type=options.FOLDER, help="Folder of a coordinator to check.")
@option("--root", type=options.PATH, default=Path("/"), help="Folder that has etc, proc and sys.")
@options.broker_options(default=None)
@options.format_option
def doctor(settings: Path | None, home: Path | None, root: Path, broker: options.BrokerOptions, format: str) -> int:
    """Find problems of a device, coordinator or machine, and show their fixes.

    Brokers that take client ids from certificates interrupt a coordinator elsewhere for the check with its certificate.
    """
    from fedquilt.tools.boards import doctor as tool

    if broker.url is None and broker.files:
        raise JobError("--ca, --cert, --key and --password-file require --broker URL")
    target = tool.ExaminationTarget(
        settings=settings,
        home=home,
        broker=None if broker.url is None else broker.to_table(),
        fleet=broker.fleet,
        root=root,
    )
    return tool.print_findings(target, format)
