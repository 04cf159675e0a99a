"""What orders hold, by content: encoded and hashed once, however many devices are sent it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedquilt import tensors
from fedquilt.core import BlobRef, Tensors


class Contents:
    """The tensors of one round's orders. Those that are the same object are looked at once.

    Args:
        folder: where each content is written, under its sha256; None: nowhere.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[int, tuple[Tensors, BlobRef]] = {}  # with the object, so that its id stays its own

    def ref(self, value: Tensors) -> BlobRef:
        """The blob that these tensors are sent as."""
        if id(value) not in self._known:
            payload = tensors.encode(value)
            ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            if self._folder is not None and not (path := self._folder / ref.sha256).exists():
                path.write_bytes(payload)
            self._known[id(value)] = (value, ref)
        return self._known[id(value)][1]

    def path(self, ref: BlobRef) -> Path:
        """Where a content that was written is."""
        assert self._folder is not None
        return self._folder / ref.sha256

    def drop(self) -> None:
        """Remove what was written."""
        if self._folder is not None:
            for sha256 in {ref.sha256 for _, ref in self._known.values()}:
                (self._folder / sha256).unlink(missing_ok=True)
        self._known.clear()
