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


class Common:
    """A folder by name, for several processes: it is removed when the last of them leaves it, or is gone.

    Args:
        name: nobody else's, and not to be guessed by other users of the machine.
    """

    def __init__(self, name: str) -> None:
        remove_left_behind()
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._lock)  # the last one left it before it was locked

    def leave(self) -> None:
        """Leave the folder."""
        os.close(self._lock)
        with contextlib.suppress(OSError):
            _remove_unless_held(self.path)


def remove_left_behind() -> None:
    """Remove folders of this user whose process is gone."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_unless_held(Path(entry))


def _remove_unless_held(folder: Path) -> None:
    """Raises OSError where the folder is in use, or not ours."""
    if folder.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
