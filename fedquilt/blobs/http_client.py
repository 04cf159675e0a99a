"""HTTP client that fetches blobs in ranges of bytes and uploads them. All calls block.

URLs and tokens are secrets: messages name a location by host and quote nothing from the server.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fedquilt.blobs.download import BlobLocationError, BlobWriter
from fedquilt.core import BlobLocation, BlobRef, JobError, Retry
from fedquilt.host.http_server import split_http_url
from fedquilt.security.handshake import COORDINATOR, LinkIdentity, common_name_of_peer
from fedquilt.transport.mqtt.broker import describe_exception

log = logging.getLogger("fedquilt.blobs.http_client")

PIECE: Final = 256 * 1024  # bytes read at once, and written
TLS_PIECE: Final = 16 * 1024  # bytes sent at once under TLS: each within STALL_S
CONNECT_S: Final = 5.0
STALL_S: Final = 20.0  # longest time without a byte
PACE_S: Final = 30.0  # within which PACE_BYTES have to be moved
PACE_BYTES: Final = 30_000
PROGRESS_BYTES: Final = 64 * 1024  # least that a connection has to bring, or it has failed
MISSES_MOST: Final = 4  # most connections in a row that break although the host was reached
BROKEN: Final = Retry(0.1, 0.4, jitter=0.5)  # after such a connection
UNREACHED: Final = Retry(5.0, 3600.0)  # after a host was not reached: meanwhile blobs come over the link
_OFFSET: Final = "Upload-Offset"
_BUSY: Final = frozenset({408, 425, 500, 502, 503, 504})


class MinimumThroughput:
    def __init__(self) -> None:
        self._since_s, self._bytes = time.monotonic(), 0

    def count_bytes(self, size: int) -> None:
        """Raise TimeoutError if fewer than PACE_BYTES were transferred in PACE_S."""
        self._bytes += size
        now_s = time.monotonic()
        if now_s >= self._since_s + PACE_S:
            if self._bytes < PACE_BYTES:
                raise TimeoutError(f"fewer than {PACE_BYTES} bytes in {PACE_S:g} s")
            self._since_s, self._bytes = now_s, 0


class HttpClient:
    """Transfers with locations by HTTP. A host that was not reached is left alone for a while."""

    def __init__(
        self, identity: LinkIdentity | None = None, ca: Path | None = None, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._identity, self._ca, self.pause = identity, ca, pause
        self._rests: dict[str, tuple[int, float]] = {}  # origin -> failures in a row, and until when it rests

    def retry_at_s(self, source: BlobLocation) -> float:
        return self._rests.get(source.origin, (0, 0.0))[1]

    @contextmanager
    def _request(
        self,
        method: str,
        source: BlobLocation,
        headers: Mapping[str, str] = {},
        send_body: Callable[[socket.socket], None] = lambda sock: None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the response of a location on a connection of its own."""
        try:
            parts = split_http_url(source.url)
        except ValueError:
            raise BlobLocationError(f"{source.origin} is no host and port: write http://HOST:PORT") from None
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = self._tls_context(source)
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        try:
            connection.connect()
            if source.token and isinstance(connection.sock, ssl.SSLSocket):
                peer = common_name_of_peer(connection.sock)
                if peer != COORDINATOR:
                    raise BlobLocationError(f"{source.origin} is {peer or 'somebody'!r}, not the coordinator")
            connection.sock.settimeout(STALL_S)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            connection.putrequest(method, target, skip_accept_encoding=True)
            for header in headers.items():
                connection.putheader(*header)
            if source.token:
                connection.putheader("Authorization", f"Bearer {source.token}")
            with suppress(BrokenPipeError, ConnectionResetError):  # the place may have answered why it reads no further
                connection.endheaders()
                send_body(connection.sock)
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def _tls_context(self, source: BlobLocation) -> ssl.SSLContext:
        try:
            if source.token and self._identity is not None:
                return self._identity.tls_context(server=False)
            if source.token:
                raise BlobLocationError(f"{source.origin} requires a certificate, and this board has none")
            context = ssl.create_default_context()
            if self._ca is not None:
                context.load_verify_locations(self._ca)
            return context
        except JobError as error:
            raise BlobLocationError(str(error), later=True) from None

    def fetch_blob(self, sources: Sequence[BlobLocation], intake: BlobWriter) -> None:
        """Fetch the missing bytes from the first location that works, and finish the blob."""
        turn = intake.replace_writer()
        self._try_locations(
            sources, lambda source: self._fetch_ranges(source, intake, turn), lambda source: intake.moved
        )
        intake.finish(turn)

    def _fetch_ranges(self, source: BlobLocation, intake: BlobWriter, turn: int) -> None:
        while (due := intake.next_range()) is not None:
            with self._request("GET", source, {"Range": f"bytes={due[0]}-{due[1] - 1}"}) as answer:
                _require_status(source, answer, (200, 206))
                _require_range(source, answer, due, intake.ref)
                read_pieces(answer.fp, due[1] - due[0], lambda piece: intake.write(piece, turn))

    def upload_blob(
        self, sources: Sequence[BlobLocation], file: int, ref: BlobRef, moved: Callable[[int], None]
    ) -> int:
        """Upload a blob to the first location that works, and return its index."""
        tried = set[str]()
        gone: Counter[str] = Counter()

        def attempt(source: BlobLocation) -> None:
            def count_sent(size: int) -> None:
                gone[source.url] += size
                moved(size)

            again = source.url in tried and source.token
            tried.add(source.url)
            start = self._request_upload_offset(source, ref) if again else source.start
            if start < ref.size:  # else the reply to the last bytes was lost
                self._upload_to(source, file, ref, start, count_sent)

        # a store takes a blob as a whole: what has gone before a connection broke is lost
        return self._try_locations(sources, attempt, lambda source: gone[source.url] if source.token else 0)

    def _upload_to(
        self, source: BlobLocation, file: int, ref: BlobRef, start: int, moved: Callable[[int], None]
    ) -> None:
        headers = {"Content-Length": str(ref.size - start)}
        if source.token:
            headers["Content-Range"] = f"bytes {start}-{ref.size - 1}/{ref.size}"
        with self._request(
            "PUT", source, headers, lambda sock: send_file(sock, file, start, ref.size - start, moved)
        ) as answer:
            if answer.status == http.client.CONFLICT and source.token:  # what went before has come after all
                raise ConnectionError("it is further than it said")
            _require_status(source, answer, (200, 201, 204))

    def _request_upload_offset(self, source: BlobLocation, ref: BlobRef) -> int:
        with self._request("HEAD", source) as answer:
            _require_status(source, answer, (200, 204))
            said = answer.getheader(_OFFSET, "")
        if not (said.isascii() and said.isdigit() and int(said) <= ref.size):
            raise BlobLocationError(f"{source.origin} does not say how far the upload came")
        return int(said)

    def send_request(self, method: str, source: BlobLocation) -> tuple[int, str]:
        """Return the status and date of a location's answer to a request without a body."""
        found: list[tuple[int, str]] = []

        def attempt(source: BlobLocation) -> None:
            with self._request(method, source) as answer:
                found.append((answer.status, answer.getheader("Date", "")))

        self._try_locations((source,), attempt, lambda source: 0)
        return found[0]

    def _try_locations(
        self,
        sources: Sequence[BlobLocation],
        attempt: Callable[[BlobLocation], None],
        gained: Callable[[BlobLocation], int],
    ) -> int:
        """Call `attempt` for each location, with retries, until one succeeds, and return its index."""
        failures: list[BlobLocationError] = []
        for index, source in enumerate(sources):
            if self.retry_at_s(source) > time.monotonic():
                failures.append(BlobLocationError(f"{source.origin} was not reached a short while ago", later=True))
                continue
            try:
                self._attempt_with_retries(source, attempt, gained)
            except BlobLocationError as error:
                failures.append(error)
                if error.later:
                    before = self._rests.get(source.origin, (0, 0.0))[0]
                    self._rests[source.origin] = before + 1, time.monotonic() + UNREACHED.delay_s(before)
            else:
                self._rests.pop(source.origin, None)
                return index
        raise BlobLocationError("; ".join(map(str, failures)), later=any(each.later for each in failures))

    def _attempt_with_retries(
        self, source: BlobLocation, attempt: Callable[[BlobLocation], None], gained: Callable[[BlobLocation], int]
    ) -> None:
        misses, begun = 0, gained(source)
        while True:
            before = gained(source)
            try:
                return attempt(source)
            except (OSError, http.client.HTTPException) as error:
                misses = 0 if gained(source) >= before + PROGRESS_BYTES else misses + 1
                broke = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
                if misses >= (MISSES_MOST if broke or gained(source) > begun else 1):
                    raise BlobLocationError(
                        f"{source.origin} cannot be used ({_describe_failure(error)})", later=True
                    ) from None
                log.debug("%s broke off (%s): it is gone on with", source.origin, _describe_failure(error))
                if misses > broke:  # one that broke before it brought anything is tried again at once
                    self.pause(BROKEN.delay_s(misses - 1, random.random()))


def _require_range(source: BlobLocation, answer: http.client.HTTPResponse, due: tuple[int, int], ref: BlobRef) -> None:
    whole = answer.status == 200 and due == (0, ref.size)
    ranged = answer.getheader("Content-Range", "").replace(" ", "") == f"bytes{due[0]}-{due[1] - 1}/{ref.size}"
    if not whole and not ranged:
        raise BlobLocationError(f"{source.origin} answers with another range of bytes than it was asked for")
    if answer.length != due[1] - due[0]:
        raise BlobLocationError(f"{source.origin} answers with {answer.length} bytes instead of the range's")


def read_pieces(file: Any, size: int, take: Callable[[memoryview], None]) -> None:
    """Read from a socket's buffered file and pass on large pieces, before an OSError too."""
    buffer, pace = memoryview(bytearray(min(PIECE, size))), MinimumThroughput()
    filled = 0
    try:
        while size:
            got = file.readinto1(buffer[filled : min(len(buffer), filled + size)])
            if not got:
                raise ConnectionError("the other side hung up")
            pace.count_bytes(got)
            filled, size = filled + got, size - got
            if filled == len(buffer) or not size:
                done, filled = filled, 0
                take(buffer[:done])
    finally:
        if filled:
            take(buffer[:filled])


def send_file(
    sock: socket.socket, file: int, offset: int, size: int, moved: Callable[[int], None] = lambda size: None
) -> None:
    """Send bytes of a file over a socket, by the kernel's `sendfile` unless TLS is used."""
    pace, end = MinimumThroughput(), offset + size
    sealed = isinstance(sock, ssl.SSLSocket)
    with open(file, "rb", buffering=0, closefd=False) as opened:
        while offset < end:
            if sealed:
                piece = os.pread(file, min(TLS_PIECE, end - offset), offset)
                sock.sendall(piece)
                sent = len(piece)
            else:
                sent = sock.sendfile(opened, offset, min(4 * PIECE, end - offset))
            if not sent:
                raise ConnectionError("the file is shorter than it was")
            offset += sent
            pace.count_bytes(sent)
            moved(sent)


def _describe_failure(error: Exception) -> str:
    # No text of the server is quoted, because it may contain line ends and terminal commands.
    return describe_exception(error) if isinstance(error, OSError) else "what it answers is not HTTP"


def _require_status(source: BlobLocation, answer: http.client.HTTPResponse, statuses: Sequence[int]) -> None:
    if answer.status not in statuses:
        busy = answer.status in _BUSY
        said = f"{source.origin} refuses ({answer.status} {http.client.responses.get(answer.status, '')})"
        raise BlobLocationError(said, later=busy)
