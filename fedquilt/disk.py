"""The disk: a seam through which coordinator and agent reach their files and databases, and its errors in sentences.

`Disk` is the machine's own. Each of its methods is a thin call, so that a simulation can have another one which
loses, tears or refuses what is written (`fedquilt.testing.faults`). What a file holds is on the disk only
after `sync` of the file, and that it has its name there only after `sync` of its folder.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fedquilt.core import DiskFullError, StoreError
from fedquilt.open_file import OpenFile, write_whole
from fedquilt.open_file import Place as Place

if TYPE_CHECKING:
    import sqlite3

    from _typeshed import WriteableBuffer

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # numbers of errors that free space cures
BUFFER_BYTES: Final = 256 * 1024
LOCK_S: Final = 0.05  # seconds between two tries for a lock


class Found(NamedTuple):
    """What a folder or a name holds."""

    name: str
    is_dir: bool
    size: int  # bytes
    mtime_ns: int
    inode: int  # a file that is written anew and renamed has another one


class Lock:
    """A lock on a file, held until `close` or the end of the process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def close(self) -> None:
        """Release it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Disk:
    """Files as this process sees them.

    Raises, from every method:
        OSError: as the operating system has it.
    """

    withheld = 0  # bits of the modes of new files and folders that nobody gets, beside those of the process's umask

    def wall_s(self) -> float:
        """Seconds of the computer's wall clock."""
        return time.time()

    # -- what is there --

    def stat(self, path: Place) -> Found | None:
        """What a path leads to; None: nothing."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _found(os.path.basename(path), found)

    def is_file(self, path: Place) -> bool:
        """Whether there is a file."""
        return os.path.isfile(path)

    def is_dir(self, path: Place) -> bool:
        """Whether there is a folder."""
        return os.path.isdir(path)

    def entries(self, folder: Place) -> list[Found]:
        """What lies in a folder, in any order. A file that vanishes meanwhile is left out."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process was faster
                    found.append(_found(entry.name, entry.stat()))
        return found

    def free_bytes(self, folder: Place) -> int:
        """Bytes that this user may still write."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    # -- reading --

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        """Read `size` bytes from `offset`, fewer at the end; by default all that follow."""
        with builtins.open(path, "rb", buffering=0) as file:
            if size is not None:
                return os.pread(file.fileno(), size, offset)
            file.seek(offset)
            return file.read()

    def opened(self, path: Place) -> int:
        """Descriptor of a file that is open for reading; the caller closes it."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, path: Place, buffer: WriteableBuffer, offset: int) -> int:
        """Fill a buffer from `offset`, as far as there are bytes; returns their number."""
        view, have = memoryview(buffer), 0
        with builtins.open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while size := file.readinto(view[have:]):  # 2 GiB at once at the most
                have += size
        return have

    def pieces(self, path: Place) -> Iterator[memoryview]:
        """Read a file piece by piece; a piece holds until the next one is asked for."""
        with builtins.open(path, "rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(BUFFER_BYTES, os.fstat(file.fileno()).st_size + 1)))
            while size := file.readinto(buffer):
                yield buffer[:size]

    def data(self, path: Place) -> list[tuple[int, int]]:
        """Ranges of a sparse file that hold data: (start, end); the whole file if the system cannot list them."""
        found: list[tuple[int, int]] = []
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at, size = 0, os.fstat(file).st_size
            while at < size:
                try:
                    start = os.lseek(file, at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # only a hole is left
                        break
                    raise
                at = os.lseek(file, start, os.SEEK_HOLE)
                found.append((start, at))
        finally:
            os.close(file)
        return found

    # -- writing --

    def write(self, path: Place, payload: bytes, *, new: bool = False) -> None:
        """Write a file, which may be seen half written.

        Args:
            path: of the file.
            payload: all that it holds afterwards.
            new: the file must not exist yet.
        """
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else os.O_TRUNC), self._mode)
        try:
            write_whole(file, payload, 0)
        finally:
            os.close(file)

    def ensure(self, path: Place) -> None:
        """Make an empty file where there is none; one that is there stays as it is."""
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode))

    def write_at(self, path: Place, payload: bytes | memoryview, offset: int) -> None:
        """Write a part of an existing file."""
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_whole(file, payload, offset)
        finally:
            os.close(file)

    def resize(self, path: Place, size: int) -> None:
        """Give a file this size, with holes where nothing was written; it is made if it does not exist."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        try:
            if os.fstat(file).st_size != size:
                os.ftruncate(file, size)
        finally:
            os.close(file)

    def open(self, path: Place) -> OpenFile:
        """Open a file for reading and writing, which is made if it does not exist."""
        return OpenFile(path, self._mode)

    def scratch(self, folder: Place) -> OpenFile:
        """Open a file without a name, which is gone when it is closed or the process ends."""
        file = self.open(path := os.path.join(folder, f"{os.urandom(16).hex()}.tmp"))
        self.unlink(path)
        return file

    def sync(self, path: Place) -> None:
        """Wait until what a file holds, or which names a folder holds, is on the disk."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def replace(self, source: Place, target: Place) -> None:
        """Rename a file, in place of the one at `target` if there is one; or a folder, to where there is none."""
        os.replace(source, target)

    def link(self, source: Place, target: Place) -> None:
        """Give a file a second name; what a symbolic link leads to is linked, not the symbolic link."""
        os.link(os.path.realpath(source) if os.path.islink(source) else source, target)

    def symlink(self, target: str, path: Place) -> None:
        """Make a symbolic link at `path`, where there is nothing, to `target`, as seen from its folder."""
        os.symlink(target, path)

    def target(self, path: Place) -> str | None:
        """What a symbolic link names, whether it is there or not; None: there is no such link."""
        return os.readlink(path) if os.path.islink(path) else None

    def unlink(self, path: Place) -> None:
        """Remove a file; do nothing if there is none at the path."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def touch(self, path: Place) -> None:
        """Set the time of a file's last change to now; do nothing if there is none at the path."""
        with suppress(FileNotFoundError):
            os.utime(path)

    def permit(self, path: Place, mode: int) -> None:
        """Set who may use a file or a folder, whatever the umask."""
        os.chmod(path, mode)

    def make(self, folder: Place) -> None:
        """Make a folder and those above it, as far as they are missing; `withheld` is for the folder alone."""
        os.makedirs(folder, 0o777 & ~self.withheld, exist_ok=True)

    def settle(self, folder: Place) -> None:
        """Make a folder as `make` does, and wait until it has its name on the disk.

        A folder that is there already may lack it still: the process that made it may have ended before it waited.
        """
        place, unsure = os.fspath(folder), [os.fspath(folder)]
        while (above := os.path.dirname(place)) not in ("", place) and not self.is_dir(above):
            unsure.append(above)
            place = above
        self.make(folder)
        for each in unsure:
            with suppress(
                PermissionError
            ):  # a folder of somebody else, in which others may work, and which they may not list
                self.sync(os.path.dirname(each) or ".")

    def remove(self, folder: Place) -> None:
        """Remove a folder with all that is in it; nothing happens where there is none."""
        if os.path.isdir(folder):
            shutil.rmtree(folder)

    # -- made of these --

    def digest(self, path: Place) -> str:
        """Hash (sha256) of a file, read piece by piece."""
        sha256 = hashlib.sha256()
        for piece in self.pieces(path):
            sha256.update(piece)
        return sha256.hexdigest()

    def copy(self, source: Place, target: Place) -> str:
        """Copy a file to where there is none, and return the sha256 of the copy."""
        sha256, offset = hashlib.sha256(), 0
        self.write(target, b"", new=True)
        for piece in self.pieces(source):
            sha256.update(piece)
            self.write_at(target, bytes(piece), offset)
            offset += len(piece)
        return sha256.hexdigest()

    def point(self, path: Place, target: str) -> None:
        """Let a symbolic link name `target`: at any moment it names either that or what it named before."""
        part = f"{path}.part"
        self.unlink(part)
        self.symlink(target, part)
        self.replace(part, path)
        self.sync(os.path.dirname(path) or ".")

    def put(self, path: Place, payload: bytes, *, durable: bool = True) -> None:
        """Write a small file, so that at any moment it has either the old or the new content.

        With `durable` it is on the disk under its name when this returns.
        """
        part = f"{path}.part"
        self.write(part, payload)
        if durable:
            self.sync(part)
        self.replace(part, path)
        if durable:
            self.sync(os.path.dirname(path) or ".")

    # -- shared with other processes --

    def locked(self, path: Place) -> bool:
        """Whether somebody holds a lock on a file, this process included; nothing is made or changed."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def lock(self, path: Place, *, tries: int = 1) -> Lock | None:
        """Lock a file, which is made if it does not exist; None: another process holds it.

        `locked` of another process holds it for a moment, so that a few `tries` may be needed.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        for left in reversed(range(tries)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Lock(file)
            except BlockingIOError:
                if left:
                    time.sleep(LOCK_S)
        os.close(file)
        return None

    def connect(self, path: Place) -> sqlite3.Connection:
        """Open a database, in which every statement is a transaction of its own unless one is begun.

        Raises:
            sqlite3.Error: it cannot be opened.
        """
        import sqlite3  # of no use to an agent

        self.ensure(path)  # SQLite gives its other files the same mode
        return sqlite3.connect(path, timeout=10, isolation_level=None)

    @property
    def _mode(self) -> int:
        return 0o666 & ~self.withheld


class Private(Disk):
    """A `Disk` whose new files and folders are for this user alone, whatever the umask."""

    withheld = 0o077


REAL: Final = Disk()  # the machine's own
PRIVATE: Final = Private()


def _found(name: str, stat: os.stat_result) -> Found:
    return Found(name, (stat.st_mode & 0o170000) == 0o040000, stat.st_size, stat.st_mtime_ns, stat.st_ino)


# -- sentences ------------------------------------------------------------------------------------


def write(file: Path, text: str) -> None:
    """Write a command's output as UTF-8 text; missing folders on the way are created.

    Raises:
        StoreError: it cannot be written.
    """
    ready(file)
    with doing(f"write {file}", "name another file"):
        file.write_text(text, encoding="utf-8")


def ready(file: Path) -> None:
    """Create the missing folders on the way to a command's output.

    Raises:
        StoreError: they cannot be created.
    """
    with doing(f"write {file}", "name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)


class doing(AbstractContextManager[None]):
    """Turn an OSError into a StoreError: "cannot `what`: ...; the mend"."""

    def __init__(self, what: str, when_full: str = "free some space or use another home") -> None:
        self._what, self._when_full = what, when_full

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            if error.errno in FULL:
                raise DiskFullError(f"cannot {self._what}: {error.strerror}; {self._when_full}") from None
            raise StoreError(
                f"cannot {self._what}: {error.strerror}; check the folder, its owner and the disk"
            ) from None
