"""Writer of a blob's part: checks bytes that a transfer backend brings in order.

A blob that arrives from the first byte to the last is hashed once, on arrival. Chunks that were stored before are
hashed at the end. Chunks are compared with the manifest one by one only if the whole blob does not match.
"""

from __future__ import annotations

import hashlib
import threading

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.storage.store import BlobStore
from fedquilt.core import BlobRef, LinkError


class WriterClosedError(LinkError): ...


class ContentError(LinkError): ...


class BlobWriter:
    """Writer of one blob's part, for one transfer. Another thread may close the writer.

    Args:
        depot: The blob store with the open part (`BlobStore.open_part`).
        manifest: The manifest of the blob.
        had: One byte per chunk, 1 if the chunk is stored and verified.
        through: Whether to write everything from the first missing chunk on, instead of the missing chunks alone.
    """

    def __init__(
        self, depot: BlobStore, manifest: wire.BlobManifest, had: bytes | bytearray, *, through: bool = False
    ) -> None:
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
        self._runs = _missing_ranges(manifest, self.had, through)
        self._whole = hashlib.sha256() if 1 not in self.had else None
        self._skip_complete_ranges()

    def replace_writer(self) -> int:
        """Return the number of a new writer. Writes of earlier writers then fail."""
        with self._lock:
            self._turn += 1
            return self._turn

    def next_range(self) -> tuple[int, int] | None:
        """Return the next range of bytes to fetch, (offset, end), or None if all are written."""
        return (self.at, self._runs[0][1]) if self._runs else None

    def write(self, piece: memoryview, turn: int) -> None:
        """Write the next bytes of the range that `next_range` returns.

        Raises:
            WriterClosedError: If the writer was closed or replaced, or the bytes exceed the range.
            StoreError: If the disk refuses the bytes.
        """
        with self._lock:
            self._require_current(turn)
            if not self._runs or self.at + len(piece) > self._runs[0][1]:
                raise WriterClosedError("more bytes came than were asked for")
            self._depot.write_part(self.ref.sha256, self.at, piece)
            if self._whole is not None:
                self._whole.update(piece)
            self.at += len(piece)
            self.moved += len(piece)
            self._skip_complete_ranges()

    def finish(self, turn: int) -> None:
        """Verify the part and turn it into the blob.

        Raises:
            ContentError: If the bytes do not match the manifest. `had` then has the valid chunks.
            WriterClosedError: If the writer was closed or replaced.
            StoreError: If the disk refuses, or the manifest does not describe this blob.
        """
        with self._lock:
            self._require_current(turn)
            self._open = False
            digest = None if self._whole is None else self._whole.hexdigest()
            if digest != self.ref.sha256:
                digest = None
                self.had = self._depot.open_part(self.manifest)
                if bad := self.had.count(0):
                    raise ContentError(f"it brought {bad} of {len(self.had)} chunks with other content")
            self._depot.finish_part(self.ref, digest)
            self.finished = True

    def finish_received(self) -> None:
        """Turn a part that arrived completely over the link into the blob.

        Raises:
            WriterClosedError: If the writer was closed.
            StoreError: If the disk refuses, or the part is not this blob.
        """
        with self._lock:
            self._require_current(self._turn)
            self._open = False
            self._depot.finish_part(self.ref)
            self.finished = True

    def close_and_check(self) -> None:
        """Close the writer and check which chunks are stored.

        Raises:
            StoreError: If the disk refuses.
        """
        with self._lock:
            was, self._open = self._open, False
        if was:
            self.had = self._depot.open_part(self.manifest)

    def close(self) -> None:
        """Close the writer. After the return no thread writes to the part."""
        with self._lock:
            self._open = False

    def _require_current(self, turn: int) -> None:
        if not self._open or turn != self._turn:
            raise WriterClosedError("it comes another way meanwhile")

    def _skip_complete_ranges(self) -> None:
        while self._runs and self.at >= self._runs[0][1]:
            self._runs.pop(0)
        if self._runs:
            self.at = max(self.at, self._runs[0][0])


def _missing_ranges(manifest: wire.BlobManifest, had: bytes | bytearray, through: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index, here in enumerate(had):
        offset, size = chunks.chunk_extent(manifest, index)
        if here:
            continue
        if through:
            return [(offset, manifest.size)]
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + size)
        else:
            found.append((offset, offset + size))
    return found
