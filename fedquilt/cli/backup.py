"""`fedquilt backup`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("home", "Folder of the coordinator's runs.", type=options.FOLDER)
@argument("file", "The file to write; it must not exist yet.", type=options.PATH)
def backup(home: Path, file: Path) -> None:
    """Save a coordinator's home to one file, also while a coordinator runs."""
    from fedquilt.console import progress, units
    from fedquilt.coordinator.storage import backup as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"saving {home}"):
        saved = tool.write_backup(store, file)
    print(f"{file}: {saved.runs} runs with {saved.files} blobs, {units.format_bytes(saved.bytes)}")
