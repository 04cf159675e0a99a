"""What the board's model runner (`fedquilt serve-model`) says of its answers: HOME/models/served.json."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.core import UNDECODABLE, AnyDigest, Count, Told
from fedquilt.disk import REAL, Disk

FILE: Final = "served.json"
FRESH_S: Final = 60.0  # a runner that has written nothing for longer is not there
SIZE_MOST: Final = 64 * 1024
LATEST: Final = 500  # most labels that an accuracy counts, the latest ones

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Served(Told, frozen=True):
    """Content of served.json. Counts are of the runner's process."""

    at: float = 0.0  # seconds since 1970
    model: AnyDigest = ""  # that it runs
    served: Count = 0
    failed: Count = 0
    latency_s: float | None = None
    drift: Share | None = None  # of the inputs: 0 as at first, 1 unlike it
    accuracy: Share | None = None  # where labels arrive
    labelled: Count = 0


class Runner:
    """The runner, as its file tells: a runner is there while its file changes, whatever the board's clock says.

    Args:
        folder: of the models.
        disk: where that is.
        clock: seconds that pass.
    """

    def __init__(self, folder: Path, disk: Disk = REAL, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._disk, self._clock = folder / FILE, disk, clock
        self._last = Served()
        self._payload: bytes | None = None
        self._changed_s = -math.inf  # when the file was last seen to have changed

    def look(self) -> Served | None:
        """What the runner says now; None: no runner is there. A file of another form says nothing."""
        try:
            found = self._disk.stat(self._file)
            payload = None if found is None else self._disk.read(self._file, 0, SIZE_MOST)
        except OSError:
            payload = None
        if payload is not None and payload != self._payload:
            if self._payload is not None or self._young(payload):
                self._changed_s = self._clock()
            self._payload = payload
            self._last = _decoded(payload) or self._last
        return self._last if self._clock() <= self._changed_s + FRESH_S else None

    @property
    def quiet_s(self) -> float:
        """Seconds for which the runner has written nothing, as of the latest look."""
        return self._clock() - self._changed_s

    @staticmethod
    def _young(payload: bytes) -> bool:
        """Whether a file that is seen for the first time was written just now, by the board's clock."""
        found = _decoded(payload)
        return found is not None and abs(time.time() - found.at) <= FRESH_S


def _decoded(payload: bytes) -> Served | None:
    try:
        return msgspec.json.decode(payload, type=Served)
    except UNDECODABLE:
        return None
