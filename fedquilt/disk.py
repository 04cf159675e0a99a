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
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from fedquilt.core import DiskFullError, StoreError
from fedquilt.open_file import DESCRIPTORS, OpenFile, open_descriptor, retry_without_descriptor, write_whole
from fedquilt.open_file import Place as Place

if TYPE_CHECKING:
    import sqlite3

    from _typeshed import WriteableBuffer

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # numbers of errors that free space cures
ENTRY_BYTES: Final = 4096  # of a name in a folder, about, with its inode
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

    Methods that open a file wait while the process or the system has no file descriptor left.

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
        return _found_from_stat(os.path.basename(path), found)

    def is_file(self, path: Place) -> bool:
        """Whether there is a file."""
        return os.path.isfile(path)

    def is_dir(self, path: Place) -> bool:
        """Whether there is a folder."""
        return os.path.isdir(path)

    def entries(self, folder: Place) -> list[Found]:
        """Return the entries of a folder, in any order, without files that vanish meanwhile."""
        found = []
        with retry_without_descriptor(lambda: os.scandir(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process was faster
                    found.append(_found_from_stat(entry.name, entry.stat()))
        return found

    def free_bytes(self, folder: Place) -> int:
        """Bytes that this user may still write."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    # -- reading --

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        """Read `size` bytes from `offset`, fewer at the end; by default all that follow."""
        with builtins.open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
            if size is not None:
                return os.pread(file.fileno(), size, offset)
            file.seek(offset)
            return file.read()

    def open_for_reading(self, path: Place) -> int:
        """Return the descriptor of a file opened for reading, which the caller closes."""
        return open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, path: Place, buffer: WriteableBuffer, offset: int) -> int:
        """Fill a buffer with bytes from `offset`. Return their number, which is smaller at the file's end."""
        view, have = memoryview(buffer), 0
        with builtins.open(path, "rb", buffering=0, opener=open_descriptor) as file:
            file.seek(offset)
            while size := file.readinto(view[have:]):  # 2 GiB at once at the most
                have += size
        return have

    def read_pieces(self, path: Place) -> Iterator[memoryview]:
        """Yield the bytes of a file piece by piece. A piece is valid until the next one."""
        with builtins.open(path, "rb", buffering=0, opener=open_descriptor) as file:
            buffer = memoryview(bytearray(min(BUFFER_BYTES, os.fstat(file.fileno()).st_size + 1)))
            while size := file.readinto(buffer):
                yield buffer[:size]

    def data_ranges(self, path: Place) -> list[tuple[int, int]]:
        """Return the ranges (start, end) of a sparse file that hold data, or the whole file if unknown."""
        found: list[tuple[int, int]] = []
        file = open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
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
        """Write a whole file in place, so that others may see it half written.

        Args:
            path: of the file.
            payload: all that it holds afterwards.
            new: the file must not exist yet.
        """
        file = open_descriptor(
            path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else os.O_TRUNC), self._mode
        )
        try:
            write_whole(file, payload, 0)
        finally:
            os.close(file)

    def ensure(self, path: Place) -> None:
        """Create an empty file, unless the file exists."""
        with suppress(FileExistsError):
            os.close(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode))

    def write_at(self, path: Place, payload: bytes | memoryview, offset: int) -> None:
        """Write a part of an existing file."""
        file = open_descriptor(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_whole(file, payload, offset)
        finally:
            os.close(file)

    def resize(self, path: Place, size: int) -> None:
        """Set the size of a file, which is created if missing. Added bytes are a hole."""
        file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
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
        """Wait until the content of a file, or the names in a folder, are on the disk."""
        file = open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
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

    def remove(self, path: Place) -> None:
        """Remove a file, a link or a folder with its content. Do nothing if the path does not exist."""
        if os.path.islink(path) or not os.path.isdir(path):
            self.unlink(path)
        else:
            _empty_folder(path)
            os.rmdir(path)

    def clear(self, folder: Place) -> None:
        """Make a folder if it is missing, and remove its content."""
        self.make(folder)
        _empty_folder(folder)

    def copy_untrusted(self, source: Place, target: Place, most_bytes: int) -> str:
        """Copy a file that another process may write meanwhile to a new file, and return the sha256 of the copy.

        Raises:
            OSError: If the source is a link, a pipe or another special file, or has more than `most_bytes`.
        """
        file = _open_nonblocking(os.fspath(source), os.O_RDONLY | os.O_NOFOLLOW)
        with builtins.open(file, "rb", buffering=0) as given, self._create_file(target) as copy:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file", str(source))
            if os.fstat(file).st_size > most_bytes:
                raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(source))
            sha256, left, buffer = hashlib.sha256(), most_bytes, memoryview(bytearray(BUFFER_BYTES))
            while left and (size := given.readinto(buffer[: min(left, BUFFER_BYTES)])):
                sha256.update(buffer[:size])
                copy.write(buffer[:size])
                left -= size
        return sha256.hexdigest()

    # -- made of these --

    def usage(self, path: Place) -> tuple[int, int]:
        """Return the time of the latest change in ns and the size in bytes of a file, or of a folder with its content.

        Links are not followed. Each entry counts as `ENTRY_BYTES` beside its content.
        """
        latest_ns, size, folders = 0, 0, [(os.fspath(path), self.stat(path))]
        while folders:
            place, found = folders.pop()
            size += ENTRY_BYTES
            if found is None or self.target(place) is not None:
                continue
            latest_ns = max(latest_ns, found.mtime_ns)
            if found.is_dir:
                folders += [(f"{place}/{each.name}", each) for each in self.entries(place)]
            else:
                size += found.size
        return latest_ns, size

    def digest(self, path: Place) -> str:
        """Hash (sha256) of a file, read piece by piece."""
        sha256 = hashlib.sha256()
        for piece in self.read_pieces(path):
            sha256.update(piece)
        return sha256.hexdigest()

    def copy(self, source: Place, target: Place) -> str:
        """Copy a file to where there is none, and return the sha256 of the copy."""
        sha256, offset = hashlib.sha256(), 0
        self.write(target, b"", new=True)
        for piece in self.read_pieces(source):
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

    def is_locked(self, path: Place) -> bool:
        """Return whether any process, this one included, has locked a file. Change nothing."""
        try:
            file = open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
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
        """Lock a file, which is created if missing, or return None if another process holds the lock.

        `is_locked` of another process holds it for a moment, so that a few `tries` may be needed.
        """
        file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        for left in reversed(range(tries)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Lock(file)
            except BlockingIOError:
                if left:
                    time.sleep(LOCK_S)
        os.close(file)
        return None

    def connect(self, path: Place, *, any_thread: bool = False) -> sqlite3.Connection:
        """Open an SQLite database, created if missing, in which each statement is a transaction by default.

        Args:
            path: of the database.
            any_thread: whether threads may use it, one at a time.

        Raises:
            sqlite3.Error: it cannot be opened.
        """
        import sqlite3  # of no use to an agent

        self.ensure(path)  # SQLite gives its other files the same mode
        return sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=not any_thread)

    def _create_file(self, path: Place) -> BinaryIO:
        """Create a file, which must not exist, and open it for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return builtins.open(open_descriptor(path, flags, self._mode), "wb")

    @property
    def _mode(self) -> int:
        return 0o666 & ~self.withheld


class Private(Disk):
    """A `Disk` whose new files and folders are for this user alone, whatever the umask."""

    withheld = 0o077


REAL: Final = Disk()  # the machine's own
PRIVATE: Final = Private()


def _found_from_stat(name: str, status: os.stat_result) -> Found:
    is_dir = (status.st_mode & 0o170000) == 0o040000
    return Found(name, is_dir, status.st_size, status.st_mtime_ns, status.st_ino)


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: reading a pipe fails instead of waiting for a writer."""
    return open_descriptor(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _empty_folder(folder: Place) -> None:
    """Remove the content of a folder, which a task may have filled to do harm.

    Links are removed, not followed. Folders are moved up before they are emptied: `shutil.rmtree` recurses, and fails
    with a RecursionError where folders are nested a thousand deep.
    """
    top = _open_folder(folder)
    try:
        names = os.listdir(top)
        while names:
            name = names.pop()
            if _try_unlink(name, top):
                continue
            inner = _open_folder(name, top)
            try:
                for nested in os.listdir(inner):
                    if not _try_unlink(nested, inner):
                        os.close(_open_folder(nested, inner))  # a folder that is shut cannot be moved
                        names.append(os.urandom(16).hex())
                        os.rename(nested, names[-1], src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _try_unlink(name: str, folder: int) -> bool:
    """Unlink a name in an open folder. Return False if the name is a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _open_folder(path: Place, above: int | None = None) -> int:
    """Open a folder, and give its owner the right to read and change it if that was taken away."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, dir_fd=above, follow_symlinks=False):
        place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            with suppress(PermissionError):
                os.chmod(f"/proc/self/fd/{place}", 0o700)
        finally:
            os.close(place)
    return os.open(path, flags, dir_fd=above)


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
            hint = "check the folder, its owner and the disk"
            if error.errno in DESCRIPTORS:
                hint = "raise the limit on open files (LimitNOFILE, ulimit -n)"
            raise StoreError(f"cannot {self._what}: {error.strerror}; {hint}") from None
