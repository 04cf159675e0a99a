"""Status messages of a service to systemd (Type=notify): sd_notify(3), without its library."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fedquilt.transport.link import Endpoint

BEAT_S: Final = 1.0  # shortest interval between messages to the watchdog


def notify(word: str, to: str | None = None) -> None:
    """Send a message to systemd, if it started this process."""
    address = to or os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.setblocking(False)
            line.sendto(word.encode(), "\0" + address[1:] if address.startswith("@") else address)


def journaled(environ: Mapping[str, str] = os.environ, file: int = 1) -> bool:
    """Whether a file descriptor, standard output by default, leads to systemd's journal, which others may read."""
    found = os.fstat(file)
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Watched:
    """Endpoint that reports its steps to systemd: ready after the first, alive after each, and its status in words.

    It is ready before it has a broker: a board starts without a network, and waits for it.

    Args:
        status: one sentence for `systemctl status`.
    """

    def __init__(self, endpoint: Endpoint, status: Callable[[], str], tell: Callable[[str], None] = notify) -> None:
        self._endpoint, self._status, self._tell = endpoint, status, tell
        self._told_s: float | None = None
        self._said = ""

    @property
    def finished(self) -> bool:
        """Whether the endpoint has finished."""
        return self._endpoint.finished

    def fds(self) -> Sequence[int]:
        """File descriptors of the endpoint."""
        return self._endpoint.fds()

    def step(self, now_s: float) -> float:
        """Step the endpoint, then report to systemd, not more often than necessary."""
        due_s = self._endpoint.step(now_s)
        words = []
        if self._told_s is None:
            words.append("READY=1")
        if self._told_s is None or not 0 <= now_s - self._told_s < BEAT_S:
            self._told_s = now_s
            words.append("WATCHDOG=1")
        said = " ".join(self._status().split())
        if said != self._said:
            self._said = said
            words.append(f"STATUS={said}")
        if words:
            self._tell("\n".join(words))
        return due_s
