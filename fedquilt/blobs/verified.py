"""Files that have been compared with their sha256 of late, and need not be read for it again to know of them."""

from __future__ import annotations

import hashlib
import time
from typing import Final

from fedquilt.disk import Disk, Found

VERIFIED_S: Final = 3600.0  # for which a file that has not changed counts as verified


class Verified:
    """What one process knows of the files of a depot, by sha256.

    Raises, from every method:
        OSError: a file cannot be read.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._known: dict[str, tuple[Found, float]] = {}  # file, and when it was hashed

    def forget(self, sha256: str | None = None) -> None:
        """Hash this file again when it is asked for next; None: every file."""
        if sha256 is None:
            self._known.clear()
        else:
            self._known.pop(sha256, None)

    def note(self, path: str, sha256: str) -> None:
        """A file was given its name after its bytes were hashed."""
        found = self._disk.stat(path)
        if found is not None:
            self._known[sha256] = (found, time.monotonic())

    def touched(self, path: str, sha256: str) -> None:
        """Set the time of a file's last change to now; it stays as well known as it was."""
        known, hashed_s = self._known.get(sha256, (None, 0.0))
        same = known is not None and self._disk.stat(path) == known
        self._disk.touch(path)
        if same and (found := self._disk.stat(path)) is not None:
            self._known[sha256] = (found, hashed_s)

    def load(self, path: str, sha256: str, *, hashed: bool) -> bytes | None:
        """Read a file and hash what was read, unless it is `hashed` already; None: it is damaged."""
        for _ in range(2):
            payload = self._disk.read(path)
            if hashed or hashlib.sha256(payload).hexdigest() == sha256:
                return payload
        return None

    def holds(self, path: str, found: Found, sha256: str, *, opens: bool = False) -> bool:
        """Whether a file holds what it should; it is hashed unless that was done of late, or it is to be opened now.

        What seems to be damaged is hashed twice, so that memory which was read wrongly once condemns nothing.
        """
        known, hashed_s = self._known.get(sha256, (None, 0.0))
        if known == found and not opens and time.monotonic() < hashed_s + VERIFIED_S:
            return True
        if self._disk.digest(path) != sha256 and self._disk.digest(path) != sha256:
            return False
        self._known[sha256] = (found, time.monotonic())
        return True
