"""Cache of finished runs, which lets an interrupted comparison continue.

The file name of a run is a digest of all its inputs: the job, the content of its bundle and data, and the code.
Content is hashed, so data with other labels in a file of the same name and size gives another run.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import fedquilt
from fedquilt import methods, plugins
from fedquilt.core import StoreError
from fedquilt.data.spec import is_builtin_dataset
from fedquilt.edge_agent import engines
from fedquilt.formats import job_bundle as bundles
from fedquilt.formats import training_choices
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.models.networks import registry
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.simulation import machines

SETTLED_S: Final = 2.0  # a later change of the file within this time may leave its time stamps unchanged
_digest_cache: dict[tuple[int, ...], str] = {}  # digests of unchanged files, which all runs of a comparison share


class RunCache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"
        with disk_errors(f"write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> SeedRun | None:
        """Return a cached run, or None if it is missing or of another version."""
        try:
            return msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=SeedRun)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def store(self, key: str, run: SeedRun) -> None:
        REAL.write_atomically(self.folder / f"{key}.json", msgspec.json.format(msgspec.json.encode(run)), durable=False)

    def describe_cache(self, cached_count: int, keys: Collection[str]) -> list[str]:
        """Return messages about cached runs with these keys, and about other runs in the folder."""
        other_runs = sum(path.stem not in keys for path in self.folder.glob("*.json"))
        lines = [f"{cached_count} of {len(keys)} runs are in {self.folder} already"] if cached_count else []
        if other_runs and cached_count < len(keys):
            lines.append(
                f"{other_runs} other runs in {self.folder} are not used: they have another job, bundle, data or code"
            )
        return lines


def make_key(*parts: bytes, bundle: Path, data: Iterable[Path]) -> str:
    """Return a digest of the parts, the content of a bundle and of data files, and the code."""
    bundle_content = bundles.load_bundle(bundle)
    index = msgspec.json.encode([bundle_content.meta, bundle_content.files], order="sorted")
    blobs = sorted({ref.sha256 for ref in bundle_content.files.values()})  # the folder may have older blobs
    contents = [compute_content_digest(path) for path in (*(bundle / "blobs" / blob for blob in blobs), *data)]
    inputs = (*parts, index, *(part.encode() for part in (*contents, compute_code_digest())))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in inputs)).hexdigest()[:24]


def list_data_paths(job: bytes) -> list[Path]:
    """Return the files and folders that are named in [data] and [test] of a job in JSON."""
    table = msgspec.json.decode(job)
    paths = [path for name in ("data", "test") for path in _list_table_paths(table.get(name) or {})]
    return [Path(path) for path in dict.fromkeys(paths)]


def list_plugin_versions(job: bytes) -> bytes:
    """Return as JSON the version and content digest of each plug-in package of a job given as JSON.

    The result is empty without plug-ins.
    """
    table = msgspec.json.decode(job)
    versions = methods.required_plugins(table["method"]) | registry.required_plugins(table.get("model") or {})
    for data in (table.get("data") or {}, table.get("test") or {}):
        if data.get("dataset") and not data.get("path") and not is_builtin_dataset(data["dataset"]):
            versions |= plugins.required_modules("data", data["dataset"])
    if table.get("engine"):
        versions |= plugins.required_modules("engine", table["engine"], tuple(engines.NEEDS))
    choices = training_choices.select_choices(methods.load(table["method"]).params, table.get("params") or {})
    for kind, name in training_choices.list_plugins(choices):
        versions |= plugins.required_modules(kind, name, training_choices.BUILT_IN_CHOICES[kind])
    return msgspec.json.encode(versions, order="sorted") if versions else b""


def _list_table_paths(table: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(source["path"]) for source in (table, *table.get("sources", ())) if source.get("path"))
    if table.get("text"):
        yield str(table["text"]["vocabulary"])


def compute_content_digest(path: Path) -> str:
    """Return a digest of a file, or of the names and content of all files in a folder.

    The digest is "" if the path does not exist.
    """
    try:
        if path.is_dir():
            lines = sorted(f"{file.relative_to(path)}\0{_hash_file(file)}\n" for file in _walk_files(path))
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        return _hash_file(path) if path.exists() else ""
    except OSError as error:
        raise StoreError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _hash_file(path: Path) -> str:
    status = path.stat()
    if time.time() <= max(status.st_mtime, status.st_ctime) + SETTLED_S:
        return REAL.hash_file(path)
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if stamp not in _digest_cache:
        _digest_cache[stamp] = REAL.hash_file(path)
    return _digest_cache[stamp]


def _walk_files(folder: Path) -> Iterator[Path]:
    # follows links to folders, and visits each folder once
    visited: set[str] = set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(directory)
        if real_path in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders.sort()
        yield from (path for name in names if (path := Path(directory, name)).is_file())


def compute_code_digest() -> str:
    """Return a digest of the package's source files and profiles, and of the libraries' versions."""
    parts = [machines.compute_code_digest(), fedquilt.__version__, *map(str, machines.find_library_versions().items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
