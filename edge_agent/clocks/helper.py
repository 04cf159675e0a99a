"""Clock helper, the only part of fedquilt that runs as root.

The helper sets clocks for one client at a time, and accepts only frequencies that the board lists and its owner
permits: the power mode, and [governor] max_w (`fedquilt.edge_agent.clocks.owner_limits`). The helper restores the
board's settings when the client unpins, disconnects, ends or is silent beyond the watchdog's time, when the board is
too hot or its power mode changes, when the helper stops, and at its next start after a kill
(`fedquilt.edge_agent.clocks.clock_pin`). There are no threads: one `step` runs at a time.
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
    REQUEST_MOST_BYTES,
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
GROUP: Final = "fedquilt"  # its members and root may use the helper
WATCHDOG_S: Final = 10.0
LOOK_S: Final = 1.0  # interval between looks at the thermal zones, and between attempts to restore
TICK_S: Final = 0.5  # a signal is noticed within this time
CLIENTS_MOST: Final = 8

Peer = tuple[int, int, int]  # pid, uid, gid


def peer_credentials(line: socket.socket) -> Peer:
    """Return process, user and group of the other end (SO_PEERCRED, unix(7))."""
    return struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


def may_connect(who: Peer, group: int | None) -> bool:
    _, uid, gid = who
    if uid in (0, os.geteuid()) or (group is not None and gid == group):
        return True
    if group is None:
        return False
    try:
        return group in os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return False


class HelperConnection:
    def __init__(self, line: socket.socket, who: Peer) -> None:
        self.line, self.who = line, who
        self.got = b""
        self.lost: str | None = None  # why the clocks it held were released without its request

    def __str__(self) -> str:
        return f"process {self.who[0]} of user {self.who[1]}"


class ClockHelper:
    """Socket of the clock helper and the client that has pinned the clocks.

    Args:
        group: Id of the group that may connect besides root, or None for root only.
        peer: Function that returns the credentials of a connection.
    """

    def __init__(
        self,
        clamp: ClockPin,
        path: Path,
        state: Path,
        *,
        group: int | None = None,
        watchdog_s: float = WATCHDOG_S,
        peer: Callable[[socket.socket], Peer] = peer_credentials,
    ) -> None:
        self._clamp, self._path, self._group, self._peer = clamp, path, group, peer
        self._watchdog_s = watchdog_s
        self._holder: HelperConnection | None = None
        self._now_s = 0.0  # grows only
        self._seen_s: float | None = None
        self._heard_s = self._looked_s = 0.0
        self._owed: tuple[str, ...] = ()
        self._decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
        self._selector = selectors.DefaultSelector()
        self._clients: list[HelperConnection] = []
        self._lock = _lock_file(state / "lock")
        self._record_failures(clamp.restore_after_crash())
        self._door = _listen_on_socket(path, group)
        self._selector.register(self._door, selectors.EVENT_READ)

    def step(self, now_s: float, wait_s: float = 0.0) -> None:
        self._now_s += 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept_connection()
            else:
                self._receive_requests(key.data)
        if self._holder is not None and self._now_s - self._heard_s > self._watchdog_s:
            self._unpin(f"let go: no word from the client for {self._watchdog_s:g} s")
        if self._now_s - self._looked_s >= LOOK_S:
            self._looked_s = self._now_s
            if why := self._clamp.unpin_if_required():
                self._record_loss(why)
            if self._clamp.needs_restore:
                self._record_failures(self._clamp.restore())

    def close(self) -> None:
        for client in list(self._clients):
            self._disconnect(client)
        self._record_failures(self._clamp.restore())
        self._selector.close()
        self._door.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    # -- clients ------------------------------------------------------------------------------

    def _accept_connection(self) -> None:
        try:
            line, _ = self._door.accept()
        except OSError as error:
            log.warning("a connection failed: %s", error)
            return
        line.setblocking(False)
        client = HelperConnection(line, self._peer(line))
        refusal = None
        if not may_connect(client.who, self._group):
            refusal = f"user {client.who[1]} may not set clocks here: it has to be in the group fedquilt"
        elif len(self._clients) >= CLIENTS_MOST:
            refusal = f"{CLIENTS_MOST} clients speak to the helper already: let one of them hang up"
        if refusal is not None:
            _send_response(client, HelperResponse(error=refusal))
            line.close()
            return
        self._clients.append(client)
        self._selector.register(line, selectors.EVENT_READ, client)

    def _receive_requests(self, client: HelperConnection) -> None:
        try:
            some = client.line.recv(REQUEST_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        if not some:
            self._disconnect(client)
            return
        *requests, client.got = (client.got + some).split(b"\n")
        if max(map(len, (*requests, client.got))) > REQUEST_MOST_BYTES:
            _send_response(client, HelperResponse(error=f"a request is one line of at most {REQUEST_MOST_BYTES} bytes"))
            self._disconnect(client)
            return
        for request in requests:
            if not _send_response(client, self._handle_request(client, request)):
                self._disconnect(client)
                return

    def _disconnect(self, client: HelperConnection) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.line)
        client.line.close()
        if client is self._holder:
            self._unpin(f"{client} hung up: the board's own settings are put back")

    def _handle_request(self, client: HelperConnection, line: bytes) -> HelperResponse:
        try:
            request = self._decoder.decode(line)
        except DECODE_ERRORS as error:
            return HelperResponse(error=f"no request that the helper knows: {error}")
        if isinstance(request, StatusRequest):
            return HelperResponse(status=self._read_status())
        if client is self._holder:
            self._heard_s = self._now_s
        if isinstance(request, PinRequest):
            return self._pin(client, request)
        if isinstance(request, KeepaliveRequest):
            return HelperResponse(
                error=None if client is self._holder else client.lost or "this client holds no clocks"
            )
        if client is not self._holder:
            return HelperResponse()
        self._unpin(None)
        return HelperResponse(error=f"not all is put back: {'; '.join(self._owed)}" if self._owed else None)

    def _pin(self, client: HelperConnection, request: PinRequest) -> HelperResponse:
        holder = self._holder
        if holder is not None and holder is not client:
            held = self._clamp.point.name if self._clamp.point is not None else ""
            return HelperResponse(error=f"{holder} holds the clocks at {held!r}: one client at a time")
        client.lost = None
        try:
            point = self._clamp.pin(request.point)
        except ClockError as error:
            self._holder = None
            return HelperResponse(error=str(error))
        self._holder, self._heard_s = client, self._now_s
        log.info("%s holds %s", client, point)
        return HelperResponse(point=point)

    # -- letting go ---------------------------------------------------------------------------

    def _unpin(self, why: str | None) -> None:
        self._record_loss(why)
        self._record_failures(self._clamp.restore())

    def _record_loss(self, why: str | None) -> None:
        """Forget the holder of the clocks, and store the reason for the response to its next keepalive."""
        if why is not None:
            log.warning("%s", why)
        if self._holder is not None:
            self._holder.lost, self._holder = why, None

    def _record_failures(self, left: list[str]) -> None:
        if tuple(left) != self._owed:
            self._owed = tuple(left)
            for sentence in left:
                log.error("not put back: %s", sentence)

    def _read_status(self) -> HelperStatus:
        found = controls.discover_controls(self._clamp.root)
        owner = self._clamp.owner_mode() if found.modes else None
        most = self._clamp.control_limits(found, owner)
        return HelperStatus(
            clocks=tuple(read_clock_state(lever, most.get(lever.name)) for lever in found.found),
            mode=owner,
            modes=tuple(mode.name for mode in found.modes),
            temperature_c=controls.hottest_zone_c(self._clamp.root),
            hottest_c=self._clamp.hottest_c,
            max_w=self._clamp.max_w,
            holder=None if self._holder is None else str(self._holder),
            point=self._clamp.point,
            owes=self._owed,
        )


def read_clock_state(lever: ClockControl, ceiling: int | None = None) -> ClockState:
    def read_hz(path: Path | None) -> float | None:
        value = controls.read_number(path)
        return None if value is None or value < 0 else float(value * lever.unit_hz)

    return ClockState(
        name=lever.name,
        kind=lever.kind,
        listed_hz=lever.listed_hz,
        low_hz=read_hz(lever.low),
        high_hz=read_hz(lever.high) or None,  # a cap of 0 means none
        now_hz=read_hz(lever.now),
        governor=controls.read_line(lever.governor),
        hidden=lever.hidden,
        ceiling_hz=None if ceiling is None else float(ceiling * lever.unit_hz),
    )


# -- the process ----------------------------------------------------------------------------------


def run_helper(
    root: Path,
    *,
    max_w: float | None = None,
    watts: Callable[[OperatingPoint], float | None] | None = None,
) -> None:
    """Run the clock helper until SIGTERM, SIGINT or SIGHUP, then restore the clocks.

    Socket and journal are below `root`. Limits are as in `ClockPin`.
    """
    try:
        group = grp.getgrnam(GROUP).gr_gid
    except KeyError:
        group = None
    ended: list[int] = []
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, lambda kind, _: ended.append(kind))
    path, state = root / SOCKET, root / STATE
    clamp = ClockPin(root, state, max_w=max_w, watts=watts)
    helper = ClockHelper(clamp, path, state, group=group)
    try:
        print(
            f"setting clocks for {'root alone' if group is None else f'root and the group {GROUP}'} on {path}",
            flush=True,
        )
        send_notification("READY=1")
        while not ended:
            helper.step(time.monotonic(), TICK_S)
            send_notification("WATCHDOG=1")
    finally:
        send_notification("STOPPING=1")
        helper.close()


def _lock_file(path: Path) -> int:
    # Two helpers would undo each other's settings.
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise StoreError(f"another clock helper has {path.parent} already") from None
        raise StoreError(f"{path} cannot be locked: {error.strerror}; run the helper as root") from None
    return number


def _listen_on_socket(path: Path, group: int | None) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    before = os.umask(0o177)
    try:
        if path.is_socket():
            path.unlink()  # left by a killed helper: by the lock none is alive
        door.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o660)
        door.listen(CLIENTS_MOST)
    except OSError as error:
        door.close()
        raise StoreError(f"no socket at {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    door.setblocking(False)
    return door


def _send_response(client: HelperConnection, answer: HelperResponse) -> bool:
    data = msgspec.json.encode(answer) + b"\n"
    try:
        return client.line.send(data) == len(data)
    except OSError:
        return False
