"""Whole files of bytes, read and written completely, with their sha256."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BUFFER_BYTES: Final = 256 * 1024


def write(file: int, payload: bytes, offset: int) -> None:
    """Write all of `payload` into an open file, from `offset`."""
    view = memoryview(payload)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def digest(path: str, *, sync: bool = False) -> str:
    """Hash (sha256) of a file, read piece by piece; with `sync` its bytes are on disk first."""
    sha256 = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        buffer = memoryview(bytearray(min(BUFFER_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(buffer):
            sha256.update(buffer[:size])
    return sha256.hexdigest()


def copy(source: Path, target: str, *, sync: bool) -> str:
    """Copy a file and return the sha256 of the copy."""
    sha256, offset = hashlib.sha256(), 0
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        while payload := reader.read(BUFFER_BYTES):
            sha256.update(payload)
            write(writer.fileno(), payload, offset)
            offset += len(payload)
        if sync:
            os.fsync(writer.fileno())
    return sha256.hexdigest()


def data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of a sparse file that hold data: (start, end), in order; the whole file if the system cannot list them."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        at = os.lseek(file, start, os.SEEK_HOLE)
        yield start, at
