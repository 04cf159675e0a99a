"""Common steps of several verbs: reading jobs, opening homes, printing rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.console import table
from fedquilt.core import JobError, StoreError
from fedquilt.host import disk

if TYPE_CHECKING:
    from fedquilt.coordinator.settings import JobSettings
    from fedquilt.coordinator.storage.store import Store


def open_existing_home(home: Path) -> Store:
    from fedquilt.coordinator.storage.store import open_store

    require_home(home)
    return open_store(home)


def require_home(home: Path) -> None:
    with disk.disk_errors(f"read {home}"):
        entry = disk.REAL.stat(home / "fedquilt.db")
    if entry is None or entry.is_dir:
        raise StoreError(no_runs_message(home))


def no_runs_message(home: Path) -> str:
    return f"no runs in {home}: start one with `fedquilt run` or `simulate`, or set --home"


def load_job(path: Path) -> JobSettings:
    from fedquilt.coordinator import settings
    from fedquilt.data.spec import DataSpec
    from fedquilt.formats import toml

    if path.suffix != ".toml" and path.is_file():
        raise JobError(f"{path} is no job file (.toml): `fedquilt init --data {path}` writes one for data")
    job = settings.load_job(path)
    with toml.prefix_errors(str(path)):
        if job.data:
            DataSpec.parse(job.data)
        if job.test:
            from fedquilt.coordinator.views import scores

            DataSpec.parse(scores.make_test_table(job), "[test]")
    return job


def bundle_folder(job: Path) -> Path:
    return job.with_name(job.stem + ".bundle")


def print_rows(format: str, rows: Any, lines: Sequence[str]) -> None:
    if format == "json":
        import msgspec

        print(msgspec.json.encode(rows).decode())
    elif lines:
        print("\n".join(part for line in lines for part in table.fold_line(line)), flush=True)
