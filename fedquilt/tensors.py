"""Tensors: arithmetic on name -> array mappings, their bytes, and storage of states. Always new arrays.

Bytes are safetensors, in sorted order of names, so that equal tensors have equal bytes and hence
one sha256. A state (a frozen dataclass of arrays, scalars, strings, tuples, mappings and further
dataclasses) is packed generically: its arrays as tensors, its shape as JSON in the header.
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

from fedquilt import known_fields
from fedquilt.core import DivergedError, StoreError, Tensors, UpdateError, derive_seed
from fedquilt.core import shapes as shapes

T = TypeVar("T")
HEADER_MOST: Final = 4 << 20  # bytes of a safetensors header: some 25,000 tensors; its own library reads 100 MB
AXES_MOST: Final = 16
COUNTED_MOST: Final = 2**53  # of a counter, so that it can still be increased


class NoStateError(StoreError):
    """Stored bytes that are no state of the type that is asked for, as another version of fedquilt writes them."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """Shape and type in place of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def layout(tensors: Tensors) -> dict[str, str]:
    """Types and shapes as an update's manifest tells them: {"fc.weight": "f4:10,64"}."""
    told = shapes(tensors).items()
    return {name: f"{a.dtype.kind}{a.dtype.itemsize}:{','.join(map(str, a.shape))}" for name, a in told}


def shaped(layout: Mapping[str, str]) -> dict[str, Shaped]:
    """The types and shapes that `layout` has told.

    Raises:
        UpdateError: something else; names the tensor.
    """
    return {name: _shaped(name, told) for name, told in layout.items()}


@lru_cache(maxsize=1 << 12)
def _shaped(name: str, told: str) -> Shaped:
    found = _LAYOUT.fullmatch(told)
    if found is None or found[2].count(",") >= AXES_MOST:
        raise UpdateError(
            f"tensor {name[:80]!r} is told as {told[:80]!r}: a type and a shape are wanted, as in f4:10,64"
        )
    return Shaped(tuple(int(size) for size in found[2].split(",") if size), np.dtype(found[1]))


_LAYOUT: Final = re.compile(r"(b1|[iu][1248]|f[248]):((?:[0-9]{1,10}(?:,[0-9]{1,10})*)?)")


def combine(function: Callable[..., np.ndarray], first: Tensors, *others: Tensors) -> Tensors:
    """Apply `function` to the arrays of the same name in every mapping.

    Raises:
        UpdateError: names or shapes differ; names them.
    """
    for other in others:
        require_like(other, first)
    return {name: np.asarray(function(array, *(other[name] for other in others))) for name, array in first.items()}


def require_like(given: Tensors, wanted: Tensors) -> None:
    """Raise UpdateError unless `given` has the names and shapes of `wanted`, and only finite numbers."""
    _require_names(given, wanted)
    for name, array in shapes(given).items():
        _require_shape(name, array, shapes(wanted)[name])
    require_finite(given)


def require_same(given: Tensors, wanted: Tensors | Mapping[str, Shaped]) -> None:
    """Check an update's tensors before they are added up.

    An integer tensor is a counter: from 0 to `COUNTED_MOST`. A floating-point number may be as large as the root of
    its type's range (1.8e19 in 32 bits), so that no sum, difference or second moment overflows.

    Raises:
        UpdateError: a name, a shape or a type differs from `wanted`, or a number is out of these bounds.
    """
    _require_names(given, wanted)
    like = shapes(wanted)
    for name, array in given.items():
        _require_shape(name, array, like[name])
        if array.dtype != like[name].dtype:
            raise UpdateError(f"tensor {name!r} is {array.dtype}, expected {like[name].dtype}")
        if array.dtype.kind not in "fiu" or not array.size:
            continue
        least, most = bounds(array.dtype)
        if not (least <= array.min() and array.max() <= most):
            require_finite({name: array})
            raise UpdateError(
                f"tensor {name!r} holds numbers from {array.min():g} to {array.max():g}, "
                f"as {array.dtype} they may be from {least:g} to {most:g}"
            )


@cache
def bounds(kind: np.dtype[Any]) -> tuple[float, float]:
    """Least and largest number of a tensor of this type that may be added up."""
    if kind.kind != "f":
        return 0, COUNTED_MOST
    most = float(np.finfo(kind).max)
    most = most if kind.itemsize < 4 else math.sqrt(most)  # 16-bit types are not used for sums
    return -most, most


def _require_names(given: Tensors, wanted: Tensors | Mapping[str, Shaped]) -> None:
    if given.keys() != wanted.keys():
        odd = sorted(given.keys() ^ wanted.keys())
        raise UpdateError(f"tensor names differ: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")


def _require_shape(name: str, array: np.ndarray | Shaped, wanted: np.ndarray | Shaped) -> None:
    if array.shape != wanted.shape:
        raise UpdateError(f"tensor {name!r} has shape {array.shape}, expected {wanted.shape}")


def require_finite(given: Tensors) -> None:
    """Raise DivergedError if a floating-point tensor holds NaN or infinity."""
    for name, array in given.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DivergedError(f"tensor {name!r} holds {int((~np.isfinite(array)).sum())} values that are not finite")


def rng(*keys: object) -> np.random.Generator:
    """Generator keyed by any values: the same keys give the same numbers on every machine."""
    return np.random.Generator(np.random.PCG64(derive_seed(*keys)))


# -- bytes ----------------------------------------------------------------------------------------


def encode(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """Encode as safetensors; equal input gives equal bytes."""
    placed = ordered(tensors)
    shapes = tuple((name, array.dtype, array.shape) for name, array in placed.items())
    known = None if metadata else _heads.get(shapes)
    if known is not None:
        head, names = known
        return b"".join((head, *(placed[name].data for name in names)))
    payload = safetensors.numpy.save(placed, metadata)
    if not metadata and all(dtype.isnative and dtype.kind in "fiub" for _, dtype, _ in shapes):
        _learn(payload, placed)
    return payload


def ordered(tensors: Tensors) -> dict[str, np.ndarray]:
    """Tensors in the order of their names, as their bytes are stored."""
    return {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}  # keeps shape ()


def decode(payload: bytes) -> dict[str, np.ndarray]:
    """Decode safetensors bytes, sorted by name.

    Raises:
        UpdateError: not safetensors.
    """
    known = _layouts.get(payload[: _head_bytes(payload)])
    if known is not None and len(payload) == known.size:
        return {
            name: np.ndarray(shape, dtype, payload, start).copy()  # the caller's own
            for name, dtype, shape, start in known.places
        }
    try:
        (size,) = struct.unpack("<Q", payload[:8])
        if size > HEADER_MOST:
            raise ValueError(f"a header of {size} bytes: {HEADER_MOST} are permitted")
        found = dict(sorted(safetensors.numpy.load(payload).items()))  # the library gives them in any order
    except (SafetensorError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise UpdateError(f"not a safetensors blob: {error}") from None
    _learn(payload, found)
    return found


def read(path: Path, sha256: str = "") -> dict[str, np.ndarray]:
    """Read the tensors in a safetensors file; `sha256` is that of its bytes, "" if it is not known.

    Raises:
        UpdateError: not safetensors.
        StoreError: unreadable, or of another sha256.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        raise StoreError(f"{path} is damaged: its bytes are not those it was stored with")
    return decode(payload)


class _Layout(NamedTuple):
    """Where tensors lie in blobs that begin with the same header."""

    size: int  # of the blob
    places: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]  # name, type, shape, where it begins; by name


# The header of a blob follows from names, types and shapes, and a round's updates have these alike. So the library
# writes and checks it once, and what follows it is copied from then on. Blobs that differ take turns in few places.
_heads: dict[tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], tuple[bytes, tuple[str, ...]]] = {}
_layouts: dict[bytes, _Layout] = {}
_learning: Final = threading.Lock()  # of both, as a coordinator's worker reads and writes tensors beside its loop
LAYOUTS_MOST: Final = 64
LEARNED_MOST: Final = 64 * 1024  # bytes of a header that is kept


def _head_bytes(payload: bytes) -> int:
    """The size of a blob's header with the number before it, as the blob tells it."""
    return 8 + int.from_bytes(payload[:8], "little")


def _learn(payload: bytes, found: Tensors) -> None:
    """Keep the header of a blob that the library has written, or has read as `found`."""
    size = _head_bytes(payload)
    if size > LEARNED_MOST:
        return
    head = payload[:size]
    table: dict[str, Any] = json.loads(head[8:])
    if "__metadata__" in table:
        return
    begins = {name: size + int(entry["data_offsets"][0]) for name, entry in table.items()}
    places = tuple((name, found[name].dtype, found[name].shape, begins[name]) for name in sorted(found))
    shapes = tuple((name, dtype, shape) for name, dtype, shape, _ in places)
    with _learning:
        for held in (_heads, _layouts):
            while len(held) >= LAYOUTS_MOST:
                held.pop(next(iter(held)))  # type: ignore[call-overload]
        _layouts[head] = _Layout(len(payload), places)
        _heads[shapes] = (head, tuple(sorted(found, key=lambda name: table[name]["data_offsets"])))


# -- states ---------------------------------------------------------------------------------------


def pack(state: Any) -> bytes:
    """Pack a whole state into one blob; errors as of `parts`."""
    return encode(*parts(state))


def parts(state: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays of a state, and the metadata that says where in it they belong. Those on the disk are not read.

    The annotations of the state's dataclasses declare its arrays. A numpy scalar, which numpy's arithmetic
    makes of arrays without axes, is stored there as an array of shape () in its own dtype; if a plain
    number is annotated, it is stored as a plain number.

    Raises:
        TypeError: the state holds something unlike its annotations, which `unpack` could not read back.
    """
    arrays: dict[str, np.ndarray] = {}

    def keep(value: Any) -> Any:
        if isinstance(value, np.ndarray | _Apart):
            arrays[str(len(arrays))] = value if isinstance(value, np.ndarray) else value.array
            return {"$array": len(arrays) - 1}
        raise TypeError(f"a state may not hold a {type(value).__name__}")

    skeleton = msgspec.to_builtins(_annotated(state, type(state), type(state).__name__), enc_hook=keep, str_keys=True)
    return arrays, {"state": json.dumps(skeleton, sort_keys=False)}


class _Apart:
    """An array on the disk, in a skeleton: msgspec takes a dataclass apart."""

    def __init__(self, array: Any) -> None:
        self.array = array


def _annotated(value: Any, kind: Any, at: str) -> Any:
    """Value with its numpy scalars as `kind` annotates them: arrays without axes, or plain numbers.

    Args:
        value: of the state, or a part of it.
        kind: annotation of the value.
        at: path within the state, for errors.
    """
    if _declares_array(kind):
        if isinstance(value, np.generic):
            return np.asarray(value)
        if isinstance(value, Shaped) and hasattr(value, "__array__"):
            return _Apart(value)
        if kind is np.ndarray and not isinstance(value, np.ndarray):
            raise TypeError(f"{at} is annotated as an array and holds a {type(value).__name__}")
        return value
    if isinstance(value, np.generic):
        return value.item()
    if (hints := _hints(value.__class__)) is not None:
        return {name: _annotated(getattr(value, name), hint, f"{at}.{name}") for name, hint in hints}
    if isinstance(value, Mapping):
        inner = (_arguments(kind, Mapping) or (Any, Any))[1]
        return {key: _annotated(each, inner, f"{at}[{key!r}]") for key, each in shapes(value).items()}
    if isinstance(value, tuple | list):
        kinds = _arguments(kind, tuple) or _arguments(kind, Sequence)
        if len(kinds) != len(value) or Ellipsis in kinds:
            kinds = (kinds[0] if kinds else Any,) * len(value)
        return [_annotated(each, inner, f"{at}[{i}]") for i, (each, inner) in enumerate(zip(value, kinds, strict=True))]
    return value


@cache
def _declares_array(kind: Any) -> bool:
    """Whether an annotation is of an array, or of one among other things."""
    return kind is np.ndarray or (get_origin(kind) in (Union, UnionType) and np.ndarray in get_args(kind))


@cache
def _arguments(kind: Any, of: type) -> tuple[Any, ...]:
    """Type arguments of a generic type, or of the alternative of a union that is a kind of `of`; (): none."""
    for each in (kind, *get_args(kind)):
        origin = get_origin(each)
        if isinstance(origin, type) and issubclass(origin, of):
            return get_args(each)
    return ()


@cache
def _hints(kind: type) -> tuple[tuple[str, Any], ...] | None:
    """Names and annotations of a dataclass's fields; None: it is none."""
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    return tuple((each.name, hints[each.name]) for each in fields(kind))


def mappings(kind: type) -> list[str]:
    """Names of a state's fields that are mappings of arrays."""
    return [name for name, hint in _hints(kind) or () if _arguments(hint, Mapping)[1:] == (np.ndarray,)]


def unpack(payload: bytes, kind: type[T]) -> T:
    """Unpack a state of type `kind` that `pack` stored, equal in every bit.

    Raises:
        NoStateError: the bytes are not a state of that type, or hold a field that it does not have.
    """
    try:
        arrays = safetensors.numpy.load(payload)
        (size,) = struct.unpack("<Q", payload[:8])
        metadata = json.loads(payload[8 : 8 + size])["__metadata__"]
    except (SafetensorError, ValueError, KeyError, RecursionError, struct.error) as error:
        raise NoStateError(f"not a stored {kind.__name__}: {error}") from None
    return whole(arrays, metadata, kind)


def whole(arrays: Tensors, metadata: Mapping[str, str], kind: type[T]) -> T:
    """A state of type `kind` from its `parts`.

    Raises:
        NoStateError: they are of no state of that type, or hold a field that it does not have.
    """

    def restore(wanted: type, value: Any) -> Any:
        if wanted is np.ndarray and isinstance(value, dict):
            return arrays[str(value["$array"])]
        raise ValueError(f"expected a {wanted.__name__}")  # msgspec adds where

    try:
        skeleton = json.loads(metadata["state"])
        state = msgspec.convert(skeleton, kind, dec_hook=restore, str_keys=True)
        known_fields.require(skeleton, state, kind.__name__)
        return state
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise NoStateError(f"not a stored {kind.__name__}: {error}") from None


def total_bytes(bundles: Iterable[Tensors]) -> int:
    """Payload bytes of several bundles."""
    return sum(array.nbytes for tensors in bundles for array in shapes(tensors).values())
