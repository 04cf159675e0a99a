"""Arrays on disk that are read on use: large updates, states and partial aggregates.

The checksum of an array is the sum of its 64-bit words, which detects every single flipped bit.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import safetensors.numpy

from fedquilt.arrays import tensors
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import StoreError, Tensors, UpdateError
from fedquilt.host.disk import REAL, Disk, OpenFile, Place, disk_errors

LEAST: Final = 1 << 16  # entries


class ByteSource(Protocol):
    def size(self) -> int: ...

    def read_into(self, buffer: Any, offset: int) -> int: ...


@dataclass(frozen=True)
class NamedFile:
    path: Place
    disk: Disk = REAL

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        info = self.disk.stat(self.path)
        if info is None:
            raise StoreError(f"cannot read {self.path}: it is gone")
        return info.size

    def read_into(self, buffer: Any, offset: int) -> int:
        return self.disk.read_into(self.path, buffer, offset)


@dataclass(frozen=True, slots=True)
class DiskArray(TensorSpec):
    """Array on disk with known shape and type, read on use and compared with its checksum unless None."""

    source: ByteSource
    offset: int
    check: int | None = None

    def read_available(self) -> np.ndarray | int:
        """Return the array, or the number of its available bytes if the source is too short."""
        size = min(self.source.size() - self.offset, self.nbytes)
        if size == self.nbytes:  # nothing is allocated for what is not there
            array = np.empty(self.shape, self.dtype)
            size = self.source.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array if size == self.nbytes else max(size, 0)

    def read(self) -> np.ndarray:
        """Read the array, or raise StoreError if it cannot be read, is cut short, or has changed."""
        with disk_errors(f"read {self.source}"):
            payload = self.read_available()
        if isinstance(payload, int) or self.check not in (None, checksum(payload)):
            raise StoreError(f"{self.source} was changed or cut off on the disk: check the disk, and resume the job")
        return payload

    def with_checksum(self) -> DiskArray:
        return replace(self, check=checksum(self.read()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)


class LazyTensors(Mapping[str, np.ndarray]):
    """Mapping of tensors that are read from disk on each access."""

    def __init__(self, shapes: Mapping[str, DiskArray]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shapes[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class ScratchFile:
    """Anonymous file for arrays that change. Arrays of fewer than `least` entries remain in memory."""

    def __init__(self, folder: Place, disk: Disk = REAL, least: int = LEAST) -> None:
        self._folder, self._least = folder, least
        with disk_errors(f"make a file in {folder}"):
            self._file: OpenFile = disk.open_scratch(folder)
        self._end = 0

    def __str__(self) -> str:
        return f"the running sum in {self._folder}"

    def size(self) -> int:
        return self._file.size()

    def read_into(self, buffer: Any, offset: int) -> int:
        return self._file.read_into(buffer, offset)

    def store_array(self, array: np.ndarray, previous: object = None) -> np.ndarray | DiskArray:
        """Store an array in the space of `previous`, and return a reference to it, or the array itself if small."""
        array = np.asarray(array, order="C")
        if array.size < self._least:
            return array
        is_reusable = isinstance(previous, DiskArray) and previous.source is self and previous.nbytes == array.nbytes
        offset = previous.offset if is_reusable else self._end  # type: ignore[attr-defined]
        with disk_errors(f"write {self}"):
            self._file.write(array.reshape(-1).view(np.uint8).data, offset)
        self._end = max(self._end, offset + array.nbytes)
        return DiskArray(array.shape, array.dtype, self, offset, checksum(array))


def checksum(array: np.ndarray) -> int:
    """Return the sum of an array's 64-bit words and its remaining bytes, modulo 2^64."""
    flat = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    aligned_bytes = flat.size // 8 * 8
    word_sum = np.add.reduce(flat[:aligned_bytes].view(np.uint64), dtype=np.uint64)
    return (int(word_sum) + int.from_bytes(flat[aligned_bytes:].tobytes(), "little")) % 2**64


T = TypeVar("T")
TYPES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
STATE_HEADER_MOST: Final = 100 << 20  # bytes of a state's header: safetensors' own limit


class SafetensorsReader(LazyTensors):
    """Tensors of a safetensors file, read on each access and sorted by name."""

    def __init__(self, path: Place, disk: Disk = REAL, header_most: int = tensors.HEADER_MOST) -> None:
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
        start, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        array = DiskArray(shape, np.dtype(TYPES[entry["dtype"]]), self._file, begin + start)
        if min((array.offset, *array.shape)) < 0:
            raise ValueError("an offset or a size is below 0")
        if end - start != array.nbytes:
            raise ValueError("the data have another size than the tensor")
        return array

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


def write_safetensors(path: Path, arrays: Tensors, metadata: dict[str, str] | None = None, disk: Disk = REAL) -> None:
    """Write tensors to a file, with the bytes of `encode_tensors` but without a copy in memory."""
    shapes = tensors.tensor_shapes(arrays)
    empty = {name: np.empty(0, shapes[name].dtype) for name in sorted(shapes)}
    payload = safetensors.numpy.save(empty, metadata)  # the library knows the order of tensors, by types and names
    table: dict[str, Any] = json.loads(payload[8:])
    offset = 0
    for name, entry in table.items():
        if name != "__metadata__":
            size = shapes[name].nbytes
            entry["shape"], entry["data_offsets"] = list(shapes[name].shape), [offset, offset + size]
            offset += size
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    disk.write(path, struct.pack("<Q", len(head)) + head)
    offset = 8 + len(head)
    for name in table:
        if name != "__metadata__" and shapes[name].nbytes:
            disk.write_at(path, np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data, offset)
            offset += shapes[name].nbytes


def read_state(path: Place, kind: type[T], disk: Disk = REAL, lazy_bytes: float = math.inf) -> T:
    """Read a state like `unpack_state`. Mappings of arrays of at least `lazy_bytes` stay in the file."""
    try:
        reader = SafetensorsReader(path, disk, STATE_HEADER_MOST)
        skeleton = json.loads(reader.metadata["state"])
        places = {
            name: _arrays_by_key(reader, skeleton[name])
            for name in tensors.array_mapping_fields(kind)
            if name in skeleton
        }
        lazy_tensors = {
            name: LazyTensors(lazy)
            for name, lazy in places.items()
            if lazy and tensors.total_bytes([lazy]) >= lazy_bytes  # type: ignore[list-item]
        }
        for name, lazy in lazy_tensors.items():
            skeleton[name], lazy_tensors[name] = (
                {},
                LazyTensors({key: array.with_checksum() for key, array in lazy.shapes.items()}),
            )
        state = tensors.state_from_parts(reader, {"state": json.dumps(skeleton)}, kind)
        return replace(state, **lazy_tensors) if lazy_tensors else state  # type: ignore[type-var]
    except (UpdateError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise tensors.NoStateError(f"not a stored {kind.__name__}: {error}") from None


def _arrays_by_key(reader: SafetensorsReader, value: Any) -> dict[str, DiskArray]:
    return {key: reader.shapes[str(entry["$array"])] for key, entry in (value or {}).items()}
