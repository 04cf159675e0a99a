"""`fedquilt board record`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.PATH, help="File for the profile (default: BOARD.toml).")
@option(
    "--minutes", type=options.SECONDS, default=5.0, metavar="M", help="Time for all measurements together, in minutes."
)
@option(
    "--root",
    type=options.PATH,
    default=Path("/"),
    help="Folder that has proc, sys and run/fedquilt.",
)
@option("--dry-run", is_flag=True, help="List the points that would be measured, and set nothing.")
@options.format_option
def record(out: Path | None, minutes: float, root: Path, dry_run: bool, format: str) -> int:
    """Measure this device's speed and power at several clocks, and write its profile."""
    from fedquilt.console import progress
    from fedquilt.tools.boards import record as tool

    with progress.show_progress(f"measuring for at most {minutes:g} min"):
        return tool.record_profile(
            out,
            minutes,
            root=root,
            dry_run=dry_run,
            format=format,
            say=progress.LINE.print_to_stdout,
        )
