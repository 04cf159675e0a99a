"""Read-only access to a coordinator's home, for processes that watch it for long.

A reader writes nothing, and never blocks a coordinator, which may start and end meanwhile. A replaced database file is
detected.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.storage.rollout_log import RolloutLog
from fedquilt.coordinator.storage.rows import DatabaseIdentity, RowStore, database_errors, open_read_only
from fedquilt.coordinator.storage.store import Store, require_tables
from fedquilt.coordinator.storage.suspended_jobs import SuspendedJobs
from fedquilt.host.disk import REAL

NAME: Final = "fedquilt.db"


class ChangeDetector:
    """Cheap detector of writes to a database, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: DatabaseIdentity | None = None

    def read_version(self) -> object:
        """Return a value that changes with every write, or None if the database cannot be read."""
        try:
            found = DatabaseIdentity.from_path(self._path)
            if self._db is None or self._file != found:
                self.close()
                self._db, self._file = open_read_only(self._path), found
            return (*found, self._db.execute("pragma data_version").fetchone()[0])
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None


class StoreReader(Store):
    """Read-only `Store`. Methods that would write raise StoreError."""

    def __init__(self, home: Path) -> None:
        self.home, self._disk, self.damage = home, REAL, ""
        with database_errors(home):
            self._db = open_read_only(home / NAME)
            try:
                require_tables(self._db, home)
                self._rows = RowStore(self._db, home)
            except BaseException:
                self._db.close()
                raise
        self.rollouts = RolloutLog(self._db, self._rows, home, self._write_transaction)
        self.holds = SuspendedJobs(self._db, home, self._write_transaction, self._read_epoch)
        self.depot = BlobStore(home / "blobs", make=False)
        self._lock, self._waiting = None, None


def open_store(home: Path, *, durable: bool = True) -> Store:
    """Open a home, only for reading if this user cannot write there. Every method is as in `Store`."""
    writable = os.access(home, os.W_OK) and os.access(home / NAME, os.W_OK)
    return Store(home, durable=durable) if writable else StoreReader(home)
