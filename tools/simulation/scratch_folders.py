"""Temporary folders, removed after use or, after a kill, by the next process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "fedquilt-scratch-"


class ScratchFolder:
    """Empty temporary folder, removed on exit or by `cleanup`.

    The process holds a lock on the folder, which ends with the process. Creating a folder also removes unlocked
    folders of this user.
    """

    def __init__(self) -> None:
        remove_stale_folders()
        self.path, self._lock = _make_locked_folder()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_locked_folder() -> tuple[Path, int | None]:
    # without a lock (None) no other process removes the folder
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


class SharedFolder:
    """Named folder of several processes, removed when the last process leaves or ends."""

    def __init__(self, name: str) -> None:
        remove_stale_folders()
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._lock)  # the last one left it before it was locked

    def release(self) -> None:
        """Unlock the folder, and remove it unless another process uses it."""
        os.close(self._lock)
        with contextlib.suppress(OSError):
            _remove_unless_locked(self.path)


def remove_stale_folders() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_unless_locked(Path(entry))


def _remove_unless_locked(folder: Path) -> None:
    if folder.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
