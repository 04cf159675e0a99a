"""Tensors of safetensors files, with one tensor at a time in memory.

The bytes are those of `encode_tensors` and `pack_state` in `fedquilt.arrays.tensors`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import safetensors.numpy

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.lazy_arrays import DiskArray, LazyTensors, NamedFile, ScratchFile
from fedquilt.core import StoreError, Tensors, UpdateError
from fedquilt.host.disk import REAL, Disk

T = TypeVar("T")
TYPES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
STATE_HEADER_MOST: Final = 100 << 20  # bytes of a state's header: safetensors' own limit


class SafetensorsReader(LazyTensors):
    """Tensors of a safetensors file, read on each access and sorted by name.

    Args:
        path: Path of the file.
        disk: Disk of the file.
        header_most: Maximum number of bytes of the header.

    Raises:
        UpdateError: If the file is not safetensors.
        StoreError: If the file cannot be read.
    """

    def __init__(self, path: Path | str, disk: Disk = REAL, header_most: int = tensors.HEADER_MOST) -> None:
        self._file = NamedFile(path, disk)
        try:
            (size,) = struct.unpack("<Q", disk.read(path, 0, 8))
            if size > header_most:
                raise ValueError(f"a header of {size} bytes: {header_most} are permitted")
            table = json.loads(disk.read(path, 8, size))
            self.metadata: Mapping[str, str] = table.pop("__metadata__", {})
            places = ((str(name), self._array_from_entry(8 + size, entry)) for name, entry in sorted(table.items()))
            super().__init__({name: place for name, place in places if place is not None})
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as e:
            raise UpdateError(f"not a safetensors file: {e}") from None

    def _array_from_entry(self, begin: int, entry: Mapping[str, Any]) -> DiskArray | None:
        first, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        place = DiskArray(shape, np.dtype(TYPES[entry["dtype"]]), self._file, begin + first)
        if min((place.offset, *place.shape)) < 0:
            raise ValueError("an offset or a size is below 0")
        if end - first != place.nbytes:
            raise ValueError("the data have another size than the tensor")
        return place

    def __getitem__(self, name: str) -> np.ndarray:
        place = self.shapes[name]
        try:
            found = place.read_available()
        except OSError as error:
            raise StoreError(f"cannot read {self._file}: {error.strerror}") from None
        if isinstance(found, int):
            raise UpdateError(f"{self._file} ends within tensor {name!r}, after {found} of {place.nbytes} bytes")
        return found


class FloatReader(SafetensorsReader):
    def _array_from_entry(self, begin: int, entry: Mapping[str, Any]) -> DiskArray | None:
        return super()._array_from_entry(begin, entry) if entry["dtype"] == "F32" else None


# -- writing --------------------------------------------------------------------------------------


def write_safetensors(path: Path, given: Tensors, metadata: dict[str, str] | None = None, disk: Disk = REAL) -> None:
    """Write tensors to a file, with the bytes of `encode_tensors` but without a copy in memory.

    Raises:
        OSError: If the file cannot be written.
    """
    shapes = tensors.tensor_shapes(given)
    empty = {name: np.empty(0, shapes[name].dtype) for name in sorted(shapes)}
    payload = safetensors.numpy.save(empty, metadata)  # the library knows the order of tensors, by types and names
    table: dict[str, Any] = json.loads(payload[8:])
    at = 0
    for name, entry in table.items():
        if name != "__metadata__":
            size = shapes[name].nbytes
            entry["shape"], entry["data_offsets"] = list(shapes[name].shape), [at, at + size]
            at += size
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    disk.write(path, struct.pack("<Q", len(head)) + head)
    at = 8 + len(head)
    for name in table:
        if name != "__metadata__" and shapes[name].nbytes:
            disk.write_at(path, np.asarray(given[name], order="C").reshape(-1).view(np.uint8).data, at)
            at += shapes[name].nbytes


def read_state(path: Path | str, kind: type[T], disk: Disk = REAL, lazy_bytes: float = math.inf) -> T:
    """Read a state of type `kind`, like `unpack_state`.

    Args:
        path: Path of the file, which must exist as long as the state is used.
        kind: Type of the state.
        disk: Disk of the file.
        lazy_bytes: Minimum size of a mapping of arrays that stays on the disk (`lazy_arrays.LazyTensors`).

    Raises:
        StoreError: If the file cannot be read, or is not a state of that type.
    """
    try:
        found = SafetensorsReader(path, disk, STATE_HEADER_MOST)
        skeleton = json.loads(found.metadata["state"])
        places = {
            name: _arrays_by_key(found, skeleton[name])
            for name in tensors.array_mapping_fields(kind)
            if name in skeleton
        }
        late = {
            name: LazyTensors(each)
            for name, each in places.items()
            if each and tensors.total_bytes([each]) >= lazy_bytes  # type: ignore[list-item]
        }
        for name, each in late.items():
            skeleton[name], late[name] = (
                {},
                LazyTensors({key: place.with_checksum() for key, place in each.shapes.items()}),
            )
        whole = tensors.state_from_parts(found, {"state": json.dumps(skeleton)}, kind)
        return replace(whole, **late) if late else whole  # type: ignore[type-var]
    except (UpdateError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise tensors.NoStateError(f"not a stored {kind.__name__}: {error}") from None


def _arrays_by_key(found: SafetensorsReader, value: Any) -> dict[str, DiskArray]:
    return {key: found.shapes[str(each["$array"])] for key, each in (value or {}).items()}


def read_accumulator(path: Path | str, kind: type[T], disk: Disk, room: ScratchFile) -> T:
    """Read an accumulator of type `kind` into a scratch file, one array at a time.

    Raises:
        StoreError: If the file cannot be read, or is not an accumulator of that type.
    """
    try:
        found = SafetensorsReader(path, disk, STATE_HEADER_MOST)
        slots = {name: np.empty(0) for name in found}
        names = {id(slot): name for name, slot in slots.items()}
        total = tensors.state_from_parts(slots, found.metadata, kind)
        return exact_sums.map_limbs(total, lambda slot: room.store_array(found[names[id(slot)]]))
    except UpdateError as error:
        raise tensors.NoStateError(f"not a stored {kind.__name__}: {error}") from None
