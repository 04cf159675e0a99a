"""Intake of a blob: bytes that a carrier brings in order are checked and written into the blob's part.

Chunks are compared with the manifest one by one only where they are damaged: a blob that comes from its first byte to
its last is hashed once, as it comes. Chunks that were here before, or came over the link, are hashed at the end.
"""

from __future__ import annotations

import hashlib
import threading

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, LinkError


class ClosedError(LinkError):
    """The blob is not taken from this carrier any more."""


class ContentError(LinkError):
    """A carrier has brought other bytes than the manifest's."""


class Intake:
    """Intake of one blob from one carrier. A thread writes; the loop may close the intake meanwhile.

    Args:
        depot: has the blob's part open: `Depot.resume`.
        manifest: of the blob.
        had: one byte per chunk: 1 if it is here and verified.
        through: take all from the first missing chunk on, as one stream; else the missing chunks alone.
    """

    def __init__(self, depot: Depot, manifest: wire.Manifest, had: bytes | bytearray, *, through: bool = False) -> None:
        self.manifest = manifest
        self.ref = BlobRef(sha256=manifest.sha256, size=manifest.size)
        self.had: bytes | bytearray = bytes(had)
        self.moved = 0  # bytes written
        self.at = 0  # offset of the next byte
        self.finished = False  # whether the part is the blob
        self._depot = depot
        self._lock = threading.Lock()
        self._open = True
        self._turn = 0
        self._runs = _runs(manifest, self.had, through)
        self._whole = hashlib.sha256() if 1 not in self.had else None
        self._settle()

    def turn(self) -> int:
        """Begin to write, in place of an earlier writer."""
        with self._lock:
            self._turn += 1
            return self._turn

    def due(self) -> tuple[int, int] | None:
        """Range of bytes to bring next, (offset, end); None: all have been brought."""
        return (self.at, self._runs[0][1]) if self._runs else None

    def write(self, piece: memoryview, turn: int) -> None:
        """Write the next bytes of the range that is due.

        Raises:
            ClosedError: the bytes are not wanted any more, or not from this writer.
            StoreError: the disk refuses the bytes.
        """
        with self._lock:
            self._require(turn)
            if not self._runs or self.at + len(piece) > self._runs[0][1]:
                raise ClosedError("more bytes came than were asked for")
            self._depot.write(self.ref.sha256, self.at, piece)
            if self._whole is not None:
                self._whole.update(piece)
            self.at += len(piece)
            self.moved += len(piece)
            self._settle()

    def finish(self, turn: int) -> None:
        """Turn the part into the blob.

        Raises:
            ContentError: the bytes are not the manifest's; `had` says which chunks are.
            ClosedError: the blob is not wanted any more.
            StoreError: the disk refuses, or the manifest does not describe this blob.
        """
        with self._lock:
            self._require(turn)
            self._open = False
            digest = None if self._whole is None else self._whole.hexdigest()
            if digest != self.ref.sha256:
                digest = None
                self.had = self._depot.resume(self.manifest)
                if bad := self.had.count(0):
                    raise ContentError(f"it brought {bad} of {len(self.had)} chunks with other content")
            self._depot.finish(self.ref, digest)
            self.finished = True

    def complete(self) -> None:
        """Turn a part into the blob that came whole over the link.

        Raises:
            ClosedError: the blob is not wanted any more.
            StoreError: the disk refuses, or the part is not this blob.
        """
        with self._lock:
            self._require(self._turn)
            self._open = False
            self._depot.finish(self.ref)
            self.finished = True

    def look(self) -> None:
        """Find out which chunks are here; nothing is taken afterwards.

        Raises:
            StoreError: the disk refuses.
        """
        with self._lock:
            was, self._open = self._open, False
        if was:
            self.had = self._depot.resume(self.manifest)

    def close(self) -> None:
        """Accept no further bytes. When this returns nothing touches the part any more: another intake may have it."""
        with self._lock:
            self._open = False

    def _require(self, turn: int) -> None:
        if not self._open or turn != self._turn:
            raise ClosedError("it comes another way meanwhile")

    def _settle(self) -> None:
        while self._runs and self.at >= self._runs[0][1]:
            self._runs.pop(0)
        if self._runs:
            self.at = max(self.at, self._runs[0][0])


def _runs(manifest: wire.Manifest, had: bytes | bytearray, through: bool) -> list[tuple[int, int]]:
    """Ranges of bytes of the chunks that are missing."""
    found: list[tuple[int, int]] = []
    for index, here in enumerate(had):
        offset, size = chunks.extent(manifest, index)
        if here:
            continue
        if through:
            return [(offset, manifest.size)]
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + size)
        else:
            found.append((offset, offset + size))
    return found
