"""Status file of the device's model runner (`fedquilt model serve`): HOME/models/served.json."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.core import DECODE_ERRORS, Count, DeviceReport, OptionalDigest
from fedquilt.host.disk import REAL, Disk

FILE: Final = "served.json"
ACTIVE_S: Final = 60.0  # time without a change of the file after which the runner counts as ended
MAX_SIZE_BYTES: Final = 64 * 1024
MAX_LABELS: Final = 500  # most labels that an accuracy counts, the latest ones

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class RunnerStatus(DeviceReport, frozen=True):
    at: float = 0.0  # seconds since 1970
    model: OptionalDigest = ""  # sha256 of the model in use
    served: Count = 0
    failed: Count = 0  # runs of the network that failed for valid inputs
    latency_s: float | None = None
    drift: Share | None = None  # of the inputs: 0 as at the start, 1 completely different
    accuracy: Share | None = None  # None without labels
    labelled: Count = 0


class RunnerStatusReader:
    """Reader of the model runner's status file.

    A runner counts as active while its file changes, independent of the board's clock.
    """

    def __init__(self, folder: Path, disk: Disk = REAL, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._disk, self._clock = folder / FILE, disk, clock
        self._last_status = RunnerStatus()
        self._payload: bytes | None = None
        self._changed_s = -math.inf  # when the file was last seen to have changed

    def read_status(self) -> RunnerStatus | None:
        """Return the last valid status, or None if the runner is not active."""
        try:
            file_stat = self._disk.stat(self._file)
            payload = None if file_stat is None else self._disk.read(self._file, 0, MAX_SIZE_BYTES)
        except OSError:
            payload = None
        if payload is not None and payload != self._payload:
            if self._payload is not None or self._is_recent(payload):
                self._changed_s = self._clock()
            self._payload = payload
            self._last_status = _decode_status(payload) or self._last_status
        return self._last_status if self._clock() <= self._changed_s + ACTIVE_S else None

    @property
    def unchanged_s(self) -> float:
        """Seconds since `read_status` last found the file changed."""
        return self._clock() - self._changed_s

    @staticmethod
    def _is_recent(payload: bytes) -> bool:
        status = _decode_status(payload)
        return status is not None and abs(time.time() - status.at) <= ACTIVE_S


def _decode_status(payload: bytes) -> RunnerStatus | None:
    try:
        return msgspec.json.decode(payload, type=RunnerStatus)
    except DECODE_ERRORS:
        return None
