"""Clock helper, the only part of fedquilt that runs as root.

The helper sets clocks for one client at a time, and only to frequencies that the board lists and its owner permits by
the power mode and [governor] max_w (`fedquilt.edge_agent.clocks.owner_limits`). The board's settings are restored when
the client unpins, disconnects or is silent for too long. They are also restored when the board is too hot, its power
mode changes or the helper stops. After a kill, the next start restores them (`fedquilt.edge_agent.clocks.clock_pin`).
There are no threads: one `step` runs at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import logging
import os
import pwd
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fedquilt.core import DECODE_ERRORS, ClockError, OperatingPoint, StoreError
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import (
    MAX_REQUEST_BYTES,
    SOCKET,
    ClockState,
    HelperResponse,
    HelperStatus,
    KeepaliveRequest,
    PinRequest,
    Request,
    StatusRequest,
)
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.controls import ClockControl
from fedquilt.systemd import send_notification

log = logging.getLogger("fedquilt.clocks")

STATE: Final = "var/lib/fedquilt-clocks"
GROUP: Final = "fedquilt"  # only members of this group and root may use the helper
WATCHDOG_S: Final = 10.0
CHECK_S: Final = 1.0  # interval between readings of the thermal zones, and between attempts to restore
TICK_S: Final = 0.5  # longest wait before a signal is handled
MAX_CLIENTS: Final = 8

Peer = tuple[int, int, int]  # ids of process, user and group of a client


def peer_credentials(connection: socket.socket) -> Peer:
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


def may_connect(peer: Peer, group: int | None) -> bool:
    _, uid, gid = peer
    if uid in (0, os.geteuid()) or (group is not None and gid == group):
        return True
    if group is None:
        return False
    try:
        return group in os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return False


class HelperConnection:
    def __init__(self, line: socket.socket, peer: Peer) -> None:
        self.socket, self.peer = line, peer
        self.received = b""
        self.unpin_reason: str | None = None  # why the helper has unpinned the client's clocks

    def __str__(self) -> str:
        return f"process {self.peer[0]} of user {self.peer[1]}"


class ClockHelper:
    """Socket of the clock helper and the client that has pinned the clocks.

    Args:
        clock_pin: Clocks to pin. Settings of a killed helper are restored at once.
        path: Path of the socket.
        state: Folder with the lock, which only one helper can have.
        group: Id of the group that may connect besides root, or None for root only.
        read_peer: Function that returns the credentials of a connection.
    """

    def __init__(
        self,
        clock_pin: ClockPin,
        path: Path,
        state: Path,
        *,
        group: int | None = None,
        watchdog_s: float = WATCHDOG_S,
        read_peer: Callable[[socket.socket], Peer] = peer_credentials,
    ) -> None:
        self._clock_pin, self._path, self._group, self._read_peer = clock_pin, path, group, read_peer
        self._watchdog_s = watchdog_s
        self._holder: HelperConnection | None = None
        self._now_s = 0.0  # never decreases
        self._last_step_s: float | None = None
        self._last_message_s = self._last_check_s = 0.0
        self._unrestored_settings: tuple[str, ...] = ()
        self._decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
        self._selector = selectors.DefaultSelector()
        self._clients: list[HelperConnection] = []
        self._lock = _lock_file(state / "lock")
        self._record_failures(clock_pin.restore_after_crash())
        self._listener = _listen_on_socket(path, group)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def step(self, now_s: float, wait_s: float = 0.0) -> None:
        """Handle requests for up to `wait_s`. Unpin the clocks if the client is silent or the board too hot."""
        self._now_s += 0.0 if self._last_step_s is None else max(0.0, now_s - self._last_step_s)
        self._last_step_s = now_s
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept_connection()
            else:
                self._receive_requests(key.data)
        if self._holder is not None and self._now_s - self._last_message_s > self._watchdog_s:
            self._unpin(f"clocks unpinned: the client was silent for {self._watchdog_s:g} s")
        if self._now_s - self._last_check_s >= CHECK_S:
            self._last_check_s = self._now_s
            if reason := self._clock_pin.unpin_if_required():
                self._record_loss(reason)
            if self._clock_pin.needs_restore:
                self._record_failures(self._clock_pin.restore())

    def close(self) -> None:
        for client in list(self._clients):
            self._disconnect(client)
        self._record_failures(self._clock_pin.restore())
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    # -- clients ------------------------------------------------------------------------------

    def _accept_connection(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("connection to a client failed: %s", error)
            return
        connection.setblocking(False)
        client = HelperConnection(connection, self._read_peer(connection))
        refusal = None
        if not may_connect(client.peer, self._group):
            refusal = f"user {client.peer[1]} may not set clocks: add the user to the group fedquilt"
        elif len(self._clients) >= MAX_CLIENTS:
            refusal = f"{MAX_CLIENTS} clients are connected already: disconnect one"
        if refusal is not None:
            _send_response(client, HelperResponse(error=refusal))
            connection.close()
            return
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive_requests(self, client: HelperConnection) -> None:
        try:
            chunk = client.socket.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._disconnect(client)
            return
        *requests, client.received = (client.received + chunk).split(b"\n")
        if max(map(len, (*requests, client.received))) > MAX_REQUEST_BYTES:
            _send_response(client, HelperResponse(error=f"request is longer than {MAX_REQUEST_BYTES} bytes"))
            self._disconnect(client)
            return
        for request in requests:
            if not _send_response(client, self._handle_request(client, request)):
                self._disconnect(client)
                return

    def _disconnect(self, client: HelperConnection) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client is self._holder:
            self._unpin(f"{client} has disconnected: restoring the board's own settings")

    def _handle_request(self, client: HelperConnection, line: bytes) -> HelperResponse:
        try:
            request = self._decoder.decode(line)
        except DECODE_ERRORS as error:
            return HelperResponse(error=f"request is malformed or unknown: {error}")
        if isinstance(request, StatusRequest):
            return HelperResponse(status=self._read_status())
        if client is self._holder:
            self._last_message_s = self._now_s
        if isinstance(request, PinRequest):
            return self._pin(client, request)
        if isinstance(request, KeepaliveRequest):
            return HelperResponse(
                error=None if client is self._holder else client.unpin_reason or "this client has pinned no clocks"
            )
        if client is not self._holder:
            return HelperResponse()
        self._unpin(None)
        return HelperResponse(
            error=f"not restored: {'; '.join(self._unrestored_settings)}" if self._unrestored_settings else None
        )

    def _pin(self, client: HelperConnection, request: PinRequest) -> HelperResponse:
        holder = self._holder
        if holder is not None and holder is not client:
            point_name = self._clock_pin.point.name if self._clock_pin.point is not None else ""
            return HelperResponse(error=f"{holder} has pinned the clocks at {point_name!r}: stop that process first")
        client.unpin_reason = None
        try:
            point = self._clock_pin.pin(request.point)
        except ClockError as error:
            self._holder = None
            return HelperResponse(error=str(error))
        self._holder, self._last_message_s = client, self._now_s
        log.info("%s has pinned %s", client, point)
        return HelperResponse(point=point)

    # -- unpinning -----------------------------------------------------------------------------

    def _unpin(self, reason: str | None) -> None:
        self._record_loss(reason)
        self._record_failures(self._clock_pin.restore())

    def _record_loss(self, reason: str | None) -> None:
        """Log why the clocks were unpinned, and keep the reason for the client's next keepalive."""
        if reason is not None:
            log.warning("%s", reason)
        if self._holder is not None:
            self._holder.unpin_reason, self._holder = reason, None

    def _record_failures(self, failures: list[str]) -> None:
        if tuple(failures) != self._unrestored_settings:
            self._unrestored_settings = tuple(failures)
            for sentence in failures:
                log.error("clock setting not restored: %s", sentence)

    def _read_status(self) -> HelperStatus:
        clock_controls = controls.discover_controls(self._clock_pin.root)
        owner = self._clock_pin.owner_mode() if clock_controls.modes else None
        limits = self._clock_pin.control_limits(clock_controls, owner)
        return HelperStatus(
            clocks=tuple(read_clock_state(control, limits.get(control.name)) for control in clock_controls.controls),
            mode=owner,
            modes=tuple(mode.name for mode in clock_controls.modes),
            temperature_c=controls.hottest_zone_c(self._clock_pin.root),
            max_temperature_c=self._clock_pin.max_temperature_c,
            max_w=self._clock_pin.max_w,
            holder=None if self._holder is None else str(self._holder),
            point=self._clock_pin.point,
            unrestored_settings=self._unrestored_settings,
        )


def read_clock_state(control: ClockControl, limit: int | None = None) -> ClockState:
    def read_hz(path: Path | None) -> float | None:
        value = controls.read_number(path)
        return None if value is None or value < 0 else float(value * control.unit_hz)

    return ClockState(
        name=control.name,
        kind=control.kind,
        listed_hz=control.listed_hz,
        low_hz=read_hz(control.low),
        high_hz=read_hz(control.high) or None,  # a cap of 0 means no cap
        now_hz=read_hz(control.current),
        governor=controls.read_line(control.governor),
        hidden=control.is_list_hidden,
        ceiling_hz=None if limit is None else float(limit * control.unit_hz),
    )


# -- the process ----------------------------------------------------------------------------------


def run_helper(
    root: Path,
    *,
    max_w: float | None = None,
    power_of_point: Callable[[OperatingPoint], float | None] | None = None,
) -> None:
    """Run the clock helper until SIGTERM, SIGINT or SIGHUP, then restore the clocks.

    Socket and journal are below `root`. Limits are as in `ClockPin`.
    """
    try:
        group = grp.getgrnam(GROUP).gr_gid
    except KeyError:
        group = None
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    path, state = root / SOCKET, root / STATE
    clock_pin = ClockPin(root, state, max_w=max_w, power_of_point=power_of_point)
    helper = ClockHelper(clock_pin, path, state, group=group)
    try:
        print(
            f"setting clocks for {'root alone' if group is None else f'root and the group {GROUP}'} on {path}",
            flush=True,
        )
        send_notification("READY=1")
        while not signals:
            helper.step(time.monotonic(), TICK_S)
            send_notification("WATCHDOG=1")
    finally:
        send_notification("STOPPING=1")
        helper.close()


def _lock_file(path: Path) -> int:
    # Two helpers would undo each other's settings.
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise StoreError(f"{path.parent} is in use by another clock helper: stop that one") from None
        raise StoreError(f"{path} cannot be locked ({error.strerror}): run the helper as root") from None
    return fd


def _listen_on_socket(path: Path, group: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    previous_umask = os.umask(0o177)
    try:
        if path.is_socket():
            path.unlink()  # the socket of a killed helper, because the lock is free
        listener.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o660)
        listener.listen(MAX_CLIENTS)
    except OSError as error:
        listener.close()
        raise StoreError(f"socket {path} cannot be created: {error.strerror or error}") from None
    finally:
        os.umask(previous_umask)
    listener.setblocking(False)
    return listener


def _send_response(client: HelperConnection, response: HelperResponse) -> bool:
    data = msgspec.json.encode(response) + b"\n"
    try:
        return client.socket.send(data) == len(data)
    except OSError:
        return False
