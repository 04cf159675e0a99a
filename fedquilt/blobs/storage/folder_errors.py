"""Errors of a blob store's folder, with a fix in each message."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from fedquilt.core import DiskFullError, StoreError
from fedquilt.host.disk import FULL

_MENDS: Final = {
    errno.ENOSPC: "the disk is full; free some space or use another folder",
    errno.EDQUOT: "the quota is used up; free some space or use another folder",
    errno.EFBIG: "files may not be so large there; raise the limit or use another folder",
    errno.EACCES: "this user may not write there; change its owner or use another folder",
    errno.EPERM: "this user may not write there; change its owner or use another folder",
    errno.EROFS: "it is mounted read-only; use another folder",
}


class folder_errors:
    """Context manager that raises an OSError of its body as a StoreError with a fix.

    The message begins with "cannot `what` in `folder`".

    Raises:
        StoreError: If the body raises an OSError.
    """

    __slots__ = ("_folder", "_what")

    def __init__(self, what: str, folder: Path) -> None:
        self._what, self._folder = what, folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            mend = _MENDS.get(error.errno or 0, "check the folder and the disk")
            kind = DiskFullError if error.errno in FULL else StoreError
            raise kind(f"cannot {self._what} in {self._folder}: {error.strerror}; {mend}") from None
