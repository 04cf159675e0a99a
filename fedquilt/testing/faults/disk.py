"""A disk that lies: what was not synced may be lost or torn by a power failure, and any call may fail or be the last.

A `Platter` is what one computer keeps: it outlives the processes on it. A `SimDisk` is one process's way to it. Files
and folders are in memory, twice: as programs see them, and as they are after a power failure. A change of a folder's
names is lost or kept as a whole (a renamed file is never in both places, nor in none), in any combination with others
that were not synced either; of a file that was not synced, a power failure leaves the old bytes, the new ones, zeros,
or a mixture. Databases are SQLite's own files in a real folder: a power failure cuts the write-ahead log somewhere
after its last sync, and SQLite itself recovers from that.
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

from fedquilt.disk import REAL, Disk, Found, Lock, Place

Gate: TypeAlias = Callable[[str, Place], "OSError | None"]
"""Called before each call with what it does ("read", "write", "sync", "name", "commit") and where.

It returns the error that the call is to raise, or raises `Crash`.
"""

TORN_BYTES: Final = 64  # a file that was being written ends, or turns into zeros or old bytes, at a multiple of this


class Crash(BaseException):
    """The process is gone, in the middle of what it did. No `except Exception` may catch it."""


class File:
    """Bytes of a file: as programs see them, and as they are safe on the disk."""

    __slots__ = ("data", "inode", "mtime_ns", "safe")

    def __init__(self, data: bytes, inode: int, mtime_ns: int, safe: bytes | None = None) -> None:
        self.data, self.inode, self.mtime_ns, self.safe = data, inode, mtime_ns, safe


class Folder:
    """Names in a folder: as programs see them, and as they are safe on the disk."""

    __slots__ = ("inode", "names", "safe")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.names: dict[str, File | Folder] = {}
        self.safe: dict[str, File | Folder] = {}


Node: TypeAlias = File | Folder
Change: TypeAlias = list[tuple[Folder, str, Node | None]]  # names set or removed together


class Platter:
    """Everything that one computer keeps, below one folder.

    Args:
        root: absolute path that stands for its folder; paths elsewhere are the real disk's, to be read only.
        real: folder for databases, of its own.
        wall_ns: the computer's clock.
    """

    def __init__(self, root: str, real: Path, wall_ns: Callable[[], int] = lambda: 0) -> None:
        self.root, self.wall_ns = root.rstrip("/"), wall_ns
        self.top = Folder(0)
        self.changes: list[Change] = []  # of names, not synced yet
        self.locks: dict[str, set[SimLock]] = {}
        self.databases: dict[str, Database] = {}  # by path
        self.lost = 0  # files and names that power failures have taken
        self._real, self._inodes = real, 0

    def inode(self) -> int:
        """Number of a new file or folder."""
        self._inodes += 1
        return self._inodes

    def database(self, path: str) -> Database:
        """The database of a path, which is made with the first call."""
        if path not in self.databases:
            self.databases[path] = Database(self._real / f"{len(self.databases)}-{os.path.basename(path)}")
        return self.databases[path]

    def power_fails(self, roll: random.Random) -> None:
        """Lose what was not synced, or a part of it. No process may have survived."""
        way, upto = roll.random(), roll.randint(0, len(self.changes))
        kept = {index for index in range(len(self.changes)) if (index < upto if way < 0.5 else roll.random() < 0.5)}
        self.make_safe(kept)
        self.lost += len(self.changes)
        self.changes.clear()
        self._restore(self.top, roll)
        for database in self.databases.values():
            database.crash(roll)

    def make_safe(self, kept: set[int]) -> None:
        """Have these changes of names on the disk, and with each of them those before it that it builds on."""
        if len(kept) == len(self.changes):
            for change in self.changes:
                _apply(change, safe=True)
            self.changes.clear()
            return
        slots: set[tuple[int, str]] = set()
        for index in range(max(kept, default=-1), -1, -1):
            mine = [(folder.inode, name) for folder, name, _ in self.changes[index]]
            if index in kept or not slots.isdisjoint(mine):
                kept.add(index)
                slots.update(mine)
        left: list[Change] = []
        for index, change in enumerate(self.changes):
            if index in kept:
                _apply(change, safe=True)
            else:
                left.append(change)
        self.changes[:] = left

    def rot(self, place: float) -> bool:
        """Flip a bit of one of the files, by a number from 0 to 1; False: there is none."""
        files = [file for file in self._files(self.top) if file.data]
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

    def _files(self, folder: Folder) -> list[File]:
        found: list[File] = []
        for node in folder.names.values():
            found += self._files(node) if isinstance(node, Folder) else [node]
        return found

    def copy(self) -> tuple[Folder, dict[str, tuple[bytes, bytes]]]:
        """A copy of everything, for `restore`."""
        return deepcopy(self.top), {path: each.image() for path, each in self.databases.items()}

    def restore(self, copied: tuple[Folder, dict[str, tuple[bytes, bytes]]]) -> None:
        """Have the contents of a copy; no process may be running."""
        self.top = copied[0]
        self.changes.clear()
        for path, image in copied[1].items():
            self.databases[path].restore(image)

    def processes_end(self) -> None:
        """Close what a killed process had open; files stay as programs have left them."""
        for database in self.databases.values():
            database.crash(None)

    def _restore(self, folder: Folder, roll: random.Random) -> None:
        folder.names = dict(folder.safe)
        for node in folder.names.values():
            if isinstance(node, Folder):
                self._restore(node, roll)
            elif node.safe is None or node.safe is not node.data:
                self.lost += 1
                node.data = node.safe = torn(node.safe or b"", node.data, roll)


def torn(old: bytes, new: bytes, roll: random.Random) -> bytes:
    """What a power failure leaves of a file whose new bytes were not synced."""
    way = roll.random()
    if way < 0.3:
        return old
    if way < 0.5:
        return new
    cut = roll.randrange(len(new) // TORN_BYTES + 1) * TORN_BYTES
    if way < 0.75:
        return new[:cut]
    return new[:cut] + bytes(len(new) - cut) if way < 0.9 else new[:cut] + old[cut:]


def _apply(change: Change, *, safe: bool) -> None:
    for folder, name, node in change:
        names = folder.safe if safe else folder.names
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class SimLock(Lock):
    """A lock in memory."""

    def __init__(self, holders: set[SimLock], shared: bool) -> None:
        super().__init__(-1)
        self._holders, self.shared = holders, shared
        holders.add(self)

    def close(self) -> None:
        """Release it."""
        self._holders.discard(self)


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
        self._paths: dict[str, list[str]] = {}

    def end(self) -> None:
        """The process is gone: its locks are free."""
        for lock in self._held:
            lock.close()

    # -- what is there --

    def stat(self, path: Place) -> Found | None:
        """See `Disk`."""
        node = self._find(path)
        if node is None:
            return REAL.stat(path) if self._outside(path) else None
        return _found(self._parts(path)[-1], node)

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
        return [_found(name, each) for name, each in node.names.items()]

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

    def pieces(self, path: Place) -> Iterator[memoryview]:
        """See `Disk`."""
        yield memoryview(self.read(path))

    def data(self, path: Place) -> list[tuple[int, int]]:
        """See `Disk`: everything is data here."""
        size = len(self._file(path).data)
        return [(0, size)] if size else []

    # -- writing --

    def write(self, path: Place, payload: bytes, *, new: bool = False) -> None:
        """See `Disk`. A process that ends here, or a full disk, leaves a part."""
        folder, name = self._parent(path)
        known = folder.names.get(name)
        if new and known is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))

        def put(part: bytes) -> None:
            if isinstance(known, File):
                known.data, known.mtime_ns = part, self.platter.wall_ns()
            else:
                self._change([(folder, name, File(part, self.platter.inode(), self.platter.wall_ns()))])

        self._ask("write", path, lambda: put(payload[: len(payload) // 2]))
        put(bytes(payload))

    def write_at(self, path: Place, payload: bytes, offset: int) -> None:
        """See `Disk`."""
        file = self._file(path)

        def put(part: bytes) -> None:
            data = file.data + bytes(max(0, offset - len(file.data)))
            file.data = data[:offset] + part + data[offset + len(part) :]
            file.mtime_ns = self.platter.wall_ns()

        self._ask("write", path, lambda: put(payload[: len(payload) // 2]))
        put(bytes(payload))

    def resize(self, path: Place, size: int) -> None:
        """See `Disk`."""
        self._ask("write", path)
        folder, name = self._parent(path)
        node = folder.names.get(name)
        if isinstance(node, File):
            if len(node.data) != size:
                node.data = node.data[:size] + bytes(max(0, size - len(node.data)))
        else:
            self._change([(folder, name, File(bytes(size), self.platter.inode(), self.platter.wall_ns()))])

    def sync(self, path: Place) -> None:
        """See `Disk`."""
        if self._outside(path):
            return
        self._ask("sync", path)
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if isinstance(node, File):
            node.safe = node.data
            return
        kept = set()
        for index, change in enumerate(self.platter.changes):
            for folder, _, _ in change:
                if folder is node:
                    kept.add(index)
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

    def unlink(self, path: Place) -> None:
        """See `Disk`."""
        self._ask("name", path)
        found = self._parts(path)
        folder = self._walk(found[:-1])
        if isinstance(folder, Folder) and found[-1] in folder.names:
            self._change([(folder, found[-1], None)])

    def touch(self, path: Place) -> None:
        """See `Disk`."""
        node = self._find(path)
        if isinstance(node, File):
            node.mtime_ns = self.platter.wall_ns()

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

    # -- shared with other processes --

    def lock(self, path: Place, *, shared: bool = False, tries: int = 1) -> Lock | None:
        """See `Disk`: nobody waits here."""
        self._ask("name", path)
        holders = self.platter.locks.setdefault(str(path), set())
        if any(not (shared and other.shared) for other in holders):
            return None
        lock = SimLock(holders, shared)
        self._held.append(lock)
        return lock

    def connect(self, path: Place) -> sqlite3.Connection:
        """See `Disk`."""
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
        _apply(change, safe=False)
        self.platter.changes.append(change)

    def _outside(self, path: Place) -> bool:
        return not os.fspath(path).startswith(self._root)

    def _parts(self, path: Place) -> list[str]:
        text = path if isinstance(path, str) else os.fspath(path)
        known = self._paths.get(text)
        if known is None:
            if not text.startswith(self._root):
                raise OSError(errno.EROFS, "Read-only file system", text)
            known = self._paths[text] = [part for part in text[len(self._root) :].split("/") if part]
        return known

    def _walk(self, parts: list[str]) -> Node | None:
        node: Node | None = self.platter.top
        for name in parts:
            if not isinstance(node, Folder):
                return None
            node = node.names.get(name)
        return node

    def _find(self, path: Place) -> Node | None:
        try:
            return self._walk(self._parts(path))
        except OSError:
            return None

    def _file(self, path: Place) -> File:
        node = self._find(path)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return node

    def _parent(self, path: Place) -> tuple[Folder, str]:
        parts = self._parts(path)
        folder = self._walk(parts[:-1])
        if not isinstance(folder, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return folder, parts[-1]


def _found(name: str, node: Node) -> Found:
    if isinstance(node, Folder):
        return Found(name, True, 0, 0, node.inode)
    return Found(name, False, len(node.data), node.mtime_ns, node.inode)


# -- databases ------------------------------------------------------------------------------------


class Database:
    """SQLite's files of one database, and how much of its write-ahead log is safe."""

    def __init__(self, path: Path) -> None:
        self._stem, self._number = path, 0
        self.path = path
        self.unsynced: int | None = None  # bytes of the write-ahead log before the commit that is under way
        self._open: list[Connection] = []

    def write(self, payload: bytes) -> None:
        """Begin with these bytes of a database."""
        self.path.write_bytes(payload)

    def connect(self, ask: Callable[[str, Place], None]) -> Connection:
        """A connection of a process; `ask` decides about each of its statements that write."""
        made = sqlite3.connect(self.path, timeout=10, isolation_level=None, factory=Connection)
        made.begin(self, ask)
        self._open.append(made)
        return made

    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    def image(self) -> tuple[bytes, bytes]:
        """The database and its write-ahead log."""
        wal = Path(f"{self.path}-wal")
        return self.path.read_bytes() if self.path.exists() else b"", wal.read_bytes() if wal.exists() else b""

    def crash(self, roll: random.Random | None) -> None:
        """End all its processes; with `roll` the power fails as well."""
        if not self._open:
            return
        main, wal = self.image()
        safe = len(wal) if all(connection.synchronous for connection in self._open) else 0
        safe = min(safe, len(wal) if self.unsynced is None else self.unsynced)
        if roll is not None and len(wal) > safe:
            wal = wal[: roll.choice([safe, len(wal), roll.randint(safe, len(wal))])]
        for connection in self._open:
            connection.drop()
        self._open.clear()
        self.path.unlink(missing_ok=True)
        self.restore((main, wal))

    def restore(self, image: tuple[bytes, bytes]) -> None:
        """Have these contents; nobody may be connected."""
        self._number += 1
        self.path = self._stem.with_name(f"{self._number}-{self._stem.name}")
        self.path.write_bytes(image[0])
        if image[1]:
            Path(f"{self.path}-wal").write_bytes(image[1])
        self.unsynced = None


class Connection(sqlite3.Connection):
    """A process's connection to a database."""

    _base: Database
    _ask: Callable[[str, Place], None]
    synchronous = True  # SQLite's own default; a commit is on the disk when it returns

    def begin(self, base: Database, ask: Callable[[str, Place], None]) -> None:
        """Belong to a process."""
        self._base, self._ask = base, ask

    def drop(self) -> None:
        """Close it for a process that is gone."""
        super().close()

    def close(self) -> None:
        """Close it; the write-ahead log goes into the database."""
        if self in self._base._open:
            self._base._open.remove(self)
        super().close()

    def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
        """Execute a statement; one that writes may fail, or be the last."""
        word = sql[:8].lstrip().split(" ", 1)[0].lower()
        if word == "pragma" and "synchronous" in sql:
            self.synchronous = "full" in sql
        if word not in ("insert", "update", "delete", "commit"):
            return super().execute(sql, *given)
        self._try("commit")
        before = self._base.wal_bytes()
        found = super().execute(sql, *given)
        if not self.in_transaction:
            self._base.unsynced = before
            self._ask("sync", "fedquilt.db-wal")  # written, and not safe yet
            self._base.unsynced = None
        return found

    def _try(self, what: str) -> None:
        try:
            self._ask(what, "fedquilt.db")
        except OSError as error:
            said = "database or disk is full" if error.errno == errno.ENOSPC else "disk I/O error"
            raise sqlite3.OperationalError(said) from None
