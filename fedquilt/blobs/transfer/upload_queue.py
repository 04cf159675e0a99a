"""Order of the devices' uploads, which take disk space until they are processed. Pure, no I/O.

Uploads are served in order of arrival, within a limit on the bytes that are being sent or not processed yet. A device
whose transfer stalls goes to the end.
"""

from __future__ import annotations

import math
from typing import Final

LEAST: Final = 2  # devices that may send regardless of size: one sends while another's update is validated


class UploadQueue:
    """Queue of devices that wait to upload, and devices that are uploading.

    A device keeps its turn until all its blobs have arrived and are counted by `set_unprocessed`.
    """

    def __init__(self) -> None:
        self._most_bytes, self._here, self._here_bytes = 0.0, 0, 0
        self._wanted: dict[str, dict[str, int]] = {}  # device -> sha256 -> bytes, of what is to come
        self._waits: dict[str, float] = {}  # device -> since when, the first to send first
        self._came: list[str] = []  # devices added since the latest `take_changes`
        self._sends: dict[str, int] = {}  # device -> bytes
        self._sends_bytes = 0
        self._held_s: dict[str, float] = {}  # device -> seconds that it waited for its first turn
        self._left: set[str] = set()  # devices of which nothing is to come, since the last `set_unprocessed`
        self._news: dict[str, bool] = {}  # device -> whether it waits, as far as that is another thing than before

    def __bool__(self) -> bool:
        return bool(self._waits)

    def set_unprocessed(self, here: int, here_bytes: int, most_bytes: float) -> None:
        """Set the amount of uploads that are stored and not processed yet.

        Args:
            here: The number of devices whose uploads these are.
            here_bytes: The size of these uploads.
            most_bytes: The limit on the sum of `here_bytes` and the uploads under way.
        """
        self._here, self._here_bytes, self._most_bytes = here, here_bytes, most_bytes
        for device in self._left - self._wanted.keys():
            self._end_turn(device)
            self._held_s.pop(device, None)
        self._left.clear()

    def add_blob(self, device: str, sha256: str, size: int) -> bool:
        """Add a blob of a device and return whether the device may send now."""
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

    def contains(self, device: str, sha256: str) -> bool:
        return sha256 in self._wanted.get(device, ())

    def pending_blobs(self, device: str) -> list[str]:
        return list(self._wanted.get(device, ()))

    def remove_blob(self, device: str, sha256: str) -> None:
        wanted = self._wanted.get(device, {})
        if wanted.pop(sha256, None) is not None and not wanted:
            del self._wanted[device]
            self._waits.pop(device, None)
            self._news.pop(device, None)
            self._left.add(device)

    def start_turns(self, now_s: float) -> list[str]:
        """Start the turns of waiting devices within the limit. Return these devices."""
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

    def is_sending(self, device: str) -> bool:
        return device in self._sends and device in self._wanted

    def move_to_end(self, device: str, now_s: float) -> None:
        self._end_turn(device)
        self._waits[device], self._news[device] = now_s, True

    def waiting_s(self, device: str) -> float:
        """Return the seconds a device waited for its first turn, or infinity while it waits."""
        return self._held_s.get(device, math.inf if device in self._waits else 0.0)

    def take_changes(self) -> dict[str, bool]:
        """Return the devices that began to wait (True) or to send (False) since the last call."""
        news, self._news = self._news, {}
        return news

    def _fits(self, size: int) -> bool:
        few = self._here + len(self._sends) < LEAST
        return few or self._here_bytes + self._sends_bytes + size <= self._most_bytes

    def _end_turn(self, device: str) -> None:
        self._sends_bytes -= self._sends.pop(device, 0)
