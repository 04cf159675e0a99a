"""`fedquilt restore`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("file", "What `fedquilt backup` wrote.", type=options.PATH)
@argument("home", "Folder to make; it must not exist yet, or be empty.", type=options.FOLDER)
def restore(file: Path, home: Path) -> None:
    """Make a coordinator's home from a backup, each file compared with its hash; its runs go on from there."""
    from fedquilt import progress, units
    from fedquilt.coordinator import backup as tool

    with progress.during(f"restoring {home}"):
        found = tool.restore(file, home)
    print(f"{home}: {found.runs} runs, {units.size(found.bytes)}; `fedquilt serve --home {home}` goes on with them")
