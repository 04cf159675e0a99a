"""Status messages to systemd (Type=notify, sd_notify(3)), without a library."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fedquilt.transport.link import Endpoint

WATCHDOG_INTERVAL_S: Final = 1.0  # shortest interval between messages to the watchdog


def send_notification(message: str, socket_path: str | None = None) -> None:
    """Send a message to systemd's socket, or do nothing without a socket. Socket errors are ignored."""
    address = socket_path or os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.setblocking(False)
            line.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def is_journal_stream(environ: Mapping[str, str] = os.environ, file: int = 1) -> bool:
    info = os.fstat(file)
    return environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


class WatchdogEndpoint:
    """Wrapper of an endpoint that reports readiness, liveness and `status` to systemd.

    Readiness is reported after the first step, without waiting for a broker, because a device may start without a
    network. `systemctl status` shows `status`.
    """

    def __init__(
        self, endpoint: Endpoint, status: Callable[[], str], notify: Callable[[str], None] = send_notification
    ) -> None:
        self._endpoint, self._status, self._notify = endpoint, status, notify
        self._notified_s: float | None = None
        self._sent_status = ""

    @property
    def finished(self) -> bool:
        return self._endpoint.finished

    def fds(self) -> Sequence[int]:
        return self._endpoint.fds()

    def step(self, now_s: float) -> float:
        due_s = self._endpoint.step(now_s)
        messages = []
        if self._notified_s is None:
            messages.append("READY=1")
        if self._notified_s is None or not 0 <= now_s - self._notified_s < WATCHDOG_INTERVAL_S:
            self._notified_s = now_s
            messages.append("WATCHDOG=1")
        text = " ".join(self._status().split())
        if text != self._sent_status:
            self._sent_status = text
            messages.append(f"STATUS={text}")
        if messages:
            self._notify("\n".join(messages))
        return due_s
