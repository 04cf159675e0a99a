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

SETTLED_S: Final = 2.0  # after a change, before a file's times are trusted to show another one
_digests: dict[tuple[int, ...], str] = {}  # of settled files, since each run of a comparison asks for the same data


class RunCache:
    """Cached runs in `folder`/runs."""

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

    def describe_cache(self, found: int, keys: Collection[str]) -> list[str]:
        """Return messages with the numbers of cached runs and of files with different inputs."""
        others = sum(path.stem not in keys for path in self.folder.glob("*.json"))
        lines = [f"{found} of {len(keys)} runs are in {self.folder} already"] if found else []
        if others and found < len(keys):
            lines.append(
                f"{others} other runs in {self.folder} are not used: their job, bundle, data or version of the code "
                "is not the one of this comparison"
            )
        return lines


def make_key(*parts: bytes, bundle: Path, data: Iterable[Path]) -> str:
    """Return a digest of the parts, the content of a bundle and of data files, and the code."""
    made = bundles.load_bundle(bundle)
    index = msgspec.json.encode([made.meta, made.files], order="sorted")
    blobs = sorted({ref.sha256 for ref in made.files.values()})  # others in its folder are of bundles of before
    contents = [compute_content_digest(path) for path in (*(bundle / "blobs" / blob for blob in blobs), *data)]
    pieces = (*parts, index, *(each.encode() for each in (*contents, compute_code_digest())))
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in pieces)).hexdigest()[:24]


def list_data_paths(job: bytes) -> list[Path]:
    table = msgspec.json.decode(job)
    found = [path for name in ("data", "test") for path in _list_table_paths(table.get(name) or {})]
    return [Path(path) for path in dict.fromkeys(found)]


def list_plugin_versions(job: bytes) -> bytes:
    """Return as JSON the version and content digest of each plug-in package of a job given as JSON.

    The result is empty without plug-ins.
    """
    table = msgspec.json.decode(job)
    found = methods.required_plugins(table["method"]) | registry.required_plugins(table.get("model") or {})
    for data in (table.get("data") or {}, table.get("test") or {}):
        if data.get("dataset") and not data.get("path") and not is_builtin_dataset(data["dataset"]):
            found |= plugins.required_modules("data", data["dataset"])
    if table.get("engine"):
        found |= plugins.required_modules("engine", table["engine"], tuple(engines.NEEDS))
    choices = training_choices.select_choices(methods.load(table["method"]).params, table.get("params") or {})
    for kind, name in training_choices.list_plugins(choices):
        found |= plugins.required_modules(kind, name, training_choices.OURS[kind])
    return msgspec.json.encode(found, order="sorted") if found else b""


def _list_table_paths(table: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(each["path"]) for each in (table, *table.get("sources", ())) if each.get("path"))
    if table.get("text"):
        yield str(table["text"]["vocabulary"])


def compute_content_digest(path: Path) -> str:
    """Return a digest of a file, or of the names and content of all files in a folder.

    The digest is "" if the path does not exist.
    """
    try:
        if path.is_dir():
            lines = sorted(f"{each.relative_to(path)}\0{_hash_file(each)}\n" for each in _walk_files(path))
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        return _hash_file(path) if path.exists() else ""
    except OSError as error:
        raise StoreError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _hash_file(path: Path) -> str:
    found = path.stat()
    if time.time() <= max(found.st_mtime, found.st_ctime) + SETTLED_S:
        return REAL.hash_file(path)
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if stamp not in _digests:
        _digests[stamp] = REAL.hash_file(path)
    return _digests[stamp]


def _walk_files(folder: Path) -> Iterator[Path]:
    # follows links to folders, and visits each folder once
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (path for name in names if (path := Path(place, name)).is_file())


def compute_code_digest() -> str:
    """Return a digest of the package's source files and profiles, and of the libraries' versions."""
    parts = [machines.compute_code_digest(), fedquilt.__version__, *map(str, machines.find_library_versions().items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
