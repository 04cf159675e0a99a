"""Blob store shared by simulated devices of one process, with each content on disk once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.core import BlobRef
from fedquilt.host.disk import StrPath


class SharedBlobStore:
    def __init__(self, folder: Path) -> None:
        self.blob_store = BlobStore(folder, durable=False)
        self._holders: Counter[str] = Counter()  # sha256 -> number of simulated devices that have the blob

    def add_holder(self, ref: BlobRef) -> None:
        self._holders[ref.sha256] += 1

    def remove_unclaimed(self) -> None:
        """Remove the blobs of a killed process that no device has claimed."""
        self.blob_store.remove_all_but(set(self._holders))

    def remove_holder(self, sha256: str) -> None:
        self._holders[sha256] -= 1
        if not self._holders[sha256]:
            del self._holders[sha256]
            self.blob_store.remove_blob(sha256)


class SharedBlobView(BlobStore):
    """Blob store of one simulated device on a shared store. The device's own folder is created on demand."""

    def __init__(self, folder: Path, shared: SharedBlobStore) -> None:
        self._shared = shared
        self._device_blobs: dict[str, BlobRef] = {}  # by sha256, least recently used first
        super().__init__(folder, durable=False, create=False)
        self._has_folder = self.disk.is_dir(folder)

    def verified_path(self, sha256: str, *, caller_hashes: bool = False) -> str | None:
        if sha256 in self._device_blobs:
            return self._shared.blob_store.verified_path(sha256, caller_hashes=caller_hashes)
        return super().verified_path(sha256, caller_hashes=caller_hashes)

    def find_ref(self, sha256: str) -> BlobRef | None:
        ref = self._device_blobs.get(sha256)
        return super().find_ref(sha256) if ref is None and self._has_folder else ref

    def is_intact(self, ref: BlobRef) -> bool:
        if ref.sha256 in self._device_blobs:
            return self._shared.blob_store.is_intact(ref)
        return self._has_folder and super().is_intact(ref)

    def read_range(self, sha256: str, offset: int, size: int) -> bytes:
        if sha256 in self._device_blobs:
            return self._shared.blob_store.read_range(sha256, offset, size)
        return super().read_range(sha256, offset, size)

    def load(self, sha256: str) -> bytes | None:
        return super().load(sha256) if sha256 not in self._device_blobs else self._shared.blob_store.load(sha256)

    def claim_blob(self, ref: BlobRef) -> bool:
        if not self._shared.blob_store.has_blob(ref):
            return super().claim_blob(ref)
        self._add_to_shared(ref)
        return True

    def store_bytes(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._add_to_shared(self._shared.blob_store.store_bytes(payload, expected))

    def store_small(self, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        return self._add_to_shared(self._shared.blob_store.store_small(payload, expected))

    def store_file(self, path: StrPath, expected: BlobRef | None = None, *, move: bool = False) -> BlobRef:
        self._make_folder()
        return super().store_file(path, expected, move=move)

    def open_part(self, manifest: wire.BlobManifest) -> bytearray:
        self._make_folder()
        return super().open_part(manifest)

    def finish_part(self, ref: BlobRef, digest: str | None = None) -> None:
        super().finish_part(ref, digest)
        self._shared.blob_store.adopt_file(self._file_path(ref.sha256), ref)
        self._add_to_shared(ref)

    def discard_damaged(self, sha256: str) -> None:
        if sha256 in self._device_blobs:
            self._shared.blob_store.discard_damaged(sha256)
        else:
            super().discard_damaged(sha256)

    def remove_blob(self, sha256: str) -> None:
        if self._device_blobs.pop(sha256, None) is not None:
            self._shared.remove_holder(sha256)
        if self._has_folder:
            super().remove_blob(sha256)

    def remove_all_but(self, kept_blobs: set[str]) -> None:
        for sha256 in self._device_blobs.keys() - kept_blobs:
            self.remove_blob(sha256)
        if self._has_folder:
            super().remove_all_but(kept_blobs)

    def files_by_last_use(self) -> list[tuple[int, str, int]]:
        # Shared blobs have no time of use for each device, only the order of use.
        shared_blobs = ((index, ref.sha256, ref.size) for index, ref in enumerate(self._device_blobs.values()))
        return [*(super().files_by_last_use() if self._has_folder else ()), *shared_blobs]

    def record_use(self, sha256: str) -> None:
        if sha256 in self._device_blobs:
            self._device_blobs[sha256] = self._device_blobs.pop(sha256)
        else:
            super().record_use(sha256)

    def _add_to_shared(self, ref: BlobRef) -> BlobRef:
        if ref.sha256 not in self._device_blobs:
            self._shared.add_holder(ref)
            self._device_blobs[ref.sha256] = ref
        return ref

    def _make_folder(self) -> None:
        if not self._has_folder:
            with self._report_disk_errors("make the folder"):
                self.disk.make_folder(self.folder)
            self._has_folder = True
