"""A disk that lies: what was not synced may be lost or torn by a power failure, and any call may fail or be the last.

A `SimDisk` is one process's way to a `Platter`, which is what its computer keeps and which outlives it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from fedquilt.disk import REAL, Disk, Found, Lock, Place
from fedquilt.open_file import OpenFile
from fedquilt.testing.faults.platter import Change, File, Folder, Node, Platter, SimLock, Symlink, apply

Gate: TypeAlias = Callable[[str, Place], "OSError | None"]
"""Called before each call with what it does ("read", "write", "sync", "name", "commit") and where.

It returns the error that the call is to raise, or raises `Crash`.
"""


class Crash(BaseException):
    """The process is gone, in the middle of what it did. No `except Exception` may catch it."""


class SimFile(OpenFile):
    """A file of a `SimDisk`, each call of which goes through the gate as those on a path do."""

    def __init__(self, disk: SimDisk, path: Place) -> None:
        self._disk, self._path = disk, path

    def size(self) -> int:
        """See `OpenFile`."""
        found = self._disk.stat(self._path)
        return 0 if found is None else found.size

    def read(self, offset: int, size: int) -> bytes:
        """See `OpenFile`."""
        return self._disk.read(self._path, offset, size)

    def read_into(self, buffer: Any, offset: int) -> int:
        """See `OpenFile`."""
        return self._disk.read_into(self._path, buffer, offset)

    def write(self, payload: bytes | memoryview, offset: int) -> None:
        """See `OpenFile`."""
        self._disk.write_at(self._path, payload, offset)

    def empty(self) -> None:
        """See `OpenFile`."""
        self._disk.resize(self._path, 0)

    def sync(self) -> None:
        """See `OpenFile`."""
        self._disk.sync(self._path)

    def close(self) -> None:
        """Nothing is open."""


class SimDisk(Disk):
    """The disk of one process.

    Args:
        platter: of its computer.
        gate: decides about every call.
    """

    def __init__(self, platter: Platter, gate: Gate = lambda what, where: None) -> None:
        self.platter = platter
        self._gate, self._root = gate, platter.root
        self._held: list[SimLock] = []
        self._paths = platter.paths

    def end(self) -> None:
        """The process is gone: its locks are free."""
        for lock in self._held:
            lock.close()

    def wall_s(self) -> float:
        """See `Disk`."""
        return self.platter.wall_ns() / 1e9

    # -- what is there --

    def stat(self, path: Place) -> Found | None:
        """See `Disk`."""
        node = self._find(path)
        if node is None:
            return REAL.stat(path) if self._outside(path) else None
        return _found(os.path.basename(path), node)

    def is_file(self, path: Place) -> bool:
        """See `Disk`."""
        return isinstance(self._find(path), File) or (self._outside(path) and REAL.is_file(path))

    def is_dir(self, path: Place) -> bool:
        """See `Disk`."""
        return isinstance(self._find(path), Folder)

    def entries(self, folder: Place) -> list[Found]:
        """See `Disk`."""
        self._ask("read", folder)
        node = self._find(folder)
        if not isinstance(node, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        places = (
            (name, self._find(f"{os.fspath(folder)}/{name}") if isinstance(each, Symlink) else each)
            for name, each in node.names.items()
        )
        return [_found(name, each) for name, each in places if each is not None]

    def free_bytes(self, folder: Place) -> int:
        """Plenty."""
        return 1 << 40

    # -- reading --

    def read(self, path: Place, offset: int = 0, size: int | None = None) -> bytes:
        """See `Disk`."""
        node = self._find(path)
        if node is None and self._outside(path):
            return REAL.read(path, offset, size)
        self._ask("read", path)
        data = self._file(path).data
        if offset == 0 and size is None:
            return bytes(data)
        return bytes(data[offset : len(data) if size is None else offset + size])

    def read_into(self, path: Place, buffer: Any, offset: int) -> int:
        """See `Disk`."""
        view = memoryview(buffer)
        found = self.read(path, offset, view.nbytes)
        view[: len(found)] = found
        return len(found)

    def read_pieces(self, path: Place) -> Iterator[memoryview]:
        """See `Disk`."""
        yield memoryview(self.read(path))

    def data_ranges(self, path: Place) -> list[tuple[int, int]]:
        """See `Disk`: everything is data here."""
        size = len(self._file(path).data)
        return [(0, size)] if size else []

    # -- writing --

    def write(self, path: Place, payload: bytes, *, new: bool = False) -> None:
        """Write a whole file. A process that ends here, or a full disk, leaves half of it."""
        folder, name = self._parent(path)
        known = folder.names.get(name)
        if new and known is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))

        def put(part: bytes) -> None:
            if isinstance(known, File):
                known.rewritten = True
                known.data, known.mtime_ns = part, self.platter.wall_ns()
            else:
                self._change([(folder, name, File(part, self.platter.inode(), self.platter.wall_ns()))])

        self._ask("write", path, lambda: put(payload[: len(payload) // 2]))
        put(bytes(payload))

    def write_at(self, path: Place, payload: bytes | memoryview, offset: int) -> None:
        """See `Disk`."""
        file = self._file(path)

        def put(part: bytes) -> None:
            data = file.data + bytes(max(0, offset - len(file.data)))
            file.data = data[:offset] + part + data[offset + len(part) :]
            file.mtime_ns = self.platter.wall_ns()

        self._ask("write", path, lambda: put(bytes(payload[: len(payload) // 2])))
        put(bytes(payload))

    def resize(self, path: Place, size: int) -> None:
        """Set the size of a file, filled up with zeros, or create it."""
        self._ask("write", path)
        folder, name = self._parent(path)
        node = folder.names.get(name)
        if isinstance(node, File):
            if len(node.data) != size:
                node.rewritten = node.rewritten or size < len(node.data)
                node.data = node.data[:size] + bytes(max(0, size - len(node.data)))
        else:
            self._change([(folder, name, File(bytes(size), self.platter.inode(), self.platter.wall_ns()))])

    def open(self, path: Place) -> SimFile:
        """See `Disk`."""
        if not self.is_file(path):
            self.resize(path, 0)
        return SimFile(self, path)

    def scratch(self, folder: Place) -> SimFile:
        """See `Disk`: it has a name here, until somebody tidies up."""
        return self.open(f"{os.fspath(folder)}/{os.urandom(16).hex()}.tmp")

    def sync(self, path: Place) -> None:
        """Make a file's content, or the changed names in a folder, safe from a power failure."""
        node = self._find(path)
        if node is None and self._outside(path):
            return
        self._ask("sync", path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if isinstance(node, File):
            node.safe, node.rewritten = node.data, False
            return
        kept = {index for index, change in enumerate(self.platter.changes) for each in change if each[0] is node}
        if kept:
            self.platter.make_safe(kept)

    def replace(self, source: Place, target: Place) -> None:
        """See `Disk`."""
        self._ask("name", target)
        here, name = self._parent(source)
        node = here.names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
        there, new = self._parent(target)
        if isinstance(there.names.get(new), Folder):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        self._change([(here, name, None), (there, new, node)])

    def link(self, source: Place, target: Place) -> None:
        """See `Disk`. A file of the real disk is as if it had been synced."""
        self._ask("name", target)
        if self._outside(source):
            data = REAL.read(source)
            node = File(data, self.platter.inode(), self.platter.wall_ns(), data)
        else:
            node = self._file(source)
        there, new = self._parent(target)
        if new in there.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        self._change([(there, new, node)])

    def symlink(self, target: str, path: Place) -> None:
        """See `Disk`. Links to a name in their own folder alone."""
        if "/" in target:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        self._ask("name", path)
        there, new = self._parent(path)
        if new in there.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._change([(there, new, Symlink(target, self.platter.inode()))])

    def target(self, path: Place) -> str | None:
        """See `Disk`."""
        parts = self._parts(path)
        folder = self._node_at(parts[:-1])
        node = folder.names.get(parts[-1]) if isinstance(folder, Folder) else None
        return node.target if isinstance(node, Symlink) else None

    def unlink(self, path: Place) -> None:
        """See `Disk`."""
        self._ask("name", path)
        found = self._parts(path)
        folder = self._node_at(found[:-1])
        if isinstance(folder, Folder) and found[-1] in folder.names:
            self._change([(folder, found[-1], None)])

    def touch(self, path: Place) -> None:
        """See `Disk`."""
        node = self._find(path)
        if isinstance(node, File):
            node.mtime_ns = self.platter.wall_ns()

    def permit(self, path: Place, mode: int) -> None:
        """Nobody else is there."""
        self._ask("name", path)

    def make(self, folder: Place) -> None:
        """See `Disk`."""
        node: Node = self.platter.top
        for name in self._parts(folder):
            if not isinstance(node, Folder):
                raise FileExistsError(errno.EEXIST, "File exists", str(folder))
            if name not in node.names:
                self._ask("name", folder)
                self._change([(node, name, Folder(self.platter.inode()))])
            node = node.names[name]

    def remove(self, folder: Place) -> None:
        """See `Disk`: name by name, so that a process that ends here leaves a part."""
        node = self._find(folder)
        if not isinstance(node, Folder):
            return
        for name in list(node.names):
            if isinstance(node.names[name], Folder):
                self.remove(f"{folder}/{name}")
            else:
                self.unlink(f"{folder}/{name}")
        self.unlink(folder)

    def clear(self, folder: Place) -> None:
        """Replace a folder by an empty one."""
        self.remove(folder)
        self.make(folder)

    def copy_untrusted(self, source: Place, target: Place, most_bytes: int) -> str:
        """Copy a file as `copy` does, as no other process writes here. Return the sha256."""
        return self.copy(source, target)

    # -- shared with other processes --

    def is_locked(self, path: Place) -> bool:
        """See `Disk`."""
        self._ask("read", path)
        return bool(self.platter.locks.get(str(path)))

    def lock(self, path: Place, *, tries: int = 1) -> Lock | None:
        """See `Disk`: nobody waits here."""
        self._ask("name", path)
        holders = self.platter.locks.setdefault(str(path), set())
        if holders:
            return None
        lock = SimLock(holders)
        self._held.append(lock)
        return lock

    def connect(self, path: Place, *, any_thread: bool = False) -> sqlite3.Connection:
        """Open the simulated database at a path."""
        self._ask("read", path)
        return self.platter.database(str(path)).connect(self._ask)

    # -- within --

    def _ask(self, what: str, where: Place, part: Callable[[], None] = lambda: None) -> None:
        """Let the gate decide; `part` is what a call that fails halfway has done."""
        try:
            error = self._gate(what, where)
        except Crash:
            part()
            raise
        if error is not None:
            if error.errno == errno.ENOSPC:
                part()
            raise error

    def _change(self, change: Change) -> None:
        apply(change, safe=False)
        self.platter.changes.append(change)

    def _outside(self, path: Place) -> bool:
        return not os.fspath(path).startswith(self._root)

    def _parts(self, path: Place) -> list[str]:
        text = path if type(path) is str else os.fspath(path)
        known = self._paths.get(text)
        if known is None:
            if not text.startswith(self._root):
                raise OSError(errno.EROFS, "Read-only file system", text)
            known = self._paths[text] = [part for part in text[len(self._root) :].split("/") if part]
        return known

    def _node_at(self, parts: list[str]) -> Node | None:
        node: Node | None = self.platter.top
        for name in parts:
            if type(node) is not Folder:
                return None
            folder, node = node, node.names.get(name)
            while type(node) is Symlink:
                node = folder.names.get(node.target)
        return node

    def _find(self, path: Place) -> Node | None:
        parts = self._paths.get(path if type(path) is str else os.fspath(path))
        if parts is not None:
            return self._node_at(parts)
        try:
            return self._node_at(self._parts(path))
        except OSError:
            return None

    def _file(self, path: Place) -> File:
        node = self._find(path)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return node

    def _parent(self, path: Place) -> tuple[Folder, str]:
        parts = self._parts(path)
        folder = self._node_at(parts[:-1])
        if not isinstance(folder, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return folder, parts[-1]


def _found(name: str, node: Node) -> Found:
    if isinstance(node, Folder):
        return Found(name, True, 0, 0, node.inode)
    assert isinstance(node, File)
    return Found(name, False, len(node.data), node.mtime_ns, node.inode)
