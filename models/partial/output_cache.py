"""Cache on disk of a frozen network's features and gates, one row of bytes per example.

A row contains the inputs of the trained part (float32 or float16), then the indices of max pools (int32), then each
mask in bits, least significant first, each part padded to whole 4 or 1 bytes. The file is read row by row and is never
mapped, so that the kernel's cache does not count as memory of the process. Each row has a CRC-32. The next task
recreates a damaged file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from fedquilt.core import ModelError, StoreError
from fedquilt.formats import checksummed_json

if TYPE_CHECKING:
    import torch

SPARE = 1.2  # factor on a file's size that has to be free on the disk
VERSION = 2
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int64)[:, 0]
"""The eight bits of each byte, as bytes in the order in which they are packed."""


class BatchOutputs(NamedTuple):
    values: Sequence[torch.Tensor]  # float
    indices: Sequence[torch.Tensor]  # integers
    masks: Sequence[torch.Tensor]  # bool


class RowLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    half: bool

    @property
    def value_bytes(self) -> int:
        return _round_up_to_4((2 if self.half else 4) * sum(map(prod, self.values)))

    @property
    def index_bytes(self) -> int:
        return 4 * sum(map(prod, self.indices))

    @property
    def row_bytes(self) -> int:
        return _round_up_to_4(self.value_bytes + self.index_bytes + sum(-(-prod(shape) // 8) for shape in self.masks))


class CacheMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    rows: int
    layout: RowLayout
    sums: str  # CRC-32 of each row, 8 hex digits
    version: int = VERSION


class NoRoomError(Exception): ...


def row_layout(seen: BatchOutputs, *, half: bool) -> RowLayout:
    every = [*seen.values, *seen.indices, *seen.masks]
    count = {len(each) if hasattr(each, "shape") and len(each.shape) else 0 for each in every}
    if len(count) != 1 or not all(value.is_floating_point() for value in seen.values):
        raise ModelError('what enters the trained part is not all tensors with the examples first: set cache = "off"')
    values, indices, masks = (tuple(tuple(each.shape[1:]) for each in part) for part in seen)
    return RowLayout(values, indices, masks, half)


def pack_rows(seen: BatchOutputs, like: RowLayout) -> np.ndarray:
    """Pack a batch as rows (n, row_bytes) uint8."""
    count = len((*seen.values, *seen.masks)[0])
    rows = np.zeros((count, like.row_bytes), np.uint8)
    at = 0
    for value in seen.values:
        flat = value.detach().cpu().numpy().reshape(count, -1)
        with np.errstate(over="ignore"):
            kept = flat.astype(np.float16 if like.half else np.float32)
        if like.half and np.isinf(kept).any():
            raise ModelError(f'features of up to {np.abs(flat).max():.3g} do not fit 16 bits: set cache = "float32"')
        at = _write_columns(rows, at, kept)
    at = like.value_bytes
    for index in seen.indices:
        at = _write_columns(rows, at, index.cpu().numpy().reshape(count, -1).astype(np.int32))
    for mask in seen.masks:
        at = _write_columns(rows, at, np.packbits(mask.cpu().numpy().reshape(count, -1), axis=1, bitorder="little"))
    return rows


def unpack_rows(rows: torch.Tensor, like: RowLayout) -> list[torch.Tensor]:
    import torch

    count, at, found = len(rows), 0, []
    held = rows[:, : like.value_bytes].view(torch.float16 if like.half else torch.float32)
    for shape in like.values:
        found.append(held[:, at : at + prod(shape)].reshape(count, *shape).float())
        at += prod(shape)
    held, at = rows[:, like.value_bytes : like.value_bytes + like.index_bytes].view(torch.int32), 0
    for shape in like.indices:
        found.append(held[:, at : at + prod(shape)].reshape(count, *shape))
        at += prod(shape)
    at = like.value_bytes + like.index_bytes
    of_byte = torch.from_numpy(BITS).to(rows.device)
    for shape in like.masks:
        size = -(-prod(shape) // 8)
        each = of_byte[rows[:, at : at + size].long()].view(torch.bool)[:, : prod(shape)]
        found.append(each.reshape(count, *shape))
        at += size
    return found


class CachedRows:
    """Cached rows in a file, usable as `fedquilt.core.Examples`: `rows[[3, 1]]` reads two rows."""

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, kept: CacheMetadata) -> None:
        self._path, self.shape = path, (kept.rows, kept.layout.row_bytes)
        self._sums = np.frombuffer(bytes.fromhex(kept.sums), ">u4")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        # Raises StoreError if the file is missing, truncated or damaged.
        found = np.empty((len(rows), self.shape[1]), np.uint8)
        try:
            with self._path.open("rb", buffering=0) as file:
                for place, row in enumerate(rows):
                    if os.preadv(file.fileno(), [found[place]], int(row) * self.shape[1]) != self.shape[1]:
                        raise StoreError(f"{self._path} was cut short while it was in use")
                    if zlib.crc32(found[place]) != self._sums[row]:
                        self._path.with_suffix(".json").unlink(missing_ok=True)
                        raise StoreError(f"{self._path} is damaged: the next task makes it anew")
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None
        return found


class RowWriter:
    """Writer of `folder`/`name`.rows, which appears whole or not at all and replaces an older file."""

    def __init__(self, folder: Path, name: str, count: int, *, half: bool, most_bytes: int) -> None:
        self._folder, self._name, self._count = folder, name, count
        self._half, self._most = half, most_bytes
        self._layout: RowLayout | None = None
        self._part = folder / f"{name}.part"
        self._sums: list[int] = []

    def write_batch(self, seen: BatchOutputs) -> None:
        try:
            if self._layout is None:
                self._layout = row_layout(seen, half=self._half)
                self._delete_old_files_and_require_space(self._count * self._layout.row_bytes)
            rows = pack_rows(seen, self._layout)
            with self._part.open("ab") as file:
                file.write(rows.tobytes())
            self._sums += [zlib.crc32(row) for row in rows]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._part.unlink()
            raise NoRoomError(str(error)) from None

    def finish(self, key: str) -> CacheMetadata:
        assert self._layout is not None
        kept = CacheMetadata(key, self._count, self._layout, np.array(self._sums, ">u4").tobytes().hex())
        try:
            os.replace(self._part, self._folder / f"{self._name}.rows")
            (self._folder / f"{self._name}.json").write_bytes(checksummed_json.encode_with_checksum(kept))
        except OSError as error:
            raise NoRoomError(str(error)) from None
        return kept

    def _delete_old_files_and_require_space(self, size: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (f"{self._name}.json", f"{self._name}.rows", f"{self._name}.part"):
            (self._folder / old).unlink(missing_ok=True)
        if size > self._most:
            raise NoRoomError(f"{size} bytes are more than {self._most}")
        if SPARE * size > shutil.disk_usage(self._folder).free:
            raise NoRoomError(f"the disk has no {size} bytes to spare")


def find_complete_rows(folder: Path, name: str, key: str, count: int) -> CacheMetadata | None:
    """Return the description of the rows stored under a key, or None unless they are complete."""
    try:
        kept = checksummed_json.decode_with_checksum((folder / f"{name}.json").read_bytes(), CacheMetadata)
        size = (folder / f"{name}.rows").stat().st_size
    except (OSError, checksummed_json.DamagedFileError):
        return None
    whole = (kept.key, kept.rows, kept.version) == (key, count, VERSION) and size == count * kept.layout.row_bytes
    whole = whole and len(kept.sums) == 8 * count
    return kept if whole else None


def _write_columns(rows: np.ndarray, at: int, values: np.ndarray) -> int:
    raw = np.ascontiguousarray(values).view(np.uint8)
    rows[:, at : at + raw.shape[1]] = raw
    return at + raw.shape[1]


def _round_up_to_4(size: int) -> int:
    return -(-size // 4) * 4
