"""Values of many examples, one shape each, in memory or in a file: maps that are larger than a board's memory.

Everything here hands out a few examples at a time (`rows`), or a few features of all of them
(`columns`, which a Gram matrix is summed from). A file is read and written, never mapped: what the
kernel keeps of it is no part of the process and goes when memory is short, and most files are
gone before they ever reach the disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import weakref
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from fedquilt.core import StoreError
from fedquilt.disk import doing

log = logging.getLogger("fedquilt.agent")

PART = "part-"  # begins the name of a file that means nothing to anyone else
MEND = "free some space, or raise the budget so that it stays in memory"
SPARE = ".spare"  # ends the name of a file that makes room for newer ones


class Source(Protocol):
    """Examples in order; `shape` is (n, ...)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def example_bytes(self) -> int:
        """What handing out one example takes beside the example."""
        ...

    def rows(self, first: int, last: int) -> np.ndarray:
        """Examples [first, last), float32."""
        ...


class Stack(Source, Protocol):
    """Examples that are written once, in order, and read as often as wanted.

    Raises, from every method:
        StoreError: the disk is full or fails.
    """

    @property
    def nbytes(self) -> int: ...

    def columns(self, first: int, last: int, examples: int) -> np.ndarray:
        """Features [first, last) of the first so many examples: (examples, last - first) float32, a new array."""
        ...

    def put(self, values: np.ndarray) -> None:
        """The next examples."""
        ...

    def save(self, path: Path) -> None:
        """Keep it as this file, whole or not at all."""
        ...


class InMemory:
    """A stack of the arrays that were put, none of them copied."""

    example_bytes = 0

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.nbytes = shape, 4 * prod(shape)
        self._parts: list[np.ndarray] = []

    @classmethod
    def of(cls, array: np.ndarray) -> InMemory:
        made = cls(array.shape)
        made.put(array)
        return made

    def rows(self, first: int, last: int) -> np.ndarray:
        found, start = [], 0
        for part in self._parts:
            if start < last and first < start + len(part):
                found.append(part[max(first - start, 0) : last - start])
            start += len(part)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def columns(self, first: int, last: int, examples: int) -> np.ndarray:
        found, start = [], 0
        for part in self._parts:
            if start < examples:
                found.append(part[: examples - start].reshape(-1, prod(self.shape[1:]))[:, first:last])
            start += len(part)
        return np.concatenate(found)

    def put(self, values: np.ndarray) -> None:
        self._parts.append(values)

    def save(self, path: Path) -> None:
        copy = InFile(self.shape, path.parent)
        for part in self._parts:
            copy.put(part)
        copy.save(path)


class InFile:
    """A stack in a file, which goes with it unless it is saved."""

    example_bytes = 0

    def __init__(self, shape: tuple[int, ...], folder: Path) -> None:
        self.shape, self.nbytes = shape, 4 * prod(shape)
        self._width, self._end = 4 * prod(shape[1:]), 0
        with doing(f"make a file in {folder}", MEND):
            self._file, name = tempfile.mkstemp(prefix=PART, dir=folder)
        self._path: Path | None = Path(name)

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> InFile | None:
        """What `save` wrote; None: there is none of that shape."""
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        found = cls.__new__(cls)
        found.shape, found.nbytes, found._width = shape, 4 * prod(shape), 4 * prod(shape[1:])
        found._file, found._path, found._end = file, None, found.nbytes
        if os.fstat(file).st_size != found.nbytes:
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # used now
        return found

    def rows(self, first: int, last: int) -> np.ndarray:
        found = np.empty((last - first, *self.shape[1:]), np.float32)
        self._read(found, first * self._width)
        return found

    def columns(self, first: int, last: int, examples: int) -> np.ndarray:
        found = np.empty((examples, last - first), np.float32)
        for i in range(examples):
            self._read(found[i], i * self._width + 4 * first)
        return found

    def put(self, values: np.ndarray) -> None:
        view = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        with doing(f"write {self._path}", MEND):
            done = 0
            while done < len(view):
                done += os.pwrite(self._file, view[done:], self._end + done)
        self._end += len(view)

    def save(self, path: Path) -> None:
        assert self._path is not None
        with doing(f"keep {path}", MEND):
            os.replace(self._path, path)
        self._path = None

    def __del__(self) -> None:
        if getattr(self, "_path", None) is not None:
            self._path.unlink(missing_ok=True)  # type: ignore[union-attr]
        if hasattr(self, "_file"):
            os.close(self._file)

    def _read(self, into: np.ndarray, offset: int) -> None:
        view = into.reshape(-1).view(np.uint8).data
        with doing("read maps back from the disk", MEND):
            done = 0
            while done < len(view):
                got = os.preadv(self._file, [view[done:]], offset + done)
                if not got:
                    raise OSError(errno.EIO, "the file is cut short")
                done += got


class Mapped:
    """Each example of another source through a function of some examples."""

    def __init__(
        self, source: Source, function: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], example_bytes: int
    ) -> None:
        """`shape` is that of one result."""
        self._source, self._function = source, function
        self.shape = (source.shape[0], *shape)
        self.example_bytes = example_bytes

    def rows(self, first: int, last: int) -> np.ndarray:
        return self._function(self._source.rows(first, last))


class Part:
    """Examples [first, last) of another source."""

    def __init__(self, source: Source, first: int, last: int) -> None:
        self._source, self._first = source, first
        self.shape = (last - first, *source.shape[1:])
        self.example_bytes = source.example_bytes

    def rows(self, first: int, last: int) -> np.ndarray:
        return self._source.rows(self._first + first, self._first + last)


class Shelf:
    """Makes stacks: in memory as long as those that live hold no more than so many bytes, else in files.

    What is kept by name may be gone at any later time.
    """

    def __init__(self, folder: Path, memory_bytes: int, kept_bytes: int) -> None:
        """
        Args:
            folder: of this job alone; what an interrupted task left there is removed.
            memory_bytes: of all stacks in memory.
            kept_bytes: of all files that are kept by name, except those marked to stay.
        """
        self._folder, self._memory_bytes, self._kept_bytes = folder, memory_bytes, kept_bytes
        self._made = weakref.WeakSet[InMemory]()
        with doing(f"use {folder}", MEND):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PART}*"):
                left.unlink(missing_ok=True)

    def make(self, shape: tuple[int, ...]) -> Stack:
        """A new stack."""
        if sum(stack.nbytes for stack in self._made) + 4 * prod(shape) > self._memory_bytes:
            return InFile(shape, self._folder)
        stack = InMemory(shape)
        self._made.add(stack)
        return stack

    def keep(self, name: str, stack: Stack, *, spare: bool) -> None:
        """Keep values for later tasks; `spare` ones if there is room, and until newer ones need theirs.

        Raises:
            StoreError: the disk is full or fails, and the values cannot be spared.
        """
        if not spare:
            stack.save(self._folder / name)
            return
        try:
            if self._make_room(stack.nbytes):
                stack.save(self._folder / (name + SPARE))
        except (OSError, StoreError) as error:
            log.warning("%s is not kept: %s", self._folder / name, error)

    def find(self, name: str, shape: tuple[int, ...]) -> InFile | None:
        """What is kept under a name; None: nothing of that shape."""
        return InFile.open(self._folder / name, shape) or InFile.open(self._folder / (name + SPARE), shape)

    def _make_room(self, size: int) -> bool:
        """Drop the longest unused spare values; whether so many bytes more may be kept."""
        entries = sorted((path.stat().st_mtime_ns, path) for path in self._folder.glob(f"*{SPARE}"))
        over = sum(path.stat().st_size for _, path in entries) + size - self._kept_bytes
        if size > self._kept_bytes:
            return False
        for _, path in entries:
            if over <= 0:
                break
            over -= path.stat().st_size
            path.unlink()
        return True
