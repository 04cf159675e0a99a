"""Tensors of safetensors files, one at a time in memory: of a large update or a base, and of a state as it is stored.

The bytes are those of `fedquilt.tensors.encode` and `pack`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import safetensors.numpy

from fedquilt import tensors
from fedquilt.core import StoreError, Tensors, UpdateError
from fedquilt.disk import REAL, Disk

T = TypeVar("T")
TYPES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
STATE_HEADER_MOST: Final = 100 << 20  # bytes of a state's header: safetensors' own limit


class _Place(NamedTuple):
    offset: int  # in the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Stored(Mapping[str, np.ndarray]):
    """Tensors of a safetensors file, read each time that one is asked for, and sorted by name.

    Args:
        path: of the file.
        disk: where it is.
        header_most: bytes of a header that is read.

    Raises:
        UpdateError: not safetensors.
        StoreError: unreadable.
    """

    def __init__(self, path: Path | str, disk: Disk = REAL, header_most: int = tensors.HEADER_MOST) -> None:
        self._path, self._disk = path, disk
        try:
            (size,) = struct.unpack("<Q", disk.read(path, 0, 8))
            if size > header_most:
                raise ValueError(f"a header of {size} bytes: {header_most} are permitted")
            table = json.loads(disk.read(path, 8, size))
            self.metadata: Mapping[str, str] = table.pop("__metadata__", {})
            self._places = {
                str(name): place
                for name, entry in sorted(table.items())
                if (place := self._place(8 + size, entry)) is not None
            }
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as e:
            raise UpdateError(f"not a safetensors file: {e}") from None

    def _place(self, begin: int, entry: Mapping[str, Any]) -> _Place | None:
        """Where a tensor is; None: it is left out."""
        first, end = map(int, entry["data_offsets"])
        place = _Place(begin + first, np.dtype(TYPES[entry["dtype"]]), tuple(map(int, entry["shape"])))
        if min((place.offset, *place.shape)) < 0:
            raise ValueError("a place or a shape below 0")
        if end - first != place.dtype.itemsize * math.prod(place.shape):
            raise ValueError("a place of another size than its tensor's")
        return place

    def __getitem__(self, name: str) -> np.ndarray:
        offset, dtype, shape = self._places[name]
        wanted = dtype.itemsize * math.prod(shape)
        try:
            found = self._disk.stat(self._path)
            if found is None:
                raise StoreError(f"cannot read {self._path}: it is gone")
            size = min(found.size - offset, wanted)
            if size == wanted:  # nothing is allocated for what is not there
                array = np.empty(shape, dtype)
                size = self._disk.read_into(self._path, array.reshape(-1).view(np.uint8).data, offset)
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None
        if size != wanted:
            raise UpdateError(f"{self._path} ends within tensor {name!r}, after {max(size, 0)} of {wanted} bytes")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Floats(Stored):
    """The float32 tensors of such a file."""

    def _place(self, begin: int, entry: Mapping[str, Any]) -> _Place | None:
        return super()._place(begin, entry) if entry["dtype"] == "F32" else None


# -- writing --------------------------------------------------------------------------------------


def write(path: Path, given: Tensors, metadata: dict[str, str] | None = None, disk: Disk = REAL) -> None:
    """Write the bytes of `tensors.encode` into a file that exists or not, without a copy of them in memory.

    Raises:
        OSError: it cannot be written.
    """
    placed = tensors.ordered(given)
    empty = {name: np.empty(0, array.dtype) for name, array in placed.items()}
    payload = safetensors.numpy.save(empty, metadata)  # the library knows the order of tensors, by types and names
    table: dict[str, Any] = json.loads(payload[8:])
    at = 0
    for name, entry in table.items():
        if name != "__metadata__":
            size = placed[name].nbytes
            entry["shape"], entry["data_offsets"] = list(placed[name].shape), [at, at + size]
            at += size
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    disk.write(path, struct.pack("<Q", len(head)) + head)
    at = 8 + len(head)
    for name in table:
        if name != "__metadata__" and placed[name].nbytes:
            disk.write_at(path, placed[name].reshape(-1).view(np.uint8).data, at)
            at += placed[name].nbytes


def read_state(path: Path | str, kind: type[T], disk: Disk = REAL) -> T:
    """Read a state of type `kind`, as `tensors.unpack` does.

    Raises:
        StoreError: the file cannot be read, or is not a state of that type.
    """
    try:
        found = Stored(path, disk, STATE_HEADER_MOST)
        return tensors.whole(dict(found), found.metadata, kind)
    except UpdateError as error:
        raise StoreError(f"not a stored {kind.__name__}: {error}") from None
