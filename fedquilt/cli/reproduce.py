"""`fedquilt reproduce`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("table", "Which table of a paper; or a grid of your own, FILE.toml.", required=False)
@option("--data", type=options.FOLDER, metavar="FOLDER", help="Where a table wants real data.")
@option("--seeds", type=options.WHOLE, many=True, help="One run of each job with each (default: the table's).")
@option("--rounds", type=options.POSITIVE, help="Fewer than the table's; claims are then not checked.")
@option("--columns", many=True, metavar="NAME", help="These alone, of a table whose columns are runs.")
@option("--out", type=options.PATH, metavar="FILE", help="The result as JSON, every curve in it.")
@option("--picture", type=options.PATH, metavar="FILE.svg", help="Draw it, where the table has a picture.")
@option("--kept", type=options.FOLDER, default=Path("fedquilt-compare"), help="Finished runs; they are not repeated.")
@options.format
def reproduce(
    table: str | None,
    data: Path | None,
    seeds: tuple[int, ...],
    rounds: int | None,
    columns: tuple[str, ...],
    out: Path | None,
    picture: Path | None,
    kept: Path,
    format: str,
) -> int:
    """Run a paper's table again, its numbers beside ours, or a grid of your own; without one, list them."""
    from fedquilt.tools.experiments import papers as tool

    return tool.main(
        table,
        seeds=list(seeds) or None,
        rounds=rounds,
        folder=data,
        columns=list(columns) or None,
        out=out,
        picture=picture,
        kept=kept,
        format=format,
    )
