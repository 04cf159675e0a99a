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

SPACE_FACTOR = 1.2  # factor on a file's size that has to be free on the disk
VERSION = 2
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int64)[:, 0]
"""The eight bits of each byte as one byte each, least significant first."""


class BatchOutputs(NamedTuple):
    values: Sequence[torch.Tensor]  # float
    indices: Sequence[torch.Tensor]  # integers
    masks: Sequence[torch.Tensor]  # bool


class RowLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    is_float16: bool

    @property
    def value_bytes(self) -> int:
        return _round_up_to_4((2 if self.is_float16 else 4) * sum(map(prod, self.values)))

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


def make_row_layout(batch: BatchOutputs, *, is_float16: bool) -> RowLayout:
    outputs = [*batch.values, *batch.indices, *batch.masks]
    count = {len(tensor) if hasattr(tensor, "shape") and len(tensor.shape) else 0 for tensor in outputs}
    if len(count) != 1 or not all(value.is_floating_point() for value in batch.values):
        raise ModelError('an input of the trained part is not a float tensor with a row per example: set cache = "off"')
    values, indices, masks = (tuple(tuple(tensor.shape[1:]) for tensor in part) for part in batch)
    return RowLayout(values, indices, masks, is_float16)


def pack_rows(batch: BatchOutputs, layout: RowLayout) -> np.ndarray:
    """Pack a batch as rows (n, row_bytes) uint8."""
    count = len((*batch.values, *batch.masks)[0])
    rows = np.zeros((count, layout.row_bytes), np.uint8)
    offset = 0
    for value in batch.values:
        flat = value.detach().cpu().numpy().reshape(count, -1)
        with np.errstate(over="ignore"):
            encoded = flat.astype(np.float16 if layout.is_float16 else np.float32)
        if layout.is_float16 and np.isinf(encoded).any():
            raise ModelError(f'features of up to {np.abs(flat).max():.3g} do not fit 16 bits: set cache = "float32"')
        offset = _write_columns(rows, offset, encoded)
    offset = layout.value_bytes
    for index in batch.indices:
        offset = _write_columns(rows, offset, index.cpu().numpy().reshape(count, -1).astype(np.int32))
    for mask in batch.masks:
        offset = _write_columns(
            rows, offset, np.packbits(mask.cpu().numpy().reshape(count, -1), axis=1, bitorder="little")
        )
    return rows


def unpack_rows(rows: torch.Tensor, layout: RowLayout) -> list[torch.Tensor]:
    import torch

    count = len(rows)
    offset = 0
    outputs = []
    section = rows[:, : layout.value_bytes].view(torch.float16 if layout.is_float16 else torch.float32)
    for shape in layout.values:
        outputs.append(section[:, offset : offset + prod(shape)].reshape(count, *shape).float())
        offset += prod(shape)
    section = rows[:, layout.value_bytes : layout.value_bytes + layout.index_bytes].view(torch.int32)
    offset = 0
    for shape in layout.indices:
        outputs.append(section[:, offset : offset + prod(shape)].reshape(count, *shape))
        offset += prod(shape)
    offset = layout.value_bytes + layout.index_bytes
    of_byte = torch.from_numpy(BITS).to(rows.device)
    for shape in layout.masks:
        size = -(-prod(shape) // 8)
        bits = of_byte[rows[:, offset : offset + size].long()].view(torch.bool)[:, : prod(shape)]
        outputs.append(bits.reshape(count, *shape))
        offset += size
    return outputs


class CachedRows:
    """Cached rows in a file, usable as `fedquilt.core.Examples`: `rows[[3, 1]]` reads two rows."""

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, metadata: CacheMetadata) -> None:
        self._path, self.shape = path, (metadata.rows, metadata.layout.row_bytes)
        self._sums = np.frombuffer(bytes.fromhex(metadata.sums), ">u4")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        # Raises StoreError if the file is missing, truncated or damaged.
        result = np.empty((len(rows), self.shape[1]), np.uint8)
        try:
            with self._path.open("rb", buffering=0) as file:
                for index, row in enumerate(rows):
                    if os.preadv(file.fileno(), [result[index]], int(row) * self.shape[1]) != self.shape[1]:
                        raise StoreError(f"{self._path} is truncated: the next task recreates it")
                    if zlib.crc32(result[index]) != self._sums[row]:
                        self._path.with_suffix(".json").unlink(missing_ok=True)
                        raise StoreError(f"{self._path} is damaged: the next task recreates it")
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None
        return result


class RowWriter:
    """Writer of `folder`/`name`.rows, which replaces an older file and appears only if complete.

    Methods raise NoRoomError if the cache exceeds `limit_bytes` or the disk fails.
    """

    def __init__(self, folder: Path, name: str, count: int, *, is_float16: bool, limit_bytes: int) -> None:
        self._folder, self._name, self._count = folder, name, count
        self._is_float16, self._limit_bytes = is_float16, limit_bytes
        self._layout: RowLayout | None = None
        self._part = folder / f"{name}.part"
        self._sums: list[int] = []

    def write_batch(self, batch: BatchOutputs) -> None:
        try:
            if self._layout is None:
                self._layout = make_row_layout(batch, is_float16=self._is_float16)
                self._delete_old_files_and_require_space(self._count * self._layout.row_bytes)
            rows = pack_rows(batch, self._layout)
            with self._part.open("ab") as file:
                file.write(rows.tobytes())
            self._sums += [zlib.crc32(row) for row in rows]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._part.unlink()
            raise NoRoomError(str(error)) from None

    def finish(self, key: str) -> CacheMetadata:
        assert self._layout is not None
        metadata = CacheMetadata(key, self._count, self._layout, np.array(self._sums, ">u4").tobytes().hex())
        try:
            os.replace(self._part, self._folder / f"{self._name}.rows")
            (self._folder / f"{self._name}.json").write_bytes(checksummed_json.encode_with_checksum(metadata))
        except OSError as error:
            raise NoRoomError(str(error)) from None
        return metadata

    def _delete_old_files_and_require_space(self, size: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file_name in (f"{self._name}.json", f"{self._name}.rows", f"{self._name}.part"):
            (self._folder / file_name).unlink(missing_ok=True)
        if size > self._limit_bytes:
            raise NoRoomError(f"{size} bytes exceed the limit of {self._limit_bytes} bytes")
        if SPACE_FACTOR * size > shutil.disk_usage(self._folder).free:
            raise NoRoomError(f"the disk has less than {SPACE_FACTOR:g} x {size} bytes free")


def find_complete_rows(folder: Path, name: str, key: str, count: int) -> CacheMetadata | None:
    """Return the metadata of `count` rows stored under a key, or None if rows are missing or incomplete."""
    try:
        metadata = checksummed_json.decode_with_checksum((folder / f"{name}.json").read_bytes(), CacheMetadata)
        size = (folder / f"{name}.rows").stat().st_size
    except (OSError, checksummed_json.DamagedFileError):
        return None
    is_wanted = (metadata.key, metadata.rows, metadata.version) == (key, count, VERSION)
    is_complete = size == count * metadata.layout.row_bytes and len(metadata.sums) == 8 * count
    return metadata if is_wanted and is_complete else None


def _write_columns(rows: np.ndarray, offset: int, values: np.ndarray) -> int:
    raw = np.ascontiguousarray(values).view(np.uint8)
    rows[:, offset : offset + raw.shape[1]] = raw
    return offset + raw.shape[1]


def _round_up_to_4(size: int) -> int:
    return -(-size // 4) * 4
