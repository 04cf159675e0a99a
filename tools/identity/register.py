"""Register of an authority's certificates and tokens: one SQLite file, shared by the commands and the endpoint.

A token is stored only as its SHA-256.

"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedquilt.core import JobError, StoreError
from fedquilt.disk import PRIVATE

Kind = Literal["device", "coordinator", "server", "observer", "site"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS certificate (
  serial TEXT PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, key_id TEXT NOT NULL,
  issued_s REAL NOT NULL, ends_s REAL NOT NULL, revoked_s REAL, pem TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS certificate_name ON certificate (name);
CREATE TABLE IF NOT EXISTS token (
  digest TEXT PRIMARY KEY, pattern TEXT NOT NULL, made_s REAL NOT NULL, ends_s REAL NOT NULL,
  used_s REAL, device TEXT, key_id TEXT);
"""
PATTERN = re.compile(r"[a-z0-9*?][a-z0-9._*?-]{0,63}\Z")


class Issued(NamedTuple):
    """A certificate, as the register knows it; times in seconds since 1970."""

    serial: str  # hex, lower case
    name: str
    kind: Kind
    key_id: str
    issued_s: float
    ends_s: float
    revoked_s: float | None
    pem: str


class Token(NamedTuple):
    """A token that was given out: for which devices, until when, and who used it."""

    pattern: str
    made_s: float
    ends_s: float
    used_s: float | None
    device: str | None
    key_id: str | None

    @property
    def exact(self) -> bool:
        """Whether it names one device."""
        return not set("*?") & set(self.pattern)


class Register:
    """The register in a file, made where it is missing, readable by its owner alone. One thread at a time may use it.

    Raises:
        StoreError: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._db = PRIVATE.connect(path, any_thread=True)
            try:
                self._db.executescript(SCHEMA)
            except sqlite3.Error:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the register {path} cannot be opened ({error}): check the folder and its owner"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All that is written within is kept, or nothing; no other process writes meanwhile.

        Raises:
            StoreError: the disk is full or failing, or another process holds the register for 10 s.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"the register of certificates cannot be written: {error}; check the disk") from None

    # -- certificates --

    def add(self, issued: Issued) -> None:
        """Note an issued certificate."""
        self._db.execute("INSERT INTO certificate VALUES (?,?,?,?,?,?,?,?)", issued)

    def certificates(self, name: str | None = None) -> list[Issued]:
        """All, or all of a name, the oldest first."""
        where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
        rows = self._db.execute(f"SELECT * FROM certificate{where} ORDER BY issued_s, rowid", values)  # noqa: S608
        return [Issued(*row) for row in rows]

    def by_serial(self, serial: str) -> Issued | None:
        """Find a certificate by its serial number; None: unknown."""
        row = self._db.execute("SELECT * FROM certificate WHERE serial = ?", (serial,)).fetchone()
        return None if row is None else Issued(*row)

    def revoke(self, serial: str, now_s: float) -> None:
        """Mark a certificate as revoked."""
        self._db.execute("UPDATE certificate SET revoked_s = ? WHERE serial = ? AND revoked_s IS NULL", (now_s, serial))

    # -- tokens --

    def make_token(self, pattern: str, lasts_s: float, now_s: float) -> str:
        """A new token for one device whose id matches `pattern` (`*` and `?` stand for any), shown this once.

        Raises:
            JobError: a pattern that no device's id can match.
        """
        if not PATTERN.match(pattern):
            raise JobError(f"{pattern!r} is no device id, nor a pattern of ids such as 'orin-*'")
        token = secrets.token_urlsafe(24)
        row: tuple[Any, ...] = (_digest(token), pattern, now_s, now_s + lasts_s, None, None, None)
        with self.together():
            self._db.execute("INSERT INTO token VALUES (?,?,?,?,?,?,?)", row)
        return token

    def tokens(self) -> list[Token]:
        """All tokens, in the order of making."""
        rows = self._db.execute("SELECT pattern, made_s, ends_s, used_s, device, key_id FROM token ORDER BY made_s")
        return [Token(*row) for row in rows]

    def is_unused(self, text: str, now_s: float) -> bool:
        """Check that a token can still be redeemed by any key."""
        values = (_digest(text), now_s)
        row = self._db.execute("SELECT 1 FROM token WHERE digest = ? AND used_s IS NULL AND ends_s > ?", values)
        return row.fetchone() is not None

    def take_token(self, text: str, device: str, key_id: str, now_s: float) -> Token | str:
        """Use a token up, within `together`; or why it cannot be used, as a sentence.

        The same board (the same key) may present it again until it ends: its answer may have been lost.
        """
        row = self._db.execute(
            "SELECT pattern, made_s, ends_s, used_s, device, key_id FROM token WHERE digest = ?", (_digest(text),)
        ).fetchone()
        if row is None:
            return "this token is not known here: ask the operator for one (`fedquilt enrol token`)"
        token = Token(*row)
        if now_s >= token.ends_s:
            return f"this token ended at {stamp(token.ends_s)}: ask the operator for another"
        if not fnmatch.fnmatchcase(device, token.pattern):
            return f"this token is for {token.pattern}, not for {device}: ask the operator for another"
        if token.used_s is not None and (token.device, token.key_id) != (device, key_id):
            return f"this token was used at {stamp(token.used_s)}, and serves once: ask the operator for another"
        if token.used_s is None:
            values = (now_s, device, key_id, _digest(text))
            self._db.execute("UPDATE token SET used_s = ?, device = ?, key_id = ? WHERE digest = ?", values)
        return token

    def cancel_tokens(self, device: str) -> int:
        """Forget the tokens that were given out for this very device; how many could still have been used."""
        return self._db.execute("DELETE FROM token WHERE pattern = ? OR device = ?", (device, device)).rowcount


def stamp(at_s: float) -> str:
    """A moment in UTC, as people and programs read it."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # 192 random bits need no slow hash
