"""`fedquilt demo`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-demo"), help="Folder for what it makes.")
@options.format
def demo(out: Path, format: str) -> int:
    """See a federation of simulated boards stitch a network for real handwritten digits."""
    from fedquilt.tools import demo as tool

    return tool.demo(out, format)
