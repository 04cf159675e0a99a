"""Blob store shared by simulated devices of one process, with each content on disk once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobRef
from fedquilt.host.disk import Place


class SharedBlobStore:
    def __init__(self, folder: Path) -> None:
        self.depot = BlobStore(folder, durable=False)
        self.depot.remove_all_but(set())  # leftovers of a killed process
        self._holders: Counter[str] = Counter()  # sha256 -> number of depots that have it

    def add_holder(self, ref: BlobRef) -> None:
        self._holders[ref.sha256] += 1

    def remove_holder(self, sha256: str) -> None:
        self._holders[sha256] -= 1
        if not self._holders[sha256]:
            del self._holders[sha256]
            self.depot.remove_blob(sha256)


class SharedBlobView(BlobStore):
    """View of one simulated device on a shared blob store. The device's folder is created on demand."""

    def __init__(self, folder: Path, shared: SharedBlobStore) -> None:
        self._shared = shared
        self._here: dict[str, BlobRef] = {}  # by sha256, the longest unused first
        super().__init__(folder, durable=False, make=False)
        self._made = self.disk.is_dir(folder)

    def verified_path(self, sha256: str, *, compared: bool = False) -> str | None:
        if sha256 in self._here:
            return self._shared.depot.verified_path(sha256, compared=compared)
        return super().verified_path(sha256, compared=compared)

    def find_ref(self, sha256: str) -> BlobRef | None:
        found = self._here.get(sha256)
        return super().find_ref(sha256) if found is None and self._made else found

    def is_intact(self, ref: BlobRef) -> bool:
        return self._shared.depot.is_intact(ref) if ref.sha256 in self._here else self._made and super().is_intact(ref)

    def read_range(self, sha256: str, offset: int, size: int) -> bytes:
        own = sha256 not in self._here
        return super().read_range(sha256, offset, size) if own else self._shared.depot.read_range(sha256, offset, size)

    def load(self, sha256: str) -> bytes | None:
        return super().load(sha256) if sha256 not in self._here else self._shared.depot.load(sha256)

    def store_bytes(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._add_to_shared(self._shared.depot.store_bytes(payload, expected))

    def store_small(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._add_to_shared(self._shared.depot.store_small(payload, expected))

    def store_file(self, path: Place, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        self._make_folder()
        return super().store_file(path, expected, move=move)

    def open_part(self, manifest: wire.BlobManifest) -> bytearray:
        self._make_folder()
        return super().open_part(manifest)

    def finish_part(self, ref: BlobRef, digest: str | None = None) -> None:
        super().finish_part(ref, digest)
        self._shared.depot.adopt_file(self._file_path(ref.sha256), ref)
        self._add_to_shared(ref)

    def discard_damaged(self, sha256: str) -> None:
        if sha256 in self._here:
            self._shared.depot.discard_damaged(sha256)
        else:
            super().discard_damaged(sha256)

    def remove_blob(self, sha256: str) -> None:
        if self._here.pop(sha256, None) is not None:
            self._shared.remove_holder(sha256)
        if self._made:
            super().remove_blob(sha256)

    def remove_all_but(self, only: set[str]) -> None:
        for sha256 in self._here.keys() - only:
            self.remove_blob(sha256)
        if self._made:
            super().remove_all_but(only)

    def files_by_last_use(self) -> list[tuple[int, str, int]]:
        # Blobs in memory have no time of use, only an order.
        here = ((order, ref.sha256, ref.size) for order, ref in enumerate(self._here.values()))
        return [*(super().files_by_last_use() if self._made else ()), *here]

    def record_use(self, sha256: str) -> None:
        if sha256 in self._here:
            self._here[sha256] = self._here.pop(sha256)
        else:
            super().record_use(sha256)

    def _add_to_shared(self, ref: BlobRef) -> BlobRef:
        if ref.sha256 not in self._here:
            self._shared.add_holder(ref)
            self._here[ref.sha256] = ref
        return ref

    def _make_folder(self) -> None:
        if not self._made:
            with self._doing("make the folder"):
                self.disk.make_folder(self.folder)
            self._made = True
