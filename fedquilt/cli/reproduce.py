"""`fedquilt lab reproduce`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("table", "A paper's table, or FILE.toml with a grid of your own.", required=False)
@option("--data", type=options.FOLDER, metavar="FOLDER", help="Folder with the real data that some tables need.")
@option("--seeds", type=options.WHOLE, many=True, help="Seeds; every job is run once with each (default: the table's).")
@option(
    "--rounds", type=options.POSITIVE, help="Number of rounds in place of the table's; claims are then not checked."
)
@option("--columns", many=True, metavar="NAME", help="Run only these columns of the table.")
@option("--rows", many=True, metavar="NAME", help="Run only these rows; claims that compare others are left out.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the result as JSON, with every curve.")
@option("--picture", type=options.PATH, metavar="FILE.svg", help="File for a picture: a dot for each seed.")
@option(
    "--kept",
    type=options.FOLDER,
    default=Path("fedquilt-compare"),
    help="Folder of finished runs, which are not repeated.",
)
@options.format_option
def reproduce(
    table: str | None,
    data: Path | None,
    seeds: tuple[int, ...],
    rounds: int | None,
    columns: tuple[str, ...],
    rows: tuple[str, ...],
    out: Path | None,
    picture: Path | None,
    kept: Path,
    format: str,
) -> int:
    """Reproduce a table of a paper, or run a grid. Without TABLE, list the tables."""
    from fedquilt.tools.lab import papers as tool

    return tool.list_or_run_tables(
        table,
        seeds=list(seeds) or None,
        rounds=rounds,
        folder=data,
        columns=list(columns) or None,
        rows=list(rows) or None,
        out=out,
        picture=picture,
        kept=kept,
        format=format,
    )
