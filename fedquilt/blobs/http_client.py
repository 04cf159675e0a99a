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
from fedquilt.security.certificates import COORDINATOR
from fedquilt.security.handshake import LinkIdentity, common_name_of_peer
from fedquilt.transport.mqtt.broker import describe_exception

log = logging.getLogger("fedquilt.blobs.http_client")

READ_BYTES: Final = 256 * 1024  # size of the read buffer
TLS_WRITE_BYTES: Final = 16 * 1024  # bytes of one write under TLS, each within STALL_TIMEOUT_S
CONNECT_TIMEOUT_S: Final = 5.0
STALL_TIMEOUT_S: Final = 20.0  # timeout of one read or write
THROUGHPUT_INTERVAL_S: Final = 30.0  # interval in which at least MIN_INTERVAL_BYTES must be transferred
MIN_INTERVAL_BYTES: Final = 30_000
MIN_CONNECTION_BYTES: Final = 64 * 1024  # a connection that breaks after fewer bytes counts as failed
MAX_FAILED_CONNECTIONS: Final = 4  # failed connections in a row to a host that was reached
BROKEN_RETRY: Final = Retry(0.1, 0.4, jitter=0.5)  # delays after failed connections
UNREACHABLE_RETRY: Final = Retry(5.0, 3600.0)  # delays after a host was not reached; blobs then use the link
_OFFSET_HEADER: Final = "Upload-Offset"
_RETRY_STATUSES: Final = frozenset({408, 425, 500, 502, 503, 504})


class MinimumThroughput:
    def __init__(self) -> None:
        self._since_s, self._bytes = time.monotonic(), 0

    def count_bytes(self, byte_count: int) -> None:
        """Count transferred bytes. Raise TimeoutError after an interval with fewer than MIN_INTERVAL_BYTES."""
        self._bytes += byte_count
        now_s = time.monotonic()
        if now_s >= self._since_s + THROUGHPUT_INTERVAL_S:
            if self._bytes < MIN_INTERVAL_BYTES:
                raise TimeoutError(f"fewer than {MIN_INTERVAL_BYTES} bytes in {THROUGHPUT_INTERVAL_S:g} s")
            self._since_s, self._bytes = now_s, 0


class HttpClient:
    """HTTP client for blob locations, with retries. An unreachable host is in backoff for up to an hour."""

    def __init__(
        self, identity: LinkIdentity | None = None, ca: Path | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._identity, self._ca, self.sleep = identity, ca, sleep
        self._backoffs: dict[str, tuple[int, float]] = {}  # origin -> (failures in a row, end of the backoff)

    def retry_at_s(self, location: BlobLocation) -> float:
        """Return the end of the backoff of a location's host, in seconds of the monotonic clock, or 0."""
        return self._backoffs.get(location.origin, (0, 0.0))[1]

    @contextmanager
    def _request(
        self,
        method: str,
        location: BlobLocation,
        headers: Mapping[str, str] = {},
        send_body: Callable[[socket.socket], None] = lambda sock: None,
    ) -> Iterator[http.client.HTTPResponse]:
        try:
            parts = split_http_url(location.url)
        except ValueError:
            raise BlobLocationError(f"{location.origin} is not a host and port: write http://HOST:PORT") from None
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = self._tls_context(location)
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            if location.token and isinstance(connection.sock, ssl.SSLSocket):
                peer = common_name_of_peer(connection.sock)
                if peer != COORDINATOR:
                    raise BlobLocationError(f"{location.origin} has a certificate of {peer!r}, not of the coordinator")
            connection.sock.settimeout(STALL_TIMEOUT_S)
            target = f"{parts.path}?{parts.query}" if parts.query else parts.path
            connection.putrequest(method, target, skip_accept_encoding=True)
            for header in headers.items():
                connection.putheader(*header)
            if location.token:
                connection.putheader("Authorization", f"Bearer {location.token}")
            with suppress(BrokenPipeError, ConnectionResetError):  # the response may contain the reason
                connection.endheaders()
                send_body(connection.sock)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def _tls_context(self, location: BlobLocation) -> ssl.SSLContext:
        try:
            if location.token and self._identity is not None:
                return self._identity.tls_context(server=False)
            if location.token:
                raise BlobLocationError(f"{location.origin} requires a certificate, which this device does not have")
            context = ssl.create_default_context()
            if self._ca is not None:
                context.load_verify_locations(self._ca)
            return context
        except JobError as error:
            raise BlobLocationError(str(error), can_retry=True) from None

    def fetch_blob(self, locations: Sequence[BlobLocation], writer: BlobWriter) -> None:
        """Fetch the missing bytes from the first location that works, and finish the blob.

        Raise BlobLocationError if no location works, and the errors of `BlobWriter.write` and `finish`.
        """
        writer_id = writer.replace_writer()
        self._try_locations(
            locations,
            lambda location: self._fetch_ranges(location, writer, writer_id),
            lambda location: writer.written_bytes,
        )
        writer.finish(writer_id)

    def _fetch_ranges(self, location: BlobLocation, writer: BlobWriter, writer_id: int) -> None:
        while (byte_range := writer.next_range()) is not None:
            with self._request("GET", location, {"Range": f"bytes={byte_range[0]}-{byte_range[1] - 1}"}) as response:
                _require_status(location, response, (200, 206))
                _require_range(location, response, byte_range, writer.ref)
                read_pieces(response.fp, byte_range[1] - byte_range[0], lambda data: writer.write(data, writer_id))

    def upload_blob(
        self, locations: Sequence[BlobLocation], file: int, ref: BlobRef, count_bytes: Callable[[int], None]
    ) -> int:
        """Upload a blob and return the index of the location that worked, or raise BlobLocationError."""
        tried_urls = set[str]()
        sent_bytes: Counter[str] = Counter()

        def attempt(location: BlobLocation) -> None:
            def count_sent(size: int) -> None:
                sent_bytes[location.url] += size
                count_bytes(size)

            is_retry = location.url in tried_urls and location.token
            tried_urls.add(location.url)
            start = self._request_upload_offset(location, ref) if is_retry else location.start
            if start < ref.size:  # otherwise only the response to the last bytes was lost
                self._upload_to(location, file, ref, start, count_sent)

        # An object store (a location without token) discards the bytes of an incomplete upload.
        return self._try_locations(
            locations, attempt, lambda location: sent_bytes[location.url] if location.token else 0
        )

    def _upload_to(
        self, location: BlobLocation, file: int, ref: BlobRef, start: int, count_bytes: Callable[[int], None]
    ) -> None:
        headers = {"Content-Length": str(ref.size - start)}
        if location.token:
            headers["Content-Range"] = f"bytes {start}-{ref.size - 1}/{ref.size}"
        with self._request(
            "PUT", location, headers, lambda sock: send_file(sock, file, start, ref.size - start, count_bytes)
        ) as response:
            if response.status == http.client.CONFLICT and location.token:
                # Bytes of an earlier connection arrived late.
                raise ConnectionError("upload offset changed")
            _require_status(location, response, (200, 201, 204))

    def _request_upload_offset(self, location: BlobLocation, ref: BlobRef) -> int:
        with self._request("HEAD", location) as response:
            _require_status(location, response, (200, 204))
            offset = response.getheader(_OFFSET_HEADER, "")
        if not (offset.isascii() and offset.isdigit() and int(offset) <= ref.size):
            raise BlobLocationError(f"{location.origin} sent no valid upload offset")
        return int(offset)

    def send_request(self, method: str, location: BlobLocation) -> tuple[int, str]:
        """Send a request without a body. Return status and Date header, or raise BlobLocationError."""
        responses: list[tuple[int, str]] = []

        def attempt(location: BlobLocation) -> None:
            with self._request(method, location) as response:
                responses.append((response.status, response.getheader("Date", "")))

        self._try_locations((location,), attempt, lambda location: 0)
        return responses[0]

    def _try_locations(
        self,
        locations: Sequence[BlobLocation],
        attempt: Callable[[BlobLocation], None],
        moved_bytes: Callable[[BlobLocation], int],
    ) -> int:
        failures: list[BlobLocationError] = []
        for index, location in enumerate(locations):
            if self.retry_at_s(location) > time.monotonic():
                problem = f"{location.origin} was unreachable recently and is in backoff"
                failures.append(BlobLocationError(problem, can_retry=True))
                continue
            try:
                self._attempt_with_retries(location, attempt, moved_bytes)
            except BlobLocationError as error:
                failures.append(error)
                if error.can_retry:
                    failures_before = self._backoffs.get(location.origin, (0, 0.0))[0]
                    retry_at_s = time.monotonic() + UNREACHABLE_RETRY.delay_s(failures_before)
                    self._backoffs[location.origin] = (failures_before + 1, retry_at_s)
            else:
                self._backoffs.pop(location.origin, None)
                return index
        raise BlobLocationError("; ".join(map(str, failures)), can_retry=any(failure.can_retry for failure in failures))

    def _attempt_with_retries(
        self,
        location: BlobLocation,
        attempt: Callable[[BlobLocation], None],
        moved_bytes: Callable[[BlobLocation], int],
    ) -> None:
        failed_connections, initial_bytes = 0, moved_bytes(location)
        while True:
            bytes_before = moved_bytes(location)
            try:
                return attempt(location)
            except (OSError, http.client.HTTPException) as error:
                has_worked = moved_bytes(location) >= bytes_before + MIN_CONNECTION_BYTES
                failed_connections = 0 if has_worked else failed_connections + 1
                is_refused = isinstance(error, ConnectionRefusedError)
                is_broken_connection = isinstance(error, ConnectionError) and not is_refused
                was_reached = is_broken_connection or moved_bytes(location) > initial_bytes
                if failed_connections >= (MAX_FAILED_CONNECTIONS if was_reached else 1):
                    problem = f"{location.origin} cannot be used ({_describe_failure(error)})"
                    raise BlobLocationError(problem, can_retry=True) from None
                log.debug("%s broke off (%s): retrying", location.origin, _describe_failure(error))
                # The first retry after a broken connection is immediate.
                if failed_connections > is_broken_connection:
                    self.sleep(BROKEN_RETRY.delay_s(failed_connections - 1, random.random()))


def _require_range(
    location: BlobLocation, response: http.client.HTTPResponse, byte_range: tuple[int, int], ref: BlobRef
) -> None:
    is_whole = response.status == 200 and byte_range == (0, ref.size)
    content_range = response.getheader("Content-Range", "").replace(" ", "")
    is_range = content_range == f"bytes{byte_range[0]}-{byte_range[1] - 1}/{ref.size}"
    if not is_whole and not is_range:
        raise BlobLocationError(f"{location.origin} sent another range of bytes than requested")
    if response.length != byte_range[1] - byte_range[0]:
        raise BlobLocationError(f"{location.origin} sent {response.length} bytes, not the size of the range")


def read_pieces(file: Any, size: int, handle_data: Callable[[memoryview], None]) -> None:
    """Read `size` bytes from a socket's file and pass them to `handle_data` in pieces of up to READ_BYTES.

    Bytes that arrive before an OSError (a closed or too slow connection) are passed on.
    """
    buffer, throughput = memoryview(bytearray(min(READ_BYTES, size))), MinimumThroughput()
    filled = 0
    try:
        while size:
            read_bytes = file.readinto1(buffer[filled : min(len(buffer), filled + size)])
            if not read_bytes:
                raise ConnectionError("the peer closed the connection")
            throughput.count_bytes(read_bytes)
            filled, size = filled + read_bytes, size - read_bytes
            if filled == len(buffer) or not size:
                filled_bytes, filled = filled, 0
                handle_data(buffer[:filled_bytes])
    finally:
        if filled:
            handle_data(buffer[:filled])


def send_file(
    sock: socket.socket, file: int, offset: int, size: int, count_bytes: Callable[[int], None] = lambda size: None
) -> None:
    """Send bytes of a file over a socket, by the kernel's `sendfile` unless TLS is used, or raise OSError."""
    throughput, end = MinimumThroughput(), offset + size
    is_tls = isinstance(sock, ssl.SSLSocket)
    with open(file, "rb", buffering=0, closefd=False) as opened:
        while offset < end:
            if is_tls:
                data = os.pread(file, min(TLS_WRITE_BYTES, end - offset), offset)
                sock.sendall(data)
                sent_bytes = len(data)
            else:
                sent_bytes = sock.sendfile(opened, offset, min(4 * READ_BYTES, end - offset))
            if not sent_bytes:
                raise ConnectionError("the file is shorter than it was")
            offset += sent_bytes
            throughput.count_bytes(sent_bytes)
            count_bytes(sent_bytes)


def _describe_failure(error: Exception) -> str:
    # No text of the server is quoted, because it may contain line ends and terminal commands.
    return describe_exception(error) if isinstance(error, OSError) else "the response is not HTTP"


def _require_status(location: BlobLocation, response: http.client.HTTPResponse, statuses: Sequence[int]) -> None:
    if response.status not in statuses:
        is_temporary = response.status in _RETRY_STATUSES
        status_text = http.client.responses.get(response.status, "")
        problem = f"{location.origin} refused the request ({response.status} {status_text})"
        raise BlobLocationError(problem, can_retry=is_temporary)
