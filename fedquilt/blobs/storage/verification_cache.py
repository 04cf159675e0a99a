"""Cache of file verifications, so that a file is not hashed again within an hour."""

from __future__ import annotations

import hashlib
import time
from typing import Final

from fedquilt.host.disk import Disk, PathInfo

VERIFIED_S: Final = 3600.0  # for which a file that has not changed counts as verified


class VerificationCache:
    """Record of the files of a blob store that this process has hashed.

    Raises, from every method:
        OSError: If a file cannot be read.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._known: dict[str, tuple[PathInfo, float]] = {}  # file, and when it was hashed

    def forget(self, sha256: str | None = None) -> None:
        """Require a new hash of one file, or of all files if `sha256` is None."""
        if sha256 is None:
            self._known.clear()
        else:
            self._known.pop(sha256, None)

    def record_verified(self, path: str, sha256: str) -> None:
        found = self._disk.stat(path)
        if found is not None:
            self._known[sha256] = (found, time.monotonic())

    def touch(self, path: str, sha256: str) -> None:
        """Set the modification time of a file to now, without losing its verification."""
        known, hashed_s = self._known.get(sha256, (None, 0.0))
        same = known is not None and self._disk.stat(path) == known
        self._disk.touch(path)
        if same and (found := self._disk.stat(path)) is not None:
            self._known[sha256] = (found, hashed_s)

    def load(self, path: str, sha256: str, *, hashed: bool) -> bytes | None:
        """Return the bytes of a file, or None if damaged. With `hashed`, the file is not hashed."""
        for _ in range(2):
            payload = self._disk.read(path)
            if hashed or hashlib.sha256(payload).hexdigest() == sha256:
                return payload
        return None

    def is_verified(self, path: str, found: PathInfo, sha256: str, *, opens: bool = False) -> bool:
        """Return whether a file matches its sha256.

        The file is hashed unless unchanged since a hash within the last hour, and always with `opens`. A mismatch is
        hashed twice, so that one wrong read of the memory does not condemn a good file.
        """
        known, hashed_s = self._known.get(sha256, (None, 0.0))
        if known == found and not opens and time.monotonic() < hashed_s + VERIFIED_S:
            return True
        if self._disk.hash_file(path) != sha256 and self._disk.hash_file(path) != sha256:
            return False
        self._known[sha256] = (found, time.monotonic())
        return True
