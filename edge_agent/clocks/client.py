"""Client of the clock helper, over a Unix socket with one JSON line per request and response.

Only the helper (`fedquilt.edge_agent.clocks.helper`) needs root. The helper restores the board's settings when the
client unpins, ends or is silent. A client with pinned clocks must call `send_keepalive` before the helper's watchdog
expires.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.core import DECODE_ERRORS, Amount, ClockError, OperatingPoint, Sentence, ShortText, WireMessage

log = logging.getLogger("fedquilt.clocks")

SOCKET: Final = "run/fedquilt/clocks.sock"  # below the root of the system
MAX_REQUEST_BYTES: Final = 4096
MAX_RESPONSE_BYTES: Final = 1 << 18
RESPONSE_TIMEOUT_S: Final = 2.0
KEEPALIVE_S: Final = 2.0  # shortest interval between messages


class PinRequest(WireMessage, frozen=True, tag="hold"):
    point: OperatingPoint


class KeepaliveRequest(WireMessage, frozen=True, tag="keepalive"):
    """Request to keep the clocks pinned, refused if the helper has unpinned them."""


class UnpinRequest(WireMessage, frozen=True, tag="release"): ...


class StatusRequest(WireMessage, frozen=True, tag="status"): ...


class ClockState(WireMessage, frozen=True):
    name: ShortText
    kind: ShortText  # cpu | gpu | emc
    listed_hz: tuple[Amount, ...]  # frequencies in hertz, empty if the clock cannot be pinned
    low_hz: Amount | None
    high_hz: Amount | None
    now_hz: Amount | None
    governor: ShortText | None
    hidden: bool = False  # whether the sender may not read the list
    ceiling_hz: Amount | None = None  # highest frequency within the owner's limits, or None without a limit


class HelperStatus(WireMessage, frozen=True):
    clocks: tuple[ClockState, ...]
    mode: ShortText | None = None  # power mode of nvpmodel, set by the owner
    modes: tuple[ShortText, ...] = ()
    temperature_c: float | None = None  # temperature of the hottest zone
    max_temperature_c: float | None = None  # temperature above which nothing is pinned
    max_w: float | None = None  # power above which no point is pinned
    holder: Sentence | None = None  # process and user that have pinned the clocks
    point: OperatingPoint | None = None
    # Settings of the board that the helper could not restore yet.
    unrestored_settings: tuple[Sentence, ...] = ()


class HelperResponse(WireMessage, frozen=True):
    error: Annotated[str, Meta(max_length=10_000)] | None = None
    point: OperatingPoint | None = None  # response to a pin request: the point reported by the board
    status: HelperStatus | None = None  # response to a status request


Request = PinRequest | KeepaliveRequest | UnpinRequest | StatusRequest


class ClockClient:
    """Connection to the clock helper. Every call returns within 2 s or raises ClockError."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.point: OperatingPoint | None = None  # point pinned by this client
        self._connection: socket.socket | None = connection
        self._socket_path = path
        self._last_message_s: float | None = None  # time of the last message to the helper
        self._decoder = msgspec.json.Decoder(HelperResponse)

    @classmethod
    def connect(cls, path: Path = Path("/") / SOCKET) -> ClockClient | None:
        """Return a client of the helper, or None if no helper responds or the user has no permission (logged)."""
        connection = _open_socket(path)
        return None if connection is None else cls(connection, path)

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        """Pin the clocks at a point. Return the point reported by the board.

        Connects again if the helper was restarted.

        Raises:
            ClockError: If the helper refuses or does not respond. Nothing is pinned then.
        """
        self.point = None
        if self._connection is not None and _is_closed(self._connection):
            self.close()
        self._connection = self._connection or _open_socket(self._socket_path)
        response = self._send_request(PinRequest(point=point))
        if response.point is None:
            self.close()
            raise ClockError(
                f"clock helper at {self._socket_path} sent an unexpected response: install the same version of fedquilt"
            )
        self.point = response.point
        return response.point

    def unpin(self) -> None:
        """Unpin the clocks, if pinned.

        Raises:
            ClockError: If a setting could not be restored or the helper does not respond. The helper then restores by
                itself.
        """
        if self.point is not None:
            self.point = None
            self._send_request(UnpinRequest())

    def send_keepalive(self, now_s: float) -> None:
        """Send a keepalive, at most every 2 s and only with pinned clocks.

        Raises:
            ClockError: If the helper has unpinned the clocks. The text gives the reason.
        """
        if self.point is None:
            return
        if self._last_message_s is not None and 0 <= now_s - self._last_message_s < KEEPALIVE_S:
            return
        self._last_message_s = now_s
        try:
            self._send_request(KeepaliveRequest())
        except ClockError:
            self.point = None
            raise

    def request_status(self) -> HelperStatus:
        response = self._send_request(StatusRequest())
        return response.status or HelperStatus(clocks=())

    def close(self) -> None:
        self.point = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send_request(self, request: Request) -> HelperResponse:
        if self._connection is None:
            raise ClockError(f"clock helper at {self._socket_path} has ended: run `systemctl status fedquilt-clocks`")
        try:
            self._connection.settimeout(RESPONSE_TIMEOUT_S)
            self._connection.sendall(msgspec.json.encode(request) + b"\n")
            response = self._decoder.decode(self._read_line())
        except (OSError, *DECODE_ERRORS) as error:
            self.close()
            raise ClockError(f"clock helper at {self._socket_path} does not respond: {error}") from None
        if response.error is not None:
            raise ClockError(response.error)
        return response

    def _read_line(self) -> bytes:
        # The deadline is for the whole line: a helper that sends byte by byte must not block this process.
        assert self._connection is not None
        line, end_s = b"", time.monotonic() + RESPONSE_TIMEOUT_S
        while not line.endswith(b"\n"):
            self._connection.settimeout(max(0.001, end_s - time.monotonic()))
            chunk = self._connection.recv(65536)
            if not chunk:
                raise ConnectionResetError("connection closed")
            line += chunk
            if len(line) > MAX_RESPONSE_BYTES or time.monotonic() > end_s:
                raise TimeoutError("no complete response in time")
        return line


def _is_closed(connection: socket.socket) -> bool:
    # Between requests no data arrives, so a readable socket is a closed one.
    return bool(select.select([connection], [], [], 0)[0])


def _open_socket(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(RESPONSE_TIMEOUT_S)
    try:
        connection.connect(str(path))
    except PermissionError:
        log.warning("no permission to connect to the clock helper at %s: add this user to the group fedquilt", path)
    except OSError as error:
        log.debug("no clock helper at %s: %s", path, error)
    else:
        return connection
    connection.close()
    return None
