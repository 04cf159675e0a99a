"""Places of blobs beside the broker, as the coordinator names them to its boards: its own server, an object store."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt import open_metrics
from fedquilt.blobs.carriers import HTTP, Carriers, Ended, Key
from fedquilt.blobs.intake import Intake
from fedquilt.blobs.store import Depot
from fedquilt.connections import Connections, Limits
from fedquilt.coordinator.blob_server import BlobServer
from fedquilt.coordinator.object_store import Bucket
from fedquilt.coordinator.stored import Stored
from fedquilt.core import BlobRef, JobError, Profile, Source
from fedquilt.http_url import split_http_url
from fedquilt.transport.handshake import Identity

JOBS_MOST: Final = 8  # transfers with an object store at once


@dataclass(frozen=True)
class Where:
    """Options of an operator: the places at which the coordinator offers blobs.

    Args:
        listen: HOST:PORT of its own server; None: it has none.
        url: address by which boards reach that server; None: the host of `listen`.
        bucket: of an object store, with its keys; None: there is none.
        ca: authority of the store's certificate, beside those of the system.
        limits: limits on the connections of its own server.

    Raises:
        JobError: an address is malformed, or boards cannot reach it.
    """

    listen: str | None = None
    url: str | None = None
    bucket: Bucket | None = None
    ca: Path | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.listen is not None:
            host, _ = open_metrics.address(self.listen)
            if self.url is None and _anywhere(host):
                raise JobError(
                    f"--blobs-http {self.listen} listens at every address of this machine, and boards need one: name "
                    "it by --blobs-url, for instance https://coordinator.site:8443"
                )
        if self.url is not None:
            _require_url(self.url, self.listen is not None)

    def base(self, port: int, *, sealed: bool) -> str:
        """Address of the server that listens at `port`, without a slash at its end.

        Raises:
            JobError: the URL has TLS and the fleet has none, or the other way round.
        """
        scheme = "https" if sealed else "http"
        if self.url is None:
            host, _ = open_metrics.address(self.listen or "")
            return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if not self.url.startswith(f"{scheme}://"):
            why = "the coordinator has a certificate" if sealed else "the coordinator has no certificate (--cert)"
            raise JobError(f"--blobs-url {self.url}: {why}, so write {scheme}://")
        return self.url.rstrip("/")


class Places(Carriers):
    """Carriers of the coordinator, with its own server and an object store.

    Args:
        where: places to offer.
        depot: of the blobs.
        allowed: `allowed(device, sha256)`: whether a device may have a blob now.
        identity: certificates of the fleet; None: unsigned.
        fleet: name of the fleet.

    Raises:
        JobError: the server cannot listen, or an address does not fit.
    """

    def __init__(
        self,
        where: Where,
        depot: Depot,
        allowed: Callable[[str, str], bool],
        identity: Identity | None = None,
        fleet: str = "fleet",
    ) -> None:
        super().__init__(identity, where.ca, most=JOBS_MOST)
        self._stored = None
        if where.bucket is not None:
            self._stored = Stored(where.bucket, fleet, depot, self)
            self._stored.look()
        self._first_own: dict[Key, int] = {}  # uploads -> index of the first place that is the own server
        self._able: set[str] = set()  # devices whose profile lists the carrier "http"
        self._server: BlobServer | None = None
        self._base = ""
        if where.listen is not None:
            host, port = open_metrics.address(where.listen)
            self._server = BlobServer(host, port, depot, allowed, self.tell, identity, Connections(where.limits))
            try:
                self._base = where.base(self._server.port, sealed=identity is not None)
            except JobError:
                self._server.close()
                raise

    def said(self, profile: Profile) -> None:
        """Note the carriers in a device's profile."""
        (self._able.add if HTTP in profile.carriers else self._able.discard)(profile.device)

    @property
    def served(self) -> str:
        """Address at which blobs are served; "": none."""
        return self._base

    def offers(self, device: str, ref: BlobRef) -> tuple[Source, ...]:
        """See `Carriers`."""
        if device not in self._able:
            return ()
        return (*(self._stored.offers(device, ref) if self._stored else ()), *self._own(device, ref, None))

    def accepts(self, device: str, intake: Intake) -> tuple[Source, ...]:
        """See `Carriers`."""
        if device not in self._able:
            return ()
        stored = self._stored.accepts(device, intake.ref) if self._stored else ()
        self._first_own[device, intake.ref.sha256] = len(stored)
        return (*stored, *self._own(device, intake.ref, intake))

    def brought(self, device: str, ref: BlobRef, source: int) -> tuple[Source, ...]:
        """See `Carriers`."""
        if self._stored is None or source >= self._first_own.get((device, ref.sha256), 0):
            return ()
        return self._stored.brought(device, ref)

    def take_ready(self) -> list[Key]:
        """See `Carriers`."""
        return [] if self._stored is None else self._stored.take_ready()

    def take_ended(self) -> list[Ended]:
        """See `Carriers`."""
        found = super().take_ended()
        return found if self._stored is None else [each for each in found if not self._stored.take(each)]

    def over(self, key: Key) -> None:
        """See `Carriers`."""
        self._first_own.pop(key, None)
        if self._stored is not None:
            self._stored.over(key)
        if self._server is not None:
            self._server.revoke(*key, put=True)

    def close(self) -> None:
        """Stop the own server."""
        if self._server is not None:
            self._server.close()

    def _own(self, device: str, ref: BlobRef, intake: Intake | None) -> tuple[Source, ...]:
        if self._server is None:
            return ()
        token = self._server.grant(device, ref, intake)
        start = 0 if intake is None else intake.at
        return (Source(url=f"{self._base}/blobs/{ref.sha256}", token=token, start=start),)


def _anywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _require_url(url: str, listens: bool) -> None:
    try:
        parts = split_http_url(url)
        fits = not parts.query and not parts.fragment and parts.path in ("", "/")
    except ValueError:
        fits = False
    if not fits:
        raise JobError(f"--blobs-url {url}: write the server's address as http[s]://HOST[:PORT]")
    if not listens:
        raise JobError("--blobs-url says how boards reach the server of --blobs-http: give that too")
