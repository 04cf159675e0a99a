"""Blobs of many devices of one process, each content on disk once: for simulated fleets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef
from fedquilt.disk import Place


class Shared:
    """Common store of many depots of one process, each content once."""

    def __init__(self, folder: Path) -> None:
        self.depot = Depot(folder, durable=False)
        self.depot.remove_all_but(set())  # leftovers of a killed process
        self._holders: Counter[str] = Counter()  # sha256 -> number of depots that have it

    def add(self, ref: BlobRef) -> None:
        """Count one more depot with this blob."""
        self._holders[ref.sha256] += 1

    def drop(self, sha256: str) -> None:
        """Count one depot less with this blob; the last one removes it."""
        self._holders[sha256] -= 1
        if not self._holders[sha256]:
            del self._holders[sha256]
            self.depot.drop(sha256)


class Lodger(Depot):
    """Depot whose blobs are in a shared one. It loses them with its process; its own folder is created when needed.

    That folder holds partial downloads, and files given to `put_file`, which stay.
    """

    def __init__(self, folder: Path, shared: Shared) -> None:
        self._shared = shared
        self._here: dict[str, BlobRef] = {}  # by sha256, the longest unused first
        super().__init__(folder, durable=False, make=False)
        self._made = self.disk.is_dir(folder)

    def verified_path(self, sha256: str, *, compared: bool = False) -> str | None:
        """Path of a blob, in the shared or the own folder; None: this depot lacks it."""
        if sha256 in self._here:
            return self._shared.depot.verified_path(sha256, compared=compared)
        return super().verified_path(sha256, compared=compared)

    def ref(self, sha256: str) -> BlobRef | None:
        """Reference of a blob; None: this depot lacks it."""
        found = self._here.get(sha256)
        return super().ref(sha256) if found is None and self._made else found

    def is_intact(self, ref: BlobRef) -> bool:
        """Whether this depot has a blob, undamaged."""
        return self._shared.depot.is_intact(ref) if ref.sha256 in self._here else self._made and super().is_intact(ref)

    def read(self, sha256: str, offset: int, size: int) -> bytes:
        """Read a range of a blob."""
        own = sha256 not in self._here
        return super().read(sha256, offset, size) if own else self._shared.depot.read(sha256, offset, size)

    def load(self, sha256: str) -> bytes | None:
        """Read a whole blob; None: this depot lacks it."""
        return super().load(sha256) if sha256 not in self._here else self._shared.depot.load(sha256)

    def put(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store a blob in the shared folder."""
        return self._held(self._shared.depot.put(payload, expected))

    def stow(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        """Store a small blob in the shared folder."""
        return self._held(self._shared.depot.stow(payload, expected))

    def put_file(self, path: Place, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        """Store a file in the own folder."""
        self._make()
        return super().put_file(path, expected, move=move)

    def resume(self, manifest: wire.Manifest) -> bytearray:
        """Open a part in the own folder."""
        self._make()
        return super().resume(manifest)

    def finish(self, ref: BlobRef, digest: str | None = None) -> None:
        """Move a complete part to the shared folder."""
        super().finish(ref, digest)
        self._shared.depot.adopt(self._at(ref.sha256), ref)
        self._held(ref)

    def discard_damaged(self, sha256: str) -> None:
        """Put a damaged blob out of use: for all depots that share it."""
        if sha256 in self._here:
            self._shared.depot.discard_damaged(sha256)
        else:
            super().discard_damaged(sha256)

    def drop(self, sha256: str) -> None:
        """Remove a blob from this depot; its shared copy goes with the last holder."""
        if self._here.pop(sha256, None) is not None:
            self._shared.drop(sha256)
        if self._made:
            super().drop(sha256)

    def remove_all_but(self, only: set[str]) -> None:
        """Remove all blobs except these."""
        for sha256 in self._here.keys() - only:
            self.drop(sha256)
        if self._made:
            super().remove_all_but(only)

    def unused(self) -> list[tuple[int, str, int]]:
        """See `Depot`. Blobs in memory have no time, only an order."""
        here = ((order, ref.sha256, ref.size) for order, ref in enumerate(self._here.values()))
        return [*(super().unused() if self._made else ()), *here]

    def touch(self, sha256: str) -> None:
        """Note a use of a blob."""
        if sha256 in self._here:
            self._here[sha256] = self._here.pop(sha256)
        else:
            super().touch(sha256)

    def _held(self, ref: BlobRef) -> BlobRef:
        if ref.sha256 not in self._here:
            self._shared.add(ref)
            self._here[ref.sha256] = ref
        return ref

    def _make(self) -> None:
        if not self._made:
            with self._doing("make the folder"):
                self.disk.make(self.folder)
            self._made = True
