"""Blobs by HTTP(S), as a client: fetched in ranges of bytes, and put. Everything here blocks; it runs in threads.

Addresses and tokens are secrets: messages name a place by its host, and quote nothing that the place has written.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fedquilt.blobs.intake import Intake
from fedquilt.core import BlobRef, JobError, LinkError, Source
from fedquilt.http_url import split_http_url
from fedquilt.transport.handshake import COORDINATOR, Identity, peer_of
from fedquilt.transport.mqtt_errors import why

log = logging.getLogger("fedquilt.blobs.http")

PIECE: Final = 256 * 1024  # bytes read at once, and written
TLS_PIECE: Final = 16 * 1024  # bytes sent at once under TLS: each within STALL_S
CONNECT_S: Final = 5.0
STALL_S: Final = 20.0  # longest time without a byte
PACE_S: Final = 30.0  # within which PACE_BYTES have to be moved
PACE_BYTES: Final = 30_000
PROGRESS_BYTES: Final = 64 * 1024  # least that a connection has to bring, or it has failed
MISSES_MOST: Final = 4  # most connections in a row that break although the host was reached
PAUSE_S: Final = 0.1  # before the next attempt after such a connection; it doubles with each, less up to half at random
REST_S: Final = 5.0  # pause after a host was not reached; it doubles with each failure
REST_MOST_S: Final = 3600.0
_OFFSET: Final = "Upload-Offset"
_BUSY: Final = frozenset({408, 425, 500, 502, 503, 504})


class CarrierError(LinkError):
    """Raised for a place that does not work. `later`: the place may work after a while."""

    def __init__(self, sentence: str, *, later: bool) -> None:
        super().__init__(sentence)
        self.later = later


class Pace:
    """Least pace of a transfer: a peer that sends a byte now and then does not occupy a thread for long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._bytes = clock(), 0

    def moved(self, size: int) -> None:
        """Note bytes.

        Raises:
            TimeoutError: fewer than PACE_BYTES were moved in PACE_S.
        """
        self._bytes += size
        now_s = self._clock()
        if now_s >= self._since_s + PACE_S:
            if self._bytes < PACE_BYTES:
                raise TimeoutError(f"fewer than {PACE_BYTES} bytes in {PACE_S:g} s")
            self._since_s, self._bytes = now_s, 0


class Reach:
    """Connections of this process to places, and the hosts that rest because they were not reached of late.

    Args:
        identity: shows the coordinator's server who this is, and checks that it is the coordinator's; None: unsigned.
        ca: authority of stores' certificates, beside those of the system.
        pause: `pause(seconds)` blocks between two attempts.
    """

    def __init__(
        self, identity: Identity | None = None, ca: Path | None = None, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._identity, self._ca, self.pause = identity, ca, pause
        self._rests: dict[str, tuple[int, float]] = {}  # origin -> failures in a row, and until when it rests

    def rests_until_s(self, source: Source) -> float:
        """Time at which a place's host may be tried again, in seconds of the monotonic clock."""
        return self._rests.get(source.origin, (0, 0.0))[1]

    def worked(self, source: Source) -> None:
        """Note that a host was reached."""
        self._rests.pop(source.origin, None)

    def failed(self, source: Source) -> None:
        """Let a host rest."""
        failures = self._rests.get(source.origin, (0, 0.0))[0]
        rest_s = min(REST_S * 2.0 ** min(failures, 20), REST_MOST_S)
        self._rests[source.origin] = (failures + 1, time.monotonic() + rest_s)

    @contextmanager
    def connected(self, source: Source) -> Iterator[http.client.HTTPConnection]:
        """A connection to a place, closed at the end.

        Raises:
            CarrierError: the place's certificate is not to be trusted.
            OSError: the place is not reached.
        """
        try:
            parts = split_http_url(source.url)
        except ValueError:
            raise CarrierError(f"{source.origin} is no host and port", later=False) from None
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = self._context(source)
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        try:
            connection.connect()
            if source.token and isinstance(connection.sock, ssl.SSLSocket):
                peer = peer_of(connection.sock)
                if peer != COORDINATOR:
                    raise CarrierError(f"{source.origin} is {peer or 'somebody'!r}, not the coordinator", later=False)
            connection.sock.settimeout(STALL_S)
            yield connection
        finally:
            connection.close()

    def _context(self, source: Source) -> ssl.SSLContext:
        try:
            if source.token and self._identity is not None:
                return self._identity.context(server=False)
            if source.token:
                raise CarrierError(f"{source.origin} wants a certificate, and this board has none", later=False)
            context = ssl.create_default_context()
            if self._ca is not None:
                context.load_verify_locations(self._ca)
            return context
        except JobError as error:
            raise CarrierError(str(error), later=True) from None


# -- fetching -------------------------------------------------------------------------------------


def fetch(reach: Reach, sources: Sequence[Source], intake: Intake) -> None:
    """Fetch what an intake misses, from the first place that is reached, and finish it.

    Raises:
        CarrierError: no place works.
        ContentError: other bytes came than the manifest's.
        ClosedError: they are not wanted any more.
        StoreError: the disk refuses.
    """
    turn = intake.turn()
    _first(reach, sources, lambda source: _fetch(reach, source, intake, turn), lambda source: intake.moved)
    intake.finish(turn)


def _fetch(reach: Reach, source: Source, intake: Intake, turn: int) -> None:
    while (due := intake.due()) is not None:
        with reach.connected(source) as connection:
            connection.putrequest("GET", _target(source), skip_accept_encoding=True)
            connection.putheader("Range", f"bytes={due[0]}-{due[1] - 1}")
            _authorize(connection, source)
            connection.endheaders()
            with connection.getresponse() as answer:
                _require(source, answer, (200, 206))
                _require_range(source, answer, due, intake.ref)
                pour(answer.fp, due[1] - due[0], lambda piece: intake.write(piece, turn))


def _require_range(source: Source, answer: http.client.HTTPResponse, due: tuple[int, int], ref: BlobRef) -> None:
    whole = answer.status == 200 and due == (0, ref.size)
    ranged = answer.getheader("Content-Range", "").replace(" ", "") == f"bytes{due[0]}-{due[1] - 1}/{ref.size}"
    if not whole and not ranged:
        raise CarrierError(f"{source.origin} answers with another range of bytes than it was asked for", later=False)
    if answer.length != due[1] - due[0]:
        raise CarrierError(f"{source.origin} answers with {answer.length} bytes instead of the range's", later=False)


def pour(file: Any, size: int, take: Callable[[memoryview], None], *, piece: int = PIECE) -> None:
    """Read `size` bytes from a buffered file of a socket, and pass them on in large pieces.

    Raises:
        OSError: the bytes do not come, or too slowly; those that have come are passed on first.
    """
    buffer, pace = memoryview(bytearray(min(piece, size))), Pace()
    filled = 0
    try:
        while size:
            got = file.readinto1(buffer[filled : min(len(buffer), filled + size)])
            if not got:
                raise ConnectionError("the other side hung up")
            pace.moved(got)
            filled, size = filled + got, size - got
            if filled == len(buffer) or not size:
                done, filled = filled, 0
                take(buffer[:done])
    finally:
        if filled:
            take(buffer[:filled])


# -- putting --------------------------------------------------------------------------------------


def put(reach: Reach, sources: Sequence[Source], file: int, ref: BlobRef, moved: Callable[[int], None]) -> int:
    """Send a blob to the first place that is reached; returns its index.

    Args:
        reach: of this process.
        sources: the places.
        file: descriptor of the blob's file.
        ref: the blob.
        moved: called with the number of bytes of each piece that has gone.

    Raises:
        CarrierError: no place takes it.
    """
    tries: dict[str, int] = {}
    gone: dict[str, int] = {}

    def attempt(source: Source) -> None:
        first = tries.setdefault(source.url, 0) == 0
        tries[source.url] += 1

        def note(size: int) -> None:
            gone[source.url] = gone.get(source.url, 0) + size
            moved(size)

        start = source.start if first or not source.token else _offset(reach, source, ref)
        if start < ref.size:  # else the reply to the last bytes was lost
            _put(reach, source, file, ref, start, note)

    # a store takes a blob as a whole: what has gone before a connection broke is lost
    return _first(reach, sources, attempt, lambda source: gone.get(source.url, 0) if source.token else 0)


def _put(reach: Reach, source: Source, file: int, ref: BlobRef, start: int, moved: Callable[[int], None]) -> None:
    with reach.connected(source) as connection:
        connection.putrequest("PUT", _target(source), skip_accept_encoding=True)
        connection.putheader("Content-Length", str(ref.size - start))
        if source.token:
            connection.putheader("Content-Range", f"bytes {start}-{ref.size - 1}/{ref.size}")
        _authorize(connection, source)
        with suppress(BrokenPipeError, ConnectionResetError):  # the place may have answered why it reads no further
            connection.endheaders()
            send_file(connection.sock, file, start, ref.size - start, moved)
        with connection.getresponse() as answer:
            if answer.status == http.client.CONFLICT and source.token:  # what went before has come after all
                raise ConnectionError("it is further than it said")
            _require(source, answer, (200, 201, 204))


def _offset(reach: Reach, source: Source, ref: BlobRef) -> int:
    with reach.connected(source) as connection:
        connection.putrequest("HEAD", _target(source), skip_accept_encoding=True)
        _authorize(connection, source)
        connection.endheaders()
        with connection.getresponse() as answer:
            _require(source, answer, (200, 204))
            said = answer.getheader(_OFFSET, "")
    if not (said.isascii() and said.isdigit() and int(said) <= ref.size):
        raise CarrierError(f"{source.origin} does not say how far the upload came", later=False)
    return int(said)


def send_file(
    sock: socket.socket, file: int, offset: int, size: int, moved: Callable[[int], None] = lambda size: None
) -> None:
    """Send bytes of a file, by the kernel where there is no TLS.

    Raises:
        OSError: the other side takes none, or too slowly.
    """
    pace, end = Pace(), offset + size
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
            pace.moved(sent)
            moved(sent)


# -- neither ---------------------------------------------------------------------------------------


def ask(reach: Reach, method: str, source: Source) -> tuple[int, str]:
    """Status and date of a place's answer to a request without a body.

    Raises:
        CarrierError: the place does not answer.
    """
    found: list[tuple[int, str]] = []

    def attempt(source: Source) -> None:
        with reach.connected(source) as connection:
            connection.request(method, _target(source))
            with connection.getresponse() as answer:
                found.append((answer.status, answer.getheader("Date", "")))

    _first(reach, (source,), attempt, lambda source: 0)
    return found[0]


# -- both -----------------------------------------------------------------------------------------


def _first(
    reach: Reach,
    sources: Sequence[Source],
    attempt: Callable[[Source], None],
    gained: Callable[[Source], int],
) -> int:
    """Attempt one place after another until one works; returns its index."""
    failures: list[CarrierError] = []
    for index, source in enumerate(sources):
        if reach.rests_until_s(source) > time.monotonic():
            failures.append(CarrierError(f"{source.origin} was not reached a short while ago", later=True))
            continue
        try:
            _persist(reach, source, attempt, gained)
        except CarrierError as error:
            failures.append(error)
            if error.later:
                reach.failed(source)
        else:
            reach.worked(source)
            return index
    raise CarrierError("; ".join(map(str, failures)), later=any(each.later for each in failures))


def _persist(reach: Reach, source: Source, attempt: Callable[[Source], None], gained: Callable[[Source], int]) -> None:
    """Attempt a place, and again after a connection that brought something has broken: at once, or after a pause."""
    misses, begun = 0, gained(source)
    while True:
        before = gained(source)
        try:
            return attempt(source)
        except (OSError, http.client.HTTPException) as error:
            misses = 0 if gained(source) >= before + PROGRESS_BYTES else misses + 1
            broke = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            if misses >= (MISSES_MOST if broke or gained(source) > begun else 1):
                raise CarrierError(f"{source.origin} cannot be used ({_why(error)})", later=True) from None
            log.debug("%s broke off (%s): it is gone on with", source.origin, _why(error))
            if misses > broke:  # one that broke before it brought anything is tried again at once
                reach.pause(PAUSE_S * 2.0 ** (misses - 1) * (1.0 - 0.5 * random.random()))


def _why(error: Exception) -> str:
    """Reason for a place's failure in this side's words: an answer may hold line ends and a terminal's commands."""
    return why(error) if isinstance(error, OSError) else "what it answers is not HTTP"


def _target(source: Source) -> str:
    parts = urlsplit(source.url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _authorize(connection: http.client.HTTPConnection, source: Source) -> None:
    if source.token:
        connection.putheader("Authorization", f"Bearer {source.token}")


def _require(source: Source, answer: http.client.HTTPResponse, statuses: Sequence[int]) -> None:
    if answer.status not in statuses:
        busy = answer.status in _BUSY
        said = f"{source.origin} refuses ({answer.status} {http.client.responses.get(answer.status, '')})"
        raise CarrierError(said, later=busy)
