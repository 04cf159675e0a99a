"""Backups: one file with what a coordinator's home needs to go on, made while it is served, and homes made from it.

A backup is a tar archive that only its owner may read. It holds the states and updates that some run still needs, all
evaluations and limits, the database of one moment, and last a manifest with the sha256 of each of them. Readings of
boards (`boards.db`), which no run depends on, and bundles, which lie outside a home, are not part of it.

A file or home has its name only when it is whole and on the disk. What a killed command leaves ends in .part, and the
next command for the same name begins it anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from fedquilt import __version__, progress
from fedquilt.coordinator import limits
from fedquilt.coordinator.rollout_log import RolloutLog
from fedquilt.coordinator.store import UNENDED, Row, Store
from fedquilt.coordinator.store_rows import Rows, storing
from fedquilt.core import UNDECODABLE, JobError, StoreError
from fedquilt.disk import REAL, doing

FORMAT: Final = 1
DATABASE: Final = "fedquilt.db"
_MEMBER: Final = re.compile(
    r"blobs/[0-9a-f]{64}|fedquilt\.db|limits\.toml|(evaluations|machines)/[^/]+\.json|agents/.+"
)
_MANIFEST: Final = re.compile(r"manifest-([0-9a-f]{64})\.json")
_WHEN_FULL: Final = "free some space or name another disk"
_PIECE_BYTES: Final = 1 << 20


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a backup holds."""

    format: int
    version: str  # of the fedquilt that made it
    files: Mapping[str, tuple[int, str]]  # path in the home -> bytes, sha256


class Saved(NamedTuple):
    """What a backup holds, for people."""

    runs: int
    files: int
    bytes: int


# -- making one -----------------------------------------------------------------------------------


def save(store: Store, file: Path) -> Saved:
    """Write a backup of a home, which a coordinator may serve meanwhile, into a new file.

    Raises:
        JobError: the file is there already, another backup is being written to it, or a simulated fleet, whose boards
            have their state in the home too, is at work.
        StoreError: the home is damaged, or the file cannot be written.
    """
    if file.exists():
        raise _taken(file)
    with doing(f"write {file}", _WHEN_FULL), _part_of(file) as part, os.fdopen(os.dup(part), "wb") as raw:
        archive = _Archive(raw)
        boards = _boards(store)
        blobs = _save_runs(store, archive, Path(f"{file}.part.db"))
        settings = [path for path in (store.home / limits.FILE,) if path.is_file()]
        of_runs = [path for name in ("evaluations", "machines") for path in sorted((store.home / name).glob("*.json"))]
        for path in [*settings, *boards, *of_runs]:
            archive.add(path.relative_to(store.home).as_posix(), path)
        archive.finish()
        raw.flush()
        os.fsync(part)
        REAL.replace(f"{file}.part", file)
        REAL.sync(file.parent)
    return Saved(len(store.all_jobs()), blobs, file.stat().st_size)


def _save_runs(store: Store, archive: _Archive, snapshot: Path) -> int:
    """Add the database of one moment, after all blobs that it needs; returns their number.

    A coordinator drops a blob once a later fact makes it superfluous, so what is gone is asked for again in a later
    database. What that one needs still is lost.
    """
    gone: set[str] = set()
    blobs: set[str] = set()
    try:
        while True:
            before, gone = gone, set()
            left = sorted(_snapshot(store, snapshot) - blobs)
            for number, sha256 in enumerate(left):
                progress.LINE.part("its blobs", number, len(left))
                name, payload = f"blobs/{sha256}", store.depot.packed(sha256)
                path = store.depot.path(sha256) if payload is None else None
                if payload is not None:  # it has no file, and gets none here
                    archive.add_bytes(name, payload)
                    blobs.add(sha256)
                elif path is not None and archive.add(name, path, sha256):
                    blobs.add(sha256)
                else:
                    gone.add(sha256)
            if lost := gone & before:
                raise StoreError(
                    f"blob {min(lost)[:12]} of {store.home} is missing or damaged: let a coordinator serve this home, "
                    "which mends it or names the run; keep your earlier backups"
                )
            if not gone:
                archive.add(DATABASE, snapshot)
                return len(blobs)
    finally:
        snapshot.unlink(missing_ok=True)


def _snapshot(store: Store, target: Path) -> set[str]:
    """Copy the database of one moment into a file, while others may write; returns the blobs that it needs.

    Raises:
        StoreError: the database, or a run in it, is damaged.
    """
    if store.damage:
        raise StoreError(f"{store.home / DATABASE} is damaged ({store.damage}): put back an earlier backup")
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    with (
        storing(store.home),
        closing(REAL.connect(store.home / DATABASE)) as now,
        closing(REAL.connect(target)) as copy,
    ):
        now.backup(copy)
        copy.execute("pragma journal_mode=delete")  # one file, without a log beside it
        rows = Rows(copy, store.home)
        if unsound := rows.unsound():
            raise rows.damaged(unsound[0], "its rows are not what was written")
        rollouts = RolloutLog(copy, rows, store.home, rows.together)
        for reason in rollouts.unreadable().values():
            raise StoreError(reason)
        return rollouts.blobs().union(*(log.blobs for log in rows.logs().values()))


def _boards(store: Store) -> list[Path]:
    """Files of simulated boards whose runs may go on; nothing else works in the home while they are copied.

    Raises:
        JobError: they are at work.
    """
    rows = [row for row in store.jobs() if isinstance(row, Row) and row.status not in ("done", "failed")]
    folders = [store.home / "agents" / row.id for row in rows if (store.home / "agents" / row.id).is_dir()]
    if not folders:
        return []
    if not store.lock():
        working = next((row.id for row in rows if row.status in UNENDED), rows[0].id)
        raise JobError(f"{working} is a simulated fleet at work in {store.home}: wait for its end, or stop it first")
    return sorted(path for each in folders for path in each.rglob("*") if path.is_file() and not path.is_symlink())


class _Archive:
    """A backup that is being written."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=raw, mode="w")
        self._files: dict[str, tuple[int, str]] = {}

    def add(self, name: str, path: Path, sha256: str = "") -> bool:
        """Add a file; False: it is gone.

        Raises:
            StoreError: its content is not what `sha256` says.
        """
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        with file:
            size = os.fstat(file.fileno()).st_size
            digest = self._copy(name, size, file)
        if sha256 and digest != sha256:
            raise StoreError(f"{path} is damaged: it is not what its name says")
        self._files[name] = (size, digest)
        return True

    def add_bytes(self, name: str, payload: bytes) -> None:
        """Add a file of these bytes."""
        self._files[name] = (len(payload), self._copy(name, len(payload), io.BytesIO(payload)))

    def finish(self) -> None:
        """Add the manifest and the end."""
        text = msgspec.json.format(msgspec.json.encode(Manifest(FORMAT, __version__, self._files)))
        name = f"manifest-{hashlib.sha256(text).hexdigest()}.json"
        self._copy(name, len(text), io.BytesIO(text))
        self._tar.close()

    def _copy(self, name: str, size: int, source: IO[bytes]) -> str:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        reader = _Hashing(source)
        self._tar.addfile(info, reader)
        return reader.sha256.hexdigest()


class _Hashing:
    """What is read, and its hash."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.sha256 = source, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._source.read(size)
        self.sha256.update(piece)
        return piece


@contextmanager
def _part_of(file: Path) -> Iterator[int]:
    """An empty FILE.part that no other process writes; it is removed if an error ends this.

    Raises:
        JobError: another process writes it.
    """
    path = f"{file}.part"
    part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another backup to {file} is being written: wait for its end") from None
        if file.exists() or not os.path.exists(path) or not os.path.samestat(os.fstat(part), os.stat(path)):
            raise _taken(file)  # it was finished between our opening and our lock
        os.fchmod(part, 0o600)
        os.ftruncate(part, 0)
        try:
            yield part
        except BaseException:
            REAL.unlink(path)
            raise
    finally:
        os.close(part)


def _taken(file: Path) -> JobError:
    return JobError(f"{file} is there already: name a new file")


# -- a home from one ------------------------------------------------------------------------------


def restore(file: Path, home: Path) -> Saved:
    """Make a home from a backup: whole, and each file compared with its hash, or not at all.

    Raises:
        JobError: the home is there already, or another command makes it.
        StoreError: the backup is damaged, cut short or of a later version, or the home cannot be written.
    """
    home = Path(os.path.abspath(home))
    if home.is_symlink() or not _empty(home):
        raise JobError(f"{home} is there already: name a home that is not, or move this one away first")
    part = home.with_name(f"{home.name}.part")
    with doing(f"make {home} from {file}", _WHEN_FULL), _being_made(part):
        manifest = _unpack(file, part)
        with Store(part) as store:
            found = Saved(len(store.all_jobs()), len(manifest.files), sum(size for size, _ in manifest.files.values()))
            if store.damage:
                raise StoreError(f"{file}: its database is damaged ({store.damage}): take an earlier backup")
        _settle(part)
        os.replace(part, home)  # an empty folder gives way
        REAL.sync(home.parent)
        REAL.unlink(_mark(home))
    return found


def _unpack(file: Path, to: Path) -> Manifest:
    """Write what a backup holds, and compare it.

    Raises:
        StoreError: it is damaged, cut short or of a later version; names what.
    """
    found: dict[str, tuple[int, str]] = {}
    with open(file, "rb") as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r:") as archive:
                for member in archive:
                    progress.LINE.part("MB of the backup", raw.tell() // 10**6, file.stat().st_size // 10**6)
                    source = archive.extractfile(member)
                    if source is None:
                        raise StoreError(_odd(file, member.name))
                    if stated := _MANIFEST.fullmatch(member.name):
                        return _compared(file, source.read(), stated[1], found)
                    if not _MEMBER.fullmatch(member.name) or {"..", ""} & {*member.name.split("/")}:
                        raise StoreError(_odd(file, member.name))
                    found[member.name] = _write(source, to / member.name)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise StoreError(f"{file} is no whole backup ({error}): take another one") from None
    raise StoreError(f"{file} is cut short or damaged after {len(found)} files: take another backup")


def _compared(file: Path, text: bytes, stated: str, found: Mapping[str, tuple[int, str]]) -> Manifest:
    try:
        if hashlib.sha256(text).hexdigest() != stated:
            raise StoreError(f"{file} is damaged: its manifest is not what was written; take another backup")
        known = msgspec.json.decode(text)["format"]
        if known != FORMAT:
            raise StoreError(f"{file} was made by a newer fedquilt (format {known}): install that version")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (*UNDECODABLE, KeyError, TypeError):
        raise StoreError(f"{file} is no backup of fedquilt: its manifest cannot be read") from None
    for name in sorted(found.keys() | manifest.files.keys()):
        if found.get(name) != manifest.files.get(name):
            raise StoreError(f"{file} is damaged: {name} is not what was saved; take another backup")
    if DATABASE not in found:
        raise StoreError(f"{file} is no backup of a home: it has no {DATABASE}")
    return manifest


def _odd(file: Path, name: str) -> str:
    return f"{file} is no backup of fedquilt: it holds {name[:80]!r}"


def _write(source: IO[bytes], path: Path) -> tuple[int, str]:
    """Write a new file that only its owner may read, on the disk when this returns; bytes and sha256."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reader, size = _Hashing(source), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while piece := reader.read(_PIECE_BYTES):
            out.write(piece)
            size += len(piece)
        out.flush()
        os.fsync(out.fileno())
    return size, reader.sha256.hexdigest()


@contextmanager
def _being_made(part: Path) -> Iterator[None]:
    """An empty folder that no other process fills; it is removed if an error ends this.

    Raises:
        JobError: another process fills it, or it is none of ours.
    """
    if not _empty(part) and not _mark(part).is_file():
        raise JobError(f"{part}, where the home is made first, is something else: move it away")
    part.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = REAL.lock(_mark(part))
    if lock is None:
        raise JobError(f"another command is making {part}: wait for its end")
    try:
        for each in part.iterdir():
            if each != _mark(part):
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        lock.close()


def _empty(place: Path) -> bool:
    """Whether there is nothing, or a folder with nothing in it."""
    return not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir()))


def _mark(home: Path) -> Path:
    return home / ".being-restored"


def _settle(folder: Path) -> None:
    """Wait until all names in a folder are on the disk."""
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        REAL.sync(each)
