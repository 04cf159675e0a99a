"""Folders for work in hand, which go when they are left; what a killed process left behind goes with the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "fedquilt-scratch-"


class Scratch:
    """An empty folder in the system's place for temporary files, removed when it is left or cleaned up.

    Its process holds a lock on the folder, which ends with the process however that ends. Making a folder first
    removes those of this user that nobody holds any more.
    """

    def __init__(self) -> None:
        remove_left_behind()
        self.path, self._lock = _made()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the folder; nothing happens if that is done already."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _made() -> tuple[Path, int | None]:
    """A new folder and the descriptor that holds its lock; None: the file system has no locks, so nobody removes it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process took it for one that was left behind
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            os.close(lock)
            return path, None
        if path.exists():
            return path, lock
        os.close(lock)  # taken for one that was left behind all the same, before it was locked


def remove_left_behind() -> None:
    """Remove folders of this user whose process is gone."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_unless_held(entry)


def _remove_unless_held(entry: os.DirEntry[str]) -> None:
    """Raises OSError where the folder is in use, or not ours."""
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)
