"""Database with power failures: SQLite's files, with the write-ahead log cut after its last sync."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fedquilt.host.disk import StrPath

LOG: Final = "fedquilt.db-wal"  # name of the write-ahead log


class FaultyDatabase:
    def __init__(self, path: Path) -> None:
        self._stem, self._number = path, 0
        self.path, self._log = path, f"{path}-wal"
        self.unsynced: int | None = None  # bytes of the write-ahead log before the commit that is under way
        self._open: list[FaultyConnection] = []

    def write_file(self, payload: bytes) -> None:
        self.path.write_bytes(payload)

    def open_connection(self, ask: Callable[[str, StrPath], None]) -> FaultyConnection:
        made = sqlite3.connect(self.path, timeout=10, isolation_level=None, factory=FaultyConnection)
        made.assign(self, ask)
        self._open.append(made)
        return made

    @property
    def is_synced(self) -> bool:
        return self.unsynced is None and all(connection.synchronous for connection in self._open)

    def wal_bytes(self) -> int:
        try:
            return os.stat(self._log).st_size
        except FileNotFoundError:
            return 0

    def read_files(self) -> tuple[bytes, bytes]:
        wal = Path(self._log)
        return self.path.read_bytes() if self.path.exists() else b"", wal.read_bytes() if wal.exists() else b""

    def close(self) -> None:
        for connection in self._open:
            connection.close_at_crash()
        self._open.clear()

    def crash(self, roll: random.Random | None) -> None:
        if not self._open:
            return
        main, wal = self.read_files()
        safe = len(wal) if all(connection.synchronous for connection in self._open) else 0
        safe = min(safe, len(wal) if self.unsynced is None else self.unsynced)
        if roll is not None and len(wal) > safe:
            wal = wal[: roll.choice([safe, len(wal), roll.randint(safe, len(wal))])]
        self.close()
        self.path.unlink(missing_ok=True)
        self.restore((main, wal))

    def restore(self, image: tuple[bytes, bytes]) -> None:
        self._number += 1
        self.path = self._stem.with_name(f"{self._number}-{self._stem.name}")
        self._log = f"{self.path}-wal"
        self.path.write_bytes(image[0])
        if image[1]:
            Path(self._log).write_bytes(image[1])
        self.unsynced = None


class FaultyConnection(sqlite3.Connection):
    _base: FaultyDatabase
    _ask: Callable[[str, StrPath], None]
    synchronous = True  # SQLite's own default; a commit is on the disk when it returns

    def assign(self, base: FaultyDatabase, ask: Callable[[str, StrPath], None]) -> None:
        self._base, self._ask = base, ask

    def close_at_crash(self) -> None:
        super().close()

    def close(self) -> None:
        if self in self._base._open:
            self._base._open.remove(self)
        super().close()

    def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
        word = sql[:8].lstrip().split(" ", 1)[0].lower()
        if word == "pragma" and "synchronous" in sql:
            self.synchronous = "full" in sql
        if word not in ("insert", "update", "delete", "commit"):
            return super().execute(sql, *given)
        self._raise_fault("commit")
        ends = word == "commit" or not self.in_transaction  # only then the write-ahead log grows
        before = self._base.wal_bytes() if ends else 0
        found = super().execute(sql, *given)
        if ends:
            self._base.unsynced = before
            self._ask("sync", LOG)  # written, and not safe yet
            self._base.unsynced = None
        return found

    def _raise_fault(self, what: str) -> None:
        try:
            self._ask(what, "fedquilt.db")
        except OSError as error:
            said = "database or disk is full" if error.errno == errno.ENOSPC else "disk I/O error"
            raise sqlite3.OperationalError(said) from None
