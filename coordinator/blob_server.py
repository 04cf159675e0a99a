"""The coordinator's own HTTP(S) server of blobs: boards fetch what they are given, and put what they were asked for.

    GET  /blobs/<sha256>   with Range: the bytes of a blob
    PUT  /blobs/<sha256>   with Content-Range: the bytes from where the upload stands to its end
    HEAD /blobs/<sha256>   Upload-Offset: where the upload stands

Each transfer has a token of its own, which the board got by the broker; in a fleet with certificates it has to show its
own besides. A connection has one request, and a board has PER_BOARD connections at once. Errors are explained to the
board; nothing of a request is logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedquilt.blobs.carriers import Ended, missed
from fedquilt.blobs.intake import ClosedError, ContentError, Intake
from fedquilt.blobs.over_http import STALL_S, pour, send_file
from fedquilt.blobs.store import Depot
from fedquilt.connections import Connections
from fedquilt.core import BlobRef, JobError, StoreError
from fedquilt.http_server import Exchange, HttpServer, RefusedError
from fedquilt.transport.handshake import Identity, peer_of

log = logging.getLogger("fedquilt.coordinator.blobs")

PER_BOARD: Final = 8  # connections: a board has two transfers at once, and lost connections stay for a while
LEAST_BYTES_PER_S: Final = 1000.0  # pace by which the time for a transfer grows with its size
AGAIN_MOST: Final = 4  # most times that a blob is transferred for one grant, resumptions included
GRANTS_MOST: Final = 100_000
_PATH: Final = re.compile(r"/blobs/([0-9a-f]{64})\Z")
_RANGE: Final = re.compile(r"bytes=(\d{1,16})-(\d{0,16})\Z")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})\Z")


@dataclass
class Grant:
    """Permission that a token stands for: one blob, for one device."""

    device: str
    ref: BlobRef
    intake: Intake | None  # takes the device's bytes; None: the device fetches
    left_bytes: int  # that may still be transferred


class BlobServer:
    """Server of a depot's blobs, in threads of its own, which listens until `close`.

    Args:
        host, port: address to listen at; port 0: any that is free.
        depot: of the blobs.
        allowed: `allowed(device, sha256)`: whether a device may have a blob now.
        tell: called with the end of each upload, from another thread.
        identity: certificates of the fleet; None: no TLS, and a token is all that a board has to show.
        connections: limits on the connections.

    Raises:
        JobError: the address cannot be listened at.
    """

    def __init__(
        self,
        host: str,
        port: int,
        depot: Depot,
        allowed: Callable[[str, str], bool],
        tell: Callable[[Ended], None],
        identity: Identity | None = None,
        connections: Connections | None = None,
    ) -> None:
        self._depot, self._allowed, self._tell, self._identity = depot, allowed, tell, identity
        self._grants: dict[str, Grant] = {}  # sha256 of a token -> its grant
        self._tokens: dict[tuple[str, str, bool], str] = {}  # (device, blob, whether it is an upload) -> token
        self._lock = threading.Lock()
        self._connections = Connections() if connections is None else connections
        context = None if identity is None else self._tls_context
        try:
            self._http = HttpServer(host, port, self._serve_request, connections=self._connections, context=context)
        except OSError as error:
            raise JobError(f"blobs cannot be served at {host}:{port} ({error}): choose another HOST:PORT") from None
        self._http.start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return self._http.address[1]

    def grant(self, device: str, ref: BlobRef, intake: Intake | None = None) -> str:
        """Token for one device to fetch a blob, or to upload it into an intake; an earlier intake's token ends."""
        key = (device, ref.sha256, intake is not None)
        with self._lock:
            if intake is None and (known := self._tokens.get(key)) is not None:
                self._grants[_digest(known)].left_bytes = AGAIN_MOST * ref.size
                return known
            if len(self._grants) >= GRANTS_MOST:
                self._revoke(next(iter(self._tokens)))
            self._revoke(key)
            token = self._tokens[key] = secrets.token_urlsafe(24)
            self._grants[_digest(token)] = Grant(device, ref, intake, AGAIN_MOST * ref.size)
        return token

    def revoke(self, device: str, sha256: str, *, put: bool) -> None:
        """End a token, if there is one."""
        with self._lock:
            self._revoke((device, sha256, put))

    def close(self) -> None:
        """Stop listening. Running transfers end with the process."""
        self._http.close()

    def _revoke(self, key: tuple[str, str, bool]) -> None:
        if (token := self._tokens.pop(key, None)) is not None:
            self._grants.pop(_digest(token), None)

    # -- requests --

    def _tls_context(self) -> ssl.SSLContext:
        """Return the server's TLS context. Raise OSError if the files of the identity cannot be read."""
        assert self._identity is not None
        try:
            return self._identity.context(server=True)
        except JobError as error:  # files that cannot be read now
            log.error("%s", error)
            raise OSError(str(error)) from None

    def _serve_request(self, exchange: Exchange) -> None:
        """Check the token and the device's connection limit, then transfer the blob."""
        exchange.close_after()
        exchange.socket.settimeout(STALL_S)
        grant = self._require_grant(exchange)
        if not self._connections.assign_owner(exchange.connection, grant.device, PER_BOARD):
            raise RefusedError(503, f"you have {PER_BOARD} connections open here: let one end first")
        self._connections.begin_request(exchange.connection, grant.ref.size / LEAST_BYTES_PER_S)
        self._transfer_blob(exchange, grant)

    def _require_grant(self, request: Exchange) -> Grant:
        """Return the grant of the request's token. Raise RefusedError if it does not allow this request."""
        found = _PATH.match(request.path)
        if found is None or request.method not in ("GET", "HEAD", "PUT"):
            raise RefusedError(404, "there is nothing at this address")
        sha256, peer = found[1], peer_of(request.socket) if isinstance(request.socket, ssl.SSLSocket) else None
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        with self._lock:
            grant = self._grants.get(_digest(token)) if kind == "Bearer" else None
        if grant is None or peer not in (None, grant.device) or grant.ref.sha256 != sha256:
            raise RefusedError(403, "this token does not open this blob for you, or not any more")
        if (grant.intake is None) != (request.method == "GET"):
            raise RefusedError(403, "this token is for the other way")
        if grant.intake is None and not self._allowed(grant.device, sha256):
            raise RefusedError(403, "the blob is not offered to you any more")
        return grant

    def _transfer_blob(self, request: Exchange, grant: Grant) -> None:
        """Send or receive a blob, or answer HEAD with the offset at which an upload continues."""
        if grant.intake is None:
            return self._send_blob(request, grant)
        if request.method == "HEAD":
            turn = grant.intake.turn()  # bytes of an earlier connection are refused from now on
            due = grant.intake.due()
            if due is None and not grant.intake.finished:
                self._end_upload(grant, grant.intake, turn)
            return request.answer(204, {"Upload-Offset": str(grant.ref.size if due is None else due[0])})
        return self._receive_blob(request, grant, grant.intake)

    def _send_blob(self, request: Exchange, grant: Grant) -> None:
        """Send the requested bytes of a blob, and charge them to the grant."""
        size = grant.ref.size
        start, end = _parse_range(request.headers.get("range"), size)
        self._charge_bytes(grant, 0)
        try:
            file = self._depot.opened(grant.ref.sha256)
        except StoreError:
            raise RefusedError(404, "the blob is not here any more") from None
        with open(file, "rb", buffering=0):
            headers = {"Content-Length": str(end - start), "Accept-Ranges": "bytes"}
            if "range" in request.headers:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            request.answer(206 if "range" in request.headers else 200, headers, None)
            send_file(request.socket, file, start, end - start, lambda sent: self._charge_bytes(grant, sent))

    def _receive_blob(self, request: Exchange, grant: Grant, intake: Intake) -> None:
        """Receive the bytes of a blob that are due, and report the end of the upload."""
        found = _CONTENT_RANGE.match(request.headers.get("content-range", ""))
        if not request.size or found is None:
            raise RefusedError(411, "say by Content-Length and Content-Range how many bytes come, and which")
        start, end, size = int(found[1]), int(found[2]) + 1, int(found[3])
        turn, due = intake.turn(), intake.due()
        if due is None or (start, end, size) != (due[0], grant.ref.size, grant.ref.size) or end - start != request.size:
            raise RefusedError(409, "these are not the bytes that are due")
        self._charge_bytes(grant, 0)

        def take(piece: memoryview) -> None:
            intake.write(piece, turn)
            self._charge_bytes(grant, len(piece))

        self._end_upload(grant, intake, turn, lambda: pour(request.open_body(), end - start, take))
        request.answer(204)

    def _end_upload(self, grant: Grant, intake: Intake, turn: int, receive: Callable[[], None] = lambda: None) -> None:
        """Receive the last bytes of a blob, if they are not here, and report the end of the upload."""
        key = (grant.device, grant.ref.sha256)
        try:
            receive()
            intake.finish(turn)
        except ClosedError as error:
            raise RefusedError(409, str(error)) from None
        except (ContentError, StoreError) as error:
            self._tell(missed(key, intake, error))
            raise RefusedError(409 if isinstance(error, ContentError) else 500, "the blob was not taken") from None
        self._tell(Ended(key, intake, None))

    def _charge_bytes(self, grant: Grant, size: int) -> None:
        """Subtract transferred bytes from a grant. Refuse a new request (size 0) once none are left."""
        with self._lock:
            grant.left_bytes -= size
            if grant.left_bytes <= 0 and not size:
                raise RefusedError(429, "the blob has been asked for too often")


def _parse_range(asked: str | None, size: int) -> tuple[int, int]:
    """Return the start and end of the bytes that a Range header requests, or of the whole blob without one."""
    if asked is None:
        return 0, size
    found = _RANGE.match(asked)
    start, end = (int(found[1]), min(int(found[2] or size) + 1, size)) if found else (size, size)
    if start >= end:
        raise RefusedError(416, "one range of bytes within the blob, please")
    return start, end


def _digest(token: str) -> str:
    """Digest under which a token is looked up, so that the time of a look-up reveals nothing about tokens."""
    return hashlib.sha256(token.encode("latin-1", "replace")).hexdigest()
