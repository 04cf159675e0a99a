"""Record of the files from which a bundle was prepared.

A bundle without a record was made by hand or elsewhere, and is used as it is. So is an input that is not on this
machine, because a bundle may be carried to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.formats import toml
from fedquilt.host.disk import REAL, disk_errors

RUNNING: Final = ("name", "rounds", "priority", "cohort", "wire", "stop", "check", "trigger", "fleet", "compare")
"""Keys of a job that its bundle does not depend on."""


class BundleInputs(msgspec.Struct, frozen=True):
    job: str  # sha256 of the job file's table
    files: dict[str, str]  # path -> stamp


def is_current(path: Path, bundle: Path) -> bool:
    """Return whether a bundle exists, and neither the job file nor a file that it names has changed since."""
    if not (bundle / "bundle.json").exists():
        return False
    try:
        known = msgspec.json.decode((bundle / "inputs.json").read_bytes(), type=BundleInputs)
    except (OSError, msgspec.DecodeError):
        return True
    unchanged = all(_stamp_input(Path(file)) in ("", stamp) for file, stamp in known.files.items())
    return unchanged and known.job == _hash_job(path)


def record_inputs(path: Path, job: Mapping[str, Any], bundle: Path) -> None:
    """Record what a bundle was prepared from: the job file, and the files that the job names by absolute paths.

    Raises:
        StoreError: If the record cannot be written.
    """
    files = {file: _stamp_input(Path(file)) for file in sorted(set(_list_paths(job)))}
    with disk_errors(f"write {bundle / 'inputs.json'}"):
        found = BundleInputs(_hash_job(path), {file: stamp for file, stamp in files.items() if stamp})
        REAL.write_atomically(bundle / "inputs.json", msgspec.json.encode(found), durable=False)


def _hash_job(path: Path) -> str:
    table = {key: value for key, value in toml.read_toml(path).items() if key not in RUNNING}
    return hashlib.sha256(msgspec.json.encode(table, order="sorted")).hexdigest()


def _list_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_paths(each)
    elif isinstance(value, str) and value.startswith("/"):
        yield value


def _stamp_input(path: Path) -> str:
    """Return the sizes and times of a file, or of all files in a folder; "" if it is not here."""
    if path.is_dir():
        every = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        every = [path] if path.is_file() else []
    found = hashlib.sha256()
    for file in every:
        about = file.stat()
        found.update(f"{file.relative_to(path)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest() if every else ""
