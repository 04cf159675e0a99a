"""`fedquilt clocks`: serve, status, hold."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import F, argument, family, option


def where(function: F) -> F:
    """--socket and --root."""
    socket = option(
        "--socket", type=options.PATH, default=Path("/run/fedquilt/clocks.sock"), help="The helper's socket."
    )
    return socket(option("--root", type=options.PATH, default=Path("/"), help="Where sys is.")(function))


def dry_run(function: F) -> F:
    """--dry-run."""
    return option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")(function)


@family()
def clocks() -> None:
    """Hold a board's clocks at an operating point, and give them back."""


@clocks.command()
@option("--group", metavar="GROUP", help="Group that may speak to it (default: root alone).")
@option(
    "--state",
    type=options.FOLDER,
    default=Path("/var/lib/fedquilt-clocks"),
    help="Folder of its journal, from which a killed helper restores.",
)
@option("--watchdog", type=options.SECONDS, default=10.0, help="Release a client that is silent for so many seconds.")
@option("--hottest", type=options.NUMBER, default=85.0, metavar="C", help="Hold nothing above it.")
@dry_run
@where
def serve(
    group: str | None, state: Path, watchdog: float, hottest: float, dry_run: bool, socket: Path, root: Path
) -> None:
    """Be the helper that sets clocks for an agent: needs root."""
    from fedquilt.edge_agent.clocks import helper

    helper.serve(root, socket, state, group=group, watchdog_s=watchdog, hottest_c=hottest, dry_run=dry_run)


@clocks.command()
@options.format
@where
def status(format: str, socket: Path, root: Path) -> int:
    """Show what can be set here, how it is set and who holds it."""
    from fedquilt.tools.board import clocks as tool

    return tool.status(root, socket, format)


@clocks.command()
@argument("point", "A mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
@option("--seconds", type=options.SECONDS, metavar="N", help="Release it after so long.")
@dry_run
@where
def hold(point: str, seconds: float | None, dry_run: bool, socket: Path, root: Path) -> int:
    """Hold a point until interrupted, through the helper."""
    from fedquilt.tools.board import clocks as tool

    return tool.hold(point, root, socket, dry_run=dry_run, seconds=seconds)
