"""Locations of blobs besides the broker: the coordinator's HTTP server, and backends of outside packages."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fedquilt import open_metrics
from fedquilt.blobs.direct_transfers import Key, TransferBackend, TransferResult
from fedquilt.blobs.download import BlobWriter
from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.delivery.blobs.server import BlobServer
from fedquilt.core import BlobLocation, BlobRef, JobError
from fedquilt.host.http_server import ConnectionLimiter, ConnectionLimits, split_http_url
from fedquilt.security.handshake import LinkIdentity

JOBS_MOST: Final = 8  # transfers with a backend at once


class BlobBackend(Protocol):
    """Store of blobs outside fedquilt, such as a bucket. No call blocks.

    A package registers one by an entry point in the group `fedquilt.blobs`: a function that takes the address in
    `--blobs-backend NAME=ADDRESS` and returns an `OpenBackend`.
    """

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the locations from which a device can fetch a blob now."""
        ...

    def upload_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the locations to which a device can upload a blob now."""
        ...

    def uploaded_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the upload locations of a device, for the coordinator to fetch from."""
        ...

    def delete_upload(self, key: Key) -> None:
        """Delete a device's upload, which is fetched or cancelled."""
        ...

    def take_ready_blobs(self) -> list[Key]:
        """Return the blobs with new download locations since the last call, once per waiting device."""
        ...

    def handle_result(self, ended: TransferResult) -> bool:
        """Process the result of a transfer. Return whether the backend started the transfer."""
        ...


OpenBackend = Callable[[str, BlobStore, TransferBackend], BlobBackend]
"""Function that opens a backend, from the fleet's name, the blob store and the runner of the backend's transfers."""


@dataclass(frozen=True)
class BlobLocationSettings:
    """Settings of the locations at which the coordinator offers blobs.

    Args:
        listen: The address of the coordinator's own server, HOST:PORT, or None for no server.
        url: The URL of this server as devices reach it, or None for the host of `listen`.
        open_backend: The function that opens the backend of an outside package, or None for no backend.
        ca: The authority of the backend's certificate, in addition to those of the system.
        limits: The limits on connections to the own server.

    Raises:
        JobError: If an address is malformed, or devices cannot reach it.
    """

    listen: str | None = None
    url: str | None = None
    open_backend: OpenBackend | None = None
    ca: Path | None = None
    limits: ConnectionLimits = ConnectionLimits()

    def __post_init__(self) -> None:
        if self.listen is not None:
            host, _ = open_metrics.parse_listen_address(self.listen)
            if self.url is None and _is_wildcard_address(host):
                raise JobError(
                    f"--blobs-http {self.listen} listens at every address of this machine, and boards need one: name "
                    "it by --blobs-url, for instance https://coordinator.site:8443"
                )
        if self.url is not None:
            _require_server_url(self.url, self.listen is not None)

    def server_url(self, port: int, *, sealed: bool) -> str:
        """Return `url` or, without one, the listen address with `port`. The result has no trailing slash.

        Raises:
            JobError: If the scheme of `url` contradicts whether the fleet uses certificates.
        """
        scheme = "https" if sealed else "http"
        if self.url is None:
            host, _ = open_metrics.parse_listen_address(self.listen or "")
            return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if not self.url.startswith(f"{scheme}://"):
            why = "the coordinator has a certificate" if sealed else "the coordinator has no certificate (--cert)"
            raise JobError(f"--blobs-url {self.url}: {why}, so write {scheme}://")
        return self.url.rstrip("/")


class BlobLocationProvider(TransferBackend):
    """Transfers through the coordinator's own server and the backend of an outside package.

    Args:
        where: The locations to offer.
        depot: The blob store.
        allowed: The function that returns whether a device (first argument) may fetch a blob (sha256) now.
        identity: The certificates of the fleet, or None for an unsigned fleet.
        fleet: The name of the fleet.

    Raises:
        JobError: If the server cannot listen, or its URL does not match the fleet.
    """

    def __init__(
        self,
        where: BlobLocationSettings,
        depot: BlobStore,
        allowed: Callable[[str, str], bool],
        identity: LinkIdentity | None = None,
        fleet: str = "fleet",
    ) -> None:
        super().__init__(identity, where.ca, most=JOBS_MOST)
        self._backend = None if where.open_backend is None else where.open_backend(fleet, depot, self)
        self._first_own: dict[Key, int] = {}  # uploads -> index of the first place that is the own server
        self._server: BlobServer | None = None
        self._base = ""
        if where.listen is not None:
            host, port = open_metrics.parse_listen_address(where.listen)
            self._server = BlobServer(
                host, port, depot, allowed, self.add_result, identity, ConnectionLimiter(where.limits)
            )
            try:
                self._base = where.server_url(self._server.port, sealed=identity is not None)
            except JobError:
                self._server.close()
                raise

    @property
    def server_address(self) -> str:
        return self._base

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the backend's locations, then the own server's."""
        return (
            *(self._backend.download_locations(device, ref) if self._backend else ()),
            *self._own_locations(device, ref, None),
        )

    def upload_locations(self, device: str, intake: BlobWriter) -> tuple[BlobLocation, ...]:
        """Return the backend's locations, then the own server's."""
        stored = self._backend.upload_locations(device, intake.ref) if self._backend else ()
        self._first_own[device, intake.ref.sha256] = len(stored)
        return (*stored, *self._own_locations(device, intake.ref, intake))

    def uploaded_locations(self, device: str, ref: BlobRef, source: int) -> tuple[BlobLocation, ...]:
        """Return where the backend stores an upload, or nothing if location `source` is the own server."""
        if self._backend is None or source >= self._first_own.get((device, ref.sha256), 0):
            return ()
        return self._backend.uploaded_locations(device, ref)

    def take_ready_blobs(self) -> list[Key]:
        return [] if self._backend is None else self._backend.take_ready_blobs()

    def take_results(self) -> list[TransferResult]:
        """Return the results of transfers that the backend has not started."""
        found = super().take_results()
        return found if self._backend is None else [each for each in found if not self._backend.handle_result(each)]

    def close_locations(self, key: Key) -> None:
        """Delete a device's upload at the backend, and revoke its upload token."""
        self._first_own.pop(key, None)
        if self._backend is not None:
            self._backend.delete_upload(key)
        if self._server is not None:
            self._server.revoke_token(*key, put=True)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _own_locations(self, device: str, ref: BlobRef, intake: BlobWriter | None) -> tuple[BlobLocation, ...]:
        """Return the own server's location with a token, or nothing without a server."""
        if self._server is None:
            return ()
        token = self._server.issue_token(device, ref, intake)
        start = 0 if intake is None else intake.at
        return (BlobLocation(url=f"{self._base}/blobs/{ref.sha256}", token=token, start=start),)


def _is_wildcard_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _require_server_url(url: str, listens: bool) -> None:
    try:
        parts = split_http_url(url)
        fits = not parts.query and not parts.fragment and parts.path in ("", "/")
    except ValueError:
        fits = False
    if not fits:
        raise JobError(f"--blobs-url {url}: write the server's address as http[s]://HOST[:PORT]")
    if not listens:
        raise JobError("--blobs-url says how boards reach the server of --blobs-http: give that too")
