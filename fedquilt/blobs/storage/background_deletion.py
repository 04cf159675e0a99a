"""Deletion of large files without waiting for the file system to free their blocks.

Freeing the blocks of 96 MB takes 28 to 49 ms on ext4 with `discard`, so a round with many updates would stop for a
second or more. An open file loses its name at once and frees its blocks when a background thread closes the file. If
the process ends first, the system closes the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from fedquilt.host.disk import Disk

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

LARGE_BYTES: Final = 4 << 20  # from here on a file is freed in the thread
OPEN_MOST: Final = 64  # queued files, above which files are freed in the caller's thread


class BackgroundDeleter:
    """Deleter of files in one folder. A thread frees the blocks of large files.

    Raises, from every method:
        OSError: If a file cannot be removed.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._thread: ThreadPoolExecutor | None = None  # made with the first large file
        self._open: list[Future[None]] = []

    def unlink(self, path: str) -> None:
        file = self._open_if_large(path)
        try:
            self._disk.unlink(path)
        finally:
            if file is not None:
                self._close_in_background(file)

    def _open_if_large(self, path: str) -> int | None:
        self._open = [each for each in self._open if not each.done()]
        with suppress(OSError):  # it is gone, or too many files are open
            found = self._disk.stat(path)
            if found is not None and found.size >= LARGE_BYTES and len(self._open) < OPEN_MOST:
                return self._disk.open_for_reading(path)
        return None

    def _close_in_background(self, file: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # of no use where nothing is large

        self._thread = self._thread or ThreadPoolExecutor(1, "freeing")
        self._open.append(self._thread.submit(os.close, file))
