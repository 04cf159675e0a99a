"""`fedquilt clocks`: serve, status, hold."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import F, argument, option, verb_group


def path_options(function: F) -> F:
    socket = option(
        "--socket", type=options.PATH, default=Path("/run/fedquilt/clocks.sock"), help="Socket of the clock helper."
    )
    return socket(option("--root", type=options.PATH, default=Path("/"), help="Folder that has sys.")(function))


def dry_run_option(function: F) -> F:
    return option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")(function)


@verb_group()
def clocks() -> None:
    """Pin a device's clocks at an operating point, and unpin them."""


@clocks.command()
@option("--group", metavar="GROUP", help="Group whose members may use the helper (default: root alone).")
@option(
    "--state",
    type=options.FOLDER,
    default=Path("/var/lib/fedquilt-clocks"),
    help="Folder of the helper's journal, from which the clocks are restored after it was killed.",
)
@option("--watchdog", type=options.SECONDS, default=10.0, help="Release a client that is silent for so many seconds.")
@option(
    "--hottest",
    type=options.NUMBER,
    default=85.0,
    metavar="C",
    help="Temperature in degrees Celsius above which no clock is held.",
)
@option(
    "--max-w",
    type=options.NUMBER,
    metavar="W",
    help="Watts above which no operating point is held (default: no limit beside the power mode).",
)
@option(
    "--profile",
    metavar="PROFILE",
    help="For --max-w: profile of this board, a file or the name of one that ships (default: the one of its kind).",
)
@dry_run_option
@path_options
def serve(
    group: str | None,
    state: Path,
    watchdog: float,
    hottest: float,
    max_w: float | None,
    profile: str | None,
    dry_run: bool,
    socket: Path,
    root: Path,
) -> None:
    """Run the helper that sets clocks for an agent (requires root)."""
    from fedquilt import profiles
    from fedquilt.edge_agent import devices
    from fedquilt.edge_agent.clocks import helper
    from fedquilt.edge_agent.devices import operating_points

    board = (
        profiles.find_board_profile(profile)
        if profile is not None
        else devices.find_shipped_profile(root)
        if max_w is not None
        else None
    )
    helper.run_helper(
        root,
        socket,
        state,
        group=group,
        watchdog_s=watchdog,
        hottest_c=hottest,
        max_w=max_w,
        watts=None if board is None else operating_points.power_lookup(board, root),
        dry_run=dry_run,
    )


@clocks.command()
@options.format_option
@path_options
def status(format: str, socket: Path, root: Path) -> int:
    """Show the available clock controls, their settings and the client that pinned them."""
    from fedquilt.tools.boards import clocks as tool

    return tool.print_status(root, socket, format)


@clocks.command()
@argument("point", "A mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
@option("--seconds", type=options.SECONDS, metavar="N", help="Release the clocks after so many seconds.")
@dry_run_option
@path_options
def hold(point: str, seconds: float | None, dry_run: bool, socket: Path, root: Path) -> int:
    """Pin an operating point through the helper until interrupted."""
    from fedquilt.tools.boards import clocks as tool

    return tool.pin_point(point, root, socket, dry_run=dry_run, seconds=seconds)
