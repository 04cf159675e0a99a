"""A coordinator's folder opened for reading alone, by a process that watches it for long.

Nothing is written, not even the tables of an earlier version; nobody waits for a reader, and a coordinator may begin,
write and end meanwhile. A database that was put in the place of the one that was opened is noticed.
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
from fedquilt.coordinator.store_rows import Identity, Rows, readable, storing
from fedquilt.core import StoreError
from fedquilt.disk import REAL

NAME: Final = "fedquilt.db"


class Mark:
    """Tells cheaply whether anybody has written to a database since it was last asked.

    Args:
        path: of the database, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: Identity | None = None

    def now(self) -> object:
        """A value that differs from the one before after every change; None: there is nothing to read."""
        try:
            found = Identity.of(self._path)
            if self._db is None or self._file != found:
                self.close()
                self._db, self._file = readable(self._path), found
            return (*found, self._db.execute("pragma data_version").fetchone()[0])
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def close(self) -> None:
        """Close the database."""
        if self._db is not None:
            self._db.close()
        self._db = None


class Reader(Store):
    """Reads one coordinator's folder; whatever would write raises StoreError.

    Raises, from every method:
        StoreError: the database cannot be read.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._disk, self.damage = home, REAL, ""
        with storing(home):
            self._db = readable(home / NAME)
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
        self.holds = Holds(self._db, home, self._write_transaction, self._epoch)
        self.depot = Depot(home / "blobs", make=False)
        self._lock, self._waiting = None, None
