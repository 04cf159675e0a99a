"""Address of a broker, and paths of the files with its credentials.

`Broker` contains all settings of a broker but no secrets: credentials are read from their files at each attempt to
connect, so that renewed certificates and passwords require no restart.
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from fedquilt.core import JobError

PORTS = {"mqtt": 1883, "mqtts": 8883}


def describe_exception(error: Exception) -> str:
    if reason := getattr(error, "reason", None):  # from OpenSSL
        return str(reason).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@dataclass(frozen=True)
class Broker:
    host: str
    port: int
    tls: bool = False
    user: str | None = None
    password_file: Path | None = None  # file with the password in the first line
    ca: Path | None = None  # CA file, or None for the system's authorities
    cert: Path | None = None
    key: Path | None = None
    keepalive_s: int = 60
    session_expiry_s: int = 3600  # time for which the broker keeps subscriptions and messages of an offline client

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        password_file: str | Path | None = None,
        keepalive_s: int = 60,
    ) -> Broker:
        """Return the broker at a URL `mqtt[s]://[user@]host[:port]`, or raise JobError for unusable options."""
        parts = _split_url(url)
        broker = cls(
            host=parts.hostname or "",
            port=parts.port or PORTS[parts.scheme],
            tls=parts.scheme == "mqtts",
            user=unquote(parts.username) if parts.username else None,
            password_file=_path_or_none(password_file),
            ca=_path_or_none(ca),
            cert=_path_or_none(cert),
            key=_path_or_none(key),
            keepalive_s=keepalive_s,
        )
        broker._validate()
        return broker

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

    def read_password(self) -> str | None:
        """Return the password, or None without a password file. Raise JobError if the file is unusable."""
        if self.password_file is None:
            return None
        try:
            with self.password_file.open(encoding="utf-8") as file:
                password = file.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"password file {self.password_file} cannot be read: {describe_exception(error)}") from None
        if not password:
            raise JobError(f"password file {self.password_file} is empty: write the password on its first line")
        return password

    def tls_context(self) -> ssl.SSLContext:
        if self.ca is not None and not _is_readable(self.ca):
            raise JobError(f"CA file {self.ca} cannot be read: check its path and permissions")
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except ssl.SSLError:
            raise JobError(f"CA file {self.ca} contains no certificate in PEM: use the ca.crt of the broker") from None
        if self.cert is None or self.key is None:
            return context
        for kind, path in (("certificate", self.cert), ("key", self.key)):
            if not _is_readable(path):
                raise JobError(f"{kind} file {path} cannot be read: check its path and permissions")
        try:
            context.load_cert_chain(str(self.cert), str(self.key), password=refuse_passphrase)
        except ssl.SSLError as error:
            raise JobError(
                f"certificate {self.cert} and key {self.key} cannot be used together ({describe_exception(error)}): "
                "use PEM files of one pair"
            ) from None
        return context

    def _validate(self) -> None:
        if (self.cert is None) != (self.key is None):
            present_option, missing_option = ("cert", "key") if self.key is None else ("key", "cert")
            raise JobError(f"{present_option} is given without {missing_option}: give both cert and key, or neither")
        if not self.tls and (self.ca or self.cert):
            raise JobError(f"{self} is not encrypted and cannot use ca, cert and key: write mqtts://")
        if self.password_file is not None and self.user is None:
            raise JobError(f"password file {self.password_file} has no user: write mqtt[s]://USER@host")
        if not 5 <= self.keepalive_s <= 65535:
            raise JobError(f"keepalive_s = {self.keepalive_s} is not from 5 to 65535 seconds")
        self.read_password()
        if self.tls:
            self.tls_context()


def _split_url(url: str) -> SplitResult:
    url_without_password = re.sub(r":[^/@]*@", ":***@", re.sub(r"^[^/]*//", lambda match: match[0], url))
    hint = "write mqtt[s]://[user@]host[:port]"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise JobError(f"broker URL {url_without_password!r}: {error}; {hint}") from None
    if parts.password is not None:
        raise JobError(
            f"broker URL {url_without_password!r} contains a password, which others could read: use a password file"
        )
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        raise JobError(f"broker URL {url_without_password!r} is invalid: {hint}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise JobError(f"broker URL {url_without_password!r} has text after the port: {hint}")
    return parts


def _path_or_none(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _is_readable(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK)


def refuse_passphrase() -> str:
    raise JobError("key is encrypted, and a daemon cannot enter a passphrase: use a key without passphrase, mode 0600")
