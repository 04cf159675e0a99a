"""Errors of a disk, as one kind that says what, why and the mend."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedquilt.core import StoreError


def write(file: Path, text: str) -> None:
    """Write a command's output as UTF-8 text; missing folders on the way are created.

    Raises:
        StoreError: it cannot be written.
    """
    ready(file)
    with doing(f"write {file}", "name another file"):
        file.write_text(text, encoding="utf-8")


def ready(file: Path) -> None:
    """Create the missing folders on the way to a command's output.

    Raises:
        StoreError: they cannot be created.
    """
    with doing(f"write {file}", "name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def doing(what: str, when_full: str = "free some space or use another home") -> Iterator[None]:
    """Turn an OSError into a StoreError: "cannot `what`: ...; the mend"."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = when_full if full else "check the folder, its owner and the disk"
        raise StoreError(f"cannot {what}: {error.strerror}; {mend}") from None
