"""Register of certificates and tokens in an SQLite file for commands and server.

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
from typing import Any, Final, Literal, NamedTuple

from fedquilt.core import JobError, StoreError
from fedquilt.host.disk import PRIVATE

Kind = Literal["device", "coordinator", "server", "observer", "site"]

TOKEN_VALIDITY_S: Final = 72 * 3600.0  # validity of a one-time token
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


class IssuedCertificate(NamedTuple):
    serial: str  # hex, lower case
    name: str
    kind: Kind
    key_id: str
    issued_s: float
    ends_s: float
    revoked_s: float | None
    pem: str


class EnrolmentToken(NamedTuple):
    pattern: str
    made_s: float
    ends_s: float
    used_s: float | None
    device: str | None
    key_id: str | None

    @property
    def is_exact(self) -> bool:
        return not set("*?") & set(self.pattern)


class CertificateRegister:
    """Register of an authority in a file that only its owner can read. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = PRIVATE.connect(path, any_thread=True)
            try:
                self._db.executescript(SCHEMA)
            except sqlite3.Error:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"register {path} cannot be opened ({error}): check the folder and its owner") from None

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction that excludes other processes. Raise StoreError if the disk fails."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"register of certificates cannot be written ({error}): check the disk") from None

    # -- certificates --

    def add_certificate(self, certificate: IssuedCertificate) -> None:
        self._db.execute("INSERT INTO certificate VALUES (?,?,?,?,?,?,?,?)", certificate)

    def list_certificates(self, name: str | None = None) -> list[IssuedCertificate]:
        """Return all certificates, or those of one name, oldest first. Revoked and expired ones are included."""
        condition, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
        rows = self._db.execute(f"SELECT * FROM certificate{condition} ORDER BY issued_s, rowid", values)  # noqa: S608
        return [IssuedCertificate(*row) for row in rows]

    def list_valid_certificates(
        self, now_s: float, *, name: str | None = None, kind: Kind | None = None
    ) -> list[IssuedCertificate]:
        return [
            cert
            for cert in self.list_certificates(name)
            if cert.revoked_s is None and cert.ends_s > now_s and kind in (None, cert.kind)
        ]

    def has_revoked_certificate(self, name: str, now_s: float) -> bool:
        """Return whether a certificate of this name is revoked and has not expired."""
        return any(cert.revoked_s is not None and cert.ends_s > now_s for cert in self.list_certificates(name))

    def find_by_serial(self, serial: str) -> IssuedCertificate | None:
        row = self._db.execute("SELECT * FROM certificate WHERE serial = ?", (serial,)).fetchone()
        return None if row is None else IssuedCertificate(*row)

    def revoke_certificate(self, serial: str, now_s: float) -> None:
        self._db.execute("UPDATE certificate SET revoked_s = ? WHERE serial = ? AND revoked_s IS NULL", (now_s, serial))

    # -- tokens --

    def create_token(self, pattern: str, validity_s: float, now_s: float) -> str:
        """Store and return a token for one device of a pattern, or raise JobError for an invalid pattern.

        The caller must hold a `transaction` and write the token's file in it, so that an error leaves no token.
        """
        if not PATTERN.match(pattern):
            raise JobError(f"{pattern!r} is neither a device id nor a pattern: write one such as orin-01 or 'orin-*'")
        token = secrets.token_urlsafe(24)
        row: tuple[Any, ...] = (_hash_token(token), pattern, now_s, now_s + validity_s, None, None, None)
        self._db.execute("INSERT INTO token VALUES (?,?,?,?,?,?,?)", row)
        return token

    def list_tokens(self) -> list[EnrolmentToken]:
        rows = self._db.execute("SELECT pattern, made_s, ends_s, used_s, device, key_id FROM token ORDER BY made_s")
        return [EnrolmentToken(*row) for row in rows]

    def is_redeemable(self, text: str, now_s: float) -> bool:
        values = (_hash_token(text), now_s)
        row = self._db.execute("SELECT 1 FROM token WHERE digest = ? AND used_s IS NULL AND ends_s > ?", values)
        return row.fetchone() is not None

    def redeem_token(self, text: str, device: str, key_id: str, now_s: float) -> EnrolmentToken:
        """Mark a token as used and return the token, or raise JobError with the reason for a refusal.

        The same device with the same key may redeem a token again until its end, because the response may have been
        lost. The caller must hold a `transaction`.
        """
        row = self._db.execute(
            "SELECT pattern, made_s, ends_s, used_s, device, key_id FROM token WHERE digest = ?", (_hash_token(text),)
        ).fetchone()
        if row is None:
            raise JobError("token is unknown: request one from the operator (`fedquilt identity token`)")
        token = EnrolmentToken(*row)
        if now_s >= token.ends_s:
            raise JobError(f"token expired at {format_time(token.ends_s)}: request another from the operator")
        if not fnmatch.fnmatchcase(device, token.pattern):
            raise JobError(f"token is for {token.pattern}, not for {device}: request another from the operator")
        if token.used_s is not None and (token.device, token.key_id) != (device, key_id):
            raise JobError(f"token was used at {format_time(token.used_s)}: request another from the operator")
        if token.used_s is None:
            values = (now_s, device, key_id, _hash_token(text))
            self._db.execute("UPDATE token SET used_s = ?, device = ?, key_id = ? WHERE digest = ?", values)
        return token

    def delete_tokens(self, device: str) -> int:
        """Delete tokens made for this name or pattern, or used by this device. Return how many."""
        return self._db.execute("DELETE FROM token WHERE pattern = ? OR device = ?", (device, device)).rowcount


def format_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()  # 192 random bits need no slow hash
