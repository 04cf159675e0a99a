"""Blobs of many devices of one process, each content on disk once: for simulated fleets."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef


class Shared:
    """Where many depots of one process have their blobs, each content once."""

    def __init__(self, folder: Path) -> None:
        self.depot = Depot(folder, durable=False)
        self.depot.keep(set())  # what a killed process has left
        self._holders: Counter[str] = Counter()  # sha256 -> how many depots have it

    def add(self, ref: BlobRef) -> None:
        """Another depot has this blob."""
        self._holders[ref.sha256] += 1

    def drop(self, sha256: str) -> None:
        """One that had it no longer has."""
        self._holders[sha256] -= 1
        if not self._holders[sha256]:
            del self._holders[sha256]
            self.depot.drop(sha256)


class Lodger(Depot):
    """A depot whose blobs lie in a shared one. It forgets them with its process; its own folder is made when needed.

    There are the parts of what is on its way, and what came by `put_file`: that stays.
    """

    def __init__(self, folder: Path, shared: Shared) -> None:
        self._shared = shared
        self._here: dict[str, BlobRef] = {}  # by sha256, the longest unused first
        self._made = os.path.isdir(folder)
        super().__init__(folder, durable=False, make=False)

    def file(self, sha256: str) -> str | None:
        return self._shared.depot.file(sha256) if sha256 in self._here else super().file(sha256)

    def ref(self, sha256: str) -> BlobRef | None:
        found = self._here.get(sha256)
        return super().ref(sha256) if found is None and self._made else found

    def read(self, sha256: str, offset: int, size: int) -> bytes:
        own = sha256 not in self._here
        return super().read(sha256, offset, size) if own else self._shared.depot.read(sha256, offset, size)

    def load(self, sha256: str) -> bytes | None:
        return super().load(sha256) if sha256 not in self._here else self._shared.depot.load(sha256)

    def put(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._held(self._shared.depot.put(payload, expected))

    def stow(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._held(self._shared.depot.stow(payload, expected))

    def put_file(self, path: Path, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        self._make()
        return super().put_file(path, expected, move=move)

    def resume(self, manifest: wire.Manifest) -> bytearray:
        self._make()
        return super().resume(manifest)

    def finish(self, ref: BlobRef) -> None:
        super().finish(ref)
        self._shared.depot.adopt(self._at(ref.sha256), ref)
        self._held(ref)

    def drop(self, sha256: str) -> None:
        if self._here.pop(sha256, None) is not None:
            self._shared.drop(sha256)
        if self._made:
            super().drop(sha256)

    def keep(self, only: set[str]) -> None:
        for sha256 in self._here.keys() - only:
            self.drop(sha256)
        if self._made:
            super().keep(only)

    def unused(self) -> list[tuple[str, int]]:
        return [*(super().unused() if self._made else ()), *((ref.sha256, ref.size) for ref in self._here.values())]

    def touch(self, sha256: str) -> None:
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
                self.folder.mkdir(parents=True, exist_ok=True)
            self._made = True
