"""`fedquilt demo`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb, verbosity


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-demo"), help="Folder for what it makes.")
@option("--open", "show", is_flag=True, help="Open the report in a browser at the end.")
@options.format_option
def demo(out: Path, show: bool, format: str) -> int:
    """Run a demo: simulated devices stitch a network for handwritten digits."""
    from fedquilt.tools.lab import demo as tool

    return tool.run_demo(out, format, verbosity() > 0, show)
