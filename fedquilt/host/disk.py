"""File and database access of coordinator and agent, replaceable by a simulated disk.

`Disk` is the machine's own. Its methods are thin, so that a simulation can lose, truncate or refuse writes
(`tests/faults`), and raise OSError. The content of a file is durable only after `sync` of the file, and its name only
after `sync` of its folder.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from fedquilt.core import DiskFullError, StoreError

if TYPE_CHECKING:
    import sqlite3

    from _typeshed import WriteableBuffer


StrPath: TypeAlias = str | Path
T = TypeVar("T")
log = logging.getLogger("fedquilt.disk")
DESCRIPTOR_ERRORS: Final = (errno.EMFILE, errno.ENFILE)
DESCRIPTOR_RETRY_S: Final = 0.1  # pause between two attempts to open a file


def retry_until_descriptor_free(open: Callable[[], T]) -> T:
    """Return the result of `open`. While no file descriptor is free, wait and call `open` again."""
    has_waited = False
    while True:
        try:
            opened = open()
        except OSError as error:
            if error.errno not in DESCRIPTOR_ERRORS:
                raise
            if not has_waited:
                log.error("%s, waiting: raise the limit on open files (LimitNOFILE, ulimit -n)", error.strerror)
            has_waited = True
            time.sleep(DESCRIPTOR_RETRY_S)
        else:
            if has_waited:
                log.warning("a file descriptor is free again")
            return opened


def open_descriptor(path: StrPath, flags: int, mode: int = 0o777) -> int:
    return retry_until_descriptor_free(lambda: os.open(path, flags, mode))


class OpenedDescriptor:
    """Context manager of an open file descriptor, faster than a generator function for small files."""

    def __init__(self, path: StrPath, flags: int, mode: int = 0o777) -> None:
        self._file = open_descriptor(path, flags | os.O_CLOEXEC, mode)

    def __enter__(self) -> int:
        return self._file

    def __exit__(self, *error: object) -> None:
        os.close(self._file)


class OpenFile:
    def __init__(self, path: StrPath, mode: int) -> None:
        self._file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)

    def read_into(self, buffer: WriteableBuffer, offset: int) -> int:
        return read_fully(self._file, buffer, offset)

    def write(self, payload: bytes | memoryview, offset: int) -> None:
        write_fully(self._file, payload, offset)

    def truncate(self) -> None:
        os.ftruncate(self._file, 0)

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


def read_fully(file: int, buffer: WriteableBuffer, offset: int) -> int:
    """Fill a buffer from a file. Return the number of bytes read, which is smaller only at the file's end."""
    view, size = memoryview(buffer), 0
    # The kernel reads at most 2 GiB at once.
    while size < view.nbytes and (received := os.preadv(file, [view[size:]], offset + size)):
        size += received
    return size


def write_fully(file: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


PERMISSION_FIX: Final = "change the owner or the permissions, or use another folder"
FIXES_BY_ERRNO: Final = {
    errno.EISDIR: "name a file in place of a folder",
    errno.ENOTDIR: "name a folder in place of a file",
    errno.EEXIST: "name a folder in place of a file",
    errno.EACCES: PERMISSION_FIX,
    errno.EPERM: PERMISSION_FIX,
    errno.EROFS: "use a folder that is not mounted read-only",
}
FULL_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
ENTRY_BYTES: Final = 4096  # approximate size of a directory entry and its inode
BUFFER_BYTES: Final = 256 * 1024
LOCK_RETRY_S: Final = 0.05  # pause between two attempts to lock a file


class PathInfo(NamedTuple):
    name: str
    is_dir: bool
    size: int  # bytes
    mtime_ns: int
    inode: int  # differs after the file was replaced


class Lock:
    def __init__(self, file: int) -> None:
        self._file = file

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Disk:
    """File access of this process. Methods that open a file wait until a file descriptor is free."""

    withheld = 0  # mode bits withheld from new files and folders, in addition to the umask

    def wall_clock_s(self) -> float:
        return time.time()

    def stat(self, path: StrPath) -> PathInfo | None:
        """Return information on a path, following links, or None if nothing exists there."""
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _info_from_stat(os.path.basename(path), info)

    def is_file(self, path: StrPath) -> bool:
        return os.path.isfile(path)

    def is_dir(self, path: StrPath) -> bool:
        return os.path.isdir(path)

    def entries(self, folder: StrPath) -> list[PathInfo]:
        infos = []
        with retry_until_descriptor_free(lambda: os.scandir(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed the entry
                    infos.append(_info_from_stat(entry.name, entry.stat()))
        return infos

    def free_bytes(self, folder: StrPath) -> int:
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    def read(self, path: StrPath, offset: int = 0, size: int | None = None) -> bytes:
        with builtins.open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
            if size is not None:
                return os.pread(file.fileno(), size, offset)
            file.seek(offset)
            return file.read()

    def open_for_reading(self, path: StrPath) -> int:
        return open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, path: StrPath, buffer: WriteableBuffer, offset: int) -> int:
        with OpenedDescriptor(path, os.O_RDONLY) as file:
            return read_fully(file, buffer, offset)

    def read_pieces(self, path: StrPath) -> Iterator[memoryview]:
        """Yield the bytes of a file in pieces, each in the same buffer."""
        with builtins.open(path, "rb", buffering=0, opener=open_descriptor) as file:
            buffer = memoryview(bytearray(min(BUFFER_BYTES, os.fstat(file.fileno()).st_size + 1)))
            while size := file.readinto(buffer):
                yield buffer[:size]

    def data_ranges(self, path: StrPath) -> list[tuple[int, int]]:
        """Return the ranges (start, end) of a sparse file that hold data, or the whole file if unknown."""
        ranges: list[tuple[int, int]] = []
        with OpenedDescriptor(path, os.O_RDONLY) as file:
            position, size = 0, os.fstat(file).st_size
            while position < size:
                try:
                    start = os.lseek(file, position, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # only a hole is left
                        break
                    raise
                position = os.lseek(file, start, os.SEEK_HOLE)
                ranges.append((start, position))
        return ranges

    def write(self, path: StrPath, payload: bytes, *, new: bool = False) -> None:
        """Overwrite or create a file in place. A crash may leave it incomplete. `new` forbids overwriting."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
        with OpenedDescriptor(path, flags, self._file_mode) as file:
            write_fully(file, payload, 0)

    def create_if_missing(self, path: StrPath) -> None:
        with suppress(FileExistsError):
            os.close(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._file_mode))

    def write_at(self, path: StrPath, payload: bytes | memoryview, offset: int) -> None:
        with OpenedDescriptor(path, os.O_WRONLY) as file:
            write_fully(file, payload, offset)

    def resize(self, path: StrPath, size: int) -> None:
        """Set the size of a file, or create it with this size. Added bytes take no space on the disk."""
        with OpenedDescriptor(path, os.O_RDWR | os.O_CREAT, self._file_mode) as file:
            if os.fstat(file).st_size != size:
                os.ftruncate(file, size)

    def open(self, path: StrPath) -> OpenFile:
        return OpenFile(path, self._file_mode)

    def open_scratch(self, folder: StrPath) -> OpenFile:
        file = self.open(path := os.path.join(folder, f"{os.urandom(16).hex()}.tmp"))
        self.unlink(path)
        return file

    def sync(self, path: StrPath) -> None:
        """Wait until the content of a file, or the names in a folder, are on the disk."""
        with OpenedDescriptor(path, os.O_RDONLY) as file:
            os.fsync(file)

    def replace(self, source: StrPath, target: StrPath) -> None:
        """Rename a file over `target`, or a folder to a free path."""
        os.replace(source, target)

    def hard_link(self, source: StrPath, target: StrPath) -> None:
        """Create a second name for a file, or for the target of a symbolic link."""
        os.link(os.path.realpath(source) if os.path.islink(source) else source, target)

    def symlink(self, target: str, path: StrPath) -> None:
        os.symlink(target, path)

    def read_link(self, path: StrPath) -> str | None:
        return os.readlink(path) if os.path.islink(path) else None

    def unlink(self, path: StrPath) -> None:
        """Remove a file, and do nothing if the file does not exist."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def touch(self, path: StrPath) -> None:
        with suppress(FileNotFoundError):
            os.utime(path)

    def set_mode(self, path: StrPath, mode: int) -> None:
        os.chmod(path, mode)

    def make_folder(self, folder: StrPath) -> None:
        """Create a folder with missing parents. `withheld` applies to the folder, not to the parents."""
        os.makedirs(folder, 0o777 & ~self.withheld, exist_ok=True)

    def make_durable_folder(self, folder: StrPath) -> None:
        """Create a folder with missing parents, and wait until their names are on the disk."""
        current, unsynced_folders = os.fspath(folder), [os.fspath(folder)]
        while (parent := os.path.dirname(current)) not in ("", current) and not self.is_dir(parent):
            unsynced_folders.append(parent)
            current = parent
        self.make_folder(folder)
        for unsynced_folder in unsynced_folders:
            with suppress(PermissionError):  # a writable folder of another user that may not be listed
                self.sync(os.path.dirname(unsynced_folder) or ".")

    def remove(self, path: StrPath) -> None:
        """Remove a file, a link or a folder with its content. Do nothing if the path does not exist."""
        if os.path.islink(path) or not os.path.isdir(path):
            self.unlink(path)
        else:
            _empty_folder(path)
            os.rmdir(path)

    def clear_folder(self, folder: StrPath) -> None:
        self.make_folder(folder)
        _empty_folder(folder)

    def copy_untrusted(self, source: StrPath, target: StrPath, max_bytes: int) -> str:
        """Copy a regular file, which another process may change, to a new file. Return the sha256 of the copy."""
        file = _open_nonblocking(os.fspath(source), os.O_RDONLY | os.O_NOFOLLOW)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with (
            builtins.open(file, "rb", buffering=0) as source_file,
            OpenedDescriptor(target, flags, self._file_mode) as copy_fd,
            builtins.open(copy_fd, "wb", closefd=False) as copy,
        ):
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(source))
            if os.fstat(file).st_size > max_bytes:
                raise OSError(errno.EFBIG, f"file has more than {max_bytes} bytes", str(source))
            sha256, remaining, buffer = hashlib.sha256(), max_bytes, memoryview(bytearray(BUFFER_BYTES))
            while remaining and (size := source_file.readinto(buffer[: min(remaining, BUFFER_BYTES)])):
                sha256.update(buffer[:size])
                copy.write(buffer[:size])
                remaining -= size
        return sha256.hexdigest()

    def measure_usage(self, path: StrPath) -> tuple[int, int]:
        """Return the latest modification time in ns and the size in bytes of a file or folder tree."""
        latest_ns, size, folders = 0, 0, [(os.fspath(path), self.stat(path))]
        while folders:
            folder, info = folders.pop()
            size += ENTRY_BYTES
            if info is None or self.read_link(folder) is not None:
                continue
            latest_ns = max(latest_ns, info.mtime_ns)
            if info.is_dir:
                folders += [(f"{folder}/{entry.name}", entry) for entry in self.entries(folder)]
            else:
                size += info.size
        return latest_ns, size

    def hash_file(self, path: StrPath) -> str:
        sha256 = hashlib.sha256()
        for data in self.read_pieces(path):
            sha256.update(data)
        return sha256.hexdigest()

    def copy(self, source: StrPath, target: StrPath) -> str:
        """Copy a file to a path that must not exist, and return the sha256 of the copy."""
        sha256, offset = hashlib.sha256(), 0
        self.write(target, b"", new=True)
        for data in self.read_pieces(source):
            sha256.update(data)
            self.write_at(target, bytes(data), offset)
            offset += len(data)
        return sha256.hexdigest()

    def repoint_link(self, path: StrPath, target: str) -> None:
        part = f"{path}.part"
        self.unlink(part)
        self.symlink(target, part)
        self.replace(part, path)
        self.sync(os.path.dirname(path) or ".")

    def write_atomically(self, path: StrPath, payload: bytes, *, durable: bool = True) -> None:
        """Write a small file so that readers find the old or the new content, and sync it if `durable`."""
        part = f"{path}.part"
        self.write(part, payload)
        if durable:
            self.sync(part)
        self.replace(part, path)
        if durable:
            self.sync(os.path.dirname(path) or ".")

    def is_locked(self, path: StrPath) -> bool:
        try:
            with OpenedDescriptor(path, os.O_RDONLY) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that several processes can check
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def lock(self, path: StrPath, *, tries: int = 1) -> Lock | None:
        """Lock a file, or return None after `tries` if another process holds or tests the lock."""
        file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._file_mode)
        for remaining_tries in reversed(range(tries)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Lock(file)
            except BlockingIOError:
                if remaining_tries:
                    time.sleep(LOCK_RETRY_S)
        os.close(file)
        return None

    def connect(self, path: StrPath, *, any_thread: bool = False) -> sqlite3.Connection:
        """Open an SQLite database in autocommit mode, and create it if missing."""
        import sqlite3  # agents do not need the module

        self.create_if_missing(path)  # SQLite gives its other files the same mode
        return sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=not any_thread)

    @property
    def _file_mode(self) -> int:
        return 0o666 & ~self.withheld


class PrivateDisk(Disk):
    withheld = 0o077


REAL: Final = Disk()
PRIVATE: Final = PrivateDisk()


def _info_from_stat(name: str, status: os.stat_result) -> PathInfo:
    is_dir = (status.st_mode & 0o170000) == 0o040000
    return PathInfo(name, is_dir, status.st_size, status.st_mtime_ns, status.st_ino)


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: reading a pipe fails instead of waiting for a writer."""
    return open_descriptor(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _empty_folder(folder: StrPath) -> None:
    """Remove the content of a folder, which a hostile task may have created.

    Links are removed, not followed. Nested folders are moved up and then emptied, because the recursion of
    `shutil.rmtree` fails with a RecursionError for folders nested a thousand deep.
    """
    top = _open_folder_with_rights(folder)
    try:
        names = os.listdir(top)
        while names:
            name = names.pop()
            if _unlink_unless_folder(name, top):
                continue
            inner = _open_folder_with_rights(name, top)
            try:
                for nested in os.listdir(inner):
                    if not _unlink_unless_folder(nested, inner):
                        os.close(_open_folder_with_rights(nested, inner))  # a folder without rights cannot be moved
                        names.append(os.urandom(16).hex())
                        os.rename(nested, names[-1], src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _unlink_unless_folder(name: str, folder: int) -> bool:
    """Remove a file or link in an open folder. Return False without a change if it is a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _open_folder_with_rights(path: StrPath, parent_fd: int | None = None) -> int:
    """Open a folder that is not a link, and give this user all permissions first if necessary."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, dir_fd=parent_fd, follow_symlinks=False):
        folder_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            with suppress(PermissionError):
                os.chmod(f"/proc/self/fd/{folder_fd}", 0o700)
        finally:
            os.close(folder_fd)
    return os.open(path, flags, dir_fd=parent_fd)


def write_output(file: Path, text: str) -> None:
    """Write a text file and create its folder, or raise StoreError and leave the previous file unchanged."""
    make_output_folder(file)
    target = file.resolve()
    with disk_errors(f"write {file}", "free some space or name another file"):
        if target.exists() and not target.is_file():  # such as /dev/stdout
            target.write_text(text, encoding="utf-8")
            return
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def make_output_folder(file: Path) -> None:
    with disk_errors(f"write {file}", "free some space or name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)


class disk_errors(AbstractContextManager[None]):
    """Context manager that converts an OSError to a StoreError, or to DiskFullError on a full disk."""

    def __init__(self, action: str, full_disk_fix: str = "free some space or use another home") -> None:
        self._action, self._full_disk_fix = action, full_disk_fix

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            if error.errno in FULL_DISK_ERRORS:
                raise DiskFullError(f"cannot {self._action}: {error.strerror}; {self._full_disk_fix}") from None
            raise StoreError(f"cannot {self._action}: {error.strerror}; {describe_fix(error)}") from None


def describe_fix(error: OSError) -> str:
    if error.errno in DESCRIPTOR_ERRORS:
        return "raise the limit on open files (LimitNOFILE, ulimit -n)"
    return FIXES_BY_ERRNO.get(error.errno or 0, "check the folder, its owner and the disk")
