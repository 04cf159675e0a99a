"""Disk of a simulated computer: unsynced data may be lost or torn, and any call may fail or end the process.

A `SimulatedFileSystem` is what a computer stores. It outlives the processes, of which each has a `SimDisk`. It has two
views: as programs see files, and as they are after a power failure. A change of a folder's names is lost or kept as a
whole, in any combination with other unsynced changes. Of an unsynced file, a power failure leaves the old bytes, the
new bytes, zeros, or a mixture. Synced bytes that a later write did not change are kept.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, TypeAlias

from fedquilt.host.disk import REAL, Disk, Lock, OpenFile, PathInfo, StrPath
from tests.faults.database import FaultyDatabase

TORN_BYTES: Final = 64  # a file that was being written ends, or turns into zeros or old bytes, at a multiple of this


class StoredFile:
    __slots__ = ("data", "inode", "mtime_ns", "rewritten", "safe")

    def __init__(self, data: bytes, inode: int, mtime_ns: int, safe: bytes | None = None) -> None:
        self.data, self.inode, self.mtime_ns, self.safe = data, inode, mtime_ns, safe
        self.rewritten = False  # whether it was cut since the last sync, so that no old bytes need stay


class StoredFolder:
    __slots__ = ("inode", "names", "safe")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.names: dict[str, Node] = {}
        self.safe: dict[str, Node] = {}


class StoredSymlink:
    __slots__ = ("inode", "target")

    def __init__(self, target: str, inode: int) -> None:
        self.target, self.inode = target, inode


Node: TypeAlias = StoredFile | StoredFolder | StoredSymlink
Change: TypeAlias = list[tuple[StoredFolder, str, Node | None]]  # names set or removed together


class SimulatedFileSystem:
    """Simulated file system of one computer, below one folder.

    Args:
        root: The absolute path of the folder. Other paths belong to the real disk and are read-only.
        real: A real folder for databases.
        wall_ns: The clock of the computer.
    """

    def __init__(self, root: str, real: Path, wall_ns: Callable[[], int] = lambda: 0) -> None:
        self.root, self.wall_ns = root.rstrip("/"), wall_ns
        self.top = StoredFolder(0)
        self.changes: list[Change] = []  # of names, not synced yet
        self.locks: dict[str, set[SimLock]] = {}
        self.databases: dict[str, FaultyDatabase] = {}  # by path
        self.paths: dict[str, list[str]] = {}  # absolute path -> names from `root` on
        self.lost = 0  # files and names that power failures have taken
        self._real, self._inodes = real, 0

    def next_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def open_database(self, path: str) -> FaultyDatabase:
        if path not in self.databases:
            self.databases[path] = FaultyDatabase(self._real / f"{len(self.databases)}-{os.path.basename(path)}")
        return self.databases[path]

    def fail_power(self, roll: random.Random) -> None:
        way, upto = roll.random(), roll.randint(0, len(self.changes))
        kept = {index for index in range(len(self.changes)) if (index < upto if way < 0.5 else roll.random() < 0.5)}
        self.sync_changes(kept)
        self.lost += len(self.changes)
        self.changes.clear()
        self._lose_unsynced(self.top, roll)
        for database in self.databases.values():
            database.crash(roll)

    def sync_changes(self, kept: set[int]) -> None:
        if len(kept) == len(self.changes):
            for change in self.changes:
                apply_change(change, safe=True)
            self.changes.clear()
            return
        slots: set[tuple[int, str]] = set()
        last = max(kept, default=-1)
        for index in range(last, -1, -1):
            mine = [(folder.inode, name) for folder, name, _ in self.changes[index]]
            if index in kept or not slots.isdisjoint(mine):
                kept.add(index)
                slots.update(mine)
        for index in sorted(kept):
            apply_change(self.changes[index], safe=True)
        self.changes[: last + 1] = [
            change for index, change in enumerate(self.changes[: last + 1]) if index not in kept
        ]

    def flip_bit(self, place: float) -> bool:
        """Flip the bit at a position from 0 to 1. Return False if there is no file."""
        files = [file for file in self._list_files(self.top) if file.data]
        bits = sum(8 * len(file.data) for file in files)
        bit = int(place * bits)
        for file in files:
            if bit < 8 * len(file.data):
                data = bytearray(file.data)
                data[bit // 8] ^= 1 << bit % 8
                file.data = bytes(data)
                file.safe = file.data if file.safe is not None else None
                return True
            bit -= 8 * len(file.data)
        return False

    def _list_files(self, folder: StoredFolder) -> list[StoredFile]:
        found: list[StoredFile] = []
        for node in folder.names.values():
            if isinstance(node, StoredFolder):
                found += self._list_files(node)
            elif isinstance(node, StoredFile):
                found.append(node)
        return found

    def copy_contents(self) -> tuple[StoredFolder, dict[str, tuple[bytes, bytes]]]:
        return deepcopy(self.top), {path: each.read_files() for path, each in self.databases.items()}

    def restore(self, copied: tuple[StoredFolder, dict[str, tuple[bytes, bytes]]]) -> None:
        self.top = copied[0]
        _sync_all(self.top)
        self.changes.clear()
        for path, image in copied[1].items():
            self.databases[path].restore(image)

    def close(self) -> None:
        for database in self.databases.values():
            database.close()

    def end_processes(self) -> None:
        for database in self.databases.values():
            database.crash(None)

    def _lose_unsynced(self, folder: StoredFolder, roll: random.Random) -> None:
        folder.names = dict(folder.safe)
        for node in folder.names.values():
            if isinstance(node, StoredFolder):
                self._lose_unsynced(node, roll)
            elif isinstance(node, StoredFile) and (node.safe is None or node.safe is not node.data):
                self.lost += 1
                old, new = node.safe or b"", node.data
                left = tear_file(old, new, roll)
                node.data = node.safe = left if node.rewritten else _keep_unchanged_blocks(old, new, left)
                node.rewritten = False


def _sync_all(folder: StoredFolder) -> None:
    folder.safe = dict(folder.names)
    for node in folder.names.values():
        if isinstance(node, StoredFolder):
            _sync_all(node)
        elif isinstance(node, StoredFile):
            node.safe = node.data


def tear_file(old: bytes, new: bytes, roll: random.Random) -> bytes:
    way = roll.random()
    if way < 0.3:
        return old
    if way < 0.5:
        return new
    cut = roll.randrange(len(new) // TORN_BYTES + 1) * TORN_BYTES
    if way < 0.75:
        return new[:cut]
    return new[:cut] + bytes(len(new) - cut) if way < 0.9 else new[:cut] + old[cut:]


def _keep_unchanged_blocks(old: bytes, new: bytes, left: bytes) -> bytes:
    both = min(len(old), len(new))
    whole = bytearray(left.ljust(both, b"\0"))
    for at in range(0, both, TORN_BYTES):
        end = min(at + TORN_BYTES, both)
        if old[at:end] == new[at:end]:
            whole[at:end] = old[at:end]
    return bytes(whole)


def apply_change(change: Change, *, safe: bool) -> None:
    for folder, name, node in change:
        names = folder.safe if safe else folder.names
        if node is not None:
            names[name] = node
        elif name in names:
            del names[name]


class SimLock(Lock):
    def __init__(self, holders: set[SimLock]) -> None:
        super().__init__(-1)
        self._holders = holders
        holders.add(self)

    def release(self) -> None:
        self._holders.discard(self)


Gate: TypeAlias = Callable[[str, StrPath], "OSError | None"]
"""Called before each call with what it does ("read", "write", "sync", "name", "commit") and where.

It returns the error that the call is to raise, or raises `SimulatedCrash`.
"""


class SimulatedCrash(BaseException):
    """End of the process in the middle of a call. Not caught by `except Exception`."""


class SimFile(OpenFile):
    def __init__(self, disk: SimDisk, path: StrPath) -> None:
        self._disk, self._path = disk, path

    def size(self) -> int:
        found = self._disk.stat(self._path)
        return 0 if found is None else found.size

    def read(self, offset: int, size: int) -> bytes:
        return self._disk.read(self._path, offset, size)

    def read_into(self, buffer: Any, offset: int) -> int:
        return self._disk.read_into(self._path, buffer, offset)

    def write(self, payload: bytes | memoryview, offset: int) -> None:
        self._disk.write_at(self._path, payload, offset)

    def truncate(self) -> None:
        self._disk.resize(self._path, 0)

    def sync(self) -> None:
        self._disk.sync(self._path)

    def close(self) -> None: ...


class SimDisk(Disk):
    def __init__(self, platter: SimulatedFileSystem, gate: Gate = lambda what, where: None) -> None:
        self.platter = platter
        self._rate_limiter, self._root = gate, platter.root
        self._held: list[SimLock] = []
        self._paths = platter.paths

    def release_locks(self) -> None:
        for lock in self._held:
            lock.release()

    def wall_clock_s(self) -> float:
        return self.platter.wall_ns() / 1e9

    def stat(self, path: StrPath) -> PathInfo | None:
        node = self._find_node(path)
        if node is None:
            return REAL.stat(path) if self._is_outside(path) else None
        return _file_info(os.path.basename(path), node)

    def is_file(self, path: StrPath) -> bool:
        return isinstance(self._find_node(path), StoredFile) or (self._is_outside(path) and REAL.is_file(path))

    def is_dir(self, path: StrPath) -> bool:
        return isinstance(self._find_node(path), StoredFolder)

    def entries(self, folder: StrPath) -> list[PathInfo]:
        self._apply_gate("read", folder)
        node = self._find_node(folder)
        if not isinstance(node, StoredFolder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        places = (
            (name, self._find_node(f"{os.fspath(folder)}/{name}") if isinstance(each, StoredSymlink) else each)
            for name, each in node.names.items()
        )
        return [_file_info(name, each) for name, each in places if each is not None]

    def free_bytes(self, folder: StrPath) -> int:
        return 1 << 40

    def read(self, path: StrPath, offset: int = 0, size: int | None = None) -> bytes:
        node = self._find_node(path)
        if node is None and self._is_outside(path):
            return REAL.read(path, offset, size)
        self._apply_gate("read", path)
        data = self._require_file(path).data
        if offset == 0 and size is None:
            return bytes(data)
        return bytes(data[offset : len(data) if size is None else offset + size])

    def read_into(self, path: StrPath, buffer: Any, offset: int) -> int:
        view = memoryview(buffer)
        found = self.read(path, offset, view.nbytes)
        view[: len(found)] = found
        return len(found)

    def read_pieces(self, path: StrPath) -> Iterator[memoryview]:
        yield memoryview(self.read(path))

    def data_ranges(self, path: StrPath) -> list[tuple[int, int]]:
        # All ranges contain data here.
        size = len(self._require_file(path).data)
        return [(0, size)] if size else []

    def write(self, path: StrPath, payload: bytes, *, new: bool = False) -> None:
        folder, name = self._parent_folder(path)
        known = folder.names.get(name)
        if new and known is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))

        def write_whole(part: bytes) -> None:
            if isinstance(known, StoredFile):
                known.rewritten = True
                known.data, known.mtime_ns = part, self.platter.wall_ns()
            else:
                self._apply_change(
                    [(folder, name, StoredFile(part, self.platter.next_inode(), self.platter.wall_ns()))]
                )

        self._apply_gate("write", path, lambda: write_whole(payload[: len(payload) // 2]))
        write_whole(bytes(payload))

    def write_at(self, path: StrPath, payload: bytes | memoryview, offset: int) -> None:
        file = self._require_file(path)

        def write_range(part: bytes) -> None:
            data = file.data + bytes(max(0, offset - len(file.data)))
            file.data = data[:offset] + part + data[offset + len(part) :]
            file.mtime_ns = self.platter.wall_ns()

        self._apply_gate("write", path, lambda: write_range(bytes(payload[: len(payload) // 2])))
        write_range(bytes(payload))

    def resize(self, path: StrPath, size: int) -> None:
        self._apply_gate("write", path)
        folder, name = self._parent_folder(path)
        node = folder.names.get(name)
        if isinstance(node, StoredFile):
            if len(node.data) != size:
                node.rewritten = node.rewritten or size < len(node.data)
                node.data = node.data[:size] + bytes(max(0, size - len(node.data)))
        else:
            self._apply_change(
                [(folder, name, StoredFile(bytes(size), self.platter.next_inode(), self.platter.wall_ns()))]
            )

    def open(self, path: StrPath) -> SimFile:
        if not self.is_file(path):
            self.resize(path, 0)
        return SimFile(self, path)

    def open_scratch(self, folder: StrPath) -> SimFile:
        # The file has a name here, until it is removed.
        return self.open(f"{os.fspath(folder)}/{os.urandom(16).hex()}.tmp")

    def sync(self, path: StrPath) -> None:
        node = self._find_node(path)
        if node is None and self._is_outside(path):
            return
        self._apply_gate("sync", path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if isinstance(node, StoredFile):
            node.safe, node.rewritten = node.data, False
            return
        kept = {index for index, change in enumerate(self.platter.changes) for each in change if each[0] is node}
        if kept:
            self.platter.sync_changes(kept)

    def replace(self, source: StrPath, target: StrPath) -> None:
        self._apply_gate("name", target)
        here, name = self._parent_folder(source)
        node = here.names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
        there, new = self._parent_folder(target)
        if isinstance(there.names.get(new), StoredFolder):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        self._apply_change([(here, name, None), (there, new, node)])

    def hard_link(self, source: StrPath, target: StrPath) -> None:
        # A file of the real disk counts as synced.
        self._apply_gate("name", target)
        if self._is_outside(source):
            data = REAL.read(source)
            node = StoredFile(data, self.platter.next_inode(), self.platter.wall_ns(), data)
        else:
            node = self._require_file(source)
        there, new = self._parent_folder(target)
        if new in there.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        self._apply_change([(there, new, node)])

    def symlink(self, target: str, path: StrPath) -> None:
        # Only to a name in the same folder.
        if "/" in target:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        self._apply_gate("name", path)
        there, new = self._parent_folder(path)
        if new in there.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._apply_change([(there, new, StoredSymlink(target, self.platter.next_inode()))])

    def read_link(self, path: StrPath) -> str | None:
        parts = self._path_parts(path)
        folder = self._node_at(parts[:-1])
        node = folder.names.get(parts[-1]) if isinstance(folder, StoredFolder) else None
        return node.target if isinstance(node, StoredSymlink) else None

    def unlink(self, path: StrPath) -> None:
        self._apply_gate("name", path)
        found = self._path_parts(path)
        folder = self._node_at(found[:-1])
        if isinstance(folder, StoredFolder) and found[-1] in folder.names:
            self._apply_change([(folder, found[-1], None)])

    def touch(self, path: StrPath) -> None:
        node = self._find_node(path)
        if isinstance(node, StoredFile):
            node.mtime_ns = self.platter.wall_ns()

    def set_mode(self, path: StrPath, mode: int) -> None:
        self._apply_gate("name", path)

    def make_folder(self, folder: StrPath) -> None:
        node: Node = self.platter.top
        for name in self._path_parts(folder):
            if not isinstance(node, StoredFolder):
                raise FileExistsError(errno.EEXIST, "File exists", str(folder))
            if name not in node.names:
                self._apply_gate("name", folder)
                self._apply_change([(node, name, StoredFolder(self.platter.next_inode()))])
            node = node.names[name]

    def remove(self, folder: StrPath) -> None:
        # Name by name, so that a process that ends here leaves a part.
        node = self._find_node(folder)
        if not isinstance(node, StoredFolder):
            return
        for name in list(node.names):
            if isinstance(node.names[name], StoredFolder):
                self.remove(f"{folder}/{name}")
            else:
                self.unlink(f"{folder}/{name}")
        self.unlink(folder)

    def clear_folder(self, folder: StrPath) -> None:
        self.remove(folder)
        self.make_folder(folder)

    def copy_untrusted(self, source: StrPath, target: StrPath, max_bytes: int) -> str:
        return self.copy(source, target)

    def is_locked(self, path: StrPath) -> bool:
        self._apply_gate("read", path)
        return bool(self.platter.locks.get(str(path)))

    def lock(self, path: StrPath, *, tries: int = 1) -> Lock | None:
        self._apply_gate("name", path)
        holders = self.platter.locks.setdefault(str(path), set())
        if holders:
            return None
        lock = SimLock(holders)
        self._held.append(lock)
        return lock

    def connect(self, path: StrPath, *, any_thread: bool = False) -> sqlite3.Connection:
        self._apply_gate("read", path)
        return self.platter.open_database(str(path)).open_connection(self._apply_gate)

    def _apply_gate(self, what: str, where: StrPath, part: Callable[[], None] = lambda: None) -> None:
        try:
            error = self._rate_limiter(what, where)
        except SimulatedCrash:
            part()
            raise
        if error is not None:
            if error.errno == errno.ENOSPC:
                part()
            raise error

    def _apply_change(self, change: Change) -> None:
        apply_change(change, safe=False)
        self.platter.changes.append(change)

    def _is_outside(self, path: StrPath) -> bool:
        return not os.fspath(path).startswith(self._root)

    def _path_parts(self, path: StrPath) -> list[str]:
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
            if type(node) is not StoredFolder:
                return None
            folder, node = node, node.names.get(name)
            while type(node) is StoredSymlink:
                node = folder.names.get(node.target)
        return node

    def _find_node(self, path: StrPath) -> Node | None:
        parts = self._paths.get(path if type(path) is str else os.fspath(path))
        if parts is not None:
            return self._node_at(parts)
        try:
            return self._node_at(self._path_parts(path))
        except OSError:
            return None

    def _require_file(self, path: StrPath) -> StoredFile:
        node = self._find_node(path)
        if not isinstance(node, StoredFile):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return node

    def _parent_folder(self, path: StrPath) -> tuple[StoredFolder, str]:
        parts = self._path_parts(path)
        folder = self._node_at(parts[:-1])
        if not isinstance(folder, StoredFolder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return folder, parts[-1]


def _file_info(name: str, node: Node) -> PathInfo:
    if isinstance(node, StoredFolder):
        return PathInfo(name, True, 0, 0, node.inode)
    assert isinstance(node, StoredFile)
    return PathInfo(name, False, len(node.data), node.mtime_ns, node.inode)
