"""A home with a run, and its backup."""

from __future__ import annotations

from pathlib import Path

from fedquilt.coordinator.storage import backup
from fedquilt.coordinator.storage.store import Store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved(home: Path, file: Path) -> Path:
    with Store(home) as store:
        backup.write_backup(store, file)
    return file
