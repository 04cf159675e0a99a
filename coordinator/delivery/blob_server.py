"""Blob transfers outside the broker: the coordinator's HTTP(S) server, and backends of other packages.

    GET  /blobs/<sha256>   with Range: bytes of a blob
    PUT  /blobs/<sha256>   with Content-Range: bytes from the upload's offset to the end of the blob
    HEAD /blobs/<sha256>   Upload-Offset: offset at which the upload continues

Each transfer has a token, which the device receives through the broker. In a fleet with certificates the device must
also present its certificate. A connection carries one request, and a device may open MAX_DEVICE_CONNECTIONS. Errors are
explained to the device, and requests are not logged.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fedquilt import metrics_endpoint
from fedquilt.blobs.direct_transfers import Key, TransferBackend, TransferResult, close_failed_transfer
from fedquilt.blobs.download import BlobWriter, ContentError, WriterClosedError
from fedquilt.blobs.http_client import STALL_TIMEOUT_S, read_pieces, send_file
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobLocation, BlobRef, JobError, StoreError
from fedquilt.host.http_server import (
    ConnectionLimiter,
    ConnectionLimits,
    HttpExchange,
    HttpServer,
    RequestRefusedError,
    split_http_url,
)
from fedquilt.security.handshake import LinkIdentity, common_name_of_peer

log = logging.getLogger("fedquilt.coordinator.blob_server")

# connections: a board has two transfers at once, and lost connections stay for a while
MAX_DEVICE_CONNECTIONS: Final = 8
MIN_BYTES_PER_S: Final = 1000.0  # pace by which the time for a transfer grows with its size
MAX_TRANSFERS_PER_GRANT: Final = 4  # most times that a blob is transferred for one grant, resumptions included
MAX_GRANTS: Final = 100_000
_PATH: Final = re.compile(r"/blobs/([0-9a-f]{64})\Z")
_RANGE: Final = re.compile(r"bytes=(\d{1,16})-(\d{0,16})\Z")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})\Z")


@dataclass
class AccessGrant:
    device: str
    ref: BlobRef
    writer: BlobWriter | None  # destination of an upload, or None for a download
    remaining_bytes: int  # bytes that may still be transferred


class BlobServer:
    """HTTP(S) server of a blob store, in separate threads.

    The server listens until `close`. Port 0 selects a free port. `may_fetch(device, sha256)` returns whether the device
    may fetch the blob now. `report_result` is called at the end of each upload, in another thread. Without an identity,
    a token is sufficient and devices present no certificate.
    """

    def __init__(
        self,
        host: str,
        port: int,
        blob_store: BlobStore,
        may_fetch: Callable[[str, str], bool],
        report_result: Callable[[TransferResult], None],
        identity: LinkIdentity | None = None,
        connections: ConnectionLimiter | None = None,
    ) -> None:
        self._blob_store = blob_store
        self._may_fetch = may_fetch
        self._report_result = report_result
        self._identity = identity
        self._grants: dict[str, AccessGrant] = {}  # by sha256 of the token
        self._tokens: dict[tuple[str, str, bool], str] = {}  # (device, blob, whether it is an upload) -> token
        self._lock = threading.Lock()
        self._connections = ConnectionLimiter() if connections is None else connections
        context = None if identity is None else self._tls_context
        self._http = HttpServer(host, port, self._serve_request, connections=self._connections, context=context)
        self._http.start()

    @property
    def port(self) -> int:
        return self._http.address[1]

    def issue_token(self, device: str, ref: BlobRef, writer: BlobWriter | None = None) -> str:
        """Return a token with which a device may fetch a blob, or upload the blob into `writer`.

        A repeated call for a fetch returns the same token, with its full allowance of bytes. For an upload, the earlier
        token is revoked. Above MAX_GRANTS tokens the oldest is revoked.
        """
        key = (device, ref.sha256, writer is not None)
        with self._lock:
            if writer is None and (earlier_token := self._tokens.get(key)) is not None:
                self._grants[_token_digest(earlier_token)].remaining_bytes = _granted_bytes(ref)
                return earlier_token
            if len(self._grants) >= MAX_GRANTS:
                self._remove_token(next(iter(self._tokens)))
            self._remove_token(key)
            token = self._tokens[key] = secrets.token_urlsafe(24)
            self._grants[_token_digest(token)] = AccessGrant(device, ref, writer, _granted_bytes(ref))
        return token

    def revoke_token(self, device: str, sha256: str, *, put: bool) -> None:
        with self._lock:
            self._remove_token((device, sha256, put))

    def close(self) -> None:
        self._http.close()

    def _remove_token(self, key: tuple[str, str, bool]) -> None:
        if (token := self._tokens.pop(key, None)) is not None:
            self._grants.pop(_token_digest(token), None)

    def _tls_context(self) -> ssl.SSLContext:
        assert self._identity is not None
        try:
            return self._identity.tls_context(server=True)
        except JobError as error:  # files that cannot be read now
            log.error("%s", error)
            raise OSError(str(error)) from None

    def _serve_request(self, exchange: HttpExchange) -> None:
        exchange.close_after()
        exchange.socket.settimeout(STALL_TIMEOUT_S)
        grant = self._require_grant(exchange)
        if not self._connections.assign_owner(exchange.connection, grant.device, MAX_DEVICE_CONNECTIONS):
            raise RequestRefusedError(
                503, f"too many connections: this device has {MAX_DEVICE_CONNECTIONS} open, close one first"
            )
        self._connections.begin_request(exchange.connection, grant.ref.size / MIN_BYTES_PER_S)
        self._transfer_blob(exchange, grant)

    def _require_grant(self, request: HttpExchange) -> AccessGrant:
        match = _PATH.match(request.path)
        if match is None or request.method not in ("GET", "HEAD", "PUT"):
            raise RequestRefusedError(404, "unknown address or method")
        sha256 = match[1]
        peer = common_name_of_peer(request.socket) if isinstance(request.socket, ssl.SSLSocket) else None
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        with self._lock:
            grant = self._grants.get(_token_digest(token)) if kind == "Bearer" else None
        if grant is None or peer not in (None, grant.device) or grant.ref.sha256 != sha256:
            raise RequestRefusedError(403, "the token is unknown, revoked, or for another device or blob")
        if (grant.writer is None) != (request.method == "GET"):
            raise RequestRefusedError(403, "the token permits the other direction of transfer only")
        if grant.writer is None and not self._may_fetch(grant.device, sha256):
            raise RequestRefusedError(403, "the blob is no longer offered to this device")
        return grant

    def _transfer_blob(self, request: HttpExchange, grant: AccessGrant) -> None:
        if grant.writer is None:
            return self._send_blob(request, grant)
        if request.method == "HEAD":
            return self._resume_upload(request, grant, grant.writer)
        return self._receive_blob(request, grant, grant.writer)

    def _resume_upload(self, request: HttpExchange, grant: AccessGrant, writer: BlobWriter) -> None:
        writer_id, due_range = writer.replace_writer(), writer.next_range()
        if due_range is None and not writer.is_finished:
            self._finish_upload(grant, writer, writer_id)
        request.send_response(204, {"Upload-Offset": str(grant.ref.size if due_range is None else due_range[0])})

    def _send_blob(self, request: HttpExchange, grant: AccessGrant) -> None:
        size = grant.ref.size
        start, end = _parse_range(request.headers.get("range"), size)
        self._require_bytes_left(grant)
        if not size:
            self._charge_bytes(grant, 1)  # an empty blob counts as one byte
        try:
            descriptor = self._blob_store.open_blob_file(grant.ref.sha256)
        except StoreError:
            raise RequestRefusedError(404, "the blob has been deleted") from None
        with open(descriptor, "rb", buffering=0):
            headers = {"Content-Length": str(end - start), "Accept-Ranges": "bytes"}
            if "range" in request.headers:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            request.send_response(206 if "range" in request.headers else 200, headers, None)
            send_file(request.socket, descriptor, start, end - start, lambda sent: self._charge_bytes(grant, sent))

    def _receive_blob(self, request: HttpExchange, grant: AccessGrant, writer: BlobWriter) -> None:
        match = _CONTENT_RANGE.match(request.headers.get("content-range", ""))
        if not request.size or match is None:
            raise RequestRefusedError(411, "Content-Length or Content-Range is missing or invalid")
        start, end, size = int(match[1]), int(match[2]) + 1, int(match[3])
        writer_id, due_range = writer.replace_writer(), writer.next_range()
        if (
            due_range is None
            or (start, end, size) != (due_range[0], grant.ref.size, grant.ref.size)
            or end - start != request.size
        ):
            raise RequestRefusedError(409, "Content-Range differs from the expected range: resume at Upload-Offset")
        self._require_bytes_left(grant)

        def write_piece(piece: memoryview) -> None:
            writer.write(piece, writer_id)
            self._charge_bytes(grant, len(piece))

        self._finish_upload(
            grant, writer, writer_id, lambda: read_pieces(request.open_body(), end - start, write_piece)
        )
        request.send_response(204)

    def _finish_upload(
        self, grant: AccessGrant, writer: BlobWriter, writer_id: int, receive: Callable[[], None] = lambda: None
    ) -> None:
        """Receive the rest of an upload, finish it and report the result. Refuse the request after a failure."""
        key = (grant.device, grant.ref.sha256)
        try:
            receive()
            writer.finish(writer_id)
        except WriterClosedError as error:
            raise RequestRefusedError(409, str(error)) from None
        except (ContentError, StoreError) as error:
            self._report_result(close_failed_transfer(key, writer, error))
            status = 409 if isinstance(error, ContentError) else 500
            raise RequestRefusedError(status, "the blob was not stored") from None
        self._report_result(TransferResult(key, writer, None))

    def _require_bytes_left(self, grant: AccessGrant) -> None:
        with self._lock:
            if grant.remaining_bytes <= 0:
                raise RequestRefusedError(429, "the blob was transferred too often with this token")

    def _charge_bytes(self, grant: AccessGrant, size: int) -> None:
        with self._lock:
            grant.remaining_bytes -= size


def _granted_bytes(ref: BlobRef) -> int:
    return MAX_TRANSFERS_PER_GRANT * max(ref.size, 1)


def _parse_range(header: str | None, size: int) -> tuple[int, int]:
    """Return the start and the exclusive end of the requested bytes, or raise RequestRefusedError."""
    if header is None:
        return 0, size
    match = _RANGE.match(header)
    start, end = (int(match[1]), min(int(match[2] or size) + 1, size)) if match else (size, size)
    if start >= end:
        raise RequestRefusedError(416, "Range must be one range of bytes within the blob")
    return start, end


def _token_digest(token: str) -> str:
    # Tokens are looked up by their digest, so that the time of a look-up reveals nothing about them.
    return hashlib.sha256(token.encode("latin-1", "replace")).hexdigest()


MAX_BACKEND_TRANSFERS: Final = 8  # transfers with a backend at once


class BlobBackend(Protocol):
    """Store of blobs outside fedquilt, such as a bucket. No call blocks.

    A package registers a backend by an entry point in the group `fedquilt.blobs`: a function that takes the address in
    `--blobs-backend NAME=ADDRESS` and returns an `OpenBackend`.
    """

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]: ...

    def upload_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]: ...

    def uploaded_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        """Return the locations from which the coordinator can fetch a device's upload."""

    def delete_upload(self, key: Key) -> None:
        """Delete a device's upload, after it was fetched or cancelled."""

    def take_ready_blobs(self) -> list[Key]:
        """Return the (device, sha256) of blobs that have new download locations since the last call."""

    def handle_result(self, ended: TransferResult) -> bool:
        """Process the result of a transfer. Return False if the transfer is not one of the backend's."""


OpenBackend = Callable[[str, BlobStore, TransferBackend], BlobBackend]
"""Function that opens a backend, from the fleet's name, the blob store and the runner of the backend's transfers."""


@dataclass(frozen=True)
class BlobLocationSettings:
    """Settings of the locations at which the coordinator offers blobs.

    Args:
        listen: The address of the coordinator's own server, HOST:PORT, or None for no server.
        url: The URL of this server as devices reach it, or None for the host of `listen`.
        open_backend: The function that opens the backend of another package, or None for no backend.
        ca: The authority of the backend's certificate, in addition to those of the system.
        limits: The limits on connections to the coordinator's own server.
    """

    listen: str | None = None
    url: str | None = None
    open_backend: OpenBackend | None = None
    ca: Path | None = None
    limits: ConnectionLimits = ConnectionLimits()

    def __post_init__(self) -> None:
        if self.listen is not None:
            host, _ = metrics_endpoint.parse_listen_address(self.listen)
            if self.url is None and _is_wildcard_address(host):
                raise JobError(
                    f"--blobs-http {self.listen} is not an address that devices can use: set --blobs-url, for "
                    "instance https://coordinator.site:8443"
                )
        if self.url is not None:
            _require_server_url(self.url, self.listen is not None)

    def server_url(self, port: int, *, is_encrypted: bool) -> str:
        """Return `url` or, without one, the listen address with `port`. The result has no trailing slash."""
        scheme = "https" if is_encrypted else "http"
        if self.url is None:
            host, _ = metrics_endpoint.parse_listen_address(self.listen or "")
            return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if not self.url.startswith(f"{scheme}://"):
            reason = (
                "the coordinator has a certificate" if is_encrypted else "the coordinator has no certificate (--cert)"
            )
            raise JobError(f"--blobs-url {self.url}: {reason}, so write {scheme}://")
        return self.url.rstrip("/")


class BlobLocationProvider(TransferBackend):
    """Blob transfers through the coordinator's own server and the backend of another package."""

    def __init__(
        self,
        location_settings: BlobLocationSettings,
        blob_store: BlobStore,
        may_fetch: Callable[[str, str], bool],
        identity: LinkIdentity | None = None,
        fleet: str = "fleet",
    ) -> None:
        super().__init__(identity, location_settings.ca, max_transfers=MAX_BACKEND_TRANSFERS)
        self._backend = (
            None if location_settings.open_backend is None else location_settings.open_backend(fleet, blob_store, self)
        )
        self._first_own: dict[Key, int] = {}  # upload -> index of the first location on the own server
        self._server: BlobServer | None = None
        self._base = ""
        if location_settings.listen is not None:
            host, port = metrics_endpoint.parse_listen_address(location_settings.listen)
            self._server = BlobServer(
                host,
                port,
                blob_store,
                may_fetch,
                self.add_result,
                identity,
                ConnectionLimiter(location_settings.limits),
            )
            try:
                self._base = location_settings.server_url(self._server.port, is_encrypted=identity is not None)
            except JobError:
                self._server.close()
                raise

    @property
    def server_address(self) -> str:
        return self._base

    def download_locations(self, device: str, ref: BlobRef) -> tuple[BlobLocation, ...]:
        return (
            *(self._backend.download_locations(device, ref) if self._backend else ()),
            *self._own_locations(device, ref, None),
        )

    def upload_locations(self, device: str, writer: BlobWriter) -> tuple[BlobLocation, ...]:
        backend_locations = self._backend.upload_locations(device, writer.ref) if self._backend else ()
        self._first_own[device, writer.ref.sha256] = len(backend_locations)
        return (*backend_locations, *self._own_locations(device, writer.ref, writer))

    def uploaded_locations(self, device: str, ref: BlobRef, location_index: int) -> tuple[BlobLocation, ...]:
        """Return where the backend stores an upload, or () if the device used the coordinator's own server.

        `location_index` is the index of the location that the device used.
        """
        if self._backend is None or location_index >= self._first_own.get((device, ref.sha256), 0):
            return ()
        return self._backend.uploaded_locations(device, ref)

    def take_ready_blobs(self) -> list[Key]:
        return [] if self._backend is None else self._backend.take_ready_blobs()

    def take_results(self) -> list[TransferResult]:
        """Return the results of transfers. Those of the backend are passed to the backend instead."""
        results = super().take_results()
        backend = self._backend
        return results if backend is None else [result for result in results if not backend.handle_result(result)]

    def close_locations(self, key: Key) -> None:
        """Forget the locations of a device's upload, delete it from the backend, and revoke its token."""
        self._first_own.pop(key, None)
        if self._backend is not None:
            self._backend.delete_upload(key)
        if self._server is not None:
            self._server.revoke_token(*key, put=True)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _own_locations(self, device: str, ref: BlobRef, writer: BlobWriter | None) -> tuple[BlobLocation, ...]:
        if self._server is None:
            return ()
        token = self._server.issue_token(device, ref, writer)
        start = 0 if writer is None else writer.offset
        return (BlobLocation(url=f"{self._base}/blobs/{ref.sha256}", token=token, start=start),)


def _is_wildcard_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _require_server_url(url: str, has_server: bool) -> None:
    try:
        parts = split_http_url(url)
        is_valid = not parts.query and not parts.fragment and parts.path in ("", "/")
    except ValueError:
        is_valid = False
    if not is_valid:
        raise JobError(f"--blobs-url {url}: write the server's address as http[s]://HOST[:PORT]")
    if not has_server:
        raise JobError("--blobs-url has no effect without --blobs-http: set both")
