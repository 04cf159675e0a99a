"""Tensors as mappings from names to arrays: arithmetic, encoding, and storage of states.

All functions return new arrays. Tensors are encoded as safetensors, sorted by name, so that equal tensors have equal
bytes and one sha256. A state (a frozen dataclass of arrays, scalars, strings, tuples, mappings and further dataclasses)
is packed generically: its arrays as tensors, its structure as JSON in the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from fedquilt.core import DivergedError, StoreError, Tensors, UpdateError, derive_seed
from fedquilt.core import tensor_shapes as tensor_shapes

T = TypeVar("T")
MAX_HEADER_BYTES: Final = 4 << 20  # about 25,000 tensors (the limit of the safetensors library is 100 MB)
MAX_AXES: Final = 16
MAX_COUNTER: Final = 2**53  # largest value of a counter, so that the counter can still be increased


class NoStateError(StoreError):
    """Error in a file that does not contain a state of the expected type."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout_from_tensors(tensors: Tensors) -> dict[str, str]:
    """Return the type and shape of each tensor as text, such as {"fc.weight": "f4:10,64"}."""
    shapes = tensor_shapes(tensors).items()
    return {name: f"{a.dtype.kind}{a.dtype.itemsize}:{','.join(map(str, a.shape))}" for name, a in shapes}


def specs_from_layout(layout: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the tensor specs of a layout from `layout_from_tensors`, or raise UpdateError."""
    return {name: _spec_from_text(name, text) for name, text in layout.items()}


@lru_cache(maxsize=1 << 12)
def _spec_from_text(name: str, text: str) -> TensorSpec:
    match = _LAYOUT.fullmatch(text)
    if match is None or match[2].count(",") >= MAX_AXES:
        raise UpdateError(
            f"tensor {name[:80]!r} is described as {text[:80]!r}: expected a type and a shape, as in f4:10,64"
        )
    return TensorSpec(tuple(int(size) for size in match[2].split(",") if size), np.dtype(match[1]))


_LAYOUT: Final = re.compile(r"(b1|[iu][1248]|f[248]):((?:[0-9]{1,10}(?:,[0-9]{1,10})*)?)")


def cast_like(model: Tensors, reference: Tensors) -> dict[str, np.ndarray]:
    return {name: np.asarray(array).astype(reference[name].dtype) for name, array in model.items()}


def map_arrays(function: Callable[..., np.ndarray], first: Tensors, *other_models: Tensors) -> Tensors:
    """Return `function(first[name], *others[name])` for each name, or raise UpdateError.

    All models need the same names and shapes. All but the first must be finite, or DivergedError is raised.
    """
    for other in other_models:
        require_matching(other, first)
    return {
        name: np.asarray(function(array, *(other[name] for other in other_models))) for name, array in first.items()
    }


def require_matching(tensors: Tensors, reference: Tensors) -> None:
    """Raise UpdateError if names or shapes differ from `reference`, or DivergedError for NaN or infinity."""
    _require_names(tensors, reference)
    for name, array in tensor_shapes(tensors).items():
        _require_shape(name, array, tensor_shapes(reference)[name])
    require_finite(tensors)


def require_addable(tensors: Tensors, reference: Tensors | Mapping[str, TensorSpec]) -> None:
    """Raise UpdateError if a name, shape or type differs from `reference`, or a number is out of bounds.

    Integers are counters from 0 to `MAX_COUNTER`. Floating-point numbers may be as large as the square root of their
    type's range (1.8e19 in 32 bits), so that no sum, difference or second moment overflows.
    """
    _require_names(tensors, reference)
    expected_shapes = tensor_shapes(reference)
    for name, array in tensors.items():
        _require_shape(name, array, expected_shapes[name])
        if array.dtype != expected_shapes[name].dtype:
            raise UpdateError(f"tensor {name!r} is {array.dtype}, expected {expected_shapes[name].dtype}")
        if array.dtype.kind not in "fiu" or not array.size:
            continue
        minimum, maximum = addable_range(array.dtype)
        if not (minimum <= array.min() and array.max() <= maximum):
            require_finite({name: array})
            raise UpdateError(
                f"tensor {name!r} has numbers from {array.min():g} to {array.max():g}, "
                f"beyond the {minimum:g} to {maximum:g} permitted for {array.dtype}"
            )


@cache
def addable_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and the largest number of a type that `require_addable` permits."""
    if dtype.kind != "f":
        return 0, MAX_COUNTER
    limit = float(np.finfo(dtype).max)
    limit = limit if dtype.itemsize < 4 else math.sqrt(limit)  # 16-bit types are not used for sums
    return -limit, limit


def _require_names(tensors: Tensors, reference: Tensors | Mapping[str, TensorSpec]) -> None:
    if tensors.keys() != reference.keys():
        unmatched_names = sorted(tensors.keys() ^ reference.keys())
        raise UpdateError(
            f"tensor names differ: {', '.join(unmatched_names[:5])}{' ...' if len(unmatched_names) > 5 else ''}"
        )


def _require_shape(name: str, array: np.ndarray | TensorSpec, reference: np.ndarray | TensorSpec) -> None:
    if array.shape != reference.shape:
        raise UpdateError(f"tensor {name!r} has shape {array.shape}, expected {reference.shape}")


def require_finite(tensors: Tensors) -> None:
    """Raise DivergedError if a tensor has NaN or infinite values."""
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DivergedError(f"tensor {name!r} holds {int((~np.isfinite(array)).sum())} values that are not finite")


def seeded_rng(*keys: object) -> np.random.Generator:
    """Return a random generator whose seed is derived from the keys, with equal numbers on every machine."""
    return np.random.Generator(np.random.PCG64(derive_seed(*keys)))


def encode_tensors(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """Return tensors as safetensors bytes, which depend only on names, arrays and metadata."""
    sorted_tensors = sort_tensors(tensors)
    shapes = tuple((name, array.dtype, array.shape) for name, array in sorted_tensors.items())
    cached_header = None if metadata else _cached_headers.get(shapes)
    if cached_header is not None:
        header, names = cached_header
        return b"".join((header, *(sorted_tensors[name].data for name in names)))
    payload = safetensors.numpy.save(sorted_tensors, metadata)
    if not metadata and all(dtype.isnative and dtype.kind in "fiub" for _, dtype, _ in shapes):
        _cache_header(payload, sorted_tensors)
    return payload


def sort_tensors(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}  # keeps shape ()


def decode_tensors(payload: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in safetensors bytes, sorted by name, or raise UpdateError."""
    cached_layout = _cached_layouts.get(payload[: _header_bytes(payload)])
    if cached_layout is not None and len(payload) == cached_layout.size:
        return {
            name: np.ndarray(shape, dtype, payload, start).copy() for name, dtype, shape, start in cached_layout.entries
        }
    try:
        (size,) = struct.unpack("<Q", payload[:8])
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"header of {size} bytes exceeds the limit of {MAX_HEADER_BYTES}")
        arrays = dict(sorted(safetensors.numpy.load(payload).items()))  # the library returns any order
    except (SafetensorError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise UpdateError(f"not a safetensors blob: {error}") from None
    _cache_header(payload, arrays)
    return arrays


def read_tensors(path: Path, sha256: str = "") -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, sorted by name.

    Raise StoreError if the file is unreadable or does not match a given `sha256`, and UpdateError if it is invalid.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        raise StoreError(f"{path} is damaged, because its sha256 has changed: download or prepare it again")
    return decode_tensors(payload)


class _BlobLayout(NamedTuple):
    size: int  # bytes of the blob
    entries: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]  # (name, type, shape, offset), sorted by name


# The header of a blob follows from names, types and shapes, which are equal in all updates of a round. So the library
# writes and checks a header once. Later blobs with the same header are encoded and decoded by copying their arrays.
_cached_headers: dict[tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], tuple[bytes, tuple[str, ...]]] = {}
_cached_layouts: dict[bytes, _BlobLayout] = {}
_cache_lock: Final = threading.Lock()  # a coordinator encodes and decodes tensors in two threads
MAX_CACHED_LAYOUTS: Final = 64
MAX_CACHED_HEADER_BYTES: Final = 64 * 1024


def _header_bytes(payload: bytes) -> int:
    return 8 + int.from_bytes(payload[:8], "little")


def _cache_header(payload: bytes, arrays: Tensors) -> None:
    size = _header_bytes(payload)
    if size > MAX_CACHED_HEADER_BYTES:
        return
    header = payload[:size]
    table: dict[str, Any] = json.loads(header[8:])
    if "__metadata__" in table:
        return
    offsets = {name: size + int(entry["data_offsets"][0]) for name, entry in table.items()}
    entries = tuple((name, arrays[name].dtype, arrays[name].shape, offsets[name]) for name in sorted(arrays))
    shapes = tuple((name, dtype, shape) for name, dtype, shape, _ in entries)
    with _cache_lock:
        for cache in (_cached_headers, _cached_layouts):
            while len(cache) >= MAX_CACHED_LAYOUTS:
                cache.pop(next(iter(cache)))  # type: ignore[call-overload]
        _cached_layouts[header] = _BlobLayout(len(payload), entries)
        _cached_headers[shapes] = (header, tuple(sorted(arrays, key=lambda name: table[name]["data_offsets"])))


def pack_state(state: Any) -> bytes:
    return encode_tensors(*split_state(state))


def split_state(state: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays of a state and the metadata to restore it. Arrays on disk are not read.

    The annotations of the state's dataclasses declare its arrays. A numpy scalar is stored as an array of shape () if
    an array is annotated, and as a plain number otherwise. A value that contradicts the annotations raises TypeError.
    """
    arrays: dict[str, np.ndarray] = {}

    def encode_array(value: Any) -> Any:
        if isinstance(value, np.ndarray | _ArrayPlaceholder):
            arrays[str(len(arrays))] = value if isinstance(value, np.ndarray) else value.array
            return {"$array": len(arrays) - 1}
        raise TypeError(f"a state must not contain a {type(value).__name__}")

    skeleton = msgspec.to_builtins(
        _convert_scalars(state, type(state), type(state).__name__), enc_hook=encode_array, str_keys=True
    )
    return arrays, {"state": json.dumps(skeleton, sort_keys=False)}


class _ArrayPlaceholder:
    """Wrapper that keeps msgspec from encoding the fields of a `DiskArray` in a state's skeleton."""

    def __init__(self, array: Any) -> None:
        self.array = array


def _convert_scalars(value: Any, kind: Any, path: str) -> Any:
    if _declares_array(kind):
        if isinstance(value, np.generic):
            return np.asarray(value)
        if isinstance(value, TensorSpec) and hasattr(value, "__array__"):
            return _ArrayPlaceholder(value)
        if kind is np.ndarray and not isinstance(value, np.ndarray):
            raise TypeError(f"{path} is annotated as an array, but is a {type(value).__name__}")
        return value
    if isinstance(value, np.generic):
        return value.item()
    if (hints := _field_annotations(value.__class__)) is not None:
        return {name: _convert_scalars(getattr(value, name), hint, f"{path}.{name}") for name, hint in hints}
    if isinstance(value, Mapping):
        inner = (_type_arguments(kind, Mapping) or (Any, Any))[1]
        return {key: _convert_scalars(item, inner, f"{path}[{key!r}]") for key, item in tensor_shapes(value).items()}
    if isinstance(value, tuple | list):
        kinds = _type_arguments(kind, tuple) or _type_arguments(kind, Sequence)
        if len(kinds) != len(value) or Ellipsis in kinds:
            kinds = (kinds[0] if kinds else Any,) * len(value)
        return [
            _convert_scalars(item, inner, f"{path}[{i}]")
            for i, (item, inner) in enumerate(zip(value, kinds, strict=True))
        ]
    return value


@cache
def _declares_array(kind: Any) -> bool:
    return kind is np.ndarray or (get_origin(kind) in (Union, UnionType) and np.ndarray in get_args(kind))


@cache
def _type_arguments(kind: Any, generic: type) -> tuple[Any, ...]:
    for option in (kind, *get_args(kind)):
        origin = get_origin(option)
        if isinstance(origin, type) and issubclass(origin, generic):
            return get_args(option)
    return ()


@cache
def _field_annotations(kind: type) -> tuple[tuple[str, Any], ...] | None:
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def array_mapping_fields(kind: type) -> list[str]:
    """Return the names of a dataclass's fields that are annotated as mappings to arrays."""
    annotations = _field_annotations(kind) or ()
    return [name for name, hint in annotations if _type_arguments(hint, Mapping)[1:] == (np.ndarray,)]


def unpack_state(payload: bytes, kind: type[T]) -> T:
    """Return the bit-identical state of type `kind` from bytes of `pack_state`, or raise NoStateError."""
    try:
        arrays = safetensors.numpy.load(payload)
        (size,) = struct.unpack("<Q", payload[:8])
        metadata = json.loads(payload[8 : 8 + size])["__metadata__"]
    except (SafetensorError, ValueError, KeyError, RecursionError, struct.error) as error:
        raise NoStateError(f"not a stored {kind.__name__}: {error}") from None
    return state_from_parts(arrays, metadata, kind)


def state_from_parts(arrays: Tensors, metadata: Mapping[str, str], kind: type[T]) -> T:
    """Return the state of type `kind` from the result of `split_state`, or raise NoStateError."""

    def restore_array(array_type: type, value: Any) -> Any:
        if array_type is np.ndarray and isinstance(value, dict):
            return arrays[str(value["$array"])]
        raise ValueError(f"expected a {array_type.__name__}")  # msgspec adds the path of the value

    try:
        skeleton = json.loads(metadata["state"])
        state = msgspec.convert(skeleton, kind, dec_hook=restore_array, str_keys=True)
        require_known_fields(skeleton, state, kind.__name__)
        return state
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise NoStateError(f"not a stored {kind.__name__}: {error}") from None


def total_bytes(bundles: Iterable[Tensors]) -> int:
    return sum(array.nbytes for tensors in bundles for array in tensor_shapes(tensors).values())


def require_known_fields(stored: Any, read: Any, path: str) -> None:
    """Raise ValueError if decoding `stored` into `read` has dropped fields."""
    if not _has_fields(stored):
        return
    if is_dataclass(read) or isinstance(read, msgspec.Struct):
        field_names = (
            read.__struct_fields__ if isinstance(read, msgspec.Struct) else [field.name for field in fields(read)]
        )
        if unknown := sorted(stored.keys() - set(field_names)):
            raise ValueError(
                f"{path} has unknown fields {', '.join(unknown)}: another version of fedquilt stored the file"
            )
        pairs = [(value, getattr(read, name), f"{path}.{name}") for name, value in stored.items() if _has_fields(value)]
    elif isinstance(read, Mapping):
        parts = {str(key): value for key, value in read.items()}
        inner = {key: value for key, value in stored.items() if _has_fields(value) and key in parts}
        pairs = [(value, parts[key], f"{path}[{key!r}]") for key, value in inner.items()]
    elif isinstance(read, tuple | list) and isinstance(stored, list):
        pairs_of_items = enumerate(zip(stored, read, strict=True))
        pairs = [(value, part, f"{path}[{i}]") for i, (value, part) in pairs_of_items if _has_fields(value)]
    else:
        return
    for value, part, item_path in pairs:
        require_known_fields(value, part, item_path)


def _has_fields(stored: Any) -> bool:
    return isinstance(stored, dict | list)
