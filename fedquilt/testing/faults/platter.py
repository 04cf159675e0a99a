"""File system with two views: as programs see files, and as they are after a power failure.

A change of a folder's names is lost or kept as a whole, in any combination with other unsynced changes. Of an unsynced
file, a power failure leaves the old bytes, the new bytes, zeros, or a mixture. Synced bytes that a later write did not
change are kept.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Final, TypeAlias

from fedquilt.host.disk import Lock
from fedquilt.testing.faults.database import FaultyDatabase

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
        """Lose all or some unsynced data. No process may be running."""
        way, upto = roll.random(), roll.randint(0, len(self.changes))
        kept = {index for index in range(len(self.changes)) if (index < upto if way < 0.5 else roll.random() < 0.5)}
        self.sync_changes(kept)
        self.lost += len(self.changes)
        self.changes.clear()
        self._lose_unsynced(self.top, roll)
        for database in self.databases.values():
            database.crash(roll)

    def sync_changes(self, kept: set[int]) -> None:
        """Sync some changes of names, and all earlier changes on which these depend."""
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
        """Set a folder to what a power failure leaves: synced names, and unsynced files torn at random."""
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
    """Mark all files and names below a folder as synced."""
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
    """Return the torn bytes of a file, with the blocks that its last change left as they were."""
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
