"""Exact sums of arrays, bit-identical for any order and grouping of the addends.

A sum is stored as limbs: arrays of the same shape that add up to it. Each addend is added to the first limb, the
rounding error to the second, and so on, by Knuth's error-free TwoSum (Knuth, The Art of Computer Programming, vol. 2,
4.2.2, theorem B). The limbs therefore add up to the addends exactly. They are rounded once, when the value is read
(Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997).

An addend is `array * weight` in float64: exact for float32 and integer weights below 2^29, otherwise rounded once.
Finite numbers below 1.3e154 may be added up 2^53 times.

Memory: 12 bytes per entry while a float32 second limb is exact, which holds for n devices of up to 2^14 examples whose
magnitudes in an entry differ by less than 2^40 / n^2. Then 16 bytes with a float64 second limb. A third limb is added
if magnitudes differ by more than 2^50 / n^2. Small arrays always have a float64 second limb. Within `sums_on_disk`,
limbs of large arrays are stored on the disk, and are in memory only during an addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from typing import Any, Final, TypeVar

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.arrays.disk_arrays import MAX_STATE_HEADER_BYTES, SafetensorsReader, ScratchFile
from fedquilt.core import Tensors, UpdateError
from fedquilt.host.disk import Disk, StrPath

T = TypeVar("T")
MAX_LIMBS: Final = 16  # more than sums of addable numbers need
BLOCK_ENTRIES: Final = 1 << 14  # entries added at once, so that the temporary arrays fit into a processor's cache
MIN_FLOAT32_ENTRIES: Final = 1 << 16  # size of an array whose second limb starts as float32


@dataclass(frozen=True)
class ExactSum:
    """Exact sum of floating-point arrays, or maximum of integer arrays (counters), in memory or on disk."""

    limbs: tuple[np.ndarray, ...]  # float64, then float32 or float64, or a single integer array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.limbs[0].shape

    @property
    def is_counter(self) -> bool:
        return self.limbs[0].dtype.kind in "iu"

    def rounded_value(self) -> np.ndarray:
        """Return the sum rounded to float64, without negative zeros, or the maximum of integers."""
        largest, *smaller = map(np.asarray, self.limbs)
        if self.is_counter or not smaller:
            return np.array(largest) if self.is_counter else largest + np.float64(0)
        rounded = np.asarray(largest + smaller[0], np.float64)
        if len(smaller) > 1:
            has_small_parts = np.any([limb != 0 for limb in smaller[1:]], axis=0)
            rounded[has_small_parts] = [
                math.fsum(parts) for parts in zip(*(limb[has_small_parts] for limb in (largest, *smaller)), strict=True)
            ]
        return np.add(rounded, 0.0, out=rounded)

    def mean(self, weight: float) -> np.ndarray:
        """Return the sum divided by its weight in float64, or a counter undivided."""
        return self.rounded_value() if self.is_counter else np.asarray(self.rounded_value() / weight)


def add_to_sum(total: ExactSum | None, array: np.ndarray, weight: float = 1.0) -> ExactSum:
    """Return a sum with `array * weight` added. `total` must not be used afterwards.

    Integer arrays, such as batch norm's counters of batches, are not summed: the larger value is kept for each entry.
    """
    if array.dtype.kind in "iu":
        largest = array if total is None else np.maximum(total.limbs[0], array, dtype=total.limbs[0].dtype)
        return _store_limbs((np.array(largest),), total)
    if total is None:
        product = np.asarray(np.multiply(array, weight, dtype=np.float64, order="C"))
        second = np.zeros(array.shape, np.float32 if array.size >= MIN_FLOAT32_ENTRIES else np.float64)
        return _store_limbs((product, second))
    limbs = [np.asarray(limb).reshape(-1) for limb in total.limbs]
    flat = array.reshape(-1)
    is_exact = weight == 1.0 and flat.dtype == np.float64
    for start in range(0, array.size, BLOCK_ENTRIES):
        block = slice(start, start + BLOCK_ENTRIES)
        addend = flat[block] if is_exact else np.multiply(flat[block], weight, dtype=np.float64)
        _add_to_float_expansion(limbs, block, addend)
    return _store_limbs(tuple(limb.reshape(array.shape) for limb in limbs), total)


_scratch_file: ContextVar[ScratchFile | None] = ContextVar("scratch_file", default=None)


@contextmanager
def sums_on_disk(scratch_file: ScratchFile | None) -> Iterator[None]:
    """Store large sums of a `with` block in the scratch file. With None, they stay in memory."""
    token = _scratch_file.set(scratch_file)
    try:
        yield
    finally:
        _scratch_file.reset(token)


def _store_limbs(limbs: tuple[np.ndarray, ...], previous: ExactSum | None = None) -> ExactSum:
    scratch_file = _scratch_file.get()
    if scratch_file is None:
        return ExactSum(limbs)
    limb_pairs = zip_longest(limbs, previous.limbs if previous else ())
    return ExactSum(tuple(scratch_file.store_array(limb, old_limb) for limb, old_limb in limb_pairs))  # type: ignore[misc]


def merge_sums(first: ExactSum, second: ExactSum) -> ExactSum:
    """Return the sum of two sums. `first` must not be used afterwards."""
    for limb in second.limbs:
        values = np.asarray(limb)
        if values.any():  # the second limb is often zero
            first = add_to_sum(first, values)
    return first


def add_arrays(
    total: Mapping[str, ExactSum], arrays: Mapping[str, np.ndarray], weight: float = 1.0
) -> dict[str, ExactSum]:
    """Return the sums with `array * weight` added for each name, as `add_to_sum` does."""
    return {**total, **{name: add_to_sum(total.get(name), array, weight) for name, array in arrays.items()}}


def rounded_values(total: Mapping[str, ExactSum]) -> dict[str, np.ndarray]:
    return {name: exact.rounded_value() for name, exact in total.items()}


def _add_to_float_expansion(limbs: list[np.ndarray], block: slice, remainder: np.ndarray) -> None:
    """Add numbers to a block of flat limbs in place. Add or widen a limb if precision requires it."""
    for index, limb in enumerate(limbs):
        stored = limb[block]
        total = stored + remainder
        gap = total - stored
        remainder = remainder - gap
        np.subtract(total, gap, out=gap)
        remainder += np.subtract(stored, gap, out=gap)  # the rounding error of `total`, by TwoSum
        if limb.dtype == np.float32:
            with np.errstate(over="ignore", under="ignore"):
                stored[...] = total
            if not np.array_equal(stored, total):
                limbs[index] = limb.astype(np.float64)
                limbs[index][block] = total
        else:
            stored[...] = total
        if not remainder.any():
            return
    limbs.append(np.zeros_like(limbs[0]))
    limbs[-1][block] = remainder


def require_valid_sums(sums: Mapping[str, ExactSum], reference: Tensors, weight: float) -> None:
    """Raise UpdateError if sums do not match the tensors `reference`, or are too large for this weight."""
    if unmatched_names := sorted(sums.keys() ^ reference.keys()):
        raise UpdateError(
            f"names of sums differ: {', '.join(unmatched_names[:5])}{' ...' if len(unmatched_names) > 5 else ''}"
        )
    for name, total in sums.items():
        _require_valid_sum(name, total, reference[name], weight)


def _require_valid_sum(name: str, total: ExactSum, reference: np.ndarray, weight: float) -> None:
    if not 1 <= len(total.limbs) <= MAX_LIMBS or any(limb.shape != reference.shape for limb in total.limbs):
        shapes = ", ".join(str(limb.shape) for limb in total.limbs[:MAX_LIMBS])
        expected = f"1 to {MAX_LIMBS} of shape {reference.shape}"
        raise UpdateError(f"sum {name!r} has {len(total.limbs)} parts ({shapes}) instead of {expected}")
    if reference.dtype.kind in "iu":
        if len(total.limbs) > 1:
            raise UpdateError(f"sum {name!r} has {len(total.limbs)} parts instead of one, as it is a counter")
        return tensors.require_addable({name: np.asarray(total.limbs[0])}, {name: reference})
    dtypes = [limb.dtype for limb in total.limbs]
    if dtypes[0] != np.float64 or not set(dtypes) <= {np.dtype(np.float64), np.dtype(np.float32)}:
        raise UpdateError(f"sum {name!r} has parts of {', '.join(map(str, dtypes))} instead of float64")
    limit = 2 * weight * tensors.addable_range(reference.dtype)[1]
    for limb in map(np.asarray, total.limbs):
        tensors.require_finite({name: limb})
        if limb.size and float(np.abs(limb).max()) > limit:
            raise UpdateError(f"sum {name!r} has numbers beyond {limit:g}, which are impossible for weight {weight:g}")
    return None


def merge_accumulators(first: Any, second: Any) -> Any:
    """Return two accumulators merged. `first` must not be used afterwards.

    Exact sums and integers are added. Mappings and dataclasses are merged by field, and other types by `merge_with`.
    """
    if isinstance(first, ExactSum):
        return merge_sums(first, second)
    if hasattr(first, "merge_with"):
        return first.merge_with(second)
    if isinstance(first, int):
        return first + second
    if isinstance(first, Mapping):
        merged = dict(first)
        for name, field in second.items():
            merged[name] = merge_accumulators(first[name], field) if name in first else copy_accumulator(field)
        return merged
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: merge_accumulators(getattr(first, name), getattr(second, name)) for name in names})
    raise TypeError(f"cannot merge accumulators that contain a {type(first).__name__}")


def map_limbs(
    value: Any, convert_limb: Callable[[Any], Any], convert_array: Callable[[Any], Any] = lambda array: array
) -> Any:
    """Return a copy of an accumulator, with limbs and other arrays converted by the two functions."""
    if isinstance(value, ExactSum):
        return ExactSum(tuple(convert_limb(limb) for limb in value.limbs))
    if isinstance(value, Mapping):
        return {name: map_limbs(field, convert_limb, convert_array) for name, field in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return type(value)(**{name: map_limbs(getattr(value, name), convert_limb, convert_array) for name in names})
    return convert_array(value) if isinstance(value, np.ndarray) else value


def read_accumulator(path: StrPath, kind: type[T], disk: Disk, scratch_file: ScratchFile) -> T:
    """Return the accumulator of type `kind` in a file, copied to a scratch file, or raise NoStateError.

    Only one array is in memory at a time.
    """
    try:
        reader = SafetensorsReader(path, disk, MAX_STATE_HEADER_BYTES)
        slots = {name: np.empty(0) for name in reader}
        names = {id(slot): name for name, slot in slots.items()}
        total = tensors.state_from_parts(slots, reader.metadata, kind)
        return map_limbs(total, lambda slot: scratch_file.store_array(reader[names[id(slot)]]))
    except UpdateError as error:
        raise tensors.NoStateError(f"not a stored {kind.__name__}: {error}") from None


def copy_accumulator(value: Any) -> Any:
    """Return a copy of an accumulator. Within `sums_on_disk`, large arrays are copied to the disk."""
    scratch_file = _scratch_file.get()
    return map_limbs(value, np.array if scratch_file is None else scratch_file.store_array)


@dataclass(frozen=True)
class ExactScalar:
    """Exact sum of floats. Its float value is infinity if the sum overflows."""

    parts: tuple[float, ...] = ()

    def __float__(self) -> float:
        try:
            return math.fsum(self.parts)
        except (OverflowError, ValueError):
            return math.inf

    def add_numbers(self, *numbers: float) -> ExactScalar:
        parts = list(self.parts)
        for number in numbers:
            new_parts, remainder = [], float(number)
            for part in parts:
                larger, smaller = (remainder, part) if abs(remainder) >= abs(part) else (part, remainder)
                remainder = larger + smaller
                if low := smaller - (remainder - larger):
                    new_parts.append(low)
            parts = [*new_parts, remainder]
        return ExactScalar(tuple(parts))

    def merge_with(self, addend: ExactScalar) -> ExactScalar:
        return self.add_numbers(*addend.parts)


@dataclass(frozen=True)
class WeightedSums:
    """Sums over the devices of a round: tensors times the device's weight, and the weights."""

    total: dict[str, ExactSum] = field(default_factory=dict)
    weights: ExactScalar = ExactScalar()

    @property
    def weight(self) -> float:
        return float(self.weights)

    def with_noise(self, draw: Callable[[str, tuple[int, ...]], np.ndarray]) -> WeightedSums:
        """Return the sums with float64 noise added, which `draw` returns by name and shape. Weights stay the same."""
        return WeightedSums(
            {name: add_to_sum(exact, draw(name, exact.shape)) for name, exact in self.total.items()}, self.weights
        )

    def mean(self) -> dict[str, np.ndarray]:
        return {name: exact.mean(self.weight) for name, exact in self.total.items()}
