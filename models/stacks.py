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
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from fedquilt.core import StoreError

log = logging.getLogger("fedquilt.agent")

PART = "part-"  # begins the name of a file that means nothing to anyone else
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


class Stack:
    """n examples' values that can be written and read.

    Raises, from every method:
        StoreError: the disk is full or fails.
    """

    example_bytes = 0

    def __init__(self, shape: tuple[int, ...], folder: Path | None = None) -> None:
        """In a file in `folder`; None: in memory."""
        self.shape = shape
        self._width = prod(shape[1:])
        self._array = np.empty((shape[0], self._width), np.float32) if folder is None else None
        self._path: Path | None = None
        self._file = -1
        if folder is not None:
            with _doing(f"make a file in {folder}"):
                self._file, name = tempfile.mkstemp(prefix=PART, dir=folder)
                self._path = Path(name)

    @classmethod
    def of(cls, array: np.ndarray) -> Stack:
        """A stack in memory that holds this array."""
        made = cls((0, *array.shape[1:]))
        made.shape, made._array = array.shape, array.reshape(len(array), -1)
        return made

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> Stack | None:
        """What `save` wrote; None: there is none of that shape."""
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        if os.fstat(file).st_size != 4 * prod(shape):
            os.close(file)
            return None
        os.utime(file)
        found = cls((0, *shape[1:]))
        found.shape, found._array, found._file = shape, None, file
        return found

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def in_memory(self) -> bool:
        return self._array is not None

    def rows(self, first: int, last: int) -> np.ndarray:
        """Examples [first, last): (last - first, ...) float32."""
        shape = (last - first, *self.shape[1:])
        if self._array is not None:
            return self._array[first:last].reshape(shape)
        found = np.empty(shape, np.float32)
        self._read(found, 4 * first * self._width)
        return found

    def columns(self, first: int, last: int, examples: int) -> np.ndarray:
        """Features [first, last) of the first so many examples: (examples, last - first) float32."""
        if self._array is not None:
            return self._array[:examples, first:last]
        found = np.empty((examples, last - first), np.float32)
        for i in range(examples):
            self._read(found[i], 4 * (i * self._width + first))
        return found

    def put(self, first: int, values: np.ndarray) -> None:
        """Set the examples from `first` on."""
        if self._array is not None:
            self._array[first : first + len(values)] = values.reshape(len(values), -1)
            return
        view = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data
        with _doing(f"write {self._path}"):
            done, start = 0, 4 * first * self._width
            while done < len(view):
                done += os.pwrite(self._file, view[done:], start + done)

    def save(self, path: Path) -> None:
        """Keep it as this file, whole or not at all."""
        if self._path is None:
            copy = Stack(self.shape, path.parent)
            try:
                copy.put(0, self.rows(0, self.shape[0]))
                copy.save(path)
            finally:
                copy.close()
            return
        with _doing(f"keep {path}"):
            os.replace(self._path, path)
        self._path = None

    def close(self) -> None:
        """Forget the values, unless they are kept in a file."""
        self._array = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, into: np.ndarray, offset: int) -> None:
        view = into.reshape(-1).view(np.uint8).data
        with _doing("read maps back from the disk"):
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
        self._made = weakref.WeakSet[Stack]()
        with _doing(f"use {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PART}*"):
                left.unlink(missing_ok=True)

    def make(self, shape: tuple[int, ...]) -> Stack:
        """A new stack."""
        held = sum(stack.nbytes for stack in self._made if stack.in_memory)
        stack = Stack(shape, self._folder if held + 4 * prod(shape) > self._memory_bytes else None)
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

    def find(self, name: str, shape: tuple[int, ...]) -> Stack | None:
        """What is kept under a name; None: nothing of that shape."""
        return Stack.open(self._folder / name, shape) or Stack.open(self._folder / (name + SPARE), shape)

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


@contextlib.contextmanager
def _doing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free some space, or raise the budget so that it stays in memory" if full else "check the disk"
        raise StoreError(f"cannot {what}: {error.strerror}; {mend}") from None
