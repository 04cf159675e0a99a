"""Arrays on disk that are read on use: large updates, states and partial aggregates."""

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
from fedquilt.host.disk import REAL, Disk, OpenFile, StrPath, disk_errors

MIN_DISK_ENTRIES: Final = 1 << 16


class ByteSource(Protocol):
    def size(self) -> int: ...

    def read_into(self, buffer: Any, offset: int) -> int: ...


@dataclass(frozen=True)
class NamedFile:
    path: StrPath
    disk: Disk = REAL

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        info = self.disk.stat(self.path)
        if info is None:
            raise StoreError(f"cannot read {self.path}: the file is missing")
        return info.size

    def read_into(self, buffer: Any, offset: int) -> int:
        return self.disk.read_into(self.path, buffer, offset)


@dataclass(frozen=True, slots=True)
class DiskArray(TensorSpec):
    """Array on disk with known shape and type. `read` verifies `expected_checksum` if there is one."""

    source: ByteSource
    offset: int
    expected_checksum: int | None = None

    def read_available(self) -> np.ndarray | int:
        """Return the array, or the number of its available bytes if the source is too short."""
        size = min(self.source.size() - self.offset, self.nbytes)
        if size == self.nbytes:  # a short source must not cause the allocation of a large array
            array = np.empty(self.shape, self.dtype)
            size = self.source.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array if size == self.nbytes else max(size, 0)

    def read(self) -> np.ndarray:
        """Return the array, or raise StoreError if the source cannot be read, is too short, or has changed."""
        with disk_errors(f"read {self.source}"):
            payload = self.read_available()
        if isinstance(payload, int) or self.expected_checksum not in (None, checksum(payload)):
            raise StoreError(f"{self.source} was changed or truncated on the disk: check the disk, and resume the job")
        return payload

    def with_checksum(self) -> DiskArray:
        """Read the array, and return a reference whose reads verify that the array is unchanged."""
        return replace(self, expected_checksum=checksum(self.read()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that are read from the disk on each access. `shapes` has the types and shapes."""

    def __init__(self, shapes: Mapping[str, DiskArray]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shapes[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class ScratchFile:
    """Unnamed temporary file for arrays. Arrays of fewer than `min_entries` entries stay in memory."""

    def __init__(self, folder: StrPath, disk: Disk = REAL, min_entries: int = MIN_DISK_ENTRIES) -> None:
        self._folder, self._min_entries = folder, min_entries
        with disk_errors(f"make a file in {folder}"):
            self._file: OpenFile = disk.open_scratch(folder)
        self._end = 0

    def __str__(self) -> str:
        return f"the partial aggregate in {self._folder}"

    def size(self) -> int:
        return self._file.size()

    def read_into(self, buffer: Any, offset: int) -> int:
        return self._file.read_into(buffer, offset)

    def store_array(self, array: np.ndarray, previous: object = None) -> np.ndarray | DiskArray:
        """Return a copy on disk of a large array, or a small array itself. The copy may replace `previous`."""
        array = np.asarray(array, order="C")
        if array.size < self._min_entries:
            return array
        is_reusable = isinstance(previous, DiskArray) and previous.source is self and previous.nbytes == array.nbytes
        offset = previous.offset if is_reusable else self._end  # type: ignore[attr-defined]
        with disk_errors(f"write {self}"):
            self._file.write(array.reshape(-1).view(np.uint8).data, offset)
        self._end = max(self._end, offset + array.nbytes)
        return DiskArray(array.shape, array.dtype, self, offset, checksum(array))


def checksum(array: np.ndarray) -> int:
    """Return the array's bytes, summed as 64-bit words modulo 2^64. Any single flipped bit changes it."""
    flat = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    aligned_bytes = flat.size // 8 * 8
    word_sum = np.add.reduce(flat[:aligned_bytes].view(np.uint64), dtype=np.uint64)
    return (int(word_sum) + int.from_bytes(flat[aligned_bytes:].tobytes(), "little")) % 2**64


T = TypeVar("T")
NUMPY_TYPES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
MAX_STATE_HEADER_BYTES: Final = 100 << 20  # the safetensors library has the same limit


class SafetensorsReader(LazyTensors):
    """Tensors of a safetensors file, read on each access and sorted by name.

    An invalid file raises UpdateError at once, and a truncated tensor on access.
    """

    def __init__(self, path: StrPath, disk: Disk = REAL, max_header_bytes: int = tensors.MAX_HEADER_BYTES) -> None:
        self._file = NamedFile(path, disk)
        try:
            (size,) = struct.unpack("<Q", disk.read(path, 0, 8))
            if size > max_header_bytes:
                raise ValueError(f"header of {size} bytes exceeds the limit of {max_header_bytes}")
            table = json.loads(disk.read(path, 8, size))
            self.metadata: Mapping[str, str] = table.pop("__metadata__", {})
            arrays = ((str(name), self._array_from_entry(8 + size, entry)) for name, entry in sorted(table.items()))
            super().__init__({name: array for name, array in arrays if array is not None})
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error) as e:
            raise UpdateError(f"not a safetensors file: {e}") from None

    def _array_from_entry(self, data_offset: int, entry: Mapping[str, Any]) -> DiskArray | None:
        start, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        array = DiskArray(shape, np.dtype(NUMPY_TYPES[entry["dtype"]]), self._file, data_offset + start)
        if min((array.offset, *array.shape)) < 0:
            raise ValueError("an offset or a size is below 0")
        if end - start != array.nbytes:
            raise ValueError("the size of the data differs from the size of the tensor")
        return array

    def __getitem__(self, name: str) -> np.ndarray:
        disk_array = self.shapes[name]
        try:
            array = disk_array.read_available()
        except OSError as error:
            raise StoreError(f"cannot read {self._file}: {error.strerror}") from None
        if isinstance(array, int):
            raise UpdateError(f"{self._file} ends within tensor {name!r}, after {array} of {disk_array.nbytes} bytes")
        return array


class Float32Reader(SafetensorsReader):
    """Reader of the float32 tensors of a safetensors file. Other tensors are skipped."""

    def _array_from_entry(self, data_offset: int, entry: Mapping[str, Any]) -> DiskArray | None:
        return super()._array_from_entry(data_offset, entry) if entry["dtype"] == "F32" else None


def write_safetensors(path: Path, arrays: Tensors, metadata: dict[str, str] | None = None, disk: Disk = REAL) -> None:
    """Write the bytes of `encode_tensors` to a file, one tensor at a time. May raise OSError."""
    shapes = tensors.tensor_shapes(arrays)
    empty = {name: np.empty(0, shapes[name].dtype) for name in sorted(shapes)}
    payload = safetensors.numpy.save(empty, metadata)  # the library orders tensors by type and name
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


def read_state(path: StrPath, kind: type[T], disk: Disk = REAL, lazy_bytes: float = math.inf) -> T:
    """Return the state of type `kind` in a file, or raise NoStateError if the file contains another type.

    Mappings of arrays with at least `lazy_bytes` bytes are returned as `LazyTensors` of the file.
    """
    try:
        reader = SafetensorsReader(path, disk, MAX_STATE_HEADER_BYTES)
        skeleton = json.loads(reader.metadata["state"])
        stored_fields = [name for name in tensors.array_mapping_fields(kind) if name in skeleton]
        arrays_by_field = {name: _arrays_by_key(reader, skeleton[name]) for name in stored_fields}
        lazy_tensors = {
            name: LazyTensors(arrays)
            for name, arrays in arrays_by_field.items()
            if arrays and tensors.total_bytes([arrays]) >= lazy_bytes  # type: ignore[list-item]
        }
        for name, arrays in lazy_tensors.items():
            skeleton[name] = {}
            lazy_tensors[name] = LazyTensors({key: array.with_checksum() for key, array in arrays.shapes.items()})
        state = tensors.state_from_parts(reader, {"state": json.dumps(skeleton)}, kind)
        return replace(state, **lazy_tensors) if lazy_tensors else state  # type: ignore[type-var]
    except (UpdateError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise tensors.NoStateError(f"not a stored {kind.__name__}: {error}") from None


def _arrays_by_key(reader: SafetensorsReader, value: Any) -> dict[str, DiskArray]:
    return {key: reader.shapes[str(entry["$array"])] for key, entry in (value or {}).items()}
