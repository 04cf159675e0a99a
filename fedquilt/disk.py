"""What goes wrong with a disk, as one error that says what, why and the mend."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from fedquilt.core import StoreError


@contextmanager
def doing(what: str, when_full: str = "free some space or use another home") -> Iterator[None]:
    """Raises StoreError where the system raises OSError: "cannot `what`: ...; the mend"."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = when_full if full else "check the folder, its owner and the disk"
        raise StoreError(f"cannot {what}: {error.strerror}; {mend}") from None
