"""`fedquilt clocks`: serve, status, hold."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import F, argument, family, option


def where(function: F) -> F:
    """--socket and --root."""
    socket = option(
        "--socket", type=options.PATH, default=Path("/run/fedquilt/clocks.sock"), help="Socket of the clock helper."
    )
    return socket(option("--root", type=options.PATH, default=Path("/"), help="Folder that has sys.")(function))


def dry_run(function: F) -> F:
    """--dry-run."""
    return option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")(function)


@family()
def clocks() -> None:
    """Hold a board's clocks at an operating point, and release them."""


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
@dry_run
@where
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
    """Run the helper that sets clocks for an agent; needs root."""
    from fedquilt import profiles
    from fedquilt.edge_agent import devices
    from fedquilt.edge_agent.clocks import helper
    from fedquilt.edge_agent.devices import points

    board = profiles.find(profile) if profile is not None else devices.shipped(root) if max_w is not None else None
    helper.serve(
        root,
        socket,
        state,
        group=group,
        watchdog_s=watchdog,
        hottest_c=hottest,
        max_w=max_w,
        watts=None if board is None else points.watts(board, root),
        dry_run=dry_run,
    )


@clocks.command()
@options.format
@where
def status(format: str, socket: Path, root: Path) -> int:
    """Show what can be set here, how it is set and who holds it."""
    from fedquilt.tools.board import clocks as tool

    return tool.status(root, socket, format)


@clocks.command()
@argument("point", "A mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
@option("--seconds", type=options.SECONDS, metavar="N", help="Release the clocks after so many seconds.")
@dry_run
@where
def hold(point: str, seconds: float | None, dry_run: bool, socket: Path, root: Path) -> int:
    """Hold an operating point through the helper, until interrupted."""
    from fedquilt.tools.board import clocks as tool

    return tool.hold(point, root, socket, dry_run=dry_run, seconds=seconds)
