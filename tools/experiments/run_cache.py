"""Finished runs in a folder, each in a file named by all that it depends on: an interrupted comparison goes on.

A run depends on its job, on the content of its bundle and of its data, and on the code that makes it. Content is
hashed, not dates: data with other labels in a file of the same name and size give another run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

import fedquilt
from fedquilt import bundle as bundles
from fedquilt import columns, methods, plugins, units
from fedquilt.core import JobError, StoreError
from fedquilt.disk import doing
from fedquilt.edge_agent import engines
from fedquilt.models.networks import registry

T = TypeVar("T")
SETTLED_S: Final = 2.0  # a file written within so many seconds may be written again without a change of its times
LIBRARIES: Final = ("numpy", "torch", "torchvision", "onnxruntime")  # whose arithmetic a run's results come from


class Kept(Generic[T]):
    """Runs of one type, in `folder`/runs.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(self, folder: Path, kind: type[T]) -> None:
        self.folder, self._kind = folder / "runs", kind
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write {self.folder}: {error.strerror}") from None

    def find(self, key: str) -> T | None:
        """None: there is no such run, or not one of this version."""
        try:
            return msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=self._kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def keep(self, key: str, run: T) -> None:
        """Store a finished run under its key, whole or not at all."""
        part = self.folder / f"{key}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(run)))
        os.replace(part, self.folder / f"{key}.json")

    def told(self, found: int, keys: Collection[str]) -> list[str]:
        """Sentences before the missing runs are made: how many are here, and how many others are not used."""
        others = sum(path.stem not in keys for path in self.folder.glob("*.json"))
        lines = [f"{found} of {len(keys)} runs are in {self.folder} already"] if found else []
        if others and found < len(keys):
            lines.append(
                f"{others} other runs in {self.folder} are not used: their job, bundle, data or version of the code "
                "is not the one of this comparison"
            )
        return lines


# -- what is kept, for people ----------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A kept run as a file. `method` and `seed` are None where the file does not tell: of another tool or version."""

    key: str
    bytes: int
    made: float  # wall-clock seconds
    method: str | None = None
    seed: int | None = None
    about: str = ""  # of what made it: devices and rounds of a comparison, searches of an ablation


class _About(msgspec.Struct, frozen=True):
    """Description of a comparison's run, whatever its version."""

    method: str
    seed: int
    devices: int = 0
    marks: list[dict[str, Any]] = []


class _Part(msgspec.Struct, frozen=True):
    """Likewise a row of an ablation's run."""

    condition: str
    seed: int
    part: str


def entries(out: Path) -> list[Entry]:
    """The kept runs in `out`/runs, the oldest first.

    Raises:
        StoreError: there is no such folder, or it cannot be read.
    """
    folder = out / "runs"
    if not folder.is_dir():
        raise StoreError(f"no kept runs in {out}: `fedquilt compare` keeps some there, --out names another folder")
    with doing(f"read {folder}"):
        return sorted((_entry(path) for path in folder.glob("*.json")), key=lambda each: (each.made, each.key))


def _entry(path: Path) -> Entry:
    found, content = path.stat(), path.read_bytes()
    plain = Entry(key=path.stem, bytes=found.st_size, made=found.st_mtime)
    try:
        told: _About | list[_Part] = msgspec.json.decode(content, type=_About | list[_Part])
    except msgspec.DecodeError:
        return plain
    if isinstance(told, _About):
        rounds = told.marks[-1].get("rounds") if told.marks else None
        about = f"{told.devices} devices" + (f", {rounds} rounds" if rounds else "")
        return msgspec.structs.replace(plain, method=told.method, seed=told.seed, about=about)
    if not told:
        return plain
    return msgspec.structs.replace(plain, seed=told[0].seed, about=f"{told[0].condition}, {told[0].part}")


def choose(
    found: Iterable[Entry],
    keys: Collection[str],
    now: float,
    *,
    everything: bool = False,
    method: str | None = None,
    older_s: float | None = None,
) -> list[Entry]:
    """The entries to drop: of the keys (or beginnings of one), or of a method, an age or both.

    Raises:
        JobError: nothing was chosen by, or a key begins none or several.
    """
    known = list(found)
    if not keys and not everything and method is None and older_s is None:
        raise JobError("say which kept runs to drop: keys, --method, --older-than or --all")
    chosen = []
    for word in keys:
        matching = [each for each in known if each.key.startswith(word)]
        if len(matching) != 1:
            raise JobError(
                f"{len(matching)} kept runs have a key that begins with {word!r}; `fedquilt kept list` shows all"
            )
        chosen += matching
    if everything or method is not None or older_s is not None:
        chosen += [
            each
            for each in known
            if (method is None or each.method == method) and (older_s is None or now - each.made > older_s)
        ]
    return list({each.key: each for each in chosen}.values())


def drop(out: Path, found: Iterable[Entry]) -> None:
    """Delete finished runs from the cache of `fedquilt compare`.

    Raises:
        StoreError: one cannot be deleted.
    """
    with doing(f"drop kept runs of {out}"):
        for each in found:
            (out / "runs" / f"{each.key}.json").unlink(missing_ok=True)


def lines(found: Sequence[Entry], now: float) -> list[str]:
    """The list for people."""
    total = units.size(sum(each.bytes for each in found))
    rows = []
    for each in found:
        told = filter(None, (each.method, f"seed {each.seed}" if each.seed is not None else "", each.about))
        rows.append([each.key, _age(now - each.made), units.size(each.bytes), ", ".join(told)])
    return [*columns.table(rows, "<>>~"), f"{len(found)} kept runs, {total}"]


def _age(seconds: float) -> str:
    for name, each in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= each:
            return f"{seconds / each:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


# -- what a run depends on ------------------------------------------------------------------------


def key(*parts: bytes, bundle: Path, data: Iterable[Path]) -> str:
    """What a run depends on, as a file's name: the parts, the content of its bundle and of its data, and the code.

    Raises:
        JobError: there is no bundle, or it is damaged.
        StoreError: the bundle or a file of the data cannot be read.
    """
    made = bundles.load(bundle)
    index = msgspec.json.encode([made.meta, made.files], order="sorted")
    blobs = sorted({ref.sha256 for ref in made.files.values()})  # others in its folder are of bundles of before
    contents = [content(path) for path in (*(bundle / "blobs" / blob for blob in blobs), *data)]
    pieces = (*parts, index, *(each.encode() for each in (*contents, code())))
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in pieces)).hexdigest()[:24]


def paths(job: bytes) -> list[Path]:
    """The files and folders that a job, as JSON, reads examples from: those of its [data] and of its [test]."""
    table = msgspec.json.decode(job)
    found = [path for name in ("data", "test") for path in _paths(table.get(name) or {})]
    return [Path(path) for path in dict.fromkeys(found)]


def outside(job: bytes) -> bytes:
    """What of other packages a job, as JSON, runs on: each package's version and content.

    Raises:
        JobError: one is not installed here.
    """
    table = msgspec.json.decode(job)
    found = methods.needs(table["method"]) | registry.needs(table.get("model") or {})
    for data in (table.get("data") or {}, table.get("test") or {}):
        if data.get("dataset") and not data.get("path"):
            found |= plugins.needs("data", data["dataset"])
    if table.get("engine"):
        found |= plugins.needs("engine", table["engine"], tuple(engines.NEEDS))
    return msgspec.json.encode(found, order="sorted") if found else b""


def _paths(table: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(each["path"]) for each in (table, *table.get("sources", ())) if each.get("path"))
    if table.get("text"):
        yield str(table["text"]["vocabulary"])


def content(path: Path) -> str:
    """A digest of a file, or of all files in a folder and their names; "" where there is nothing.

    Raises:
        StoreError: a file cannot be read.
    """
    try:
        if path.is_dir():
            lines = sorted(f"{each.relative_to(path)}\0{_digest(each)}\n" for each in _files(path))
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        return _digest(path) if path.exists() else ""
    except OSError as error:
        raise StoreError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, those in linked folders too; none twice, however links lead."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (path for name in names if (path := Path(place, name)).is_file())


def _digest(path: Path) -> str:
    """The sha256 of a file; one that was read before and is settled is not read again."""
    found = path.stat()
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    settled = time.time() > max(found.st_mtime, found.st_ctime) + SETTLED_S
    if settled and stamp in _digests:
        return _digests[stamp]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if settled:
        _digests[stamp] = digest.hexdigest()
    return digest.hexdigest()


_digests: dict[tuple[int, ...], str] = {}  # device, inode, size and times of a file -> its sha256, in this process


@functools.lru_cache(maxsize=1)
def code() -> str:
    """A digest of the code that makes runs: this package's version and source files, and its libraries' versions."""
    root = Path(fedquilt.__file__).parent
    sources = (path for path in _files(root) if path.suffix in (".py", ".toml"))  # profiles are TOML
    lines = sorted(f"{path.relative_to(root)}\0{_digest(path)}" for path in sources)
    lines += [fedquilt.__version__, *(f"{name} {_version(name)}" for name in LIBRARIES)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
