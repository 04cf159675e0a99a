"""Activations of many examples, in memory or in a file, for maps larger than a device's memory.

All classes read a few examples at a time, or a few features of all examples, from which a Gram matrix is summed. Files
are read and written but never mapped: the kernel's page cache does not count as memory of the process and is reclaimed
under pressure, and most files are deleted before they reach the disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fedquilt.core import StoreError
from fedquilt.host.disk import disk_errors

log = logging.getLogger("fedquilt.agent")

PART_PREFIX = "part-"  # prefix of temporary files
DISK_FIX = "free disk space, or raise the memory budget so that activations stay in memory"
CHECKSUM_BYTES = 4  # of the checksum behind the examples of a saved file
READ_BYTES = 1 << 20
SPARE_SUFFIX = ".spare"  # suffix of files that may be deleted to make room for newer ones


class ActivationSource:
    """Activations of examples in a fixed order, read a few examples at a time."""

    shape: tuple[int, ...]
    example_bytes = 0  # temporary memory for reading one example, without the example itself

    def read_examples(self, first: int, last: int) -> np.ndarray:
        """Return examples [first, last), at least one, which may be a view."""
        raise NotImplementedError


class MemoryStack(ActivationSource):
    """Stack in memory, which keeps the appended arrays without a copy."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.nbytes = shape, 4 * prod(shape)
        self._parts: list[np.ndarray] = []

    @classmethod
    def from_array(cls, array: np.ndarray) -> MemoryStack:
        stack = cls(array.shape)
        stack.append(array)
        return stack

    def read_examples(self, first: int, last: int) -> np.ndarray:
        parts, start = [], 0
        for part in self._parts:
            if start < last and first < start + len(part):
                parts.append(part[max(first - start, 0) : last - start])
            start += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_features(self, first: int, last: int, examples: int) -> np.ndarray:
        """Return the flat features [first, last) of the first `examples` examples, (examples, last - first)."""
        parts, start = [], 0
        for part in self._parts:
            if start < examples:
                parts.append(part[: examples - start].reshape(-1, prod(self.shape[1:]))[:, first:last])
            start += len(part)
        return np.concatenate(parts)

    def append(self, values: np.ndarray) -> None:
        self._parts.append(values)

    def save(self, path: Path) -> None:
        copy = FileStack(self.shape, path.parent)
        for part in self._parts:
            copy.append(part)
        copy.save(path)


class FileStack(ActivationSource):
    """Stack in a temporary file, deleted with the object unless saved."""

    def __init__(self, shape: tuple[int, ...], folder: Path) -> None:
        self.shape, self.nbytes = shape, 4 * prod(shape)
        self._width, self._end = 4 * prod(shape[1:]), 0
        with disk_errors(f"make a file in {folder}", DISK_FIX):
            self._file, name = tempfile.mkstemp(prefix=PART_PREFIX, dir=folder)
        self._path: Path | None = Path(name)

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> FileStack | None:
        """Open a saved file, or return None if it is missing, truncated or damaged. Delete a damaged file."""
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        stack = cls.__new__(cls)
        stack.shape, stack.nbytes, stack._width = shape, 4 * prod(shape), 4 * prod(shape[1:])
        stack._file, stack._path, stack._end = file, None, stack.nbytes
        if os.fstat(file).st_size != stack.nbytes + CHECKSUM_BYTES:
            return None
        if stack._checksum() != os.pread(file, CHECKSUM_BYTES, stack.nbytes):
            log.warning("%s is damaged: recomputing its activations", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # marks the file as recently used
        return stack

    def read_examples(self, first: int, last: int) -> np.ndarray:
        result = np.empty((last - first, *self.shape[1:]), np.float32)
        self._read_rows(result.reshape(1, -1), first * self._width)
        return result

    def read_features(self, first: int, last: int, examples: int) -> np.ndarray:
        result = np.empty((examples, last - first), np.float32)
        self._read_rows(result, 4 * first)
        return result

    def append(self, values: np.ndarray) -> None:
        view = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        with disk_errors(f"write {self._path}", DISK_FIX):
            written_bytes = 0
            while written_bytes < len(view):
                written_bytes += os.pwrite(self._file, view[written_bytes:], self._end + written_bytes)
        self._end += len(view)

    def save(self, path: Path) -> None:
        """Append a checksum and move the file to `path`. Raise StoreError if the disk fails."""
        assert self._path is not None
        with disk_errors(f"store {path}", DISK_FIX):
            os.pwrite(self._file, self._checksum(), self._end)
            os.replace(self._path, path)
        self._path = None

    def _checksum(self) -> bytes:
        checksum = 0
        for offset in range(0, self._end, READ_BYTES):
            checksum = zlib.crc32(os.pread(self._file, min(READ_BYTES, self._end - offset), offset), checksum)
        return checksum.to_bytes(CHECKSUM_BYTES, "big")

    def __del__(self) -> None:
        if getattr(self, "_path", None) is not None:
            self._path.unlink(missing_ok=True)  # type: ignore[union-attr]
        if hasattr(self, "_file"):
            os.close(self._file)

    def _read_rows(self, target: np.ndarray, offset: int) -> None:
        # Row i is read at `offset` within example i. Whole examples take one read.
        if target.shape[1] * target.itemsize == self._width:
            target = target.reshape(1, -1)
        view, row = target.reshape(-1).view(np.uint8).data, target.shape[1] * target.itemsize
        with disk_errors("read activations from the disk", DISK_FIX):
            for i in range(len(target)):
                start, read_bytes = i * row, 0
                while read_bytes < row:
                    remaining = view[start + read_bytes : start + row]
                    count = os.preadv(self._file, [remaining], offset + i * self._width + read_bytes)
                    if not count:
                        raise OSError(errno.EIO, "the file is truncated")
                    read_bytes += count


ActivationStack: TypeAlias = MemoryStack | FileStack  # written once, in order, and read any number of times


class MappedSource(ActivationSource):
    """Examples of another source, passed through a function in batches when they are read.

    `shape` is the shape of one result, and `example_bytes` the function's temporary memory for one example.
    """

    def __init__(
        self,
        source: ActivationSource,
        function: Callable[[np.ndarray], np.ndarray],
        shape: tuple[int, ...],
        example_bytes: int,
    ) -> None:
        self._source, self._function = source, function
        self.shape = (source.shape[0], *shape)
        self.example_bytes = example_bytes

    def read_examples(self, first: int, last: int) -> np.ndarray:
        return self._function(self._source.read_examples(first, last))


class SourceSlice(ActivationSource):
    def __init__(self, source: ActivationSource, first: int, last: int) -> None:
        self._source, self._first = source, first
        self.shape = (last - first, *source.shape[1:])
        self.example_bytes = source.example_bytes

    def read_examples(self, first: int, last: int) -> np.ndarray:
        return self._source.read_examples(self._first + first, self._first + last)


class ActivationCache:
    """Factory of stacks in memory or in files, and a cache of stacks by name.

    All stacks in memory together use at most `memory_bytes`, and all spare stacks on disk at most `kept_bytes`. Files
    that an interrupted task left in `folder` are removed.
    """

    def __init__(self, folder: Path, memory_bytes: int, kept_bytes: int) -> None:
        self._folder, self._memory_bytes, self._kept_bytes = folder, memory_bytes, kept_bytes
        self._memory_stacks = weakref.WeakSet[MemoryStack]()
        with disk_errors(f"use {folder}", DISK_FIX):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"{PART_PREFIX}*"):
                leftover.unlink(missing_ok=True)

    def make_stack(self, shape: tuple[int, ...]) -> ActivationStack:
        """Return a new stack in memory, or in a file if all stacks in memory would exceed the limit."""
        if sum(stack.nbytes for stack in self._memory_stacks) + 4 * prod(shape) > self._memory_bytes:
            return FileStack(shape, self._folder)
        stack = MemoryStack(shape)
        self._memory_stacks.add(stack)
        return stack

    def store(self, name: str, stack: ActivationStack, *, spare: bool) -> None:
        """Store a stack for later tasks. A `spare` stack is stored only if there is room."""
        if not spare:
            stack.save(self._folder / name)
            return
        try:
            if self._evict_entries_for(stack.nbytes):
                stack.save(self._folder / (name + SPARE_SUFFIX))
        except (OSError, StoreError) as error:
            log.warning("%s was not stored for later tasks: %s", self._folder / name, error)

    def find(self, name: str, shape: tuple[int, ...]) -> FileStack | None:
        return FileStack.open(self._folder / name, shape) or FileStack.open(self._folder / (name + SPARE_SUFFIX), shape)

    def _evict_entries_for(self, size: int) -> bool:
        """Delete the oldest spare files until `size` bytes fit. Return False if `size` exceeds the limit."""
        entries = sorted((path.stat().st_mtime_ns, path) for path in self._folder.glob(f"*{SPARE_SUFFIX}"))
        excess_bytes = sum(path.stat().st_size - CHECKSUM_BYTES for _, path in entries) + size - self._kept_bytes
        if size > self._kept_bytes:
            return False
        for _, path in entries:
            if excess_bytes <= 0:
                break
            excess_bytes -= path.stat().st_size - CHECKSUM_BYTES
            path.unlink()
        return True
