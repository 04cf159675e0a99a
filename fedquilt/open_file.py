"""Files that stay open, and retries while no file descriptor is free."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Place: TypeAlias = str | Path
T = TypeVar("T")

log = logging.getLogger("fedquilt.disk")

DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
WAIT_S: Final = 0.1  # between two attempts to get a file descriptor


def retry_without_descriptor(open: Callable[[], T]) -> T:
    """Return what `open` returns, repeating the call while no file descriptor is free."""
    waited = False
    while True:
        try:
            found = open()
        except OSError as error:
            if error.errno not in DESCRIPTORS:
                raise
            if not waited:
                log.error("%s: waiting; raise the limit on open files (LimitNOFILE, ulimit -n)", error.strerror)
            waited = True
            time.sleep(WAIT_S)
        else:
            if waited:
                log.warning("a file descriptor is free again")
            return found


def open_descriptor(path: Place, flags: int, mode: int = 0o777) -> int:
    """Open a file like `os.open`, and wait until a file descriptor is free."""
    return retry_without_descriptor(lambda: os.open(path, flags, mode))


class OpenFile:
    """File that stays open, so that small reads and writes need one system call each.

    Every method may raise OSError.
    """

    def __init__(self, path: Place, mode: int) -> None:
        self._file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, or fewer at the end of the file."""
        return os.pread(self._file, size, offset)

    def read_into(self, buffer: WriteableBuffer, offset: int) -> int:
        """Fill a buffer from `offset`, and return the number of bytes read."""
        view, size = memoryview(buffer), 0
        while size < view.nbytes and (found := os.preadv(self._file, [view[size:]], offset + size)):
            size += found
        return size

    def write(self, payload: bytes | memoryview, offset: int) -> None:
        write_fully(self._file, payload, offset)

    def truncate(self) -> None:
        os.ftruncate(self._file, 0)

    def sync(self) -> None:
        """Wait until the content is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


def write_fully(file: int, payload: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of an open file, in several calls if necessary."""
    view = memoryview(payload)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
