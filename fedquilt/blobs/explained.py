"""Errors of a depot's folder, in sentences with the mend."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fedquilt.core import StoreError

_MENDS: Final = {
    errno.ENOSPC: "the disk is full; free some space or use another folder",
    errno.EDQUOT: "the quota is used up; free some space or use another folder",
    errno.EACCES: "this user may not write there; change its owner or use another folder",
    errno.EPERM: "this user may not write there; change its owner or use another folder",
    errno.EROFS: "it is mounted read-only; use another folder",
}


@contextmanager
def explained(what: str, folder: Path) -> Iterator[None]:
    """Turn an OSError of the body into a sentence: "cannot `what` in `folder`", the reason and the mend.

    Raises:
        StoreError: in its place.
    """
    try:
        yield
    except OSError as error:
        mend = _MENDS.get(error.errno or 0, "check the folder and the disk")
        raise StoreError(f"cannot {what} in {folder}: {error.strerror}; {mend}") from None
