"""Folders that an agent or a coordinator keeps: what is free there, and whether one is at work in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fedquilt.disk import REAL

Free = Callable[[Path], int]  # folder -> bytes free on its disk


def free_bytes(folder: Path) -> int:
    """Bytes free on the folder's file system."""
    return shutil.disk_usage(folder).free


def existing(folder: Path) -> Path:
    """The folder, or the one in which it would be made."""
    return next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))


def runs(home: Path) -> bool:
    """Whether an agent, or a coordinator, holds the folder now. What cannot be opened counts as not held."""
    try:
        return REAL.is_locked(home / "lock")
    except OSError:
        return False
