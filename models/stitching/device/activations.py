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

PART = "part-"  # prefix of temporary files
MEND = "free some space, or raise the budget so that it stays in memory"
SUM_BYTES = 4  # of the checksum behind the examples of a saved file
READ_BYTES = 1 << 20
SPARE = ".spare"  # suffix of files that may be deleted to make room for newer ones


class ActivationSource:
    """Examples in a fixed order, read a few at a time."""

    shape: tuple[int, ...]
    example_bytes = 0  # temporary memory for reading one example, without the example itself

    def read_examples(self, first: int, last: int) -> np.ndarray:
        raise NotImplementedError

    def read_channels(self, examples: slice, some: slice) -> np.ndarray:
        return self.read_examples(examples.start, examples.stop)[:, some]


class MemoryStack(ActivationSource):
    """Stack in memory, which keeps the appended arrays without a copy."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.nbytes = shape, 4 * prod(shape)
        self._parts: list[np.ndarray] = []

    @classmethod
    def from_array(cls, array: np.ndarray) -> MemoryStack:
        made = cls(array.shape)
        made.append(array)
        return made

    def read_examples(self, first: int, last: int) -> np.ndarray:
        found, start = [], 0
        for part in self._parts:
            if start < last and first < start + len(part):
                found.append(part[max(first - start, 0) : last - start])
            start += len(part)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read_features(self, first: int, last: int, examples: int) -> np.ndarray:
        found, start = [], 0
        for part in self._parts:
            if start < examples:
                found.append(part[: examples - start].reshape(-1, prod(self.shape[1:]))[:, first:last])
            start += len(part)
        return np.concatenate(found)

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
        with disk_errors(f"make a file in {folder}", MEND):
            self._file, name = tempfile.mkstemp(prefix=PART, dir=folder)
        self._path: Path | None = Path(name)

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> FileStack | None:
        """Open a saved file, or return None if missing or of another size, or if damaged, which deletes it."""
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        found = cls.__new__(cls)
        found.shape, found.nbytes, found._width = shape, 4 * prod(shape), 4 * prod(shape[1:])
        found._file, found._path, found._end = file, None, found.nbytes
        if os.fstat(file).st_size != found.nbytes + SUM_BYTES:
            return None
        if found._checksum() != os.pread(file, SUM_BYTES, found.nbytes):
            log.warning("%s is damaged: what it held is made anew", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # marks the file as recently used
        return found

    def read_examples(self, first: int, last: int) -> np.ndarray:
        found = np.empty((last - first, *self.shape[1:]), np.float32)
        self._read_rows(found.reshape(1, -1), first * self._width)
        return found

    def read_channels(self, examples: slice, some: slice) -> np.ndarray:
        each = prod(self.shape[2:])
        found = np.empty((examples.stop - examples.start, some.stop - some.start, *self.shape[2:]), np.float32)
        self._read_rows(found.reshape(len(found), -1), examples.start * self._width + 4 * some.start * each)
        return found

    def read_features(self, first: int, last: int, examples: int) -> np.ndarray:
        found = np.empty((examples, last - first), np.float32)
        self._read_rows(found, 4 * first)
        return found

    def append(self, values: np.ndarray) -> None:
        view = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        with disk_errors(f"write {self._path}", MEND):
            done = 0
            while done < len(view):
                done += os.pwrite(self._file, view[done:], self._end + done)
        self._end += len(view)

    def save(self, path: Path) -> None:
        assert self._path is not None
        with disk_errors(f"keep {path}", MEND):
            os.pwrite(self._file, self._checksum(), self._end)
            os.replace(self._path, path)
        self._path = None

    def _checksum(self) -> bytes:
        found = 0
        for offset in range(0, self._end, READ_BYTES):
            found = zlib.crc32(os.pread(self._file, min(READ_BYTES, self._end - offset), offset), found)
        return found.to_bytes(SUM_BYTES, "big")

    def __del__(self) -> None:
        if getattr(self, "_path", None) is not None:
            self._path.unlink(missing_ok=True)  # type: ignore[union-attr]
        if hasattr(self, "_file"):
            os.close(self._file)

    def _read_rows(self, into: np.ndarray, offset: int) -> None:
        # Row i is read at `offset` within example i. Whole examples take one read.
        if into.shape[1] * into.itemsize == self._width:
            into = into.reshape(1, -1)
        view, row = into.reshape(-1).view(np.uint8).data, into.shape[1] * into.itemsize
        with disk_errors("read maps back from the disk", MEND):
            for i in range(len(into)):
                start, done = i * row, 0
                while done < row:
                    piece = view[start + done : start + row]
                    got = os.preadv(self._file, [piece], offset + i * self._width + done)
                    if not got:
                        raise OSError(errno.EIO, "the file is cut short")
                    done += got


ActivationStack: TypeAlias = MemoryStack | FileStack  # written once, in order, and read any number of times


class MappedSource(ActivationSource):
    """Examples of another source, passed through a function from batch to batch on reading.

    `shape` and `example_bytes` are of one result and of the function's temporary memory for it.
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

    def read_channels(self, examples: slice, some: slice) -> np.ndarray:
        return self._source.read_channels(slice(self._first + examples.start, self._first + examples.stop), some)


class ActivationCache:
    """Factory of stacks in memory or in files, and a cache by name of stacks, which can be deleted at any time.

    All living stacks in memory hold at most `memory_bytes`, and all spare ones on disk `kept_bytes`. Files that an
    interrupted task left in `folder` are removed.
    """

    def __init__(self, folder: Path, memory_bytes: int, kept_bytes: int) -> None:
        self._folder, self._memory_bytes, self._kept_bytes = folder, memory_bytes, kept_bytes
        self._made = weakref.WeakSet[MemoryStack]()
        with disk_errors(f"use {folder}", MEND):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PART}*"):
                left.unlink(missing_ok=True)

    def make_stack(self, shape: tuple[int, ...]) -> ActivationStack:
        """Return a new stack in memory, or in a file if all stacks in memory would exceed the limit."""
        if sum(stack.nbytes for stack in self._made) + 4 * prod(shape) > self._memory_bytes:
            return FileStack(shape, self._folder)
        stack = MemoryStack(shape)
        self._made.add(stack)
        return stack

    def store(self, name: str, stack: ActivationStack, *, spare: bool) -> None:
        """Store a stack for later tasks. A `spare` stack is stored only if there is room."""
        if not spare:
            stack.save(self._folder / name)
            return
        try:
            if self._evict_entries_for(stack.nbytes):
                stack.save(self._folder / (name + SPARE))
        except (OSError, StoreError) as error:
            log.warning("%s is not kept: %s", self._folder / name, error)

    def find(self, name: str, shape: tuple[int, ...]) -> FileStack | None:
        return FileStack.open(self._folder / name, shape) or FileStack.open(self._folder / (name + SPARE), shape)

    def _evict_entries_for(self, size: int) -> bool:
        """Delete the oldest spare files until `size` bytes fit, or return False if `size` exceeds the limit."""
        entries = sorted((path.stat().st_mtime_ns, path) for path in self._folder.glob(f"*{SPARE}"))
        over = sum(path.stat().st_size - SUM_BYTES for _, path in entries) + size - self._kept_bytes
        if size > self._kept_bytes:
            return False
        for _, path in entries:
            if over <= 0:
                break
            over -= path.stat().st_size - SUM_BYTES
            path.unlink()
        return True
