"""`fedquilt backup save`: save, restore."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, verb_group


@verb_group()
def backup() -> None:
    """Save a coordinator's home to one file, and restore it."""


@backup.command()
@argument("home", "Folder of the coordinator's runs.", type=options.FOLDER)
@argument("file", "The file to write; it must not exist yet.", type=options.PATH)
def save(home: Path, file: Path) -> None:
    """Save a coordinator's home to one file, also while a coordinator runs."""
    from fedquilt.console import progress, units
    from fedquilt.coordinator.storage import backup as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"saving {home}"):
        saved = tool.write_backup(store, file)
    print(f"{file}: {saved.runs} runs with {saved.files} blobs, {units.format_bytes(saved.bytes)}")


@backup.command()
@argument("file", "What `backup save` wrote.", type=options.PATH)
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
