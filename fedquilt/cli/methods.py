"""`fedquilt methods`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("method", "The method to show.", required=False, shell_complete=options.methods)
@option("--out", type=options.FOLDER, metavar="FOLDER", help="Folder to write a page for each method into.")
@options.format
def methods(method: str | None, out: Path | None, format: str) -> None:
    """List the methods, or show one's paper, deviations and parameters."""
    from fedquilt.tools.experiments import method_pages as tool
    from fedquilt.tools.experiments import papers

    tool.main(method, out, format, papers.covering)
