"""`fedquilt backup`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("home", "Folder of the coordinator's runs.", type=options.FOLDER)
@argument("file", "The file to write; it must not exist yet.", type=options.PATH)
def backup(home: Path, file: Path) -> None:
    """Write all that a coordinator's home needs to go on into one file, also while a coordinator serves it."""
    from fedquilt import progress, units
    from fedquilt.coordinator import backup as tool

    with homes.existing(home) as store, progress.during(f"saving {home}"):
        saved = tool.save(store, file)
    print(f"{file}: {saved.runs} runs with {saved.files} blobs, {units.size(saved.bytes)}")
