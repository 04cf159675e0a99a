"""Order in which devices send what takes room on this side's disk until it has been worked on: pure, no I/O.

First come, first served, within a number of bytes: of what is sent now, and of what is here and not worked on yet. A
device whose transfer stalls goes to the end.
"""

from __future__ import annotations

import math
from typing import Final

LEAST: Final = 2  # devices whose turn it may be, whatever the bytes: one sends while another's is worked on


class Queue:
    """Devices that wait for their turn to send, and devices whose turn it is.

    A device keeps its place until all its blobs have arrived and `pace` has counted them as here.
    """

    def __init__(self) -> None:
        self._most_bytes, self._here, self._here_bytes = 0.0, 0, 0
        self._wanted: dict[str, dict[str, int]] = {}  # device -> sha256 -> bytes, of what is to come
        self._waits: dict[str, float] = {}  # device -> since when, the first to send first
        self._came: list[str] = []  # those of them that came since the last look
        self._sends: dict[str, int] = {}  # device -> bytes
        self._sends_bytes = 0
        self._held_s: dict[str, float] = {}  # device -> seconds that it waited for its first turn
        self._left: set[str] = set()  # devices of which nothing is to come, since the last `pace`
        self._news: dict[str, bool] = {}  # device -> whether it waits, as far as that is another thing than before

    def __bool__(self) -> bool:
        """Whether a device waits."""
        return bool(self._waits)

    def pace(self, here: int, here_bytes: int, most_bytes: float) -> None:
        """Note how much is here and not worked on yet, which takes the place of what has come since the last call.

        Args:
            here: number of devices that sent it.
            here_bytes: its size.
            most_bytes: most of it, and of what is sent at a time.
        """
        self._here, self._here_bytes, self._most_bytes = here, here_bytes, most_bytes
        for device in self._left - self._wanted.keys():
            self._end(device)
            self._held_s.pop(device, None)
        self._left.clear()

    def join(self, device: str, sha256: str, size: int) -> bool:
        """Let a device send a blob in its turn; whether its turn it is already."""
        self._wanted.setdefault(device, {})[sha256] = size
        if device in self._sends:
            more = max(sum(self._wanted[device].values()) - self._sends[device], 0)
            self._sends[device] += more
            self._sends_bytes += more
            return True
        if device not in self._waits:
            self._waits[device] = math.inf
            self._came.append(device)
        return False

    def has(self, device: str, sha256: str) -> bool:
        """Whether a blob is to come in turn."""
        return sha256 in self._wanted.get(device, ())

    def of(self, device: str) -> list[str]:
        """Blobs (sha256) that a device has to send in its turn."""
        return list(self._wanted.get(device, ()))

    def leave(self, device: str, sha256: str) -> None:
        """Note that a blob is here, or is not to come any more."""
        wanted = self._wanted.get(device, {})
        if wanted.pop(sha256, None) is not None and not wanted:
            del self._wanted[device]
            self._waits.pop(device, None)
            self._news.pop(device, None)
            self._left.add(device)

    def begin(self, now_s: float) -> list[str]:
        """Devices whose turn begins now."""
        begun = []
        while self._waits and self._fits(size := sum(self._wanted[next(iter(self._waits))].values())):
            device = next(iter(self._waits))
            since_s = self._waits.pop(device)
            self._held_s.setdefault(device, max(now_s - since_s, 0.0))
            self._sends[device] = size
            self._sends_bytes += size
            if since_s < math.inf:
                self._news[device] = False
            begun.append(device)
        for device in self._came:
            if self._waits.get(device) == math.inf:
                self._waits[device], self._news[device] = now_s, True
        self._came.clear()
        return begun

    def sends(self, device: str) -> bool:
        """Whether it is a device's turn, and not all is here."""
        return device in self._sends and device in self._wanted

    def stall(self, device: str, now_s: float) -> None:
        """Take a device's turn, and let it wait behind all others."""
        self._end(device)
        self._waits[device], self._news[device] = now_s, True

    def held_s(self, device: str) -> float:
        """Seconds that a device had to wait for its first turn, as long as not all is here; infinite while it does."""
        return self._held_s.get(device, math.inf if device in self._waits else 0.0)

    def take_news(self) -> dict[str, bool]:
        """Devices that wait since the last call (True), or have waited and send now (False)."""
        news, self._news = self._news, {}
        return news

    def _fits(self, size: int) -> bool:
        few = self._here + len(self._sends) < LEAST
        return few or self._here_bytes + self._sends_bytes + size <= self._most_bytes

    def _end(self, device: str) -> None:
        self._sends_bytes -= self._sends.pop(device, 0)
