"""`fedquilt report`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--out", type=options.PATH, metavar="FILE", help="File for the page (default: RUN.html).")
@options.home
def report(run: str, out: Path | None, home: Path) -> None:
    """Write one HTML page about a run: accuracy, time, energy, memory, who took part."""
    from fedquilt import progress
    from fedquilt.tools import report as tool

    with homes.existing(home) as store, progress.during(f"making a page of {run}"):
        progress.LINE.aside(f"{tool.main(store, run, out)}: {store.job(run).id}")
