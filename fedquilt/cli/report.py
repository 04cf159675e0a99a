"""`fedquilt report`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--out", type=options.PATH, metavar="FILE", help="File for the page (default: RUN.html).")
@options.home_option
def report(run: str, out: Path | None, home: Path) -> None:
    """Write an HTML page about a run: accuracy, time, energy, memory and participants."""
    from fedquilt.console import progress
    from fedquilt.tools import report as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"making a page of {run}"):
        progress.LINE.print_to_stdout(f"{tool.write_run_page(store, run, out)}: {store.find_job(run).id}")
