"""Free space and locks of the folders of agents and coordinators."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fedquilt.host.disk import REAL

Free = Callable[[Path], int]  # folder -> bytes free on its disk


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def nearest_existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))


def is_locked(home: Path) -> bool:
    """Return whether a running process holds the folder's lock. An unreadable lock counts as free."""
    try:
        return REAL.is_locked(home / "lock")
    except OSError:
        return False
