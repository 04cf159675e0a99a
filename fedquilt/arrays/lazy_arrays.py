"""Arrays on disk that are read on use: large updates, states and partial aggregates.

The checksum of an array is the sum of its 64-bit words, which detects every single flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import StoreError
from fedquilt.host.disk import REAL, Disk, OpenFile, disk_errors
from fedquilt.host.disk import Place as Path

LEAST: Final = 1 << 16  # entries


class ByteSource(Protocol):
    def size(self) -> int: ...

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fill a buffer from `offset`, and return the number of bytes read."""
        ...


@dataclass(frozen=True)
class NamedFile:
    path: Path
    disk: Disk = REAL

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        found = self.disk.stat(self.path)
        if found is None:
            raise StoreError(f"cannot read {self.path}: it is gone")
        return found.size

    def read_into(self, buffer: Any, offset: int) -> int:
        return self.disk.read_into(self.path, buffer, offset)


@dataclass(frozen=True, slots=True)
class DiskArray(TensorSpec):
    """Array on disk with known shape and type, which is read on use.

    Args:
        source: Source of the bytes.
        offset: Offset of the first byte.
        check: Expected checksum, or None to skip the check.
    """

    source: ByteSource
    offset: int
    check: int | None = None

    def read_available(self) -> np.ndarray | int:
        """Return the array, or the number of its available bytes if the source is too short.

        Raises:
            OSError: If the source cannot be read.
        """
        size = min(self.source.size() - self.offset, self.nbytes)
        if size == self.nbytes:  # nothing is allocated for what is not there
            array = np.empty(self.shape, self.dtype)
            size = self.source.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array if size == self.nbytes else max(size, 0)

    def read(self) -> np.ndarray:
        """Read the array and compare its checksum.

        Raises:
            StoreError: If the array cannot be read, is cut short, or has changed.
        """
        with disk_errors(f"read {self.source}"):
            found = self.read_available()
        if isinstance(found, int) or self.check not in (None, checksum(found)):
            raise StoreError(f"{self.source} was changed or cut off on the disk: check the disk, and resume the job")
        return found

    def with_checksum(self) -> DiskArray:
        return replace(self, check=checksum(self.read()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)


class LazyTensors(Mapping[str, np.ndarray]):
    """Mapping of tensors that are read from disk on each access.

    Args:
        shapes: Tensors by name.
    """

    def __init__(self, shapes: Mapping[str, DiskArray]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shapes[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class ScratchFile:
    """Anonymous file for arrays that change, deleted with this object or the process.

    Every method may raise StoreError if the disk is full or fails.

    Args:
        folder: Folder on the file system to use.
        disk: Disk of the folder.
        least: Minimum number of entries of a stored array. Smaller ones remain in memory.
    """

    def __init__(self, folder: Path, disk: Disk = REAL, least: int = LEAST) -> None:
        self._folder, self._least = folder, least
        with disk_errors(f"make a file in {folder}"):
            self._file: OpenFile = disk.open_scratch(folder)
        self._end = 0

    def __str__(self) -> str:
        return f"the running sum in {self._folder}"

    def size(self) -> int:
        return self._file.size()

    def read_into(self, buffer: Any, offset: int) -> int:
        return self._file.read_into(buffer, offset)

    def store_array(self, array: np.ndarray, before: object = None) -> np.ndarray | DiskArray:
        """Store an array, and return a reference to it, or the array itself if it is small.

        Args:
            array: Array of any shape.
            before: Value replaced by the array, whose space is reused if it is stored in this file with the same size.
        """
        array = np.asarray(array, order="C")
        if array.size < self._least:
            return array
        own = isinstance(before, DiskArray) and before.source is self and before.nbytes == array.nbytes
        offset = before.offset if own else self._end  # type: ignore[attr-defined]
        with disk_errors(f"write {self}"):
            self._file.write(array.reshape(-1).view(np.uint8).data, offset)
        self._end = max(self._end, offset + array.nbytes)
        return DiskArray(array.shape, array.dtype, self, offset, checksum(array))


def checksum(array: np.ndarray) -> int:
    """Return the sum of an array's 64-bit words and its remaining bytes, modulo 2^64."""
    given = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    whole = given.size // 8 * 8
    words = np.add.reduce(given[:whole].view(np.uint64), dtype=np.uint64)
    return (int(words) + int.from_bytes(given[whole:].tobytes(), "little")) % 2**64
