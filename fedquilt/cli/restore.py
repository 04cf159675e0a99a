"""`fedquilt restore`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("file", "What `fedquilt backup` wrote.", type=options.PATH)
@argument("home", "Folder to make; it must not exist yet, or be empty.", type=options.FOLDER)
def restore(file: Path, home: Path) -> None:
    """Restore a coordinator's home from a verified backup, with resumable runs."""
    from fedquilt.console import progress, units
    from fedquilt.coordinator.storage import backup as tool

    with progress.show_progress(f"restoring {home}"):
        found = tool.restore_backup(file, home)
    print(
        f"{home}: {found.runs} runs, {units.format_bytes(found.bytes)}; `fedquilt serve --home {home}` goes "
        "on with them"
    )
