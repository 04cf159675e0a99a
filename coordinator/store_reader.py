"""A coordinator's folder opened for reading alone, by a process that watches it for long.

Nothing is written, not even the tables of an earlier version; nobody waits for a reader, and a coordinator may begin,
write and end meanwhile. A database that was put in the place of the one that was opened is noticed.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Final

from fedquilt.blobs.store import Depot
from fedquilt.coordinator import store_tables
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.store_rows import Rows, storing
from fedquilt.core import StoreError
from fedquilt.disk import REAL

NAME: Final = "fedquilt.db"
BUSY_S: Final = 5.0


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that cannot be written through this connection.

    Raises:
        sqlite3.Error: there is none, or it cannot be read.
    """
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)


class Mark:
    """Tells cheaply whether anybody has written to a database since it was last asked.

    Args:
        path: of the database, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def now(self) -> object:
        """A value that differs from the one before after every change; None: there is nothing to read."""
        try:
            found = os.stat(self._path)
            if self._db is None or self._file != (found.st_dev, found.st_ino):
                self.close()
                self._db, self._file = connect(self._path), (found.st_dev, found.st_ino)
            return (*self._file, self._db.execute("pragma data_version").fetchone()[0])
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
            self._db = connect(home / NAME)
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
        self.depot = Depot(home / "blobs", make=False)
        self._lock, self._waiting = None, None

    def served(self) -> bool:
        """Whether a coordinator holds this folder; asked without making its lock file."""
        with storing(self.home):
            try:
                file = os.open(self.home / "lock", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(file)
        return False
