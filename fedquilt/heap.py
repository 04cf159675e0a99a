"""The C library's heap, and what a process holds: freed pieces of blobs are used again."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MAPPED_BYTES: Final = 4 << 20  # larger pieces are the kernel's as soon as they are freed
KEPT_BYTES: Final = 8 << 20  # the most at the heap's end that is kept beyond what is in use
_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_MMAP_THRESHOLD: Final = -3


def keep_pieces() -> None:
    """Let glibc keep freed pieces of up to MAPPED_BYTES; nothing happens with another C library.

    By default it asks the kernel for each chunk of a blob anew, which clears 64 pages for it: more than half of the
    processor time of a transfer over MQTT.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def resident_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Resident size of a process, shared and mapped pages included; None: it is gone."""
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def release() -> None:
    """Return freed memory to the kernel that glibc keeps between pieces in use; nothing happens with another C library.

    For a process that has just dropped something large, and is about to need as much for something else.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
