"""Read-only access to a coordinator's home, for processes that watch it for long.

A reader writes nothing, does not upgrade tables, and never blocks a coordinator, which may start and end meanwhile. A
replaced database file is detected.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import store_tables
from fedquilt.coordinator.holds import Holds
from fedquilt.coordinator.rollout_log import RolloutLog
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.store_rows import Identity, Rows, open_read_only, storing
from fedquilt.core import StoreError
from fedquilt.disk import REAL

NAME: Final = "fedquilt.db"


class Mark:
    """Cheap detector of writes to a database, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: Identity | None = None

    def read_version(self) -> object:
        """Return a value that changes with every write, or None if the database cannot be read."""
        try:
            found = Identity.from_path(self._path)
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


class Reader(Store):
    """Read-only `Store`. Methods that would write raise StoreError."""

    def __init__(self, home: Path) -> None:
        self.home, self._disk, self.damage = home, REAL, ""
        with storing(home):
            self._db = open_read_only(home / NAME)
            try:
                found = int(self._db.execute("pragma user_version").fetchone()[0])
                self._rows = Rows(self._db, home)
            except BaseException:
                self._db.close()
                raise
        if found != store_tables.VERSION:
            self._db.close()
            raise StoreError(
                f"{home} has tables of version {found}, and this fedquilt reads {store_tables.VERSION}: "
                f"`fedquilt ls --home {home}` brings earlier ones up to date; for later ones install that version"
            )
        self.rollouts = RolloutLog(self._db, self._rows, home, self._write_transaction)
        self.holds = Holds(self._db, home, self._write_transaction, self._read_epoch)
        self.depot = Depot(home / "blobs", make=False)
        self._lock, self._waiting = None, None
