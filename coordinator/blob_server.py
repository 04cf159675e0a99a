"""The coordinator's own HTTP(S) server of blobs: boards fetch what they are given, and put what they were asked for.

    GET  /blobs/<sha256>   with Range: the bytes of a blob
    PUT  /blobs/<sha256>   with Content-Range: the bytes from where the upload stands to its end
    HEAD /blobs/<sha256>   Upload-Offset: where the upload stands

Each transfer has a token of its own, which the board got by the broker; in a fleet with certificates it has to show its
own besides. A connection has one request, a thread, little time and a place among a bounded number, of which a board
and an address get a share. Errors are explained to the board; nothing of a request is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from fedquilt.blobs.carriers import Ended, missed
from fedquilt.blobs.intake import ClosedError, ContentError, Intake
from fedquilt.blobs.over_http import STALL_S, pour, send_file
from fedquilt.blobs.store import Depot
from fedquilt.coordinator.connections import MOST, Connections, Share
from fedquilt.core import BlobRef, JobError, StoreError
from fedquilt.transport.handshake import Identity, peer_of

log = logging.getLogger("fedquilt.coordinator.blobs")

HEADER_S: Final = 5.0  # for the TLS handshake and the request's header together
HEADER_BYTES: Final = 8 * 1024
AGAIN_MOST: Final = 4  # most times that a blob is transferred for one grant, resumptions included
GRANTS_MOST: Final = 100_000
_REQUEST: Final = re.compile(rb"(GET|HEAD|PUT) /blobs/([0-9a-f]{64}) HTTP/1\.[01]\Z")
_RANGE: Final = re.compile(r"bytes=(\d{1,16})-(\d{0,16})\Z")
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})\Z")


class _Said(Exception):
    """The answer to a request that is not carried out."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Request(NamedTuple):
    method: str
    sha256: str
    headers: dict[str, str]  # names in small letters


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
    ) -> None:
        self._depot, self._allowed, self._tell, self._identity = depot, allowed, tell, identity
        self._grants: dict[str, Grant] = {}  # sha256 of a token -> its grant
        self._tokens: dict[tuple[str, str, bool], str] = {}  # (device, blob, whether it is an upload) -> token
        self._lock = threading.Lock()
        self._connections = Connections()
        self._closed = False
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
            )
        except (OSError, OverflowError) as error:
            raise JobError(f"blobs cannot be served at {host}:{port} ({error}): choose another HOST:PORT") from None
        self._thread = threading.Thread(target=self._listen, name="blobs", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._socket.getsockname()[1])

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
        """Listen no more; transfers under way end with the process."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _revoke(self, key: tuple[str, str, bool]) -> None:
        if (token := self._tokens.pop(key, None)) is not None:
            self._grants.pop(_digest(token), None)

    # -- connections --

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("blobs: no connection can be taken: %s", error)
                time.sleep(0.5)  # too many open files: others have to end first
                continue
            name = str(address[0])
            shares = [Share("all"), Share("address", name), Share("unknown", name)]
            try:
                if self._connections.enter(*shares):
                    threading.Thread(target=self._serve, args=(sock, shares), name="blob", daemon=True).start()
                    continue
            except RuntimeError as error:  # the system has none for it
                log.warning("blobs: no connection can be taken: %s", error)
                self._connections.leave(*shares)
            sock.close()

    def _serve(self, sock: socket.socket, shares: list[Share]) -> None:
        address = shares[-1]
        try:
            with contextlib.closing(_Line(sock, self._identity)) as line:
                try:
                    request = _read(line)
                    grant = self._granted(request, line.peer)
                    board = Share("board", grant.device)
                    if not self._connections.enter(board):
                        raise _Said(503, f"you have {MOST['board']} connections open here: let one end first")
                    shares.append(board)
                    shares.remove(address)  # a board with a token leaves room for others behind the same address
                    self._connections.leave(address)
                    self._answer(line, request, grant)
                except _Said as said:
                    line.answer(said.status, {}, str(said).encode())
        except OSError as error:  # errors of TLS and time-outs are kinds of OSError
            log.debug("a connection of %s ended early: %s", address.name, error)
        except Exception:
            log.exception("a connection of %s ended", address.name)
        finally:
            self._connections.leave(*shares)

    # -- requests --

    def _granted(self, request: _Request, peer: str | None) -> Grant:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        with self._lock:
            grant = self._grants.get(_digest(token)) if kind == "Bearer" else None
        if grant is None or peer not in (None, grant.device) or grant.ref.sha256 != request.sha256:
            raise _Said(403, "this token does not open this blob for you, or not any more")
        if (grant.intake is None) != (request.method == "GET"):
            raise _Said(403, "this token is for the other way")
        if grant.intake is None and not self._allowed(grant.device, request.sha256):
            raise _Said(403, "the blob is not offered to you any more")
        return grant

    def _answer(self, line: _Line, request: _Request, grant: Grant) -> None:
        if grant.intake is None:
            return self._give(line, request, grant)
        if request.method == "HEAD":
            grant.intake.turn()  # bytes of an earlier connection are refused from now on
            due = grant.intake.due()
            offset = grant.ref.size if due is None else due[0]
            return line.answer(204, {"Upload-Offset": str(offset)})
        return self._take(line, request, grant, grant.intake)

    def _give(self, line: _Line, request: _Request, grant: Grant) -> None:
        size = grant.ref.size
        start, end = _range(request.headers.get("range"), size)
        self._spend(grant, 0)
        try:
            file = self._depot.opened(request.sha256)
        except StoreError:
            raise _Said(404, "the blob is not here any more") from None
        with open(file, "rb", buffering=0):
            headers = {"Content-Length": str(end - start), "Accept-Ranges": "bytes"}
            if "range" in request.headers:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            line.answer(206 if "range" in request.headers else 200, headers, None)
            send_file(line.sock, file, start, end - start, lambda sent: self._spend(grant, sent))

    def _take(self, line: _Line, request: _Request, grant: Grant, intake: Intake) -> None:
        length = request.headers.get("content-length", "")
        found = _CONTENT_RANGE.match(request.headers.get("content-range", ""))
        if not (length.isascii() and length.isdigit() and len(length) < 17) or found is None:
            raise _Said(411, "say by Content-Length and Content-Range how many bytes come, and which")
        start, end, size = int(found[1]), int(found[2]) + 1, int(found[3])
        turn, due = intake.turn(), intake.due()
        if due is None or (start, end, size) != (due[0], grant.ref.size, grant.ref.size) or end - start != int(length):
            raise _Said(409, "these are not the bytes that are due")
        self._spend(grant, 0)
        key = (grant.device, grant.ref.sha256)
        try:

            def take(piece: memoryview) -> None:
                intake.write(piece, turn)
                self._spend(grant, len(piece))

            pour(line.file, end - start, take)
            intake.finish(turn)
        except ClosedError as error:
            raise _Said(409, str(error)) from None
        except (ContentError, StoreError) as error:
            self._tell(missed(key, intake, error))
            raise _Said(409 if isinstance(error, ContentError) else 500, "the blob was not taken") from None
        self._tell(Ended(key, intake, None))
        line.answer(204, {})

    def _spend(self, grant: Grant, size: int) -> None:
        """Count transferred bytes of a grant; more than AGAIN_MOST times the blob's size are refused."""
        with self._lock:
            grant.left_bytes -= size
            if grant.left_bytes <= 0 and not size:
                raise _Said(429, "the blob has been asked for too often")


class _Line:
    """A connection, whose header has to arrive within HEADER_S."""

    def __init__(self, sock: socket.socket, identity: Identity | None) -> None:
        self.sock: socket.socket = sock
        self.peer: str | None = None  # name in the peer's certificate; None: the fleet has none
        self._until_s: float | None = time.monotonic() + HEADER_S
        try:
            sock.settimeout(HEADER_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if identity is not None:
                try:
                    context = identity.context(server=True)
                except JobError as error:  # files that cannot be read now
                    log.error("%s", error)
                    raise OSError(str(error)) from None
                sealed = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self.sock = sealed
                sealed.do_handshake()
                self.peer = peer_of(sealed)
        except BaseException:
            self.close()
            raise
        self.file = io.BufferedReader(_Until(self), HEADER_BYTES)

    def left_s(self) -> float:
        """Seconds that the next bytes may take.

        Raises:
            TimeoutError: no time is left.
        """
        if self._until_s is None:
            return STALL_S
        if (left_s := self._until_s - time.monotonic()) <= 0:
            raise TimeoutError("the header took too long")
        return left_s

    def header_read(self) -> None:
        """End the time limit of the header."""
        self._until_s = None
        self.sock.settimeout(STALL_S)

    def answer(self, status: int, headers: dict[str, str], body: bytes | None = b"") -> None:
        """Send an answer's header, and a short body; None: the caller sends one, of the length it has named."""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None and status != 204:
            lines.append(f"Content-Length: {len(body)}")
        self.sock.settimeout(STALL_S)
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))

    def close(self) -> None:
        """Close the connection once the peer has read the answer, or after a short while."""
        with contextlib.suppress(OSError):
            self.sock.settimeout(1.0)
            self.sock.shutdown(socket.SHUT_WR)  # closing with bytes unread would reset it, and lose the answer
            for _ in range(64):
                if not self.sock.recv(64 * 1024):
                    break
        self.sock.close()


class _Until(io.RawIOBase):
    """Reader of a connection's socket within its time limit."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._line.sock.settimeout(self._line.left_s())
        return self._line.sock.recv_into(buffer)


def _read(line: _Line) -> _Request:
    """Read a request's header."""
    rows: list[bytes] = []
    left = HEADER_BYTES
    while True:
        row = line.file.readline(left)
        left -= len(row)
        if not row.endswith(b"\n"):
            raise _Said(400, f"a request's header has at most {HEADER_BYTES} bytes") if row else OSError("no request")
        row = row.rstrip(b"\r\n")
        if not row:
            break
        rows.append(row)
    line.header_read()
    found = _REQUEST.match(rows[0]) if rows else None
    if found is None:
        raise _Said(404, "there is nothing at this address")
    headers = {}
    for row in rows[1:]:
        name, colon, value = row.decode("latin-1").partition(":")
        if not colon or name.lower() in headers:
            raise _Said(400, "a header that is none, or twice there")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise _Said(411, "say by Content-Length how many bytes come")
    return _Request(found[1].decode(), found[2].decode(), headers)


def _range(asked: str | None, size: int) -> tuple[int, int]:
    """Offset and end of the bytes that are asked for."""
    if asked is None:
        return 0, size
    found = _RANGE.match(asked)
    start, end = (int(found[1]), min(int(found[2] or size) + 1, size)) if found else (size, size)
    if start >= end:
        raise _Said(416, "one range of bytes within the blob, please")
    return start, end


def _digest(token: str) -> str:
    """Digest under which a token is looked up, so that the time of a look-up reveals nothing about tokens."""
    return hashlib.sha256(token.encode("latin-1", "replace")).hexdigest()
