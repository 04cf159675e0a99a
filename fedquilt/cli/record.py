"""`fedquilt record`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.PATH, help="Where to write it (default: BOARD.toml).")
@option("--minutes", type=options.SECONDS, default=5.0, metavar="M", help="In all.")
@option(
    "--points",
    many=True,
    commas=False,
    metavar="POINT",
    help="Modes, or cpu=1.2GHz,gpu=850MHz (default: the most telling ones).",
)
@option(
    "--socket",
    type=options.PATH,
    default=Path("/run/fedquilt/clocks.sock"),
    help="The clock helper's; without one, only the point the board is at.",
)
@option("--root", type=options.PATH, default=Path("/"), help="Where proc and sys are.")
@option("--dry-run", is_flag=True, help="Say which points would be measured, and set nothing.")
@options.format
def record(
    out: Path | None, minutes: float, points: tuple[str, ...], socket: Path, root: Path, dry_run: bool, format: str
) -> int:
    """Measure this board's speed and power at some of its clocks, and write its profile."""
    from fedquilt.tools.board import record as tool

    return tool.main(out, minutes, list(points) or None, socket, root=root, dry_run=dry_run, format=format)
