"""`fedquilt methods`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("method", "The method to show.", required=False, shell_complete=options.complete_methods)
@option("--out", type=options.FOLDER, metavar="FOLDER", help="Folder to write a page for each method into.")
@options.format_option
def methods(method: str | None, out: Path | None, format: str) -> None:
    """List the methods, or show a method's paper, deviations and parameters."""
    from fedquilt.tools.experiments import method_pages as tool
    from fedquilt.tools.lab import papers

    tool.write_or_print_pages(method, out, format, papers.find_tables_of_method)
