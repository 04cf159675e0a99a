"""Backup and restoration of a coordinator's home.

A backup is a tar archive that only its owner may read. The archive contains the blobs that some run still needs, all
evaluations and limits, the bundles that a site has received, a consistent copy of the database and, at the end, a
manifest with the SHA-256 of each file. A coordinator may use the home during the backup. Device telemetry
(`boards.db`), on which no run depends, and bundles outside the home are not included.

A file or home gets its name when it is complete and on the disk. Files of a killed command end in .part, and the next
command for the same name replaces them.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from fedquilt import __version__
from fedquilt.console import progress
from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import RowStore, database_errors
from fedquilt.coordinator.storage.store import UNENDED, Store, StoredJob
from fedquilt.core import DECODE_ERRORS, JobError, StoreError
from fedquilt.host.disk import REAL, disk_errors

FORMAT: Final = 1
DATABASE: Final = "fedquilt.db"
_MEMBER: Final = re.compile(
    r"blobs/[0-9a-f]{64}|fedquilt\.db|limits\.toml|(evaluations|machines)/[^/]+\.json|(agents|sites)/.+"
)
_MANIFEST: Final = re.compile(r"manifest-([0-9a-f]{64})\.json")
_WHEN_FULL: Final = "free some space or choose another disk"
_PIECE_BYTES: Final = 1 << 20


class BackupManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    version: str  # fedquilt version that wrote the backup
    files: Mapping[str, tuple[int, str]]  # path in the home -> bytes, sha256


class BackupSummary(NamedTuple):
    runs: int
    files: int
    bytes: int


def write_backup(store: Store, file: Path) -> BackupSummary:
    """Write a backup into a new file. Raise JobError if the file exists, StoreError for a damaged home."""
    if file.exists():
        raise _file_exists_error(file)
    with (
        disk_errors(f"write {file}", _WHEN_FULL),
        _open_part_file(file) as part,
        os.fdopen(os.dup(part), "wb") as file_object,
    ):
        archive = _BackupArchive(file_object)
        agent_files = _lock_home_and_list_agent_files(store)
        blobs = _add_database_and_blobs(store, archive, Path(f"{file}.part.db"))
        limits = [path for path in (store.home / settings.LIMITS_FILE,) if path.is_file()]
        run_files = [
            path for name in ("evaluations", "machines") for path in sorted((store.home / name).glob("*.json"))
        ]
        bundles = _list_regular_files(store.home / "sites" / row.id for row in store.all_jobs())
        for path in [*limits, *agent_files, *run_files, *bundles]:
            archive.add_file(path.relative_to(store.home).as_posix(), path)
        archive.close_with_manifest()
        file_object.flush()
        os.fsync(part)
        REAL.replace(f"{file}.part", file)
        REAL.sync(file.parent)
    return BackupSummary(len(store.all_jobs()), blobs, file.stat().st_size)


def _add_database_and_blobs(store: Store, archive: _BackupArchive, snapshot: Path) -> int:
    """Add the database and needed blobs. Return the number of blobs, or raise StoreError if one is lost."""
    # A coordinator may delete a blob during the backup, when a later event makes the blob superfluous. So missing blobs
    # are looked up in a later copy of the database, and a blob that this copy still needs is lost.
    missing: set[str] = set()
    blobs: set[str] = set()
    try:
        while True:
            previously_missing, missing = missing, set()
            remaining = sorted(_copy_database(store, snapshot) - blobs)
            for number, sha256 in enumerate(remaining):
                progress.LINE.set_part("its blobs", number, len(remaining))
                name, payload = f"blobs/{sha256}", store.blob_store.load_packed(sha256)
                path = store.blob_store.blob_path(sha256) if payload is None else None
                if payload is not None:  # a small blob without a file
                    archive.add_bytes(name, payload)
                    blobs.add(sha256)
                elif path is not None and archive.add_file(name, path, sha256):
                    blobs.add(sha256)
                else:
                    missing.add(sha256)
            if lost_blobs := missing & previously_missing:
                raise StoreError(
                    f"blob {min(lost_blobs)[:12]} of {store.home} is missing or damaged: start a coordinator, which "
                    "repairs it or names the run, and keep earlier backups"
                )
            if not missing:
                archive.add_file(DATABASE, snapshot)
                return len(blobs)
    finally:
        snapshot.unlink(missing_ok=True)


def _copy_database(store: Store, target: Path) -> set[str]:
    """Copy the database to `target`. Return the blobs that it needs, or raise StoreError if damaged."""
    if store.damage:
        raise StoreError(f"{store.home / DATABASE} is damaged ({store.damage}): restore an earlier backup")
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    with (
        database_errors(store.home),
        closing(REAL.connect(store.home / DATABASE)) as database,
        closing(REAL.connect(target)) as copy,
    ):
        database.backup(copy)
        copy.execute("pragma journal_mode=delete")  # a single file, without a write-ahead log
        rows = RowStore(copy, store.home)
        if damaged_ids := rows.find_damaged_jobs():
            raise rows.damage_error(damaged_ids[0], "its rows do not match their checksums")
        rollouts = RolloutLog(copy, rows, store.home, rows.open_transaction)
        for reason in rollouts.read_errors().values():
            raise StoreError(str(reason))
        return rollouts.referenced_blobs().union(*(log.needed_blobs for log in rows.read_logs().values()))


def _lock_home_and_list_agent_files(store: Store) -> list[Path]:
    rows = [row for row in store.readable_jobs() if isinstance(row, StoredJob) and row.status not in ("done", "failed")]
    folders = [store.home / "agents" / row.id for row in rows if (store.home / "agents" / row.id).is_dir()]
    if not folders:
        return []
    if not store.acquire_lock():
        active_run = next((row.id for row in rows if row.status in UNENDED), rows[0].id)
        raise JobError(f"the simulation {active_run} is running in {store.home}: wait for its end, or stop it first")
    return _list_regular_files(folders)


def _list_regular_files(folders: Iterable[Path]) -> list[Path]:
    paths = (Path(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


class _BackupArchive:
    def __init__(self, raw: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=raw, mode="w")
        self._files: dict[str, tuple[int, str]] = {}

    def add_file(self, name: str, path: Path, sha256: str = "") -> bool:
        """Add a file. Return False if the file does not exist. Raise StoreError if its hash is not `sha256`."""
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        with file:
            size = os.fstat(file.fileno()).st_size
            digest = self._add_member(name, size, file)
        if sha256 and digest != sha256:
            raise StoreError(f"{path} is damaged: its content does not match its name")
        self._files[name] = (size, digest)
        return True

    def add_bytes(self, name: str, payload: bytes) -> None:
        self._files[name] = (len(payload), self._add_member(name, len(payload), io.BytesIO(payload)))

    def close_with_manifest(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(BackupManifest(FORMAT, __version__, self._files)))
        name = f"manifest-{hashlib.sha256(text).hexdigest()}.json"
        self._add_member(name, len(text), io.BytesIO(text))
        self._tar.close()

    def _add_member(self, name: str, size: int, source: IO[bytes]) -> str:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        reader = _HashingReader(source)
        self._tar.addfile(info, reader)
        return reader.sha256.hexdigest()


class _HashingReader:
    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.sha256 = source, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self._source.read(size)
        self.sha256.update(chunk)
        return chunk


@contextmanager
def _open_part_file(file: Path) -> Iterator[int]:
    """Open and lock an empty FILE.part, or raise JobError. After an error in the body, remove the file."""
    path = f"{file}.part"
    part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{file} is being written by another backup: wait for its end") from None
        if file.exists() or not os.path.exists(path) or not os.path.samestat(os.fstat(part), os.stat(path)):
            raise _file_exists_error(file)  # another backup was completed before the lock
        os.fchmod(part, 0o600)
        os.ftruncate(part, 0)
        try:
            yield part
        except BaseException:
            REAL.unlink(path)
            raise
    finally:
        os.close(part)


def _file_exists_error(file: Path) -> JobError:
    return JobError(f"{file} exists already: choose a new file name")


def restore_backup(file: Path, home: Path) -> BackupSummary:
    """Restore a home completely or not at all. Raise JobError if it is not empty, StoreError after damage."""
    home = Path(os.path.abspath(home))
    if home.is_symlink() or not _is_missing_or_empty(home):
        raise JobError(f"{home} exists already: choose a new folder, or move this one away")
    part = home.with_name(f"{home.name}.part")
    with disk_errors(f"restore {home} from {file}", _WHEN_FULL), _open_part_folder(part):
        manifest = _extract_and_verify_backup(file, part)
        with Store(part) as store:
            summary = BackupSummary(
                len(store.all_jobs()), len(manifest.files), sum(size for size, _ in manifest.files.values())
            )
            if store.damage:
                raise StoreError(f"{file}: the database is damaged ({store.damage}): use an earlier backup")
        _sync_folders(part)
        os.replace(part, home)  # replaces an empty folder
        REAL.sync(home.parent)
        REAL.unlink(_lock_path(home))
    return summary


def _extract_and_verify_backup(file: Path, folder: Path) -> BackupManifest:
    files: dict[str, tuple[int, str]] = {}
    with open(file, "rb") as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r:") as archive:
                for member in archive:
                    progress.LINE.set_part("MB of the backup", raw.tell() // 10**6, file.stat().st_size // 10**6)
                    source = archive.extractfile(member)
                    if source is None:
                        raise StoreError(_unexpected_file_text(file, member.name))
                    if manifest_name := _MANIFEST.fullmatch(member.name):
                        return _parse_and_verify_manifest(file, source.read(), manifest_name[1], files)
                    if not _MEMBER.fullmatch(member.name) or {"..", ""} & {*member.name.split("/")}:
                        raise StoreError(_unexpected_file_text(file, member.name))
                    files[member.name] = _write_private_file(source, folder / member.name)
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise StoreError(f"{file} is not a complete backup ({error}): use another backup") from None
    raise StoreError(f"{file} is truncated or damaged after {len(files)} files: use another backup")


def _parse_and_verify_manifest(
    file: Path, text: bytes, stated_digest: str, files: Mapping[str, tuple[int, str]]
) -> BackupManifest:
    try:
        if hashlib.sha256(text).hexdigest() != stated_digest:
            raise StoreError(f"{file} is damaged: the manifest does not match its hash. Use another backup")
        format = msgspec.json.decode(text)["format"]
        if format != FORMAT:
            raise StoreError(
                f"{file} has format {format}, but this fedquilt reads {FORMAT}: use the version that wrote it"
            )
        manifest = msgspec.json.decode(text, type=BackupManifest)
    except (*DECODE_ERRORS, KeyError, TypeError):
        raise StoreError(f"{file} is not a backup of fedquilt: the manifest cannot be read") from None
    for name in sorted(files.keys() | manifest.files.keys()):
        if files.get(name) != manifest.files.get(name):
            raise StoreError(f"{file} is damaged: {name} differs from the manifest. Use another backup")
    if DATABASE not in files:
        raise StoreError(f"{file} is not a backup of a home: {DATABASE} is missing")
    return manifest


def _unexpected_file_text(file: Path, name: str) -> str:
    return f"{file} is not a backup of fedquilt: unexpected file {name[:80]!r}"


def _write_private_file(source: IO[bytes], path: Path) -> tuple[int, str]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reader, size = _HashingReader(source), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while chunk := reader.read(_PIECE_BYTES):
            out.write(chunk)
            size += len(chunk)
        out.flush()
        os.fsync(out.fileno())
    return size, reader.sha256.hexdigest()


@contextmanager
def _open_part_folder(part: Path) -> Iterator[None]:
    """Create, lock and empty the folder, and remove the folder after an error.

    Raise JobError if another command uses the path, or if it is not the folder of an earlier restoration.
    """
    if not _is_missing_or_empty(part) and not _lock_path(part).is_file():
        raise JobError(f"{part} is needed for the restoration, but is not from an earlier one: move it away")
    part.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = REAL.lock(_lock_path(part))
    if lock is None:
        raise JobError(f"{part} is in use by another restoration: wait for its end")
    try:
        for entry in part.iterdir():
            if entry != _lock_path(part):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        lock.release()


def _is_missing_or_empty(path: Path) -> bool:
    return not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))


def _lock_path(home: Path) -> Path:
    return home / ".being-restored"


def _sync_folders(folder: Path) -> None:
    for subfolder in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        REAL.sync(subfolder)
