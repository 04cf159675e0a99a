"""Arrays on the disk that are read when they are used: of an update, a state or a running sum that is large.

Whoever reads an array long after it was verified notes a checksum of it first: the sum of its 64-bit words, by which
any single bit that has changed is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from fedquilt.core import StoreError
from fedquilt.disk import REAL, Disk, doing
from fedquilt.open_file import OpenFile
from fedquilt.open_file import Place as Path
from fedquilt.tensors import Shaped

LEAST: Final = 1 << 16  # entries


class Source(Protocol):
    """What holds arrays as bytes."""

    def size(self) -> int:
        """Bytes that it holds."""
        ...

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fill a buffer from `offset`, as far as there are bytes; returns their number."""
        ...


@dataclass(frozen=True)
class Named:
    """A file under its name, which is opened for each reading.

    Args:
        path: of the file.
        disk: where it is.
    """

    path: Path
    disk: Disk = REAL

    def __str__(self) -> str:
        """The path."""
        return str(self.path)

    def size(self) -> int:
        """See `Source`."""
        found = self.disk.stat(self.path)
        if found is None:
            raise StoreError(f"cannot read {self.path}: it is gone")
        return found.size

    def read_into(self, buffer: Any, offset: int) -> int:
        """See `Source`."""
        return self.disk.read_into(self.path, buffer, offset)


@dataclass(frozen=True, slots=True)
class OnDisk(Shaped):
    """One array: shape and type are known, and its numbers are read when they are asked for.

    Args:
        source: holds it.
        offset: of its first byte.
        check: checksum that it must have; None: it is not checked.
    """

    source: Source
    offset: int
    check: int | None = None

    def found(self) -> np.ndarray | int:
        """The array; or how many of its bytes there are, if these are not all.

        Raises:
            OSError: it cannot be read.
        """
        size = min(self.source.size() - self.offset, self.nbytes)
        if size == self.nbytes:  # nothing is allocated for what is not there
            array = np.empty(self.shape, self.dtype)
            size = self.source.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array if size == self.nbytes else max(size, 0)

    def read(self) -> np.ndarray:
        """The array.

        Raises:
            StoreError: it cannot be read, or is not what it was.
        """
        with doing(f"read {self.source}"):
            found = self.found()
        if isinstance(found, int) or self.check not in (None, checksum(found)):
            raise StoreError(f"{self.source} was changed or cut off on the disk: check the disk, and resume the job")
        return found

    def noted(self) -> OnDisk:
        """The same with the checksum of what it holds now."""
        return replace(self, check=checksum(self.read()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array, for numpy."""
        return self.read() if dtype is None else self.read().astype(dtype)


class Lazy(Mapping[str, np.ndarray]):
    """Tensors by name, each of which is read when it is asked for.

    Args:
        shapes: the tensors, by name.
    """

    def __init__(self, shapes: Mapping[str, OnDisk]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shapes[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Scratch:
    """A file of arrays that change. It has no name, and is gone with this object or the process.

    Args:
        folder: on whose file system it lies.
        disk: where that is.
        least: entries from which on an array is written; smaller ones stay in memory.

    Raises, from every method:
        StoreError: the disk is full, or fails.
    """

    def __init__(self, folder: Path, disk: Disk = REAL, least: int = LEAST) -> None:
        self._folder, self._least = folder, least
        with doing(f"make a file in {folder}"):
            self._file: OpenFile = disk.scratch(folder)
        self._end = 0

    def __str__(self) -> str:
        """The running sum's place."""
        return f"the running sum in {self._folder}"

    def size(self) -> int:
        """See `Source`."""
        return self._file.size()

    def read_into(self, buffer: Any, offset: int) -> int:
        """See `Source`."""
        return self._file.read_into(buffer, offset)

    def put(self, array: np.ndarray, before: object = None) -> np.ndarray | OnDisk:
        """Write an array; returns what it is to be read from.

        Args:
            array: of any shape.
            before: what it takes the place of; used if that is of this file and has as many bytes.
        """
        array = np.asarray(array, order="C")
        if array.size < self._least:
            return array
        own = isinstance(before, OnDisk) and before.source is self and before.nbytes == array.nbytes
        offset = before.offset if own else self._end  # type: ignore[attr-defined]
        with doing(f"write {self}"):
            self._file.write(array.reshape(-1).view(np.uint8).data, offset)
        self._end = max(self._end, offset + array.nbytes)
        return OnDisk(array.shape, array.dtype, self, offset, checksum(array))


def checksum(array: np.ndarray) -> int:
    """Sum of an array's 64-bit words, and of the bytes behind the last of them."""
    given = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    whole = given.size // 8 * 8
    words = np.add.reduce(given[:whole].view(np.uint64), dtype=np.uint64)
    return (int(words) + int.from_bytes(given[whole:].tobytes(), "little")) % 2**64
